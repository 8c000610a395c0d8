/* test_predict_routing.c: the routing-context predictor against its formulas in double precision; what it
 * learns from a trace that can be predicted; groups that a token skips. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "lookahead.h"

enum { N_GROUPS = 6, N_TOKENS = 150, MAX_EXPERT = 20, K = 3 };

static const int32_t n_expert[N_GROUPS] = {12, 8, 20, 12, 9, 16};
static const struct fm_policy_setup setup = {.n_groups = N_GROUPS, .n_expert = n_expert};

static void observe(struct fm_predictor *predictor, int32_t group, const int32_t *experts, int32_t n) {
    const struct fm_observation observation = {.experts = experts, .n = n};
    fm_predictor_routing.observe(predictor, group, &observation);
}

struct trace {
    int32_t experts[N_TOKENS][N_GROUPS][K];
    bool skips[N_TOKENS][N_GROUPS];
};

static struct trace *new_trace(bool skips) {
    struct trace *trace = calloc(1, sizeof *trace);
    CHECK(trace != NULL);
    unsigned long long state = 88172645463325252u;
    for (int t = 0; t < N_TOKENS; t++) {
        const unsigned kind = check_random(&state) % 3;
        for (int g = 0; g < N_GROUPS; g++) {
            trace->skips[t][g] = skips && check_random(&state) % 5 == 0;
            for (int k = 0; k < K; k++) {
                /* distinct: one of each third */
                const unsigned third = (unsigned)n_expert[g] / K;
                const unsigned r = check_random(&state);
                trace->experts[t][g][k] = (int32_t)((r % 4 != 0 ? kind : r / 4) % third + (unsigned)k * third);
            }
        }
    }
    return trace;
}

static bool uses(const struct trace *trace, int t, int g, int e) {
    for (int k = 0; k < K; k++) {
        if (trace->experts[t][g][k] == e) {
            return true;
        }
    }
    return false;
}

struct reference {
    double b[N_GROUPS][MAX_EXPERT];
    double w[N_GROUPS][3];
    double W[N_GROUPS][5][MAX_EXPERT][MAX_EXPERT];
};

/* The token before t that passed the group; -1: none. */
static int previous(const struct trace *trace, int t, int g) {
    do {
        t--;
    } while (t >= 0 && trace->skips[t][g]);
    return t;
}

/* Context j of token t in group g: which token and group; false: it has none. */
static bool context(const struct trace *trace, int t, int g, int j, int *token, int *group) {
    *group = j == 4 ? g : g - 1 - j;
    *token = t;
    if (j == 4) {
        *token = previous(trace, t, g);
        return *token >= 0;
    }
    if (*group < 0) {
        *group += N_GROUPS;
        --*token;
    }
    return *token >= 0 && !trace->skips[*token][*group];
}

static double probability(const struct reference *r, const struct trace *trace, int t, int g, int e, double *phi) {
    const double decays[] = {0.8, 0.98};
    double z = r->b[g][e];
    for (int d = 0; d < 2; d++) {
        double m = 0;
        for (int s = 0; s < t; s++) {
            m = trace->skips[s][g] ? m : decays[d] * m + (1 - decays[d]) * uses(trace, s, g, e);
        }
        phi[d] = log(m + 0.001) + 3;
    }
    const int last = previous(trace, t, g);
    phi[2] = last >= 0 && uses(trace, last, g, e);
    for (int f = 0; f < 3; f++) {
        z += r->w[g][f] * phi[f];
    }
    for (int j = 0; j < 5; j++) {
        int token;
        int group;
        for (int k = 0; k < K && context(trace, t, g, j, &token, &group); k++) {
            z += r->W[g][j][trace->experts[token][group][k]][e];
        }
    }
    return 1 / (1 + exp(-z));
}

static void learn(struct reference *r, const struct trace *trace, int t, int g, double p[MAX_EXPERT][4]) {
    double sum[3] = {0};
    for (int e = 0; e < n_expert[g]; e++) {
        const double error = p[e][3] - uses(trace, t, g, e);
        for (int f = 0; f < 3; f++) {
            sum[f] += error * p[e][f];
        }
        r->b[g][e] -= 0.02 * error;
        for (int j = 0; j < 5; j++) {
            int token;
            int group;
            for (int k = 0; k < K && context(trace, t, g, j, &token, &group); k++) {
                r->W[g][j][trace->experts[token][group][k]][e] -= 0.06 * error;
            }
        }
    }
    for (int f = 0; f < 3; f++) {
        r->w[g][f] -= 0.05 / n_expert[g] * sum[f];
    }
}

static void follow(bool skips) {
    struct trace *trace = new_trace(skips);
    struct reference *r = calloc(1, sizeof *r);
    struct fm_predictor *predictor = fm_predictor_routing.create(&setup);
    CHECK(r != NULL && predictor != NULL);
    for (int g = 0; g < N_GROUPS; g++) {
        memcpy(r->w[g], (double[]){0.3, 0.5, 0}, sizeof r->w[g]);
        for (int e = 0; e < MAX_EXPERT; e++) {
            r->b[g][e] = -3;
        }
    }
    unsigned long long state = 7;
    for (int t = 0; t < N_TOKENS; t++) {
        for (int g = 0; g < N_GROUPS; g++) {
            if (trace->skips[t][g]) {
                continue;
            }
            double p[MAX_EXPERT][4];
            float found[MAX_EXPERT];
            const bool asks = check_random(&state) % 3 != 0; /* it learns whether it was asked or not */
            if (asks) {
                fm_predictor_routing.predict(predictor, g, found);
            }
            for (int e = 0; e < n_expert[g]; e++) {
                p[e][3] = probability(r, trace, t, g, e, p[e]);
                CHECK(!asks || fabs(found[e] - p[e][3]) < 1e-4);
            }
            learn(r, trace, t, g, p);
            observe(predictor, g, trace->experts[t][g], K);
        }
    }
    fm_predictor_routing.destroy(predictor);
    free(r);
    free(trace);
}

TEST(its_probabilities_are_those_of_the_formulas) {
    follow(false);
}

TEST(a_group_that_a_token_skips_is_no_context_of_it) {
    follow(true);
}

TEST(it_learns_what_follows_from_the_groups_before) {
    struct fm_predictor *predictor = fm_predictor_routing.create(&setup);
    CHECK(predictor != NULL);
    unsigned long long state = 3;
    float found[MAX_EXPERT];
    for (int t = 0; t < 2000; t++) {
        const int32_t kind = (int32_t)(check_random(&state) % 4);
        for (int32_t g = 0; g < N_GROUPS; g++) {
            const int32_t used[] = {kind, kind + 4};
            fm_predictor_routing.predict(predictor, g, found);
            for (int e = 0; e < n_expert[g] && t >= 1900 && g > 0; e++) {
                CHECK(e == used[0] || e == used[1] ? found[e] > 0.9f : found[e] < 0.1f);
            }
            for (int e = 0; e < 8 && t >= 1900 && g == 0; e++) {
                CHECK(found[e] > 0.02f && found[e] < 0.8f); /* nobody knows what comes first */
            }
            observe(predictor, g, used, 2);
        }
    }
    fm_predictor_routing.destroy(predictor);
}

TEST(asking_changes_nothing) {
    struct trace *trace = new_trace(false);
    struct fm_predictor *asked = fm_predictor_routing.create(&setup);
    struct fm_predictor *quiet = fm_predictor_routing.create(&setup);
    CHECK(asked != NULL && quiet != NULL);
    float first[MAX_EXPERT];
    float second[MAX_EXPERT];
    for (int t = 0; t < N_TOKENS; t++) {
        for (int g = 0; g < N_GROUPS; g++) {
            fm_predictor_routing.predict(asked, (g + 2) % N_GROUPS, first);
            fm_predictor_routing.predict(asked, g, first);
            fm_predictor_routing.predict(asked, g, second);
            CHECK(memcmp(first, second, (size_t)n_expert[g] * sizeof first[0]) == 0);
            observe(asked, g, trace->experts[t][g], K);
            observe(quiet, g, trace->experts[t][g], K);
        }
    }
    for (int g = 0; g < N_GROUPS; g++) {
        fm_predictor_routing.predict(asked, g, first);
        fm_predictor_routing.predict(quiet, g, second);
        CHECK(memcmp(first, second, (size_t)n_expert[g] * sizeof first[0]) == 0);
    }
    fm_predictor_routing.destroy(asked);
    fm_predictor_routing.destroy(quiet);
    free(trace);
}
