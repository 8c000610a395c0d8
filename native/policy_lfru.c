/* policy_lfru.c: uses so far divided by the tokens since the last one; the lowest leaves, the lower
 * number first when two are equal. Counts go on whether the expert is resident or not. Compared as
 * fractions of whole numbers, so it is exact. */

#include "policy.h"

struct expert {
    uint64_t n_uses;
    uint64_t last_token; /* counted from 1; 0: never */
};

struct group {
    struct fm_policy_group head;
    uint64_t n_tokens; /* that have ended */
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
    experts[expert].n_uses++;
    experts[expert].last_token = g->n_tokens + 1;
}

/* 1 for what the current token uses. */
static uint64_t age(const struct group *g, const struct expert *expert) {
    return g->n_tokens + 1 - expert->last_token;
}

static int32_t victim(struct fm_policy *policy, int32_t group, const uint8_t *may_leave) {
    const struct group *g = at(policy, group);
    const struct expert *experts = g->head.experts;
    int32_t least = -1;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if (may_leave[e] && (least < 0 || experts[e].n_uses * age(g, &experts[least]) <
                                              experts[least].n_uses * age(g, &experts[e]))) {
            least = e;
        }
    }
    return least;
}

static void end_token(struct fm_policy *policy, int32_t group) {
    at(policy, group)->n_tokens++;
}

static bool verify(const struct fm_policy *policy, int32_t group, const uint8_t *resident) {
    (void)resident;
    const struct group *g = at(policy, group);
    const struct expert *experts = g->head.experts;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if (experts[e].last_token > g->n_tokens + 1 || experts[e].n_uses > experts[e].last_token) {
            return false;
        }
    }
    return true;
}

const struct fm_policy_type fm_policy_lfru = {
    .name = "lfru",
    .create = create,
    .destroy = fm_policy_free,
    .on_hit = used,
    .on_miss = used,
    .on_insert = fm_policy_no_use,
    .on_remove = fm_policy_no_use,
    .victim = victim,
    .end_token = end_token,
    .verify = verify,
};
