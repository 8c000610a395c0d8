/* policy_random.c: any expert leaves, by lot; the same ones for the same seed. */

#include "policy.h"

struct group {
    struct fm_policy_group head;
    uint64_t state;
};

static struct group *at(const struct fm_policy *policy, int32_t group) {
    return (struct group *)policy + group;
}

static struct fm_policy *create(const struct fm_policy_setup *setup) {
    struct fm_policy *policy = fm_policy_new(setup, sizeof(struct group), 0);
    uint64_t seed = setup->seed;
    for (int32_t g = 0; g < setup->n_groups && policy != NULL; g++) {
        at(policy, g)->state = fm_policy_draw(&seed);
    }
    return policy;
}

static int32_t victim(struct fm_policy *policy, int32_t group, const uint8_t *may_leave) {
    struct group *g = at(policy, group);
    uint64_t n = 0;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        n += may_leave[e] != 0;
    }
    if (n == 0) {
        return -1;
    }
    uint64_t lot = fm_policy_draw(&g->state) % n;
    int32_t e = 0;
    while (!may_leave[e] || lot-- > 0) {
        e++;
    }
    return e;
}

static bool verify(const struct fm_policy *policy, int32_t group, const uint8_t *resident) {
    (void)policy, (void)group, (void)resident;
    return true; /* it knows nothing */
}

const struct fm_policy_type fm_policy_random = {
    .name = "random",
    .create = create,
    .destroy = fm_policy_free,
    .on_hit = fm_policy_no_use,
    .on_miss = fm_policy_no_use,
    .on_insert = fm_policy_no_use,
    .on_remove = fm_policy_no_use,
    .victim = victim,
    .end_token = fm_policy_no_end,
    .verify = verify,
};
