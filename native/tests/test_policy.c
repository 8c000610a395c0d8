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

static uint64_t last_use[N_EXPERT];    /* counted over all uses, by place within a token */
static uint64_t inserted_at[N_EXPERT]; /* counted over all insertions */

typedef bool (*before_function)(int token, int a, int b);

/* The candidate that leaves before all others, the lower number first. */
static int first_of(int token, const uint8_t *may_leave, before_function before) {
    int victim = -1;
    for (int e = 0; e < N_EXPERT; e++) {
        if (may_leave[e] && (victim < 0 || before(token, e, victim))) {
            victim = e;
        }
    }
    return victim;
}

static bool lru_before(int token, int a, int b) {
    (void)token;
    return last_use[a] < last_use[b];
}

static int n_uses(int token, int expert) {
    int n = 0;
    for (int t = 0; t <= token; t++) {
        n += history[t][expert] > 0;
    }
    return n;
}

static bool lfu_before(int token, int a, int b) {
    const int n_a = n_uses(token, a);
    const int n_b = n_uses(token, b);
    return n_a < n_b || (n_a == n_b && last_use[a] < last_use[b]);
}

/* Tokens since the last use, 1 when the current one is it. */
static int age(int token, int expert) {
    int t = token;
    while (t >= 0 && history[t][expert] == 0) {
        t--;
    }
    return token - t + 1;
}

static bool lfru_before(int token, int a, int b) {
    return n_uses(token, a) * age(token, b) < n_uses(token, b) * age(token, a);
}

static bool least_stale_before(int token, int a, int b) {
    const bool stale_a = age(token, a) > 2;
    const bool stale_b = age(token, b) > 2;
    return stale_a != stale_b ? stale_a : inserted_at[a] < inserted_at[b];
}

/* The average of an expert's use, computed again from its whole history. */
static float dlfu_use(int token, int expert) {
    float use = 0;
    for (int t = 0; t <= token; t++) {
        use = (use + (history[t][expert] > 0 ? 1.0f : 0.0f)) * 0.95f;
    }
    return use;
}

static bool dlfu_before(int token, int a, int b) {
    return dlfu_use(token, a) < dlfu_use(token, b);
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

/* A cache of n_slots over a pseudo-random trace. Some residents may not leave: they are in use.
 * before NULL: any victim that may leave will do. */
static void follow(const struct fm_policy_type *type, before_function before, int n_slots) {
    const int32_t n_expert[N_GROUPS] = {3, N_EXPERT};
    const int32_t slots[N_GROUPS] = {3, n_slots};
    const struct fm_policy_setup setup = {.n_groups = N_GROUPS, .n_expert = n_expert, .n_slots = slots};
    struct fm_policy *policy = type->create(&setup);
    CHECK(policy != NULL);
    unsigned long long state = 88172645463325252u + (unsigned)n_slots;
    uint8_t resident[N_EXPERT] = {0};
    const uint8_t nothing[3] = {0};
    uint64_t clock = 0;
    uint64_t n_inserted = 0;
    int n_resident = 0;
    int n_victims = 0;
    memset(history, 0, sizeof history);
    memset(inserted_at, 0, sizeof inserted_at);
    memset(last_use, 0, sizeof last_use);
    for (int t = 0; t < N_TOKENS; t++) {
        int experts[8];
        const int n = choose(&state, experts);
        for (int k = 0; k < n; k++) {
            const int e = experts[k];
            history[t][e] = (uint8_t)(k + 1);
            last_use[e] = ++clock;
            if (resident[e]) {
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
                if (before != NULL) {
                    CHECK_EQUAL(victim, first_of(t, may_leave, before));
                }
                CHECK(victim < N_EXPERT && (victim < 0 || may_leave[victim]));
                if (victim < 0) {
                    CHECK(memchr(may_leave, 1, sizeof may_leave) == NULL);
                    continue; /* all in use: this expert is not admitted */
                }
                n_victims++;
                resident[victim] = 0;
                n_resident--;
                type->on_remove(policy, 1, victim);
                CHECK(type->verify(policy, 1, resident));
            }
            type->on_insert(policy, 1, experts[k]);
            inserted_at[experts[k]] = ++n_inserted;
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
    follow(&fm_policy_lru, lru_before, 5);
    follow(&fm_policy_lru, lru_before, 8);
}

TEST(lfu_names_the_victims_of_the_reference) {
    follow(&fm_policy_lfu, lfu_before, 5);
    follow(&fm_policy_lfu, lfu_before, 8);
}

TEST(dlfu_names_the_victims_of_the_reference) {
    follow(&fm_policy_dlfu, dlfu_before, 5);
    follow(&fm_policy_dlfu, dlfu_before, 8);
}

TEST(lfru_names_the_victims_of_the_reference) {
    follow(&fm_policy_lfru, lfru_before, 5);
    follow(&fm_policy_lfru, lfru_before, 8);
}

TEST(least_stale_names_the_victims_of_the_reference) {
    follow(&fm_policy_least_stale, least_stale_before, 5);
    follow(&fm_policy_least_stale, least_stale_before, 8);
}

/* Their victims are compared with those of other implementations by the Python tests. */
TEST(every_policy_names_whom_it_may_and_keeps_its_invariants) {
    const char *name;
    for (int32_t i = 0; (name = fm_policy_name(i)) != NULL; i++) {
        for (int n_slots = 2; n_slots <= 8; n_slots += 3) {
            follow(fm_policy_find(name), NULL, n_slots);
        }
    }
}

TEST(arc_keeps_a_scan_out) {
    const int32_t n_expert = 16;
    const int32_t n_slots = 4;
    const struct fm_policy_setup setup = {.n_groups = 1, .n_expert = &n_expert, .n_slots = &n_slots};
    struct fm_policy *policy = fm_policy_arc.create(&setup);
    uint8_t resident[16] = {0};
    for (int e = 0; e < 4; e++) {
        fm_policy_arc.on_miss(policy, 0, e);
        fm_policy_arc.end_token(policy, 0);
        fm_policy_arc.on_insert(policy, 0, e);
        resident[e] = 1;
    }
    for (int e = 0; e < 3; e++) { /* used twice */
        fm_policy_arc.on_hit(policy, 0, e);
        fm_policy_arc.end_token(policy, 0);
    }
    for (int e = 4; e < 16; e++) { /* each once: it is the only one that leaves */
        fm_policy_arc.on_miss(policy, 0, e);
        fm_policy_arc.end_token(policy, 0);
        CHECK_EQUAL(fm_policy_arc.victim(policy, 0, resident), e - 1);
        fm_policy_arc.on_remove(policy, 0, e - 1);
        fm_policy_arc.on_insert(policy, 0, e);
        resident[e - 1] = 0;
        resident[e] = 1;
        CHECK(fm_policy_arc.verify(policy, 0, resident));
    }
    for (int e = 14; e <= 15; e++) { /* two slots are given back */
        const int leaves = e == 14 ? 15 : 2;
        fm_policy_arc.on_remove(policy, 0, leaves);
        resident[leaves] = 0;
    }
    fm_policy_arc.resize(policy, 0, 2);
    CHECK(fm_policy_arc.verify(policy, 0, resident));
    CHECK_EQUAL(fm_policy_arc.victim(policy, 0, resident), 0);
    fm_policy_arc.destroy(policy);
}

TEST(lecar_remembers_as_many_as_there_are_slots) {
    const int32_t n_expert = 16;
    const int32_t n_slots = 6;
    const struct fm_policy_setup setup = {.n_groups = 1, .n_expert = &n_expert, .n_slots = &n_slots, .seed = 3};
    struct fm_policy *policy = fm_policy_lecar.create(&setup);
    uint8_t resident[16] = {0};
    unsigned long long state = 1;
    int n_resident = 0;
    for (int t = 0; t < 500; t++) {
        const int e = (int)(check_random(&state) % 16);
        if (resident[e]) {
            fm_policy_lecar.on_hit(policy, 0, e);
            fm_policy_lecar.end_token(policy, 0);
            continue;
        }
        fm_policy_lecar.on_miss(policy, 0, e);
        fm_policy_lecar.end_token(policy, 0);
        if (n_resident == 6) {
            const int victim = fm_policy_lecar.victim(policy, 0, resident);
            CHECK(victim >= 0 && resident[victim]);
            fm_policy_lecar.on_remove(policy, 0, victim);
            resident[victim] = 0;
            n_resident--;
        }
        fm_policy_lecar.on_insert(policy, 0, e);
        resident[e] = 1;
        n_resident++;
        CHECK(fm_policy_lecar.verify(policy, 0, resident));
    }
    for (int e = 0; e < 16 && n_resident > 1; e++) {
        if (resident[e]) {
            fm_policy_lecar.on_remove(policy, 0, e); /* without having been asked: in no history */
            resident[e] = 0;
            n_resident--;
        }
    }
    fm_policy_lecar.resize(policy, 0, 1);
    CHECK(fm_policy_lecar.verify(policy, 0, resident));
    fm_policy_lecar.destroy(policy);
}

TEST(random_follows_its_seed) {
    const int32_t n_expert = 16;
    const uint8_t all[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    int n_other = 0;
    struct fm_policy_setup setup = {.n_groups = 1, .n_expert = &n_expert, .n_slots = &n_expert, .seed = 1};
    struct fm_policy *a = fm_policy_random.create(&setup);
    struct fm_policy *b = fm_policy_random.create(&setup);
    setup.seed = 2;
    struct fm_policy *c = fm_policy_random.create(&setup);
    for (int i = 0; i < 100; i++) {
        const int victim = fm_policy_random.victim(a, 0, all);
        CHECK_EQUAL(victim, fm_policy_random.victim(b, 0, all));
        n_other += victim != fm_policy_random.victim(c, 0, all);
    }
    CHECK(n_other > 50);
    fm_policy_random.destroy(a);
    fm_policy_random.destroy(b);
    fm_policy_random.destroy(c);
}

static void insert(const struct fm_policy_type *type, struct fm_policy *policy, int e) {
    type->on_miss(policy, 0, e);
    type->end_token(policy, 0);
    type->on_insert(policy, 0, e);
}

TEST(nobody_leaves_who_may_not) {
    const char *name;
    for (int32_t i = 0; (name = fm_policy_name(i)) != NULL; i++) {
        const struct fm_policy_type *type = fm_policy_find(name);
        const int32_t n_expert = 4;
        struct fm_policy *policy = create(type, 1, &n_expert);
        for (int e = 0; e < 4; e++) {
            insert(type, policy, e);
        }
        CHECK_EQUAL(type->victim(policy, 0, (uint8_t[]){0, 0, 0, 0}), -1);
        CHECK_EQUAL(type->victim(policy, 0, (uint8_t[]){0, 0, 1, 0}), 2);
        type->destroy(policy);
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

TEST(verify_knows_who_is_resident) {
    const int32_t n_expert = 3;
    const struct fm_policy_type *types[] = {&fm_policy_lru, &fm_policy_arc, &fm_policy_least_stale};
    for (int i = 0; i < 3; i++) {
        struct fm_policy *policy = create(types[i], 1, &n_expert);
        insert(types[i], policy, 1);
        CHECK(types[i]->verify(policy, 0, (uint8_t[]){0, 1, 0}));
        CHECK(!types[i]->verify(policy, 0, (uint8_t[]){0, 0, 0}));
        CHECK(!types[i]->verify(policy, 0, (uint8_t[]){1, 1, 0}));
        types[i]->on_remove(policy, 0, 1);
        CHECK(types[i]->verify(policy, 0, (uint8_t[]){0, 0, 0}));
        CHECK(!types[i]->verify(policy, 0, (uint8_t[]){0, 1, 0}));
        types[i]->destroy(policy);
    }
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
    CHECK(fm_policy_find("belady") == NULL); /* which nobody can follow while decoding */
    CHECK(fm_policy_find("lru?") == NULL);
    CHECK(fm_policy_find("") == NULL);
}
