/* test_policy.c: each policy against a model that knows nothing but the history of uses, victim for
 * victim; its invariants; the registry. */

#include <stdlib.h>
#include <string.h>

#include "api.h"
#include "check.h"
#include "policy.h"

enum { N_EXPERT = 16, N_TOKENS = 1200, N_GROUPS = 2 };

/* Which experts each token used, by place in its list: 1, 2, ..; 0: not used. */
static uint8_t history[N_TOKENS][N_EXPERT];

/* When the expert was used or inserted last, from the history alone: a later token is later, and
 * within a token those that were resident come first, by place, then those that were inserted. */
static uint64_t inserted_at[N_EXPERT];
static uint64_t hit_at[N_EXPERT];

static int lru_reference(int token, const uint8_t *may_leave) {
    (void)token;
    int victim = -1;
    uint64_t oldest = 0;
    for (int e = 0; e < N_EXPERT; e++) {
        const uint64_t last = hit_at[e] > inserted_at[e] ? hit_at[e] : inserted_at[e];
        if (may_leave[e] && (victim < 0 || last < oldest)) {
            victim = e;
            oldest = last;
        }
    }
    return victim;
}

/* The average of an expert's use, computed again from its whole history. */
static float dlfu_use(int token, int expert) {
    float use = 0;
    for (int t = 0; t <= token; t++) {
        use = (use + (history[t][expert] > 0 ? 1.0f : 0.0f)) * 0.95f;
    }
    return use;
}

static int dlfu_reference(int token, const uint8_t *may_leave) {
    int victim = -1;
    float least = 0;
    for (int e = 0; e < N_EXPERT; e++) {
        if (!may_leave[e]) {
            continue;
        }
        const float use = dlfu_use(token, e);
        if (victim < 0 || use < least) {
            victim = e;
            least = use;
        }
    }
    return victim;
}

/* Skewed choice of 2 to 5 distinct experts. */
static int choose(unsigned long long *state, int *experts) {
    const int n = 2 + (int)(check_random(state) % 4);
    int chosen = 0;
    while (chosen < n) {
        const unsigned r = check_random(state);
        const int e = (int)((r % N_EXPERT) * (r / N_EXPERT % N_EXPERT) / N_EXPERT);
        int k = 0;
        while (k < chosen && experts[k] != e) {
            k++;
        }
        if (k == chosen) {
            experts[chosen++] = e;
        }
    }
    return n;
}

static struct fm_policy *create(const struct fm_policy_type *type, int32_t n_groups, const int32_t *n_expert) {
    const struct fm_policy_setup setup = {.n_groups = n_groups, .n_expert = n_expert, .n_slots = n_expert};
    return type->create(&setup);
}

/* A cache of n_slots over a pseudo-random trace. Some residents may not leave: they are in use. */
static void follow(const struct fm_policy_type *type, int (*reference)(int, const uint8_t *), int n_slots) {
    const int32_t n_expert[N_GROUPS] = {3, N_EXPERT};
    struct fm_policy *policy = create(type, N_GROUPS, n_expert);
    CHECK(policy != NULL);
    unsigned long long state = 88172645463325252u + (unsigned)n_slots;
    uint8_t resident[N_EXPERT] = {0};
    const uint8_t nothing[3] = {0};
    uint64_t clock = 0;
    int n_resident = 0;
    int n_victims = 0;
    memset(history, 0, sizeof history);
    memset(inserted_at, 0, sizeof inserted_at);
    memset(hit_at, 0, sizeof hit_at);
    for (int t = 0; t < N_TOKENS; t++) {
        int experts[8];
        const int n = choose(&state, experts);
        for (int k = 0; k < n; k++) {
            const int e = experts[k];
            history[t][e] = (uint8_t)(k + 1);
            if (resident[e]) {
                hit_at[e] = ++clock;
                type->on_hit(policy, 1, e);
            } else {
                type->on_miss(policy, 1, e);
            }
        }
        type->end_token(policy, 1);
        CHECK(type->verify(policy, 1, resident));
        for (int k = 0; k < n; k++) {
            if (resident[experts[k]]) {
                continue;
            }
            if (n_resident == n_slots) {
                uint8_t may_leave[N_EXPERT];
                for (int e = 0; e < N_EXPERT; e++) {
                    may_leave[e] = resident[e] && history[t][e] == 0 && check_random(&state) % 8 != 0;
                }
                const int victim = type->victim(policy, 1, may_leave);
                CHECK_EQUAL(victim, reference(t, may_leave));
                if (victim < 0) {
                    continue; /* all in use: this expert is not admitted */
                }
                n_victims++;
                resident[victim] = 0;
                n_resident--;
                type->on_remove(policy, 1, victim);
                CHECK(type->verify(policy, 1, resident));
            }
            type->on_insert(policy, 1, experts[k]);
            inserted_at[experts[k]] = ++clock;
            resident[experts[k]] = 1;
            n_resident++;
            CHECK(type->verify(policy, 1, resident));
        }
    }
    CHECK(n_victims > N_TOKENS / 4);
    CHECK(type->verify(policy, 0, nothing)); /* the other group has seen nothing of it */
    type->destroy(policy);
}

TEST(lru_names_the_victims_of_the_reference) {
    follow(&fm_policy_lru, lru_reference, 5);
    follow(&fm_policy_lru, lru_reference, 8);
}

TEST(dlfu_names_the_victims_of_the_reference) {
    follow(&fm_policy_dlfu, dlfu_reference, 5);
    follow(&fm_policy_dlfu, dlfu_reference, 8);
}

static void insert(const struct fm_policy_type *type, struct fm_policy *policy, int e) {
    type->on_miss(policy, 0, e);
    type->end_token(policy, 0);
    type->on_insert(policy, 0, e);
}

TEST(nobody_leaves_who_may_not) {
    const struct fm_policy_type *types[] = {&fm_policy_lru, &fm_policy_dlfu};
    for (int i = 0; i < 2; i++) {
        const int32_t n_expert = 4;
        struct fm_policy *policy = create(types[i], 1, &n_expert);
        for (int e = 0; e < 4; e++) {
            insert(types[i], policy, e);
        }
        CHECK_EQUAL(types[i]->victim(policy, 0, (uint8_t[]){0, 0, 0, 0}), -1);
        CHECK_EQUAL(types[i]->victim(policy, 0, (uint8_t[]){0, 0, 1, 0}), 2);
        CHECK_EQUAL(types[i]->victim(policy, 0, (uint8_t[]){1, 1, 1, 1}), 0);
        types[i]->destroy(policy);
    }
}

TEST(lru_forgets_and_dlfu_remembers_what_left) {
    const int32_t n_expert = 3;
    const uint8_t all[] = {1, 1, 1};
    struct fm_policy *lru = create(&fm_policy_lru, 1, &n_expert);
    struct fm_policy *dlfu = create(&fm_policy_dlfu, 1, &n_expert);
    for (int i = 0; i < 3; i++) {
        insert(&fm_policy_lru, lru, 0);
        insert(&fm_policy_dlfu, dlfu, 0);
    }
    insert(&fm_policy_lru, lru, 1);
    insert(&fm_policy_lru, lru, 2);
    insert(&fm_policy_dlfu, dlfu, 1);
    insert(&fm_policy_dlfu, dlfu, 2);
    CHECK_EQUAL(fm_policy_lru.victim(lru, 0, all), 0);
    CHECK_EQUAL(fm_policy_dlfu.victim(dlfu, 0, all), 1);
    fm_policy_dlfu.on_remove(dlfu, 0, 0);
    fm_policy_dlfu.on_insert(dlfu, 0, 0);
    CHECK_EQUAL(fm_policy_dlfu.victim(dlfu, 0, all), 1);
    fm_policy_lru.destroy(lru);
    fm_policy_dlfu.destroy(dlfu);
}

TEST(dlfu_ties_go_to_the_lower_number) {
    const int32_t n_expert = 3;
    struct fm_policy *policy = create(&fm_policy_dlfu, 1, &n_expert);
    fm_policy_dlfu.on_miss(policy, 0, 1);
    fm_policy_dlfu.on_miss(policy, 0, 2);
    fm_policy_dlfu.end_token(policy, 0);
    CHECK_EQUAL(fm_policy_dlfu.victim(policy, 0, (uint8_t[]){0, 1, 1}), 1);
    fm_policy_dlfu.destroy(policy);
}

TEST(verify_sees_what_does_not_fit) {
    const int32_t n_expert = 3;
    struct fm_policy *lru = create(&fm_policy_lru, 1, &n_expert);
    fm_policy_lru.on_insert(lru, 0, 1);
    CHECK(fm_policy_lru.verify(lru, 0, (uint8_t[]){0, 1, 0}));
    CHECK(!fm_policy_lru.verify(lru, 0, (uint8_t[]){0, 0, 0}));
    CHECK(!fm_policy_lru.verify(lru, 0, (uint8_t[]){0, 1, 1}));
    fm_policy_lru.on_remove(lru, 0, 1);
    CHECK(!fm_policy_lru.verify(lru, 0, (uint8_t[]){0, 1, 0}));
    fm_policy_lru.destroy(lru);

    /* more uses than there were tokens */
    struct fm_policy *dlfu = create(&fm_policy_dlfu, 1, &n_expert);
    CHECK(fm_policy_dlfu.verify(dlfu, 0, (uint8_t[]){0, 0, 0}));
    for (int i = 0; i < 22; i++) {
        fm_policy_dlfu.on_hit(dlfu, 0, 2);
    }
    CHECK(!fm_policy_dlfu.verify(dlfu, 0, (uint8_t[]){0, 0, 0}));
    fm_policy_dlfu.destroy(dlfu);
}

TEST(a_use_in_every_token_for_ever_stays_within_bounds) {
    const int32_t n_expert = 2;
    struct fm_policy *policy = create(&fm_policy_dlfu, 1, &n_expert);
    for (int t = 0; t < 5000; t++) {
        fm_policy_dlfu.on_hit(policy, 0, 0);
        CHECK(fm_policy_dlfu.verify(policy, 0, (uint8_t[]){1, 0}));
        fm_policy_dlfu.end_token(policy, 0);
    }
    CHECK_EQUAL(fm_policy_dlfu.victim(policy, 0, (uint8_t[]){1, 1}), 1);
    fm_policy_dlfu.destroy(policy);
}

TEST(the_registry_lists_and_finds_every_policy) {
    int n = 0;
    bool lru = false;
    bool dlfu = false;
    for (const char *name; (name = fm_policy_name(n)) != NULL; n++) {
        CHECK(fm_policy_find(name) != NULL);
        CHECK(strcmp(fm_policy_find(name)->name, name) == 0);
        lru |= strcmp(name, "lru") == 0;
        dlfu |= strcmp(name, "dlfu") == 0;
    }
    CHECK(lru && dlfu);
    CHECK(fm_policy_name(-1) == NULL);
    CHECK(fm_policy_name(n + 1) == NULL);
    CHECK(fm_policy_find("belady?") == NULL);
    CHECK(fm_policy_find("") == NULL);
}
