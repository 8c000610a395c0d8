/* policy.c: the registry of eviction policies, one row each. */

#include "policy.h"

#include <string.h>

#include "api.h"

static const struct fm_policy_type *const types[] = {
    &fm_policy_lru,
    &fm_policy_dlfu,
    &fm_policy_learned,
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
