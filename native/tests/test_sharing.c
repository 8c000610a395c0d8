/* test_sharing.c: two and more operations at once on one ring: an even share, nobody starved. */

#include "model.h"

static const int32_t all[] = {0, 1, 2, 3, 4, 5, 6, 7};

static void create(struct model *model, int n_ring) {
    const struct fm_options options = options_for(0, n_ring);
    model_create(model, &blocks, &options);
    model_start(model, 0, "lru");
}

TEST(two_operations_share_the_ring_evenly) {
    struct model model;
    create(&model, 4);
    struct pass first;
    struct pass second;
    pass_begin(&first, &model, 0, 0, all, 8, 1, 1);
    CHECK_EQUAL(first.operation->n_held, 4);
    pass_begin(&second, &model, 1, 0, all, 8, 1, 1);
    CHECK_EQUAL(second.operation->n_held, 0);
    pass_use(&first, 0);
    CHECK_EQUAL(second.operation->n_held, 1);
    pass_use(&first, 1);
    CHECK_EQUAL(second.operation->n_held, 2);
    for (int i = 0; i < 6; i++) { /* from now on each keeps its two */
        pass_use(&first, i + 2);
        pass_use(&second, i);
        CHECK(i >= 4 || (first.operation->n_held == 2 && second.operation->n_held == 2));
    }
    pass_use_all(&second, 6);
    model_free(&model);
}

/* One holds everything and does not move: the other goes on as soon as one buffer is returned. */
TEST(operations_of_one_group_share_too) {
    struct model model;
    create(&model, 2);
    run_group(&model, 0, all, 1, 1); /* from now on there are guesses, too */
    for (int step = 0; step < 8; step++) {
        struct pass first;
        struct pass second;
        pass_begin(&first, &model, 0, step % 3, all, 8, 1, 1);
        pass_begin(&second, &model, 0, (step + 1) % 3, all, 8, 1, 1);
        pass_use(&first, 0);
        for (int i = 0; i < step; i++) {
            pass_use(&second, i);
        }
        pass_use_all(&first, 1);
        pass_use_all(&second, step);
    }
    model_free(&model);
}

/* More operations than buffers. Nobody gets one while an older operation has none, whoever runs first. */
static void check_age_comes_first(bool newest_runs_first) {
    enum { N = 4 };
    struct model model;
    create(&model, 2);
    struct pass passes[N];
    int used[N] = {0};
    for (int p = 0; p < N; p++) {
        pass_begin(&passes[p], &model, p % 2, 0, all, 8, 1, 1);
    }
    for (int n_done = 0; n_done < N;) {
        int next_ring[N];
        int runs = -1;
        for (int p = 0; p < N; p++) {
            next_ring[p] = passes[p].operation->next_ring;
            const bool can = used[p] < 8 && passes[p].operation->entries[used[p]].load != NULL;
            if (can && (runs < 0 || newest_runs_first)) {
                runs = p;
            }
        }
        CHECK(runs >= 0);
        pass_use(&passes[runs], used[runs]++);
        n_done += used[runs] == 8;
        for (int older = 0; older < N; older++) {
            const struct operation *op = passes[older].operation;
            for (int p = older + 1; used[older] < 8 && op->n_held == 0 && p < N; p++) {
                CHECK(used[p] == 8 || passes[p].operation->next_ring == next_ring[p]);
            }
        }
    }
    model_free(&model);
}

TEST(an_old_operation_is_not_starved_by_newer_ones) {
    check_age_comes_first(true);
    check_age_comes_first(false);
}
