/* test_trace.c: recorded routing: rows, ubatches whose last group has fewer tokens, sequences, what
 * is taken, cut and lost. */

#include <stdlib.h>
#include <string.h>

#include "model.h"

enum { K = 2, N_GROUPS = 2, MAX_ROWS = 64, NONE = 0xFFFF };

struct taken {
    uint64_t n;
    uint16_t ids[MAX_ROWS][N_GROUPS][K];
    float probs[MAX_ROWS][N_GROUPS][K];
    uint8_t phases[MAX_ROWS];
    uint8_t starts[MAX_ROWS];
};

static void create(struct model *model, uint64_t max_rows, int with_probs) {
    const struct fm_options options = options_for(0, 4);
    model_create(model, &blocks, &options);
    model_start(model, 4, "lru");
    CHECK_EQUAL(fm_trace_start(model->stream, K, max_rows, with_probs), FM_OK);
}

static struct taken take(const struct model *model) {
    struct taken taken;
    taken.n = fm_trace_take(model->stream, MAX_ROWS, &taken.ids[0][0][0], &taken.probs[0][0][0], taken.phases, taken.starts);
    return taken;
}

static struct fm_trace_counts counts(const struct model *model) {
    struct fm_trace_counts counts;
    fm_trace_count(model->stream, &counts);
    return counts;
}

static void expect(const uint16_t ids[K], int first, int second) {
    CHECK_EQUAL(ids[0], first);
    CHECK_EQUAL(ids[1], second);
}

/* One token through both groups. */
static void token(const struct model *model, int a, int b, int c, int d) {
    run_group(model, 0, (const int32_t[]){a, b}, 2, 1);
    run_group(model, 1, (const int32_t[]){c, d}, 2, 1);
}

TEST(a_row_per_token) {
    struct model model;
    create(&model, 1000, 0);
    fm_trace_set_phase(model.stream, 1);
    token(&model, 7, 0, 1, 2);
    token(&model, 3, 4, 5, 6);
    const struct taken taken = take(&model);
    CHECK_EQUAL(taken.n, 2);
    expect(taken.ids[0][0], 7, 0);
    expect(taken.ids[0][1], 1, 2);
    expect(taken.ids[1][0], 3, 4);
    expect(taken.ids[1][1], 5, 6);
    CHECK_EQUAL(taken.phases[0], 1);
    CHECK_EQUAL(taken.starts[0], 0);
    CHECK_EQUAL(take(&model).n, 0);
    model_free(&model);
}

/* The last layer is computed for the last tokens only; a ubatch may skip it altogether. */
TEST(fewer_tokens_in_the_last_group) {
    struct model model;
    create(&model, 1000, 0);
    run_group(&model, 0, (const int32_t[]){0, 1, 2, 3, 4, 5}, 2, 3);
    run_group(&model, 0, (const int32_t[]){5, 4, 3, 2}, 2, 2);
    run_group(&model, 1, (const int32_t[]){6, 7}, 2, 1);
    token(&model, 1, 0, 2, 3);
    const struct taken taken = take(&model);
    CHECK_EQUAL(taken.n, 6);
    expect(taken.ids[0][0], 0, 1);
    expect(taken.ids[2][0], 4, 5);
    for (int row = 0; row < 4; row++) {
        expect(taken.ids[row][1], NONE, NONE);
    }
    expect(taken.ids[4][0], 3, 2);
    expect(taken.ids[4][1], 6, 7);
    expect(taken.ids[5][0], 1, 0);
    CHECK_EQUAL(counts(&model).lost, 0);
    model_free(&model);
}

TEST(a_layer_with_fewer_experts_per_token) {
    struct model model;
    create(&model, 1000, 0);
    run_group(&model, 0, (const int32_t[]){5}, 1, 1);
    run_group(&model, 1, (const int32_t[]){6, 7}, 2, 1);
    const struct taken taken = take(&model);
    CHECK_EQUAL(taken.n, 1);
    expect(taken.ids[0][0], 5, NONE);
    expect(taken.ids[0][1], 6, 7);
    model_free(&model);
}

/* One more than was said at the start: the row is incomplete, so it counts as lost. */
TEST(more_experts_than_expected) {
    struct model model;
    create(&model, 1000, 0);
    run_group(&model, 0, (const int32_t[]){5, 6, 7}, 3, 1);
    CHECK_EQUAL(counts(&model).lost, 1);
    expect(take(&model).ids[0][0], 5, 6);
    model_free(&model);
}

TEST(sequences_and_phases) {
    struct model model;
    create(&model, 1000, 0);
    fm_stream_begin_sequence(model.stream);
    run_group(&model, 0, (const int32_t[]){0, 1, 2, 3}, 2, 2);
    fm_trace_set_phase(model.stream, 1);
    token(&model, 0, 1, 2, 3);
    fm_stream_begin_sequence(model.stream);
    fm_stream_begin_sequence(model.stream); /* nothing was computed in between */
    token(&model, 0, 1, 2, 3);
    token(&model, 0, 1, 2, 3);
    const struct taken taken = take(&model);
    CHECK_EQUAL(taken.n, 5);
    CHECK(memcmp(taken.starts, (const uint8_t[]){1, 0, 0, 1, 0}, 5) == 0);
    CHECK(memcmp(taken.phases, (const uint8_t[]){0, 0, 1, 1, 1}, 5) == 0);
    model_free(&model);
}

/* A decode that fails leaves no rows, and the sequence begins with what follows. */
TEST(cut) {
    struct model model;
    create(&model, 1000, 0);
    token(&model, 0, 1, 2, 3);
    CHECK_EQUAL(take(&model).n, 1);
    token(&model, 4, 5, 6, 7);
    CHECK_EQUAL(counts(&model).rows, 2);
    fm_stream_begin_sequence(model.stream);
    run_group(&model, 0, (const int32_t[]){2, 3, 4, 5}, 2, 2); /* and no more */
    CHECK_EQUAL(counts(&model).rows, 4);
    fm_trace_cut(model.stream, 2);
    run_group(&model, 1, (const int32_t[]){0, 1}, 2, 1); /* a group that is not the first begins a ubatch too */
    const struct taken taken = take(&model);
    CHECK_EQUAL(taken.n, 2);
    expect(taken.ids[0][0], 4, 5);
    CHECK_EQUAL(taken.starts[0], 0);
    expect(taken.ids[1][0], NONE, NONE);
    expect(taken.ids[1][1], 0, 1);
    CHECK_EQUAL(taken.starts[1], 1);
    fm_trace_cut(model.stream, 0); /* what was taken stays taken */
    CHECK_EQUAL(counts(&model).rows, 3);
    model_free(&model);
}

TEST(taken_in_parts) {
    struct model model;
    create(&model, 10000, 0);
    enum { N = 3000 }; /* more than there is room for at first */
    for (int i = 0; i < N; i++) {
        run_group(&model, 0, (const int32_t[]){i % 8, (i + 1) % 8}, 2, 1);
    }
    CHECK_EQUAL(counts(&model).waiting, N);
    int n = 0;
    for (struct taken taken = take(&model); taken.n > 0; taken = take(&model)) {
        for (uint64_t i = 0; i < taken.n; i++, n++) {
            expect(taken.ids[i][0], n % 8, (n + 1) % 8);
        }
    }
    CHECK_EQUAL(n, N);
    CHECK_EQUAL(counts(&model).rows, N);
    model_free(&model);
}

TEST(no_more_than_allowed) {
    struct model model;
    create(&model, 3, 0);
    run_group(&model, 0, (const int32_t[]){0, 1, 2, 3}, 2, 2);
    run_group(&model, 0, (const int32_t[]){4, 5, 6, 7}, 2, 2); /* does not fit */
    run_group(&model, 1, (const int32_t[]){0, 1, 2, 3}, 2, 2); /* and must not end up in other rows */
    token(&model, 6, 7, 1, 0);
    CHECK_EQUAL(counts(&model).lost, 2);
    const struct taken taken = take(&model);
    CHECK_EQUAL(taken.n, 3);
    expect(taken.ids[1][0], 2, 3);
    expect(taken.ids[1][1], NONE, NONE);
    expect(taken.ids[2][0], 6, 7);
    model_free(&model);
}

TEST(probabilities_go_to_their_pass) {
    struct model model;
    create(&model, 1000, 1);
    fm_trace_probs(model.stream, 10, (const float[]){0.5f, 0.25f, 0.75f, 0.125f}, 2, 2);
    run_group(&model, 0, (const int32_t[]){0, 1, 2, 3}, 2, 2);
    fm_trace_probs(model.stream, 12, (const float[]){0.5f, 0.25f}, 2, 1); /* of a layer that is not streamed */
    run_group(&model, 1, (const int32_t[]){4, 5}, 2, 1);
    fm_trace_probs(model.stream, 10, (const float[]){0.5f}, 1, 1); /* of another shape */
    run_group(&model, 0, (const int32_t[]){4, 5}, 2, 1);
    const struct taken taken = take(&model);
    CHECK_EQUAL(taken.n, 3);
    CHECK(taken.probs[0][0][0] == 0.5f && taken.probs[0][0][1] == 0.25f);
    CHECK(taken.probs[1][0][0] == 0.75f && taken.probs[1][0][1] == 0.125f);
    CHECK(taken.probs[1][1][0] != taken.probs[1][1][0]);
    CHECK(taken.probs[2][0][0] != taken.probs[2][0][0]);
    model_free(&model);
}

TEST(start_and_stop) {
    struct model model;
    create(&model, 1000, 0);
    CHECK_EQUAL(fm_trace_start(model.stream, K, 1000, 0), FM_BAD_STATE);
    CHECK_TEXT(fm_last_message(), "already");
    token(&model, 0, 1, 2, 3);
    fm_trace_stop(model.stream);
    token(&model, 0, 1, 2, 3);
    fm_stream_begin_sequence(model.stream);
    fm_trace_cut(model.stream, 0);
    CHECK_EQUAL(counts(&model).rows, 0);
    CHECK_EQUAL(take(&model).n, 0);
    CHECK_EQUAL(fm_trace_start(model.stream, 0, 1000, 0), FM_BAD_ARGUMENT);
    CHECK_EQUAL(fm_trace_start(model.stream, K, 0, 0), FM_BAD_ARGUMENT);
    CHECK_EQUAL(fm_trace_start(model.stream, K, 1000, 0), FM_OK);
    token(&model, 0, 1, 2, 3);
    CHECK_EQUAL(take(&model).n, 1);
    model_free(&model);
}
