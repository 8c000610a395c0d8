/* test_allocation.c: memory that is not there. malloc, calloc and realloc of the library are wrapped
 * by the linker (--wrap); each allocation fails in its turn. Whatever fails says so, nothing leaks,
 * and an operation that cannot begin serves zeros. */

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "lookahead.h"
#include "model.h"

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);

/* Allocations of this thread that succeed before one fails; negative: none fails. */
static _Thread_local int countdown = -1;

static bool fails(void) {
    return countdown >= 0 && countdown-- == 0;
}

void *__wrap_malloc(size_t bytes) {
    return fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t n, size_t bytes) {
    return fails() ? NULL : __real_calloc(n, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes) {
    return fails() ? NULL : __real_realloc(memory, bytes);
}

/* Describes, opens and starts; false with a message when a step fails. The stream is there to be freed. */
static bool build(const char *path, fm_stream **stream) {
    const struct fm_options options = options_for(1, 2);
    *stream = fm_stream_new(&options);
    if (*stream == NULL || fm_stream_add_file(*stream, path, 0) < 0) {
        return false;
    }
    for (int g = 0; g < 3; g++) {
        if (fm_stream_add_group(*stream, g, 0, 4) < 0 || add_part(*stream, g, "up", 0, 0, 4096) < 0) {
            return false;
        }
    }
    return fm_stream_open(*stream) == FM_OK && fm_stream_start(*stream, (const int32_t[]){1, 2, 3}, "dlfu") == FM_OK;
}

TEST(every_allocation_of_a_new_stream_may_fail) {
    struct model model;
    model_write(&model, &blocks, "model");
    int n_failed = 0;
    for (bool built = false; !built; n_failed++) {
        CHECK(n_failed < 100);
        fm_stream *stream;
        fm_fail(FM_OK, "no message");
        countdown = n_failed;
        built = build(model.path, &stream);
        const bool had_failed = countdown < 0;
        countdown = -1;
        CHECK_EQUAL(built, !had_failed);
        if (!built) {
            CHECK_TEXT(fm_last_message(), "memory");
        }
        fm_stream_free(stream);
    }
    CHECK(n_failed > 15);
    free(model.image);
}

static int32_t nobody(int32_t group, const uint8_t *may_leave) {
    (void)group, (void)may_leave;
    return -1;
}

TEST(every_allocation_of_a_simulation_may_fail) {
    static const uint16_t experts[] = {0, 1, 2, 0};
    static const int64_t begin = 0;
    const char *policies[] = {"lru", "arc", "belady", "foreign", "learned"};
    for (int i = 0; i < 5; i++) {
        struct fm_foreign_policy foreign = {.victim = nobody};
        const struct fm_simulation_setup setup = {
            .experts = experts,
            .n_tokens = 2,
            .n_layers = 2,
            .k = 1,
            .sequences = &begin,
            .n_sequences = 1,
            .n_expert = (const int32_t[]){3, 3},
            .n_slots = (const int32_t[]){1, 1},
            .policy = policies[i],
            .foreign = i == 3 ? &foreign : NULL,
        };
        int n_failed = 0;
        for (fm_simulation *simulation = NULL; simulation == NULL; n_failed++) {
            CHECK(n_failed < 60);
            countdown = n_failed;
            simulation = fm_simulation_new(&setup);
            CHECK_EQUAL(simulation == NULL, countdown < 0);
            countdown = -1;
            if (simulation == NULL) {
                CHECK_TEXT(fm_last_message(), "memory");
            } else {
                CHECK_EQUAL(fm_simulation_run(simulation, 2), 0);
                fm_simulation_free(simulation);
                break;
            }
        }
        CHECK(n_failed >= 4);
    }
}

static void expect_no_memory(const struct model *model) {
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(model->stream, &error), 1);
    CHECK_EQUAL(error.status, FM_NO_MEMORY);
    CHECK_EQUAL(error.layer, -1);
    CHECK_EQUAL(fm_stream_take_error(model->stream, &error), 0);
}

TEST(an_operation_that_gets_no_memory_serves_zeros) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &blocks, &options);
    model_start(&model, 2, "lru");
    struct pass pass;
    countdown = 0;
    pass_begin(&pass, &model, 0, 0, (const int32_t[]){6, 2, 5}, 3, 1, 2);
    CHECK_EQUAL(countdown, -1);
    for (int thread = 0; thread < 2; thread++) {
        for (int i = 0; i < 3; i++) {
            CHECK(!pass_acquire_or_zeros(&pass, i));
            pass_release(&pass, i);
        }
    }
    model_verify(&model);
    expect_no_memory(&model);
    run_group(&model, 0, (const int32_t[]){6, 2, 5}, 3, 1);
    model_free(&model);
}

/* No memory for a request: the load fails, those already queued end first. */
TEST(a_read_that_gets_no_memory_fails_its_load) {
    struct model model;
    struct fm_options options = options_for(0, 2);
    options.request_bytes = 4096;
    for (int nth = 1; nth < 8; nth++) {
        for (int n_slots = 0; n_slots < 3; n_slots += 2) {
            model_create(&model, &odd, &options);
            model_start(&model, n_slots, "lru");
            struct pass pass;
            countdown = nth; /* the operation itself is the first */
            pass_begin(&pass, &model, 0, 0, (const int32_t[]){1, 4, 6}, 3, 1, 1);
            countdown = -1;
            int n_zeros = 0;
            for (int i = 0; i < 3; i++) {
                pass_pump(&pass, i);
                n_zeros += !pass_acquire_or_zeros(&pass, i);
                pass_release(&pass, i);
                model_verify(&model);
            }
            model_pump_all(&model);
            struct fm_error error;
            CHECK(n_zeros <= 1);
            if (fm_stream_take_error(model.stream, &error)) {
                CHECK_EQUAL(error.status, FM_IO_ERROR);
                CHECK_EQUAL(error.count, 1);
            } else {
                CHECK_EQUAL(n_zeros, 0);
            }
            CHECK(nth > 2 || n_zeros == 1);
            run_group(&model, 0, (const int32_t[]){1, 4, 6}, 3, 1);
            CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
            model_free(&model);
        }
    }
}

/* Experts beyond the room that there is for a token, in batches beyond that for their tokens. */
static void use(struct fm_policy *policy, int n_failed) {
    uint8_t all[40];
    memset(all, 1, sizeof all);
    countdown = n_failed;
    for (int batch = 1; batch <= 3; batch++) {
        for (int g = 0; g < 2; g++) {
            fm_policy_learned.begin_pass(policy, g, 60 * batch);
            for (int t = 0; t < 60 * batch; t++) {
                for (int e = 0; e < 12 * batch; e++) {
                    fm_policy_learned.on_miss(policy, g, (e + t) % 40);
                }
                fm_policy_learned.end_token(policy, g);
            }
            const int victim = fm_policy_learned.victim(policy, g, all);
            CHECK(victim >= 0 && victim < 40);
            CHECK(fm_policy_learned.verify(policy, g, all));
        }
    }
}

TEST(a_policy_that_gets_no_memory_remembers_less) {
    const int32_t n_expert[] = {40, 40};
    const struct fm_policy_setup setup = {.n_groups = 2, .n_expert = n_expert, .n_slots = n_expert};
    bool failed = true;
    for (int n_failed = 0; failed; n_failed++) {
        CHECK(n_failed < 200);
        struct fm_policy *policy = fm_policy_learned.create(&setup);
        CHECK(policy != NULL);
        use(policy, n_failed);
        failed = countdown < 0;
        countdown = -1;
        fm_policy_learned.destroy(policy);
    }
}

TEST(every_allocation_of_a_predictor_may_fail) {
    const int32_t n_expert[] = {4, 4};
    const struct fm_policy_setup setup = {.n_groups = 2, .n_expert = n_expert, .n_slots = n_expert};
    int n_failed = 0;
    for (struct fm_predictor *predictor = NULL; predictor == NULL; n_failed++) {
        CHECK(n_failed < 40);
        countdown = n_failed;
        predictor = fm_predictor_routing.create(&setup);
        countdown = -1;
        if (predictor != NULL) {
            fm_predictor_routing.destroy(predictor);
        }
    }
    CHECK(n_failed > 8);
}
