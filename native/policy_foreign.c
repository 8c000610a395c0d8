/* policy_foreign.c: a policy that the program around the library brings along, such as one written in
 * Python, as functions that it is called through. lru follows everything beside it and takes over for
 * good when a function fails or names an expert that may not leave. Counts the time inside. */

#include <stdlib.h>
#include <string.h>

#include "api.h"
#include "clock.h"
#include "policy.h"

struct fm_policy {
    struct fm_foreign_policy *foreign;
    struct fm_policy *lru;
    int32_t n_expert[]; /* of each group */
};

struct fm_policy *fm_foreign_new(struct fm_foreign_policy *foreign, const struct fm_policy_setup *setup) {
    struct fm_policy *policy = calloc(1, sizeof *policy + (size_t)setup->n_groups * sizeof policy->n_expert[0]);
    if (policy == NULL) {
        return NULL;
    }
    policy->foreign = foreign;
    policy->lru = fm_policy_lru.create(setup);
    if (policy->lru == NULL) {
        free(policy);
        return NULL;
    }
    memcpy(policy->n_expert, setup->n_expert, (size_t)setup->n_groups * sizeof policy->n_expert[0]);
    return policy;
}

static void destroy(struct fm_policy *policy) {
    fm_policy_lru.destroy(policy->lru);
    free(policy);
}

static bool has_failed(const struct fm_policy *policy) {
    return __atomic_load_n(&policy->foreign->failed, __ATOMIC_RELAXED) != 0;
}

/* Other threads read the time while this one adds to it. */
static void count(struct fm_policy *policy, uint64_t begun) {
    __atomic_fetch_add(&policy->foreign->ns, fm_clock_ns() - begun, __ATOMIC_RELAXED);
}

static void tell(struct fm_policy *policy, void (*function)(int32_t, int32_t), int32_t group, int32_t expert) {
    if (function != NULL && !has_failed(policy)) {
        const uint64_t begun = fm_clock_ns();
        function(group, expert);
        count(policy, begun);
    }
}

static void on_hit(struct fm_policy *policy, int32_t group, int32_t expert) {
    fm_policy_lru.on_hit(policy->lru, group, expert);
    tell(policy, policy->foreign->on_hit, group, expert);
}

static void on_miss(struct fm_policy *policy, int32_t group, int32_t expert) {
    fm_policy_lru.on_miss(policy->lru, group, expert);
    tell(policy, policy->foreign->on_miss, group, expert);
}

static void on_insert(struct fm_policy *policy, int32_t group, int32_t expert) {
    fm_policy_lru.on_insert(policy->lru, group, expert);
    tell(policy, policy->foreign->on_insert, group, expert);
}

static void on_remove(struct fm_policy *policy, int32_t group, int32_t expert) {
    fm_policy_lru.on_remove(policy->lru, group, expert);
    tell(policy, policy->foreign->on_remove, group, expert);
}

static int32_t victim(struct fm_policy *policy, int32_t group, const uint8_t *may_leave) {
    const int32_t oldest = fm_policy_lru.victim(policy->lru, group, may_leave);
    if (oldest < 0 || has_failed(policy)) {
        return oldest;
    }
    const uint64_t begun = fm_clock_ns();
    const int32_t named = policy->foreign->victim(group, may_leave);
    count(policy, begun);
    if (has_failed(policy)) {
        return oldest;
    }
    if (named < 0 || named >= policy->n_expert[group] || !may_leave[named]) {
        policy->foreign->named = named;
        __atomic_store_n(&policy->foreign->failed, FM_FOREIGN_NAMED_WRONG, __ATOMIC_RELAXED);
        return oldest;
    }
    return named;
}

static void end_token(struct fm_policy *policy, int32_t group) {
    if (policy->foreign->end_token != NULL && !has_failed(policy)) {
        const uint64_t begun = fm_clock_ns();
        policy->foreign->end_token(group);
        count(policy, begun);
    }
}

static void begin_sequence(struct fm_policy *policy) {
    if (policy->foreign->begin_sequence != NULL && !has_failed(policy)) {
        const uint64_t begun = fm_clock_ns();
        policy->foreign->begin_sequence();
        count(policy, begun);
    }
}

static bool verify(const struct fm_policy *policy, int32_t group, const uint8_t *resident) {
    return fm_policy_lru.verify(policy->lru, group, resident);
}

const struct fm_policy_type fm_policy_foreign = {
    .name = "foreign",
    .create = NULL, /* fm_foreign_new */
    .destroy = destroy,
    .on_hit = on_hit,
    .on_miss = on_miss,
    .on_insert = on_insert,
    .on_remove = on_remove,
    .victim = victim,
    .end_token = end_token,
    .begin_sequence = begin_sequence,
    .verify = verify,
};
