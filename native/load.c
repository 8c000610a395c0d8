/* load.c: brings one part of one expert into its region. Splits it into requests, counts them in,
 * latches the first error. Knows neither slots nor policy. */

#include <errno.h>
#include <string.h>

#include "stream.h"

/* A guess is read in small requests: demand overtakes it after the one in flight. */
enum { IDLE_BYTES = 256 << 10 };

void fm_load_wake(struct fm_stream *stream) {
    if (stream->n_waiting > 0) {
        pthread_cond_broadcast(&stream->landed);
    }
}

void fm_load_latch(struct fm_stream *stream, const struct load *load, enum fm_status status, int error) {
    stream->stats.failed_loads++;
    struct fm_error *latched = &stream->error;
    if (latched->count++ > 0) {
        return;
    }
    latched->status = status;
    latched->sys_errno = error > 0 ? error : 0;
    latched->file = latched->layer = latched->expert = latched->part = -1;
    if (load != NULL) {
        const struct group *group = &stream->groups[load->group];
        /* expert -1, all of the part: named by its first file */
        latched->file = fm_part_place(&group->parts[load->part], load->expert < 0 ? 0 : load->expert).file;
        latched->layer = group->layer;
        latched->expert = load->expert;
        latched->part = load->part;
        memcpy(latched->tensor, group->parts[load->part].tensor, sizeof latched->tensor);
    }
}

struct fm_place fm_part_place(const struct part *part, int32_t expert) {
    struct fm_place place = part->places[expert % part->n_places];
    place.offset += (uint64_t)(expert / part->n_places) * part->stride;
    return place;
}

static void set_state(struct load *load, enum load_state state) {
    atomic_store_explicit(&load->state, state, memory_order_release);
}

/* Does an operation use the slot of this load? */
static bool is_used(const struct load *load) {
    const struct group *group = &load->stream->groups[load->group];
    const int32_t s = group->slot_of[load->expert];
    return s >= 0 && group->slots[s].pins > 0;
}

/* A guess, or one that was wrong and had all its reads under way. */
static bool is_guess(const struct load *load) {
    const struct group *group = &load->stream->groups[load->group];
    const int32_t s = group->slot_of[load->expert];
    return s >= 0 && (group->slots[s].guessed || group->slots[s].stale);
}

/* Every request has ended. */
static void finish(struct load *load) {
    struct fm_stream *stream = load->stream;
    const bool filled = load->fills;
    const bool given_up = load->given_up;
    load->fills = load->given_up = false;
    if (given_up) {
        set_state(load, LOAD_EMPTY);
        return;
    }
    /* nobody has asked for these bytes yet: if somebody does, they are read again */
    const bool draining = load->ring != NULL && load->ring->draining;
    const bool unwanted =
        load->ring != NULL ? draining || load->ring->ahead : (filled || is_guess(load)) && !is_used(load);
    if (load->error != 0 && !unwanted) {
        fm_load_latch(stream, load, load->error == FM_IO_CORRUPT ? FM_CORRUPT : FM_IO_ERROR, load->error);
    }
    set_state(load, load->error != 0 ? LOAD_FAILED : LOAD_READY);
    if (draining) {
        fm_ring_return(stream, load->ring);
    }
    if (filled) {
        stream->n_filling--;
        stream->filling &= load->error == 0; /* a drive that fails is not asked for more */
        fm_fill_more(stream);
    }
    fm_load_wake(stream);
}

/* Has everything arrived, and is there something to check it against? */
static bool wants_check(const struct load *load) {
    const struct part *part = &load->stream->groups[load->group].parts[load->part];
    const int32_t mode = load->stream->options.verify;
    const bool unwanted = load->given_up || (load->ring != NULL && load->ring->draining);
    return load->error == 0 && part->sums != NULL && !unwanted &&
           (mode == FM_VERIFY_ALWAYS || (mode == FM_VERIFY_FIRST && !part->verified[load->expert]));
}

/* Hashes without the lock: the load is still pending, so nobody else touches it. */
static void check(struct load *load) {
    struct fm_stream *stream = load->stream;
    const struct part *part = &stream->groups[load->group].parts[load->part];
    pthread_mutex_unlock(&stream->lock);
    const bool good = fm_checksum(load->data, part->expert_bytes) == part->sums[load->expert];
    pthread_mutex_lock(&stream->lock);
    stream->stats.verified++;
    if (good) {
        part->verified[load->expert] = 1;
    } else {
        load->error = FM_IO_CORRUPT;
    }
}

void fm_load_ended(void *owner, int error) {
    struct load *load = owner;
    struct fm_stream *stream = load->stream;
    pthread_mutex_lock(&stream->lock);
    if (load->error == 0) {
        load->error = error;
    }
    if (load->pending == 1 && wants_check(load)) {
        check(load);
    }
    if (--load->pending == 0) {
        finish(load);
    }
    pthread_mutex_unlock(&stream->lock);
}

void fm_load_start(struct load *load, int32_t group, int32_t part, int32_t expert, enum fm_priority priority) {
    struct fm_stream *stream = load->stream;
    const struct part *p = &stream->groups[group].parts[part];
    const struct fm_place place = fm_part_place(p, expert);
    const uint64_t begin = place.offset;
    const uint64_t end = begin + p->expert_bytes;
    const uint64_t first = begin & ~(uint64_t)(FM_IO_ALIGN - 1);

    load->group = group;
    load->part = part;
    load->expert = expert;
    load->error = 0;
    load->sequence = ++stream->sequence;
    load->data = load->region + (begin - first);
    load->pending = 1; /* ours, until all requests are submitted */
    set_state(load, LOAD_LOADING);
    stream->stats.missed_bytes += p->expert_bytes;

    uint64_t most = stream->options.request_bytes;
    if (priority == FM_PRIORITY_IDLE && most > IDLE_BYTES) {
        most = IDLE_BYTES;
    }
    for (uint64_t at = first; at < end; at += most) {
        const uint64_t rest = end - at;
        const uint64_t need = rest < most ? rest : most;
        const uint64_t bytes = (need + FM_IO_ALIGN - 1) & ~(uint64_t)(FM_IO_ALIGN - 1);
        load->pending++;
        if (!fm_io_submit(stream->io, priority, place.file, at, bytes, need, load->region + (at - first), load)) {
            load->pending--;
            load->error = ENOMEM; /* the load fails, the token is refused, nothing is lost */
            break;
        }
    }
    if (--load->pending == 0) {
        finish(load);
    }
}
