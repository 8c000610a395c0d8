/* policy_lru.c: the least recently used expert leaves. Experts of one token are ordered by the
 * place they have in that token's list, so the order is strict and a Python twin can follow it. */

#include <stdlib.h>

#include "policy.h"

struct group {
    int32_t n_expert;
    uint64_t clock;
    uint64_t *last_use; /* [n_expert]; 0: not resident */
};

struct fm_policy {
    int32_t n_groups;
    struct group groups[];
};

static void destroy(struct fm_policy *policy) {
    if (policy == NULL) {
        return;
    }
    for (int32_t g = 0; g < policy->n_groups; g++) {
        free(policy->groups[g].last_use);
    }
    free(policy);
}

static struct fm_policy *create(const struct fm_policy_setup *setup) {
    const int32_t n_groups = setup->n_groups;
    struct fm_policy *policy = calloc(1, sizeof *policy + (size_t)n_groups * sizeof policy->groups[0]);
    if (policy == NULL) {
        return NULL;
    }
    policy->n_groups = n_groups;
    for (int32_t g = 0; g < n_groups; g++) {
        policy->groups[g].n_expert = setup->n_expert[g];
        policy->groups[g].last_use = calloc((size_t)setup->n_expert[g], sizeof(uint64_t));
        if (policy->groups[g].last_use == NULL) {
            destroy(policy);
            return NULL;
        }
    }
    return policy;
}

static void touch(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct group *g = &policy->groups[group];
    g->last_use[expert] = ++g->clock;
}

static void on_miss(struct fm_policy *policy, int32_t group, int32_t expert) {
    (void)policy, (void)group, (void)expert;
}

static void on_remove(struct fm_policy *policy, int32_t group, int32_t expert) {
    policy->groups[group].last_use[expert] = 0;
}

static int32_t victim(struct fm_policy *policy, int32_t group, const uint8_t *may_leave) {
    const struct group *g = &policy->groups[group];
    int32_t oldest = -1;
    for (int32_t e = 0; e < g->n_expert; e++) {
        if (may_leave[e] && (oldest < 0 || g->last_use[e] < g->last_use[oldest])) {
            oldest = e;
        }
    }
    return oldest;
}

static void end_token(struct fm_policy *policy, int32_t group) {
    (void)policy, (void)group;
}

static bool verify(const struct fm_policy *policy, int32_t group, const uint8_t *resident) {
    const struct group *g = &policy->groups[group];
    for (int32_t e = 0; e < g->n_expert; e++) {
        if ((g->last_use[e] != 0) != (resident[e] != 0) || g->last_use[e] > g->clock) {
            return false;
        }
    }
    return true;
}

const struct fm_policy_type fm_policy_lru = {
    .name = "lru",
    .create = create,
    .destroy = destroy,
    .on_hit = touch,
    .on_miss = on_miss,
    .on_insert = touch,
    .on_remove = on_remove,
    .victim = victim,
    .end_token = end_token,
    .verify = verify,
};
