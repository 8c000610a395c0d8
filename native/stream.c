/* stream.c: the life of an fm_stream: described, opened, started, asked, freed. */

#include "stream.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_RING = 4096 };

static size_t align_up(size_t n) {
    return (n + FM_IO_ALIGN - 1) & ~(size_t)(FM_IO_ALIGN - 1);
}

fm_stream *fm_stream_new(const struct fm_options *options) {
    if (options->n_ring < 2 || options->n_ring > MAX_RING || options->request_bytes == 0 || options->request_bytes % FM_IO_ALIGN != 0 ||
        options->io_mode < FM_IO_AUTO || options->io_mode > FM_IO_BUFFERED || options->verify < FM_VERIFY_FIRST ||
        options->verify > FM_VERIFY_OFF) {
        fm_fail(FM_BAD_ARGUMENT, "bad options: %d ring buffers, requests of %u bytes, I/O mode %d", options->n_ring,
                options->request_bytes, options->io_mode);
        return NULL;
    }
    struct fm_stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) {
        fm_fail(FM_NO_MEMORY, "out of memory");
        return NULL;
    }
    stream->options = *options;
    stream->last_group = stream->passed = -1;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->landed, NULL);
    stream->io = fm_io_new(options->io_mode, options->n_workers, fm_load_ended);
    if (stream->io == NULL) {
        fm_stream_free(stream);
        return NULL;
    }
    return stream;
}

static bool is_described(const struct fm_stream *stream) {
    return stream->ring == NULL;
}

int32_t fm_stream_add_file(fm_stream *stream, const char *path, int32_t drive) {
    if (!is_described(stream)) {
        fm_fail(FM_BAD_STATE, "the stream is open already");
        return -1;
    }
    return fm_io_open(stream->io, path, drive);
}

int32_t fm_stream_add_group(fm_stream *stream, int32_t layer, int32_t family, int32_t n_expert) {
    if (!is_described(stream) || n_expert <= 0) {
        fm_fail(FM_BAD_ARGUMENT, "bad group of %d experts in layer %d", n_expert, layer);
        return -1;
    }
    struct group *groups = realloc(stream->groups, ((size_t)stream->n_groups + 1) * sizeof *groups);
    if (groups == NULL) {
        fm_fail(FM_NO_MEMORY, "out of memory");
        return -1;
    }
    stream->groups = groups;
    struct group *group = &groups[stream->n_groups];
    *group = (struct group){.layer = layer, .family = family, .n_expert = n_expert, .lead = -1, .last_part = -1, .next_group = -1};
    for (int32_t p = 0; p < FM_MAX_PARTS; p++) {
        group->next_part[p] = -1;
    }
    if (n_expert > stream->max_expert) {
        stream->max_expert = n_expert;
    }
    return stream->n_groups++;
}

/* Do all experts of place i, of which there may be none, lie inside the file? */
static bool fits_file(uint64_t size, int32_t n_expert, const struct fm_part *part, int32_t i) {
    const uint64_t n = (uint64_t)(n_expert - i + part->n_places - 1) / (uint64_t)part->n_places;
    const uint64_t offset = part->places[i].offset;
    return i >= n_expert ||
           (part->stride >= part->expert_bytes && offset <= size && part->expert_bytes <= size - offset &&
            (n == 1 || part->stride <= (size - offset - part->expert_bytes) / (n - 1)));
}

static bool copy_sums(struct part *part, const uint64_t *sums, int32_t n_expert) {
    part->sums = malloc((size_t)n_expert * sizeof *part->sums);
    part->verified = calloc((size_t)n_expert, sizeof *part->verified);
    if (part->sums == NULL || part->verified == NULL) {
        free(part->sums);
        free(part->verified);
        return false;
    }
    memcpy(part->sums, sums, (size_t)n_expert * sizeof *part->sums);
    return true;
}

int32_t fm_stream_add_part(fm_stream *stream, int32_t index, const struct fm_part *given) {
    struct fm_io_counters files;
    fm_io_count(stream->io, &files);
    if (!is_described(stream) || index < 0 || index >= stream->n_groups ||
        stream->groups[index].n_parts >= FM_MAX_PARTS || given->expert_bytes == 0 || given->n_places < 1 ||
        given->n_places > FM_MAX_PLACES ||
        strlen(given->tensor) >= sizeof stream->groups[index].parts[0].tensor) {
        fm_fail(FM_BAD_ARGUMENT, "bad part %s", given->tensor);
        return -1;
    }
    struct group *group = &stream->groups[index];
    bool aligned = given->stride % FM_IO_ALIGN == 0;
    for (int32_t i = 0; i < given->n_places; i++) {
        const int32_t file = given->places[i].file;
        if (file < 0 || file >= files.files_direct + files.files_buffered) {
            fm_fail(FM_BAD_ARGUMENT, "bad part %s: there is no file %d", given->tensor, file);
            return -1;
        }
        if (!fits_file(fm_io_file_size(stream->io, file), group->n_expert, given, i)) {
            fm_fail(FM_BAD_ARGUMENT, "%s lies outside its file", given->tensor);
            return -1;
        }
        aligned = aligned && given->places[i].offset % FM_IO_ALIGN == 0;
    }
    struct part part = {
        .n_places = given->n_places,
        .expert_bytes = given->expert_bytes,
        .stride = given->stride,
        .type = given->type,
        .ne0 = given->ne0,
        .ne1 = given->ne1,
        .region_offset = group->slot_bytes,
        /* the expert may begin anywhere inside its first block */
        .region_bytes = align_up((size_t)given->expert_bytes + FM_IO_ALIGN - 1),
    };
    if (aligned) {
        part.region_bytes = align_up((size_t)given->expert_bytes);
    }
    if (given->sums != NULL && !copy_sums(&part, given->sums, group->n_expert)) {
        fm_fail(FM_NO_MEMORY, "out of memory for the checksums of %s", given->tensor);
        return -1;
    }
    strcpy(part.tensor, given->tensor);
    memcpy(part.places, given->places, (size_t)given->n_places * sizeof *given->places);
    group->parts[group->n_parts] = part;
    group->slot_bytes += part.region_bytes;
    if (part.region_bytes > stream->max_region_bytes) {
        stream->max_region_bytes = part.region_bytes;
    }
    return group->n_parts++;
}

uint64_t fm_stream_slot_bytes(const fm_stream *stream, int32_t group) {
    return group >= 0 && group < stream->n_groups ? stream->groups[group].slot_bytes : 0;
}

uint64_t fm_stream_ring_bytes(const fm_stream *stream) {
    return (uint64_t)stream->max_region_bytes * (uint64_t)stream->options.n_ring;
}

static void init_load(struct fm_stream *stream, struct load *load, uint8_t *region, struct ring_buffer *ring) {
    *load = (struct load){.stream = stream, .region = region, .ring = ring, .expert = -1};
}

static bool open_group(struct group *group) {
    group->slot_of = malloc((size_t)group->n_expert * sizeof *group->slot_of);
    group->may_leave = malloc((size_t)group->n_expert);
    group->seen = calloc((size_t)group->n_expert, sizeof *group->seen);
    group->in_batch = malloc((size_t)group->n_expert);
    group->keep = calloc((size_t)group->n_expert, 1);
    group->uses = calloc((size_t)group->n_expert, sizeof *group->uses);
    if (group->slot_of == NULL || group->may_leave == NULL || group->seen == NULL || group->in_batch == NULL ||
        group->keep == NULL || group->uses == NULL) {
        return false;
    }
    for (int32_t e = 0; e < group->n_expert; e++) {
        group->slot_of[e] = -1;
        group->in_batch[e] = 1; /* until seen, any of them may be */
    }
    return true;
}

int32_t fm_stream_open(fm_stream *stream) {
    if (!is_described(stream) || stream->n_groups == 0 || stream->max_region_bytes == 0) {
        return fm_fail(FM_BAD_STATE, "nothing to stream, or open already");
    }
    for (int32_t g = 0; g < stream->n_groups; g++) {
        if (!open_group(&stream->groups[g])) {
            return fm_fail(FM_NO_MEMORY, "out of memory");
        }
    }
    stream->ring_memory_bytes = (size_t)fm_stream_ring_bytes(stream);
    stream->ring_memory = fm_memory_new(stream->ring_memory_bytes);
    stream->zeros = fm_memory_new_zeros(stream->max_region_bytes);
    stream->zeros_operation = calloc(1, sizeof *stream->zeros_operation);
    struct ring_buffer *ring = calloc((size_t)stream->options.n_ring, sizeof *ring);
    if (stream->ring_memory == NULL || stream->zeros == NULL || stream->zeros_operation == NULL || ring == NULL) {
        free(ring);
        return fm_fail(FM_NO_MEMORY, "no memory for a ring of %zu bytes", stream->ring_memory_bytes);
    }
    stream->zeros_operation->stream = stream;
    stream->stats.ring_bytes = stream->ring_memory_bytes;
    for (int32_t i = 0; i < stream->options.n_ring; i++) {
        init_load(stream, &ring[i].load, stream->ring_memory + (size_t)i * stream->max_region_bytes, &ring[i]);
        ring[i].next = stream->ring_free;
        stream->ring_free = &ring[i];
    }
    stream->ring = ring;
    return FM_OK;
}

static int32_t new_slots(struct fm_stream *stream, struct group *group, int32_t n, uint8_t *memory) {
    group->slots = calloc((size_t)n, sizeof *group->slots);
    if (group->slots == NULL) {
        return fm_fail(FM_NO_MEMORY, "out of memory");
    }
    for (int32_t s = 0; s < n; s++) {
        struct slot *slot = &group->slots[s];
        slot->expert = -1;
        for (int32_t p = 0; p < group->n_parts; p++) {
            init_load(stream, &slot->loads[p], memory + (size_t)s * group->slot_bytes + group->parts[p].region_offset, NULL);
        }
    }
    group->n_slots = n;
    return FM_OK;
}

static struct fm_policy *new_policy(struct fm_stream *stream, const int32_t *n_slots, struct fm_foreign_policy *foreign) {
    int32_t *n_expert = malloc((size_t)stream->n_groups * sizeof *n_expert);
    if (n_expert == NULL) {
        return NULL;
    }
    for (int32_t g = 0; g < stream->n_groups; g++) {
        n_expert[g] = stream->groups[g].n_expert;
    }
    const struct fm_policy_setup setup = {.n_groups = stream->n_groups, .n_expert = n_expert, .n_slots = n_slots};
    struct fm_policy *policy = foreign != NULL ? fm_foreign_new(foreign, &setup) : stream->policy_type->create(&setup);
    free(n_expert);
    return policy;
}

static int32_t start(fm_stream *stream, const int32_t *n_slots, const struct fm_policy_type *type,
                     struct fm_foreign_policy *foreign) {
    if (stream->ring == NULL || stream->policy != NULL) {
        return fm_fail(FM_BAD_STATE, "the stream is not open, or started already");
    }
    size_t bytes = 0;
    for (int32_t g = 0; g < stream->n_groups; g++) {
        if (n_slots[g] < 0 || n_slots[g] > stream->groups[g].n_expert) {
            return fm_fail(FM_BAD_ARGUMENT, "%d slots for %d experts", n_slots[g], stream->groups[g].n_expert);
        }
        bytes += (size_t)n_slots[g] * stream->groups[g].slot_bytes;
    }
    stream->policy_type = type;
    stream->policy = new_policy(stream, n_slots, foreign);
    if (stream->policy == NULL) {
        return fm_fail(FM_NO_MEMORY, "out of memory for policy %s", type->name);
    }
    if (bytes == 0) {
        return FM_OK;
    }
    stream->slot_memory = fm_memory_new(bytes);
    if (stream->slot_memory == NULL) {
        return FM_NO_MEMORY;
    }
    stream->slot_memory_bytes = stream->stats.slot_bytes = bytes;
    uint8_t *memory = stream->slot_memory;
    for (int32_t g = 0; g < stream->n_groups; g++) {
        struct group *group = &stream->groups[g];
        if (n_slots[g] > 0 && new_slots(stream, group, n_slots[g], memory) != FM_OK) {
            return FM_NO_MEMORY;
        }
        memory += (size_t)n_slots[g] * group->slot_bytes;
    }
    return FM_OK;
}

int32_t fm_stream_start(fm_stream *stream, const int32_t *n_slots, const char *policy) {
    const struct fm_policy_type *type = fm_policy_find(policy);
    if (type == NULL) {
        return fm_fail(FM_BAD_ARGUMENT, "there is no eviction policy '%s'", policy);
    }
    return start(stream, n_slots, type, NULL);
}

int32_t fm_stream_start_foreign(fm_stream *stream, const int32_t *n_slots, struct fm_foreign_policy *policy) {
    return start(stream, n_slots, &fm_policy_foreign, policy);
}

void fm_stream_stats(fm_stream *stream, struct fm_stats *stats) {
    struct fm_io_counters io;
    pthread_mutex_lock(&stream->lock);
    *stats = stream->stats;
    pthread_mutex_unlock(&stream->lock);
    fm_io_count(stream->io, &io);
    stats->read_bytes = io.bytes;
    stats->reads = io.reads;
    stats->files_direct = io.files_direct;
    stats->files_buffered = io.files_buffered;
}

int32_t fm_stream_group_stats(fm_stream *stream, int32_t index, struct fm_group_stats *stats) {
    if (index < 0 || index >= stream->n_groups) {
        return fm_fail(FM_BAD_ARGUMENT, "there is no group %d", index);
    }
    pthread_mutex_lock(&stream->lock);
    const struct group *group = &stream->groups[index];
    *stats = (struct fm_group_stats){
        .layer = group->layer,
        .family = group->family,
        .n_expert = group->n_expert,
        .n_slots = fm_slots_open(group),
        .n_resident = group->n_resident,
        .n_bound = group->n_bound,
        .lookups = group->lookups,
        .hits = group->hits,
        .evicted = group->evicted,
    };
    pthread_mutex_unlock(&stream->lock);
    return FM_OK;
}

int32_t fm_stream_experts(fm_stream *stream, int32_t index, uint8_t *resident, uint64_t *uses) {
    if (index < 0 || index >= stream->n_groups || stream->ring == NULL) {
        return fm_fail(FM_BAD_ARGUMENT, "there is no group %d, or the stream is not open", index);
    }
    pthread_mutex_lock(&stream->lock);
    const struct group *group = &stream->groups[index];
    for (int32_t e = 0; e < group->n_expert; e++) {
        resident[e] = group->slot_of[e] >= 0;
        uses[e] = group->uses[e];
    }
    pthread_mutex_unlock(&stream->lock);
    return FM_OK;
}

int32_t fm_stream_take_error(fm_stream *stream, struct fm_error *error) {
    pthread_mutex_lock(&stream->lock);
    const int32_t had = stream->error.count > 0;
    *error = stream->error;
    stream->error = (struct fm_error){0};
    pthread_mutex_unlock(&stream->lock);
    return had;
}

int32_t fm_stream_verify(fm_stream *stream) {
    pthread_mutex_lock(&stream->lock);
    uint64_t resident = 0;
    int32_t bad = -1;
    for (int32_t g = 0; g < stream->n_groups && bad < 0; g++) {
        resident += (uint64_t)stream->groups[g].n_resident * stream->groups[g].slot_bytes;
        if (stream->ring != NULL && !fm_slots_verify(stream, g)) {
            bad = g;
        }
    }
    const bool ring = fm_ring_verify(stream);
    const bool bytes = resident == stream->stats.resident_bytes || bad >= 0;
    pthread_mutex_unlock(&stream->lock);
    if (bad >= 0) {
        return fm_fail(FM_BAD_STATE, "slots of group %d are inconsistent", bad);
    }
    if (!ring || !bytes) {
        return fm_fail(FM_BAD_STATE, "%s is inconsistent", ring ? "the count of resident bytes" : "the ring");
    }
    return FM_OK;
}

void fm_stream_free(fm_stream *stream) {
    if (stream == NULL) {
        return;
    }
    pthread_mutex_lock(&stream->lock);
    stream->filling = false;
    pthread_mutex_unlock(&stream->lock);
    fm_io_free(stream->io); /* no load ends after this */
    for (int32_t g = 0; g < stream->n_groups; g++) {
        struct group *group = &stream->groups[g];
        for (int32_t p = 0; p < group->n_parts; p++) {
            free(group->parts[p].sums);
            free(group->parts[p].verified);
        }
        free(group->slots);
        free(group->slot_of);
        free(group->may_leave);
        free(group->seen);
        free(group->in_batch);
        free(group->keep);
        free(group->uses);
    }
    free(stream->groups);
    fm_lookahead_free(stream->lookahead);
    fm_window_free(stream->window);
    fm_trace_stop(stream);
    if (stream->policy != NULL) {
        stream->policy_type->destroy(stream->policy);
    }
    for (struct operation *op = stream->idle, *next; op != NULL; op = next) {
        next = op->next;
        free(op);
    }
    free(stream->zeros_operation);
    fm_memory_free(stream->slot_memory, stream->slot_memory_bytes);
    fm_memory_free(stream->ring_memory, stream->ring_memory_bytes);
    fm_memory_free(stream->zeros, stream->max_region_bytes);
    free(stream->ring);
    pthread_cond_destroy(&stream->landed);
    pthread_mutex_destroy(&stream->lock);
    free(stream);
}

void fm_fault_set(fm_stream *stream, const struct fm_fault *fault) {
    fm_io_set_fault(stream->io, fault);
}

void fm_fault_release(fm_stream *stream) {
    fm_io_release_held(stream->io);
}

int32_t fm_fault_held(fm_stream *stream) {
    return fm_io_held(stream->io);
}

int32_t fm_pump(fm_stream *stream, int32_t index) {
    return fm_io_pump(stream->io, index);
}
