/* model.h: a model file whose every byte is known, a stream over it, and operations that check the
 * bytes they get. Tests look into stream.h's structs; the library itself never knows. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "check.h"
#include "stream.h"

enum { MAX_GROUPS = 4, MAX_EXPERTS = 64 };

/* All groups alike. Parts lie one after the other from first_offset on, each at a multiple of 32. */
struct shape {
    int n_groups;
    int n_expert;
    int n_parts;
    uint64_t part_bytes[FM_MAX_PARTS]; /* of one expert */
    uint64_t first_offset;
    int n_stripes; /* 0: one file */
};

struct model {
    struct shape shape;
    fm_stream *stream;
    char path[512]; /* of the one file */
    uint8_t *image; /* what the one file holds; of stripes, what it would hold */
    size_t image_bytes;
    uint64_t offsets[MAX_GROUPS][FM_MAX_PARTS];
    int file;
    char stripes[FM_MAX_PLACES][512]; /* paths; stripe i is on drive i */
    struct fm_place places[MAX_GROUPS][FM_MAX_PARTS][FM_MAX_PLACES];
};

/* Expert parts of one block each, aligned: one part, one read. */
extern const struct shape blocks;
/* Parts of odd sizes, at offsets that are aligned to 32 only, up to the last byte of the file. */
extern const struct shape odd;

/* A part of a stock file: one expert after the other, nothing to check against. */
int32_t add_part(fm_stream *stream, int32_t group, const char *tensor, int32_t file, uint64_t offset, uint64_t bytes);

/* Options that most tests share: buffered, no workers, requests of 1 MiB. */
struct fm_options options_for(int n_workers, int n_ring);

/* Writes the file or the stripes; describes it to a new stream and opens that. */
void model_create(struct model *model, const struct shape *shape, const struct fm_options *options);
/* Only the file; model_attach can make several streams over it. */
void model_write(struct model *model, const struct shape *shape, const char *name);
void model_attach(struct model *model, const struct fm_options *options);
/* The same number of slots for every group. */
void model_start(struct model *model, int n_slots, const char *policy);
/* Frees the stream but keeps the image. */
void model_detach(struct model *model);
void model_free(struct model *model);

const uint8_t *model_bytes(const struct model *model, int group, int part, int expert);
uint64_t model_part_bytes(const struct model *model, int part);
struct fm_stats model_stats(const struct model *model);
struct fm_group_stats model_group(const struct model *model, int group);
bool model_is_resident(const struct model *model, int group, int expert);
void model_verify(const struct model *model);
/* Runs everything that is queued; returns how many reads that were. */
int model_pump_all(const struct model *model);

/* One operation. ids [n_tokens][n_used]. */
struct pass {
    const struct model *model;
    struct operation *operation;
    int group;
    int part;
    int n; /* experts to visit */
    int32_t order[MAX_EXPERTS];
};
void pass_begin(struct pass *pass, const struct model *model, int group, int part, const int32_t *ids, int n_used,
                int n_tokens, int n_threads);
/* What acquire(i) would wait for has landed. */
bool pass_is_ready(const struct pass *pass, int i);
/* Position of an expert in the order; fails the test when it is not there. */
int pass_find(const struct pass *pass, int expert);
/* Without workers: runs queued reads, in their order, until expert i is there. Nothing left to run is a deadlock. */
void pass_pump(const struct pass *pass, int i);
/* acquire: the right bytes, or the test fails. */
const void *pass_acquire(const struct pass *pass, int i);
/* acquire: the right bytes (true), zeros (false), or the test fails. */
bool pass_acquire_or_zeros(const struct pass *pass, int i);
void pass_release(const struct pass *pass, int i);
/* pump, acquire, release: one expert; all of them from `from` on. One thread. */
void pass_use(const struct pass *pass, int i);
void pass_use_all(const struct pass *pass, int from);

/* One operation from begin to end; all parts of a group, one after the other. No workers. */
void run_part(const struct model *model, int group, int part, const int32_t *ids, int n_used, int n_tokens);
void run_group(const struct model *model, int group, const int32_t *ids, int n_used, int n_tokens);
