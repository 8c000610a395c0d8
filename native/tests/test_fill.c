/* test_fill.c: reading in the background what fits as a whole: all of it, a few experts at a time,
 * behind demand; and errors of reads that nobody asked for. */

#include <errno.h>

#include "model.h"

static void create(struct model *model, int n_groups, int n_slots) {
    struct shape shape = blocks;
    shape.n_groups = n_groups;
    const struct fm_options options = options_for(0, 4);
    model_create(model, &shape, &options);
    model_start(model, n_slots, "lru");
    for (int g = 0; g < n_groups; g++) {
        model->stream->groups[g].n_bound = shape.n_parts; /* as after loading a model */
    }
}

TEST(all_experts_become_resident_and_right) {
    struct model model;
    create(&model, 2, blocks.n_expert);
    fm_stream_fill(model.stream);
    CHECK(model_group(&model, 0).n_resident < blocks.n_expert); /* not all at once */
    CHECK_EQUAL(model_group(&model, 1).n_resident, 0);
    CHECK_EQUAL(model_pump_all(&model), 2 * blocks.n_expert * blocks.n_parts);
    for (int g = 0; g < 2; g++) {
        CHECK_EQUAL(model_group(&model, g).n_resident, blocks.n_expert);
        run_group(&model, g, (const int32_t[]){0, 3, 7}, 3, 1);
    }
    const struct fm_stats stats = model_stats(&model);
    CHECK_EQUAL(stats.hits, stats.lookups);
    CHECK_EQUAL(stats.reads, 2 * blocks.n_expert * blocks.n_parts);
    CHECK_EQUAL(model.stream->n_filling, 0);
    model_verify(&model);
    model_free(&model);
}

TEST(a_group_that_does_not_fit_is_left_alone) {
    struct model model;
    create(&model, 1, blocks.n_expert - 1);
    fm_stream_fill(model.stream);
    CHECK_EQUAL(model_pump_all(&model), 0);
    CHECK_EQUAL(model_group(&model, 0).n_resident, 0);
    model_free(&model);
}

TEST(an_operation_comes_first) {
    struct model model;
    create(&model, 1, blocks.n_expert);
    fm_stream_fill(model.stream);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, (const int32_t[]){7}, 1, 1, 1); /* the last one to be filled */
    CHECK(fm_pump(model.stream, 0));
    CHECK(pass_is_ready(&pass, 0));
    pass_use_all(&pass, 0);
    model_pump_all(&model);
    CHECK_EQUAL(model_group(&model, 0).n_resident, blocks.n_expert);
    model_verify(&model);
    model_free(&model);
}

TEST(an_error_that_nobody_waits_for_ends_the_filling_and_nothing_else) {
    struct model model;
    create(&model, 1, blocks.n_expert);
    fm_fault_set(model.stream, &(struct fm_fault){.sys_errno = EIO, .count = 1});
    fm_stream_fill(model.stream);
    model_pump_all(&model);
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
    CHECK(model_group(&model, 0).n_resident < blocks.n_expert);
    CHECK_EQUAL(model.stream->n_filling, 0);
    run_group(&model, 0, (const int32_t[]){0, 1}, 2, 1); /* the failed part is read again */
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 0);
    model_verify(&model);
    model_free(&model);
}

TEST(an_error_that_an_operation_waits_for_is_latched) {
    struct model model;
    create(&model, 1, blocks.n_expert);
    fm_stream_fill(model.stream);
    struct pass pass;
    pass_begin(&pass, &model, 0, 0, (const int32_t[]){0}, 1, 1, 1); /* being filled */
    fm_fault_set(model.stream, &(struct fm_fault){.sys_errno = EIO, .count = 1});
    pass_pump(&pass, 0);
    CHECK(!pass_acquire_or_zeros(&pass, 0));
    pass_release(&pass, 0);
    struct fm_error error;
    CHECK_EQUAL(fm_stream_take_error(model.stream, &error), 1);
    CHECK_EQUAL(error.expert, 0);
    CHECK_EQUAL(error.sys_errno, EIO);
    model_free(&model);
}

TEST(freeing_while_filling) {
    struct model model;
    struct shape shape = blocks;
    const struct fm_options options = options_for(2, 4);
    model_create(&model, &shape, &options);
    model_start(&model, shape.n_expert, "lru");
    for (int g = 0; g < shape.n_groups; g++) {
        model.stream->groups[g].n_bound = shape.n_parts;
    }
    fm_stream_fill(model.stream);
    model_free(&model);
}
