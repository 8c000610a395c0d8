/* policy_learned_model.c: statistics of use, the score, and one step of learning. The constants are
 * those of the design; sums are taken in a fixed order, so that the Python twin has the same bits. */

#include <stdlib.h>
#include <string.h>

#include "approx.h"
#include "policy_learned.h"

static const float decays[LEARNED_EMAS] = {0.8f, 0.95f, 0.995f};
static const float start_bias = -0.5f;
static const float start_weight[LEARNED_FEATURES] = {0.3f, 0.5f, 0.3f, 0.0f, -0.1f, 0.3f};
static const float oldest = 512.0f;
static const float row_rate = 0.003f;
static const float bias_rate = 0.001f;
static const float weight_rate = 0.004f;
/* what a first use d tokens later is worth: .9^(d-1); .9^4 is left for later than the horizon */
static const float worth[LEARNED_HORIZON + 1] = {1.0f, 0.9f, 0.81f, 0.729f, 0.6561f};

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

bool learned_model_new(struct learned_model *model, int32_t n_expert, int32_t n_rows) {
    const size_t stride = ((size_t)n_expert + LEARNED_LANES - 1) / LEARNED_LANES * LEARNED_LANES;
    model->n_expert = n_expert;
    model->stride = (int32_t)stride;
    model->n_rows = n_rows;
    model->bias = calloc(stride, sizeof(float));
    model->rows = calloc(stride * (size_t)n_rows, sizeof(float));
    if (model->bias == NULL || model->rows == NULL) {
        return false;
    }
    for (int32_t e = 0; e < n_expert; e++) {
        model->bias[e] = start_bias;
    }
    memcpy(model->weight, start_weight, sizeof start_weight);
    return true;
}

void learned_model_free(struct learned_model *model) {
    free(model->bias);
    free(model->rows);
}

size_t learned_model_size(const struct learned_model *model) {
    return (size_t)model->n_expert * ((size_t)model->n_rows + 1) + LEARNED_FEATURES;
}

void learned_model_save(const struct learned_model *model, float *weights) {
    const size_t n = (size_t)model->n_expert;
    memcpy(weights, model->bias, n * sizeof *weights);
    memcpy(weights + n, model->weight, sizeof model->weight);
    weights += n + LEARNED_FEATURES;
    for (int32_t r = 0; r < model->n_rows; r++, weights += n) {
        memcpy(weights, model->rows + (size_t)r * (size_t)model->stride, n * sizeof *weights);
    }
}

void learned_model_load(struct learned_model *model, const float *weights) {
    const size_t n = (size_t)model->n_expert;
    memcpy(model->bias, weights, n * sizeof *weights);
    memcpy(model->weight, weights + n, sizeof model->weight);
    weights += n + LEARNED_FEATURES;
    for (int32_t r = 0; r < model->n_rows; r++, weights += n) {
        memcpy(model->rows + (size_t)r * (size_t)model->stride, weights, n * sizeof *weights);
    }
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

void learned_learn(struct learned_model *model, const struct learned_step *step, const struct learned_uses *uses,
                   const float *score, float *scratch) {
    const int32_t stride = model->stride;
    float *restrict error = scratch;
    float *restrict target = scratch + stride;
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
    /* those in use could not leave */
    for (int32_t i = 0; i < uses->n[0]; i++) {
        error[uses->experts[0][i]] = 0.0f;
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
        error[e] *= row_rate;
    }
    for (int32_t i = 0; i < step->n_rows; i++) {
        float *restrict row = model->rows + (size_t)step->rows[i] * (size_t)stride;
        for (int32_t e = 0; e < stride; e++) {
            row[e] -= error[e];
        }
    }
}
