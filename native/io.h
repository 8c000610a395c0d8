/* io.h: reads with priorities, done by a small pool of sleeping threads per drive.
 *
 * The caller owns the memory and says what to do when a read ends. Files are opened here, direct
 * where that works. No knowledge of experts. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "api.h"

enum { FM_IO_ALIGN = 4096 };

enum fm_priority {
    FM_PRIORITY_DEMAND = 0, /* an operation waits for it */
    FM_PRIORITY_AHEAD = 1,  /* will be wanted soon; can be cancelled while it is queued */
    FM_PRIORITY_IDLE = 2,   /* a guess: only while nothing else is queued, two at a time; can be cancelled */
    FM_PRIORITY_COUNT = 3,
};

struct fm_io;
struct fm_io_counters {
    uint64_t reads;
    uint64_t bytes;
    int files_direct;
    int files_buffered;
};

/* Called once per request, from a worker. error: 0, a positive errno, or FM_IO_SHORT (FM_IO_CORRUPT
 * is the caller's, who knows the checksums). */
enum { FM_IO_SHORT = -1, FM_IO_CORRUPT = -2 };
typedef void (*fm_io_done)(void *owner, int error);

struct fm_io *fm_io_new(int mode, int n_workers, fm_io_done done);
/* Joins the workers; every request has ended by then. */
void fm_io_free(struct fm_io *io);

/* Returns the file's index or -1 with a message. drive: one that is there, or the next number, which
 * gets n_workers threads of its own; drive 0 is there from the start. Before the first submit. */
int fm_io_open(struct fm_io *io, const char *path, int drive);
uint64_t fm_io_file_size(const struct fm_io *io, int file);

/* Reads [offset, offset + bytes), offset and bytes multiples of FM_IO_ALIGN, as does dst; less is
 * enough if at least `need` bytes arrive (the file may end inside the last block). False: no memory. */
bool fm_io_submit(struct fm_io *io, enum fm_priority priority, int file, uint64_t offset, size_t bytes,
                  size_t need, void *dst, void *owner);
/* Takes this owner's queued requests that are no DEMAND out and returns how many; those being read go on. */
int fm_io_cancel(struct fm_io *io, const void *owner);
/* Moves this owner's queued requests that are less urgent up to this priority. */
void fm_io_promote(struct fm_io *io, const void *owner, enum fm_priority priority);

/* Reads in the calling thread, buffered, any alignment. Returns 0, an errno, or FM_IO_SHORT. */
int fm_io_read_now(struct fm_io *io, int file, void *dst, size_t bytes, uint64_t offset);

void fm_io_count(struct fm_io *io, struct fm_io_counters *counters);

void fm_io_set_fault(struct fm_io *io, const struct fm_fault *fault);
void fm_io_release_held(struct fm_io *io);
int fm_io_held(struct fm_io *io);
bool fm_io_pump(struct fm_io *io, int index);
