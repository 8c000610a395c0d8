/* test_slots.c: which experts are resident: counts on traces worked out by hand, what can never be
 * a victim, and verify() on states that must not be. */

#include <string.h>

#include "model.h"

/* blocks with one group of 8 experts */
static void create(struct model *model, int n_slots, const char *policy) {
    struct shape shape = blocks;
    shape.n_groups = 1;
    const struct fm_options options = options_for(0, 4);
    model_create(model, &shape, &options);
    model_start(model, n_slots, policy);
}

/* Exactly these experts are resident, given as digits. */
static void expect_resident(const struct model *model, const char *experts) {
    for (int e = 0; e < model->shape.n_expert; e++) {
        CHECK_EQUAL(model_is_resident(model, 0, e), strchr(experts, '0' + e) != NULL);
    }
    CHECK_EQUAL(model_group(model, 0).n_resident, strlen(experts));
}

#define TOKEN(...) run_group(&model, 0, (const int32_t[]){__VA_ARGS__}, sizeof((const int32_t[]){__VA_ARGS__}) / 4, 1)

TEST(lru_trace) {
    struct model model;
    create(&model, 3, "lru");
    TOKEN(0, 1); /* two misses, two empty slots */
    expect_resident(&model, "01");
    TOKEN(1, 2); /* hit, miss */
    expect_resident(&model, "012");
    TOKEN(3, 0); /* 1 was used last by the second token, before 2 came in */
    expect_resident(&model, "023");
    TOKEN(1, 4); /* 2, then 3: missed by the third token before it hit 0 */
    expect_resident(&model, "014");
    TOKEN(4, 0, 1); /* three hits, in this order */
    TOKEN(5, 6);    /* so 4 and 0 */
    expect_resident(&model, "156");

    const struct fm_group_stats group = model_group(&model, 0);
    CHECK_EQUAL(group.lookups, 13);
    CHECK_EQUAL(group.hits, 5);
    CHECK_EQUAL(group.evicted, 5);
    CHECK_EQUAL(group.n_slots, 3);
    CHECK_EQUAL(group.n_expert, 8);
    CHECK_EQUAL(group.layer, 10);
    const struct fm_stats stats = model_stats(&model);
    CHECK_EQUAL(stats.tokens, 6);
    CHECK_EQUAL(stats.operations, 18);
    CHECK_EQUAL(stats.lookups, 13);
    CHECK_EQUAL(stats.hits, 5);
    CHECK_EQUAL(stats.decode_lookups, 13);
    CHECK_EQUAL(stats.decode_hits, 5);
    CHECK_EQUAL(stats.inserted, 8);
    CHECK_EQUAL(stats.evicted, 5);
    CHECK_EQUAL(stats.bypassed, 0);
    CHECK_EQUAL(stats.reads, 8 * 3);
    CHECK_EQUAL(stats.read_bytes, 8 * 3 * 4096);
    CHECK_EQUAL(stats.missed_bytes, 8 * 3 * 4096);
    CHECK_EQUAL(stats.slot_bytes, 3 * 3 * 4096);
    CHECK_EQUAL(stats.resident_bytes, 3 * 3 * 4096);
    CHECK_EQUAL(stats.ring_bytes, 4 * 4096);
    CHECK_EQUAL(stats.failed_loads, 0);
    CHECK_EQUAL(stats.files_direct, 0);
    CHECK_EQUAL(stats.files_buffered, 1);
    model_free(&model);
}

TEST(dlfu_trace) {
    struct model model;
    create(&model, 2, "dlfu");
    TOKEN(0);
    TOKEN(0);
    TOKEN(0);
    TOKEN(1);
    TOKEN(2); /* 0 was used more often */
    expect_resident(&model, "02");
    TOKEN(1);
    TOKEN(1);
    TOKEN(1); /* as often as 0, and later */
    expect_resident(&model, "01");
    TOKEN(2);
    expect_resident(&model, "12");
    CHECK_EQUAL(model_stats(&model).evicted, 3);
    CHECK_EQUAL(model_stats(&model).hits, 4);
    model_free(&model);
}

/* An expert that a token names three times was used by one token, not by three. */
TEST(a_token_counts_an_expert_once) {
    struct model model;
    create(&model, 2, "dlfu");
    TOKEN(0, 0, 0);
    TOKEN(1);
    TOKEN(1);
    TOKEN(2);
    expect_resident(&model, "12");
    model_free(&model);
}

/* Uses count tokens, also in batches; an expert keeps its count when it leaves. */
TEST(experts_tell_their_use) {
    struct model model;
    create(&model, 2, "lru");
    TOKEN(0, 1);
    TOKEN(2, 0);
    run_group(&model, 0, (const int32_t[]){0, 3, 0, 3, 3, 3}, 2, 3);
    uint8_t resident[8];
    uint64_t uses[8];
    CHECK_EQUAL(fm_stream_experts(model.stream, 0, resident, uses), FM_OK);
    const uint64_t expected[8] = {4, 1, 1, 3, 0, 0, 0, 0};
    for (int e = 0; e < 8; e++) {
        CHECK_EQUAL(uses[e], expected[e]);
        CHECK_EQUAL(resident[e], model_is_resident(&model, 0, e));
    }
    CHECK_EQUAL(fm_stream_experts(model.stream, 1, resident, uses), FM_BAD_ARGUMENT);
    CHECK_EQUAL(fm_stream_experts(model.stream, -1, resident, uses), FM_BAD_ARGUMENT);
    model_free(&model);
}

TEST(all_experts_fit) {
    struct model model;
    create(&model, 8, "lru");
    for (int i = 0; i < 3; i++) {
        TOKEN(0, 1, 2, 3);
        TOKEN(4, 5, 6, 7);
    }
    expect_resident(&model, "01234567");
    CHECK_EQUAL(model_stats(&model).inserted, 8);
    CHECK_EQUAL(model_stats(&model).evicted, 0);
    CHECK_EQUAL(model_stats(&model).hits, 16);
    CHECK_EQUAL(model_stats(&model).reads, 24);
    model_free(&model);
}

/* One lookup per expert and pass, not per part and not per row. */
TEST(a_batch_counts_distinct_experts_once) {
    struct model model;
    create(&model, 8, "lru");
    run_group(&model, 0, (const int32_t[]){3, 4, 4, 3, 3, 5}, 2, 3);
    const struct fm_stats stats = model_stats(&model);
    CHECK_EQUAL(stats.tokens, 3);
    CHECK_EQUAL(stats.lookups, 3);
    CHECK_EQUAL(stats.decode_lookups, 0);
    CHECK_EQUAL(stats.inserted, 3);
    expect_resident(&model, "345");
    model_free(&model);
}

/* Two contexts at once: the second finds one free slot, the rest are in use. */
TEST(a_slot_in_use_is_never_a_victim) {
    struct model model;
    create(&model, 3, "lru");
    TOKEN(0, 1, 7);
    struct pass first;
    struct pass second;
    pass_begin(&first, &model, 0, 0, (const int32_t[]){0, 1}, 2, 1, 1);
    pass_begin(&second, &model, 0, 0, (const int32_t[]){2, 3, 4}, 3, 1, 1);
    model_verify(&model);
    expect_resident(&model, "012");
    CHECK_EQUAL(model_stats(&model).bypassed, 2);
    pass_use_all(&second, 0);
    pass_use_all(&first, 0);

    /* nobody uses them now */
    model_pump_all(&model);
    TOKEN(5, 6);
    expect_resident(&model, "256");
    model_free(&model);
}

TEST(a_slot_in_use_twice_stays_until_the_last_user_is_done) {
    struct model model;
    create(&model, 1, "lru");
    TOKEN(0);
    struct pass first;
    struct pass second;
    pass_begin(&first, &model, 0, 0, (const int32_t[]){0}, 1, 1, 1);
    pass_begin(&second, &model, 0, 1, (const int32_t[]){0}, 1, 1, 1);
    CHECK_EQUAL(model.stream->groups[0].slots[0].pins, 2);
    pass_use_all(&first, 0);
    TOKEN(1);
    expect_resident(&model, "0");
    pass_use_all(&second, 0);
    TOKEN(1);
    expect_resident(&model, "1");
    model_free(&model);
}

TEST(a_slot_that_is_being_filled_is_never_a_victim) {
    struct model model;
    create(&model, 1, "lru");
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, (const int32_t[]){0}, 1, 1, 1);
    pass_use_all(&pass, 0); /* the first part; the two others are still queued */
    TOKEN(1);               /* which also reads what is queued */
    expect_resident(&model, "0");
    CHECK_EQUAL(model_stats(&model).bypassed, 1);
    CHECK_EQUAL(model_stats(&model).evicted, 0);
    model_pump_all(&model);
    TOKEN(1);
    expect_resident(&model, "1");
    CHECK_EQUAL(model_stats(&model).evicted, 1);
    model_free(&model);
}

/* Decoding with fewer slots than experts per token still fills and uses the slots. */
TEST(a_token_with_more_experts_than_slots_keeps_what_it_finds) {
    struct model model;
    create(&model, 2, "lru");
    TOKEN(0, 1);
    TOKEN(5, 1, 2, 3);
    /* 1 was in use, 0 left for the first of the others */
    expect_resident(&model, "12");
    CHECK_EQUAL(model_stats(&model).bypassed, 2);
    CHECK_EQUAL(model_stats(&model).hits, 1);
    model_free(&model);
}

/* Prefill: what decoding has cached stays, empty slots go to the last tokens. */
TEST(a_batch_with_more_experts_than_slots_evicts_nothing) {
    struct model model;
    create(&model, 4, "lru");
    TOKEN(0, 1);
    run_group(&model, 0, (const int32_t[]){2, 3, 4, 5, 6, 7, 0, 6}, 2, 4);
    expect_resident(&model, "0167");
    CHECK_EQUAL(model_stats(&model).evicted, 0);
    CHECK_EQUAL(model_stats(&model).bypassed, 4);
    run_group(&model, 0, (const int32_t[]){2, 3, 4, 5, 6, 7, 0, 6}, 2, 4);
    expect_resident(&model, "0167");
    CHECK_EQUAL(model_stats(&model).evicted, 0);
    model_free(&model);
}

TEST(a_batch_that_fits_evicts_like_a_token) {
    struct model model;
    create(&model, 4, "lru");
    TOKEN(0, 1, 2, 3);
    run_group(&model, 0, (const int32_t[]){4, 3, 5, 4}, 2, 2);
    expect_resident(&model, "2345");
    CHECK_EQUAL(model_stats(&model).evicted, 2);
    model_free(&model);
}

TEST(no_slots_at_all) {
    struct model model;
    create(&model, 0, "lru");
    TOKEN(0, 1, 2);
    run_group(&model, 0, (const int32_t[]){2, 3, 4, 5, 6, 7, 0, 6}, 2, 4);
    expect_resident(&model, "");
    const struct fm_stats stats = model_stats(&model);
    CHECK_EQUAL(stats.bypassed, 3 + 7);
    CHECK_EQUAL(stats.slot_bytes, 0);
    CHECK_EQUAL(stats.resident_bytes, 0);
    CHECK_EQUAL(stats.inserted, 0);
    model_free(&model);
}

TEST(groups_have_slots_of_their_own) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &blocks, &options);
    CHECK_EQUAL(fm_stream_start(model.stream, (const int32_t[]){2, 0}, "lru"), FM_OK);
    for (int i = 0; i < 2; i++) {
        run_group(&model, 0, (const int32_t[]){0, 1}, 2, 1);
        run_group(&model, 1, (const int32_t[]){0, 1}, 2, 1);
    }
    CHECK_EQUAL(model_group(&model, 0).n_resident, 2);
    CHECK_EQUAL(model_group(&model, 0).hits, 2);
    CHECK_EQUAL(model_group(&model, 1).n_resident, 0);
    CHECK_EQUAL(model_group(&model, 1).hits, 0);
    CHECK_EQUAL(model_group(&model, 1).lookups, 4);
    CHECK_EQUAL(model_stats(&model).tokens, 2); /* counted at the first layer */
    model_free(&model);
}

static void expect_bad(const struct model *model, const char *part_of_message) {
    CHECK_EQUAL(fm_stream_verify(model->stream), FM_BAD_STATE);
    CHECK_TEXT(fm_last_message(), part_of_message);
}

TEST(verify_finds_what_must_not_be) {
    struct model model;
    create(&model, 3, "lru");
    TOKEN(0, 1);
    TOKEN(2);
    struct group *group = &model.stream->groups[0];
    struct slot *slot = &group->slots[group->slot_of[1]];
    model_verify(&model);

    slot->pins = 1; /* no operation runs */
    expect_bad(&model, "slots of group 0");
    slot->pins = -1;
    expect_bad(&model, "slots of group 0");
    slot->pins = 0;

    slot->loads[2].pending = 1; /* and yet READY */
    expect_bad(&model, "slots of group 0");
    slot->loads[2].pending = 0;
    slot->loads[2].state = LOAD_LOADING;
    expect_bad(&model, "slots of group 0");
    slot->loads[2].state = LOAD_READY;

    const int32_t s = group->slot_of[1];
    group->slot_of[1] = group->slot_of[0];
    expect_bad(&model, "slots of group 0");
    group->slot_of[1] = -1;
    expect_bad(&model, "slots of group 0");
    group->slot_of[1] = s;
    slot->expert = -1;
    expect_bad(&model, "slots of group 0");
    slot->expert = 1;

    group->n_resident = 2;
    expect_bad(&model, "slots of group 0");
    group->n_resident = 3;

    model.stream->policy_type->on_remove(model.stream->policy, 0, 1);
    expect_bad(&model, "slots of group 0");
    model.stream->policy_type->on_insert(model.stream->policy, 0, 1);

    model.stream->stats.resident_bytes--;
    expect_bad(&model, "resident bytes");
    model.stream->stats.resident_bytes++;

    struct ring_buffer *buffer = model.stream->ring_free;
    model.stream->ring_free = buffer->next; /* lost */
    expect_bad(&model, "the ring");
    model.stream->ring_free = buffer;
    buffer->draining = true; /* free and draining */
    expect_bad(&model, "the ring");
    buffer->draining = false;
    model_verify(&model);
    model_free(&model);
}
