/* io.c: the worker pools, one per drive. Owns the queues, the threads and the open files. A worker
 * sleeps until there is a request for its drive, takes the most urgent, wakes another if there are more,
 * reads, and reports. Whoever submits wakes one at most: it computes. Faults for tests are injected here,
 * between the queue and the file, so that everything above runs as in production. */

#include "io.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"

/* Idle reads at a time on one drive: what is in flight delays a demand that comes meanwhile. */
enum { MAX_WORKERS = 64, MAX_FILES = 4096, MAX_DRIVES = 64, MAX_IDLE = 2 };

struct request {
    struct request *next;
    void *owner;
    void *dst;
    uint64_t offset;
    size_t bytes;
    size_t need;
    int file;
    bool idle;
};

struct queue {
    struct request *head;
    struct request **tail;
};

/* What is read from one drive, and who reads it. */
struct drive {
    struct fm_io *io;
    struct queue queues[FM_PRIORITY_COUNT];
    pthread_cond_t wake;
    pthread_t workers[MAX_WORKERS];
    int n_workers;
    int n_sleeping; /* workers */
    bool waking;    /* one of them is on its way */
    int n_idle;     /* idle reads that its workers have begun */
};

struct file {
    struct fm_file *file;
    struct drive *drive;
};

struct fm_io {
    fm_io_done done;
    int mode;
    int n_workers; /* per drive */
    struct file *files;
    int n_files;
    struct drive *drives[MAX_DRIVES]; /* set before the first request */
    int n_drives;

    pthread_mutex_t lock; /* guards everything below, and the queues of all drives */
    struct request *free_requests;
    bool stopping;
    struct fm_fault fault;
    uint64_t fault_seen;
    int held;
    uint64_t releases; /* a number, not a flag: the next fault may come before the released have woken */
    pthread_cond_t held_wake;

    atomic_uint_fast64_t reads;
    atomic_uint_fast64_t bytes;
};

static void queue_push(struct queue *q, struct request *r) {
    r->next = NULL;
    *q->tail = r;
    q->tail = &r->next;
}

/* Unlinks the request that *link points at. */
static struct request *queue_take(struct queue *q, struct request **link) {
    struct request *r = *link;
    *link = r->next;
    if (q->tail == &r->next) {
        q->tail = link;
    }
    return r;
}

/* The queue whose first request is to be read next; NULL: none now. Lock held. */
static struct queue *first_queue(struct drive *drive) {
    for (int p = 0; p < FM_PRIORITY_IDLE; p++) {
        if (drive->queues[p].head != NULL) {
            return &drive->queues[p];
        }
    }
    struct queue *idle = &drive->queues[FM_PRIORITY_IDLE];
    /* the worker whose idle read ends takes the next */
    return idle->head != NULL && drive->n_idle < MAX_IDLE ? idle : NULL;
}

/* The most urgent request of a drive. Lock held. */
static struct request *take_first(struct drive *drive) {
    struct queue *queue = first_queue(drive);
    if (queue == NULL) {
        return NULL;
    }
    struct request *r = queue_take(queue, &queue->head);
    r->idle = queue == &drive->queues[FM_PRIORITY_IDLE];
    drive->n_idle += r->idle;
    return r;
}

/* Does a worker have to be woken? Then it counts as woken. Lock held. */
static bool must_wake(struct drive *drive) {
    const bool must = !drive->waking && drive->n_sleeping > 0 && first_queue(drive) != NULL;
    drive->waking |= must;
    return must;
}

/* The request at this position of the order in which they would run, were there one thread for all
 * drives. Lock held. */
static struct request *take_at(struct fm_io *io, int index) {
    for (int p = 0; p < FM_PRIORITY_COUNT; p++) {
        for (int d = 0; d < io->n_drives; d++) {
            struct queue *q = &io->drives[d]->queues[p];
            for (struct request **link = &q->head; *link != NULL; link = &(*link)->next) {
                if (index-- == 0) {
                    return queue_take(q, link);
                }
            }
        }
    }
    return NULL;
}

enum fault_kind { FAULT_NONE, FAULT_FAIL, FAULT_HOLD };

/* Does the scripted fault hit the read that begins now? Lock held. */
static enum fault_kind fault_for_next_read(struct fm_io *io) {
    if (io->fault.count == 0) {
        return FAULT_NONE;
    }
    const uint64_t n = io->fault_seen++;
    if (n < io->fault.after || n - io->fault.after >= io->fault.count) {
        return FAULT_NONE;
    }
    return io->fault.hold ? FAULT_HOLD : FAULT_FAIL;
}

static int do_read(struct fm_io *io, const struct request *r, enum fault_kind fault, int fault_errno) {
    if (fault == FAULT_FAIL) {
        return fault_errno > 0 ? fault_errno : FM_IO_SHORT;
    }
    const ssize_t n = fm_file_read(io->files[r->file].file, r->dst, r->bytes, r->offset);
    if (n < 0) {
        return (int)-n;
    }
    atomic_fetch_add_explicit(&io->reads, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&io->bytes, (uint64_t)n, memory_order_relaxed);
    return (size_t)n < r->need ? FM_IO_SHORT : 0;
}

/* Runs one request that is off the queue. Called and returns with the lock held. */
static void run(struct fm_io *io, struct request *r) {
    const enum fault_kind fault = fault_for_next_read(io);
    const int fault_errno = io->fault.sys_errno;
    if (fault == FAULT_HOLD) {
        const uint64_t releases = io->releases;
        io->held++;
        while (io->releases == releases && !io->stopping) {
            pthread_cond_wait(&io->held_wake, &io->lock);
        }
        io->held--;
    }
    pthread_mutex_unlock(&io->lock);
    const int error = do_read(io, r, fault, fault_errno);
    io->done(r->owner, error);
    pthread_mutex_lock(&io->lock);
    if (r->idle) {
        io->files[r->file].drive->n_idle--;
    }
    r->next = io->free_requests;
    io->free_requests = r;
}

static void *worker(void *arg) {
    struct drive *drive = arg;
    struct fm_io *io = drive->io;
    pthread_mutex_lock(&io->lock);
    for (;;) {
        struct request *r = take_first(drive);
        if (r != NULL) {
            if (must_wake(drive)) {
                pthread_cond_signal(&drive->wake);
            }
            run(io, r);
        } else if (io->stopping) {
            break;
        } else {
            drive->n_sleeping++;
            pthread_cond_wait(&drive->wake, &io->lock);
            drive->n_sleeping--;
            drive->waking = false;
        }
    }
    pthread_mutex_unlock(&io->lock);
    return NULL;
}

/* A drive more with its workers; false with a message. What has started, fm_io_free ends. */
static bool add_drive(struct fm_io *io) {
    struct drive *drive = calloc(1, sizeof *drive);
    if (drive == NULL) {
        fm_fail(FM_NO_MEMORY, "out of memory starting the reading threads");
        return false;
    }
    drive->io = io;
    for (int p = 0; p < FM_PRIORITY_COUNT; p++) {
        drive->queues[p].tail = &drive->queues[p].head;
    }
    pthread_cond_init(&drive->wake, NULL);
    io->drives[io->n_drives++] = drive;
    for (; drive->n_workers < io->n_workers; drive->n_workers++) {
        const int error = pthread_create(&drive->workers[drive->n_workers], NULL, worker, drive);
        if (error != 0) {
            fm_fail(FM_NO_MEMORY, "cannot start a reading thread: %s", strerror(error));
            return false;
        }
    }
    return true;
}

static void free_requests(struct request *r) {
    for (struct request *next; r != NULL; r = next) {
        next = r->next;
        free(r);
    }
}

struct fm_io *fm_io_new(int mode, int n_workers, fm_io_done done) {
    if (n_workers < 0 || n_workers > MAX_WORKERS) {
        fm_fail(FM_BAD_ARGUMENT, "between 0 and %d reading threads, not %d", MAX_WORKERS, n_workers);
        return NULL;
    }
    struct fm_io *io = calloc(1, sizeof *io);
    if (io == NULL) {
        fm_fail(FM_NO_MEMORY, "out of memory starting the reading threads");
        return NULL;
    }
    io->mode = mode;
    io->n_workers = n_workers;
    io->done = done;
    pthread_mutex_init(&io->lock, NULL);
    pthread_cond_init(&io->held_wake, NULL);
    if (!add_drive(io)) {
        fm_io_free(io);
        return NULL;
    }
    return io;
}

void fm_io_free(struct fm_io *io) {
    if (io == NULL) {
        return;
    }
    pthread_mutex_lock(&io->lock);
    io->stopping = true;
    for (int d = 0; d < io->n_drives; d++) {
        pthread_cond_broadcast(&io->drives[d]->wake);
    }
    pthread_cond_broadcast(&io->held_wake);
    pthread_mutex_unlock(&io->lock);
    for (int d = 0; d < io->n_drives; d++) {
        struct drive *drive = io->drives[d];
        for (int i = 0; i < drive->n_workers; i++) {
            pthread_join(drive->workers[i], NULL);
        }
        for (int p = 0; p < FM_PRIORITY_COUNT; p++) {
            free_requests(drive->queues[p].head);
        }
        pthread_cond_destroy(&drive->wake);
        free(drive);
    }
    free_requests(io->free_requests);
    for (int i = 0; i < io->n_files; i++) {
        fm_file_close(io->files[i].file);
    }
    free(io->files);
    pthread_cond_destroy(&io->held_wake);
    pthread_mutex_destroy(&io->lock);
    free(io);
}

int fm_io_open(struct fm_io *io, const char *path, int drive) {
    if (io->n_files >= MAX_FILES) {
        fm_fail(FM_BAD_ARGUMENT, "more than %d files", MAX_FILES);
        return -1;
    }
    if (drive < 0 || drive > io->n_drives || drive >= MAX_DRIVES) {
        fm_fail(FM_BAD_ARGUMENT, "%d is no drive for %s: there are %d", drive, path, io->n_drives);
        return -1;
    }
    struct file *files = realloc(io->files, ((size_t)io->n_files + 1) * sizeof *files);
    if (files == NULL) {
        fm_fail(FM_NO_MEMORY, "out of memory opening %s", path);
        return -1;
    }
    io->files = files;
    struct fm_file *file = fm_file_open(path, io->mode);
    if (file == NULL) {
        return -1;
    }
    if (drive == io->n_drives && !add_drive(io)) {
        fm_file_close(file);
        return -1;
    }
    files[io->n_files] = (struct file){.file = file, .drive = io->drives[drive]};
    return io->n_files++;
}

uint64_t fm_io_file_size(const struct fm_io *io, int file) {
    return fm_file_size(io->files[file].file);
}

bool fm_io_submit(struct fm_io *io, enum fm_priority priority, int file, uint64_t offset, size_t bytes,
                  size_t need, void *dst, void *owner) {
    struct drive *drive = io->files[file].drive;
    bool wake = false;
    pthread_mutex_lock(&io->lock);
    struct request *r = io->free_requests;
    if (r != NULL) {
        io->free_requests = r->next;
    } else {
        r = malloc(sizeof *r);
    }
    if (r != NULL) {
        *r = (struct request){.owner = owner, .dst = dst, .offset = offset, .bytes = bytes, .need = need, .file = file};
        queue_push(&drive->queues[priority], r);
        wake = must_wake(drive);
    }
    pthread_mutex_unlock(&io->lock);
    if (wake) {
        pthread_cond_signal(&drive->wake); /* not before: it would wait for the lock at once */
    }
    return r != NULL;
}

int fm_io_cancel(struct fm_io *io, const void *owner) {
    int n = 0;
    pthread_mutex_lock(&io->lock);
    for (int d = 0; d < io->n_drives; d++) {
        for (int p = FM_PRIORITY_AHEAD; p < FM_PRIORITY_COUNT; p++) {
            struct queue *q = &io->drives[d]->queues[p];
            for (struct request **link = &q->head; *link != NULL;) {
                if ((*link)->owner != owner) {
                    link = &(*link)->next;
                    continue;
                }
                struct request *r = queue_take(q, link);
                r->next = io->free_requests;
                io->free_requests = r;
                n++;
            }
        }
    }
    pthread_mutex_unlock(&io->lock);
    return n;
}

/* Moves this owner's requests from one queue to another of the same drive; false: there were none. */
static bool move(struct queue *from, struct queue *to, const void *owner) {
    bool moved = false;
    for (struct request **link = &from->head; *link != NULL;) {
        if ((*link)->owner == owner) {
            queue_push(to, queue_take(from, link));
            moved = true;
        } else {
            link = &(*link)->next;
        }
    }
    return moved;
}

void fm_io_promote(struct fm_io *io, const void *owner, enum fm_priority priority) {
    pthread_mutex_lock(&io->lock);
    for (int d = 0; d < io->n_drives; d++) {
        struct drive *drive = io->drives[d];
        for (int p = priority + 1; p < FM_PRIORITY_COUNT; p++) {
            /* workers may sleep although idle requests are queued */
            if (move(&drive->queues[p], &drive->queues[priority], owner) && must_wake(drive)) {
                pthread_cond_signal(&drive->wake);
            }
        }
    }
    pthread_mutex_unlock(&io->lock);
}

int fm_io_read_now(struct fm_io *io, int file, void *dst, size_t bytes, uint64_t offset) {
    const ssize_t n = fm_file_read_buffered(io->files[file].file, dst, bytes, offset);
    if (n < 0) {
        return (int)-n;
    }
    return (size_t)n < bytes ? FM_IO_SHORT : 0;
}

void fm_io_count(struct fm_io *io, struct fm_io_counters *counters) {
    *counters = (struct fm_io_counters){.reads = atomic_load(&io->reads), .bytes = atomic_load(&io->bytes)};
    for (int i = 0; i < io->n_files; i++) {
        if (fm_file_is_direct(io->files[i].file)) {
            counters->files_direct++;
        } else {
            counters->files_buffered++;
        }
    }
}

void fm_io_set_fault(struct fm_io *io, const struct fm_fault *fault) {
    pthread_mutex_lock(&io->lock);
    io->fault = *fault;
    io->fault_seen = 0;
    pthread_mutex_unlock(&io->lock);
}

void fm_io_release_held(struct fm_io *io) {
    pthread_mutex_lock(&io->lock);
    io->releases++;
    if (io->fault.hold) {
        io->fault.count = 0; /* holds nothing more */
    }
    pthread_cond_broadcast(&io->held_wake);
    pthread_mutex_unlock(&io->lock);
}

int fm_io_held(struct fm_io *io) {
    pthread_mutex_lock(&io->lock);
    const int n = io->held;
    pthread_mutex_unlock(&io->lock);
    return n;
}

bool fm_io_pump(struct fm_io *io, int index) {
    pthread_mutex_lock(&io->lock);
    struct request *r = take_at(io, index);
    if (r != NULL) {
        run(io, r);
    }
    pthread_mutex_unlock(&io->lock);
    return r != NULL;
}
