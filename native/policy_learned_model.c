/* policy_learned_model.c: statistics of use, the score, and one step of learning. Sums
 * are taken in a fixed order, so that the Python twin has the same bits. docs/POLICIES.md has the
 * formulas, where the constants come from, and what else was tried. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "approx.h"
#include "policy_learned.h"

static const float decays[LEARNED_EMAS] = {0.8f, 0.95f, 0.995f};
static const float start_bias = -0.5f;
static const float start_weight[LEARNED_FEATURES] = {0.3f, 0.5f, 0.3f, 0.0f, -0.1f, 0.3f};
static const float oldest = 512.0f;
static const float own_start = 0.75f; /* what is in use is rather used again */
static const float own_rate = 0.01f;
static const float context_rate = 0.003f;
static const float set_rate = 0.1f;
static const float new_row = 5.0f; /* a row that was learned from n times has (1 + this / sqrt(1 + n)) of its rate */
static const float bias_rate = 0.001f;
static const float weight_rate = 0.004f;
static const float most_learned = 1e6f;
enum { MAX_SETS = 4096, MAX_SET_NUMBERS = 65536 };

/* What a first use d + 1 tokens later is worth; worth[LEARNED_HORIZON] is left for later than the
 * horizon. The more tokens' experts the cache holds, the more a late use is worth. */
static void discount(float n_slots, float n_used, float *worth) {
    float by = n_slots > 0.0f ? 1.0f - 0.4f * n_used / n_slots : 0.0f;
    by = by < 0.8f ? 0.8f : by;
    by = by > 0.95f ? 0.95f : by;
    worth[0] = 1.0f;
    for (int32_t d = 1; d <= LEARNED_HORIZON; d++) {
        worth[d] = worth[d - 1] * by;
    }
}

bool learned_statistics_new(struct learned_statistics *statistics, int32_t stride) {
    const size_t n = (size_t)stride;
    statistics->ema = calloc(n * (LEARNED_EMAS + 2), sizeof(float));
    if (statistics->ema == NULL) {
        return false;
    }
    statistics->age = statistics->ema + n * LEARNED_EMAS;
    statistics->count = statistics->age + n;
    statistics->n_used = 1.0f;
    for (size_t e = 0; e < n; e++) {
        statistics->age[e] = oldest;
    }
    return true;
}

void learned_statistics_free(struct learned_statistics *statistics) {
    free(statistics->ema);
}

void learned_statistics_copy(struct learned_statistics *to, const struct learned_statistics *from, int32_t stride) {
    memcpy(to->ema, from->ema, (size_t)stride * (LEARNED_EMAS + 2) * sizeof(float));
    to->n_tokens = from->n_tokens;
    to->n_used = from->n_used;
}

void learned_statistics_add(struct learned_statistics *statistics, int32_t stride, const int32_t *experts, int32_t n) {
    for (int32_t d = 0; d < LEARNED_EMAS; d++) {
        float *ema = statistics->ema + (size_t)d * (size_t)stride;
        const float decay = decays[d];
        for (int32_t e = 0; e < stride; e++) {
            /* never denormal, which some processors compute with slowly */
            ema[e] = ema[e] * decay + 1e-20f;
        }
        for (int32_t i = 0; i < n; i++) {
            ema[experts[i]] += 1.0f - decay;
        }
    }
    float *age = statistics->age;
    for (int32_t e = 0; e < stride; e++) {
        age[e] = age[e] < oldest ? age[e] + 1.0f : oldest;
    }
    for (int32_t i = 0; i < n; i++) {
        age[experts[i]] = 0.0f;
        statistics->count[experts[i]] += 1.0f;
    }
    statistics->n_tokens += 1.0f;
    statistics->n_used = (float)n > statistics->n_used ? (float)n : statistics->n_used;
}

void learned_features(const struct learned_statistics *statistics, int32_t n_expert, int32_t stride,
                      float *restrict features) {
    const float *restrict ema = statistics->ema;
    const float *restrict age = statistics->age;
    const float *restrict count = statistics->count;
    for (int32_t i = 0; i < LEARNED_EMAS * stride; i++) {
        features[i] = fm_log(ema[i] + 0.001f) + 3.0f;
    }
    float *restrict recency = features + (size_t)LEARNED_EMAS * (size_t)stride;
    float *restrict staleness = recency + stride;
    float *restrict frequency = staleness + stride;
    const float scale = 3.0f / (statistics->n_tokens + 1.0f + 0.5f * (float)n_expert / statistics->n_used);
    for (int32_t e = 0; e < stride; e++) {
        recency[e] = 1.0f / (age[e] > 1.0f ? age[e] : 1.0f);
        staleness[e] = fm_log(1.0f + age[e]) - 2.5f;
        frequency[e] = scale * (count[e] + 0.5f);
    }
}

static size_t n_rows(const struct learned_model *model) {
    return (size_t)model->n_context + 2 * (size_t)model->n_sets;
}

bool learned_model_new(struct learned_model *model, int32_t n_expert, int32_t n_context) {
    const size_t stride = ((size_t)n_expert + LEARNED_LANES - 1) / LEARNED_LANES * LEARNED_LANES;
    model->n_expert = n_expert;
    model->stride = (int32_t)stride;
    model->n_context = n_context;
    model->n_sets = MAX_SETS;
    while (model->n_sets > 1 && (size_t)model->n_sets * stride > MAX_SET_NUMBERS) {
        model->n_sets /= 2;
    }
    model->bias = calloc(stride, sizeof(float));
    model->rows = calloc(stride * n_rows(model), sizeof(float));
    model->learned = calloc(n_rows(model), sizeof(float));
    if (model->bias == NULL || model->rows == NULL || model->learned == NULL) {
        return false;
    }
    for (int32_t e = 0; e < n_expert; e++) {
        model->bias[e] = start_bias;
        model->rows[(size_t)e * stride + (size_t)e] = own_start;
    }
    memcpy(model->weight, start_weight, sizeof start_weight);
    return true;
}

void learned_model_free(struct learned_model *model) {
    free(model->bias);
    free(model->rows);
    free(model->learned);
}

int32_t learned_set_row(const struct learned_model *model, bool of_first, const int32_t *experts, int32_t n) {
    uint32_t sum = 0;
    for (int32_t i = 0; i < n; i++) {
        uint32_t x = ((uint32_t)experts[i] + 1u) * 0x9E3779B1u;
        x = (x ^ x >> 15) * 0x85EBCA77u;
        sum += x ^ x >> 13;
    }
    sum = (sum ^ sum >> 16) * 0xC2B2AE3Du;
    const int32_t first = model->n_context + (of_first ? model->n_sets : 0);
    return first + (int32_t)((sum ^ sum >> 15) & (uint32_t)(model->n_sets - 1));
}

size_t learned_model_size(const struct learned_model *model) {
    return (size_t)model->n_expert * (n_rows(model) + 1) + LEARNED_FEATURES + n_rows(model);
}

void learned_model_save(const struct learned_model *model, float *weights) {
    const size_t n = (size_t)model->n_expert;
    memcpy(weights, model->bias, n * sizeof *weights);
    memcpy(weights + n, model->weight, sizeof model->weight);
    weights += n + LEARNED_FEATURES;
    for (size_t r = 0; r < n_rows(model); r++, weights += n) {
        memcpy(weights, model->rows + r * (size_t)model->stride, n * sizeof *weights);
    }
    memcpy(weights, model->learned, n_rows(model) * sizeof *weights);
}

bool learned_model_can_load(const struct learned_model *model, const float *weights) {
    const size_t n = learned_model_size(model);
    for (size_t i = 0; i < n; i++) {
        const float least = i < n - n_rows(model) ? -most_learned : 0.0f;
        if (!(weights[i] >= least && weights[i] <= most_learned)) {
            return false;
        }
    }
    return true;
}

void learned_model_load(struct learned_model *model, const float *weights) {
    const size_t n = (size_t)model->n_expert;
    memcpy(model->bias, weights, n * sizeof *weights);
    memcpy(model->weight, weights + n, sizeof model->weight);
    weights += n + LEARNED_FEATURES;
    for (size_t r = 0; r < n_rows(model); r++, weights += n) {
        memcpy(model->rows + r * (size_t)model->stride, weights, n * sizeof *weights);
    }
    memcpy(model->learned, weights, n_rows(model) * sizeof *weights);
}

void learned_score(const struct learned_model *model, const struct learned_step *step, float *restrict score) {
    const int32_t stride = model->stride;
    const float *restrict f = step->features;
    const float *restrict bias = model->bias;
    const float *w = model->weight;
    for (int32_t e = 0; e < stride; e++) {
        score[e] = bias[e] + w[0] * f[e] + w[1] * f[e + stride] + w[2] * f[e + 2 * stride] + w[3] * f[e + 3 * stride] +
                   w[4] * f[e + 4 * stride] + w[5] * f[e + 5 * stride];
    }
    int32_t i = 0;
    for (; i + 4 <= step->n_rows; i += 4) {
        const float *restrict a = model->rows + (size_t)step->rows[i] * (size_t)stride;
        const float *restrict b = model->rows + (size_t)step->rows[i + 1] * (size_t)stride;
        const float *restrict c = model->rows + (size_t)step->rows[i + 2] * (size_t)stride;
        const float *restrict d = model->rows + (size_t)step->rows[i + 3] * (size_t)stride;
        for (int32_t e = 0; e < stride; e++) {
            score[e] = score[e] + a[e] + b[e] + c[e] + d[e];
        }
    }
    for (; i < step->n_rows; i++) {
        const float *restrict a = model->rows + (size_t)step->rows[i] * (size_t)stride;
        for (int32_t e = 0; e < stride; e++) {
            score[e] += a[e];
        }
    }
}

/* The sum of a[e] b[e], in LEARNED_LANES sums that are added in order. */
static float dot(const float *restrict a, const float *restrict b, int32_t stride) {
    float lanes[LEARNED_LANES] = {0};
    for (int32_t e = 0; e < stride; e += LEARNED_LANES) {
        for (int32_t i = 0; i < LEARNED_LANES; i++) {
            lanes[i] += a[e + i] * b[e + i];
        }
    }
    float sum = 0.0f;
    for (int32_t i = 0; i < LEARNED_LANES; i++) {
        sum += lanes[i];
    }
    return sum;
}

/* A row that has seldom counted is learned faster. */
static void learn_row(struct learned_model *model, int32_t r, const float *restrict error) {
    const float base = r < model->n_expert ? own_rate : r < model->n_context ? context_rate : set_rate;
    const float rate = base * (1.0f + new_row / sqrtf(1.0f + model->learned[r]));
    if (model->learned[r] < most_learned) {
        model->learned[r] += 1.0f;
    }
    float *restrict row = model->rows + (size_t)r * (size_t)model->stride;
    for (int32_t e = 0; e < model->stride; e++) {
        row[e] -= rate * error[e];
    }
}

void learned_learn(struct learned_model *model, const struct learned_step *step, const struct learned_uses *uses,
                   float n_slots, float n_used, const float *score, float *scratch) {
    const int32_t stride = model->stride;
    float worth[LEARNED_HORIZON + 1];
    float *restrict error = scratch;
    float *restrict target = scratch + stride;
    discount(n_slots, n_used, worth);
    for (int32_t e = 0; e < stride; e++) {
        target[e] = worth[LEARNED_HORIZON] * fm_sigmoid(score[e]);
    }
    for (int32_t d = LEARNED_HORIZON; d > 0; d--) {
        for (int32_t i = 0; i < uses->n[d]; i++) {
            target[uses->experts[d][i]] = worth[d - 1];
        }
    }
    /* the stored score of the step is out of date: learning from it is unstable */
    learned_score(model, step, error);
    for (int32_t e = 0; e < stride; e++) {
        error[e] = fm_sigmoid(error[e]) - target[e];
    }
    for (int32_t e = model->n_expert; e < stride; e++) {
        error[e] = 0.0f;
    }
    for (int32_t f = 0; f < LEARNED_FEATURES; f++) {
        const float gradient = dot(error, step->features + (size_t)f * (size_t)stride, stride);
        model->weight[f] -= weight_rate / (float)model->n_expert * gradient;
    }
    float *restrict bias = model->bias;
    for (int32_t e = 0; e < stride; e++) {
        bias[e] -= bias_rate * error[e];
    }
    for (int32_t i = 0; i < step->n_rows; i++) {
        learn_row(model, step->rows[i], error);
    }
}
