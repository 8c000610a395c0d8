/* policy_dlfu.c: decayed LFU. Each expert has an exponential moving average of its use, over all
 * tokens and whether it was resident or not; the lowest leaves, the lower number first when two are
 * equal. The decay is the one that fits the traces in the design (0.95 to 0.97). */

#include "policy.h"

static const float decay = 0.95f;

struct group {
    struct fm_policy_group head; /* experts: float, moving average of use, scaled by 1 / (1 - decay) */
};

static struct group *at(const struct fm_policy *policy, int32_t group) {
    return (struct group *)policy + group;
}

static struct fm_policy *create(const struct fm_policy_setup *setup) {
    return fm_policy_new(setup, sizeof(struct group), sizeof(float));
}

static void used(struct fm_policy *policy, int32_t group, int32_t expert) {
    float *use = at(policy, group)->head.experts;
    use[expert] += 1.0f;
}

static int32_t victim(struct fm_policy *policy, int32_t group, const uint8_t *may_leave) {
    const struct group *g = at(policy, group);
    const float *use = g->head.experts;
    int32_t least = -1;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if (may_leave[e] && (least < 0 || use[e] < use[least])) {
            least = e;
        }
    }
    return least;
}

static void end_token(struct fm_policy *policy, int32_t group) {
    const struct group *g = at(policy, group);
    float *use = g->head.experts;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        /* to zero before it becomes denormal, which some processors compute with slowly */
        use[e] = use[e] < 1e-30f ? 0.0f : use[e] * decay;
    }
}

static bool verify(const struct fm_policy *policy, int32_t group, const uint8_t *resident) {
    (void)resident;
    const struct group *g = at(policy, group);
    const float *use = g->head.experts;
    const float most = 1.0f / (1.0f - decay) + 1.0f;
    for (int32_t e = 0; e < g->head.n_expert; e++) {
        if (!(use[e] >= 0.0f && use[e] <= most)) {
            return false;
        }
    }
    return true;
}

const struct fm_policy_type fm_policy_dlfu = {
    .name = "dlfu",
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
