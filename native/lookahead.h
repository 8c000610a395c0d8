/* lookahead.h: guesses at the experts that the next groups will use before their routers have run. A
 * predictor gives probabilities; lookahead.c turns the best of them into reads. */
#pragma once

#include "policy.h"

struct fm_predictor;

/* What is known of one decoded token at one group. */
struct fm_observation {
    const int32_t *experts; /* [n], each once */
    int32_t n;
    const float *activation; /* [width] what goes into the experts; NULL: not at hand */
    const float *router;     /* [n_expert][width] of this group; NULL: not at hand */
    int64_t width;
};

struct fm_predictor_type {
    const char *name;
    int32_t n_ahead; /* groups after the last one observed that it can predict */
    /* NULL: no memory. */
    struct fm_predictor *(*create)(const struct fm_policy_setup *setup);
    void (*destroy)(struct fm_predictor *predictor);
    /* The routing of the current token at this group; tokens pass the groups in order. */
    void (*observe)(struct fm_predictor *predictor, int32_t group, const struct fm_observation *observation);
    /* The chance of each expert [n_expert] to be used by a group that the token reaches soon. */
    void (*predict)(struct fm_predictor *predictor, int32_t group, float *probability);
};

struct fm_stream;

/* fm_stream_lookahead with a predictor of any kind. */
int32_t fm_lookahead_start(struct fm_stream *stream, const struct fm_predictor_type *type, int32_t width, bool adaptive);

extern const struct fm_predictor_type fm_predictor_routing;
extern const struct fm_predictor_type fm_predictor_router;
