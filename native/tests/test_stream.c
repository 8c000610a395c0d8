/* test_stream.c: the life of a stream, and arguments that make no sense: a status and a message. */

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "model.h"

static void expect_no_stream(struct fm_options options, const char *part_of_message) {
    CHECK(fm_stream_new(&options) == NULL);
    CHECK_TEXT(fm_last_message(), part_of_message);
}

TEST(senseless_options_are_refused) {
    struct fm_options options = options_for(0, 2);
    options.n_ring = 1;
    expect_no_stream(options, "1 ring buffers");
    options.n_ring = -5;
    expect_no_stream(options, "-5 ring buffers");

    options = options_for(0, 2);
    options.request_bytes = 0;
    expect_no_stream(options, "requests of 0 bytes");
    options.request_bytes = 4097;
    expect_no_stream(options, "requests of 4097 bytes");

    options = options_for(0, 2);
    options.io_mode = 3;
    expect_no_stream(options, "I/O mode 3");
    options.io_mode = -1;
    expect_no_stream(options, "I/O mode -1");

    expect_no_stream(options_for(-1, 2), "-1");
    expect_no_stream(options_for(65, 2), "65");
}

/* A file of 1000 bytes and a group of 10 experts. */
static fm_stream *described(void) {
    const struct fm_options options = options_for(0, 2);
    fm_stream *stream = fm_stream_new(&options);
    CHECK(stream != NULL);
    FILE *file = fopen(check_path("thousand"), "wb");
    CHECK(file != NULL);
    CHECK_EQUAL(fwrite((char[1000]){0}, 1, 1000, file), 1000);
    CHECK_EQUAL(fclose(file), 0);
    CHECK_EQUAL(fm_stream_add_file(stream, check_path("thousand"), 0), 0);
    CHECK_EQUAL(fm_stream_add_group(stream, 5, 0, 10), 0);
    return stream;
}

static void expect_no_part(fm_stream *stream, int group, const char *tensor, int file, uint64_t offset, uint64_t bytes,
                           const char *part_of_message) {
    CHECK_EQUAL(add_part(stream, group, tensor, file, offset, bytes), -1);
    CHECK_TEXT(fm_last_message(), part_of_message);
    CHECK_TEXT(fm_last_message(), tensor);
}

TEST(parts_must_lie_inside_their_file) {
    fm_stream *stream = described();
    expect_no_part(stream, 0, "up", 0, 0, 101, "outside its file");
    expect_no_part(stream, 0, "up", 0, 1, 100, "outside its file");
    expect_no_part(stream, 0, "up", 0, 1000, 1, "outside its file");
    expect_no_part(stream, 0, "up", 0, 1001, 1, "outside its file");
    /* sums and products that wrap around */
    expect_no_part(stream, 0, "up", 0, UINT64_MAX, 1, "outside its file");
    expect_no_part(stream, 0, "up", 0, 0, UINT64_MAX, "outside its file");
    expect_no_part(stream, 0, "up", 0, UINT64_MAX - 99, 10, "outside its file");
    expect_no_part(stream, 0, "up", 0, 0, UINT64_MAX / 10 + 2, "outside its file");
    CHECK_EQUAL(fm_stream_slot_bytes(stream, 0), 0);
    CHECK_EQUAL(add_part(stream, 0, "up", 0, 0, 100), 0);
    fm_stream_free(stream);
}

TEST(parts_must_make_sense) {
    fm_stream *stream = described();
    expect_no_part(stream, -1, "up", 0, 0, 10, "bad part");
    expect_no_part(stream, 1, "up", 0, 0, 10, "bad part");
    expect_no_part(stream, 0, "up", -1, 0, 10, "bad part");
    expect_no_part(stream, 0, "up", 1, 0, 10, "bad part");
    expect_no_part(stream, 0, "up", 0, 0, 0, "bad part");
    char name[200];
    memset(name, 'n', sizeof name);
    name[128] = '\0';
    expect_no_part(stream, 0, name, 0, 0, 10, "bad part");
    name[127] = '\0';
    CHECK_EQUAL(add_part(stream, 0, name, 0, 0, 10), 0);
    for (int p = 1; p < 4; p++) {
        CHECK_EQUAL(add_part(stream, 0, "part", 0, 0, 10), p);
    }
    expect_no_part(stream, 0, "fifth", 0, 0, 10, "bad part");
    fm_stream_free(stream);
}

TEST(groups_must_have_experts) {
    fm_stream *stream = described();
    CHECK_EQUAL(fm_stream_add_group(stream, 6, 0, 0), -1);
    CHECK_TEXT(fm_last_message(), "layer 6");
    CHECK_EQUAL(fm_stream_add_group(stream, 6, 0, -1), -1);
    CHECK_EQUAL(fm_stream_add_group(stream, 6, 0, 1), 1);
    fm_stream_free(stream);
}

TEST(a_missing_file_is_named) {
    fm_stream *stream = described();
    CHECK_EQUAL(fm_stream_add_file(stream, check_path("part-00002-of-00003.gguf"), 0), -1);
    CHECK_TEXT(fm_last_message(), "part-00002-of-00003.gguf");
    fm_stream_free(stream);
}

TEST(sizes_are_known_before_anything_is_allocated) {
    struct model model;
    const struct fm_options options = options_for(0, 6);
    model_create(&model, &blocks, &options);
    CHECK_EQUAL(fm_stream_slot_bytes(model.stream, 0), 3 * 4096); /* aligned: no slack */
    CHECK_EQUAL(fm_stream_ring_bytes(model.stream), 6 * 4096);
    CHECK_EQUAL(fm_stream_slot_bytes(model.stream, 2), 0);
    CHECK_EQUAL(fm_stream_slot_bytes(model.stream, -1), 0);
    model_free(&model);
    model_create(&model, &odd, &options);
    /* 5008, 9999 and 144 bytes that can begin anywhere in a block */
    CHECK_EQUAL(fm_stream_slot_bytes(model.stream, 1), (3 + 4 + 2) * 4096);
    CHECK_EQUAL(fm_stream_ring_bytes(model.stream), 6 * 4 * 4096);
    model_free(&model);
}

static int32_t start(fm_stream *stream, int32_t n_slots, const char *policy) {
    return fm_stream_start(stream, &n_slots, policy);
}

TEST(open_and_start_come_once_and_in_this_order) {
    fm_stream *stream = described();
    CHECK_EQUAL(fm_stream_open(stream), FM_BAD_STATE); /* no part yet */
    CHECK_EQUAL(add_part(stream, 0, "up", 0, 0, 100), 0);
    CHECK_EQUAL(start(stream, 1, "lru"), FM_BAD_STATE);
    CHECK_TEXT(fm_last_message(), "not open");
    CHECK_EQUAL(fm_stream_open(stream), FM_OK);
    CHECK_EQUAL(fm_stream_open(stream), FM_BAD_STATE);
    CHECK_TEXT(fm_last_message(), "open already");
    CHECK_EQUAL(fm_stream_add_file(stream, check_path("thousand"), 0), -1);
    CHECK_TEXT(fm_last_message(), "open already");
    CHECK_EQUAL(fm_stream_add_group(stream, 6, 0, 1), -1);
    CHECK_EQUAL(add_part(stream, 0, "gate", 0, 0, 100), -1);

    CHECK_EQUAL(start(stream, 1, "best"), FM_BAD_ARGUMENT);
    CHECK_TEXT(fm_last_message(), "'best'");
    CHECK_EQUAL(start(stream, -1, "lru"), FM_BAD_ARGUMENT);
    CHECK_TEXT(fm_last_message(), "-1 slots for 10 experts");
    CHECK_EQUAL(start(stream, 11, "lru"), FM_BAD_ARGUMENT);
    CHECK_TEXT(fm_last_message(), "11 slots for 10 experts");
    CHECK_EQUAL(start(stream, 10, "dlfu"), FM_OK); /* a refused start does no harm */
    CHECK_EQUAL(start(stream, 10, "dlfu"), FM_BAD_STATE);
    CHECK_TEXT(fm_last_message(), "started already");
    CHECK_EQUAL(fm_stream_verify(stream), FM_OK);
    fm_stream_free(stream);
}

TEST(a_start_without_slots_is_a_start) {
    fm_stream *stream = described();
    CHECK_EQUAL(add_part(stream, 0, "up", 0, 0, 100), 0);
    CHECK_EQUAL(fm_stream_open(stream), FM_OK);
    CHECK_EQUAL(start(stream, 0, "lru"), FM_OK);
    CHECK_EQUAL(start(stream, 1, "lru"), FM_BAD_STATE);
    fm_stream_free(stream);
}

TEST(a_stream_can_be_freed_at_any_time) {
    fm_stream_free(NULL);
    const struct fm_options options = options_for(3, 2);
    fm_stream_free(fm_stream_new(&options));
    fm_stream_free(described());
    fm_stream *stream = described();
    CHECK_EQUAL(add_part(stream, 0, "up", 0, 0, 100), 0);
    CHECK_EQUAL(fm_stream_open(stream), FM_OK);
    fm_stream_free(stream);
}

TEST(questions_before_open_have_answers) {
    fm_stream *stream = described();
    struct fm_stats stats;
    fm_stream_stats(stream, &stats);
    CHECK_EQUAL(stats.ring_bytes, 0);
    CHECK_EQUAL(stats.files_buffered, 1);
    struct fm_group_stats group;
    CHECK_EQUAL(fm_stream_group_stats(stream, 0, &group), FM_OK);
    CHECK_EQUAL(group.layer, 5);
    CHECK_EQUAL(group.n_expert, 10);
    CHECK_EQUAL(group.n_bound, 0);
    CHECK_EQUAL(fm_stream_group_stats(stream, 1, &group), FM_BAD_ARGUMENT);
    CHECK_TEXT(fm_last_message(), "no group 1");
    CHECK_EQUAL(fm_stream_group_stats(stream, -1, &group), FM_BAD_ARGUMENT);
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(stream, &error), 0);
    CHECK_EQUAL(fm_stream_verify(stream), FM_OK);
    CHECK_EQUAL(fm_pump(stream, 0), 0);
    CHECK_EQUAL(fm_fault_held(stream), 0);
    fm_stream_free(stream);
}

TEST(experts_may_come_from_several_files) {
    struct model model;
    model_write(&model, &odd, "second");
    fm_stream *stream = described(); /* a file of zeros is the first */
    model.stream = stream;
    CHECK_EQUAL(fm_stream_add_file(stream, model.path, 0), 1);
    CHECK_EQUAL(add_part(stream, 0, "up", 0, 0, 100), 0);
    CHECK_EQUAL(fm_stream_add_group(stream, 6, 0, model.shape.n_expert), 1);
    CHECK_EQUAL(add_part(stream, 1, "up", 1, model.offsets[1][0], model.shape.part_bytes[0]), 0);
    CHECK_EQUAL(fm_stream_open(stream), FM_OK);
    CHECK_EQUAL(fm_stream_start(stream, (const int32_t[]){1, 1}, "lru"), FM_OK);
    run_part(&model, 1, 0, (const int32_t[]){3, 6}, 2, 1);
    CHECK_EQUAL(model_stats(&model).files_buffered, 2);
    model_free(&model);
}

static void *fail_in_thread(void *arg) {
    CHECK_EQUAL(strlen(fm_last_message()), 0);
    struct fm_options options = options_for(0, *(int *)arg);
    CHECK(fm_stream_new(&options) == NULL);
    CHECK_TEXT(fm_last_message(), "-7 ring buffers");
    return NULL;
}

TEST(each_thread_has_its_own_message) {
    struct fm_options options = options_for(0, -3);
    CHECK(fm_stream_new(&options) == NULL);
    pthread_t thread;
    int n_ring = -7;
    CHECK_EQUAL(pthread_create(&thread, NULL, fail_in_thread, &n_ring), 0);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_TEXT(fm_last_message(), "-3 ring buffers");
}

TEST(a_long_message_is_cut) {
    fm_stream *stream = described();
    char path[2000];
    memset(path, 'p', sizeof path);
    path[sizeof path - 1] = '\0';
    CHECK_EQUAL(fm_stream_add_file(stream, path, 0), -1);
    CHECK(strlen(fm_last_message()) < 600);
    CHECK_TEXT(fm_last_message(), "cannot open ppp");
    fm_stream_free(stream);
}
