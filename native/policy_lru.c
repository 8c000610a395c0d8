/* policy_lru.c: the least recently used expert leaves. Experts of one token are ordered by the
 * place they have in that token's list, whether they were resident or not, so the order is strict
 * and a Python twin can follow it. One that comes in unasked counts as used when it comes. */

#include "policy.h"

struct expert {
    uint64_t last_use; /* 0: not since it left */
    bool resident;
};

struct group {
    struct fm_policy_group head;
    uint64_t clock;
};

static struct group *at(const struct fm_policy *policy, int32_t group) {
    return (struct group *)policy + group;
}

static struct fm_policy *create(const struct fm_policy_setup *setup) {
    return fm_policy_new(setup, sizeof(struct group), sizeof(struct expert));
}

static void used(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct group *g = at(policy, group);
    struct expert *experts = g->head.experts;
    experts[expert].last_use = ++g->clock;
}

static void on_insert(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct expert *experts = at(policy, group)->head.experts;
    if (experts[expert].last_use == 0) {
        used(policy, group, expert);
    }
    experts[expert].resident = true;
}

static void on_remove(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct expert *experts = at(policy, group)->head.experts;
    experts[expert] = (struct expert){0};
}

static int32_t victim(struct fm_policy *policy, int32_t group, const uint8_t *may_leave) {
    const struct group *g = at(policy, group);
    const struct expert *experts = g->head.experts;
    int32_t oldest = -1;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if (may_leave[e] && (oldest < 0 || experts[e].last_use < experts[oldest].last_use)) {
            oldest = e;
        }
    }
    return oldest;
}

static bool verify(const struct fm_policy *policy, int32_t group, const uint8_t *resident) {
    const struct group *g = at(policy, group);
    const struct expert *experts = g->head.experts;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if (experts[e].resident != (resident[e] != 0) || experts[e].last_use > g->clock ||
            (resident[e] && experts[e].last_use == 0)) {
            return false;
        }
    }
    return true;
}

const struct fm_policy_type fm_policy_lru = {
    .name = "lru",
    .create = create,
    .destroy = fm_policy_free,
    .on_hit = used,
    .on_miss = used,
    .on_insert = on_insert,
    .on_remove = on_remove,
    .victim = victim,
    .end_token = fm_policy_no_end,
    .verify = verify,
};
