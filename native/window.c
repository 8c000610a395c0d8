/* window.c: the routing of the last decoded tokens, and how many of their experts were resident. Python
 * replays it in the background, to tell how far the cache is from the best one possible. */

#include <stdlib.h>
#include <string.h>

#include "stream.h"

struct window {
    int32_t n_groups;
    int32_t k;
    int32_t n_rows;
    uint64_t n_tokens;  /* since the start; the last may be incomplete */
    int32_t last_group; /* of the token that is under way */
    uint16_t *ids;      /* [n_rows][n_groups][k], 0xFFFF: none */
    uint32_t *hits;     /* [n_rows] */
};

void fm_window_free(struct window *window) {
    if (window != NULL) {
        free(window->ids);
        free(window->hits);
        free(window);
    }
}

int32_t fm_window_start(fm_stream *stream, int32_t k, int32_t n_tokens) {
    if (stream->window != NULL || k < 1 || n_tokens < 1) {
        return fm_fail(FM_BAD_ARGUMENT, "no window of %d tokens with %d experts, or there is one", n_tokens, k);
    }
    struct window *window = calloc(1, sizeof *window);
    if (window == NULL) {
        return fm_fail(FM_NO_MEMORY, "out of memory for a window");
    }
    *window = (struct window){.n_groups = stream->n_groups, .k = k, .n_rows = n_tokens, .last_group = -1};
    window->ids = malloc((size_t)n_tokens * (size_t)stream->n_groups * (size_t)k * sizeof *window->ids);
    window->hits = calloc((size_t)n_tokens, sizeof *window->hits);
    if (window->ids == NULL || window->hits == NULL) {
        fm_window_free(window);
        return fm_fail(FM_NO_MEMORY, "out of memory for a window of %d tokens", n_tokens);
    }
    pthread_mutex_lock(&stream->lock);
    stream->window = window;
    pthread_mutex_unlock(&stream->lock);
    return FM_OK;
}

static uint16_t *row_ids(const struct window *window, uint64_t token) {
    const size_t row = (size_t)(token % (uint64_t)window->n_rows);
    return window->ids + row * (size_t)window->n_groups * (size_t)window->k;
}

void fm_window_pass(struct fm_stream *stream, int32_t index, const struct fm_routing *routing, uint64_t hits) {
    struct window *window = stream->window;
    if (index <= window->last_group || window->last_group < 0) {
        window->n_tokens++;
        window->hits[(window->n_tokens - 1) % (uint64_t)window->n_rows] = 0;
        memset(row_ids(window, window->n_tokens - 1), 0xFF,
               (size_t)window->n_groups * (size_t)window->k * sizeof *window->ids);
    }
    window->last_group = index;
    window->hits[(window->n_tokens - 1) % (uint64_t)window->n_rows] += (uint32_t)hits;
    uint16_t *ids = row_ids(window, window->n_tokens - 1) + (size_t)index * (size_t)window->k;
    for (int64_t k = 0; k < routing->n_used && k < window->k; k++) {
        const int32_t e = fm_routing_expert(routing, 0, k);
        ids[k] = e >= 0 && e < stream->groups[index].n_expert ? (uint16_t)e : 0xFFFF;
    }
}

uint64_t fm_window_tokens(fm_stream *stream) {
    pthread_mutex_lock(&stream->lock);
    const uint64_t n = stream->window != NULL ? stream->window->n_tokens : 0;
    pthread_mutex_unlock(&stream->lock);
    return n;
}

int32_t fm_window_read(fm_stream *stream, uint16_t *ids, uint32_t *hits) {
    pthread_mutex_lock(&stream->lock);
    const struct window *window = stream->window;
    const size_t places = window != NULL ? (size_t)window->n_groups * (size_t)window->k : 0;
    int32_t n = 0;
    if (window != NULL && window->n_tokens > 0) {
        const uint64_t end = window->n_tokens - 1; /* the last may be under way */
        const uint64_t most = (uint64_t)window->n_rows - 1;
        for (uint64_t t = end > most ? end - most : 0; t < end; t++, n++) {
            memcpy(ids + (size_t)n * places, row_ids(window, t), places * sizeof *ids);
            hits[n] = window->hits[t % (uint64_t)window->n_rows];
        }
    }
    pthread_mutex_unlock(&stream->lock);
    return n;
}
