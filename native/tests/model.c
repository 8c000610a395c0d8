#include "model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct shape blocks = {.n_groups = 2, .n_expert = 8, .n_parts = 3, .part_bytes = {4096, 4096, 4096}, .first_offset = 4096};
const struct shape odd = {.n_groups = 2, .n_expert = 7, .n_parts = 3, .part_bytes = {5008, 9999, 144}, .first_offset = 1056};

/* Stands in for checksum.c, whose library is not part of these tests. */
uint64_t fm_checksum(const void *data, size_t bytes) {
    uint64_t sum = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++) {
        sum = (sum ^ ((const uint8_t *)data)[i]) * 1099511628211u;
    }
    return sum;
}

int32_t add_part(fm_stream *stream, int32_t group, const char *tensor, int32_t file, uint64_t offset, uint64_t bytes) {
    const struct fm_place place = {.file = file, .offset = offset};
    const struct fm_part part = {
        .tensor = tensor, .places = &place, .n_places = 1, .expert_bytes = bytes, .stride = bytes, .type = -1};
    return fm_stream_add_part(stream, group, &part);
}

struct fm_options options_for(int n_workers, int n_ring) {
    return (struct fm_options){
        .io_mode = FM_IO_BUFFERED, .n_workers = n_workers, .n_ring = n_ring, .request_bytes = 1 << 20};
}

/* No two blocks alike, and no shift of one by a few bytes is another. */
static uint8_t byte_at(uint64_t offset) {
    const uint64_t x = (offset + 1) * 0x9E3779B97F4A7C15u;
    return (uint8_t)((x >> 40) ^ (x >> 57));
}

static const char *tensor_name(char *name, size_t bytes, int group, int part) {
    snprintf(name, bytes, "blk.%d.part_%d.weight", group + 10, part);
    return name;
}

static void write_file(const char *path, const uint8_t *bytes, size_t n) {
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    CHECK_EQUAL(fwrite(bytes, 1, n, file), n);
    CHECK_EQUAL(fclose(file), 0);
}

/* Stripe i: what the one file holds, but of the experts e % n == i only, packed together. */
static void write_stripe(struct model *model, const char *name, int i) {
    const struct shape *shape = &model->shape;
    uint8_t *stripe = calloc(1, model->image_bytes + 32 * MAX_GROUPS * FM_MAX_PARTS);
    CHECK(stripe != NULL);
    uint64_t end = shape->first_offset;
    for (int g = 0; g < shape->n_groups; g++) {
        for (int p = 0; p < shape->n_parts; p++) {
            end = (end + 31) & ~(uint64_t)31;
            model->places[g][p][i] = (struct fm_place){.file = i, .offset = end};
            for (int e = i; e < shape->n_expert; e += shape->n_stripes) {
                memcpy(stripe + end, model_bytes(model, g, p, e), shape->part_bytes[p]);
                end += shape->part_bytes[p];
            }
        }
    }
    char stripe_name[64];
    snprintf(stripe_name, sizeof stripe_name, "%s.%d", name, i);
    snprintf(model->stripes[i], sizeof model->stripes[i], "%s", check_path(stripe_name));
    write_file(model->stripes[i], stripe, end);
    free(stripe);
}

void model_write(struct model *model, const struct shape *shape, const char *name) {
    *model = (struct model){.shape = *shape};
    uint64_t end = shape->first_offset;
    for (int g = 0; g < shape->n_groups; g++) {
        for (int p = 0; p < shape->n_parts; p++) {
            end = (end + 31) & ~(uint64_t)31;
            model->offsets[g][p] = end;
            end += shape->part_bytes[p] * (uint64_t)shape->n_expert;
        }
    }
    model->image_bytes = end;
    model->image = malloc(end);
    CHECK(model->image != NULL);
    for (uint64_t i = 0; i < end; i++) {
        model->image[i] = byte_at(i);
    }
    for (int i = 0; i < shape->n_stripes; i++) {
        write_stripe(model, name, i);
    }
    if (shape->n_stripes == 0) {
        snprintf(model->path, sizeof model->path, "%s", check_path(name));
        write_file(model->path, model->image, end);
    }
}

static int add_striped_part(struct model *model, int group, const char *tensor, int part) {
    const uint64_t bytes = model->shape.part_bytes[part];
    const struct fm_part given = {.tensor = tensor,
                                  .places = model->places[group][part],
                                  .n_places = model->shape.n_stripes,
                                  .expert_bytes = bytes,
                                  .stride = bytes,
                                  .type = -1};
    return fm_stream_add_part(model->stream, group, &given);
}

void model_attach(struct model *model, const struct fm_options *options) {
    model->stream = fm_stream_new(options);
    CHECK(model->stream != NULL);
    for (int i = 0; i < model->shape.n_stripes; i++) {
        CHECK_EQUAL(fm_stream_add_file(model->stream, model->stripes[i], i), i);
    }
    if (model->shape.n_stripes == 0) {
        model->file = fm_stream_add_file(model->stream, model->path, 0);
        CHECK(model->file >= 0);
    }
    for (int g = 0; g < model->shape.n_groups; g++) {
        CHECK_EQUAL(fm_stream_add_group(model->stream, g + 10, 0, model->shape.n_expert), g);
        for (int p = 0; p < model->shape.n_parts; p++) {
            char name[64];
            tensor_name(name, sizeof name, g, p);
            if (model->shape.n_stripes > 0) {
                CHECK_EQUAL(add_striped_part(model, g, name, p), p);
                continue;
            }
            CHECK_EQUAL(add_part(model->stream, g, name, model->file, model->offsets[g][p], model->shape.part_bytes[p]), p);
        }
    }
    CHECK_EQUAL(fm_stream_open(model->stream), FM_OK);
}

void model_create(struct model *model, const struct shape *shape, const struct fm_options *options) {
    model_write(model, shape, "model");
    model_attach(model, options);
}

void model_start(struct model *model, int n_slots, const char *policy) {
    int32_t slots[MAX_GROUPS];
    for (int g = 0; g < MAX_GROUPS; g++) {
        slots[g] = n_slots;
    }
    CHECK_EQUAL(fm_stream_start(model->stream, slots, policy), FM_OK);
}

void model_detach(struct model *model) {
    fm_stream_free(model->stream);
    model->stream = NULL;
}

void model_free(struct model *model) {
    model_detach(model);
    free(model->image);
}

const uint8_t *model_bytes(const struct model *model, int group, int part, int expert) {
    return model->image + model->offsets[group][part] + model->shape.part_bytes[part] * (uint64_t)expert;
}

uint64_t model_part_bytes(const struct model *model, int part) {
    return model->shape.part_bytes[part];
}

struct fm_stats model_stats(const struct model *model) {
    struct fm_stats stats;
    fm_stream_stats(model->stream, &stats);
    return stats;
}

struct fm_group_stats model_group(const struct model *model, int group) {
    struct fm_group_stats stats;
    CHECK_EQUAL(fm_stream_group_stats(model->stream, group, &stats), FM_OK);
    return stats;
}

bool model_is_resident(const struct model *model, int group, int expert) {
    return model->stream->groups[group].slot_of[expert] >= 0;
}

void model_verify(const struct model *model) {
    if (fm_stream_verify(model->stream) != FM_OK) {
        check_failed(__FILE__, __LINE__, "verify: %s", fm_last_message());
    }
}

int model_pump_all(const struct model *model) {
    int n = 0;
    while (fm_pump(model->stream, 0)) {
        n++;
    }
    return n;
}

void pass_begin(struct pass *pass, const struct model *model, int group, int part, const int32_t *ids, int n_used,
                int n_tokens, int n_threads) {
    int64_t n_rows[MAX_EXPERTS] = {0};
    *pass = (struct pass){.model = model, .group = group, .part = part};
    for (int i = 0; i < n_used * n_tokens; i++) {
        CHECK(ids[i] >= 0 && ids[i] < model->shape.n_expert);
        pass->n += n_rows[ids[i]]++ == 0;
    }
    const struct fm_routing routing = {
        .ids = (const char *)ids,
        .n_used = n_used,
        .n_tokens = n_tokens,
        .stride_used = sizeof ids[0],
        .stride_token = sizeof ids[0] * (uint64_t)n_used,
    };
    memset(pass->order, 0xff, sizeof pass->order);
    pass->operation = fm_operation_begin(model->stream, group, part, &routing, model->shape.n_expert, n_rows, n_threads,
                                         pass->order);
    /* every expert that has rows, each once */
    for (int i = 0; i < pass->n; i++) {
        CHECK(pass->order[i] >= 0 && pass->order[i] < model->shape.n_expert);
        CHECK(n_rows[pass->order[i]] > 0);
        n_rows[pass->order[i]] = 0;
    }
}

bool pass_is_ready(const struct pass *pass, int i) {
    const struct load *load = pass->operation->entries[i].load;
    return load != NULL && load->state != LOAD_LOADING;
}

int pass_find(const struct pass *pass, int expert) {
    for (int i = 0; i < pass->n; i++) {
        if (pass->order[i] == expert) {
            return i;
        }
    }
    check_failed(__FILE__, __LINE__, "expert %d is not visited", expert);
}

void pass_pump(const struct pass *pass, int i) {
    while (!pass_is_ready(pass, i)) {
        if (!fm_pump(pass->model->stream, 0)) {
            check_failed(__FILE__, __LINE__, "expert %d never comes: nothing is queued", pass->order[i]);
        }
    }
}

bool pass_acquire_or_zeros(const struct pass *pass, int i) {
    const uint8_t *bytes = fm_operation_acquire(pass->operation, i);
    const int expert = pass->order[i];
    const uint64_t n = model_part_bytes(pass->model, pass->part);
    if (memcmp(bytes, model_bytes(pass->model, pass->group, pass->part, expert), n) == 0) {
        return true;
    }
    for (uint64_t k = 0; k < n; k++) {
        if (bytes[k] != 0) {
            check_failed(__FILE__, __LINE__, "wrong bytes for group %d, part %d, expert %d", pass->group, pass->part, expert);
        }
    }
    return false;
}

const void *pass_acquire(const struct pass *pass, int i) {
    const void *bytes = fm_operation_acquire(pass->operation, i);
    if (memcmp(bytes, model_bytes(pass->model, pass->group, pass->part, pass->order[i]),
               model_part_bytes(pass->model, pass->part)) != 0) {
        check_failed(__FILE__, __LINE__, "wrong bytes for group %d, part %d, expert %d", pass->group, pass->part,
                     pass->order[i]);
    }
    return bytes;
}

void pass_release(const struct pass *pass, int i) {
    fm_operation_release(pass->operation, i);
}

void pass_use(const struct pass *pass, int i) {
    pass_pump(pass, i);
    pass_acquire(pass, i);
    pass_release(pass, i);
    model_verify(pass->model);
}

void pass_use_all(const struct pass *pass, int from) {
    for (int i = from; i < pass->n; i++) {
        pass_use(pass, i);
    }
}

void run_part(const struct model *model, int group, int part, const int32_t *ids, int n_used, int n_tokens) {
    struct pass pass;
    pass_begin(&pass, model, group, part, ids, n_used, n_tokens, 1);
    model_verify(model);
    pass_use_all(&pass, 0);
}

void run_group(const struct model *model, int group, const int32_t *ids, int n_used, int n_tokens) {
    for (int p = 0; p < model->shape.n_parts; p++) {
        run_part(model, group, p, ids, n_used, n_tokens);
    }
}
