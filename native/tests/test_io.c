/* test_io.c: the worker pool and the files under it. Without workers the test runs each read itself. */

#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "io.h"

enum { BLOCK = FM_IO_ALIGN, N_BLOCKS = 5, TAIL = 100, FILE_BYTES = N_BLOCKS * BLOCK + TAIL };

/* What done() was told, in order. Owners are pointers into `owners`. */
static char owners[256];
static int log_owner[256];
static int log_error[256];
static atomic_int n_log;
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;

static void done(void *owner, int error) {
    pthread_mutex_lock(&log_lock);
    CHECK(n_log < 256);
    log_owner[n_log] = (int)((char *)owner - owners);
    log_error[n_log] = error;
    n_log++;
    pthread_mutex_unlock(&log_lock);
}

static uint8_t *buffer_new(size_t bytes) {
    void *buffer = NULL;
    CHECK_EQUAL(posix_memalign(&buffer, BLOCK, bytes), 0);
    memset(buffer, 0xee, bytes);
    return buffer;
}

static uint8_t byte_at(size_t offset) {
    return (uint8_t)(offset % 251 + offset / BLOCK);
}

static const char *file_new(void) {
    const char *path = check_path("blocks");
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    for (size_t i = 0; i < FILE_BYTES; i++) {
        CHECK(fputc(byte_at(i), file) != EOF);
    }
    CHECK_EQUAL(fclose(file), 0);
    return path;
}

static struct fm_io *io_new(int mode, int n_workers) {
    struct fm_io *io = fm_io_new(mode, n_workers, done);
    CHECK(io != NULL);
    CHECK_EQUAL(fm_io_open(io, file_new(), 0), 0);
    return io;
}

/* Queues a read of one block that nobody looks at; each owner has its own memory. */
static void submit(struct fm_io *io, enum fm_priority priority, int owner) {
    static uint8_t scratch[257 * BLOCK];
    uint8_t *block = scratch + (BLOCK - (uintptr_t)scratch % BLOCK) + owner * BLOCK;
    CHECK(fm_io_submit(io, priority, 0, 0, BLOCK, BLOCK, block, &owners[owner]));
}

/* Runs everything; the owners must come in this order, given as letters. */
static void expect_order(struct fm_io *io, const char *letters) {
    while (fm_io_pump(io, 0)) {
    }
    CHECK_EQUAL(n_log, strlen(letters));
    for (int i = 0; letters[i] != '\0'; i++) {
        CHECK_EQUAL(log_owner[i], letters[i]);
        CHECK_EQUAL(log_error[i], 0);
    }
    n_log = 0;
}

TEST(demand_comes_before_ahead_and_each_class_in_order) {
    struct fm_io *io = io_new(FM_IO_BUFFERED, 0);
    submit(io, FM_PRIORITY_AHEAD, 'x');
    submit(io, FM_PRIORITY_DEMAND, 'a');
    submit(io, FM_PRIORITY_AHEAD, 'y');
    submit(io, FM_PRIORITY_DEMAND, 'b');
    submit(io, FM_PRIORITY_DEMAND, 'a');
    expect_order(io, "abaxy");
    fm_io_free(io);
}

TEST(demand_overtakes_ahead_that_waits_already) {
    struct fm_io *io = io_new(FM_IO_BUFFERED, 0);
    submit(io, FM_PRIORITY_AHEAD, 'x');
    submit(io, FM_PRIORITY_AHEAD, 'y');
    CHECK(fm_io_pump(io, 0));
    submit(io, FM_PRIORITY_DEMAND, 'a');
    expect_order(io, "xay");
    fm_io_free(io);
}

TEST(pump_runs_the_read_at_a_position) {
    struct fm_io *io = io_new(FM_IO_BUFFERED, 0);
    CHECK(!fm_io_pump(io, 0));
    submit(io, FM_PRIORITY_AHEAD, 'x');
    submit(io, FM_PRIORITY_DEMAND, 'a');
    submit(io, FM_PRIORITY_DEMAND, 'b');
    CHECK(!fm_io_pump(io, 3));
    CHECK(fm_io_pump(io, 2));
    CHECK(fm_io_pump(io, 1));
    expect_order(io, "xba");
    fm_io_free(io);
}

TEST(cancel_takes_queued_ahead_reads_of_one_owner) {
    struct fm_io *io = io_new(FM_IO_BUFFERED, 0);
    submit(io, FM_PRIORITY_AHEAD, 'x');
    submit(io, FM_PRIORITY_AHEAD, 'y');
    submit(io, FM_PRIORITY_AHEAD, 'x');
    submit(io, FM_PRIORITY_DEMAND, 'x');
    CHECK_EQUAL(fm_io_cancel(io, &owners['x']), 2);
    CHECK_EQUAL(fm_io_cancel(io, &owners['x']), 0);
    CHECK_EQUAL(fm_io_cancel(io, &owners['z']), 0);
    expect_order(io, "xy");
    fm_io_free(io);
}

/* Whatever was taken out, the queue's end is where the next read goes. */
TEST(queues_stay_whole_after_first_middle_and_last_were_taken) {
    for (int taken = 0; taken < 8; taken++) {
        struct fm_io *io = io_new(FM_IO_BUFFERED, 0);
        char expected[8] = "";
        for (int i = 0; i < 3; i++) {
            submit(io, FM_PRIORITY_AHEAD, 'a' + i);
        }
        for (int i = 0; i < 3; i++) {
            if (taken >> i & 1) {
                CHECK_EQUAL(fm_io_cancel(io, &owners['a' + i]), 1);
            } else {
                expected[strlen(expected)] = (char)('a' + i);
            }
        }
        submit(io, FM_PRIORITY_AHEAD, 'd');
        submit(io, FM_PRIORITY_AHEAD, 'e');
        strcat(expected, "de");
        expect_order(io, expected);
        submit(io, FM_PRIORITY_AHEAD, 'f');
        expect_order(io, "f");
        fm_io_free(io);
    }
}

TEST(promote_moves_ahead_reads_behind_the_demanded) {
    struct fm_io *io = io_new(FM_IO_BUFFERED, 0);
    submit(io, FM_PRIORITY_AHEAD, 'x');
    submit(io, FM_PRIORITY_AHEAD, 'y');
    submit(io, FM_PRIORITY_AHEAD, 'x');
    submit(io, FM_PRIORITY_DEMAND, 'a');
    fm_io_promote(io, &owners['x'], FM_PRIORITY_DEMAND);
    CHECK_EQUAL(fm_io_cancel(io, &owners['x']), 0); /* wanted now */
    submit(io, FM_PRIORITY_DEMAND, 'b');
    submit(io, FM_PRIORITY_AHEAD, 'z');
    expect_order(io, "axxbyz");
    fm_io_free(io);
}

static void check_reads(int mode) {
    struct fm_io *io = io_new(mode, 0);
    uint8_t *buffer = buffer_new(2 * BLOCK);
    for (int first = 0; first + 2 <= N_BLOCKS; first++) {
        CHECK(fm_io_submit(io, FM_PRIORITY_DEMAND, 0, (uint64_t)first * BLOCK, 2 * BLOCK, 2 * BLOCK, buffer, owners));
        CHECK(fm_io_pump(io, 0));
        CHECK_EQUAL(log_error[first], 0);
        for (size_t i = 0; i < 2 * BLOCK; i++) {
            CHECK_EQUAL(buffer[i], byte_at((size_t)first * BLOCK + i));
        }
    }
    /* the file ends inside the last block: enough, if that is what is needed */
    n_log = 0;
    CHECK(fm_io_submit(io, FM_PRIORITY_DEMAND, 0, N_BLOCKS * BLOCK, BLOCK, TAIL, buffer, owners));
    CHECK(fm_io_submit(io, FM_PRIORITY_DEMAND, 0, N_BLOCKS * BLOCK, BLOCK, TAIL + 1, buffer, owners));
    CHECK(fm_io_submit(io, FM_PRIORITY_DEMAND, 0, (N_BLOCKS - 1) * BLOCK, 2 * BLOCK, BLOCK + TAIL, buffer, owners));
    CHECK(fm_io_submit(io, FM_PRIORITY_DEMAND, 0, (N_BLOCKS + 1) * BLOCK, BLOCK, 1, buffer, owners));
    CHECK_EQUAL((fm_io_pump(io, 0), log_error[0]), 0);
    for (size_t i = 0; i < TAIL; i++) {
        CHECK_EQUAL(buffer[i], byte_at(N_BLOCKS * BLOCK + i));
    }
    CHECK_EQUAL((fm_io_pump(io, 0), log_error[1]), FM_IO_SHORT);
    CHECK_EQUAL((fm_io_pump(io, 0), log_error[2]), 0);
    for (size_t i = 0; i < BLOCK + TAIL; i++) {
        CHECK_EQUAL(buffer[i], byte_at((N_BLOCKS - 1) * BLOCK + i));
    }
    CHECK_EQUAL((fm_io_pump(io, 0), log_error[3]), FM_IO_SHORT);

    struct fm_io_counters counters;
    fm_io_count(io, &counters);
    CHECK_EQUAL(counters.reads, N_BLOCKS - 1 + 4);
    CHECK_EQUAL(counters.bytes, (N_BLOCKS - 1) * 2 * BLOCK + TAIL + TAIL + BLOCK + TAIL);
    CHECK_EQUAL(counters.files_direct, mode == FM_IO_DIRECT);
    CHECK_EQUAL(counters.files_buffered, mode == FM_IO_BUFFERED);
    free(buffer);
    fm_io_free(io);
}

TEST(buffered_reads_bring_the_bytes_up_to_the_end_of_the_file) {
    check_reads(FM_IO_BUFFERED);
}

/* Asked the system, not the library: it must use direct I/O where there is any. */
static bool direct_is_possible(const char *path) {
#if defined(O_DIRECT)
    const int fd = open(path, O_RDONLY | O_DIRECT);
    if (fd < 0) {
        return false;
    }
    uint8_t *buffer = buffer_new(BLOCK);
    const bool works = pread(fd, buffer, BLOCK, 0) > 0;
    free(buffer);
    close(fd);
    return works;
#elif defined(F_NOCACHE)
    return access(path, R_OK) == 0;
#else
    (void)path;
    return false;
#endif
}

TEST(direct_reads_bring_the_bytes_up_to_the_end_of_the_file) {
    if (!direct_is_possible(file_new())) {
        check_skip("the file system of the test's directory has no direct I/O");
    }
    check_reads(FM_IO_DIRECT);
}

TEST(auto_mode_is_direct_where_the_file_system_allows_it) {
    struct fm_io *io = io_new(FM_IO_AUTO, 0);
    const bool possible = direct_is_possible(check_path("blocks"));
    struct fm_io_counters counters;
    fm_io_count(io, &counters);
    CHECK_EQUAL(counters.files_direct, possible);
    CHECK_EQUAL(counters.files_buffered, !possible);
    fm_io_free(io);
}

static const char no_direct_io[] = "/proc/self/status";

TEST(without_direct_io_auto_mode_falls_back_and_direct_mode_says_so) {
    if (access(no_direct_io, R_OK) != 0 || direct_is_possible(no_direct_io)) {
        check_skip("no file without direct I/O: %s", no_direct_io);
    }
    struct fm_io *io = fm_io_new(FM_IO_AUTO, 0, done);
    CHECK_EQUAL(fm_io_open(io, no_direct_io, 0), 0);
    struct fm_io_counters counters;
    fm_io_count(io, &counters);
    CHECK_EQUAL(counters.files_direct, 0);
    CHECK_EQUAL(counters.files_buffered, 1);
    fm_io_free(io);

    io = fm_io_new(FM_IO_DIRECT, 0, done);
    CHECK_EQUAL(fm_io_open(io, no_direct_io, 0), -1);
    CHECK_TEXT(fm_last_message(), "direct I/O does not work");
    CHECK_TEXT(fm_last_message(), no_direct_io);
    fm_io_free(io);
}

TEST(a_file_that_is_not_there_is_named) {
    struct fm_io *io = io_new(FM_IO_AUTO, 0);
    const char *path = check_path("nothing.gguf");
    CHECK_EQUAL(fm_io_open(io, path, 0), -1);
    CHECK_TEXT(fm_last_message(), path);
    CHECK_TEXT(fm_last_message(), strerror(ENOENT));
    CHECK_EQUAL(fm_io_open(io, check_path("blocks"), 0), 1); /* the index was not used up */
    CHECK_EQUAL(fm_io_file_size(io, 1), FILE_BYTES);
    fm_io_free(io);
}

TEST(a_real_errno_comes_through) {
    struct fm_io *io = io_new(FM_IO_BUFFERED, 0);
    void *nowhere = mmap(NULL, BLOCK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(nowhere != MAP_FAILED);
    CHECK(fm_io_submit(io, FM_PRIORITY_DEMAND, 0, 0, BLOCK, BLOCK, nowhere, owners));
    CHECK(fm_io_pump(io, 0));
    CHECK_EQUAL(log_error[0], EFAULT);
    munmap(nowhere, BLOCK);
    fm_io_free(io);
}

TEST(scripted_faults_hit_the_reads_they_name) {
    struct fm_io *io = io_new(FM_IO_BUFFERED, 0);
    fm_io_set_fault(io, &(struct fm_fault){.sys_errno = EIO, .after = 1, .count = 2});
    for (int i = 0; i < 5; i++) {
        submit(io, FM_PRIORITY_DEMAND, 'a' + i);
        CHECK(fm_io_pump(io, 0));
        CHECK_EQUAL(log_error[i], i == 1 || i == 2 ? EIO : 0);
    }
    n_log = 0;
    fm_io_set_fault(io, &(struct fm_fault){.count = 1}); /* counts from now on again */
    submit(io, FM_PRIORITY_DEMAND, 'a');
    submit(io, FM_PRIORITY_DEMAND, 'b');
    CHECK(fm_io_pump(io, 0));
    CHECK(fm_io_pump(io, 0));
    CHECK_EQUAL(log_error[0], FM_IO_SHORT);
    CHECK_EQUAL(log_error[1], 0);
    fm_io_free(io);
}

TEST(read_now_takes_any_alignment) {
    struct fm_io *io = io_new(FM_IO_AUTO, 0);
    uint8_t bytes[TAIL];
    CHECK_EQUAL(fm_io_read_now(io, 0, bytes, sizeof bytes, 4999), 0);
    for (size_t i = 0; i < sizeof bytes; i++) {
        CHECK_EQUAL(bytes[i], byte_at(4999 + i));
    }
    CHECK_EQUAL(fm_io_read_now(io, 0, bytes, TAIL, FILE_BYTES - TAIL), 0);
    CHECK_EQUAL(fm_io_read_now(io, 0, bytes, TAIL, FILE_BYTES - TAIL + 1), FM_IO_SHORT);
    fm_io_free(io);
}

static void wait_until_held(struct fm_io *io, int n) {
    while (fm_io_held(io) != n) {
        sched_yield();
    }
}

TEST(held_reads_end_after_they_are_released) {
    struct fm_io *io = io_new(FM_IO_BUFFERED, 2);
    fm_io_set_fault(io, &(struct fm_fault){.hold = 1, .count = 2});
    submit(io, FM_PRIORITY_DEMAND, 'a');
    submit(io, FM_PRIORITY_DEMAND, 'b');
    submit(io, FM_PRIORITY_DEMAND, 'c');
    wait_until_held(io, 2);
    CHECK_EQUAL(n_log, 0);
    fm_io_release_held(io);
    fm_io_free(io); /* joins */
    CHECK_EQUAL(n_log, 3);
    CHECK_EQUAL(log_error[0] + log_error[1] + log_error[2], 0);
}

/* The next fault may be set before the released threads have woken up. */
TEST(a_release_is_not_lost_when_another_fault_follows_at_once) {
    for (int round = 0; round < 20; round++) {
        struct fm_io *io = io_new(FM_IO_BUFFERED, 2);
        fm_io_set_fault(io, &(struct fm_fault){.hold = 1, .count = 1});
        submit(io, FM_PRIORITY_DEMAND, 'a');
        wait_until_held(io, 1);
        fm_io_release_held(io);
        fm_io_set_fault(io, &(struct fm_fault){.hold = 1, .count = 1});
        submit(io, FM_PRIORITY_DEMAND, 'b');
        while (n_log == 0) { /* 'a' ends although 'b' is held now */
            sched_yield();
        }
        CHECK_EQUAL(log_owner[0], 'a');
        wait_until_held(io, 1);
        fm_io_free(io); /* ends the held read too */
        CHECK_EQUAL(n_log, 2);
        n_log = 0;
    }
}

TEST(freeing_with_workers_ends_every_request_first) {
    struct fm_io *io = io_new(FM_IO_BUFFERED, 4);
    for (int i = 0; i < 200; i++) {
        submit(io, i % 2 ? FM_PRIORITY_AHEAD : FM_PRIORITY_DEMAND, i);
    }
    fm_io_free(io);
    CHECK_EQUAL(n_log, 200);
    bool seen[256] = {false};
    for (int i = 0; i < 200; i++) {
        CHECK_EQUAL(log_error[i], 0);
        CHECK(!seen[log_owner[i]]);
        seen[log_owner[i]] = true;
    }
}

TEST(freeing_without_workers_forgets_what_is_queued) {
    struct fm_io *io = io_new(FM_IO_BUFFERED, 0);
    submit(io, FM_PRIORITY_DEMAND, 'a');
    submit(io, FM_PRIORITY_AHEAD, 'b');
    fm_io_free(io);
    CHECK_EQUAL(n_log, 0);
}

TEST(a_senseless_number_of_workers_is_refused) {
    CHECK(fm_io_new(FM_IO_AUTO, -1, done) == NULL);
    CHECK_TEXT(fm_last_message(), "-1");
    CHECK(fm_io_new(FM_IO_AUTO, 1000, done) == NULL);
    CHECK_TEXT(fm_last_message(), "1000");
}
