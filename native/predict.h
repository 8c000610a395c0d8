/* predict.h: which experts a group will use for the current token, before its router has run. */
#pragma once

#include <stdint.h>

#include "policy.h"

struct fm_predictor;

/* n_groups and n_expert matter. NULL: no memory. */
struct fm_predictor *fm_predictor_new(const struct fm_policy_setup *setup);
void fm_predictor_free(struct fm_predictor *predictor);

/* The token's use of a group is known: n distinct experts. Groups in the order in which a token
 * passes them, a group that it skips left out; of a batch, its last token only. Learns. */
void fm_predictor_token(struct fm_predictor *predictor, int32_t group, const int32_t *experts, int32_t n);

/* Fills probability[n_expert] for the token that the group sees next; the groups before it have seen
 * that token. Changes nothing that matters. */
void fm_predictor_next(struct fm_predictor *predictor, int32_t group, float *probability);
