/* simulate.c: recorded routing replayed through policies, without weights. It calls a policy in the
 * order in which slots.c and operation.c do while decoding: layer after layer of a token, in each
 * first what the token uses, then a victim before each insertion that needs one, in the order of the
 * experts' numbers. Hits are counted before anything is inserted. */

#include <stdlib.h>
#include <string.h>

#include "api.h"
#include "policy.h"

enum { NO_EXPERT = 0xFFFF, REFETCH_TOKENS = 5 };

struct layer {
    int32_t n_expert;
    int32_t n_slots;
    int32_t n_resident;
    uint8_t *resident;   /* [n_expert] */
    uint8_t *may_leave;  /* [n_expert] the same, less what the current token uses; zeros without bypass */
    uint8_t *missing;    /* [n_expert] of the current token */
    int64_t *seen;       /* [n_expert] the last token that used it, counted from 1 */
    int64_t *evicted_at; /* [n_expert] the token at which it left, counted from 1; 0: never, or it came back */
    struct fm_layer_counts counts;
};

struct fm_simulation {
    struct fm_simulation_setup setup;
    const struct fm_policy_type *type;
    struct fm_policy *policy;
    int64_t token;       /* the next one */
    int64_t n_begun;     /* sequences */
    struct layer layers[];
};

static bool is_valid(const struct fm_simulation_setup *setup) {
    if (setup->n_tokens < 0 || setup->n_tokens >= INT32_MAX || setup->n_layers < 1 || setup->k < 1 || setup->n_sequences < 0) {
        return false;
    }
    for (int32_t l = 0; l < setup->n_layers; l++) {
        if (setup->n_expert[l] < 1 || setup->n_expert[l] > NO_EXPERT || setup->n_slots[l] < 0 ||
            setup->n_slots[l] > setup->n_expert[l]) {
            return false;
        }
    }
    for (int64_t i = 0; i < setup->n_sequences; i++) {
        if (setup->sequences[i] < (i > 0 ? setup->sequences[i - 1] : 0) || setup->sequences[i] > setup->n_tokens) {
            return false;
        }
    }
    const uint16_t *e = setup->experts;
    for (int64_t t = 0; t < setup->n_tokens; t++) {
        for (int32_t l = 0; l < setup->n_layers; l++) {
            for (int32_t i = 0; i < setup->k; i++, e++) {
                if (*e != NO_EXPERT && *e >= setup->n_expert[l]) {
                    return false;
                }
            }
        }
    }
    return true;
}

static bool init_layer(struct layer *layer, int32_t n_expert, int32_t n_slots) {
    const size_t n = (size_t)n_expert;
    layer->n_expert = n_expert;
    layer->n_slots = n_slots;
    layer->seen = calloc(n, 2 * sizeof *layer->seen + 3);
    if (layer->seen == NULL) {
        return false;
    }
    layer->evicted_at = layer->seen + n;
    layer->resident = (uint8_t *)(layer->evicted_at + n);
    layer->may_leave = layer->resident + n;
    layer->missing = layer->may_leave + n;
    return true;
}

static bool find_policy(struct fm_simulation *simulation) {
    const char *name = simulation->setup.policy;
    if (simulation->setup.foreign != NULL) {
        simulation->type = &fm_policy_foreign;
    } else if (strcmp(name, "belady") == 0) {
        simulation->type = &fm_policy_belady;
    } else if (strcmp(name, "belady-bypass") == 0) {
        simulation->type = &fm_policy_belady;
        simulation->setup.bypass = 1;
    } else {
        simulation->type = fm_policy_find(name);
    }
    return simulation->type != NULL;
}

static bool new_policy(struct fm_simulation *simulation) {
    const struct fm_simulation_setup *setup = &simulation->setup;
    const struct fm_policy_setup policy_setup = {
        .n_groups = setup->n_layers,
        .n_expert = setup->n_expert,
        .n_slots = setup->n_slots,
        .seed = setup->seed,
    };
    if (simulation->type == &fm_policy_belady) {
        simulation->policy = fm_belady_new(setup);
    } else if (simulation->type == &fm_policy_foreign) {
        simulation->policy = fm_foreign_new(setup->foreign, &policy_setup);
    } else {
        simulation->policy = simulation->type->create(&policy_setup);
    }
    return simulation->policy != NULL;
}

fm_simulation *fm_simulation_new(const struct fm_simulation_setup *setup) {
    if (!is_valid(setup)) {
        fm_fail(FM_BAD_ARGUMENT, "the trace does not fit its sizes");
        return NULL;
    }
    struct fm_simulation *simulation =
        calloc(1, sizeof *simulation + (size_t)setup->n_layers * sizeof simulation->layers[0]);
    if (simulation == NULL) {
        fm_fail(FM_NO_MEMORY, "out of memory for a simulation");
        return NULL;
    }
    simulation->setup = *setup;
    if (!find_policy(simulation)) {
        fm_fail(FM_BAD_ARGUMENT, "there is no eviction policy '%s'", setup->policy);
        fm_simulation_free(simulation);
        return NULL;
    }
    bool have_memory = new_policy(simulation);
    for (int32_t l = 0; l < setup->n_layers && have_memory; l++) {
        have_memory = init_layer(&simulation->layers[l], setup->n_expert[l], setup->n_slots[l]);
    }
    if (!have_memory) {
        fm_fail(FM_NO_MEMORY, "out of memory for a simulation");
        fm_simulation_free(simulation);
        return NULL;
    }
    return simulation;
}

/* Tells the policy what the token uses; counts; marks what is missing. Returns how many are. */
static int32_t route(struct fm_simulation *simulation, int32_t l, const uint16_t *experts) {
    struct layer *layer = &simulation->layers[l];
    const int64_t now = simulation->token + 1;
    int32_t n_missing = 0;
    for (int32_t i = 0; i < simulation->setup.k; i++) {
        const int32_t e = experts[i];
        if (e == NO_EXPERT || layer->seen[e] == now) {
            continue;
        }
        layer->seen[e] = now;
        layer->counts.lookups++;
        if (layer->resident[e]) {
            layer->counts.hits++;
            layer->may_leave[e] = (uint8_t)simulation->setup.bypass;
            simulation->type->on_hit(simulation->policy, l, e);
        } else {
            layer->missing[e] = 1;
            n_missing++;
            if (layer->evicted_at[e] != 0 && now - layer->evicted_at[e] <= REFETCH_TOKENS) {
                layer->counts.refetched++;
            }
            layer->evicted_at[e] = 0;
            simulation->type->on_miss(simulation->policy, l, e);
        }
    }
    simulation->type->end_token(simulation->policy, l);
    return n_missing;
}

/* Returns the expert that left; -1: none may. */
static int32_t evict(struct fm_simulation *simulation, int32_t l) {
    struct layer *layer = &simulation->layers[l];
    const int32_t e = simulation->type->victim(simulation->policy, l, layer->may_leave);
    if (e < 0 || e >= layer->n_expert || !layer->may_leave[e]) {
        return -1;
    }
    simulation->type->on_remove(simulation->policy, l, e);
    layer->resident[e] = layer->may_leave[e] = 0;
    layer->n_resident--;
    layer->evicted_at[e] = simulation->token + 1;
    layer->counts.evicted++;
    return e;
}

static void insert(struct fm_simulation *simulation, int32_t l, int32_t e) {
    struct layer *layer = &simulation->layers[l];
    layer->resident[e] = 1;
    layer->may_leave[e] = (uint8_t)simulation->setup.bypass;
    layer->n_resident++;
    simulation->type->on_insert(simulation->policy, l, e);
}

/* Puts what is missing into the cache. With bypass all of it comes in first, then the policy names
 * who leaves among all that is there; else one leaves before one comes, never one that is in use. */
static void admit(struct fm_simulation *simulation, int32_t l, int32_t n_missing, uint16_t *victims) {
    struct layer *layer = &simulation->layers[l];
    const bool bypass = simulation->setup.bypass != 0;
    bool full = layer->n_slots == 0;
    for (int32_t e = 0; e < layer->n_expert && n_missing > 0; e++) {
        if (!layer->missing[e]) {
            continue;
        }
        layer->missing[e] = 0;
        n_missing--;
        if (!full && !bypass && layer->n_resident == layer->n_slots) {
            const int32_t victim = evict(simulation, l);
            full = victim < 0;
            if (victims != NULL && victim >= 0) {
                *victims++ = (uint16_t)victim;
            }
        }
        if (!full) {
            insert(simulation, l, e);
        }
    }
    while (layer->n_resident > layer->n_slots) {
        const int32_t victim = evict(simulation, l);
        if (victim < 0) {
            break; /* a policy that does not answer */
        }
        if (victims != NULL) {
            *victims++ = (uint16_t)victim;
        }
    }
}

static void step(struct fm_simulation *simulation, int32_t l) {
    const struct fm_simulation_setup *setup = &simulation->setup;
    struct layer *layer = &simulation->layers[l];
    const size_t at = ((size_t)simulation->token * (size_t)setup->n_layers + (size_t)l) * (size_t)setup->k;
    const uint16_t *experts = setup->experts + at;
    const int32_t n_missing = route(simulation, l, experts);
    admit(simulation, l, n_missing, setup->victims != NULL ? setup->victims + at : NULL);
    for (int32_t i = 0; i < setup->k; i++) {
        if (experts[i] != NO_EXPERT) {
            layer->may_leave[experts[i]] = layer->resident[experts[i]];
        }
    }
}

int32_t fm_simulation_load(fm_simulation *simulation, const float *weights, uint64_t n) {
    if (simulation->type->load == NULL || !simulation->type->load(simulation->policy, weights, (size_t)n)) {
        return fm_fail(FM_BAD_ARGUMENT, "policy %s cannot take these %llu weights", simulation->setup.policy,
                       (unsigned long long)n);
    }
    return FM_OK;
}

uint64_t fm_simulation_save(fm_simulation *simulation, float *weights, uint64_t n) {
    return simulation->type->save != NULL ? simulation->type->save(simulation->policy, weights, (size_t)n) : 0;
}

int64_t fm_simulation_run(fm_simulation *simulation, int64_t n_tokens) {
    const struct fm_simulation_setup *setup = &simulation->setup;
    for (int64_t n = 0; n < n_tokens && simulation->token < setup->n_tokens; n++) {
        bool begins = false;
        while (simulation->n_begun < setup->n_sequences && setup->sequences[simulation->n_begun] == simulation->token) {
            simulation->n_begun++;
            begins = true;
        }
        if (begins && simulation->type->begin_sequence != NULL) {
            simulation->type->begin_sequence(simulation->policy);
        }
        for (int32_t l = 0; l < setup->n_layers; l++) {
            step(simulation, l);
        }
        simulation->token++;
    }
    return setup->n_tokens - simulation->token;
}

int32_t fm_simulation_counts(const fm_simulation *simulation, struct fm_layer_counts *counts) {
    bool agrees = true;
    for (int32_t l = 0; l < simulation->setup.n_layers; l++) {
        const struct layer *layer = &simulation->layers[l];
        counts[l] = layer->counts;
        agrees = agrees && layer->n_resident <= layer->n_slots &&
                 simulation->type->verify(simulation->policy, l, layer->resident);
    }
    return agrees ? FM_OK : fm_fail(FM_BAD_STATE, "policy %s is inconsistent", simulation->setup.policy);
}

void fm_simulation_free(fm_simulation *simulation) {
    if (simulation == NULL) {
        return;
    }
    if (simulation->policy != NULL) {
        simulation->type->destroy(simulation->policy);
    }
    for (int32_t l = 0; l < simulation->setup.n_layers; l++) {
        free(simulation->layers[l].seen);
    }
    free(simulation);
}
