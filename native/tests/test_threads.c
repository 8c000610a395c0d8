/* test_threads.c: the real thing: workers that read, contexts of two threads that compute, somebody
 * who asks for counters meanwhile. Bytes are always right. This is what ThreadSanitizer watches. */

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "model.h"

enum { N_WORKERS = 4, N_THREADS = 2, MAX_IDS = 12 };

struct barrier {
    pthread_mutex_t lock;
    pthread_cond_t all_here;
    int n_here;
    unsigned round;
};

static void barrier_init(struct barrier *barrier) {
    pthread_mutex_init(&barrier->lock, NULL);
    pthread_cond_init(&barrier->all_here, NULL);
    barrier->n_here = 0;
    barrier->round = 0;
}

static void barrier_wait(struct barrier *barrier) {
    pthread_mutex_lock(&barrier->lock);
    const unsigned round = barrier->round;
    if (++barrier->n_here == N_THREADS) {
        barrier->n_here = 0;
        barrier->round++;
        pthread_cond_broadcast(&barrier->all_here);
    }
    while (barrier->round == round) {
        pthread_cond_wait(&barrier->all_here, &barrier->lock);
    }
    pthread_mutex_unlock(&barrier->lock);
}

static void barrier_destroy(struct barrier *barrier) {
    pthread_cond_destroy(&barrier->all_here);
    pthread_mutex_destroy(&barrier->lock);
}

/* What a llama_context does: one thread begins, all of them visit, and the same for the next part. */
struct context {
    const struct model *model;
    unsigned long long random;
    int n_passes;
    bool faults; /* zeros are allowed, if an error was latched */
    struct barrier barrier;
    struct pass pass;
    int32_t ids[MAX_IDS];
    int n_used;
    int n_tokens;
    atomic_int n_zeros;
    pthread_t threads[N_THREADS];
};

struct thread {
    struct context *context;
    int index;
};

static void choose_ids(struct context *context) {
    context->n_used = 1 + (int)(check_random(&context->random) % 4);
    context->n_tokens = check_random(&context->random) % 4 == 0 ? 3 : 1;
    for (int i = 0; i < context->n_used * context->n_tokens; i++) {
        context->ids[i] = (int32_t)(check_random(&context->random) % (unsigned)context->model->shape.n_expert);
    }
}

static void visit(struct context *context) {
    const struct pass *pass = &context->pass;
    for (int i = 0; i < pass->n; i++) {
        if (i > 0) {
            pass_release(pass, i - 1);
        }
        if (context->faults) {
            context->n_zeros += !pass_acquire_or_zeros(pass, i);
        } else {
            pass_acquire(pass, i);
        }
    }
    if (pass->n > 0) {
        pass_release(pass, pass->n - 1);
    }
}

static void *compute(void *arg) {
    const struct thread *thread = arg;
    struct context *context = thread->context;
    const struct shape *shape = &context->model->shape;
    for (int n = 0; n < context->n_passes; n++) {
        for (int part = 0; part < shape->n_parts; part++) {
            if (thread->index == 0) {
                if (part == 0) {
                    choose_ids(context);
                }
                pass_begin(&context->pass, context->model, n % shape->n_groups, part, context->ids, context->n_used,
                           context->n_tokens, N_THREADS);
            }
            barrier_wait(&context->barrier);
            visit(context);
            barrier_wait(&context->barrier);
        }
    }
    return NULL;
}

struct watcher {
    const struct model *model;
    atomic_bool stop;
    bool faults; /* makes some, too */
    int n_errors;
    pthread_t thread;
};

/* Counters only grow, and everything is consistent at any moment. */
static void *watch(void *arg) {
    struct watcher *watcher = arg;
    fm_stream *stream = watcher->model->stream;
    struct fm_stats last = {0};
    struct fm_error error;
    do {
        struct fm_stats stats = model_stats(watcher->model);
        CHECK(stats.operations >= last.operations && stats.reads >= last.reads && stats.hits <= stats.lookups);
        CHECK(stats.resident_bytes <= stats.slot_bytes);
        last = stats;
        const struct fm_group_stats group = model_group(watcher->model, 0);
        CHECK(group.n_resident >= 0 && group.n_resident <= group.n_slots);
        model_verify(watcher->model);
        if (watcher->faults) {
            fm_fault_set(stream, &(struct fm_fault){.sys_errno = EIO, .after = 5, .count = 2});
        }
        watcher->n_errors += fm_stream_take_error(stream, &error);
        sched_yield();
    } while (!watcher->stop);
    return NULL;
}

/* So many contexts on each of so many streams, all at the same time. */
static void run(const struct shape *shape, int n_streams, int n_contexts, int n_slots, int n_passes, bool faults) {
    enum { MAX = 4 };
    struct model models[MAX];
    struct watcher watchers[MAX];
    struct context contexts[MAX * MAX];
    struct thread threads[MAX * MAX][N_THREADS];
    struct fm_options options = options_for(N_WORKERS, 4);
    options.request_bytes = 8192;
    for (int s = 0; s < n_streams; s++) {
        model_create(&models[s], shape, &options);
        model_start(&models[s], n_slots, s % 2 ? "lru" : "dlfu");
        watchers[s] = (struct watcher){.model = &models[s], .faults = faults};
        CHECK_EQUAL(pthread_create(&watchers[s].thread, NULL, watch, &watchers[s]), 0);
    }
    for (int c = 0; c < n_streams * n_contexts; c++) {
        contexts[c] = (struct context){
            .model = &models[c % n_streams], .random = 0x9E3779B97F4A7C15u + (unsigned)c, .n_passes = n_passes, .faults = faults};
        barrier_init(&contexts[c].barrier);
        for (int t = 0; t < N_THREADS; t++) {
            threads[c][t] = (struct thread){.context = &contexts[c], .index = t};
            CHECK_EQUAL(pthread_create(&contexts[c].threads[t], NULL, compute, &threads[c][t]), 0);
        }
    }
    int n_zeros = 0;
    for (int c = 0; c < n_streams * n_contexts; c++) {
        for (int t = 0; t < N_THREADS; t++) {
            CHECK_EQUAL(pthread_join(contexts[c].threads[t], NULL), 0);
        }
        barrier_destroy(&contexts[c].barrier);
        n_zeros += contexts[c].n_zeros;
    }
    for (int s = 0; s < n_streams; s++) {
        watchers[s].stop = true;
        CHECK_EQUAL(pthread_join(watchers[s].thread, NULL), 0);
        struct fm_error error;
        watchers[s].n_errors += fm_stream_take_error(models[s].stream, &error);
        CHECK(faults || watchers[s].n_errors == 0);
        CHECK(n_streams > 1 || n_zeros == 0 || watchers[s].n_errors > 0);
        model_verify(&models[s]);
        const struct fm_stats stats = model_stats(&models[s]);
        CHECK_EQUAL(stats.operations, (uint64_t)n_contexts * (uint64_t)n_passes * (uint64_t)shape->n_parts);
        model_free(&models[s]);
    }
}

TEST(two_contexts_on_one_stream_with_slots) {
    run(&blocks, 1, 2, 5, 300, false);
    run(&odd, 1, 2, 3, 200, false);
}

TEST(two_contexts_on_one_stream_ring_only) {
    run(&blocks, 1, 2, 0, 200, false);
    run(&odd, 1, 2, 0, 200, false);
}

TEST(two_contexts_on_one_stream_all_resident) {
    run(&odd, 1, 2, 7, 300, false);
}

/* More contexts than the ring can serve evenly. */
TEST(four_contexts_on_one_stream) {
    run(&blocks, 1, 4, 2, 100, false);
}

TEST(two_streams_at_once) {
    run(&odd, 2, 1, 3, 200, false);
}

TEST(two_streams_with_two_contexts_each_while_reads_fail) {
    run(&odd, 2, 2, 3, 100, true);
}

TEST(two_contexts_while_reads_fail) {
    run(&blocks, 1, 2, 4, 200, true);
}

static void *release_when_waiting(void *arg) {
    fm_stream *stream = arg;
    for (int32_t n_waiting = 0; n_waiting == 0; sched_yield()) {
        pthread_mutex_lock(&stream->lock);
        n_waiting = stream->n_waiting;
        pthread_mutex_unlock(&stream->lock);
    }
    fm_fault_release(stream);
    return NULL;
}

TEST(a_thread_that_sleeps_for_an_expert_is_woken_and_counted) {
    struct model model;
    const struct fm_options options = options_for(1, 2);
    for (int n_slots = 0; n_slots < 2; n_slots++) {
        model_create(&model, &blocks, &options);
        model_start(&model, n_slots, "lru");
        fm_fault_set(model.stream, &(struct fm_fault){.hold = 1, .count = 1});
        struct pass pass;
        pass_begin(&pass, &model, 0, 0, (const int32_t[]){4}, 1, 1, 1);
        pthread_t thread;
        CHECK_EQUAL(pthread_create(&thread, NULL, release_when_waiting, model.stream), 0);
        pass_acquire(&pass, 0);
        pass_release(&pass, 0);
        CHECK_EQUAL(pthread_join(thread, NULL), 0);
        CHECK_EQUAL(model_stats(&model).waits, 1);
        CHECK(model_stats(&model).wait_ns > 0);
        model_free(&model);
    }
}
