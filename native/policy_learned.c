/* policy_learned.c: the policy "context EMA". Which experts a token has just used, in this group and
 * in some before it, says what will be used next; policy_learned_model.c learns that online.
 *
 * This file keeps what each group has seen, by token and not by order of calls: in a prefill pass
 * the first group sees all tokens before the second sees any. Every token is learned from once, in
 * order, in each group, but for the first ones of a long batch. The first groups look at the last groups' use for the token before; within
 * a batch that is known only at its end, and they catch up then. */

#include <stdlib.h>
#include <string.h>

#include "policy.h"
#include "policy_learned.h"

enum {
    MIN_HISTORY = 16,
    MAX_HISTORY = 1 << 16,
    MAX_LEARNED = 128, /* tokens of a batch: learning from all would be felt in a long prompt */
};

/* What one token has used in one group. */
struct visit {
    int64_t token; /* -1: none */
    int64_t sequence;
    int32_t n;
};

struct group {
    int32_t n_slots;
    int32_t n_current;    /* experts of the token that is passing */
    int32_t width;        /* room in current and in each visit */
    int32_t *current;     /* [width] */
    int64_t n_history;
    struct visit *visits; /* [n_history], token t at t % n_history */
    int32_t *experts;     /* [n_history][width] */

    int64_t last;      /* token that has passed; -1: none */
    int64_t next;      /* token that passes next, when n_announced */
    int32_t n_announced;
    int64_t learns_from; /* first token of this pass that is scored and learned from */
    int64_t processed; /* token up to which statistics and model are */
    int64_t sequence;  /* of that token */

    int32_t first_row[LEARNED_CONTEXTS]; /* rows of the model for each context */
    struct learned_statistics statistics;
    struct learned_model model;
    int32_t n_steps;
    struct learned_step steps[LEARNED_HORIZON + 1]; /* step i at i % (LEARNED_HORIZON + 1) */
    float *score;    /* [stride] */
    int64_t score_of; /* token that the score is for */
};

struct fm_policy {
    int32_t n_groups;
    bool frozen;
    int64_t sequence;
    int32_t last_group; /* that has begun a pass */
    int64_t base;       /* first token of this pass */
    int64_t end;
    bool complete;      /* all groups have seen this pass */
    struct learned_statistics ahead; /* scratch: [max_stride] */
    struct learned_step scratch_step;
    float *scratch;                  /* [2][max_stride] */
    struct group groups[];
};

static void free_group(struct group *group) {
    for (int32_t i = 0; i <= LEARNED_HORIZON; i++) {
        free(group->steps[i].features);
        free(group->steps[i].rows);
    }
    free(group->current);
    free(group->visits);
    free(group->experts);
    free(group->score);
    learned_statistics_free(&group->statistics);
    learned_model_free(&group->model);
}

static void destroy(struct fm_policy *policy) {
    if (policy == NULL) {
        return;
    }
    for (int32_t g = 0; g < policy->n_groups; g++) {
        free_group(&policy->groups[g]);
    }
    learned_statistics_free(&policy->ahead);
    free(policy->scratch_step.features);
    free(policy->scratch_step.rows);
    free(policy->scratch);
    free(policy);
}

/* Context j of group g: the group j before it, those before the first being the last ones of an
 * earlier token. */
static int32_t context_group(int32_t n_groups, int32_t g, int32_t j, int64_t *n_tokens_back) {
    int32_t q = g - j;
    *n_tokens_back = 0;
    while (q < 0) {
        q += n_groups;
        ++*n_tokens_back;
    }
    return q;
}

static bool new_history(struct group *group, int64_t n_history, int32_t width) {
    struct visit *visits = malloc((size_t)n_history * sizeof *visits);
    int32_t *experts = malloc((size_t)n_history * (size_t)width * sizeof *experts);
    if (visits == NULL || experts == NULL) {
        free(visits);
        free(experts);
        return false;
    }
    for (int64_t i = 0; i < n_history; i++) {
        visits[i] = (struct visit){.token = -1};
    }
    group->visits = visits;
    group->experts = experts;
    group->n_history = n_history;
    return true;
}

static bool new_group(struct fm_policy *policy, int32_t g, const struct fm_policy_setup *setup) {
    struct group *group = &policy->groups[g];
    int32_t n_rows = 0;
    for (int32_t j = 0; j < learned_contexts(setup->n_expert[g]); j++) {
        int64_t back;
        group->first_row[j] = n_rows;
        n_rows += setup->n_expert[context_group(setup->n_groups, g, j, &back)];
    }
    group->last = group->processed = group->score_of = -1;
    group->width = 8;
    group->n_slots = setup->n_slots[g];
    if (!learned_model_new(&group->model, setup->n_expert[g], n_rows)) {
        return false;
    }
    const int32_t stride = group->model.stride;
    group->current = malloc((size_t)group->width * sizeof *group->current);
    group->score = calloc((size_t)stride, sizeof *group->score);
    if (!learned_statistics_new(&group->statistics, stride) || group->current == NULL || group->score == NULL ||
        !new_history(group, MIN_HISTORY, group->width)) {
        return false;
    }
    for (int32_t i = 0; i <= LEARNED_HORIZON; i++) {
        struct learned_step *step = &group->steps[i];
        step->features = malloc((size_t)stride * LEARNED_FEATURES * sizeof *step->features);
        step->rows = malloc((size_t)(n_rows + 2) * sizeof *step->rows);
        if (step->features == NULL || step->rows == NULL) {
            return false;
        }
    }
    return true;
}

static bool new_scratch(struct fm_policy *policy) {
    int32_t stride = 0;
    int32_t n_rows = 0;
    for (int32_t g = 0; g < policy->n_groups; g++) {
        const struct learned_model *model = &policy->groups[g].model;
        stride = model->stride > stride ? model->stride : stride;
        n_rows = model->n_context > n_rows ? model->n_context : n_rows;
    }
    policy->scratch = malloc((size_t)stride * 2 * sizeof *policy->scratch);
    policy->scratch_step.features = malloc((size_t)stride * LEARNED_FEATURES * sizeof *policy->scratch_step.features);
    policy->scratch_step.rows = malloc((size_t)(n_rows + 2) * sizeof *policy->scratch_step.rows);
    return learned_statistics_new(&policy->ahead, stride) && policy->scratch != NULL &&
           policy->scratch_step.features != NULL && policy->scratch_step.rows != NULL;
}

static struct fm_policy *create(const struct fm_policy_setup *setup) {
    struct fm_policy *policy = calloc(1, sizeof *policy + (size_t)setup->n_groups * sizeof policy->groups[0]);
    if (policy == NULL) {
        return NULL;
    }
    policy->n_groups = setup->n_groups;
    policy->last_group = setup->n_groups;
    for (int32_t g = 0; g < setup->n_groups; g++) {
        if (!new_group(policy, g, setup)) {
            destroy(policy);
            return NULL;
        }
    }
    if (!new_scratch(policy)) {
        destroy(policy);
        return NULL;
    }
    return policy;
}

/* The visit of a token, or NULL: it has not passed, or too long ago, or never passed this group. */
static const struct visit *find_visit(const struct group *group, int64_t token) {
    const struct visit *visit = &group->visits[token >= 0 ? token % group->n_history : 0];
    return token >= 0 && visit->token == token ? visit : NULL;
}

static const int32_t *experts_of(const struct group *group, int64_t token) {
    return group->experts + (size_t)(token % group->n_history) * (size_t)group->width;
}

/* Room for other histories; without memory, things stay as they are. */
static void move_history(struct group *group, int64_t n_history, int32_t width) {
    const struct group old = *group;
    int32_t *current = realloc(group->current, (size_t)width * sizeof *current);
    if (current == NULL) {
        return;
    }
    group->current = current;
    if (!new_history(group, n_history, width)) {
        return;
    }
    group->width = width;
    for (int64_t i = 0; i < old.n_history; i++) {
        if (old.visits[i].token >= 0) {
            const int64_t to = old.visits[i].token % n_history;
            group->visits[to] = old.visits[i];
            memcpy(group->experts + (size_t)to * (size_t)width, old.experts + (size_t)i * (size_t)old.width,
                   (size_t)old.visits[i].n * sizeof *old.experts);
        }
    }
    free(old.visits);
    free(old.experts);
}

/* Adds the rows of what the token has used in context j. */
static void add_context(const struct fm_policy *policy, int32_t g, int32_t j, int64_t token, struct learned_step *step) {
    int64_t back;
    const struct group *source = &policy->groups[context_group(policy->n_groups, g, j, &back)];
    const struct visit *visit = find_visit(source, token - back);
    if (visit == NULL) {
        return;
    }
    const int32_t *experts = experts_of(source, token - back);
    for (int32_t i = 0; i < visit->n; i++) {
        step->rows[step->n_rows++] = policy->groups[g].first_row[j] + experts[i];
    }
}

static void fill_step(const struct fm_policy *policy, int32_t g, int64_t token,
                      const struct learned_statistics *statistics, struct learned_step *step) {
    const struct group *group = &policy->groups[g];
    step->token = token;
    step->n_rows = 0;
    for (int32_t j = 0; j < learned_contexts(group->model.n_expert); j++) {
        add_context(policy, g, j, token, step);
    }
    for (int32_t q = 0; q <= g; q += g > 0 ? g : 1) { /* the first group, and this one */
        const struct group *source = &policy->groups[q];
        const struct visit *visit = find_visit(source, token);
        if (visit != NULL) {
            step->rows[step->n_rows++] =
                learned_set_row(&group->model, q != g, experts_of(source, token), visit->n);
        }
    }
    learned_features(statistics, group->model.n_expert, group->model.stride, step->features);
}

static void learn(struct fm_policy *policy, struct group *group) {
    struct learned_uses uses;
    for (int32_t d = 0; d <= LEARNED_HORIZON; d++) {
        const int64_t token = group->steps[(group->n_steps + d) % (LEARNED_HORIZON + 1)].token;
        const struct visit *visit = find_visit(group, token);
        if (visit == NULL) {
            return;
        }
        uses.experts[d] = experts_of(group, token);
        uses.n[d] = visit->n;
    }
    learned_learn(&group->model, &group->steps[group->n_steps % (LEARNED_HORIZON + 1)], &uses, (float)group->n_slots,
                  group->statistics.n_used, group->score, policy->scratch);
}

static void add_visit(const struct group *group, const struct visit *visit,
                      struct learned_statistics *statistics, int64_t *sequence) {
    if (visit->sequence != *sequence) {
        *sequence = visit->sequence;
        statistics->n_tokens = 0.0f;
        memset(statistics->count, 0, (size_t)group->model.stride * sizeof *statistics->count);
    }
    learned_statistics_add(statistics, group->model.stride, experts_of(group, visit->token), visit->n);
}

/* Everything that the token could look at is known: takes it into statistics and model. */
static void process(struct fm_policy *policy, int32_t g, const struct visit *visit) {
    struct group *group = &policy->groups[g];
    add_visit(group, visit, &group->statistics, &group->sequence);
    group->processed = visit->token;
    if (visit->token < group->learns_from) {
        group->n_steps = 0;
        return;
    }
    struct learned_step *step = &group->steps[group->n_steps % (LEARNED_HORIZON + 1)];
    fill_step(policy, g, visit->token, &group->statistics, step);
    learned_score(&group->model, step, group->score);
    group->score_of = visit->token;
    group->n_steps++;
    if (group->n_steps > LEARNED_HORIZON) {
        if (!policy->frozen) {
            learn(policy, group);
        }
        group->n_steps -= group->n_steps > 2 * (LEARNED_HORIZON + 1) ? LEARNED_HORIZON + 1 : 0;
    }
}

/* Processes what can be: in the first groups, of this pass's tokens only the first until the pass
 * is complete. */
static void process_known(struct fm_policy *policy, int32_t g) {
    struct group *group = &policy->groups[g];
    const bool waits = g < LEARNED_CONTEXTS - 1 && !policy->complete;
    const int64_t end = waits && group->last > policy->base ? policy->base : group->last;
    for (int64_t token = group->processed + 1; token <= end; token++) {
        const struct visit *visit = find_visit(group, token);
        if (visit != NULL) {
            process(policy, g, visit);
        }
    }
}

static void process_first_groups(struct fm_policy *policy) {
    for (int32_t g = 0; g < policy->n_groups && g < LEARNED_CONTEXTS - 1; g++) {
        process_known(policy, g);
    }
}

static void grow_histories(struct fm_policy *policy, int32_t n_tokens) {
    for (int32_t g = 0; g < policy->n_groups; g++) {
        struct group *group = &policy->groups[g];
        int64_t n = group->n_history;
        while (n < (int64_t)n_tokens + LEARNED_HORIZON + LEARNED_CONTEXTS && n < MAX_HISTORY) {
            n *= 2;
        }
        if (n > group->n_history) {
            move_history(group, n, group->width);
        }
    }
}

static void begin_pass(struct fm_policy *policy, int32_t g, int32_t n_tokens) {
    if (g <= policy->last_group || n_tokens > policy->end - policy->base) {
        policy->complete = true; /* whoever has not seen the last pass will not */
        process_first_groups(policy);
        policy->complete = false;
        policy->base = policy->end;
        policy->end += n_tokens;
        grow_histories(policy, n_tokens);
    }
    /* the last layer may compute the last tokens only */
    policy->groups[g].next = policy->end - n_tokens;
    policy->groups[g].n_announced = n_tokens;
    policy->groups[g].learns_from = policy->end - MAX_LEARNED;
    policy->last_group = g;
}

static void used(struct fm_policy *policy, int32_t g, int32_t expert) {
    struct group *group = &policy->groups[g];
    if (group->n_current == group->width) {
        move_history(group, group->n_history, 2 * group->width);
    }
    if (group->n_current < group->width && group->n_current < group->model.n_expert) {
        group->current[group->n_current++] = expert;
    }
}

static void end_token(struct fm_policy *policy, int32_t g) {
    struct group *group = &policy->groups[g];
    if (group->n_announced == 0) {
        begin_pass(policy, g, 1);
    }
    const int64_t token = group->next++;
    const int64_t at = token % group->n_history;
    group->n_announced--;
    group->visits[at] = (struct visit){.token = token, .sequence = policy->sequence, .n = group->n_current};
    memcpy(group->experts + (size_t)at * (size_t)group->width, group->current,
           (size_t)group->n_current * sizeof *group->current);
    group->n_current = 0;
    group->last = token;
    process_known(policy, g);
    if (g == policy->n_groups - 1 && group->n_announced == 0) {
        policy->complete = true;
        process_first_groups(policy);
    }
}

/* The score for the last token of a batch that the group has not processed. */
static void score_ahead(struct fm_policy *policy, int32_t g) {
    struct group *group = &policy->groups[g];
    int64_t sequence = group->sequence;
    learned_statistics_copy(&policy->ahead, &group->statistics, group->model.stride);
    for (int64_t token = group->processed + 1; token <= group->last; token++) {
        const struct visit *visit = find_visit(group, token);
        if (visit != NULL) {
            add_visit(group, visit, &policy->ahead, &sequence);
        }
    }
    fill_step(policy, g, group->last, &policy->ahead, &policy->scratch_step);
    learned_score(&group->model, &policy->scratch_step, group->score);
    group->score_of = group->last;
}

static int32_t victim(struct fm_policy *policy, int32_t g, const uint8_t *may_leave) {
    struct group *group = &policy->groups[g];
    if (group->score_of != group->last) {
        score_ahead(policy, g);
    }
    int32_t least = -1;
    for (int32_t e = 0; e < group->model.n_expert; e++) {
        if (may_leave[e] && (least < 0 || group->score[e] < group->score[least])) {
            least = e;
        }
    }
    return least;
}

static void begin_sequence(struct fm_policy *policy) {
    policy->sequence++;
}

static void resize(struct fm_policy *policy, int32_t g, int32_t n_slots) {
    policy->groups[g].n_slots = n_slots;
}

static size_t save(struct fm_policy *policy, float *weights, size_t n) {
    size_t n_weights = 0;
    for (int32_t g = 0; g < policy->n_groups; g++) {
        n_weights += learned_model_size(&policy->groups[g].model);
    }
    if (n < n_weights) {
        return n_weights;
    }
    for (int32_t g = 0; g < policy->n_groups; g++) {
        learned_model_save(&policy->groups[g].model, weights);
        weights += learned_model_size(&policy->groups[g].model);
    }
    return n_weights;
}

static bool load(struct fm_policy *policy, const float *weights, size_t n) {
    if (save(policy, NULL, 0) != n) {
        return false;
    }
    const float *group_weights = weights;
    for (int32_t g = 0; g < policy->n_groups; g++) {
        if (!learned_model_can_load(&policy->groups[g].model, group_weights)) {
            return false;
        }
        group_weights += learned_model_size(&policy->groups[g].model);
    }
    for (int32_t g = 0; g < policy->n_groups; g++) {
        learned_model_load(&policy->groups[g].model, weights);
        weights += learned_model_size(&policy->groups[g].model);
    }
    return true;
}

static void freeze(struct fm_policy *policy, bool frozen) {
    policy->frozen = frozen;
}

static bool verify(const struct fm_policy *policy, int32_t g, const uint8_t *resident) {
    (void)resident;
    const struct group *group = &policy->groups[g];
    const struct learned_statistics *statistics = &group->statistics;
    for (int32_t e = 0; e < group->model.n_expert; e++) {
        for (int32_t d = 0; d < LEARNED_EMAS; d++) {
            const float ema = statistics->ema[d * group->model.stride + e];
            if (!(ema >= 0.0f && ema <= 1.001f)) {
                return false;
            }
        }
        if (!(group->score[e] - group->score[e] == 0.0f) || !(statistics->count[e] <= statistics->n_tokens)) {
            return false;
        }
    }
    return group->processed <= group->last && group->last < policy->end;
}

const struct fm_policy_type fm_policy_learned = {
    .name = "learned",
    .create = create,
    .destroy = destroy,
    .begin_pass = begin_pass,
    .on_hit = used,
    .on_miss = used,
    .on_insert = fm_policy_no_use,
    .on_remove = fm_policy_no_use,
    .ranks_all = true,
    .victim = victim,
    .end_token = end_token,
    .begin_sequence = begin_sequence,
    .resize = resize,
    .save = save,
    .load = load,
    .freeze = freeze,
    .verify = verify,
};
