/* test_lookahead.c: guesses become reads behind all demand; right ones are used where they are, wrong
 * ones leave nothing behind. The predictor is scripted, or the real one on routers made by hand. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lookahead.h"
#include "model.h"

/* One expert that the scripted predictor is sure of, for group 1; -1: none. */
static int guessed;
static int observed[MAX_GROUPS];

struct fm_predictor {
    int unused;
};

static struct fm_predictor *create_scripted(const struct fm_policy_setup *setup) {
    CHECK_EQUAL(setup->n_groups, 2);
    memset(observed, 0, sizeof observed);
    return calloc(1, sizeof(struct fm_predictor));
}

static void destroy_scripted(struct fm_predictor *p) {
    free(p);
}

static void observe_scripted(struct fm_predictor *p, int32_t group, const struct fm_observation *seen) {
    (void)p;
    CHECK(seen->n > 0);
    observed[group]++;
}

static void predict_scripted(struct fm_predictor *p, int32_t group, float *probability) {
    (void)p;
    memset(probability, 0, blocks.n_expert * sizeof *probability);
    if (group == 1 && guessed >= 0) {
        probability[guessed] = 0.95f;
    }
}

static const struct fm_predictor_type scripted = {
    .name = "scripted",
    .n_ahead = 3,
    .create = create_scripted,
    .destroy = destroy_scripted,
    .observe = observe_scripted,
    .predict = predict_scripted,
};

#define IDS(...) (const int32_t[]){__VA_ARGS__}, sizeof((const int32_t[]){__VA_ARGS__}) / 4, 1

/* Two groups with four slots each, that hold 0 to 3. */
static void create(struct model *model) {
    const struct fm_options options = options_for(0, 4);
    model_create(model, &blocks, &options);
    model_start(model, 4, "lru");
    guessed = -1;
    for (int g = 0; g < 2; g++) {
        run_group(model, g, IDS(0, 1, 2, 3));
    }
    CHECK_EQUAL(fm_lookahead_start(model->stream, &scripted, 1, false), FM_OK);
}

/* Group 0 is passed, which leaves a guess for group 1 queued behind it. */
static void pass_first(struct model *model, int expert) {
    guessed = expert;
    run_group(model, 0, IDS(0, 1));
    guessed = -1;
}

TEST(a_right_guess_is_a_hit_and_reads_nothing_more) {
    struct model model;
    create(&model);
    pass_first(&model, 6);
    CHECK_EQUAL(model_pump_all(&model), 3);
    const struct fm_stats before = model_stats(&model);
    run_group(&model, 1, IDS(6, 1));
    const struct fm_stats stats = model_stats(&model);
    CHECK_EQUAL(stats.reads, before.reads);
    CHECK_EQUAL(stats.hits - before.hits, 2);
    CHECK_EQUAL(stats.guesses, 1);
    CHECK_EQUAL(stats.guesses_used, 1);
    CHECK_EQUAL(stats.guesses_wasted, 0);
    CHECK_EQUAL(stats.guesses_overtaken, 0);
    CHECK(model_is_resident(&model, 1, 6));
    CHECK_EQUAL(observed[0], 1);
    CHECK_EQUAL(observed[1], 1);
    model_verify(&model);
    model_free(&model);
}

TEST(a_guess_that_is_still_read_when_it_is_wanted_counts_as_a_miss_and_is_hurried) {
    struct model model;
    create(&model);
    pass_first(&model, 6);
    CHECK(fm_pump(model.stream, 0)); /* its first part */
    const struct fm_stats before = model_stats(&model);
    struct pass pass;
    const int32_t ids[] = {6, 7};
    pass_begin(&pass, &model, 1, 0, ids, 2, 1, 1);
    CHECK(pass_is_ready(&pass, pass_find(&pass, 6)));
    pass_use_all(&pass, 0);
    run_part(&model, 1, 1, ids, 2, 1);
    run_part(&model, 1, 2, ids, 2, 1);
    const struct fm_stats stats = model_stats(&model);
    CHECK_EQUAL(stats.hits, before.hits);
    CHECK_EQUAL(stats.guesses_used, 1);
    CHECK_EQUAL(stats.guesses_overtaken, 1);
    CHECK_EQUAL(stats.reads - before.reads, 2 + 3);
    model_verify(&model);
    model_free(&model);
}

TEST(demand_is_read_before_a_guess) {
    struct model model;
    create(&model);
    guessed = 6;
    struct pass pass;
    const int32_t ids[] = {5};
    pass_begin(&pass, &model, 0, 0, ids, 1, 1, 1);
    CHECK_EQUAL(model_stats(&model).guesses, 1);
    for (int i = 0; i < 3; i++) { /* all parts of 5 come first */
        CHECK_EQUAL(model.stream->groups[1].slots[model.stream->groups[1].slot_of[6]].loads[0].state, LOAD_LOADING);
        CHECK(fm_pump(model.stream, 0));
    }
    CHECK(pass_is_ready(&pass, 0));
    pass_use_all(&pass, 0);
    model_pump_all(&model);
    model_verify(&model);
    model_free(&model);
}

TEST(a_wrong_guess_that_was_not_read_leaves_an_empty_slot) {
    struct model model;
    create(&model);
    pass_first(&model, 6);
    CHECK(!model_is_resident(&model, 1, 0)); /* least recently used: it made room */
    const struct fm_stats before = model_stats(&model);
    run_group(&model, 1, IDS(1, 2));
    CHECK_EQUAL(model_pump_all(&model), 0);
    CHECK_EQUAL(model_stats(&model).reads, before.reads);
    CHECK_EQUAL(model_stats(&model).guesses_wasted, 1);
    CHECK(!model_is_resident(&model, 1, 6));
    CHECK_EQUAL(model_group(&model, 1).n_resident, 3);
    model_verify(&model);
    run_group(&model, 1, IDS(7)); /* takes the empty slot */
    CHECK_EQUAL(model_stats(&model).evicted, before.evicted);
    model_verify(&model);
    model_free(&model);
}

TEST(a_wrong_guess_that_was_read_leaves_first) {
    struct model model;
    create(&model);
    pass_first(&model, 6);
    model_pump_all(&model);
    run_group(&model, 1, IDS(1, 2));
    CHECK(model_is_resident(&model, 1, 6));
    run_group(&model, 1, IDS(7)); /* 3 is older in the policy's eyes */
    CHECK(!model_is_resident(&model, 1, 6));
    CHECK(model_is_resident(&model, 1, 3));
    model_verify(&model);
    model_free(&model);
}

TEST(a_guess_of_which_a_part_is_under_way_is_not_taken_for_whole) {
    struct shape large = blocks; /* parts of two requests */
    struct model model;
    struct fm_options options = options_for(0, 4);
    for (int p = 0; p < large.n_parts; p++) {
        large.part_bytes[p] = 8192;
    }
    options.request_bytes = 4096;
    model_create(&model, &large, &options);
    model_start(&model, 4, "lru");
    guessed = -1;
    run_group(&model, 0, IDS(0, 1, 2, 3));
    run_group(&model, 1, IDS(0, 1, 2, 3));
    CHECK_EQUAL(fm_lookahead_start(model.stream, &scripted, 1, false), FM_OK);
    pass_first(&model, 6);
    CHECK(fm_pump(model.stream, 0)); /* half of the first part */
    run_group(&model, 1, IDS(1, 2));
    CHECK(!model_is_resident(&model, 1, 6));
    model_verify(&model);
    run_group(&model, 1, IDS(6)); /* read anew, and the right bytes */
    model_verify(&model);
    model_free(&model);
}

TEST(an_error_in_a_guess_is_told_only_when_it_is_wanted) {
    struct model model;
    create(&model);
    pass_first(&model, 6);
    const struct fm_fault fault = {.sys_errno = EIO, .after = 0, .count = 3};
    fm_fault_set(model.stream, &fault);
    model_pump_all(&model);
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
    run_group(&model, 1, IDS(6, 1)); /* the drive is well again: it is read once more */
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
    model_verify(&model);
    model_free(&model);
}

TEST(no_guess_at_what_is_resident) {
    struct model model;
    create(&model);
    pass_first(&model, 2);
    CHECK_EQUAL(observed[0], 1);
    CHECK_EQUAL(model_stats(&model).guesses, 0);
    CHECK_EQUAL(model_pump_all(&model), 0);
    model_verify(&model);
    model_free(&model);
}

TEST(no_guess_for_batches) {
    struct model model;
    create(&model);
    guessed = 6;
    const int32_t ids[] = {0, 1, 2, 3};
    run_group(&model, 0, ids, 2, 2);
    CHECK_EQUAL(model_stats(&model).guesses, 0);
    CHECK_EQUAL(observed[0], 0);
    model_free(&model);
}

TEST(closed_slots_hold_nothing_and_open_again) {
    struct model model;
    create(&model);
    const uint64_t all = model_stats(&model).slot_bytes;
    const int32_t fewer[] = {2, 4};
    CHECK_EQUAL(fm_stream_resize(model.stream, fewer), FM_OK);
    CHECK_EQUAL(model_group(&model, 0).n_slots, 2);
    CHECK_EQUAL(model_group(&model, 0).n_resident, 2);
    CHECK_EQUAL(model_group(&model, 1).n_resident, 4);
    CHECK_EQUAL(model_stats(&model).slot_bytes, all / 8 * 6);
    model_verify(&model);
    run_group(&model, 0, IDS(4, 5, 6)); /* more than fit: one through the ring */
    CHECK_EQUAL(model_group(&model, 0).n_resident, 2);
    model_verify(&model);
    const int32_t none[] = {0, 0};
    CHECK_EQUAL(fm_stream_resize(model.stream, none), FM_OK);
    CHECK_EQUAL(model_stats(&model).slot_bytes, 0);
    CHECK_EQUAL(model_stats(&model).resident_bytes, 0);
    run_group(&model, 1, IDS(0, 1));
    const int32_t more[] = {4, 4};
    CHECK_EQUAL(fm_stream_resize(model.stream, more), FM_OK);
    CHECK_EQUAL(model_stats(&model).slot_bytes, all);
    run_group(&model, 0, IDS(4, 5, 6));
    CHECK_EQUAL(model_group(&model, 0).n_resident, 3);
    model_verify(&model);
    model_free(&model);
}

TEST(slots_in_use_close_at_the_next_call) {
    struct model model;
    create(&model);
    const int32_t none[] = {0, 0};
    struct pass pass;
    const int32_t ids[] = {0, 1};
    pass_begin(&pass, &model, 0, 0, ids, 2, 1, 1);
    CHECK_EQUAL(fm_stream_resize(model.stream, none), FM_OK);
    CHECK_EQUAL(model_group(&model, 0).n_slots, 2);
    pass_use_all(&pass, 0);
    CHECK_EQUAL(fm_stream_resize(model.stream, none), FM_OK);
    CHECK_EQUAL(model_group(&model, 0).n_slots, 0);
    model_verify(&model);
    model_free(&model);
}

/* Two routers that choose expert e by the e-th number of what goes in. */
TEST(the_next_router_predicts_what_it_will_choose) {
    enum { WIDTH = 40 };
    float router[8 * WIDTH] = {0};
    for (int e = 0; e < 8; e++) {
        router[e * WIDTH + e] = 1;
    }
    const int32_t n_expert[] = {8, 8};
    const struct fm_policy_setup setup = {.n_groups = 2, .n_expert = n_expert, .n_slots = n_expert};
    const struct fm_predictor_type *type = &fm_predictor_router;
    struct fm_predictor *p = type->create(&setup);
    float probability[8];
    for (int token = 0; token < 400; token++) {
        float input[WIDTH] = {0};
        const int32_t used[] = {token % 8, (token + 3) % 8};
        input[used[0]] = 2;
        input[used[1]] = 1;
        const struct fm_observation seen = {used, 2, input, router, WIDTH};
        type->observe(p, 0, &seen);
        type->predict(p, 1, probability);
        if (token == 0) {
            for (int e = 0; e < 8; e++) {
                CHECK(probability[e] == 0); /* neither its router nor how good it is has been seen */
            }
        }
        if (token == 399) {
            for (int e = 0; e < 8; e++) {
                const bool right = e == used[0] || e == used[1];
                CHECK(right ? probability[e] > 0.9f : probability[e] < 0.1f);
            }
        }
        type->observe(p, 1, &seen);
    }
    type->predict(p, 0, probability); /* of the next token nothing is known */
    for (int e = 0; e < 8; e++) {
        CHECK(probability[e] == 0);
    }
    type->destroy(p);
}
