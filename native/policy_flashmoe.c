/* policy_flashmoe.c: the policy of FlashMoE (Kim et al., arXiv 2601.17063). A small network per group
 * says from the tokens since an expert's last use and from its uses in this request, as a share of the
 * largest number in the cache, how far away its next use is; the farthest leaves, the lower number
 * first when two are equal. The network comes as a table (train/network.py compiles it): ages are whole
 * numbers, and shares are interpolated. Until a table is loaded, the age alone decides: LRU. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "policy.h"

enum { MAX_AGE = 512, N_SHARES = 33, TABLE = MAX_AGE * N_SHARES };

struct expert {
    int64_t last_token; /* counted from 1; 0: never */
    uint32_t n_uses;    /* in this request */
    bool resident;
};

struct group {
    struct fm_policy_group head;
    int64_t n_tokens;   /* that have ended */
    const float *table; /* [MAX_AGE][N_SHARES]; NULL: none is loaded */
};

struct all {
    int32_t n_groups;
    struct group *groups;
    float *tables; /* [n_groups][MAX_AGE][N_SHARES] */
};

static struct group *of(const struct fm_policy *policy, int32_t group) {
    return &((const struct all *)policy)->groups[group];
}

static void destroy(struct fm_policy *policy) {
    struct all *all = (struct all *)policy;
    if (all != NULL) {
        fm_policy_free((struct fm_policy *)all->groups);
        free(all->tables);
        free(all);
    }
}

static struct fm_policy *create(const struct fm_policy_setup *setup) {
    struct all *all = calloc(1, sizeof *all);
    if (all == NULL) {
        return NULL;
    }
    all->n_groups = setup->n_groups;
    all->groups = (struct group *)fm_policy_new(setup, sizeof(struct group), sizeof(struct expert));
    if (all->groups == NULL) {
        free(all);
        return NULL;
    }
    return (struct fm_policy *)all;
}

static bool load(struct fm_policy *policy, const float *weights, size_t n) {
    struct all *all = (struct all *)policy;
    if (n != (size_t)all->n_groups * TABLE) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(weights[i])) {
            return false;
        }
    }
    if (all->tables == NULL && (all->tables = malloc(n * sizeof *weights)) == NULL) {
        return false;
    }
    memcpy(all->tables, weights, n * sizeof *weights);
    for (int32_t g = 0; g < all->n_groups; g++) {
        of(policy, g)->table = all->tables + (size_t)g * TABLE;
    }
    return true;
}

static void used(struct fm_policy *policy, int32_t group, int32_t expert) {
    struct group *g = of(policy, group);
    struct expert *experts = g->head.experts;
    experts[expert].last_token = g->n_tokens + 1;
    experts[expert].n_uses++;
}

static void inserted(struct fm_policy *policy, int32_t group, int32_t expert) {
    ((struct expert *)of(policy, group)->head.experts)[expert].resident = true;
}

static void removed(struct fm_policy *policy, int32_t group, int32_t expert) {
    ((struct expert *)of(policy, group)->head.experts)[expert].resident = false;
}

/* How far away the next use is said to be. Victims are chosen after the token has ended, so that what
 * it uses has age 0; that may leave with bypass only. */
static float distance(const struct group *g, const struct expert *expert, float most) {
    int64_t age = expert->last_token > 0 ? g->n_tokens - expert->last_token : MAX_AGE;
    age = age < 1 ? 1 : age > MAX_AGE ? MAX_AGE : age;
    if (g->table == NULL) {
        return (float)age;
    }
    const float share = most > 0.0f ? (float)expert->n_uses / most : 0.0f;
    const float place = share * (float)(N_SHARES - 1);
    int32_t node = (int32_t)place;
    node = node > N_SHARES - 2 ? N_SHARES - 2 : node;
    const float *row = g->table + (age - 1) * N_SHARES + node;
    const float part = place - (float)node;
    return row[0] + part * (row[1] - row[0]);
}

static int32_t victim(struct fm_policy *policy, int32_t group, const uint8_t *may_leave) {
    const struct group *g = of(policy, group);
    const struct expert *experts = g->head.experts;
    uint32_t most = 0;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if (experts[e].resident && experts[e].n_uses > most) {
            most = experts[e].n_uses;
        }
    }
    int32_t farthest = -1;
    float largest = 0.0f;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if (may_leave[e]) {
            const float d = distance(g, &experts[e], (float)most);
            if (farthest < 0 || d > largest) {
                farthest = e;
                largest = d;
            }
        }
    }
    return farthest;
}

static void end_token(struct fm_policy *policy, int32_t group) {
    of(policy, group)->n_tokens++;
}

static void begin_sequence(struct fm_policy *policy) {
    const struct all *all = (const struct all *)policy;
    for (int32_t g = 0; g < all->n_groups; g++) {
        struct group *group = of(policy, g);
        struct expert *experts = group->head.experts;
        for (int32_t e = 0; e < group->head.n_expert; e++) {
            experts[e].n_uses = 0;
        }
    }
}

static bool verify(const struct fm_policy *policy, int32_t group, const uint8_t *resident) {
    const struct group *g = of(policy, group);
    const struct expert *experts = g->head.experts;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if (experts[e].last_token > g->n_tokens + 1 || (int64_t)experts[e].n_uses > experts[e].last_token ||
            experts[e].resident != (resident[e] != 0)) {
            return false;
        }
    }
    return true;
}

const struct fm_policy_type fm_policy_flashmoe = {
    .name = "flashmoe",
    .create = create,
    .destroy = destroy,
    .on_hit = used,
    .on_miss = used,
    .on_insert = inserted,
    .on_remove = removed,
    .victim = victim,
    .end_token = end_token,
    .begin_sequence = begin_sequence,
    .load = load,
    .verify = verify,
};
