/* file.h: one model file, read at offsets, direct or through the page cache. The platform seam. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct fm_file;

/* mode: enum fm_io_mode. NULL with a message when it cannot be opened that way. */
struct fm_file *fm_file_open(const char *path, int mode);
void fm_file_close(struct fm_file *file);
uint64_t fm_file_size(const struct fm_file *file);
bool fm_file_is_direct(const struct fm_file *file);

/* One aligned read; bytes read (short only at the end of the file) or -errno. */
ssize_t fm_file_read(struct fm_file *file, void *dst, size_t bytes, uint64_t offset);
/* The same through the page cache, any alignment. */
ssize_t fm_file_read_buffered(struct fm_file *file, void *dst, size_t bytes, uint64_t offset);
