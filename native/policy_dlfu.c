/* policy_dlfu.c: decayed LFU. Each expert has an exponential moving average of its use, over all
 * tokens and whether it was resident or not; the lowest leaves, the lower number first when two are
 * equal. The decay is the one that fits the traces in the design (0.95 to 0.97). */

#include <stdlib.h>

#include "policy.h"

static const float decay = 0.95f;

struct group {
    int32_t n_expert;
    float *use; /* [n_expert] moving average of use, scaled by 1 / (1 - decay) */
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
        free(policy->groups[g].use);
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
        policy->groups[g].use = calloc((size_t)setup->n_expert[g], sizeof(float));
        if (policy->groups[g].use == NULL) {
            destroy(policy);
            return NULL;
        }
    }
    return policy;
}

static void used(struct fm_policy *policy, int32_t group, int32_t expert) {
    policy->groups[group].use[expert] += 1.0f;
}

static void nothing(struct fm_policy *policy, int32_t group, int32_t expert) {
    (void)policy, (void)group, (void)expert;
}

static int32_t victim(struct fm_policy *policy, int32_t group, const uint8_t *may_leave) {
    const struct group *g = &policy->groups[group];
    int32_t least = -1;
    for (int32_t e = 0; e < g->n_expert; e++) {
        if (may_leave[e] && (least < 0 || g->use[e] < g->use[least])) {
            least = e;
        }
    }
    return least;
}

static void end_token(struct fm_policy *policy, int32_t group) {
    const struct group *g = &policy->groups[group];
    for (int32_t e = 0; e < g->n_expert; e++) {
        /* to zero before it becomes denormal, which some processors compute with slowly */
        g->use[e] = g->use[e] < 1e-30f ? 0.0f : g->use[e] * decay;
    }
}

static bool verify(const struct fm_policy *policy, int32_t group, const uint8_t *resident) {
    (void)resident;
    const struct group *g = &policy->groups[group];
    const float most = 1.0f / (1.0f - decay) + 1.0f;
    for (int32_t e = 0; e < g->n_expert; e++) {
        if (!(g->use[e] >= 0.0f && g->use[e] <= most)) {
            return false;
        }
    }
    return true;
}

const struct fm_policy_type fm_policy_dlfu = {
    .name = "dlfu",
    .create = create,
    .destroy = destroy,
    .on_hit = used,
    .on_miss = used,
    .on_insert = nothing,
    .on_remove = nothing,
    .victim = victim,
    .end_token = end_token,
    .verify = verify,
};
