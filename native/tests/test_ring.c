/* test_ring.c: buffers of the ring: reads run ahead of compute, guesses about the next operation are
 * used or given up. */

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "model.h"

static const int32_t all[] = {0, 1, 2, 3, 4, 5, 6, 7};

static void create(struct model *model, int n_ring) {
    const struct fm_options options = options_for(0, n_ring);
    model_create(model, &blocks, &options);
    model_start(model, 0, "lru");
}

/* One pass through a group teaches it that part 1 follows part 0, and part 2 part 1. */
static void learn(const struct model *model, int group) {
    run_group(model, group, all, 1, 1);
    CHECK_EQUAL(fm_pump(model->stream, 0), 0);
}

/* Ring buffers that hold a guess. */
static int n_ahead(const struct model *model) {
    int n = 0;
    for (const struct ring_buffer *b = model->stream->ring_ahead; b != NULL; b = b->next) {
        n++;
    }
    return n;
}

static int n_free(const struct model *model) {
    int n = 0;
    for (const struct ring_buffer *b = model->stream->ring_free; b != NULL; b = b->next) {
        n++;
    }
    return n;
}

/* Every guess was used, dropped or is still there. */
static void check_guesses(const struct model *model, unsigned issued, unsigned used, unsigned dropped) {
    const struct fm_stats stats = model_stats(model);
    CHECK_EQUAL(stats.ahead_issued, issued);
    CHECK_EQUAL(stats.ahead_used, used);
    CHECK_EQUAL(stats.ahead_dropped, dropped);
    CHECK_EQUAL(n_ahead(model), issued - used - dropped);
    model_verify(model);
}

TEST(reads_run_ahead_of_compute) {
    struct model model;
    create(&model, 3);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, all, 8, 1, 1);
    for (int i = 0; i < 8; i++) {
        /* three at a time: this one and the next two */
        for (int k = 0; k < 8; k++) {
            CHECK_EQUAL(pass.operation->entries[k].load != NULL, k < i + 3);
        }
        pass_use(&pass, i);
    }
    CHECK_EQUAL(model_stats(&model).reads, 8);
    CHECK_EQUAL(n_free(&model), 3);
    check_guesses(&model, 0, 0, 0);
    model_free(&model);
}

TEST(a_read_is_queued_as_soon_as_a_buffer_is_released) {
    struct model model;
    create(&model, 2);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, all, 3, 1, 1);
    CHECK_EQUAL(model_pump_all(&model), 2);
    pass_use(&pass, 0);
    CHECK(!pass_is_ready(&pass, 2));
    CHECK_EQUAL(model_pump_all(&model), 1); /* while expert 1 is not even begun */
    CHECK(pass_is_ready(&pass, 2));
    pass_use_all(&pass, 1);
    model_free(&model);
}

TEST(late_reads_do_not_reorder_the_experts) {
    struct model model;
    create(&model, 4);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, all, 8, 1, 1);
    CHECK(fm_pump(model.stream, 3));
    CHECK(fm_pump(model.stream, 1));
    CHECK(!pass_is_ready(&pass, 0) && pass_is_ready(&pass, 1) && !pass_is_ready(&pass, 2) && pass_is_ready(&pass, 3));
    CHECK(fm_pump(model.stream, 1));
    pass_use_all(&pass, 0);
    model_free(&model);
}

TEST(what_is_left_of_the_ring_reads_the_next_part) {
    struct model model;
    create(&model, 5);
    learn(&model, 0);
    check_guesses(&model, 0, 0, 0);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, all, 3, 1, 1);
    CHECK_EQUAL(n_ahead(&model), 2); /* five buffers, three demanded */
    CHECK_EQUAL(pass.operation->next_ahead, 2);
    pass_use(&pass, 0);
    CHECK_EQUAL(n_ahead(&model), 3); /* and the one that came free */
    pass_use_all(&pass, 1);
    CHECK_EQUAL(n_ahead(&model), 3); /* no more than the experts that went through the ring */
    CHECK_EQUAL(model_stats(&model).reads, 3 + 3);

    pass_begin(&pass, &model, 0, 1, all, 3, 1, 1);
    check_guesses(&model, 3 + 2, 3, 0); /* two buffers were left for part 2 */
    CHECK(fm_pump(model.stream, 0)); /* the guesses are demanded now: before those for part 2 */
    CHECK(pass_is_ready(&pass, 0));
    pass_use_all(&pass, 0);
    pass_begin(&pass, &model, 0, 2, all, 3, 1, 1);
    pass_use_all(&pass, 0);
    check_guesses(&model, 6, 6, 0); /* nothing follows part 2 */
    CHECK_EQUAL(model_stats(&model).reads, 3 + 9);
    CHECK_EQUAL(n_free(&model), 5);
    model_free(&model);
}

TEST(guesses_that_have_landed_are_used_without_a_read) {
    struct model model;
    create(&model, 4);
    learn(&model, 0);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, all, 2, 1, 1);
    model_pump_all(&model);
    pass_use_all(&pass, 0);
    const uint64_t reads = model_stats(&model).reads;
    pass_begin(&pass, &model, 0, 1, all, 2, 1, 1);
    CHECK(pass_is_ready(&pass, 0) && pass_is_ready(&pass, 1));
    CHECK_EQUAL(model_stats(&model).reads, reads);
    pass_use_all(&pass, 0);
    model_free(&model);
}

TEST(a_guess_that_is_still_queued_becomes_demand) {
    struct model model;
    const struct fm_options options = options_for(0, 4);
    model_create(&model, &blocks, &options);
    CHECK_EQUAL(fm_stream_start(model.stream, (const int32_t[]){0, 2}, "lru"), FM_OK);
    learn(&model, 0);
    run_part(&model, 1, 0, all, 2, 1); /* leaves four reads for its slots */
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, all, 2, 1, 1);
    pass_use_all(&pass, 0); /* leaves two guesses behind them */
    pass_begin(&pass, &model, 0, 1, all, 2, 1, 1);
    check_guesses(&model, 2 + 2, 2, 0);
    CHECK(fm_pump(model.stream, 0) && fm_pump(model.stream, 0));
    CHECK(pass_is_ready(&pass, 0) && pass_is_ready(&pass, 1));
    pass_use_all(&pass, 0);
    model_free(&model);
}

TEST(guesses_are_cancelled_when_another_part_comes) {
    struct model model;
    create(&model, 4);
    learn(&model, 0);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, all, 2, 1, 1);
    CHECK(fm_pump(model.stream, 0));
    CHECK(fm_pump(model.stream, 0));
    CHECK(fm_pump(model.stream, 0)); /* one guess has landed, one is queued */
    pass_use_all(&pass, 0);
    check_guesses(&model, 2, 0, 0);
    const uint64_t reads = model_stats(&model).reads;
    pass_begin(&pass, &model, 0, 2, all, 2, 1, 1); /* part 1 is left out */
    check_guesses(&model, 2, 0, 2);
    CHECK_EQUAL(model_pump_all(&model), 2); /* nothing but part 2 */
    pass_use_all(&pass, 0);
    CHECK_EQUAL(model_stats(&model).reads - reads, 2);
    CHECK_EQUAL(n_free(&model), 4);
    model_free(&model);
}

TEST(guesses_for_other_experts_are_dropped_one_by_one) {
    struct model model;
    create(&model, 8);
    learn(&model, 0);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, all, 4, 1, 1);
    CHECK_EQUAL(n_ahead(&model), 4); /* part 1 of experts 0 1 2 3 */
    pass_use_all(&pass, 0);
    pass_begin(&pass, &model, 0, 1, (const int32_t[]){1, 3, 5}, 3, 1, 1);
    const struct fm_stats stats = model_stats(&model);
    CHECK_EQUAL(stats.ahead_used, 2);
    CHECK_EQUAL(stats.ahead_dropped, 2);
    pass_use_all(&pass, 0);
    CHECK_EQUAL(model_stats(&model).missed_bytes / 4096, 3 + 4 + 4 + 1 + 3); /* part 2 of 1 3 5 as well */
    model_free(&model);
}

TEST(another_group_takes_the_buffers_of_guesses_oldest_first) {
    struct model model;
    create(&model, 2);
    learn(&model, 0);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, all, 2, 1, 1);
    pass_use_all(&pass, 0);
    check_guesses(&model, 2, 0, 0);
    const struct load *kept = &model.stream->ring_ahead->next->load;
    CHECK_EQUAL(n_free(&model), 0);
    pass_begin(&pass, &model, 1, 0, all, 1, 1, 1); /* wants one buffer */
    check_guesses(&model, 2, 0, 1);
    CHECK(&model.stream->ring_ahead->load == kept);
    CHECK_EQUAL(kept->expert, 1);
    pass_use_all(&pass, 0);
    check_guesses(&model, 2, 0, 1);
    pass_begin(&pass, &model, 1, 0, all, 3, 1, 1); /* wants them all */
    check_guesses(&model, 2, 0, 2);
    pass_use_all(&pass, 0);
    model_free(&model);
}

/* Runs the read at a position in a thread of its own, where it is held. */
static void *pump_in_thread(void *stream) {
    CHECK(fm_pump(stream, 0));
    return NULL;
}

TEST(a_dropped_guess_in_flight_is_reused_only_after_its_read_has_ended) {
    struct model model;
    create(&model, 2);
    learn(&model, 0);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, all, 1, 1, 1);
    pass_use_all(&pass, 0);
    check_guesses(&model, 1, 0, 0);

    fm_fault_set(model.stream, &(struct fm_fault){.hold = 1, .count = 1});
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, pump_in_thread, model.stream), 0);
    while (fm_fault_held(model.stream) == 0) {
        sched_yield();
    }
    pass_begin(&pass, &model, 0, 0, all, 8, 1, 1);
    check_guesses(&model, 1, 0, 1);
    CHECK_EQUAL(n_free(&model), 0);
    CHECK(pass.operation->entries[0].load != NULL && pass.operation->entries[1].load == NULL);
    /* one buffer is enough to go on with, if the other never comes back */
    for (int i = 0; i < 4; i++) {
        pass_use(&pass, i);
        CHECK(pass.operation->entries[i + 2].load == NULL);
    }
    fm_fault_release(model.stream);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK(pass.operation->entries[5].load != NULL);
    model_verify(&model);
    pass_use_all(&pass, 4);
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
    model_free(&model);
}

/* Nobody wanted it any more, so nobody's token is refused. */
TEST(a_dropped_guess_that_fails_is_no_error) {
    struct model model;
    create(&model, 2);
    learn(&model, 0);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, all, 1, 1, 1);
    pass_use_all(&pass, 0);
    fm_fault_set(model.stream, &(struct fm_fault){.hold = 1, .count = 1});
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, pump_in_thread, model.stream), 0);
    while (fm_fault_held(model.stream) == 0) {
        sched_yield();
    }
    pass_begin(&pass, &model, 0, 0, all, 1, 1, 1);
    check_guesses(&model, 1, 0, 1);
    pass_use_all(&pass, 0);
    CHECK_EQUAL(truncate(model.path, 0), 0); /* the held read finds nothing */
    fm_fault_release(model.stream);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
    CHECK_EQUAL(model_stats(&model).failed_loads, 0);
    model_verify(&model);
    model_free(&model);
}

/* All buffers are guesses in flight: an operation gets one when the first of them ends. */
TEST(an_operation_waits_for_guesses_in_flight_when_there_is_nothing_else) {
    struct model model;
    create(&model, 2);
    learn(&model, 0);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, all, 2, 1, 1);
    pass_use_all(&pass, 0);
    CHECK_EQUAL(n_ahead(&model), 2);
    fm_fault_set(model.stream, &(struct fm_fault){.hold = 1, .count = 2});
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        CHECK_EQUAL(pthread_create(&threads[i], NULL, pump_in_thread, model.stream), 0);
    }
    while (fm_fault_held(model.stream) != 2) {
        sched_yield();
    }
    pass_begin(&pass, &model, 1, 0, all, 3, 1, 1);
    CHECK(pass.operation->entries[0].load == NULL);
    CHECK_EQUAL(fm_pump(model.stream, 0), 0);
    model_verify(&model);
    fm_fault_release(model.stream);
    for (int i = 0; i < 2; i++) {
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    }
    pass_use_all(&pass, 0);
    model_free(&model);
}

TEST(a_guess_that_failed_is_read_again) {
    struct model model;
    create(&model, 4);
    learn(&model, 0);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, all, 2, 1, 1);
    fm_fault_set(model.stream, &(struct fm_fault){.sys_errno = EIO, .after = 2, .count = 1});
    model_pump_all(&model);
    pass_use_all(&pass, 0);
    /* whoever saw the error is done with it before the part is used */
    struct fm_error error;
    fm_stream_take_error(model.stream, &error);
    pass_begin(&pass, &model, 0, 1, all, 2, 1, 1);
    pass_use_all(&pass, 0);
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
    model_free(&model);
}

/* Two contexts in the same layer: up, up, down, down. No part follows itself. */
TEST(a_part_is_no_guess_for_itself) {
    struct model model;
    create(&model, 4);
    learn(&model, 0);
    run_part(&model, 0, 0, all, 2, 1);
    run_part(&model, 0, 0, all, 2, 1);
    run_part(&model, 0, 1, all, 2, 1);
    run_part(&model, 0, 1, all, 2, 1);
    run_part(&model, 0, 2, all, 2, 1);
    run_part(&model, 0, 2, all, 2, 1);
    CHECK_EQUAL(model.stream->groups[0].next_part[0], 1);
    CHECK_EQUAL(model.stream->groups[0].next_part[1], 2);
    CHECK_EQUAL(model.stream->groups[0].next_part[2], -1);
    model_free(&model);
}

static const int32_t twice[] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
/* all but expert 2 */
static const int32_t without[] = {0, 1, 3, 4, 5, 6, 7, 0, 1, 3, 4, 5, 6, 7, 0, 1};

TEST(after_a_batch_the_next_groups_experts_are_read_ahead) {
    struct model model;
    create(&model, 4);
    run_group(&model, 0, twice, 8, 2);
    run_group(&model, 1, without, 8, 2);
    run_part(&model, 0, 0, twice, 8, 2);
    run_part(&model, 0, 1, twice, 8, 2);
    struct pass pass;
    pass_begin(&pass, &model, 0, 2, twice, 8, 2, 1);
    pass_use_all(&pass, 0);
    CHECK_EQUAL(n_ahead(&model), 4);
    const int32_t guessed[] = {0, 1, 3, 4}; /* 2 was not used the last time */
    const struct ring_buffer *buffer = model.stream->ring_ahead;
    for (int i = 0; i < 4; i++, buffer = buffer->next) {
        CHECK_EQUAL(buffer->load.group, 1);
        CHECK_EQUAL(buffer->load.part, 0);
        CHECK_EQUAL(buffer->load.expert, guessed[i]);
    }
    const struct fm_stats before = model_stats(&model);
    /* expert 0 is not wanted now: its buffer is given back; the others are used whatever their order */
    const int32_t wanted[] = {7, 4, 3, 2, 1, 5, 6, 7};
    pass_begin(&pass, &model, 1, 0, wanted, 8, 1, 1);
    CHECK_EQUAL(model_stats(&model).ahead_used - before.ahead_used, 3);
    CHECK_EQUAL(model_stats(&model).ahead_dropped - before.ahead_dropped, 1);
    CHECK_EQUAL(pass.order[0], 1);
    CHECK_EQUAL(pass.order[1], 3);
    CHECK_EQUAL(pass.order[2], 4);
    pass_use_all(&pass, 0);
    model_verify(&model);
    model_free(&model);
}

TEST(a_token_and_a_small_batch_say_nothing_about_the_next_group) {
    struct model model;
    create(&model, 4);
    run_group(&model, 0, twice, 8, 2);
    run_group(&model, 1, twice, 8, 2);
    for (int n_tokens = 1; n_tokens <= 2; n_tokens++) {
        run_part(&model, 0, 0, all, 2, n_tokens);
        run_part(&model, 0, 1, all, 2, n_tokens);
        struct pass pass;
        pass_begin(&pass, &model, 0, 2, all, 2, n_tokens, 1);
        pass_use_all(&pass, 0);
        CHECK_EQUAL(n_ahead(&model), 0);
    }
    model_free(&model);
}

TEST(nothing_is_read_ahead_after_the_last_group) {
    struct model model;
    create(&model, 4);
    for (int i = 0; i < 2; i++) {
        run_group(&model, 0, twice, 8, 2);
        run_group(&model, 1, twice, 8, 2);
        CHECK_EQUAL(n_ahead(&model), 0);
    }
    model_free(&model);
}
