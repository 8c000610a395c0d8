/* test_simulate.c: replays worked out by hand; what the simulator refuses. The rates on larger traces
 * are compared with other implementations by the Python tests. */

#include <string.h>

#include "api.h"
#include "check.h"

enum { NONE = 65535, MAX_VICTIMS = 64 };

static uint16_t victims[MAX_VICTIMS];

static struct fm_simulation_setup one_layer(const char *policy, const uint16_t *experts, int n_tokens, int k) {
    static const int32_t n_expert = 4;
    static const int32_t n_slots = 2;
    static const int64_t begin = 0;
    memset(victims, 0xFF, sizeof victims);
    return (struct fm_simulation_setup){
        .experts = experts,
        .n_tokens = n_tokens,
        .n_layers = 1,
        .k = k,
        .sequences = &begin,
        .n_sequences = 1,
        .n_expert = &n_expert,
        .n_slots = &n_slots,
        .policy = policy,
        .victims = victims,
    };
}

static struct fm_layer_counts replay(const struct fm_simulation_setup *setup) {
    struct fm_layer_counts counts;
    fm_simulation *simulation = fm_simulation_new(setup);
    CHECK(simulation != NULL);
    CHECK_EQUAL(fm_simulation_run(simulation, 1), setup->n_tokens - 1);
    CHECK_EQUAL(fm_simulation_run(simulation, setup->n_tokens), 0);
    CHECK_EQUAL(fm_simulation_run(simulation, 1), 0);
    CHECK_EQUAL(fm_simulation_counts(simulation, &counts), FM_OK);
    fm_simulation_free(simulation);
    return counts;
}

static void check_counts(struct fm_layer_counts counts, int lookups, int hits, int evicted, int refetched) {
    CHECK_EQUAL(counts.lookups, lookups);
    CHECK_EQUAL(counts.hits, hits);
    CHECK_EQUAL(counts.evicted, evicted);
    CHECK_EQUAL(counts.refetched, refetched);
}

static void check_victims(const uint16_t *expected, size_t n) {
    for (size_t i = 0; i < n; i++) {
        CHECK_EQUAL(victims[i], expected[i]);
    }
}

TEST(lru_of_one_expert_a_token) {
    const uint16_t experts[] = {0, 1, 2, 0, 3};
    const struct fm_simulation_setup setup = one_layer("lru", experts, 5, 1);
    check_counts(replay(&setup), 5, 0, 3, 1);
    check_victims((uint16_t[]){NONE, NONE, 0, 1, 2}, 5);
}

TEST(belady_keeps_what_comes_next) {
    const uint16_t experts[] = {0, 1, 2, 0, 3};
    const struct fm_simulation_setup setup = one_layer("belady", experts, 5, 1);
    check_counts(replay(&setup), 5, 1, 2, 0);
    check_victims((uint16_t[]){NONE, NONE, 1, NONE, 0}, 5);
}

TEST(with_bypass_what_was_just_used_may_leave) {
    const uint16_t experts[] = {0, 1, 2, 0, 1};
    struct fm_simulation_setup setup = one_layer("belady", experts, 5, 1);
    check_counts(replay(&setup), 5, 1, 2, 1);
    setup = one_layer("belady-bypass", experts, 5, 1);
    check_counts(replay(&setup), 5, 2, 1, 0);
    check_victims((uint16_t[]){NONE, NONE, 2, NONE, NONE}, 5);
    setup = one_layer("belady", experts, 5, 1);
    setup.bypass = 1;
    check_counts(replay(&setup), 5, 2, 1, 0);
    setup = one_layer("lru", experts, 5, 1); /* it has just been used: never the oldest */
    const struct fm_layer_counts plain = replay(&setup);
    setup.bypass = 1;
    check_counts(replay(&setup), 5, (int)plain.hits, (int)plain.evicted, (int)plain.refetched);
}

TEST(what_a_token_uses_cannot_leave) {
    const uint16_t experts[] = {0, 1, 2, 2, 1, 0, 3, 0, 1};
    const struct fm_simulation_setup setup = one_layer("lru", experts, 3, 3);
    /* 2 finds no room twice; 3 neither, as 0 and 1 are in use */
    check_counts(replay(&setup), 9, 4, 0, 0);
    check_victims((uint16_t[]){NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE}, 9);
}

TEST(more_leave_than_a_bypassed_token_finds_room_for) {
    const uint16_t experts[] = {0, 1, 2};
    struct fm_simulation_setup setup = one_layer("lru", experts, 1, 3);
    setup.bypass = 1;
    check_counts(replay(&setup), 3, 0, 1, 0);
    check_victims((uint16_t[]){0, NONE, NONE}, 3);
}

TEST(an_expert_twice_in_a_token_counts_once) {
    const uint16_t experts[] = {1, 1, NONE, 1, NONE, NONE};
    const struct fm_simulation_setup setup = one_layer("lru", experts, 2, 3);
    check_counts(replay(&setup), 2, 1, 0, 0);
}

TEST(refetched_is_within_five_tokens) {
    const uint16_t soon[] = {0, 1, 2, 1, 2, 1, 2, 0}; /* 0 leaves at token 2, is back at 7 */
    struct fm_simulation_setup setup = one_layer("lru", soon, 8, 1);
    check_counts(replay(&setup), 8, 4, 2, 1);
    const uint16_t late[] = {0, 1, 2, 1, 2, 1, 2, 1, 0};
    setup = one_layer("lru", late, 9, 1);
    check_counts(replay(&setup), 9, 5, 2, 0);
}

TEST(a_layer_without_slots_has_no_hits) {
    const uint16_t experts[] = {0, 1, 0, 1, 0, 1};
    const int32_t n_expert[] = {2, 2};
    const int32_t n_slots[] = {0, 2};
    struct fm_simulation_setup setup = one_layer("arc", experts, 3, 1);
    setup.n_layers = 2;
    setup.n_expert = n_expert;
    setup.n_slots = n_slots;
    struct fm_layer_counts counts[2];
    fm_simulation *simulation = fm_simulation_new(&setup);
    CHECK(simulation != NULL);
    CHECK_EQUAL(fm_simulation_run(simulation, 3), 0);
    CHECK_EQUAL(fm_simulation_counts(simulation, counts), FM_OK);
    check_counts(counts[0], 3, 0, 0, 0);
    check_counts(counts[1], 3, 2, 0, 0);
    fm_simulation_free(simulation);
}

TEST(what_does_not_fit_is_refused) {
    const uint16_t experts[] = {0, 1, 2, 4};
    struct fm_simulation_setup setup = one_layer("lru", experts, 4, 1);
    CHECK(fm_simulation_new(&setup) == NULL); /* there is no expert 4 */
    CHECK_TEXT(fm_last_message(), "does not fit");
    setup = one_layer("clairvoyant", experts, 3, 1);
    CHECK(fm_simulation_new(&setup) == NULL);
    CHECK_TEXT(fm_last_message(), "there is no eviction policy 'clairvoyant'");
    setup = one_layer("lru", experts, 3, 1);
    setup.sequences = (int64_t[]){4};
    CHECK(fm_simulation_new(&setup) == NULL);
    setup = one_layer("lru", experts, 3, 1);
    setup.n_slots = (int32_t[]){5};
    CHECK(fm_simulation_new(&setup) == NULL);
    setup = one_layer("lru", experts, 3, 0);
    CHECK(fm_simulation_new(&setup) == NULL);
    fm_simulation_free(NULL);
}
