/* weights.c: what the policy of a stream has learned, out of it and into it. */

#include "stream.h"

uint64_t fm_stream_policy_save(fm_stream *stream, float *weights, uint64_t n) {
    pthread_mutex_lock(&stream->lock);
    uint64_t n_weights = 0;
    if (stream->policy != NULL && stream->policy_type->save != NULL) {
        n_weights = stream->policy_type->save(stream->policy, weights, (size_t)n);
    }
    pthread_mutex_unlock(&stream->lock);
    return n_weights;
}

int32_t fm_stream_policy_load(fm_stream *stream, const float *weights, uint64_t n) {
    if (stream->policy == NULL || stream->policy_type->load == NULL) {
        return fm_fail(FM_BAD_STATE, "there is no policy that learns");
    }
    pthread_mutex_lock(&stream->lock);
    const bool loaded = stream->policy_type->load(stream->policy, weights, (size_t)n);
    pthread_mutex_unlock(&stream->lock);
    if (!loaded) {
        return fm_fail(FM_BAD_ARGUMENT, "policy %s cannot take these %llu weights", stream->policy_type->name,
                       (unsigned long long)n);
    }
    return FM_OK;
}

void fm_stream_policy_freeze(fm_stream *stream, int32_t frozen) {
    pthread_mutex_lock(&stream->lock);
    if (stream->policy != NULL && stream->policy_type->freeze != NULL) {
        stream->policy_type->freeze(stream->policy, frozen != 0);
    }
    pthread_mutex_unlock(&stream->lock);
}
