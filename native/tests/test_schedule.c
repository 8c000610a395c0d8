/* test_schedule.c: three contexts of two threads each on one stream, played by one thread: at every
 * step a pseudo-random one of them moves, or a pseudo-random queued read runs. So every
 * interleaving is possible, and the same seed gives the same one again. After each step everything
 * must be consistent; somebody can always move, or it is a deadlock. */

#include <errno.h>
#include <string.h>

#include "model.h"

enum { N_CONTEXTS = 3, N_THREADS = 2, MAX_IDS = 24, N_STEPS = 1500 };

/* What ggml's threads do: acquire 0, (release i - 1, acquire i) .., release the last. */
struct thread {
    int at;       /* the next expert to acquire */
    bool holding; /* the one before it */
    bool zeros;   /* and it is zeros */
};

struct context {
    bool running;
    int group;
    int part;
    int32_t ids[MAX_IDS];
    int n_used;
    int n_tokens;
    struct pass pass;
    struct thread threads[N_THREADS];
    int n_operations;
    int n_zeros;
};

struct play {
    struct model model;
    struct context contexts[N_CONTEXTS];
    unsigned long long random;
    bool faults; /* zeros are allowed */
};

static int choose(struct play *play, int n) {
    return (int)(check_random(&play->random) % (unsigned)n);
}

/* The next part of the pass, or another pass; sometimes a pass ends early, as when decoding is aborted. */
static void begin(struct play *play, struct context *context) {
    const struct shape *shape = &play->model.shape;
    context->part++;
    if (context->part == shape->n_parts || context->n_operations == 0 || choose(play, 16) == 0) {
        context->part = 0;
        context->group = choose(play, shape->n_groups);
        context->n_used = 1 + choose(play, 4);
        context->n_tokens = choose(play, 3) > 0 ? 1 : 1 + choose(play, MAX_IDS / 4);
        for (int i = 0; i < context->n_used * context->n_tokens; i++) {
            context->ids[i] = choose(play, shape->n_expert);
        }
    }
    pass_begin(&context->pass, &play->model, context->group, context->part, context->ids, context->n_used,
               context->n_tokens, N_THREADS);
    memset(context->threads, 0, sizeof context->threads);
    context->running = true;
    context->n_operations++;
}

static bool can_move(const struct context *context, const struct thread *thread) {
    return thread->holding || (context->running && thread->at < context->pass.n && pass_is_ready(&context->pass, thread->at));
}

static void check_bytes(struct play *play, struct context *context, struct thread *thread, bool is_new) {
    const int i = is_new ? thread->at : thread->at - 1;
    if (!is_new && thread->zeros && !pass_is_ready(&context->pass, i)) {
        return; /* another operation is reading the failed part again: acquire would wait for it */
    }
    const bool right = pass_acquire_or_zeros(&context->pass, i);
    CHECK(right || play->faults);
    if (is_new) {
        thread->zeros = !right;
        context->n_zeros += !right;
    } else {
        CHECK(right || thread->zeros); /* bytes do not vanish while somebody computes on them */
    }
}

static void move(struct play *play, struct context *context, struct thread *thread) {
    if (thread->holding) {
        check_bytes(play, context, thread, false);
        pass_release(&context->pass, thread->at - 1);
        thread->holding = false;
    }
    if (thread->at < context->pass.n && pass_is_ready(&context->pass, thread->at)) {
        check_bytes(play, context, thread, true);
        thread->at++;
        thread->holding = true;
    }
    context->running = false;
    for (int t = 0; t < N_THREADS; t++) {
        context->running |= context->threads[t].at < context->pass.n || context->threads[t].holding;
    }
}

/* Somebody who can move does; false: nobody can. */
static bool step(struct play *play, bool may_begin) {
    const int n_movers = N_CONTEXTS * N_THREADS;
    const int first = choose(play, n_movers + 2);
    if (first >= n_movers && fm_pump(play->model.stream, choose(play, 6))) {
        return true;
    }
    for (int k = 0; k < n_movers; k++) {
        struct context *context = &play->contexts[(first + k) % n_movers / N_THREADS];
        struct thread *thread = &context->threads[(first + k) % N_THREADS];
        if (!context->running && may_begin) {
            begin(play, context);
            return true;
        }
        if (can_move(context, thread)) {
            move(play, context, thread);
            return true;
        }
    }
    return fm_pump(play->model.stream, 0);
}

static bool all_done(const struct play *play) {
    bool running = false;
    for (int c = 0; c < N_CONTEXTS; c++) {
        running |= play->contexts[c].running;
    }
    return !running;
}

static void play_seed(struct play *play, unsigned seed, const struct fm_options *options, int n_slots) {
    memset(play->contexts, 0, sizeof play->contexts);
    play->random = 0x2545F4914F6CDD1Du * (seed + 1ull);
    model_attach(&play->model, options);
    if (n_slots >= 0) {
        model_start(&play->model, n_slots, seed % 2 ? "lru" : "dlfu");
    }
    struct fm_error error;
    int n_errors = 0;
    int n_zeros = 0;
    for (int n = 0; n < N_STEPS; n++) {
        if (play->faults && choose(play, 64) == 0) {
            fm_fault_set(play->model.stream, &(struct fm_fault){.sys_errno = choose(play, 2) ? EIO : 0, .count = 1});
        }
        CHECK(step(play, true));
        model_verify(&play->model);
    }
    fm_fault_set(play->model.stream, &(struct fm_fault){0});
    while (!all_done(play)) {
        CHECK(step(play, false));
        model_verify(&play->model);
    }
    for (int c = 0; c < N_CONTEXTS; c++) {
        CHECK(play->contexts[c].n_operations > 3); /* nobody was starved */
        n_zeros += play->contexts[c].n_zeros;
    }
    n_errors = fm_stream_take_error(play->model.stream, &error);
    CHECK(n_zeros == 0 || n_errors > 0);
    CHECK(n_errors == 0 || play->faults);

    const struct fm_stats stats = model_stats(&play->model);
    CHECK(stats.ahead_used + stats.ahead_dropped <= stats.ahead_issued);
    CHECK_EQUAL(stats.inserted - stats.evicted,
                (uint64_t)model_group(&play->model, 0).n_resident + (uint64_t)model_group(&play->model, 1).n_resident);
    /* nothing is left in use: a run of everything finds the right bytes */
    play->faults = false;
    for (int g = 0; g < 2; g++) {
        run_group(&play->model, g, (const int32_t[]){0, 1, 2, 3, 4, 5, 6}, 7, 1);
    }
    CHECK_EQUAL(fm_stream_take_error(play->model.stream, &error), 0);
    model_detach(&play->model);
}

static void play_seeds(const struct shape *shape, int n_ring, bool faults) {
    struct play play;
    struct fm_options options = options_for(0, n_ring);
    options.request_bytes = 4096;
    model_write(&play.model, shape, "model");
    for (unsigned seed = 0; seed < 10; seed++) {
        play.faults = faults;
        play_seed(&play, seed, &options, (int)seed % 6 - 1);
    }
    model_free(&play.model);
}

TEST(any_interleaving_gives_the_right_bytes) {
    play_seeds(&blocks, 4, false);
    play_seeds(&odd, 3, false);
}

TEST(fewer_buffers_than_contexts) {
    play_seeds(&blocks, 2, false);
    play_seeds(&odd, 2, false);
}

TEST(any_interleaving_with_failing_reads) {
    play_seeds(&blocks, 4, true);
    play_seeds(&odd, 2, true);
}
