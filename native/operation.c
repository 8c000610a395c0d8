/* operation.c: one MUL_MAT_ID from begin to the last release. Decides which experts go through
 * slots and which through the ring, pins what is used, and lets threads sleep for what is not there
 * yet. Every operation finds its bytes on its own, so operations of several contexts can overlap. */

#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "home.h"
#include "stream.h"

static struct operation *new_operation(struct fm_stream *stream) {
    struct operation *op = stream->idle;
    if (op != NULL) {
        stream->idle = op->next;
    } else {
        op = malloc(sizeof *op + (size_t)stream->max_expert * sizeof op->entries[0]);
    }
    return op;
}

static void add_entry(struct operation *op, int32_t expert, int32_t slot, struct load *load) {
    struct entry *entry = &op->entries[op->n++];
    entry->expert = expert;
    entry->slot = slot;
    atomic_init(&entry->load, load);
    atomic_init(&entry->left, op->n_threads);
}

/* Uses a resident expert. Loads its part again if that failed before. */
static void add_resident(struct operation *op, int32_t group, int32_t expert) {
    const int32_t s = op->group->slot_of[expert];
    struct slot *slot = &op->group->slots[s];
    struct load *load = &slot->loads[op->part];
    const int state = atomic_load_explicit(&load->state, memory_order_relaxed);
    if (state == LOAD_FAILED || state == LOAD_EMPTY) {
        fm_load_start(load, group, op->part, expert, FM_PRIORITY_DEMAND);
    } else if (state == LOAD_LOADING) {
        fm_io_promote(op->stream->io, load, FM_PRIORITY_DEMAND);
    }
    slot->pins++;
    slot->stale = false; /* a guess that came too early was not wrong */
    add_entry(op, expert, s, load);
}

static bool is_ready(const struct entry *entry) {
    const struct load *load = atomic_load_explicit(&entry->load, memory_order_relaxed);
    return atomic_load_explicit(&load->state, memory_order_relaxed) != LOAD_LOADING;
}

static uint64_t sequence_of(const struct entry *entry) {
    return atomic_load_explicit(&entry->load, memory_order_relaxed)->sequence;
}

/* What is there first, then in the order in which it will arrive. Few are loading, so insertion sort. */
static void sort_by_arrival(struct operation *op) {
    for (int32_t i = 1; i < op->n; i++) {
        const struct entry moved = op->entries[i];
        const bool ready = is_ready(&moved);
        int32_t j = i;
        while (j > 0 && !is_ready(&op->entries[j - 1]) && (ready || sequence_of(&op->entries[j - 1]) > sequence_of(&moved))) {
            op->entries[j] = op->entries[j - 1];
            j--;
        }
        op->entries[j] = moved;
    }
}

/* Gives the expert a slot and starts all its parts, this operation's first. */
static bool insert(struct operation *op, int32_t group, int32_t expert, bool may_evict) {
    const int32_t s = fm_slots_insert(op->stream, group, expert, may_evict);
    if (s < 0) {
        return false;
    }
    struct slot *slot = &op->group->slots[s];
    for (int32_t p = 0; p < op->group->n_parts; p++) {
        atomic_store_explicit(&slot->loads[p].state, LOAD_EMPTY, memory_order_relaxed);
    }
    fm_load_start(&slot->loads[op->part], group, op->part, expert, FM_PRIORITY_DEMAND);
    slot->pins++;
    add_entry(op, expert, s, &slot->loads[op->part]);
    return true;
}

/* The other parts of the experts that this operation has put into slots. They follow the first parts of all. */
static void start_other_parts(struct operation *op, int32_t group, int32_t first_inserted) {
    for (int32_t p = 0; p < op->group->n_parts; p++) {
        if (p == op->part) {
            continue;
        }
        for (int32_t i = first_inserted; i < op->n; i++) {
            const struct entry *entry = &op->entries[i];
            if (entry->slot >= 0) {
                fm_load_start(&op->group->slots[entry->slot].loads[p], group, p, entry->expert, FM_PRIORITY_AHEAD);
            }
        }
    }
}

/* Puts the missing experts of a pass into slots. When there are more than can fit, a batch takes
 * empty slots only, for what its last tokens use: what decoding has cached stays. */
static void admit(struct operation *op, int32_t group, const struct fm_routing *routing, const int64_t *n_rows,
                  int32_t n_distinct) {
    const struct group *g = op->group;
    if (n_distinct <= fm_slots_open(g) || routing->n_tokens == 1) {
        for (int32_t e = 0; e < g->n_expert; e++) {
            if (n_rows[e] == 0 || g->slot_of[e] >= 0 || (routing->n_tokens == 1 && !fm_slots_deserves(op->stream, group, e))) {
                continue;
            }
            if (!insert(op, group, e, true)) {
                break;
            }
        }
        return;
    }
    for (int64_t t = routing->n_tokens - 1; t >= 0 && g->n_resident < fm_slots_open(g); t--) {
        for (int64_t k = 0; k < routing->n_used; k++) {
            const int32_t e = fm_routing_expert(routing, t, k);
            if (e >= 0 && e < g->n_expert && g->slot_of[e] < 0 && !insert(op, group, e, false)) {
                return;
            }
        }
    }
}

/* The first operation of a pass through the group: counts, tells the policy, admits. */
static void begin_pass(struct operation *op, int32_t group, const struct fm_routing *routing, const int64_t *n_rows,
                       int32_t n_distinct, struct settled guesses) {
    struct fm_stream *stream = op->stream;
    struct group *g = op->group;
    const uint64_t hits = (uint64_t)(op->n - guesses.overtaken);
    /* llama.cpp computes the last layer of a prefill only for the tokens that give logits */
    stream->decodes = routing->n_tokens == 1 && (stream->decodes || group <= stream->passed || stream->passed < 0);
    stream->passed = group;
    g->lookups += (uint64_t)n_distinct;
    g->hits += hits;
    stream->stats.lookups += (uint64_t)n_distinct;
    stream->stats.hits += hits;
    if (stream->window != NULL && stream->decodes) {
        fm_window_pass(stream, group, routing, (uint64_t)(op->n - guesses.right)); /* what the policy kept */
    }
    if (stream->decodes) {
        stream->stats.decode_lookups += (uint64_t)n_distinct;
        stream->stats.decode_hits += hits;
    }
    for (int32_t e = 0; routing->n_tokens > 1 && e < g->n_expert; e++) {
        g->in_batch[e] = n_rows[e] > 0;
    }
    if (group == 0) {
        stream->stats.tokens += (uint64_t)routing->n_tokens;
    }
    if (stream->trace != NULL) {
        fm_trace_pass(stream, group, routing);
    }
    fm_slots_route(stream, group, routing);
    const int32_t first_inserted = op->n;
    admit(op, group, routing, n_rows, n_distinct);
    start_other_parts(op, group, first_inserted);
    stream->stats.bypassed += (uint64_t)(n_distinct - op->n);
    if (stream->lookahead != NULL && stream->decodes) {
        fm_lookahead_next(stream, group, routing);
    }
}

/* Learns in which order the graph uses the parts, and the groups. */
static void note_part(struct fm_stream *stream, struct group *group, int32_t part) {
    const int32_t index = (int32_t)(group - stream->groups);
    if (stream->last_group >= 0 && stream->last_group != index) {
        stream->groups[stream->last_group].next_group = index;
    }
    stream->last_group = index;
    if (group->lead < 0) {
        group->lead = part;
    }
    /* the same part twice: two contexts at once */
    if (part != group->lead && group->last_part >= 0 && part != group->last_part) {
        group->next_part[group->last_part] = part;
    }
    group->last_part = part;
}

static void fill(struct operation *op, int32_t group, const struct fm_routing *routing, const int64_t *n_rows) {
    struct group *g = op->group;
    int32_t n_distinct = 0;
    struct settled guesses = {0};
    note_part(op->stream, g, op->part);
    if (op->part == g->lead && op->stream->lookahead != NULL) {
        guesses = fm_lookahead_settle(op->stream, group, n_rows);
    }
    for (int32_t e = 0; e < g->n_expert; e++) {
        if (n_rows[e] > 0) {
            n_distinct++;
            if (g->slot_of[e] >= 0) {
                add_resident(op, group, e);
            }
        }
    }
    if (op->part == g->lead) {
        begin_pass(op, group, routing, n_rows, n_distinct, guesses);
    }
    sort_by_arrival(op);

    op->next_ring = op->next_ahead = op->n;
    /* only a batch that uses most experts tells which the next group will use: nearly all again */
    op->next_likely = routing->n_tokens > 1 && n_distinct * 4 >= g->n_expert * 3 ? 0 : INT32_MAX;
    for (int32_t e = 0; e < g->n_expert && op->n < n_distinct; e++) {
        if (n_rows[e] > 0 && g->slot_of[e] < 0) {
            add_entry(op, e, -1, NULL);
        }
    }
}

/* For a tensor that nobody described, or when memory is short: zeros, and an error instead of a token. */
static struct operation *begin_zeros(struct fm_stream *stream, enum fm_status status, int32_t n_expert,
                                     const int64_t *n_rows, int32_t *order) {
    fm_load_latch(stream, NULL, status, 0);
    for (int32_t e = 0, n = 0; e < n_expert; e++) {
        if (n_rows[e] > 0) {
            order[n++] = e;
        }
    }
    return stream->zeros_operation;
}

static void finish(struct operation *op) {
    struct fm_stream *stream = op->stream;
    for (int32_t i = 0; i < op->n; i++) {
        if (op->entries[i].slot >= 0) {
            op->group->slots[op->entries[i].slot].pins--;
        }
    }
    struct operation **link = &stream->active;
    while (*link != op) {
        link = &(*link)->next;
    }
    *link = op->next;
    op->next = stream->idle;
    stream->idle = op;
}

void *fm_operation_begin(fm_stream *stream, int32_t group, int32_t part, const struct fm_routing *routing,
                         int32_t n_expert, const int64_t *n_rows, int32_t n_threads, int32_t *order) {
    pthread_mutex_lock(&stream->lock);
    stream->stats.operations++;
    const bool known = group >= 0 && group < stream->n_groups && part >= 0 &&
                       part < stream->groups[group].n_parts && n_expert == stream->groups[group].n_expert &&
                       stream->ring != NULL;
    struct operation *op = known ? new_operation(stream) : NULL;
    if (op == NULL) {
        op = begin_zeros(stream, known ? FM_NO_MEMORY : FM_BAD_STATE, n_expert, n_rows, order);
    } else {
        op->stream = stream;
        op->group = &stream->groups[group];
        op->part = part;
        op->n_threads = n_threads;
        op->n = op->n_held = 0;
        op->next = stream->active;
        stream->active = op;
        fill(op, group, routing, n_rows);
        fm_ring_claim(stream, op);
        fm_ring_fill(stream);
        atomic_init(&op->left, op->n * n_threads);
        for (int32_t i = 0; i < op->n; i++) {
            order[i] = op->entries[i].expert;
        }
        if (op->n == 0) {
            finish(op); /* no expert, no release */
        }
    }
    pthread_mutex_unlock(&stream->lock);
    return op;
}

static const void *wait_for(struct operation *op, struct entry *entry) {
    struct fm_stream *stream = op->stream;
    const uint64_t begun = fm_clock_ns();
    struct load *load;
    struct fm_home home = {.cpu = -1};
    if (op->n_threads > 1) {
        fm_home_wait(&home, begun);
    }
    pthread_mutex_lock(&stream->lock);
    stream->n_waiting++;
    while ((load = atomic_load_explicit(&entry->load, memory_order_acquire)) == NULL ||
           atomic_load_explicit(&load->state, memory_order_acquire) == LOAD_LOADING) {
        pthread_cond_wait(&stream->landed, &stream->lock);
    }
    stream->n_waiting--;
    stream->stats.waits++;
    stream->stats.wait_ns += (fm_clock_ns() - begun) / (uint64_t)op->n_threads;
    pthread_mutex_unlock(&stream->lock);
    fm_home_leave(&home);
    return atomic_load_explicit(&load->state, memory_order_acquire) == LOAD_READY ? load->data : stream->zeros;
}

const void *fm_operation_acquire(void *operation, int32_t i) {
    struct operation *op = operation;
    if (op->group == NULL) {
        return op->stream->zeros;
    }
    struct entry *entry = &op->entries[i];
    const struct load *load = atomic_load_explicit(&entry->load, memory_order_acquire);
    if (load != NULL) {
        const int state = atomic_load_explicit(&load->state, memory_order_acquire);
        if (state == LOAD_READY) {
            return load->data;
        }
        if (state == LOAD_FAILED) {
            return op->stream->zeros;
        }
    }
    return wait_for(op, entry);
}

void fm_operation_release(void *operation, int32_t i) {
    struct operation *op = operation;
    struct fm_stream *stream = op->stream;
    if (op->group == NULL) {
        return;
    }
    struct entry *entry = &op->entries[i];
    /* the last thread to leave a ring buffer hands it on */
    const bool last = atomic_fetch_sub(&entry->left, 1) == 1;
    struct load *load = last && entry->slot < 0 ? atomic_load(&entry->load) : NULL;
    if (load != NULL) {
        pthread_mutex_lock(&stream->lock);
        fm_ring_return(stream, load->ring);
        pthread_mutex_unlock(&stream->lock);
    }
    if (atomic_fetch_sub(&op->left, 1) == 1) {
        pthread_mutex_lock(&stream->lock);
        finish(op);
        pthread_mutex_unlock(&stream->lock);
    }
}
