/* test_operation.c: operations from begin to the last release: the right bytes whatever the sizes,
 * the order of the visit, threads that come and go at their own pace, tensors nobody described. */

#include <string.h>

#include "model.h"

static const int32_t tokens[] = {0, 6, 2, 5, 5, 2, 3, 1, 6, 4};

/* Everything the layout can do to an expert: every part of every expert, in slots and in the ring. */
static void check_layout(const struct shape *shape, struct fm_options options, int n_slots) {
    struct model model;
    model_create(&model, shape, &options);
    model_start(&model, n_slots, "lru");
    for (int round = 0; round < 3; round++) {
        for (int g = 0; g < shape->n_groups; g++) {
            for (int t = 0; t < 5; t++) {
                run_group(&model, g, tokens + 2 * t, 2, 1);
            }
            run_group(&model, g, tokens, 2, 5);
        }
    }
    const struct fm_stats stats = model_stats(&model);
    CHECK_EQUAL(stats.operations, 3 * (unsigned)shape->n_groups * 6 * (unsigned)shape->n_parts);
    CHECK_EQUAL(stats.failed_loads, 0);
    CHECK_EQUAL(stats.slot_bytes, fm_stream_slot_bytes(model.stream, 0) * (unsigned)(n_slots * shape->n_groups));
    if (n_slots == shape->n_expert) { /* each byte once */
        uint64_t bytes = 0;
        for (int p = 0; p < shape->n_parts; p++) {
            bytes += shape->part_bytes[p];
        }
        CHECK_EQUAL(stats.missed_bytes, bytes * (unsigned)(shape->n_expert * shape->n_groups));
    }
    model_free(&model);
}

static void check_layouts(int io_mode) {
    static const struct shape shapes[] = {
        {.n_groups = 2, .n_expert = 7, .n_parts = 3, .part_bytes = {5008, 9999, 144}, .first_offset = 1056},
        {.n_groups = 1, .n_expert = 7, .n_parts = 1, .part_bytes = {1}, .first_offset = 0},
        {.n_groups = 2, .n_expert = 7, .n_parts = 2, .part_bytes = {4097, 4095}, .first_offset = 4064},
        {.n_groups = 2, .n_expert = 7, .n_parts = 4, .part_bytes = {8192, 4096, 12288, 4096}, .first_offset = 4096},
        {.n_groups = 1, .n_expert = 7, .n_parts = 2, .part_bytes = {8192, 4096}, .first_offset = 32},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        for (int n_slots = 0; n_slots <= 7; n_slots = n_slots == 0 ? 2 : n_slots == 2 ? 7 : 8) {
            for (uint32_t request_bytes = 4096; request_bytes <= 1 << 20; request_bytes <<= 8) {
                struct fm_options options = options_for(0, 3);
                options.io_mode = io_mode;
                options.request_bytes = request_bytes; /* a part in several reads, or in one */
                check_layout(&shapes[i], options, n_slots);
            }
        }
    }
}

TEST(every_layout_gives_the_right_bytes_buffered) {
    check_layouts(FM_IO_BUFFERED);
}

TEST(every_layout_gives_the_right_bytes_direct_where_possible) {
    check_layouts(FM_IO_AUTO);
}

TEST(a_part_larger_than_a_request_is_read_in_pieces) {
    struct model model;
    struct fm_options options = options_for(0, 2);
    options.request_bytes = 4096;
    const struct shape shape = {.n_groups = 1, .n_expert = 4, .n_parts = 1, .part_bytes = {9999}, .first_offset = 32};
    model_create(&model, &shape, &options);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, (const int32_t[]){1}, 1, 1, 1);
    /* bytes 10031 to 20029: blocks 2 to 4; not there until the last has landed, in whatever order */
    CHECK(fm_pump(model.stream, 2));
    CHECK(!pass_is_ready(&pass, 0));
    CHECK(fm_pump(model.stream, 0));
    CHECK(!pass_is_ready(&pass, 0));
    CHECK(fm_pump(model.stream, 0));
    CHECK(pass_is_ready(&pass, 0));
    pass_acquire(&pass, 0);
    pass_release(&pass, 0);
    CHECK_EQUAL(model_stats(&model).reads, 3);
    CHECK_EQUAL(model_stats(&model).missed_bytes, 9999);
    model_free(&model);
}

TEST(before_start_everything_goes_through_the_ring) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &odd, &options);
    run_group(&model, 0, tokens, 2, 5);
    run_group(&model, 1, tokens, 2, 1);
    CHECK_EQUAL(model_stats(&model).hits, 0);
    CHECK_EQUAL(model_stats(&model).bypassed, 7 + 2);
    model_start(&model, 3, "dlfu"); /* and goes on with slots */
    run_group(&model, 1, tokens, 2, 1);
    run_group(&model, 1, tokens, 2, 1);
    CHECK_EQUAL(model_stats(&model).hits, 2);
    model_free(&model);
}

TEST(residents_are_visited_first_then_what_arrives_first) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &blocks, &options);
    model_start(&model, 4, "lru");
    run_group(&model, 0, (const int32_t[]){3, 6}, 2, 1);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, (const int32_t[]){1, 6, 5, 3, 7, 0}, 6, 1, 1);
    CHECK_EQUAL(pass.order[0], 3);
    CHECK_EQUAL(pass.order[1], 6);
    CHECK_EQUAL(pass.order[2], 0); /* into the two empty slots */
    CHECK_EQUAL(pass.order[3], 1);
    CHECK_EQUAL(pass.order[4], 5); /* through the ring */
    CHECK_EQUAL(pass.order[5], 7);
    CHECK(pass_is_ready(&pass, 0) && pass_is_ready(&pass, 1) && !pass_is_ready(&pass, 2));
    pass_use_all(&pass, 0);
    model_free(&model);
}

TEST(parts_that_landed_are_visited_before_parts_still_being_read) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &blocks, &options);
    model_start(&model, 4, "lru");
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, (const int32_t[]){0, 1, 2}, 3, 1, 1);
    pass_use_all(&pass, 0);
    /* the other parts are queued: part 1 of experts 0 1 2, then part 2 */
    CHECK(fm_pump(model.stream, 1));
    pass_begin(&pass, &model, 0, 1, (const int32_t[]){0, 1, 2}, 3, 1, 1);
    CHECK_EQUAL(pass.order[0], 1);
    CHECK_EQUAL(pass.order[1], 0);
    CHECK_EQUAL(pass.order[2], 2);
    pass_use_all(&pass, 0);
    pass_begin(&pass, &model, 0, 2, (const int32_t[]){0, 1, 2}, 3, 1, 1);
    pass_use_all(&pass, 0);
    CHECK_EQUAL(model_stats(&model).reads, 9);
    model_free(&model);
}

/* The part that is needed now overtakes the parts that are needed later. */
TEST(an_operation_promotes_the_reads_it_waits_for) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &blocks, &options);
    model_start(&model, 4, "lru");
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, (const int32_t[]){0, 1, 2}, 3, 1, 1);
    pass_use_all(&pass, 0);
    pass_begin(&pass, &model, 0, 2, (const int32_t[]){2}, 1, 1, 1);
    CHECK(fm_pump(model.stream, 0)); /* one read is enough, although five were queued before */
    CHECK(pass_is_ready(&pass, 0));
    pass_use_all(&pass, 0);
    model_free(&model);
}

/* More experts than slots: those in slots are used in place and stay. */
TEST(an_operation_larger_than_the_cache_leaves_it_as_it_was) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &blocks, &options);
    model_start(&model, 3, "lru");
    run_group(&model, 0, (const int32_t[]){1, 4, 6}, 3, 1);
    const uint64_t reads = model_stats(&model).reads;
    for (int p = 0; p < 3; p++) {
        struct pass pass;
        pass_begin(&pass, &model, 0, p, (const int32_t[]){0, 1, 2, 3, 4, 5, 6, 7}, 2, 4, 1);
        CHECK_EQUAL(pass.n, 8);
        for (int i = 0; i < 3; i++) {
            CHECK_EQUAL(pass.order[i], ((const int[]){1, 4, 6})[i]);
            const struct slot *slot = &model.stream->groups[0].slots[model.stream->groups[0].slot_of[pass.order[i]]];
            CHECK(pass_acquire(&pass, i) == slot->loads[p].data);
            pass_release(&pass, i);
        }
        pass_use_all(&pass, 3);
    }
    CHECK_EQUAL(model_stats(&model).reads - reads, 5 * 3); /* each once */
    for (int e = 0; e < 8; e++) {
        CHECK_EQUAL(model_is_resident(&model, 0, e), e == 1 || e == 4 || e == 6);
    }
    CHECK_EQUAL(model_stats(&model).evicted, 0);
    model_free(&model);
}

TEST(one_expert_named_twice_is_visited_once) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &odd, &options);
    model_start(&model, 2, "dlfu");
    for (int i = 0; i < 2; i++) {
        run_group(&model, 0, (const int32_t[]){3, 3, 3}, 3, 1);
        run_group(&model, 0, (const int32_t[]){4, 4, 4, 3}, 2, 2);
    }
    CHECK_EQUAL(model_stats(&model).lookups, 6);
    CHECK_EQUAL(model_stats(&model).hits, 4);
    model_free(&model);
}

/* ids as views: rows longer than what is used. */
TEST(ids_are_read_by_their_strides) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &blocks, &options);
    model_start(&model, 3, "lru");
    const int32_t ids[3][8] = {{0, 99, 1, 99}, {2, 99, 3, 99}, {4, 99, 5, 99}};
    const int64_t n_rows[8] = {1, 1, 1, 1, 1, 1, 0, 0};
    const struct fm_routing routing = {
        .ids = (const char *)ids, .n_used = 2, .n_tokens = 3, .stride_used = 2 * sizeof(int32_t), .stride_token = sizeof ids[0]};
    struct pass pass = {.model = &model, .n = 6};
    pass.operation = fm_operation_begin(model.stream, 0, 0, &routing, 8, n_rows, 1, pass.order);
    pass_use_all(&pass, 0);
    model_pump_all(&model);
    /* empty slots go to what the last tokens use */
    CHECK(model_is_resident(&model, 0, 4) && model_is_resident(&model, 0, 5) && model_is_resident(&model, 0, 2));
    model_free(&model);
}

/* Three threads: bytes stay until the last of them has released the expert. */
TEST(a_buffer_is_handed_on_by_the_last_thread) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &blocks, &options);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, (const int32_t[]){0, 1, 2, 3}, 4, 1, 3);
    pass_pump(&pass, 1);
    for (int thread = 0; thread < 3; thread++) {
        CHECK(pass.operation->entries[2].load == NULL);
        pass_acquire(&pass, 0);
        pass_release(&pass, 0);
        pass_acquire(&pass, 1); /* not the last thread's: still there */
        model_verify(&model);
    }
    CHECK(pass.operation->entries[2].load != NULL);
    CHECK(pass.operation->entries[3].load == NULL);
    for (int i = 1; i < 4; i++) {
        pass_pump(&pass, i);
        for (int thread = 0; thread < 3; thread++) {
            CHECK(model.stream->active == pass.operation);
            pass_acquire(&pass, i);
            pass_release(&pass, i);
        }
    }
    CHECK(model.stream->active == NULL);
    model_verify(&model);
    model_free(&model);
}

TEST(a_pin_is_held_until_the_last_thread_has_left_the_operation) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &blocks, &options);
    model_start(&model, 2, "lru");
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, (const int32_t[]){0, 1}, 2, 1, 2);
    model_pump_all(&model);
    for (int i = 0; i < 2; i++) {
        pass_acquire(&pass, i);
        pass_release(&pass, i);
    }
    run_group(&model, 0, (const int32_t[]){2, 3}, 2, 1); /* the other thread is still at expert 0 */
    for (int i = 0; i < 2; i++) {
        pass_acquire(&pass, i);
        pass_release(&pass, i);
    }
    CHECK_EQUAL(model_stats(&model).evicted, 0);
    run_group(&model, 0, (const int32_t[]){2, 3}, 2, 1);
    CHECK_EQUAL(model_stats(&model).evicted, 2);
    model_free(&model);
}

/* Nothing to visit, so nobody will ever release it. */
TEST(an_operation_without_rows_leaves_nothing_behind) {
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &blocks, &options);
    model_start(&model, 2, "lru");
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, NULL, 2, 0, 2);
    CHECK(model.stream->active == NULL);
    run_group(&model, 0, (const int32_t[]){2, 3}, 2, 1);
    model_free(&model);
}

/* A tensor that nobody described, even one with more experts than any group: zeros and an error. */
TEST(an_unknown_tensor_gets_zeros_and_an_error) {
    static const struct {
        int group;
        int part;
        int n_expert;
    } cases[] = {{-1, -1, 8}, {2, 0, 8}, {0, 3, 8}, {0, -1, 8}, {0, 0, 9}, {-1, -1, 64}};
    struct model model;
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &blocks, &options);
    model_start(&model, 2, "lru");
    int64_t n_rows[64];
    for (int e = 0; e < 64; e++) {
        n_rows[e] = e % 3 == 0;
    }
    const struct fm_routing routing = {.ids = "", .n_used = 0, .n_tokens = 0};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        int32_t order[64];
        memset(order, 0xff, sizeof order);
        void *operation = fm_operation_begin(model.stream, cases[c].group, cases[c].part, &routing, cases[c].n_expert,
                                             n_rows, 2, order);
        const int n = (cases[c].n_expert + 2) / 3;
        for (int thread = 0; thread < 2; thread++) {
            for (int i = 0; i < n; i++) {
                CHECK_EQUAL(order[i], 3 * i);
                const uint8_t *bytes = fm_operation_acquire(operation, i);
                for (int k = 0; k < 4096; k++) {
                    CHECK_EQUAL(bytes[k], 0);
                }
                fm_operation_release(operation, i);
            }
        }
        model_verify(&model);
        CHECK(model.stream->active == NULL);
        struct fm_error error;
        CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 1);
        CHECK_EQUAL(error.status, FM_BAD_STATE);
        CHECK_EQUAL(error.count, 1);
        CHECK_EQUAL(error.file, -1);
        CHECK_EQUAL(error.layer, -1);
        CHECK_EQUAL(error.expert, -1);
        CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
    }
    run_group(&model, 0, (const int32_t[]){0, 1}, 2, 1);
    model_free(&model);
}
