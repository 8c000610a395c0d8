/* fill.c: when every expert of a group has a slot, they are all read in the background, so that a model
 * that fits becomes as resident as it would be in llama.cpp. A few experts at a time, behind all that
 * operations wait for. */

#include "stream.h"

enum { EXPERTS_AT_ONCE = 4 };

/* Starts one expert that is not resident; false when there is none left. */
static bool fill_one(struct fm_stream *stream) {
    for (; stream->fill_group < stream->n_groups; stream->fill_group++, stream->fill_expert = 0) {
        struct group *group = &stream->groups[stream->fill_group];
        if (fm_slots_open(group) < group->n_expert || group->n_bound == 0) {
            continue;
        }
        while (stream->fill_expert < group->n_expert) {
            const int32_t expert = stream->fill_expert++;
            if (group->slot_of[expert] >= 0) {
                continue;
            }
            const int32_t s = fm_slots_insert(stream, stream->fill_group, expert, false);
            if (s < 0) {
                continue;
            }
            for (int32_t p = 0; p < group->n_parts; p++) {
                struct load *load = &group->slots[s].loads[p];
                load->fills = true;
                stream->n_filling++;
                fm_load_start(load, stream->fill_group, p, expert, FM_PRIORITY_AHEAD);
            }
            return true;
        }
    }
    return false;
}

void fm_fill_more(struct fm_stream *stream) {
    while (stream->filling && stream->n_filling < EXPERTS_AT_ONCE * FM_MAX_PARTS) {
        if (!fill_one(stream)) {
            stream->filling = false;
        }
    }
}

void fm_stream_fill(fm_stream *stream) {
    pthread_mutex_lock(&stream->lock);
    stream->filling = stream->policy != NULL;
    stream->fill_group = stream->fill_expert = 0;
    fm_fill_more(stream);
    pthread_mutex_unlock(&stream->lock);
}
