/* test_faults.c: reads that fail, come up short or come late, at every place of a short run. Whatever
 * is not the right bytes is zeros with an error latched, and the cache works again afterwards. */

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "model.h"

/* A run that uses slots and ring, hits, evicts, guesses: tokens of three experts, then a batch. */
static const int32_t tokens[][3] = {{0, 1, 2}, {2, 4, 6}, {0, 5, 1}};
static const int32_t batch[] = {6, 5, 4, 3, 2, 1, 0, 0};

enum { N_POSITIONS = 36 };

/* The first part that was zeros, and how many. */
struct zeros {
    int n;
    int group;
    int part;
    int expert;
};

static void visit(const struct model *model, int group, int part, const int32_t *ids, int n_used, int n_tokens,
                  struct zeros *zeros) {
    struct pass pass;
    pass_begin(&pass, model, group, part, ids, n_used, n_tokens, 1);
    for (int i = 0; i < pass.n; i++) {
        if (model->stream->options.n_workers == 0) {
            pass_pump(&pass, i);
        }
        if (!pass_acquire_or_zeros(&pass, i) && zeros->n++ == 0) {
            zeros->group = group;
            zeros->part = part;
            zeros->expert = pass.order[i];
        }
        pass_release(&pass, i);
        model_verify(model);
    }
}

static struct zeros run(const struct model *model) {
    struct zeros zeros = {0};
    for (int t = 0; t < 3; t++) {
        for (int g = 0; g < model->shape.n_groups; g++) {
            for (int p = 0; p < model->shape.n_parts; p++) {
                visit(model, g, p, tokens[t], 3, 1, &zeros);
            }
        }
    }
    for (int g = 0; g < model->shape.n_groups; g++) {
        for (int p = 0; p < model->shape.n_parts; p++) {
            visit(model, g, p, batch, 2, 4, &zeros);
        }
    }
    return zeros;
}

static void check_error(const struct model *model, const struct fm_error *error, int sys_errno) {
    CHECK_EQUAL(error->status, FM_IO_ERROR);
    CHECK_EQUAL(error->sys_errno, sys_errno);
    CHECK_EQUAL(error->file, model->file);
    CHECK(error->layer >= 10 && error->layer < 10 + model->shape.n_groups);
    CHECK(error->expert >= 0 && error->expert < model->shape.n_expert);
    CHECK(error->part >= 0 && error->part < model->shape.n_parts);
    char name[64];
    snprintf(name, sizeof name, "blk.%d.part_%d.weight", error->layer, error->part);
    CHECK(strcmp(error->tensor, name) == 0);
}

/* One fault at every position. */
static void fail_everywhere(const struct shape *shape, int n_slots, int sys_errno) {
    struct model model;
    model_write(&model, shape, "model");
    struct fm_options options = options_for(0, 3);
    options.request_bytes = 4096; /* parts of odd sizes: several reads each */
    int n_zeros = 0;
    for (int position = 0; position < N_POSITIONS; position++) {
        model_attach(&model, &options);
        model_start(&model, n_slots, position % 2 ? "lru" : "dlfu");
        fm_fault_set(model.stream, &(struct fm_fault){.sys_errno = sys_errno, .after = (uint64_t)position, .count = 1});
        const struct zeros zeros = run(&model);
        n_zeros += zeros.n > 0;
        /* latched once; a failed guess that was dropped meanwhile harms nobody */
        struct fm_error error;
        if (fm_stream_take_error(model.stream, &error)) {
            check_error(&model, &error, sys_errno);
            CHECK_EQUAL(error.count, 1);
            CHECK_EQUAL(model_stats(&model).failed_loads, 1);
            CHECK(zeros.n <= 1);
            if (zeros.n > 0) {
                CHECK_EQUAL(error.layer, zeros.group + 10);
                CHECK_EQUAL(error.part, zeros.part);
                CHECK_EQUAL(error.expert, zeros.expert);
            }
        } else {
            CHECK_EQUAL(zeros.n, 0);
            CHECK_EQUAL(model_stats(&model).failed_loads, 0);
        }
        CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
        CHECK_EQUAL(error.count, 0);
        /* and all is well again */
        CHECK_EQUAL(run(&model).n, 0);
        CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
        model_detach(&model);
    }
    CHECK(n_zeros > 4); /* a fault in the demanded part is seen, one in a part read early is mended in time */
    model_free(&model);
}

TEST(an_error_at_every_position) {
    fail_everywhere(&blocks, 4, EIO);
    fail_everywhere(&blocks, 0, EIO);
    fail_everywhere(&odd, 4, EIO);
}

TEST(a_short_read_at_every_position) {
    fail_everywhere(&blocks, 4, 0);
    fail_everywhere(&odd, 2, 0);
}

TEST(every_read_fails) {
    struct model model;
    const struct fm_options options = options_for(0, 3);
    model_create(&model, &odd, &options);
    model_start(&model, 2, "lru");
    fm_fault_set(model.stream, &(struct fm_fault){.sys_errno = ENXIO, .count = UINT64_MAX});
    const struct zeros zeros = run(&model);
    CHECK_EQUAL(zeros.n, 2 * 3 * (3 * 3 + 7));
    CHECK_EQUAL(zeros.expert, 0);
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 1);
    check_error(&model, &error, ENXIO);
    CHECK_EQUAL(error.count, model_stats(&model).failed_loads);
    CHECK_EQUAL(error.layer, 10); /* the first one */
    CHECK_EQUAL(error.part, 0);
    CHECK_EQUAL(error.expert, 0);
    fm_fault_set(model.stream, &(struct fm_fault){0});
    CHECK_EQUAL(run(&model).n, 0);
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
    model_free(&model);
}

/* The part of a resident expert is read again by the next operation that wants it, and only that. */
TEST(a_failed_part_in_a_slot_is_read_again) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &blocks, &options);
    model_start(&model, 2, "lru");
    fm_fault_set(model.stream, &(struct fm_fault){.sys_errno = EIO, .count = 1});
    struct zeros zeros = {0};
    for (int p = 0; p < 3; p++) {
        visit(&model, 0, p, tokens[0], 2, 1, &zeros);
    }
    CHECK_EQUAL(zeros.n, 1);
    CHECK_EQUAL(model_stats(&model).reads, 5); /* six, less the one that failed */
    run_group(&model, 0, tokens[0], 2, 1);
    CHECK_EQUAL(model_stats(&model).reads, 6);
    CHECK_EQUAL(model_stats(&model).hits, 2);
    model_free(&model);
}

/* Both threads of an operation, and both of another, get something from a part that failed. */
TEST(everybody_who_waits_for_a_failed_part_goes_on) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &blocks, &options);
    model_start(&model, 1, "lru");
    fm_fault_set(model.stream, &(struct fm_fault){.sys_errno = EIO, .count = 1});
    struct pass first;
    struct pass second;
    pass_begin(&first, &model, 0, 0, tokens[0], 1, 1, 2);
    pass_begin(&second, &model, 0, 0, tokens[0], 1, 1, 2);
    pass_pump(&first, 0);
    for (int thread = 0; thread < 2; thread++) {
        CHECK(!pass_acquire_or_zeros(&first, 0));
        pass_release(&first, 0);
        CHECK(!pass_acquire_or_zeros(&second, 0));
        pass_release(&second, 0);
    }
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 1);
    CHECK_EQUAL(error.count, 1);
    run_group(&model, 0, tokens[0], 1, 1);
    model_free(&model);
}

/* The file is cut while the model is in use. */
TEST(a_file_that_became_shorter) {
    struct model model;
    const struct fm_options options = options_for(0, 3);
    model_create(&model, &odd, &options);
    model_start(&model, 2, "lru");
    CHECK_EQUAL(truncate(model.path, (off_t)model.image_bytes - 1), 0);
    struct zeros zeros = {0};
    visit(&model, 1, 2, (const int32_t[]){5, 6}, 2, 1, &zeros);
    CHECK_EQUAL(zeros.n, 1); /* the last byte of the last part of the last expert */
    CHECK_EQUAL(zeros.expert, 6);
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 1);
    check_error(&model, &error, 0);
    CHECK_EQUAL(error.expert, 6);
    model_free(&model);
}

/* As late as can be: the read at each position runs when nothing else is left to run. */
TEST(a_late_read_at_every_position) {
    struct model model;
    const struct fm_options options = options_for(0, 3);
    model_write(&model, &blocks, "model");
    for (int late = 0; late < 5; late++) {
        model_attach(&model, &options);
        model_start(&model, 4, "lru");
        for (int t = 0; t < 3; t++) {
            for (int g = 0; g < 2; g++) {
                for (int p = 0; p < 3; p++) {
                    struct pass pass;
                    pass_begin(&pass, &model, g, p, batch, 2, t == 2 ? 4 : 1, 1);
                    for (int i = 0; i < pass.n; i++) {
                        /* those behind it first */
                        while (!pass_is_ready(&pass, i)) {
                            CHECK(fm_pump(model.stream, late) || fm_pump(model.stream, 0));
                        }
                        pass_acquire(&pass, i);
                        pass_release(&pass, i);
                        model_verify(&model);
                    }
                }
            }
        }
        model_detach(&model);
    }
    model_free(&model);
}

static void *release_when_held(void *arg) {
    fm_stream *stream = arg;
    while (fm_fault_held(stream) == 0) {
        sched_yield();
    }
    /* the thread that computes may wait already or not: both must work */
    fm_fault_release(stream);
    return NULL;
}

TEST(a_held_read_at_every_position) {
    struct model model;
    const struct fm_options options = options_for(2, 3);
    model_write(&model, &blocks, "model");
    for (int position = 0; position < N_POSITIONS; position++) {
        model_attach(&model, &options);
        model_start(&model, position % 3 * 2, "lru");
        fm_fault_set(model.stream, &(struct fm_fault){.hold = 1, .after = (uint64_t)position, .count = 1});
        pthread_t thread;
        CHECK_EQUAL(pthread_create(&thread, NULL, release_when_held, model.stream), 0);
        CHECK_EQUAL(run(&model).n, 0);
        CHECK_EQUAL(pthread_join(thread, NULL), 0);
        struct fm_error error;
        CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
        model_verify(&model);
        model_detach(&model);
    }
    model_free(&model);
}

TEST(freeing_a_stream_with_queued_reads) {
    struct model model;
    const struct fm_options options = options_for(0, 3);
    model_create(&model, &blocks, &options);
    model_start(&model, 4, "lru");
    run_part(&model, 0, 0, tokens[0], 3, 1); /* the other parts are queued */
    model_free(&model);
}

TEST(freeing_a_stream_with_held_reads) {
    struct model model;
    const struct fm_options options = options_for(2, 3);
    model_create(&model, &blocks, &options);
    model_start(&model, 4, "lru");
    /* three reads of the first part, then six of the others: all but one of these never run freely */
    fm_fault_set(model.stream, &(struct fm_fault){.hold = 1, .after = 4, .count = 100});
    struct zeros zeros = {0};
    visit(&model, 0, 0, tokens[0], 3, 1, &zeros);
    CHECK_EQUAL(zeros.n, 0);
    while (fm_fault_held(model.stream) != 2) {
        sched_yield();
    }
    model_free(&model);
}
