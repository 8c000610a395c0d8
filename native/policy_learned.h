/* policy_learned.h: the arithmetic of the policy `learned`, for one group at a time.
 *
 * The score of expert e after a token is bias[e] + weight . features[e] + the sum over the rows that
 * count: one for each expert that the token has just used, here and in the groups before, one for
 * the set of those it has used here, and one for the set of those it has used in the first group,
 * which mostly tells which token it is. The lowest leaves.
 * Arrays over experts are `stride` long, a multiple of LEARNED_LANES; what is beyond n_expert stays
 * finite and is never looked at. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    LEARNED_EMAS = 3,
    LEARNED_FEATURES = 6,
    LEARNED_CONTEXTS = 9, /* at most: the group itself and those before it */
    LEARNED_HORIZON = 4,  /* tokens between a step and learning from it */
    LEARNED_LANES = 8,
};

/* Of the use of each expert up to one token. */
struct learned_statistics {
    float *ema;     /* [LEARNED_EMAS][stride] moving averages of use, 0 to 1 */
    float *age;     /* [stride] tokens since the last use, capped */
    float *count;   /* [stride] uses in this request */
    float n_tokens; /* in this request */
    float n_used;   /* the most experts that a token has used: top-k */
};

struct learned_model {
    int32_t n_expert;
    int32_t stride;
    int32_t n_context; /* rows of experts: this group's, then those of the other contexts */
    int32_t n_sets;    /* rows of sets here, by hash, then as many of sets in the first group: a power of two */
    float *bias;       /* [stride] */
    float weight[LEARNED_FEATURES];
    float *rows;       /* [n_context + 2 n_sets][stride] */
    float *learned;    /* [n_context + 2 n_sets] how often each row was learned from */
};

/* What was known when a token had passed the group. */
struct learned_step {
    int64_t token;
    float *features; /* [LEARNED_FEATURES][stride] */
    int32_t *rows;   /* [n_rows] rows that count */
    int32_t n_rows;
};

/* How many a group looks at. More than four before it pay little; where experts are few, they also cost little. */
static inline int32_t learned_contexts(int32_t n_expert) {
    return n_expert <= 64 ? LEARNED_CONTEXTS : 5;
}

bool learned_statistics_new(struct learned_statistics *statistics, int32_t stride);
void learned_statistics_free(struct learned_statistics *statistics);
void learned_statistics_copy(struct learned_statistics *to, const struct learned_statistics *from, int32_t stride);
/* One token has used these n experts. */
void learned_statistics_add(struct learned_statistics *statistics, int32_t stride, const int32_t *experts, int32_t n);
void learned_features(const struct learned_statistics *statistics, int32_t n_expert, int32_t stride,
                      float *features);

bool learned_model_new(struct learned_model *model, int32_t n_expert, int32_t n_context);
void learned_model_free(struct learned_model *model);
/* The row of a set of experts, in whatever order: of this group's, or of the first group's. */
int32_t learned_set_row(const struct learned_model *model, bool of_first, const int32_t *experts, int32_t n);
/* As so many numbers: bias [n_expert], weight, rows [all][n_expert], learned [all]. */
size_t learned_model_size(const struct learned_model *model);
void learned_model_save(const struct learned_model *model, float *weights);
bool learned_model_can_load(const struct learned_model *model, const float *weights);
void learned_model_load(struct learned_model *model, const float *weights);
void learned_score(const struct learned_model *model, const struct learned_step *step, float *score);

/* The uses after a step: in the d-th token after it, d = 1 to LEARNED_HORIZON, and in its own, d = 0. */
struct learned_uses {
    const int32_t *experts[LEARNED_HORIZON + 1];
    int32_t n[LEARNED_HORIZON + 1];
};
/* n_slots: of the group. n_used: experts of a token. score: of the token LEARNED_HORIZON after the step. scratch: [2][stride]. */
void learned_learn(struct learned_model *model, const struct learned_step *step, const struct learned_uses *uses,
                   float n_slots, float n_used, const float *score, float *scratch);
