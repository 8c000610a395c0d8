/* policy_belady.c: the expert that is needed again last leaves, one that is never needed again before
 * all others; the lower number first when two are equal. The upper bound of every policy that admits
 * all misses; it needs the trace, so it exists in the simulator only.
 *
 * L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966. */

#include <stdlib.h>
#include <string.h>

#include "api.h"
#include "policy.h"

enum { NO_EXPERT = 0xFFFF };
static const int32_t NEVER = INT32_MAX;

struct group {
    int64_t token; /* the current one */
    int32_t *next; /* [max_expert] the token that needs the expert next, as known at its last use */
};

struct fm_policy {
    const struct fm_simulation_setup *setup;
    int32_t *next_use; /* [n_tokens][n_layers][k], as setup->experts */
    int32_t max_expert;
    int32_t *next;     /* [n_layers][max_expert] */
    struct group groups[];
};

static void destroy(struct fm_policy *policy) {
    if (policy != NULL) {
        free(policy->next_use);
        free(policy->next);
        free(policy);
    }
}

static void forget(struct fm_policy *policy) {
    for (size_t i = 0; i < (size_t)policy->setup->n_layers * (size_t)policy->max_expert; i++) {
        policy->next[i] = NEVER;
    }
}

/* From the last token to the first, with `next` as the scratch. */
static void look_ahead(struct fm_policy *policy) {
    const struct fm_simulation_setup *setup = policy->setup;
    const size_t width = (size_t)setup->n_layers * (size_t)setup->k;
    for (int64_t t = setup->n_tokens - 1; t >= 0; t--) {
        const uint16_t *experts = setup->experts + (size_t)t * width;
        int32_t *next_use = policy->next_use + (size_t)t * width;
        for (size_t i = 0; i < width; i++) {
            next_use[i] = experts[i] == NO_EXPERT ? NEVER : policy->groups[i / (size_t)setup->k].next[experts[i]];
        }
        for (size_t i = 0; i < width; i++) {
            if (experts[i] != NO_EXPERT) {
                policy->groups[i / (size_t)setup->k].next[experts[i]] = (int32_t)t;
            }
        }
    }
}

struct fm_policy *fm_belady_new(const struct fm_simulation_setup *setup) {
    struct fm_policy *policy = calloc(1, sizeof *policy + (size_t)setup->n_layers * sizeof policy->groups[0]);
    if (policy == NULL) {
        return NULL;
    }
    policy->setup = setup;
    for (int32_t l = 0; l < setup->n_layers; l++) {
        policy->max_expert = setup->n_expert[l] > policy->max_expert ? setup->n_expert[l] : policy->max_expert;
    }
    const size_t n_ids = (size_t)setup->n_tokens * (size_t)setup->n_layers * (size_t)setup->k;
    policy->next_use = malloc((n_ids + 1) * sizeof *policy->next_use);
    policy->next = malloc((size_t)setup->n_layers * (size_t)policy->max_expert * sizeof *policy->next);
    if (policy->next_use == NULL || policy->next == NULL) {
        destroy(policy);
        return NULL;
    }
    for (int32_t l = 0; l < setup->n_layers; l++) {
        policy->groups[l].next = policy->next + (size_t)l * (size_t)policy->max_expert;
    }
    forget(policy);
    look_ahead(policy);
    forget(policy);
    return policy;
}

static void used(struct fm_policy *policy, int32_t group, int32_t expert) {
    const struct fm_simulation_setup *setup = policy->setup;
    struct group *g = &policy->groups[group];
    const size_t at = ((size_t)g->token * (size_t)setup->n_layers + (size_t)group) * (size_t)setup->k;
    for (int32_t i = 0; i < setup->k; i++) {
        if (setup->experts[at + (size_t)i] == expert) {
            g->next[expert] = policy->next_use[at + (size_t)i];
        }
    }
}

static int32_t victim(struct fm_policy *policy, int32_t group, const uint8_t *may_leave) {
    const int32_t *next = policy->groups[group].next;
    int32_t last = -1;
    for (int32_t e = 0; e < policy->setup->n_expert[group]; e++) {
        if (may_leave[e] && (last < 0 || next[e] > next[last])) {
            last = e;
        }
    }
    return last;
}

static void end_token(struct fm_policy *policy, int32_t group) {
    policy->groups[group].token++;
}

/* What it knows of the future is not in the past. */
static bool verify(const struct fm_policy *policy, int32_t group, const uint8_t *resident) {
    const struct group *g = &policy->groups[group];
    for (int32_t e = 0; e < policy->setup->n_expert[group]; e++) {
        if (resident[e] && g->next[e] < g->token) {
            return false;
        }
    }
    return true;
}

const struct fm_policy_type fm_policy_belady = {
    .name = "belady",
    .create = NULL, /* fm_belady_new */
    .destroy = destroy,
    .on_hit = used,
    .on_miss = used,
    .on_insert = fm_policy_no_use,
    .on_remove = fm_policy_no_use,
    .victim = victim,
    .end_token = end_token,
    .verify = verify,
};
