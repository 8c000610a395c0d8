/* lookahead.c: while attention and the router compute, or a group finds all it needs, the drive would
 * idle. Likely experts of the next groups are read meanwhile, at idle priority, into slots whose experts
 * the policy would give up next. As many groups ahead as the predictor can see: in the time of one, few
 * guesses arrive before they are wanted.
 *
 * A guess that is used stays; one that is not is given up, or leaves first when it has landed already.
 * Only for single tokens: a prefill keeps the drive busy by itself (ring.c). Width and threshold follow
 * what is measured: guesses must be right often enough, and with FM_LOOKAHEAD_AUTO tokens must come
 * faster with them than without, in turns on this machine. */

#include "lookahead.h"

#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "stream.h"

enum {
    WINDOW = 24,          /* tokens with, then tokens without, and so on */
    SETTLING = 4,         /* the first of a window still feel the one before */
    WINDOWS = 8,          /* of a trial */
    FIRST_TRIAL = 64,     /* tokens, by which a cold cache has filled */
    BETWEEN_TRIALS = 2048
};

/* Right guesses that are worth it even if an expert has to leave for them. */
static const float useful_least = 0.6f;
static const float useful_enough = 0.75f;
/* What is this likely to be used does not leave for a guess. */
static const float keep_from = 0.15f;

struct fm_lookahead {
    const struct fm_predictor_type *type;
    struct fm_predictor *predictor;
    int32_t width; /* guesses per group at most */
    float threshold;
    float useful;       /* moving share of guesses that were used */
    float *probability; /* [max_expert] */
    int32_t *experts;   /* [max_expert] */

    bool on;
    bool adaptive;
    int32_t wait; /* tokens until the next trial */
    int32_t window;
    int32_t n;
    uint64_t last_ns;
    uint64_t durations[WINDOW];
    uint64_t sums[2]; /* of the windows' medians, without and with */
};

static int by_size(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a;
    const uint64_t y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* A window is over: its median counts for or against; after the last, the better way stays. */
static void end_window(struct fm_lookahead *l) {
    const int32_t n = WINDOW - SETTLING;
    qsort(l->durations, (size_t)n, sizeof l->durations[0], by_size);
    l->sums[l->on] += l->durations[n / 2];
    l->n = 0;
    if (++l->window < WINDOWS) {
        l->on = !l->on;
        return;
    }
    l->on = (double)l->sums[1] < 0.99 * (double)l->sums[0];
    l->window = 0;
    l->sums[0] = l->sums[1] = 0;
    l->wait = BETWEEN_TRIALS;
}

/* The first group is reached: how long did the token take? */
static void clock_token(struct fm_lookahead *l) {
    const uint64_t now = fm_clock_ns();
    const uint64_t taken = now - l->last_ns;
    l->last_ns = now;
    if (l->wait > 0) {
        if (--l->wait == 0) {
            l->on = false;
            l->window = l->n = 0;
        }
        return;
    }
    if (l->n >= SETTLING) {
        l->durations[l->n - SETTLING] = taken;
    }
    if (++l->n == WINDOW) {
        end_window(l);
    }
}

static void note_guess(struct fm_lookahead *l, bool used) {
    l->useful += 0.02f * ((used ? 1.0f : 0.0f) - l->useful);
    if (l->useful < useful_least && l->threshold < 0.9f) {
        l->threshold += 0.005f;
    } else if (l->useful > useful_enough && l->threshold > 0.2f) {
        l->threshold -= 0.005f;
    }
}

/* Takes back what is queued of a wrong guess that has not landed. */
static void give_up(struct fm_stream *stream, int32_t index, int32_t s) {
    struct slot *slot = &stream->groups[index].slots[s];
    const int32_t n_parts = stream->groups[index].n_parts;
    bool whole = true;
    for (int32_t p = 0; p < n_parts; p++) {
        const int n = fm_io_cancel(stream->io, &slot->loads[p]);
        slot->loads[p].pending -= n;
        whole = whole && n == 0;
    }
    if (whole) {
        slot->stale = true; /* at most its last reads are under way */
        return;
    }
    for (int32_t p = 0; p < n_parts; p++) {
        struct load *load = &slot->loads[p];
        load->given_up = load->pending > 0; /* what arrives is not whole */
        if (!load->given_up) {
            atomic_store_explicit(&load->state, LOAD_EMPTY, memory_order_relaxed);
        }
    }
    fm_slots_remove(stream, index, s);
}

struct settled fm_lookahead_settle(struct fm_stream *stream, int32_t index, const int64_t *n_rows) {
    struct group *group = &stream->groups[index];
    struct settled settled = {0};
    for (int32_t s = 0; s < group->n_slots && group->n_guessed > 0; s++) {
        struct slot *slot = &group->slots[s];
        if (!slot->guessed) {
            continue;
        }
        slot->guessed = false;
        group->n_guessed--;
        const bool used = n_rows[slot->expert] > 0;
        const bool used_by_others = !used && slot->pins > 0; /* an operation of another context reads its bytes */
        note_guess(stream->lookahead, used || used_by_others);
        if (used_by_others) {
            stream->stats.guesses_used++;
            continue;
        }
        if (!used) {
            stream->stats.guesses_wasted++;
            give_up(stream, index, s);
            continue;
        }
        stream->stats.guesses_used++;
        bool landed = true;
        for (int32_t p = 0; p < group->n_parts; p++) {
            struct load *load = &slot->loads[p];
            if (atomic_load_explicit(&load->state, memory_order_relaxed) == LOAD_LOADING) {
                landed = false;
                fm_io_promote(stream->io, load, p == group->lead ? FM_PRIORITY_DEMAND : FM_PRIORITY_AHEAD);
            }
        }
        settled.right++;
        settled.overtaken += !landed;
    }
    stream->stats.guesses_overtaken += (uint64_t)settled.overtaken;
    return settled;
}

static int32_t best_guess(const struct fm_lookahead *l, const struct group *group) {
    int32_t best = -1;
    for (int32_t e = 0; e < group->n_expert; e++) {
        if (group->slot_of[e] < 0 && l->probability[e] > l->threshold &&
            (best < 0 || l->probability[e] > l->probability[best])) {
            best = e;
        }
    }
    return best;
}

static bool read_guess(struct fm_stream *stream, int32_t index, int32_t expert) {
    struct group *group = &stream->groups[index];
    const int32_t s = fm_slots_insert(stream, index, expert, true);
    if (s < 0) {
        return false;
    }
    struct slot *slot = &group->slots[s];
    slot->guessed = true;
    group->n_guessed++;
    for (int32_t i = 0, p = group->lead; i < group->n_parts; i++) {
        fm_load_start(&slot->loads[p], index, p, expert, FM_PRIORITY_IDLE);
        p = group->next_part[p] >= 0 ? group->next_part[p] : group->lead;
    }
    stream->stats.guesses++;
    return true;
}

/* Can the parts be read in the order of their use? They have all been seen by then. */
static bool knows_parts(const struct group *group) {
    int32_t n = 0;
    for (int32_t p = group->lead; p >= 0 && n <= group->n_parts; p = group->next_part[p]) {
        n++;
    }
    return n == group->n_parts;
}

static void guess(struct fm_stream *stream, int32_t index) {
    struct fm_lookahead *l = stream->lookahead;
    struct group *group = &stream->groups[index];
    if (!l->on || fm_slots_open(group) == 0 || fm_slots_open(group) == group->n_expert || group->n_guessed >= l->width ||
        !knows_parts(group)) {
        return;
    }
    l->type->predict(l->predictor, index, l->probability);
    for (int32_t e = 0; e < group->n_expert; e++) {
        group->keep[e] = l->probability[e] > keep_from;
    }
    for (int32_t i = group->n_guessed; i < l->width; i++) {
        const int32_t expert = best_guess(l, group);
        if (expert < 0 || !read_guess(stream, index, expert)) {
            break;
        }
    }
    memset(group->keep, 0, (size_t)group->n_expert);
}

void fm_lookahead_next(struct fm_stream *stream, int32_t index, const struct fm_routing *routing) {
    struct fm_lookahead *l = stream->lookahead;
    const struct group *group = &stream->groups[index];
    struct fm_observation observation = {.experts = l->experts, .activation = routing->activation, .router = routing->router, .width = routing->width};
    for (int64_t k = 0; k < routing->n_used; k++) {
        const int32_t e = fm_routing_expert(routing, 0, k);
        if (e >= 0 && e < group->n_expert) {
            l->experts[observation.n++] = e;
        }
    }
    if (index == 0 && l->adaptive) {
        clock_token(l);
    }
    l->type->observe(l->predictor, index, &observation);
    for (int32_t ahead = 1; ahead <= l->type->n_ahead && ahead < stream->n_groups; ahead++) {
        guess(stream, (index + ahead) % stream->n_groups);
    }
}

void fm_lookahead_free(struct fm_lookahead *l) {
    if (l == NULL) {
        return;
    }
    if (l->predictor != NULL) {
        l->type->destroy(l->predictor);
    }
    free(l->probability);
    free(l->experts);
    free(l);
}

static const struct fm_predictor_type *const types[] = {
    &fm_predictor_routing,
    &fm_predictor_router,
};

static const struct fm_predictor_type *find(const char *name) {
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        if (strcmp(types[i]->name, name) == 0) {
            return types[i];
        }
    }
    return NULL;
}

static struct fm_lookahead *new_lookahead(const struct fm_stream *stream, const struct fm_predictor_type *type, int32_t width,
                                          bool adaptive) {
    struct fm_lookahead *l = calloc(1, sizeof *l);
    int32_t *numbers = calloc((size_t)stream->n_groups * 2, sizeof *numbers);
    if (l == NULL || numbers == NULL) {
        free(l);
        free(numbers);
        return NULL;
    }
    for (int32_t g = 0; g < stream->n_groups; g++) {
        numbers[g] = stream->groups[g].n_expert;
        numbers[stream->n_groups + g] = stream->groups[g].n_slots;
    }
    const struct fm_policy_setup setup = {
        .n_groups = stream->n_groups, .n_expert = numbers, .n_slots = numbers + stream->n_groups};
    *l = (struct fm_lookahead){
        .type = type,
        .predictor = type->create(&setup),
        .width = width,
        .threshold = 0.4f,
        .useful = useful_enough,
        .probability = calloc((size_t)stream->max_expert, sizeof(float)),
        .experts = calloc((size_t)stream->max_expert, sizeof(int32_t)),
        .on = !adaptive,
        .adaptive = adaptive,
        .wait = adaptive ? FIRST_TRIAL : 0,
    };
    free(numbers);
    if (l->predictor == NULL || l->probability == NULL || l->experts == NULL) {
        fm_lookahead_free(l);
        return NULL;
    }
    return l;
}

int32_t fm_stream_lookahead(fm_stream *stream, const char *predictor, int32_t width, int32_t adaptive) {
    const struct fm_predictor_type *type = find(predictor);
    if (type == NULL || width < 1) {
        return fm_fail(FM_BAD_ARGUMENT, "no lookahead by '%s' of %d experts", predictor, width);
    }
    return fm_lookahead_start(stream, type, width, adaptive != 0);
}

int32_t fm_lookahead_start(struct fm_stream *stream, const struct fm_predictor_type *type, int32_t width, bool adaptive) {
    if (stream->policy == NULL || stream->lookahead != NULL) {
        return fm_fail(FM_BAD_STATE, "lookahead begins once, after the start");
    }
    struct fm_lookahead *l = new_lookahead(stream, type, width, adaptive);
    if (l == NULL) {
        return fm_fail(FM_NO_MEMORY, "out of memory for lookahead");
    }
    pthread_mutex_lock(&stream->lock);
    stream->lookahead = l;
    pthread_mutex_unlock(&stream->lock);
    return FM_OK;
}
