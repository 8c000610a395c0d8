/* policy.h: who leaves. A policy owns the order of the experts of each group, never their bytes.
 *
 * The cache tells it what happens; it names a victim when asked. One file per policy and one row
 * in policy.c. No I/O, no pointers to weights, no locks: the cache calls under its own lock. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct fm_policy;

/* The cache that a policy is for. Groups are in the order in which a token passes them. */
struct fm_policy_setup {
    int32_t n_groups;
    const int32_t *n_expert; /* [n_groups] */
    const int32_t *n_slots;  /* [n_groups] */
    uint64_t seed;           /* for policies that draw lots */
};

/* For each pass through a group the cache first tells what every token uses (on_hit, on_miss, then
 * end_token, token after token), then asks for a victim before each insertion that needs one. */
struct fm_policy_type {
    const char *name;
    /* NULL: no memory. */
    struct fm_policy *(*create)(const struct fm_policy_setup *setup);
    void (*destroy)(struct fm_policy *policy);
    /* The group sees so many tokens in this pass, with an end_token for each: the last so many of
     * those that the first group of the pass has seen. NULL: does not matter to this policy. Not
     * called: passes of one token. */
    void (*begin_pass)(struct fm_policy *policy, int32_t group, int32_t n_tokens);
    /* The current token uses an expert that is resident, or one that is not. */
    void (*on_hit)(struct fm_policy *policy, int32_t group, int32_t expert);
    void (*on_miss)(struct fm_policy *policy, int32_t group, int32_t expert);
    /* An expert became resident, or stopped being so. */
    void (*on_insert)(struct fm_policy *policy, int32_t group, int32_t expert);
    void (*on_remove)(struct fm_policy *policy, int32_t group, int32_t expert);
    /* victim can also name an expert that is not resident: one that is used now and not worth a slot. Pays
     * only for a policy that looks further than to recent use. */
    bool ranks_all;
    /* Names one expert e with may_leave[e] != 0, or -1 when there is none. */
    int32_t (*victim)(struct fm_policy *policy, int32_t group, const uint8_t *may_leave);
    /* The group has seen all experts of one token. */
    void (*end_token)(struct fm_policy *policy, int32_t group);
    /* Tokens of another request follow; NULL: all requests are one to this policy. */
    void (*begin_sequence)(struct fm_policy *policy);
    /* The group has so many slots from now on; NULL: this policy does not care. */
    void (*resize)(struct fm_policy *policy, int32_t group, int32_t n_slots);
    /* What it has learned, as numbers that a policy made with the same n_expert takes back. save:
     * returns how many there are, and writes them when n is enough. load: false, and nothing
     * changes, when it cannot be these. NULL: learns nothing. */
    size_t (*save)(struct fm_policy *policy, float *weights, size_t n);
    bool (*load)(struct fm_policy *policy, const float *weights, size_t n);
    /* From now on it keeps what it has learned, or learns again. NULL: learns nothing. */
    void (*freeze)(struct fm_policy *policy, bool frozen);
    /* Its own invariants against the resident set. */
    bool (*verify)(const struct fm_policy *policy, int32_t group, const uint8_t *resident);
};

/* NULL when there is no such policy. */
const struct fm_policy_type *fm_policy_find(const char *name);

extern const struct fm_policy_type fm_policy_lru;
extern const struct fm_policy_type fm_policy_lfu;
extern const struct fm_policy_type fm_policy_dlfu;
extern const struct fm_policy_type fm_policy_learned;
extern const struct fm_policy_type fm_policy_arc;
extern const struct fm_policy_type fm_policy_lecar;
extern const struct fm_policy_type fm_policy_lfru;
extern const struct fm_policy_type fm_policy_least_stale;
extern const struct fm_policy_type fm_policy_random;
extern const struct fm_policy_type fm_policy_flashmoe;

/* Belady's needs to know the future, so only the simulator can make one. */
struct fm_simulation_setup;
extern const struct fm_policy_type fm_policy_belady;
struct fm_policy *fm_belady_new(const struct fm_simulation_setup *setup);

/* A policy of functions that somebody else brings along; foreign stays with the caller. */
struct fm_foreign_policy;
extern const struct fm_policy_type fm_policy_foreign;
struct fm_policy *fm_foreign_new(struct fm_foreign_policy *foreign, const struct fm_policy_setup *setup);

/* Most policies keep something per group and something per expert. Such a policy is one block of
 * zeros: an array of groups of its own type, which begins with this, then the experts of its own type. */
struct fm_policy_group {
    int32_t n_expert;
    int32_t n_slots;
    void *experts; /* [n_expert] */
};
/* NULL: no memory. group_bytes and expert_bytes: of the two types. */
struct fm_policy *fm_policy_new(const struct fm_policy_setup *setup, size_t group_bytes, size_t expert_bytes);
void fm_policy_free(struct fm_policy *policy);
/* For what a policy does not care about. */
void fm_policy_no_use(struct fm_policy *policy, int32_t group, int32_t expert);
void fm_policy_no_end(struct fm_policy *policy, int32_t group);

/* The next of a sequence of pseudo-random numbers: splitmix64. */
uint64_t fm_policy_draw(uint64_t *state);
