/* policy_lfu.c: the expert that was used least often since the start leaves, whether it was resident
 * all the time or not; of several the least recently used. */

#include "policy.h"

struct expert {
    uint64_t n_uses;
    uint64_t last_use;
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
    experts[expert].n_uses++;
    experts[expert].last_use = ++g->clock;
}

static bool is_less(const struct expert *a, const struct expert *b) {
    return a->n_uses != b->n_uses ? a->n_uses < b->n_uses : a->last_use < b->last_use;
}

static int32_t victim(struct fm_policy *policy, int32_t group, const uint8_t *may_leave) {
    const struct group *g = at(policy, group);
    const struct expert *experts = g->head.experts;
    int32_t least = -1;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if (may_leave[e] && (least < 0 || is_less(&experts[e], &experts[least]))) {
            least = e;
        }
    }
    return least;
}

static bool verify(const struct fm_policy *policy, int32_t group, const uint8_t *resident) {
    (void)resident;
    const struct group *g = at(policy, group);
    const struct expert *experts = g->head.experts;
    uint64_t n_uses = 0;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        n_uses += experts[e].n_uses;
        if (experts[e].last_use > g->clock || experts[e].last_use < experts[e].n_uses) {
            return false;
        }
    }
    return n_uses == g->clock;
}

const struct fm_policy_type fm_policy_lfu = {
    .name = "lfu",
    .create = create,
    .destroy = fm_policy_free,
    .on_hit = used,
    .on_miss = used,
    .on_insert = fm_policy_no_use,
    .on_remove = fm_policy_no_use,
    .victim = victim,
    .end_token = fm_policy_no_end,
    .verify = verify,
};
