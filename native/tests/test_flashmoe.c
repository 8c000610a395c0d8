/* test_flashmoe.c: the policy that reads a table: what it takes, and victims worked out by hand. */

#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "policy.h"

enum { MAX_AGE = 512, N_SHARES = 33, TABLE = MAX_AGE * N_SHARES, N_EXPERT = 6 };

static const int32_t n_expert[] = {N_EXPERT, N_EXPERT};
static const int32_t n_slots[] = {4, 4};
static const struct fm_policy_type *const type = &fm_policy_flashmoe;

static struct fm_policy *create(void) {
    const struct fm_policy_setup setup = {.n_groups = 2, .n_expert = n_expert, .n_slots = n_slots};
    struct fm_policy *policy = type->create(&setup);
    CHECK(policy != NULL);
    return policy;
}

/* Tables whose entry is `a * age + s * share` in group 0, and -age in group 1. */
static float *tables(float a, float s) {
    float *weights = malloc(2 * TABLE * sizeof *weights);
    CHECK(weights != NULL);
    for (int age = 1; age <= MAX_AGE; age++) {
        for (int i = 0; i < N_SHARES; i++) {
            const int at = (age - 1) * N_SHARES + i;
            weights[at] = a * (float)age + s * (float)i / (N_SHARES - 1);
            weights[TABLE + at] = (float)-age;
        }
    }
    return weights;
}

/* One token that uses one expert, which is resident or becomes so. */
static void use(struct fm_policy *policy, int32_t group, int32_t expert, bool is_resident) {
    (is_resident ? type->on_hit : type->on_miss)(policy, group, expert);
    type->end_token(policy, group);
    if (!is_resident) {
        type->on_insert(policy, group, expert);
    }
}

static int32_t victim(struct fm_policy *policy, int32_t group, int from, int to) {
    uint8_t may_leave[N_EXPERT] = {0};
    for (int e = from; e < to; e++) {
        may_leave[e] = 1;
    }
    return type->victim(policy, group, may_leave);
}

TEST(lru_before_a_table_is_there) {
    struct fm_policy *policy = create();
    use(policy, 0, 2, false);
    use(policy, 0, 0, false);
    use(policy, 0, 1, false);
    CHECK_EQUAL(victim(policy, 0, 0, 3), 2);
    use(policy, 0, 2, true);
    CHECK_EQUAL(victim(policy, 0, 0, 3), 0);
    CHECK_EQUAL(victim(policy, 0, 0, 0), -1);
    type->destroy(policy);
}

TEST(ages_choose) {
    struct fm_policy *policy = create();
    float *weights = tables(1.0f, 0.0f);
    CHECK(type->load(policy, weights, 2 * TABLE));
    free(weights); /* it has a copy */
    for (int32_t g = 0; g < 2; g++) {
        for (int32_t e = 0; e < 4; e++) {
            use(policy, g, e, false);
        }
    }
    CHECK_EQUAL(victim(policy, 0, 0, 3), 0);
    CHECK_EQUAL(victim(policy, 1, 0, 3), 2); /* its table says the opposite */
    CHECK_EQUAL(victim(policy, 0, 1, 6), 4); /* never used: as old as can be, the lowest number */
    for (int i = 0; i < 2 * MAX_AGE; i++) {
        use(policy, 0, 1, true);
    }
    CHECK_EQUAL(victim(policy, 0, 0, 3), 0); /* beyond the table, ages are equal */
    type->destroy(policy);
}

TEST(shares_choose) {
    struct fm_policy *policy = create();
    float *weights = tables(0.001f, -1.0f); /* the fewest uses leave */
    CHECK(type->load(policy, weights, 2 * TABLE));
    const int uses[] = {3, 1, 5};
    for (int32_t e = 0; e < 3; e++) {
        for (int i = 0; i < uses[e]; i++) {
            use(policy, 0, e, i > 0);
        }
    }
    CHECK_EQUAL(victim(policy, 0, 0, 3), 1);
    /* another request: nothing was used yet, so ages decide */
    type->begin_sequence(policy);
    CHECK_EQUAL(victim(policy, 0, 0, 3), 0);
    use(policy, 0, 0, true);
    CHECK_EQUAL(victim(policy, 0, 0, 3), 1);
    use(policy, 0, 1, true);
    CHECK_EQUAL(victim(policy, 0, 0, 3), 2);
    /* the largest count is of what is in the cache, and an expert that is not there may have more */
    type->on_remove(policy, 0, 0);
    CHECK_EQUAL(victim(policy, 0, 1, 3), 2);
    free(weights);
    type->destroy(policy);
}

TEST(tables_that_it_does_not_take) {
    struct fm_policy *policy = create();
    float *weights = tables(1.0f, 0.0f);
    CHECK(!type->load(policy, weights, 2 * TABLE - 1));
    CHECK(!type->load(policy, weights, TABLE));
    weights[TABLE] = NAN;
    CHECK(!type->load(policy, weights, 2 * TABLE));
    weights[TABLE] = 0.0f;
    CHECK(type->load(policy, weights, 2 * TABLE));
    CHECK(type->load(policy, weights, 2 * TABLE)); /* in place of the first */
    free(weights);
    type->destroy(policy);
}

TEST(verify_sees_what_is_resident) {
    struct fm_policy *policy = create();
    uint8_t resident[N_EXPERT] = {0};
    CHECK(type->verify(policy, 0, resident));
    use(policy, 0, 3, false);
    CHECK(!type->verify(policy, 0, resident));
    resident[3] = 1;
    CHECK(type->verify(policy, 0, resident));
    type->on_remove(policy, 0, 3);
    CHECK(!type->verify(policy, 0, resident));
    type->destroy(policy);
}
