/* test_foreign.c: a policy that the caller brings along, in a simulation and in a stream; lru takes
 * over from one that fails. */

#include <string.h>

#include "model.h"
#include "policy.h"

static struct fm_foreign_policy foreign;
static char heard[512];

static void hear(char what, int32_t group, int32_t expert) {
    const size_t n = strlen(heard);
    CHECK(n + 4 < sizeof heard);
    heard[n] = what;
    heard[n + 1] = (char)('0' + group);
    heard[n + 2] = expert < 0 ? ' ' : (char)('0' + expert);
    heard[n + 3] = ' ';
}

static void on_hit(int32_t group, int32_t expert) {
    hear('h', group, expert);
}

static void on_miss(int32_t group, int32_t expert) {
    hear('m', group, expert);
}

static void on_insert(int32_t group, int32_t expert) {
    hear('i', group, expert);
}

static void on_remove(int32_t group, int32_t expert) {
    hear('r', group, expert);
}

static void end_token(int32_t group) {
    hear('e', group, -1);
}

static void begin_sequence(void) {
    hear('b', 0, -1);
}

static int32_t highest(int32_t group, const uint8_t *may_leave) {
    (void)group;
    int32_t e = 3;
    while (e >= 0 && !may_leave[e]) {
        e--;
    }
    return e;
}

static int32_t fails(int32_t group, const uint8_t *may_leave) {
    foreign.failed = FM_FOREIGN_RAISED;
    return highest(group, may_leave);
}

static int32_t expert_7(int32_t group, const uint8_t *may_leave) {
    (void)group, (void)may_leave;
    return 7;
}

static struct fm_policy *create(int32_t (*victim)(int32_t, const uint8_t *)) {
    const int32_t n_expert = 4;
    const int32_t n_slots = 2;
    const struct fm_policy_setup setup = {.n_groups = 1, .n_expert = &n_expert, .n_slots = &n_slots};
    memset(heard, 0, sizeof heard);
    foreign = (struct fm_foreign_policy){.on_hit = on_hit,
                                         .on_miss = on_miss,
                                         .on_insert = on_insert,
                                         .on_remove = on_remove,
                                         .victim = victim,
                                         .end_token = end_token,
                                         .begin_sequence = begin_sequence};
    struct fm_policy *policy = fm_foreign_new(&foreign, &setup);
    CHECK(policy != NULL);
    return policy;
}

/* One token of one missing expert. Returns who left. */
static int32_t use(const struct fm_policy_type *type, struct fm_policy *policy, int32_t expert, const uint8_t *resident) {
    type->on_miss(policy, 0, expert);
    type->end_token(policy, 0);
    const int32_t left = type->victim(policy, 0, resident);
    if (left >= 0) {
        type->on_remove(policy, 0, left);
    }
    type->on_insert(policy, 0, expert);
    return left;
}

TEST(it_hears_everything_and_decides) {
    const struct fm_policy_type *type = &fm_policy_foreign;
    struct fm_policy *policy = create(highest);
    type->begin_sequence(policy);
    CHECK_EQUAL(use(type, policy, 2, (uint8_t[]){0, 0, 0, 0}), -1);
    CHECK_EQUAL(use(type, policy, 0, (uint8_t[]){0, 0, 0, 0}), -1);
    type->on_hit(policy, 0, 2);
    CHECK_EQUAL(use(type, policy, 1, (uint8_t[]){1, 0, 1, 0}), 2); /* lru would name 0 */
    CHECK(strcmp(heard, "b0  m02 e0  i02 m00 e0  i00 h02 m01 e0  r02 i01 ") == 0);
    CHECK(type->verify(policy, 0, (uint8_t[]){1, 1, 0, 0}));
    CHECK_EQUAL(foreign.failed, 0);
    CHECK(foreign.ns > 0);
    type->destroy(policy);
}

static void check_takeover(int32_t (*victim)(int32_t, const uint8_t *), int32_t failure) {
    const struct fm_policy_type *type = &fm_policy_foreign;
    struct fm_policy *policy = create(victim);
    use(type, policy, 2, (uint8_t[]){0, 0, 0, 0});
    use(type, policy, 0, (uint8_t[]){0, 0, 0, 0});
    type->on_hit(policy, 0, 2);
    CHECK_EQUAL(use(type, policy, 1, (uint8_t[]){1, 0, 1, 0}), 0); /* as lru does, which followed */
    CHECK_EQUAL(foreign.failed, failure);
    const size_t n = strlen(heard);
    CHECK_EQUAL(use(type, policy, 3, (uint8_t[]){0, 1, 1, 0}), 2);
    type->begin_sequence(policy);
    CHECK_EQUAL(strlen(heard), n); /* nothing more is told */
    CHECK(type->verify(policy, 0, (uint8_t[]){0, 1, 0, 1}));
    type->destroy(policy);
}

TEST(lru_takes_over_when_it_fails) {
    check_takeover(fails, FM_FOREIGN_RAISED);
}

TEST(lru_takes_over_when_it_names_one_that_may_not_leave) {
    check_takeover(expert_7, FM_FOREIGN_NAMED_WRONG);
    CHECK_EQUAL(foreign.named, 7);
}

TEST(what_is_not_there_is_not_called) {
    const struct fm_policy_type *type = &fm_policy_foreign;
    struct fm_policy *policy = create(highest);
    foreign = (struct fm_foreign_policy){.victim = highest};
    type->begin_sequence(policy);
    use(type, policy, 2, (uint8_t[]){0, 0, 0, 0});
    type->on_hit(policy, 0, 2);
    CHECK_EQUAL(use(type, policy, 1, (uint8_t[]){1, 0, 1, 0}), 2);
    CHECK_EQUAL(strlen(heard), 0);
    CHECK_EQUAL(foreign.failed, 0);
    type->destroy(policy);
}

TEST(it_decides_in_a_stream) {
    struct model model;
    struct shape shape = blocks;
    shape.n_groups = 1;
    const struct fm_options options = options_for(0, 4);
    foreign = (struct fm_foreign_policy){.victim = highest};
    model_create(&model, &shape, &options);
    CHECK_EQUAL(fm_stream_start_foreign(model.stream, (const int32_t[]){2}, &foreign), FM_OK);
    CHECK_EQUAL(fm_stream_start_foreign(model.stream, (const int32_t[]){2}, &foreign), FM_BAD_STATE);
    for (int32_t e = 0; e < 3; e++) {
        run_group(&model, 0, &e, 1, 1);
    }
    CHECK(model_is_resident(&model, 0, 0)); /* lru would have sent it away */
    CHECK(!model_is_resident(&model, 0, 1));
    CHECK(model_is_resident(&model, 0, 2));
    CHECK_EQUAL(foreign.failed, 0);
    model_free(&model);
}
