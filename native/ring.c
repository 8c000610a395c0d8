/* ring.c: the buffers for experts that have no slot. An operation gets buffers for its next experts
 * as they come free, so reads run ahead of compute; what is left over reads what the operation that
 * will most likely follow needs: the same experts' next part, or in a prefill the next group's
 * experts. Demand takes buffers back from such guesses. */

#include <stddef.h>

#include "stream.h"

static void push_free(struct fm_stream *stream, struct ring_buffer *buffer) {
    buffer->owner = NULL;
    buffer->ahead = false;
    buffer->draining = false;
    atomic_store_explicit(&buffer->load.state, LOAD_EMPTY, memory_order_relaxed);
    buffer->next = stream->ring_free;
    stream->ring_free = buffer;
}

void fm_ring_return(struct fm_stream *stream, struct ring_buffer *buffer) {
    if (buffer->owner != NULL) {
        buffer->owner->n_held--;
    }
    push_free(stream, buffer);
    fm_ring_fill(stream);
}

static void unlink_ahead(struct fm_stream *stream, struct ring_buffer *buffer) {
    struct ring_buffer **link = &stream->ring_ahead;
    while (*link != buffer) {
        link = &(*link)->next;
    }
    *link = buffer->next;
    buffer->ahead = false;
    buffer->next = NULL;
}

/* Gives up on a buffer that was read ahead. It is free at once, or when its reads in flight end. */
static void drop_ahead(struct fm_stream *stream, struct ring_buffer *buffer) {
    unlink_ahead(stream, buffer);
    stream->stats.ahead_dropped++;
    buffer->load.pending -= fm_io_cancel(stream->io, &buffer->load);
    if (buffer->load.pending == 0) {
        push_free(stream, buffer);
    } else {
        buffer->draining = true;
    }
}

static void give(struct operation *operation, struct ring_buffer *buffer, int32_t i) {
    buffer->owner = operation;
    operation->n_held++;
    atomic_store_explicit(&operation->entries[i].load, &buffer->load, memory_order_release);
}

/* The entry for this expert among those that wait for a buffer, moved up to be the next; false: there is none. */
static bool bring_forward(struct operation *operation, int32_t expert) {
    struct entry *next = &operation->entries[operation->next_ring];
    for (int32_t i = operation->next_ring; i < operation->n; i++) {
        if (operation->entries[i].expert == expert) {
            operation->entries[i].expert = next->expert; /* nothing else is set yet */
            next->expert = expert;
            return true;
        }
    }
    return false;
}

/* Buffers that were read ahead for this operation become its own; the other guesses of its group are dropped. */
void fm_ring_claim(struct fm_stream *stream, struct operation *operation) {
    const int32_t group = (int32_t)(operation->group - stream->groups);
    struct ring_buffer *next;
    for (struct ring_buffer *buffer = stream->ring_ahead; buffer != NULL; buffer = next) {
        next = buffer->next;
        const struct load *load = &buffer->load;
        if (load->group != group) {
            continue;
        }
        const bool failed = atomic_load_explicit(&load->state, memory_order_relaxed) == LOAD_FAILED;
        if (load->part == operation->part && !failed && bring_forward(operation, load->expert)) {
            unlink_ahead(stream, buffer);
            fm_io_promote(stream->io, load, FM_PRIORITY_DEMAND);
            give(operation, buffer, operation->next_ring++);
            stream->stats.ahead_used++;
        } else {
            drop_ahead(stream, buffer);
        }
    }
}

/* The operation that waits for a buffer and holds the fewest, the oldest of these: none can be starved by others. */
static struct operation *neediest(const struct fm_stream *stream) {
    struct operation *found = NULL;
    for (struct operation *op = stream->active; op != NULL; op = op->next) {
        if (op->next_ring < op->n && (found == NULL || op->n_held <= found->n_held)) { /* newest first */
            found = op;
        }
    }
    return found;
}

struct guess {
    int32_t group;
    int32_t part;
    int32_t expert;
};

/* What a running operation makes likely: the next part of an expert that goes through the ring; after a
 * batch's last part, an expert of the next group. */
static bool guess(struct fm_stream *stream, struct operation *op, struct guess *found) {
    const int32_t part = op->group->next_part[op->part];
    if (part >= 0) {
        if (op->next_ahead >= op->n) {
            return false;
        }
        *found = (struct guess){(int32_t)(op->group - stream->groups), part, op->entries[op->next_ahead++].expert};
        return true;
    }
    /* not from the last group to the first: this batch may be the last of its prompt */
    if (op->group->next_group <= (int32_t)(op->group - stream->groups) || op->next_likely == INT32_MAX) {
        return false;
    }
    const struct group *next = &stream->groups[op->group->next_group];
    while (next->lead >= 0 && op->next_likely < next->n_expert) {
        const int32_t expert = op->next_likely++;
        if (next->slot_of[expert] < 0 && next->in_batch[expert]) {
            *found = (struct guess){op->group->next_group, next->lead, expert};
            return true;
        }
    }
    return false;
}

static bool read_ahead(struct fm_stream *stream) {
    for (struct operation *op = stream->active; op != NULL; op = op->next) {
        struct guess next;
        if (!guess(stream, op, &next)) {
            continue;
        }
        struct ring_buffer *buffer = stream->ring_free;
        stream->ring_free = buffer->next;
        buffer->ahead = true;
        buffer->next = NULL;
        struct ring_buffer **tail = &stream->ring_ahead;
        while (*tail != NULL) {
            tail = &(*tail)->next;
        }
        *tail = buffer;
        fm_load_start(&buffer->load, next.group, next.part, next.expert, FM_PRIORITY_AHEAD);
        stream->stats.ahead_issued++;
        return true;
    }
    return false;
}

void fm_ring_fill(struct fm_stream *stream) {
    struct operation *op;
    while ((op = neediest(stream)) != NULL) {
        if (stream->ring_free == NULL && stream->ring_ahead != NULL) {
            drop_ahead(stream, stream->ring_ahead);
        }
        struct ring_buffer *buffer = stream->ring_free;
        if (buffer == NULL) {
            return;
        }
        stream->ring_free = buffer->next;
        const int32_t i = op->next_ring++;
        fm_load_start(&buffer->load, (int32_t)(op->group - stream->groups), op->part, op->entries[i].expert,
                      FM_PRIORITY_DEMAND);
        give(op, buffer, i);
        fm_load_wake(stream);
    }
    while (stream->ring_free != NULL && read_ahead(stream)) {
    }
}

bool fm_ring_verify(struct fm_stream *stream) {
    int32_t n = 0;
    for (const struct ring_buffer *b = stream->ring_free; b != NULL; b = b->next) {
        if (b->owner != NULL || b->ahead || b->draining || b->load.pending != 0) {
            return false;
        }
        n++;
    }
    for (const struct ring_buffer *b = stream->ring_ahead; b != NULL; b = b->next) {
        if (b->owner != NULL || !b->ahead || b->draining) {
            return false;
        }
        n++;
    }
    for (int32_t i = 0; stream->ring != NULL && i < stream->options.n_ring; i++) {
        const struct ring_buffer *b = &stream->ring[i];
        n += b->owner != NULL || b->draining;
        if (b->owner != NULL && stream->active == NULL) {
            return false;
        }
    }
    return stream->ring == NULL || n == stream->options.n_ring;
}
