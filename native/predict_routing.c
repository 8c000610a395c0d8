/* predict_routing.c: the routing-context predictor. What the token has used in the four groups before, and
 * what the group used for the last token, say what the group will use: a logistic model per expert
 * that learns from each token as it passes. Three groups ahead it does without those between. It learns
 * from the prediction that was asked for last, which has seen fewer groups where a guess was made early. */

#include <stdlib.h>
#include <string.h>

#include "approx.h"
#include "lookahead.h"

enum {
    N_CONTEXTS = 5, /* the four groups before, and the group's own last token */
    N_FEATURES = 3, /* two moving averages of use, and use by the last token */
    LANES = 8,
};

static const float decays[2] = {0.8f, 0.98f};
static const float start_bias = -3.0f;
static const float start_weight[N_FEATURES] = {0.3f, 0.5f, 0.0f};
static const float row_rate = 0.06f;
static const float bias_rate = 0.02f;
static const float weight_rate = 0.05f;

struct group {
    int32_t n_expert;
    int32_t stride;
    int64_t n_tokens;  /* that have passed */
    int64_t known_for; /* probability and rows are for the token after so many; -1: for none */
    int32_t n_last;
    int32_t *last;     /* [n_expert] what the last token has used */
    int32_t n_rows;
    int32_t *rows;     /* rows that count for the next token */
    int32_t first_row[N_CONTEXTS];
    float weight[N_FEATURES];
    float *bias;        /* [stride] */
    float *ema;         /* [2][stride] */
    float *features;    /* [N_FEATURES][stride] of the next token */
    float *probability; /* [stride] */
    float *matrix;      /* [all rows][stride] */
};

struct fm_predictor {
    int32_t n_groups;
    int64_t n_passes;     /* tokens that have begun */
    int32_t last_group;   /* that a token has passed */
    int64_t *pass_of;     /* [n_groups] the last of them that each group has seen */
    struct group groups[];
};

/* Context j of group g: one before it, or the last ones for the token before; the group itself last. */
static int32_t context_group(int32_t n_groups, int32_t g, int32_t j, int64_t *n_tokens_back) {
    int32_t q = j == N_CONTEXTS - 1 ? g - n_groups : g - 1 - j;
    *n_tokens_back = 0;
    while (q < 0) {
        q += n_groups;
        ++*n_tokens_back;
    }
    return q;
}

static void update_features(struct group *group) {
    const int32_t stride = group->stride;
    float *restrict features = group->features;
    const float *restrict ema = group->ema;
    for (int32_t i = 0; i < 2 * stride; i++) {
        features[i] = fm_log(ema[i] + 0.001f) + 3.0f;
    }
    float *restrict used = features + 2 * stride;
    memset(used, 0, (size_t)stride * sizeof *used);
    for (int32_t i = 0; i < group->n_last; i++) {
        used[group->last[i]] = 1.0f;
    }
}

static bool new_group(struct fm_predictor *predictor, int32_t g, const int32_t *n_expert) {
    struct group *group = &predictor->groups[g];
    size_t n_rows = 0;
    for (int32_t j = 0; j < N_CONTEXTS; j++) {
        int64_t back;
        group->first_row[j] = (int32_t)n_rows;
        n_rows += (size_t)n_expert[context_group(predictor->n_groups, g, j, &back)];
    }
    const size_t stride = ((size_t)n_expert[g] + LANES - 1) / LANES * LANES;
    group->n_expert = n_expert[g];
    group->stride = (int32_t)stride;
    group->known_for = -1;
    group->last = malloc((size_t)n_expert[g] * sizeof *group->last);
    group->rows = malloc(n_rows * sizeof *group->rows);
    group->matrix = calloc(n_rows * stride, sizeof *group->matrix);
    group->bias = calloc(stride * (1 + 2 + N_FEATURES + 1), sizeof *group->bias);
    if (group->last == NULL || group->rows == NULL || group->matrix == NULL || group->bias == NULL) {
        return false;
    }
    group->ema = group->bias + stride;
    group->features = group->ema + 2 * stride;
    group->probability = group->features + N_FEATURES * stride;
    for (size_t e = 0; e < stride; e++) {
        group->bias[e] = start_bias;
    }
    memcpy(group->weight, start_weight, sizeof start_weight);
    update_features(group);
    return true;
}

static void destroy(struct fm_predictor *predictor) {
    if (predictor == NULL) {
        return;
    }
    for (int32_t g = 0; g < predictor->n_groups; g++) {
        struct group *group = &predictor->groups[g];
        free(group->last);
        free(group->rows);
        free(group->matrix);
        free(group->bias);
    }
    free(predictor->pass_of);
    free(predictor);
}

static struct fm_predictor *create(const struct fm_policy_setup *setup) {
    const size_t n = (size_t)setup->n_groups;
    struct fm_predictor *predictor = calloc(1, sizeof *predictor + n * sizeof predictor->groups[0]);
    if (predictor == NULL) {
        return NULL;
    }
    predictor->n_groups = setup->n_groups;
    predictor->last_group = setup->n_groups;
    predictor->pass_of = calloc(n, sizeof *predictor->pass_of);
    bool have_memory = predictor->pass_of != NULL;
    for (int32_t g = 0; g < setup->n_groups && have_memory; g++) {
        have_memory = new_group(predictor, g, setup->n_expert);
    }
    if (!have_memory) {
        destroy(predictor);
        return NULL;
    }
    return predictor;
}

/* The groups before g have passed the current token in this pass, or else it skips them. */
static void find_rows(struct fm_predictor *predictor, int32_t g) {
    struct group *group = &predictor->groups[g];
    group->n_rows = 0;
    /* the first group of a pass begins it; until then the last pass is not this token's */
    const int64_t pass = g > predictor->last_group ? predictor->n_passes : predictor->n_passes + 1;
    for (int32_t j = 0; j < N_CONTEXTS; j++) {
        int64_t back;
        const int32_t q = context_group(predictor->n_groups, g, j, &back);
        const struct group *source = &predictor->groups[q];
        if (j < N_CONTEXTS - 1 && predictor->pass_of[q] != pass - back) {
            continue; /* it has skipped that token, or has seen another since */
        }
        for (int32_t i = 0; i < source->n_last; i++) {
            group->rows[group->n_rows++] = group->first_row[j] + source->last[i];
        }
    }
}

static void compute(struct fm_predictor *predictor, int32_t g) {
    struct group *group = &predictor->groups[g];
    const int32_t stride = group->stride;
    const float *restrict f = group->features;
    const float *restrict bias = group->bias;
    float *restrict p = group->probability;
    const float *w = group->weight;
    find_rows(predictor, g);
    for (int32_t e = 0; e < stride; e++) {
        p[e] = bias[e] + w[0] * f[e] + w[1] * f[e + stride] + w[2] * f[e + 2 * stride];
    }
    for (int32_t i = 0; i < group->n_rows; i++) {
        const float *restrict row = group->matrix + (size_t)group->rows[i] * (size_t)stride;
        for (int32_t e = 0; e < stride; e++) {
            p[e] += row[e];
        }
    }
    for (int32_t e = 0; e < stride; e++) {
        p[e] = fm_sigmoid(p[e]);
    }
    group->known_for = group->n_tokens;
}

static void predict(struct fm_predictor *predictor, int32_t g, float *probability) {
    struct group *group = &predictor->groups[g];
    compute(predictor, g);
    memcpy(probability, group->probability, (size_t)group->n_expert * sizeof *probability);
}

static void learn(struct group *group, const int32_t *experts, int32_t n) {
    const int32_t stride = group->stride;
    float *restrict error = group->probability;
    for (int32_t i = 0; i < n; i++) {
        error[experts[i]] -= 1.0f;
    }
    for (int32_t e = group->n_expert; e < stride; e++) {
        error[e] = 0.0f;
    }
    for (int32_t f = 0; f < N_FEATURES; f++) {
        const float *restrict feature = group->features + (size_t)f * (size_t)stride;
        float lanes[LANES] = {0};
        for (int32_t e = 0; e < stride; e += LANES) {
            for (int32_t i = 0; i < LANES; i++) {
                lanes[i] += error[e + i] * feature[e + i];
            }
        }
        float sum = 0.0f;
        for (int32_t i = 0; i < LANES; i++) {
            sum += lanes[i];
        }
        group->weight[f] -= weight_rate / (float)group->n_expert * sum;
    }
    float *restrict bias = group->bias;
    for (int32_t e = 0; e < stride; e++) {
        bias[e] -= bias_rate * error[e];
        error[e] *= row_rate;
    }
    for (int32_t i = 0; i < group->n_rows; i++) {
        float *restrict row = group->matrix + (size_t)group->rows[i] * (size_t)stride;
        for (int32_t e = 0; e < stride; e++) {
            row[e] -= error[e];
        }
    }
}

static void observe(struct fm_predictor *predictor, int32_t g, const struct fm_observation *seen) {
    struct group *group = &predictor->groups[g];
    const int32_t stride = group->stride;
    const int32_t *experts = seen->experts;
    const int32_t n = seen->n < group->n_expert ? seen->n : group->n_expert;
    if (group->known_for != group->n_tokens) {
        compute(predictor, g);
    }
    learn(group, experts, n);
    for (int32_t d = 0; d < 2; d++) {
        float *restrict ema = group->ema + (size_t)d * (size_t)stride;
        for (int32_t e = 0; e < stride; e++) {
            ema[e] = ema[e] * decays[d] + 1e-20f; /* never denormal */
        }
        for (int32_t i = 0; i < n; i++) {
            ema[experts[i]] += 1.0f - decays[d];
        }
    }
    memcpy(group->last, experts, (size_t)n * sizeof *experts);
    group->n_last = n;
    update_features(group);
    group->n_tokens++;
    if (g <= predictor->last_group) {
        predictor->n_passes++;
    }
    predictor->last_group = g;
    predictor->pass_of[g] = predictor->n_passes;
}

const struct fm_predictor_type fm_predictor_routing = {
    .name = "routing",
    .n_ahead = 3,
    .create = create,
    .destroy = destroy,
    .observe = observe,
    .predict = predict,
};
