/* policy.c: the registry of eviction policies, one row each, and what several of them share. */

#include "policy.h"

#include <stdlib.h>
#include <string.h>

#include "api.h"

static const struct fm_policy_type *const types[] = {
    &fm_policy_lru,
    &fm_policy_lfu,
    &fm_policy_dlfu,
    &fm_policy_learned,
    &fm_policy_arc,
    &fm_policy_lecar,
    &fm_policy_lfru,
    &fm_policy_least_stale,
    &fm_policy_random,
    &fm_policy_flashmoe,
};

enum { N_TYPES = sizeof types / sizeof types[0] };

const struct fm_policy_type *fm_policy_find(const char *name) {
    for (int i = 0; i < N_TYPES; i++) {
        if (strcmp(types[i]->name, name) == 0) {
            return types[i];
        }
    }
    return NULL;
}

const char *fm_policy_name(int32_t index) {
    return index >= 0 && index < N_TYPES ? types[index]->name : NULL;
}

static size_t align_up(size_t bytes) {
    return (bytes + 15) & ~(size_t)15;
}

struct fm_policy *fm_policy_new(const struct fm_policy_setup *setup, size_t group_bytes, size_t expert_bytes) {
    size_t bytes = align_up((size_t)setup->n_groups * group_bytes);
    for (int32_t g = 0; g < setup->n_groups; g++) {
        bytes += align_up((size_t)setup->n_expert[g] * expert_bytes);
    }
    char *block = calloc(1, bytes);
    if (block == NULL) {
        return NULL;
    }
    char *experts = block + align_up((size_t)setup->n_groups * group_bytes);
    for (int32_t g = 0; g < setup->n_groups; g++) {
        struct fm_policy_group *group = (struct fm_policy_group *)(block + (size_t)g * group_bytes);
        group->n_expert = setup->n_expert[g];
        group->n_slots = setup->n_slots[g];
        group->experts = experts;
        experts += align_up((size_t)setup->n_expert[g] * expert_bytes);
    }
    return (struct fm_policy *)block;
}

void fm_policy_free(struct fm_policy *policy) {
    free(policy);
}

void fm_policy_no_use(struct fm_policy *policy, int32_t group, int32_t expert) {
    (void)policy, (void)group, (void)expert;
}

void fm_policy_no_end(struct fm_policy *policy, int32_t group) {
    (void)policy, (void)group;
}

uint64_t fm_policy_draw(uint64_t *state) {
    uint64_t x = *state += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}
