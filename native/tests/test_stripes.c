/* test_stripes.c: experts spread over several files, each on a drive of its own. */

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "model.h"

static struct shape striped(const struct shape *shape, int n_stripes) {
    struct shape result = *shape;
    result.n_stripes = n_stripes;
    return result;
}

static const int counts[] = {1, 2, 3, 7, 16}; /* of stripes, for 7 and 8 experts */

/* run_group compares every byte. */
TEST(every_expert_comes_from_its_stripe) {
    const struct shape *shapes[] = {&blocks, &odd};
    for (size_t s = 0; s < 2; s++) {
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            for (int n_slots = 0; n_slots <= 3; n_slots += 3) {
                struct model model;
                const struct shape shape = striped(shapes[s], counts[c]);
                struct fm_options options = options_for(0, 3);
                options.request_bytes = 4096;
                model_create(&model, &shape, &options);
                model_start(&model, n_slots, "dlfu");
                for (int g = 0; g < shape.n_groups; g++) {
                    run_group(&model, g, (const int32_t[]){0, 1, 2, 3, 4, 5, 6}, 7, 1);
                    run_group(&model, g, (const int32_t[]){6, 1, 3}, 3, 1);
                }
                model_verify(&model);
                model_free(&model);
            }
        }
    }
}

TEST(a_failed_read_names_the_stripe) {
    struct model model;
    const struct shape shape = striped(&blocks, 3);
    const struct fm_options options = options_for(0, 2);
    model_create(&model, &shape, &options);
    model_start(&model, 0, "lru");
    for (int expert = 0; expert < shape.n_expert; expert++) {
        fm_fault_set(model.stream, &(struct fm_fault){.sys_errno = EIO, .count = 1});
        struct pass pass;
        pass_begin(&pass, &model, 1, 0, &expert, 1, 1, 1);
        pass_pump(&pass, 0);
        CHECK(!pass_acquire_or_zeros(&pass, 0));
        pass_release(&pass, 0);
        model_pump_all(&model);
        struct fm_error error;
        CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 1);
        CHECK_EQUAL(error.file, expert % 3);
        CHECK_EQUAL(error.expert, expert);
        CHECK_EQUAL(error.sys_errno, EIO);
    }
    model_free(&model);
}

/* Both readers of drive 0 hang in a read; the experts of drive 1 come all the same. */
TEST(a_slow_drive_does_not_hold_up_the_others) {
    struct model model;
    const struct shape shape = striped(&blocks, 2);
    const struct fm_options options = options_for(2, 8);
    model_create(&model, &shape, &options);
    model_start(&model, 0, "lru");
    fm_fault_set(model.stream, &(struct fm_fault){.hold = 1, .count = 2});
    struct pass slow, fast;
    pass_begin(&slow, &model, 0, 0, (const int32_t[]){0, 2, 4}, 3, 1, 1);
    while (fm_fault_held(model.stream) != 2) {
        sched_yield();
    }
    pass_begin(&fast, &model, 1, 0, (const int32_t[]){1, 3, 5}, 3, 1, 1);
    for (int i = 0; i < fast.n; i++) {
        pass_acquire(&fast, i); /* waits for them, for ever if they were held up */
        pass_release(&fast, i);
    }
    CHECK_EQUAL(fm_fault_held(model.stream), 2);
    for (int i = 0; i < slow.n; i++) {
        CHECK(!pass_is_ready(&slow, i));
    }
    fm_fault_release(model.stream);
    for (int i = 0; i < slow.n; i++) {
        pass_acquire(&slow, i);
        pass_release(&slow, i);
    }
    model_verify(&model);
    model_free(&model);
}

static struct fm_part part_of(const struct fm_place *places, int32_t n_places) {
    return (struct fm_part){
        .tensor = "up", .places = places, .n_places = n_places, .expert_bytes = 4096, .stride = 4096, .type = -1};
}

static void expect_refused(fm_stream *stream, const struct fm_place *places, int32_t n_places, const char *message) {
    const struct fm_part part = part_of(places, n_places);
    CHECK_EQUAL(fm_stream_add_part(stream, 0, &part), -1);
    CHECK_TEXT(fm_last_message(), message);
}

TEST(places_that_cannot_be_are_refused) {
    struct model model; /* for its files: 2 groups of 3 parts, experts of 4096 bytes, from 4096 on */
    const struct shape shape = striped(&blocks, 2);
    model_write(&model, &shape, "model");
    const struct fm_options options = options_for(0, 2);
    fm_stream *stream = fm_stream_new(&options);
    CHECK_EQUAL(fm_stream_add_file(stream, model.stripes[0], 0), 0);
    CHECK_EQUAL(fm_stream_add_file(stream, model.stripes[1], 1), 1);
    CHECK_EQUAL(fm_stream_add_group(stream, 0, 0, 5), 0);
    const uint64_t size = 4096 * (1 + 2 * 3 * 4);
    struct fm_place places[FM_MAX_PLACES + 1] = {{0, size - 3 * 4096}, {1, size - 2 * 4096}};
    expect_refused(stream, places, 0, "bad part");
    expect_refused(stream, places, FM_MAX_PLACES + 1, "bad part");
    places[1].file = 2;
    expect_refused(stream, places, 2, "no file 2");
    places[1].file = -1;
    expect_refused(stream, places, 2, "no file -1");
    places[1].file = 1;
    places[0].offset++; /* experts 0, 2, 4 */
    expect_refused(stream, places, 2, "outside");
    places[0].offset--;
    places[1].offset++; /* experts 1, 3 */
    expect_refused(stream, places, 2, "outside");
    places[1].offset--;
    const struct fm_part part = part_of(places, 2);
    CHECK_EQUAL(fm_stream_add_part(stream, 0, &part), 0);
    CHECK_EQUAL(fm_stream_slot_bytes(stream, 0), 4096);
    /* a place that no expert lies in may be anywhere */
    for (int i = 5; i < FM_MAX_PLACES; i++) {
        places[i].offset = UINT64_MAX;
    }
    const struct fm_part thin = part_of(places, FM_MAX_PLACES);
    CHECK_EQUAL(fm_stream_add_part(stream, 0, &thin), 1);
    fm_stream_free(stream);
    free(model.image);
}

TEST(drives_are_numbered_one_after_the_other) {
    struct model model;
    const struct shape shape = striped(&blocks, 3);
    model_write(&model, &shape, "model");
    const struct fm_options options = options_for(1, 2);
    fm_stream *stream = fm_stream_new(&options);
    CHECK_EQUAL(fm_stream_add_file(stream, model.stripes[0], 2), -1);
    CHECK_TEXT(fm_last_message(), "2 is no drive");
    CHECK_EQUAL(fm_stream_add_file(stream, model.stripes[0], -1), -1);
    CHECK_EQUAL(fm_stream_add_file(stream, model.stripes[0], 1), 0);
    CHECK_EQUAL(fm_stream_add_file(stream, model.stripes[1], 1), 1);
    CHECK_EQUAL(fm_stream_add_file(stream, model.stripes[2], 2), 2);
    fm_stream_free(stream);
    free(model.image);
}
