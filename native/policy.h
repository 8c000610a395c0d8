/* policy.h: who leaves. A policy owns the order of the experts of each group, never their bytes.
 *
 * The cache tells it what happens; it names a victim when asked. One file per policy and one row
 * in policy.c. No I/O, no pointers to weights, no locks: the cache calls under its own lock. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct fm_policy;

struct fm_policy_type {
    const char *name;
    /* n_expert [n_groups]. NULL: no memory. */
    struct fm_policy *(*create)(int32_t n_groups, const int32_t *n_expert);
    void (*destroy)(struct fm_policy *policy);
    /* The current token uses an expert that is resident, or one that is not. */
    void (*on_hit)(struct fm_policy *policy, int32_t group, int32_t expert);
    void (*on_miss)(struct fm_policy *policy, int32_t group, int32_t expert);
    /* An expert became resident, or stopped being so. */
    void (*on_insert)(struct fm_policy *policy, int32_t group, int32_t expert);
    void (*on_remove)(struct fm_policy *policy, int32_t group, int32_t expert);
    /* Names one expert e with may_leave[e] != 0, or -1 when there is none. */
    int32_t (*victim)(struct fm_policy *policy, int32_t group, const uint8_t *may_leave);
    /* The group has seen all experts of one token. */
    void (*end_token)(struct fm_policy *policy, int32_t group);
    /* Its own invariants against the resident set. */
    bool (*verify)(const struct fm_policy *policy, int32_t group, const uint8_t *resident);
};

/* NULL when there is no such policy. */
const struct fm_policy_type *fm_policy_find(const char *name);

extern const struct fm_policy_type fm_policy_lru;
extern const struct fm_policy_type fm_policy_dlfu;
