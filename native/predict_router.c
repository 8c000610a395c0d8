/* predict_router.c: the next layer's router applied to what goes into this layer's experts. The residual
 * stream changes little from one layer to the next, so the two routers mostly see alike inputs.
 *
 * A score is no probability: how often the expert of each rank was really used is measured as it goes.
 * Biases that an architecture adds to the scores are left out. */

#include <stdlib.h>
#include <string.h>

#include "lookahead.h"

enum { MAX_RANKS = 64, LANES = 16 };

static const float rate = 0.02f;

struct group {
    int32_t n_expert;
    const float *router; /* [n_expert][width]; NULL: not seen */
    int64_t width;
    int32_t n_ranked;
    int32_t ranked[MAX_RANKS]; /* the last guess, best first */
};

struct fm_predictor {
    float *activation; /* [width] of the group that was passed last */
    int64_t width;     /* 0: not at hand */
    int64_t allocated;
    int32_t n_used;
    float chance[MAX_RANKS]; /* that the expert of a rank is used */
    float *scores;           /* [most experts] */
    int32_t n_groups;
    struct group groups[];
};

static void destroy(struct fm_predictor *p) {
    if (p != NULL) {
        free(p->activation);
        free(p->scores);
        free(p);
    }
}

static struct fm_predictor *create(const struct fm_policy_setup *setup) {
    struct fm_predictor *p = calloc(1, sizeof *p + (size_t)setup->n_groups * sizeof p->groups[0]);
    if (p == NULL) {
        return NULL;
    }
    int32_t most = 1;
    p->n_groups = setup->n_groups;
    for (int32_t g = 0; g < setup->n_groups; g++) {
        p->groups[g].n_expert = setup->n_expert[g];
        most = setup->n_expert[g] > most ? setup->n_expert[g] : most;
    }
    p->scores = calloc((size_t)most, sizeof *p->scores);
    if (p->scores == NULL) {
        destroy(p);
        return NULL;
    }
    return p;
}

/* Was the last guess for this group right, rank by rank? */
static void score_guess(struct fm_predictor *p, struct group *group, const struct fm_observation *seen) {
    for (int32_t r = 0; r < group->n_ranked; r++) {
        bool used = false;
        for (int32_t i = 0; i < seen->n; i++) {
            used = used || seen->experts[i] == group->ranked[r];
        }
        p->chance[r] += rate * ((used ? 1.0f : 0.0f) - p->chance[r]);
    }
    group->n_ranked = 0;
}

static void observe(struct fm_predictor *p, int32_t index, const struct fm_observation *seen) {
    struct group *group = &p->groups[index];
    score_guess(p, group, seen);
    p->n_used = seen->n;
    p->width = 0;
    if (seen->router != NULL) {
        group->router = seen->router;
        group->width = seen->width;
    }
    if (seen->activation == NULL) {
        return;
    }
    if (seen->width > p->allocated) {
        free(p->activation);
        p->activation = malloc((size_t)seen->width * sizeof *p->activation);
        p->allocated = p->activation != NULL ? seen->width : 0;
    }
    if (p->activation != NULL) {
        memcpy(p->activation, seen->activation, (size_t)seen->width * sizeof *p->activation);
        p->width = seen->width;
    }
}

/* Sums in lanes, which compilers turn into vectors; the order does not matter for a guess. */
static float dot(const float *restrict a, const float *restrict b, int64_t n) {
    float lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int k = 0; k < LANES; k++) {
            lanes[k] += a[i + k] * b[i + k];
        }
    }
    float sum = 0;
    for (; i < n; i++) {
        sum += a[i] * b[i];
    }
    for (int k = 0; k < LANES; k++) {
        sum += lanes[k];
    }
    return sum;
}

static void predict(struct fm_predictor *p, int32_t index, float *probability) {
    struct group *group = &p->groups[index];
    memset(probability, 0, (size_t)group->n_expert * sizeof *probability);
    group->n_ranked = 0;
    /* not from the last group to the first: the next token is not known yet */
    if (index == 0 || group->router == NULL || group->width != p->width) {
        return;
    }
    for (int32_t e = 0; e < group->n_expert; e++) {
        p->scores[e] = dot(group->router + (int64_t)e * group->width, p->activation, group->width);
    }
    const int32_t most = 2 * p->n_used < MAX_RANKS ? 2 * p->n_used : MAX_RANKS;
    for (int32_t r = 0; r < most && r < group->n_expert; r++) {
        int32_t best = -1;
        for (int32_t e = 0; e < group->n_expert; e++) {
            bool taken = false;
            for (int32_t i = 0; i < r; i++) {
                taken = taken || group->ranked[i] == e;
            }
            if (!taken && (best < 0 || p->scores[e] > p->scores[best])) {
                best = e;
            }
        }
        group->ranked[group->n_ranked++] = best;
        probability[best] = p->chance[r];
    }
}

const struct fm_predictor_type fm_predictor_router = {
    .name = "router",
    .n_ahead = 1,
    .create = create,
    .destroy = destroy,
    .observe = observe,
    .predict = predict,
};
