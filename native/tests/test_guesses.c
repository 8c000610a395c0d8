/* test_guesses.c: guesses that somebody else uses meanwhile, that fail, or that turn out right later: other
 * contexts, and expert 6 as the one that lookahead is sure of. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lookahead.h"
#include "model.h"

static int guessed;

struct fm_predictor {
    int unused;
};

static struct fm_predictor *create_sure(const struct fm_policy_setup *setup) {
    (void)setup;
    return calloc(1, sizeof(struct fm_predictor));
}

static void destroy_sure(struct fm_predictor *p) {
    free(p);
}

static void observe_nothing(struct fm_predictor *p, int32_t group, const struct fm_observation *seen) {
    (void)p, (void)group, (void)seen;
}

static void predict_one(struct fm_predictor *p, int32_t group, float *probability) {
    (void)p;
    memset(probability, 0, MAX_EXPERTS / 8 * sizeof *probability);
    if (group == 1 && guessed >= 0) {
        probability[guessed] = 0.95f;
    }
}

static const struct fm_predictor_type sure = {
    .name = "sure",
    .n_ahead = 3,
    .create = create_sure,
    .destroy = destroy_sure,
    .observe = observe_nothing,
    .predict = predict_one,
};

#define IDS(...) (const int32_t[]){__VA_ARGS__}, sizeof((const int32_t[]){__VA_ARGS__}) / 4, 1

/* Two groups with four slots each, that hold 0 to 3. */
static void create_with(struct model *model, const struct shape *shape, uint32_t request_bytes) {
    struct fm_options options = options_for(0, 4);
    options.request_bytes = request_bytes;
    model_create(model, shape, &options);
    model_start(model, 4, "lru");
    guessed = -1;
    for (int g = 0; g < 2; g++) {
        run_group(model, g, IDS(0, 1, 2, 3));
    }
    CHECK_EQUAL(fm_lookahead_start(model->stream, &sure, 1, false), FM_OK);
}

static void create(struct model *model) {
    create_with(model, &blocks, 1 << 20);
}

/* Group 0 is passed, which leaves a guess for group 1 queued behind it. */
static void pass_first(struct model *model, int expert) {
    guessed = expert;
    run_group(model, 0, IDS(0, 1));
    guessed = -1;
}

static struct slot *slot_of(const struct model *model, int group, int expert) {
    const struct group *g = &model->stream->groups[group];
    CHECK(g->slot_of[expert] >= 0);
    return &g->slots[g->slot_of[expert]];
}

/* Another context is in the middle of the group and takes the guess where it finds it. */
TEST(a_wrong_guess_that_another_context_uses_stays_where_it_is) {
    struct model model;
    create(&model);
    pass_first(&model, 6);
    struct pass other;
    const int32_t six[] = {6};
    pass_begin(&other, &model, 1, 1, six, 1, 1, 1);
    pass_pump(&other, 0);
    pass_acquire(&other, 0);
    const int32_t ids[] = {4, 5, 7};
    run_group(&model, 1, ids, 3, 1); /* wrong: but its bytes are in use */
    pass_acquire(&other, 0);         /* still the right ones */
    pass_release(&other, 0);
    model_pump_all(&model);
    model_verify(&model);
    model_free(&model);
}

TEST(a_guess_that_fails_while_another_context_waits_for_it_is_an_error) {
    struct model model;
    create(&model);
    pass_first(&model, 6);
    struct pass other;
    const int32_t six[] = {6};
    pass_begin(&other, &model, 1, 1, six, 1, 1, 1);
    const struct fm_fault fault = {.sys_errno = EIO, .after = 0, .count = 1};
    fm_fault_set(model.stream, &fault);
    model_pump_all(&model);
    CHECK(!pass_acquire_or_zeros(&other, 0));
    pass_release(&other, 0);
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 1);
    CHECK_EQUAL(error.expert, 6);
    model_verify(&model);
    model_free(&model);
}

/* With a reader at work. */
static void pass_part(const struct model *model, int group, int part, const int32_t *ids, int n) {
    struct pass pass;
    pass_begin(&pass, model, group, part, ids, n, 1, 1);
    for (int i = 0; i < n; i++) {
        pass_acquire(&pass, i);
        pass_release(&pass, i);
    }
}

/* Leaves a wrong guess of group 1 whose first part is on its way: the only reader holds it. */
static struct slot *create_with_wrong(struct model *model, const struct shape *shape) {
    const int32_t ids[] = {0, 1, 2, 3};
    const struct fm_options options = options_for(1, 4);
    model_create(model, shape, &options);
    model_start(model, 4, "lru");
    guessed = -1;
    for (int g = 0; g < 2; g++) {
        for (int p = 0; p < shape->n_parts; p++) {
            pass_part(model, g, p, ids, 4);
        }
    }
    CHECK_EQUAL(fm_lookahead_start(model->stream, &sure, 1, false), FM_OK);
    const struct fm_fault fault = {.hold = 1, .after = 0, .count = 1};
    fm_fault_set(model->stream, &fault);
    guessed = 6;
    pass_part(model, 0, 0, ids + 2, 2);
    guessed = -1;
    while (fm_fault_held(model->stream) == 0) {
    }
    struct slot *slot = slot_of(model, 1, 6);
    pass_part(model, 1, 0, ids + 2, 2);
    CHECK_EQUAL(model_stats(model).guesses_wasted, 1);
    CHECK_EQUAL(slot->loads[0].state, LOAD_LOADING);
    model_verify(model);
    return slot;
}

/* The held read finds nothing, and nobody is told. */
static void fail_held(struct model *model, const struct slot *slot, enum load_state state) {
    CHECK_EQUAL(truncate(model->path, 0), 0);
    fm_fault_release(model->stream);
    while (atomic_load(&slot->loads[0].state) == LOAD_LOADING) {
    }
    CHECK_EQUAL(slot->loads[0].state, state);
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(model->stream, &error), 0);
    model_verify(model);
    model_free(model);
}

TEST(an_error_in_a_wrong_guess_is_told_to_nobody) {
    struct shape one_part = blocks;
    one_part.n_parts = 1;
    struct model model;
    const struct slot *slot = create_with_wrong(&model, &one_part);
    CHECK(model_is_resident(&model, 1, 6)); /* all its reads were under way */
    fail_held(&model, slot, LOAD_FAILED);
}

TEST(an_error_in_the_part_of_a_wrong_guess_that_could_not_be_cancelled_is_told_to_nobody) {
    struct model model;
    const struct slot *slot = create_with_wrong(&model, &blocks);
    CHECK(!model_is_resident(&model, 1, 6));
    CHECK_EQUAL(slot->loads[1].state, LOAD_EMPTY);
    CHECK_EQUAL(slot->loads[2].state, LOAD_EMPTY);
    fail_held(&model, slot, LOAD_EMPTY);
}

TEST(a_wrong_guess_that_is_used_later_is_an_expert_like_others) {
    struct model model;
    create(&model);
    pass_first(&model, 6);
    model_pump_all(&model);
    run_group(&model, 1, IDS(1, 2)); /* wrong */
    run_group(&model, 1, IDS(6, 2)); /* and yet it was worth it */
    run_group(&model, 1, IDS(7));    /* 3 is the one that was not used for longest */
    CHECK(model_is_resident(&model, 1, 6));
    CHECK(!model_is_resident(&model, 1, 3));
    model_verify(&model);
    model_free(&model);
}

TEST(a_token_can_be_computed_before_there_are_slots) {
    struct model model;
    const struct fm_options options = options_for(0, 4);
    model_create(&model, &blocks, &options);
    run_group(&model, 0, IDS(0, 1));
    model_verify(&model);
    model_free(&model);
}

/* With one group only, what is guessed for the next token can be what this one still uses. */
TEST(a_guess_that_the_same_token_uses_in_its_next_part_is_used_safely) {
    struct shape one_group = blocks;
    one_group.n_groups = 1;
    struct model model;
    struct fm_options options = options_for(0, 4);
    model_create(&model, &one_group, &options);
    model_start(&model, 1, "lru");
    guessed = -1;
    run_group(&model, 0, IDS(0, 1));
    CHECK_EQUAL(fm_stream_lookahead(model.stream, "routing", 4, 0), FM_OK);
    for (int t = 0; t < 60; t++) {
        const struct fm_fault fault = {.sys_errno = EIO, .after = 1, .count = t % 2};
        const int32_t ids[] = {t % 3, 3 + t % 2};
        fm_fault_set(model.stream, &fault);
        for (int part = 0; part < 3; part++) {
            struct pass pass;
            bool right = true;
            pass_begin(&pass, &model, 0, part, ids, 2, 1, 1);
            for (int i = 0; i < pass.n; i++) {
                pass_pump(&pass, i);
                right = pass_acquire_or_zeros(&pass, i) && right;
                pass_release(&pass, i);
            }
            struct fm_error error;
            CHECK(fm_stream_take_error(model.stream, &error) == 1 || right);
        }
        model_verify(&model);
    }
    model_free(&model);
}

/* A batch makes likely what the next group uses; the drive has a bad spot there that nobody needs. */
TEST(an_error_in_what_is_read_ahead_is_told_only_when_it_is_wanted) {
    static const int32_t all[] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
    struct model model;
    const struct fm_options options = options_for(0, 4);
    model_create(&model, &blocks, &options);
    model_start(&model, 0, "lru");
    for (int g = 0; g < 2; g++) {
        run_group(&model, g, all, 8, 2);
    }
    run_part(&model, 0, 0, all, 8, 2);
    run_part(&model, 0, 1, all, 8, 2);
    struct pass pass;
    pass_begin(&pass, &model, 0, 2, all, 8, 2, 1);
    pass_use_all(&pass, 0);
    CHECK(model.stream->ring_ahead != NULL);
    const struct fm_fault fault = {.sys_errno = EIO, .after = 0, .count = 4};
    fm_fault_set(model.stream, &fault);
    model_pump_all(&model);
    CHECK_EQUAL(model.stream->ring_ahead->load.state, LOAD_FAILED);
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
    model_verify(&model);
    run_group(&model, 1, IDS(0, 7)); /* 0 is read once more, and the drive is well again */
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
    model_verify(&model);
    model_free(&model);
}

/* Any expert may be next, and nothing is sure to stay. */
static void predict_any(struct fm_predictor *p, int32_t group, float *probability) {
    static uint32_t draw; /* under the stream's lock */
    (void)p, (void)group;
    for (int e = 0; e < blocks.n_expert; e++) {
        draw = draw * 1664525u + 1013904223u;
        probability[e] = draw >> 30 == 0 ? 0.95f : 0.05f;
    }
}

static const struct fm_predictor_type any = {
    .name = "any",
    .n_ahead = 3,
    .create = create_sure,
    .destroy = destroy_sure,
    .observe = observe_nothing,
    .predict = predict_any,
};

static void *compute_tokens(void *arg) {
    struct model *model = arg;
    static atomic_uint seeds;
    uint32_t draw = atomic_fetch_add(&seeds, 1) * 77777u + 1u;
    for (int token = 0; token < 150; token++) {
        for (int group = 0; group < 2; group++) {
            draw = draw * 1664525u + 1013904223u;
            const int32_t first = (int32_t)(draw >> 16) % 8;
            const int32_t ids[] = {first, (first + 1 + (int32_t)(draw >> 24) % 7) % 8};
            for (int part = 0; part < 3; part++) {
                struct pass pass;
                pass_begin(&pass, model, group, part, ids, 2, 1, 1);
                for (int i = 0; i < pass.n; i++) {
                    pass_acquire(&pass, i); /* the right bytes, whoever guesses what meanwhile */
                    pass_release(&pass, i);
                }
            }
        }
    }
    return NULL;
}

TEST(contexts_that_guess_for_each_other_get_the_right_bytes) {
    struct model model;
    const struct fm_options options = options_for(2, 4);
    model_create(&model, &blocks, &options);
    model_start(&model, 4, "lru");
    CHECK_EQUAL(fm_lookahead_start(model.stream, &any, 2, false), FM_OK);
    compute_tokens(&model); /* alone first: contexts in turn hide in which order the parts come */
    CHECK(model_stats(&model).guesses > 0);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(pthread_create(&threads[i], NULL, compute_tokens, &model), 0);
    }
    for (int i = 0; i < 150; i++) {
        const int32_t n_slots[] = {i % 5, (i * 3 + 1) % 5};
        CHECK_EQUAL(fm_stream_resize(model.stream, n_slots), FM_OK);
        model_verify(&model);
    }
    const int32_t all[] = {4, 4};
    CHECK_EQUAL(fm_stream_resize(model.stream, all), FM_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    }
    model_verify(&model);
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
    model_free(&model);
}
