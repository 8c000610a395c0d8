/* test_learned.c: the policy `learned` against a plain double-precision model of its formulas, score
 * for score; batches against single tokens, bit for bit; its weights; its invariants. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "policy.h"
#include "policy_learned.h"

enum { N_GROUPS = 6, N_TOKENS = 220, MAX_EXPERT = 70, MAX_USED = 10 };

static const int32_t n_expert[N_GROUPS] = {12, 8, 20, 70, 9, 16};
static const int32_t n_slots[N_GROUPS] = {6, 0, 20, 30, 3, 8}; /* several discounts */

/* A trace with something to learn: each token has a hidden kind that follows the last one, and a
 * kind mostly uses the same experts. */
struct trace {
    int n[N_TOKENS][N_GROUPS];
    int experts[N_TOKENS][N_GROUPS][MAX_USED];
};

static void choose(unsigned long long *state, int kind, int group, int *n, int *experts) {
    *n = 2 + (int)(check_random(state) % 2);
    if (group == 2 && check_random(state) % 8 == 0) {
        *n = MAX_USED; /* more than there was room for */
    }
    for (int i = 0; i < *n;) {
        const unsigned r = check_random(state);
        const int e = (int)((r % 4 != 0 ? (unsigned)(kind * 5 + group * 3 + i * 7) : r / 4 + (unsigned)i) %
                            (unsigned)n_expert[group]);
        int k = 0;
        while (k < i && experts[k] != e) {
            k++;
        }
        if (k == i) {
            experts[i++] = e;
        } else if (r % 4 != 0) {
            experts[i] = -1;
            for (int o = 0; o < n_expert[group] && experts[i] < 0; o++) {
                int j = 0;
                while (j < i && experts[j] != o) {
                    j++;
                }
                experts[i] = j == i ? o : -1;
            }
            i++;
        }
    }
}

static struct trace *new_trace(void) {
    struct trace *trace = calloc(1, sizeof *trace);
    CHECK(trace != NULL);
    unsigned long long state = 88172645463325252u;
    for (int t = 0, kind = 0; t < N_TOKENS; t++) {
        kind = check_random(&state) % 3 == 0 ? (int)(check_random(&state) % 6) : (kind + 1) % 6;
        for (int g = 0; g < N_GROUPS; g++) {
            choose(&state, kind, g, &trace->n[t][g], trace->experts[t][g]);
        }
    }
    return trace;
}

static struct fm_policy *create(void) {
    const struct fm_policy_setup setup = {.n_groups = N_GROUPS, .n_expert = n_expert, .n_slots = n_slots};
    struct fm_policy *policy = fm_policy_learned.create(&setup);
    CHECK(policy != NULL);
    return policy;
}

static void pass(struct fm_policy *policy, const struct trace *trace, int t, int g) {
    for (int i = 0; i < trace->n[t][g]; i++) {
        (i % 2 == 0 ? fm_policy_learned.on_hit : fm_policy_learned.on_miss)(policy, g, trace->experts[t][g][i]);
    }
    fm_policy_learned.end_token(policy, g);
}

static void feed(struct fm_policy *policy, const struct trace *trace, int from, int to) {
    for (int t = from; t < to; t++) {
        for (int g = 0; g < N_GROUPS; g++) {
            pass(policy, trace, t, g);
        }
    }
}

static bool uses(const struct trace *trace, int t, int g, int e) {
    for (int i = 0; i < trace->n[t][g]; i++) {
        if (trace->experts[t][g][i] == e) {
            return true;
        }
    }
    return false;
}

/* The formulas of docs/POLICIES.md as they stand there, from the whole history each time. */
struct reference {
    double b[N_GROUPS][MAX_EXPERT];
    double w[N_GROUPS][6];
    /* of the set of experts that token t uses here, or in the first group, by its first such token */
    double V[2][N_GROUPS][N_TOKENS][MAX_EXPERT];
    double n_V[2][N_GROUPS][N_TOKENS];
    double n_W[N_GROUPS][9][MAX_EXPERT]; /* how often it was learned from */
    double W[N_GROUPS][9][MAX_EXPERT][MAX_EXPERT]; /* group, context, used expert, scored expert */
    double z[N_TOKENS][N_GROUPS][MAX_EXPERT];
    int sequence_start[N_TOKENS]; /* first token of the request that t belongs to */
};

static int32_t set_row(const struct trace *trace, int t, int g, int n_sets) {
    const struct learned_model model = {.n_context = 0, .n_sets = n_sets};
    return learned_set_row(&model, false, trace->experts[t][g], trace->n[t][g]);
}

/* The first token that used the same set, or one that shares its row. */
static int same_set(const struct trace *trace, int t, int g, int n_sets) {
    const int32_t row = set_row(trace, t, g, n_sets);
    int s = 0;
    while (set_row(trace, s, g, n_sets) != row) {
        s++;
    }
    return s;
}

/* Rows of sets that a group with so many experts has room for. */
static int n_sets(int g) {
    int n = 4096;
    while (n * ((n_expert[g] + 7) / 8 * 8) > 65536) {
        n /= 2;
    }
    return n;
}

static void reference_features(const struct reference *r, const struct trace *trace, int t, int g, int e, double *phi) {
    const double decays[] = {0.8, 0.95, 0.995};
    for (int d = 0; d < 3; d++) {
        double m = 0;
        for (int s = 0; s <= t; s++) {
            m = decays[d] * m + (1 - decays[d]) * uses(trace, s, g, e);
        }
        phi[d] = log(m + 0.001) + 3;
    }
    int age = 0;
    while (age < 512 && (t - age < 0 || !uses(trace, t - age, g, e))) {
        age++;
    }
    int k = 1;
    int c = 0;
    const int start = r->sequence_start[t];
    for (int s = 0; s <= t; s++) {
        k = trace->n[s][g] > k ? trace->n[s][g] : k;
        c += s >= start && uses(trace, s, g, e);
    }
    phi[3] = 1.0 / (age > 1 ? age : 1);
    phi[4] = log(1.0 + age) - 2.5;
    phi[5] = 3 * (c + 0.5) / (t - start + 1 + 1 + 0.5 * n_expert[g] / k);
}

/* Context q of token t in group g: which token and group. */
static int context(int t, int g, int q, int *from) {
    for (*from = g - q; *from < 0; *from += N_GROUPS) {
        t--;
    }
    return t;
}

static int n_contexts(int g) {
    return n_expert[g] <= 64 ? 9 : 5;
}

static double reference_score(const struct reference *r, const struct trace *trace, int t, int g, int e, double *phi) {
    reference_features(r, trace, t, g, e, phi);
    double z = r->b[g][e];
    for (int f = 0; f < 6; f++) {
        z += r->w[g][f] * phi[f];
    }
    for (int q = 0; q < n_contexts(g); q++) {
        int from;
        const int token = context(t, g, q, &from);
        for (int i = 0; token >= 0 && i < trace->n[token][from]; i++) {
            z += r->W[g][q][trace->experts[token][from][i]][e];
        }
    }
    z += r->V[0][g][same_set(trace, t, g, n_sets(g))][e];
    return g == 0 ? z : z + r->V[1][g][same_set(trace, t, 0, n_sets(g))][e];
}

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

/* What one update takes of the gradient: more where there were few. */
static double reference_rate(double base, double *n) {
    return base * (1 + 5 / sqrt(1 + (*n)++));
}

static void reference_learn(struct reference *r, const struct trace *trace, int o, int g) {
    double gradient[MAX_EXPERT];
    double sum[6] = {0};
    int k = 1;
    for (int t = 0; t <= o + 4; t++) {
        k = trace->n[t][g] > k ? trace->n[t][g] : k;
    }
    const double worth = fmin(fmax(1 - 0.4 * k / n_slots[g], 0.8), 0.95);
    for (int e = 0; e < n_expert[g]; e++) {
        double phi[6];
        double y = pow(worth, 4) * sigmoid(r->z[o + 4][g][e]);
        for (int d = 4; d >= 1; d--) {
            y = uses(trace, o + d, g, e) ? pow(worth, d - 1) : y;
        }
        gradient[e] = sigmoid(reference_score(r, trace, o, g, e, phi)) - y;
        for (int f = 0; f < 6; f++) {
            sum[f] += gradient[e] * phi[f];
        }
    }
    for (int q = 0; q < n_contexts(g); q++) {
        int from;
        const int token = context(o, g, q, &from);
        for (int i = 0; token >= 0 && i < trace->n[token][from]; i++) {
            const int used = trace->experts[token][from][i];
            const double rate = reference_rate(q == 0 ? 0.01 : 0.003, &r->n_W[g][q][used]);
            for (int e = 0; e < n_expert[g]; e++) {
                r->W[g][q][used][e] -= rate * gradient[e];
            }
        }
    }
    for (int first = 0; first <= (g > 0); first++) {
        const int set = same_set(trace, o, first ? 0 : g, n_sets(g));
        const double rate = reference_rate(0.1, &r->n_V[first][g][set]);
        for (int e = 0; e < n_expert[g]; e++) {
            r->V[first][g][set][e] -= rate * gradient[e];
        }
    }
    for (int e = 0; e < n_expert[g]; e++) {
        r->b[g][e] -= 0.001 * gradient[e];
    }
    for (int f = 0; f < 6; f++) {
        r->w[g][f] -= 0.004 / n_expert[g] * sum[f];
    }
}

static struct reference *new_reference(void) {
    struct reference *r = calloc(1, sizeof *r);
    CHECK(r != NULL);
    const double w[] = {0.3, 0.5, 0.3, 0, -0.1, 0.3};
    for (int g = 0; g < N_GROUPS; g++) {
        memcpy(r->w[g], w, sizeof w);
        for (int e = 0; e < MAX_EXPERT; e++) {
            r->b[g][e] = -0.5;
            r->W[g][0][e][e] = 0.75;
        }
    }
    return r;
}

TEST(its_victims_are_the_lowest_of_the_formulas) {
    struct trace *trace = new_trace();
    struct reference *r = new_reference();
    struct fm_policy *policy = create();
    unsigned long long state = 5;
    for (int t = 0; t < N_TOKENS; t++) {
        if (t == 60 || t == 61 || t == 150) {
            fm_policy_learned.begin_sequence(policy);
        }
        r->sequence_start[t] = t >= 150 ? 150 : t >= 61 ? 61 : t >= 60 ? 60 : 0;
        for (int g = 0; g < N_GROUPS; g++) {
            double phi[6];
            for (int e = 0; e < n_expert[g]; e++) {
                r->z[t][g][e] = reference_score(r, trace, t, g, e, phi);
            }
            if (t >= 4) {
                reference_learn(r, trace, t - 4, g);
            }
            pass(policy, trace, t, g);
            uint8_t may_leave[MAX_EXPERT];
            int lowest = -1;
            for (int e = 0; e < n_expert[g]; e++) {
                may_leave[e] = check_random(&state) % 3 != 0;
                if (may_leave[e] && (lowest < 0 || r->z[t][g][e] < r->z[t][g][lowest])) {
                    lowest = e;
                }
            }
            const int victim = fm_policy_learned.victim(policy, g, may_leave);
            CHECK((victim < 0) == (lowest < 0));
            /* rounding may exchange two that are equal */
            CHECK(victim == lowest || (may_leave[victim] && r->z[t][g][victim] - r->z[t][g][lowest] < 1e-4));
        }
    }
    double most = 0; /* it has learned: the weights are not where they began */
    for (int from = 0; from < n_expert[2]; from++) {
        for (int e = 0; e < n_expert[3]; e++) {
            most = fmax(most, fabs(r->W[3][1][from][e]));
        }
    }
    CHECK(most > 0.01);
    fm_policy_learned.destroy(policy);
    free(r);
    free(trace);
}

static float *weights_of(struct fm_policy *policy, size_t *n) {
    *n = fm_policy_learned.save(policy, NULL, 0);
    float *weights = malloc(*n * sizeof *weights);
    CHECK(weights != NULL);
    CHECK_EQUAL(fm_policy_learned.save(policy, weights, *n), *n);
    return weights;
}

static void check_same(struct fm_policy *a, struct fm_policy *b) {
    size_t n_a;
    size_t n_b;
    float *of_a = weights_of(a, &n_a);
    float *of_b = weights_of(b, &n_b);
    CHECK_EQUAL(n_a, n_b);
    CHECK(memcmp(of_a, of_b, n_a * sizeof *of_a) == 0);
    free(of_a);
    free(of_b);
}

static void check_same_victims(struct fm_policy *a, struct fm_policy *b) {
    for (int g = 0; g < N_GROUPS; g++) {
        uint8_t may_leave[MAX_EXPERT];
        memset(may_leave, 1, sizeof may_leave);
        for (int i = 0; i < n_expert[g]; i++) {
            const int victim = fm_policy_learned.victim(a, g, may_leave);
            CHECK_EQUAL(fm_policy_learned.victim(b, g, may_leave), victim);
            may_leave[victim] = 0;
        }
    }
}

TEST(the_order_of_a_set_does_not_matter_but_its_members_do) {
    const struct learned_model model = {.n_context = 100, .n_sets = 4096};
    int n_taken = 0;
    uint8_t taken[4096] = {0};
    for (int32_t a = 0; a < 32; a++) {
        for (int32_t b = 0; b < a; b++) {
            const int32_t row = learned_set_row(&model, false, (int32_t[]){a, b}, 2);
            CHECK_EQUAL(learned_set_row(&model, false, (int32_t[]){b, a}, 2), row);
            CHECK_EQUAL(learned_set_row(&model, true, (int32_t[]){b, a}, 2), row + 4096);
            CHECK(row >= 100 && row < 100 + 4096);
            n_taken += !taken[row - 100];
            taken[row - 100] = 1;
        }
    }
    CHECK(n_taken > 440); /* of 496 pairs; 468 in the mean if they fell at random */
}

TEST(batches_leave_it_as_single_tokens_do) {
    const int batches[] = {40, 1, 1, 2, 100, 1, 3, 1, 1};
    struct trace *trace = new_trace();
    struct fm_policy *batched = create();
    struct fm_policy *single = create();
    int t = 0;
    for (size_t b = 0; b < sizeof batches / sizeof batches[0]; b++) {
        fm_policy_learned.begin_sequence(batched);
        fm_policy_learned.begin_sequence(single);
        for (int g = 0; g < N_GROUPS; g++) {
            fm_policy_learned.begin_pass(batched, g, batches[b]);
            for (int i = 0; i < batches[b]; i++) {
                pass(batched, trace, t + i, g);
            }
        }
        feed(single, trace, t, t + batches[b]);
        t += batches[b];
        check_same(batched, single);
        check_same_victims(batched, single);
    }
    fm_policy_learned.destroy(batched);
    fm_policy_learned.destroy(single);
    free(trace);
}

/* Of a long batch only the end is learned from, but all of it counts. */
TEST(a_long_batch_counts_as_a_whole) {
    struct trace *trace = new_trace();
    struct fm_policy *batched = create();
    struct fm_policy *single = create();
    struct fm_policy *last = create();
    fm_policy_learned.freeze(batched, true);
    fm_policy_learned.freeze(single, true);
    for (int g = 0; g < N_GROUPS; g++) {
        fm_policy_learned.begin_pass(batched, g, 200);
        fm_policy_learned.begin_pass(last, g, 200);
        for (int t = 0; t < 200; t++) {
            pass(batched, trace, t, g);
            pass(last, trace, t, g);
        }
        CHECK(fm_policy_learned.verify(batched, g, NULL));
    }
    feed(single, trace, 0, 200);
    check_same_victims(batched, single);
    fm_policy_learned.freeze(batched, false);
    fm_policy_learned.freeze(single, false);
    feed(batched, trace, 200, N_TOKENS);
    feed(single, trace, 200, N_TOKENS);
    check_same(batched, single);

    /* 128 tokens, of which the last 4 are still waiting: each learns once from its set of experts */
    size_t n;
    float *weights = weights_of(last, &n);
    double learned = 0;
    for (int i = 1; i <= 2 * n_sets(N_GROUPS - 1); i++) { /* the counts of sets are the last numbers */
        learned += weights[n - (size_t)i];
    }
    CHECK_EQUAL(learned, 2 * 124);
    free(weights);
    fm_policy_learned.destroy(batched);
    fm_policy_learned.destroy(single);
    fm_policy_learned.destroy(last);
    free(trace);
}

TEST(a_last_group_that_sees_the_last_token_only_stays_in_step) {
    struct trace *trace = new_trace();
    struct fm_policy *batched = create();
    struct fm_policy *single = create();
    for (int t = 0; t < N_TOKENS; t += 10) {
        for (int g = 0; g < N_GROUPS; g++) {
            const bool last = g == N_GROUPS - 1;
            fm_policy_learned.begin_pass(batched, g, last ? 1 : 10);
            for (int i = last ? 9 : 0; i < 10; i++) {
                pass(batched, trace, t + i, g);
            }
        }
        for (int i = 0; i < 10; i++) {
            for (int g = 0; g < (i == 9 ? N_GROUPS : N_GROUPS - 1); g++) {
                pass(single, trace, t + i, g);
            }
        }
        CHECK(fm_policy_learned.verify(batched, 0, NULL));
    }
    pass(batched, trace, 0, 0);
    pass(single, trace, 0, 0);
    check_same(batched, single);
    fm_policy_learned.destroy(batched);
    fm_policy_learned.destroy(single);
    free(trace);
}

/* The first groups name a victim before what they look at of the last groups is known. */
TEST(it_names_victims_in_the_middle_of_a_batch) {
    struct trace *trace = new_trace();
    struct fm_policy *asked = create();
    struct fm_policy *left_alone = create();
    uint8_t all[MAX_EXPERT];
    memset(all, 1, sizeof all);
    for (int t = 0; t < N_TOKENS; t += 20) {
        for (int g = 0; g < N_GROUPS; g++) {
            fm_policy_learned.begin_pass(asked, g, 20);
            fm_policy_learned.begin_pass(left_alone, g, 20);
            for (int i = 0; i < 20; i++) {
                pass(asked, trace, t + i, g);
                pass(left_alone, trace, t + i, g);
            }
            const int victim = fm_policy_learned.victim(asked, g, all);
            CHECK(victim >= 0 && victim < n_expert[g]);
            CHECK_EQUAL(fm_policy_learned.victim(asked, g, all), victim);
        }
    }
    check_same(asked, left_alone); /* asking changes nothing */
    fm_policy_learned.destroy(asked);
    fm_policy_learned.destroy(left_alone);
    free(trace);
}

TEST(weights_survive_a_save) {
    struct trace *trace = new_trace();
    struct fm_policy *first = create();
    struct fm_policy *second = create();
    feed(first, trace, 0, N_TOKENS);
    size_t n;
    float *weights = weights_of(first, &n);
    CHECK(fm_policy_learned.load(second, weights, n));
    check_same(first, second);
    CHECK(!fm_policy_learned.load(second, weights, n - 1));
    CHECK(!fm_policy_learned.load(second, weights, n + 1));
    weights[n - 1] = NAN;
    weights[0] += 1;
    CHECK(!fm_policy_learned.load(second, weights, n));
    weights[n - 1] = 3e9f;
    CHECK(!fm_policy_learned.load(second, weights, n));
    weights[n - 1] = -1; /* of a count */
    CHECK(!fm_policy_learned.load(second, weights, n));
    check_same(first, second);
    free(weights);
    fm_policy_learned.destroy(first);
    fm_policy_learned.destroy(second);
    free(trace);
}

TEST(frozen_it_keeps_its_weights_until_it_may_learn_again) {
    struct trace *trace = new_trace();
    struct fm_policy *frozen = create();
    struct fm_policy *fresh = create();
    fm_policy_learned.freeze(frozen, true);
    feed(frozen, trace, 0, N_TOKENS / 2);
    check_same(frozen, fresh);
    fm_policy_learned.freeze(frozen, false);
    feed(frozen, trace, N_TOKENS / 2, N_TOKENS);
    size_t n;
    float *now = weights_of(frozen, &n);
    float *before = weights_of(fresh, &n);
    CHECK(memcmp(now, before, n * sizeof *now) != 0);
    free(now);
    free(before);
    fm_policy_learned.destroy(frozen);
    fm_policy_learned.destroy(fresh);
    free(trace);
}

TEST(nobody_leaves_who_may_not) {
    struct trace *trace = new_trace();
    struct fm_policy *policy = create();
    feed(policy, trace, 0, 50);
    uint8_t may_leave[MAX_EXPERT] = {0};
    CHECK_EQUAL(fm_policy_learned.victim(policy, 2, may_leave), -1);
    may_leave[7] = 1;
    CHECK_EQUAL(fm_policy_learned.victim(policy, 2, may_leave), 7);
    fm_policy_learned.destroy(policy);
    free(trace);
}

TEST(one_group_looks_at_its_own_past) {
    const int32_t one[] = {6};
    const struct fm_policy_setup setup = {.n_groups = 1, .n_expert = one, .n_slots = one};
    struct fm_policy *policy = fm_policy_learned.create(&setup);
    CHECK(policy != NULL);
    const uint8_t all[] = {1, 1, 1, 1, 1, 1};
    for (int t = 0; t < 3000; t++) {
        /* 0, 1 and 2 in turn, with 5 throughout: of the three, the next is the last to leave */
        fm_policy_learned.on_hit(policy, 0, t % 3);
        fm_policy_learned.on_hit(policy, 0, 5);
        fm_policy_learned.end_token(policy, 0);
        CHECK(fm_policy_learned.verify(policy, 0, all));
    }
    const int next = 3000 % 3;
    uint8_t two[] = {1, 1, 1, 0, 0, 0};
    two[(next + 2) % 3] = 0; /* just used */
    CHECK_EQUAL(fm_policy_learned.victim(policy, 0, two), (next + 1) % 3);
    fm_policy_learned.destroy(policy);
}

TEST(one_group_in_batches_looks_as_far_back) {
    const int32_t one[] = {12};
    const struct fm_policy_setup setup = {.n_groups = 1, .n_expert = one, .n_slots = one};
    struct fm_policy *batched = fm_policy_learned.create(&setup);
    struct fm_policy *single = fm_policy_learned.create(&setup);
    CHECK(batched != NULL && single != NULL);
    struct trace *trace = new_trace();
    for (int t = 0; t < N_TOKENS; t++) {
        if (t % 55 == 0) {
            fm_policy_learned.begin_pass(batched, 0, 55);
        }
        pass(batched, trace, t, 0);
        pass(single, trace, t, 0);
    }
    check_same(batched, single);
    fm_policy_learned.destroy(batched);
    fm_policy_learned.destroy(single);
    free(trace);
}
