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
            int32_t e;
            memcpy(&e, routing->ids + t * routing->stride_token + k * routing->stride_used, sizeof e);
            if (e < 0 || e >= group->n_expert || group->seen[e] == token) {
                continue;
            }
            group->seen[e] = token;
            if (group->slot_of[e] >= 0) {
                stream->policy_type->on_hit(stream->policy, index, e);
            } else {
                stream->policy_type->on_miss(stream->policy, index, e);
            }
        }
        stream->policy_type->end_token(stream->policy, index);
    }
}

static int32_t empty_slot(const struct group *group) {
    if (group->n_resident == group->n_slots) {
        return -1;
    }
    for (int32_t s = 0; s < group->n_slots; s++) {
        if (group->slots[s].expert < 0) {
            return s;
        }
    }
    return -1;
}

static int32_t evict(struct fm_stream *stream, int32_t index) {
    struct group *group = &stream->groups[index];
    memset(group->may_leave, 0, (size_t)group->n_expert);
    for (int32_t s = 0; s < group->n_slots; s++) {
        const struct slot *slot = &group->slots[s];
        if (slot->expert >= 0 && slot->pins == 0 && !is_loading(group, slot)) {
            group->may_leave[slot->expert] = 1;
        }
    }
    const int32_t expert = stream->policy_type->victim(stream->policy, index, group->may_leave);
    if (expert < 0 || expert >= group->n_expert || !group->may_leave[expert]) {
        return -1;
    }
    stream->policy_type->on_remove(stream->policy, index, expert);
    const int32_t s = group->slot_of[expert];
    group->slot_of[expert] = -1;
    group->slots[s].expert = -1;
    group->n_resident--;
    group->evicted++;
    stream->stats.evicted++;
    stream->stats.resident_bytes -= group->slot_bytes;
    return s;
}

int32_t fm_slots_insert(struct fm_stream *stream, int32_t index, int32_t expert, bool may_evict) {
    struct group *group = &stream->groups[index];
    if (group->n_slots == 0) {
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
            if (load->state == LOAD_LOADING && load->expert != slot->expert) {
                return false;
            }
        }
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
    }
    if (n != group->n_resident) {
        return false;
    }
    return stream->policy == NULL || stream->policy_type->verify(stream->policy, index, group->may_leave);
}
