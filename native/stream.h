/* stream.h: the state behind one fm_stream, shared by load.c, slots.c, ring.c, operation.c and stream.c.
 *
 * One lock per stream guards all of it except what says atomic. It is held for bookkeeping only,
 * never while reading or computing. The pool's lock is taken inside it, never around it. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "api.h"
#include "io.h"
#include "policy.h"

enum { FM_MAX_PARTS = 4, FM_MAX_PLACES = 16 };

enum load_state { LOAD_EMPTY, LOAD_LOADING, LOAD_READY, LOAD_FAILED };

/* The bytes of one part of one expert on their way into memory. */
struct load {
    atomic_int state; /* written under the lock */
    int32_t pending;  /* requests that have not ended */
    int32_t error;    /* the first that went wrong: an errno or FM_IO_SHORT */
    int32_t group;
    int32_t part;
    int32_t expert;
    uint64_t sequence; /* order of submission, which is about the order of arrival */
    uint8_t *region;
    const uint8_t *data; /* inside region: files are read at block boundaries */
    struct fm_stream *stream;
    struct ring_buffer *ring; /* NULL: belongs to a slot */
    bool fills;               /* read in the background, see fill.c */
    bool given_up;            /* a guess whose queued reads were cancelled: what arrives is not whole */
};

struct part {
    char tensor[128];
    struct fm_place places[FM_MAX_PLACES];
    int32_t n_places;
    uint64_t expert_bytes;
    uint64_t stride;
    uint64_t *sums;    /* [n_expert] or NULL */
    uint8_t *verified; /* [n_expert] with sums: was checked once */
    int32_t type;      /* -1: the file describes the tensor */
    int64_t ne0;
    int64_t ne1;
    size_t region_offset; /* in the slot */
    size_t region_bytes;
};

struct slot {
    int32_t expert; /* -1: empty */
    int32_t pins;   /* operations that use it */
    bool closed;    /* its memory was given back */
    bool guessed;   /* read by lookahead, and its group has not been passed since */
    bool stale;     /* a guess that was wrong: leaves first */
    struct load loads[FM_MAX_PARTS];
};

struct group {
    int32_t layer;
    int32_t family;
    int32_t n_expert;
    int32_t n_parts;
    int32_t n_bound; /* parts that a loaded model uses */
    struct part parts[FM_MAX_PARTS];
    size_t slot_bytes;

    int32_t n_slots;
    int32_t n_closed; /* of which cannot be used now */
    int32_t n_resident;
    int32_t n_guessed;
    struct slot *slots;  /* [n_slots] */
    int32_t *slot_of;    /* [n_expert]; -1: not resident */
    uint8_t *may_leave;  /* [n_expert] scratch for the policy */
    uint8_t *keep;       /* [n_expert] likely to be used next; all zero except while guessing */
    int64_t *seen;       /* [n_expert] scratch: last token that was counted */
    int64_t seen_token;
    uint64_t *uses;      /* [n_expert] tokens that have used it */

    int32_t lead;                    /* the part that is used first in a pass; -1 until seen */
    int32_t last_part;               /* used last */
    int32_t next_part[FM_MAX_PARTS]; /* what followed each part the last time; -1: nothing */
    int32_t next_group;              /* which group's pass followed the last time; -1: none */
    uint8_t *in_batch;               /* [n_expert] used by the last pass of several tokens */
    uint64_t lookups;
    uint64_t hits;
    uint64_t evicted;
};

struct ring_buffer {
    struct load load;
    struct operation *owner;  /* NULL: free, ahead or draining */
    bool ahead;               /* read for an operation that has not begun */
    bool draining;            /* dropped while being read */
    struct ring_buffer *next; /* free list, or list of ahead buffers in order */
};

struct entry {
    _Atomic(struct load *) load; /* NULL: no ring buffer yet */
    int32_t expert;
    int32_t slot;    /* -1: through the ring */
    atomic_int left; /* threads that have not released it */
};

struct operation {
    struct fm_stream *stream;
    struct group *group; /* NULL: the stream's zeros_operation */
    int32_t part;
    int32_t n_threads;
    int32_t n;          /* entries; those in slots come first */
    int32_t next_ring;  /* the first entry that waits for a ring buffer */
    int32_t next_ahead; /* the first ring entry whose next part is not read ahead */
    int32_t next_likely; /* the first expert of the next group that was not considered for reading ahead */
    int32_t n_held;     /* ring buffers */
    atomic_int left;    /* releases to come */
    struct operation *next;
    struct entry entries[];
};

struct fm_stream {
    struct fm_options options;
    struct fm_io *io;
    struct group *groups;
    int32_t n_groups;
    int32_t max_expert;
    size_t max_region_bytes;
    int32_t last_group; /* of the operation before; -1: none yet */
    int32_t passed;     /* the group that a pass has begun in last; -1: none yet */
    bool uploads;       /* to devices, see hooks.c */
    bool decodes;       /* that pass is part of one token's; the last layers of a prefill can be as short */

    pthread_mutex_t lock;
    pthread_cond_t landed; /* a load has ended or a ring buffer was assigned */
    int32_t n_waiting;
    uint64_t sequence;

    const struct fm_policy_type *policy_type;
    struct fm_policy *policy;
    struct trace *trace; /* NULL: not recorded */

    uint8_t *slot_memory;
    size_t slot_memory_bytes;
    uint8_t *ring_memory;
    size_t ring_memory_bytes;
    uint8_t *zeros; /* max_region_bytes */
    struct ring_buffer *ring;
    struct ring_buffer *ring_free;
    struct ring_buffer *ring_ahead; /* oldest first */

    bool filling;
    int32_t n_filling; /* background loads that have not ended */
    int32_t fill_group;
    int32_t fill_expert;

    struct fm_lookahead *lookahead; /* NULL: off */
    struct window *window;          /* NULL: off */

    struct operation *active;
    struct operation *idle;
    struct operation *zeros_operation; /* for all operations at once that cannot run; has no entries */

    struct fm_error error;
    struct fm_stats stats;
};

/* The k-th expert of token t. */
static inline int32_t fm_routing_expert(const struct fm_routing *routing, int64_t t, int64_t k) {
    int32_t expert;
    memcpy(&expert, routing->ids + t * (int64_t)routing->stride_token + k * (int64_t)routing->stride_used, sizeof expert);
    return expert;
}

/* memory.c: anonymous memory on huge pages where offered; NULL with a message. */
uint8_t *fm_memory_new(size_t bytes);
uint8_t *fm_memory_new_zeros(size_t bytes);
/* Gives the pages that lie wholly inside back to the system; they read as zeros afterwards. */
void fm_memory_drop(uint8_t *memory, size_t bytes);
void fm_memory_free(uint8_t *memory, size_t bytes);

/* load.c: where one expert of a part begins. */
struct fm_place fm_part_place(const struct part *part, int32_t expert);
/* All with the lock held. */
void fm_load_start(struct load *load, int32_t group, int32_t part, int32_t expert, enum fm_priority priority);
void fm_load_ended(void *owner, int error); /* from a worker, without the lock */
void fm_load_wake(struct fm_stream *stream);
void fm_load_latch(struct fm_stream *stream, const struct load *load, enum fm_status status, int error);

/* checksum.c: XXH3-64. */
uint64_t fm_checksum(const void *data, size_t bytes);

/* trace.c, with the lock held and stream->trace there: one pass through a group. */
void fm_trace_pass(struct fm_stream *stream, int32_t group, const struct fm_routing *routing);

/* fill.c, with the lock held: goes on reading in the background. */
void fm_fill_more(struct fm_stream *stream);

/* slots.c. All with the lock held. */
void fm_slots_route(struct fm_stream *stream, int32_t group, const struct fm_routing *routing);
/* A slot for an expert that is not resident, or -1: every slot is in use or loading. */
int32_t fm_slots_insert(struct fm_stream *stream, int32_t group, int32_t expert, bool may_evict);
/* Does the policy want a missing expert in a slot more than the one that would leave for it? */
bool fm_slots_deserves(struct fm_stream *stream, int32_t group, int32_t expert);
/* Takes the expert of a slot out, whoever it is. */
void fm_slots_remove(struct fm_stream *stream, int32_t group, int32_t slot);
/* Slots that can be used now. */
int32_t fm_slots_open(const struct group *group);
bool fm_slots_verify(struct fm_stream *stream, int32_t group);

/* lookahead.c. All with the lock held. */
struct settled {
    int32_t right;     /* guesses that are used */
    int32_t overtaken; /* of which still on their way */
};
/* The group is passed: settles its guesses. */
struct settled fm_lookahead_settle(struct fm_stream *stream, int32_t group, const int64_t *n_rows);
/* The routing of a decoded token at this group is known: learns, and guesses for the next group. */
void fm_lookahead_next(struct fm_stream *stream, int32_t group, const struct fm_routing *routing);
void fm_lookahead_free(struct fm_lookahead *lookahead);

/* window.c. With the lock held: one decoded token has passed the group, so many of its experts were resident. */
void fm_window_pass(struct fm_stream *stream, int32_t group, const struct fm_routing *routing, uint64_t hits);
void fm_window_free(struct window *window);

/* ring.c. All with the lock held. */
void fm_ring_claim(struct fm_stream *stream, struct operation *operation);
void fm_ring_return(struct fm_stream *stream, struct ring_buffer *buffer);
void fm_ring_fill(struct fm_stream *stream);
bool fm_ring_verify(struct fm_stream *stream);
