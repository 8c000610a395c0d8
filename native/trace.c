/* trace.c: which experts every token used, kept until Python takes it. One row per token with a place
 * for k experts of every group; a ubatch adds its rows when its first group is passed and each
 * further group fills in its part. All contexts of a stream write into one trace, one after the
 * other: it is meant for one context at a time. */

#include <stdlib.h>
#include <string.h>

#include "stream.h"

enum { FIRST_ROWS = 1024, MAX_K = 1024 };

static const uint16_t no_expert = 0xFFFF;

struct trace {
    int32_t n_groups;
    int32_t k;
    uint64_t max_rows;
    uint64_t capacity;
    uint64_t n_rows;
    uint64_t n_taken; /* rows before these */
    uint64_t n_lost;
    uint16_t *ids;   /* [capacity][n_groups][k] */
    float *probs;    /* the same, or NULL */
    uint8_t *phases; /* [capacity] */
    uint8_t *starts; /* [capacity] 1: a sequence begins here */
    uint8_t phase;
    bool starting;

    int32_t last_group;    /* of the running ubatch; -1: none runs */
    uint64_t ubatch_rows;  /* which are the last of all; 0: not recorded */
    float *waiting;        /* probabilities of a pass that is to come */
    size_t waiting_bytes;
    int32_t waiting_layer; /* -1: none */
    int64_t waiting_used;
    int64_t waiting_tokens;
};

static void destroy(struct trace *trace) {
    if (trace == NULL) {
        return;
    }
    free(trace->ids);
    free(trace->probs);
    free(trace->phases);
    free(trace->starts);
    free(trace->waiting);
    free(trace);
}

static bool resize(void *array, size_t bytes) {
    void **memory = array;
    void *grown = realloc(*memory, bytes);
    if (grown == NULL) {
        return false;
    }
    *memory = grown;
    return true;
}

static size_t row_places(const struct trace *trace) {
    return (size_t)trace->n_groups * (size_t)trace->k;
}

static bool reserve(struct trace *trace, uint64_t rows) {
    if (rows <= trace->capacity) {
        return true;
    }
    if (rows > trace->max_rows) {
        return false;
    }
    uint64_t capacity = 2 * trace->capacity > rows ? 2 * trace->capacity : rows;
    capacity = capacity < trace->max_rows ? capacity : trace->max_rows;
    const size_t places = (size_t)capacity * row_places(trace);
    if (!resize(&trace->ids, places * sizeof *trace->ids) ||
        (trace->probs != NULL && !resize(&trace->probs, places * sizeof *trace->probs)) ||
        !resize(&trace->phases, (size_t)capacity) || !resize(&trace->starts, (size_t)capacity)) {
        return false;
    }
    trace->capacity = capacity;
    return true;
}

static void begin_ubatch(struct trace *trace, uint64_t rows) {
    trace->ubatch_rows = 0;
    if (rows == 0) {
        return;
    }
    if (!reserve(trace, trace->n_rows + rows)) {
        trace->n_lost += rows;
        return;
    }
    const size_t at = (size_t)trace->n_rows * row_places(trace);
    const size_t n = (size_t)rows * row_places(trace);
    memset(trace->ids + at, 0xFF, n * sizeof *trace->ids);
    if (trace->probs != NULL) {
        memset(trace->probs + at, 0xFF, n * sizeof *trace->probs); /* not a number */
    }
    memset(trace->phases + trace->n_rows, trace->phase, (size_t)rows);
    memset(trace->starts + trace->n_rows, 0, (size_t)rows);
    trace->starts[trace->n_rows] = trace->starting;
    trace->starting = false;
    trace->n_rows += rows;
    trace->ubatch_rows = rows;
}

void fm_trace_pass(struct fm_stream *stream, int32_t index, const struct fm_routing *routing) {
    struct trace *trace = stream->trace;
    const struct group *group = &stream->groups[index];
    if (index <= trace->last_group || trace->last_group < 0) {
        begin_ubatch(trace, (uint64_t)routing->n_tokens);
    }
    trace->last_group = index;
    const bool has_probs = trace->probs != NULL && trace->waiting_layer == group->layer &&
                           trace->waiting_tokens == routing->n_tokens && trace->waiting_used == routing->n_used;
    trace->waiting_layer = -1;
    if (trace->ubatch_rows == 0) {
        return;
    }
    /* llama.cpp computes the last layer only for tokens that give logits; those are the last ones */
    const int64_t n = (uint64_t)routing->n_tokens < trace->ubatch_rows ? routing->n_tokens : (int64_t)trace->ubatch_rows;
    const int64_t skipped = routing->n_tokens - n;
    const int64_t k = routing->n_used < trace->k ? routing->n_used : trace->k;
    for (int64_t t = 0; t < n; t++) {
        const size_t place = ((size_t)(trace->n_rows - (uint64_t)n + (uint64_t)t) * (size_t)trace->n_groups + (size_t)index) *
                             (size_t)trace->k;
        for (int64_t i = 0; i < k; i++) {
            const int32_t e = fm_routing_expert(routing, t + skipped, i);
            trace->ids[place + (size_t)i] = e >= 0 && e < group->n_expert ? (uint16_t)e : no_expert;
            if (has_probs) {
                trace->probs[place + (size_t)i] = trace->waiting[(t + skipped) * routing->n_used + i];
            }
        }
    }
    if (routing->n_used > k || skipped > 0) {
        trace->n_lost += (uint64_t)n;
    }
}

void fm_trace_probs(fm_stream *stream, int32_t layer, const float *probs, int64_t n_used, int64_t n_tokens) {
    pthread_mutex_lock(&stream->lock);
    struct trace *trace = stream->trace;
    if (trace != NULL && trace->probs != NULL && n_used > 0 && n_tokens > 0) {
        const size_t bytes = (size_t)n_used * (size_t)n_tokens * sizeof *probs;
        trace->waiting_layer = -1;
        if (bytes <= trace->waiting_bytes || resize(&trace->waiting, bytes)) {
            trace->waiting_bytes = bytes > trace->waiting_bytes ? bytes : trace->waiting_bytes;
            memcpy(trace->waiting, probs, bytes);
            trace->waiting_layer = layer;
            trace->waiting_used = n_used;
            trace->waiting_tokens = n_tokens;
        }
    }
    pthread_mutex_unlock(&stream->lock);
}

int32_t fm_trace_start(fm_stream *stream, int32_t k, uint64_t max_rows, int32_t with_probs) {
    if (k < 1 || k > MAX_K || max_rows == 0 || stream->n_groups == 0) {
        return fm_fail(FM_BAD_ARGUMENT, "cannot record %d experts of each token in %d groups", k, stream->n_groups);
    }
    struct trace *trace = calloc(1, sizeof *trace);
    if (trace == NULL) {
        return fm_fail(FM_NO_MEMORY, "out of memory");
    }
    trace->n_groups = stream->n_groups;
    trace->k = k;
    trace->max_rows = max_rows;
    trace->last_group = trace->waiting_layer = -1;
    if (with_probs) {
        trace->probs = malloc(row_places(trace) * sizeof *trace->probs);
    }
    if ((with_probs && trace->probs == NULL) || !reserve(trace, max_rows < FIRST_ROWS ? max_rows : FIRST_ROWS)) {
        destroy(trace);
        return fm_fail(FM_NO_MEMORY, "no memory to record routing");
    }
    pthread_mutex_lock(&stream->lock);
    const bool running = stream->trace != NULL;
    if (!running) {
        stream->trace = trace;
    }
    pthread_mutex_unlock(&stream->lock);
    if (running) {
        destroy(trace);
        return fm_fail(FM_BAD_STATE, "routing is being recorded already");
    }
    return FM_OK;
}

void fm_trace_stop(fm_stream *stream) {
    pthread_mutex_lock(&stream->lock);
    struct trace *trace = stream->trace;
    stream->trace = NULL;
    pthread_mutex_unlock(&stream->lock);
    destroy(trace);
}

void fm_trace_set_phase(fm_stream *stream, int32_t phase) {
    pthread_mutex_lock(&stream->lock);
    if (stream->trace != NULL) {
        stream->trace->phase = (uint8_t)phase;
    }
    pthread_mutex_unlock(&stream->lock);
}

void fm_stream_begin_sequence(fm_stream *stream) {
    pthread_mutex_lock(&stream->lock);
    if (stream->trace != NULL) {
        stream->trace->starting = true;
    }
    if (stream->policy != NULL && stream->policy_type->begin_sequence != NULL) {
        stream->policy_type->begin_sequence(stream->policy);
    }
    pthread_mutex_unlock(&stream->lock);
}

void fm_trace_count(fm_stream *stream, struct fm_trace_counts *counts) {
    pthread_mutex_lock(&stream->lock);
    const struct trace *trace = stream->trace;
    *counts = (struct fm_trace_counts){0};
    if (trace != NULL) {
        *counts = (struct fm_trace_counts){.rows = trace->n_taken + trace->n_rows, .waiting = trace->n_rows, .lost = trace->n_lost};
    }
    pthread_mutex_unlock(&stream->lock);
}

void fm_trace_cut(fm_stream *stream, uint64_t rows) {
    pthread_mutex_lock(&stream->lock);
    struct trace *trace = stream->trace;
    if (trace != NULL) {
        const uint64_t kept = rows > trace->n_taken ? rows - trace->n_taken : 0;
        for (uint64_t row = kept; row < trace->n_rows; row++) {
            trace->starting = trace->starting || trace->starts[row] != 0;
        }
        trace->n_rows = kept < trace->n_rows ? kept : trace->n_rows;
        trace->ubatch_rows = 0;
        trace->last_group = trace->waiting_layer = -1;
    }
    pthread_mutex_unlock(&stream->lock);
}

/* Copies the first n rows of an array and moves the others up. */
static void take(void *out, void *array, uint64_t n, uint64_t n_rows, size_t row_bytes) {
    if (array != NULL) {
        if (out != NULL) {
            memcpy(out, array, (size_t)n * row_bytes);
        }
        memmove(array, (uint8_t *)array + n * row_bytes, (size_t)(n_rows - n) * row_bytes);
    }
}

uint64_t fm_trace_take(fm_stream *stream, uint64_t max_rows, uint16_t *ids, float *probs, uint8_t *phases, uint8_t *starts) {
    pthread_mutex_lock(&stream->lock);
    struct trace *trace = stream->trace;
    uint64_t n = 0;
    if (trace != NULL) {
        n = max_rows < trace->n_rows ? max_rows : trace->n_rows;
        take(ids, trace->ids, n, trace->n_rows, row_places(trace) * sizeof *ids);
        take(probs, trace->probs, n, trace->n_rows, row_places(trace) * sizeof *probs);
        take(phases, trace->phases, n, trace->n_rows, 1);
        take(starts, trace->starts, n, trace->n_rows, 1);
        trace->n_rows -= n;
        trace->n_taken += n;
        if (trace->ubatch_rows > trace->n_rows) {
            trace->ubatch_rows = 0; /* what the rest of this ubatch uses has no row any more */
        }
    }
    pthread_mutex_unlock(&stream->lock);
    return n;
}
