/* policy_least_stale.c: experts that neither the current token nor the one before it used are stale;
 * stale ones leave first, in the order in which they came in, then the others in that order.
 *
 * After Least-Stale of SpecMD (arXiv 2602.03921). There one pool serves all layers and the forward
 * pass is the measure of staleness; in a cache per layer only the order of arrival is left to choose
 * among what no recent pass has touched. */

#include "policy.h"

struct expert {
    uint64_t arrival;    /* 0: not resident */
    uint64_t last_token; /* counted from 1; 0: never */
};

struct group {
    struct fm_policy_group head;
    uint64_t n_arrivals;
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
    experts[expert].last_token = g->n_tokens + 1;
}

static void on_insert(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct group *g = at(policy, group);
    struct expert *experts = g->head.experts;
    experts[expert].arrival = ++g->n_arrivals;
}

static void on_remove(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct expert *experts = at(policy, group)->head.experts;
    experts[expert].arrival = 0;
}

static bool is_fresh(const struct group *g, const struct expert *expert) {
    return expert->last_token > 0 && expert->last_token + 1 >= g->n_tokens;
}

static int32_t victim(struct fm_policy *policy, int32_t group, const uint8_t *may_leave) {
    const struct group *g = at(policy, group);
    const struct expert *experts = g->head.experts;
    int32_t first = -1;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if (!may_leave[e]) {
            continue;
        }
        const bool fresh = is_fresh(g, &experts[e]);
        const bool first_fresh = first >= 0 && is_fresh(g, &experts[first]);
        if (first < 0 || (fresh == first_fresh ? experts[e].arrival < experts[first].arrival : first_fresh)) {
            first = e;
        }
    }
    return first;
}

static void end_token(struct fm_policy *policy, int32_t group) {
    at(policy, group)->n_tokens++;
}

static bool verify(const struct fm_policy *policy, int32_t group, const uint8_t *resident) {
    const struct group *g = at(policy, group);
    const struct expert *experts = g->head.experts;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if ((experts[e].arrival != 0) != (resident[e] != 0) || experts[e].arrival > g->n_arrivals ||
            experts[e].last_token > g->n_tokens + 1) {
            return false;
        }
    }
    return true;
}

const struct fm_policy_type fm_policy_least_stale = {
    .name = "least-stale",
    .create = create,
    .destroy = fm_policy_free,
    .on_hit = used,
    .on_miss = used,
    .on_insert = on_insert,
    .on_remove = on_remove,
    .victim = victim,
    .end_token = end_token,
    .verify = verify,
};
