/* slots.c: which experts of a group are resident. Asks the policy who leaves; never evicts a slot
 * that an operation uses or that is being filled. */

#include <string.h>

#include "stream.h"

static bool is_loading(const struct group *group, const struct slot *slot) {
    for (int32_t p = 0; p < group->n_parts; p++) {
        if (atomic_load_explicit(&slot->loads[p].state, memory_order_relaxed) == LOAD_LOADING) {
            return true;
        }
    }
    return false;
}

/* Tells the policy what these tokens use, in order; each expert once per token. */
void fm_slots_route(struct fm_stream *stream, int32_t index, const struct fm_routing *routing) {
    struct group *group = &stream->groups[index];
    if (stream->policy == NULL) {
        return;
    }
    if (stream->policy_type->begin_pass != NULL) {
        stream->policy_type->begin_pass(stream->policy, index, (int32_t)routing->n_tokens);
    }
    for (int64_t t = 0; t < routing->n_tokens; t++) {
        const int64_t token = ++group->seen_token;
        for (int64_t k = 0; k < routing->n_used; k++) {
            const int32_t e = fm_routing_expert(routing, t, k);
            if (e < 0 || e >= group->n_expert || group->seen[e] == token) {
                continue;
            }
            group->seen[e] = token;
            group->uses[e]++;
            if (group->slot_of[e] >= 0) {
                stream->policy_type->on_hit(stream->policy, index, e);
            } else {
                stream->policy_type->on_miss(stream->policy, index, e);
            }
        }
        stream->policy_type->end_token(stream->policy, index);
    }
}

int32_t fm_slots_open(const struct group *group) {
    return group->n_slots - group->n_closed;
}

static int32_t empty_slot(const struct group *group) {
    if (group->n_resident == fm_slots_open(group)) {
        return -1;
    }
    for (int32_t s = 0; s < group->n_slots; s++) {
        const struct slot *slot = &group->slots[s];
        /* one whose guess was given up may still be written to */
        if (slot->expert < 0 && !slot->closed && !is_loading(group, slot)) {
            return s;
        }
    }
    return -1;
}

void fm_slots_remove(struct fm_stream *stream, int32_t index, int32_t s) {
    struct group *group = &stream->groups[index];
    struct slot *slot = &group->slots[s];
    stream->policy_type->on_remove(stream->policy, index, slot->expert);
    group->slot_of[slot->expert] = -1;
    group->n_guessed -= slot->guessed;
    slot->expert = -1;
    slot->guessed = slot->stale = false;
    group->n_resident--;
    stream->stats.resident_bytes -= group->slot_bytes;
}

/* Marks who may leave; returns one that leaves whatever the policy thinks, or -1. */
static int32_t mark_may_leave(struct group *group) {
    int32_t stale = -1;
    memset(group->may_leave, 0, (size_t)group->n_expert);
    for (int32_t s = 0; s < group->n_slots; s++) {
        const struct slot *slot = &group->slots[s];
        if (slot->expert >= 0 && slot->pins == 0 && !slot->guessed && !group->keep[slot->expert] &&
            !is_loading(group, slot)) {
            group->may_leave[slot->expert] = 1;
            if (slot->stale) {
                stale = slot->expert;
            }
        }
    }
    return stale;
}

bool fm_slots_deserves(struct fm_stream *stream, int32_t index, int32_t expert) {
    struct group *group = &stream->groups[index];
    if (stream->policy == NULL || !stream->policy_type->ranks_all || empty_slot(group) >= 0 || mark_may_leave(group) >= 0) {
        return true;
    }
    group->may_leave[expert] = 1;
    return stream->policy_type->victim(stream->policy, index, group->may_leave) != expert;
}

static int32_t evict(struct fm_stream *stream, int32_t index) {
    struct group *group = &stream->groups[index];
    int32_t expert = mark_may_leave(group);
    if (expert < 0) {
        expert = stream->policy_type->victim(stream->policy, index, group->may_leave);
    }
    if (expert < 0 || expert >= group->n_expert || !group->may_leave[expert]) {
        return -1;
    }
    const int32_t s = group->slot_of[expert];
    fm_slots_remove(stream, index, s);
    group->evicted++;
    stream->stats.evicted++;
    return s;
}

int32_t fm_slots_insert(struct fm_stream *stream, int32_t index, int32_t expert, bool may_evict) {
    struct group *group = &stream->groups[index];
    if (fm_slots_open(group) == 0) {
        return -1;
    }
    int32_t s = empty_slot(group);
    if (s < 0 && may_evict) {
        s = evict(stream, index);
    }
    if (s < 0) {
        return -1;
    }
    group->slots[s].expert = expert;
    group->slot_of[expert] = s;
    group->n_resident++;
    stream->policy_type->on_insert(stream->policy, index, expert);
    stream->stats.inserted++;
    stream->stats.resident_bytes += group->slot_bytes;
    return s;
}

bool fm_slots_verify(struct fm_stream *stream, int32_t index) {
    const struct group *group = &stream->groups[index];
    int32_t n = 0;
    int32_t n_closed = 0;
    int32_t n_guessed = 0;
    for (int32_t s = 0; s < group->n_slots; s++) {
        const struct slot *slot = &group->slots[s];
        if (slot->pins < 0 || (slot->pins > 0 && stream->active == NULL)) {
            return false;
        }
        for (int32_t p = 0; p < group->n_parts; p++) {
            const struct load *load = &slot->loads[p];
            if ((load->pending > 0) != (load->state == LOAD_LOADING)) {
                return false;
            }
            if (load->state == LOAD_LOADING && load->expert != slot->expert && !load->given_up) {
                return false;
            }
        }
        if (slot->closed && slot->expert >= 0) {
            return false;
        }
        n_closed += slot->closed;
        n_guessed += slot->guessed;
        if (slot->expert >= 0) {
            n++;
            if (slot->expert >= group->n_expert || group->slot_of[slot->expert] != s) {
                return false;
            }
        }
    }
    for (int32_t e = 0; e < group->n_expert; e++) {
        const int32_t s = group->slot_of[e];
        if (s >= group->n_slots || (s >= 0 && group->slots[s].expert != e)) {
            return false;
        }
        group->may_leave[e] = s >= 0;
        if (group->keep[e]) {
            return false;
        }
    }
    if (n != group->n_resident || n_closed != group->n_closed || n_guessed != group->n_guessed) {
        return false;
    }
    return stream->policy == NULL || stream->policy_type->verify(stream->policy, index, group->may_leave);
}

/* Gives the memory of slots back until only n are open, or takes it again. */
static void resize(struct fm_stream *stream, int32_t index, int32_t n) {
    struct group *group = &stream->groups[index];
    while (fm_slots_open(group) > n) {
        int32_t s = empty_slot(group);
        if (s < 0) {
            s = evict(stream, index);
        }
        if (s < 0) {
            break; /* all are in use: the next call finds them free */
        }
        struct slot *slot = &group->slots[s];
        slot->closed = true;
        group->n_closed++;
        stream->stats.slot_bytes -= group->slot_bytes;
        fm_memory_drop(slot->loads[0].region - group->parts[0].region_offset, group->slot_bytes);
    }
    for (int32_t s = 0; s < group->n_slots && fm_slots_open(group) < n; s++) {
        if (group->slots[s].closed) {
            group->slots[s].closed = false;
            group->n_closed--;
            stream->stats.slot_bytes += group->slot_bytes;
        }
    }
    if (stream->policy_type->resize != NULL) {
        stream->policy_type->resize(stream->policy, index, fm_slots_open(group));
    }
}

int32_t fm_stream_resize(fm_stream *stream, const int32_t *n_slots) {
    pthread_mutex_lock(&stream->lock);
    const bool started = stream->policy != NULL;
    for (int32_t g = 0; started && g < stream->n_groups; g++) {
        resize(stream, g, n_slots[g]);
    }
    pthread_mutex_unlock(&stream->lock);
    return started ? FM_OK : fm_fail(FM_BAD_STATE, "the stream has not started");
}
