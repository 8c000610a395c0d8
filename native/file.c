/* file.c: opening and reading one file. Direct I/O keeps experts out of the page cache, which
 * would only hold them a second time and be evicted under the same memory limit. Linux uses
 * O_DIRECT, macOS F_NOCACHE; elsewhere reads are buffered. */

#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* O_DIRECT */
#endif

#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "api.h"
#include "io.h"

struct fm_file {
    int direct;   /* descriptor for aligned direct reads, or -1 */
    int buffered; /* descriptor through the page cache */
    atomic_bool use_direct;
    bool may_fall_back;
    uint64_t size;
};

static int open_direct(const char *path) {
#if defined(O_DIRECT)
    return open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
#elif defined(F_NOCACHE)
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && fcntl(fd, F_NOCACHE, 1) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
#else
    (void)path;
    errno = EINVAL;
    return -1;
#endif
}

static ssize_t read_all(int fd, char *dst, size_t bytes, uint64_t offset, size_t align) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(fd, dst + done, bytes - done, (off_t)(offset + done));
        if (n < 0) {
            if (errno == EINTR) {
                continue;
            }
            return -errno;
        }
        done += (size_t)n;
        /* an odd count from a direct read is the end of the file */
        if (n == 0 || (size_t)n % align != 0) {
            break;
        }
    }
    return (ssize_t)done;
}

/* Some file systems take O_DIRECT at open and refuse the read; ask once. */
static bool direct_works(int fd, uint64_t size) {
    void *probe = NULL;
    if (size == 0 || posix_memalign(&probe, FM_IO_ALIGN, FM_IO_ALIGN) != 0) {
        return false;
    }
    const ssize_t n = pread(fd, probe, FM_IO_ALIGN, 0);
    free(probe);
    return n > 0;
}

struct fm_file *fm_file_open(const char *path, int mode) {
    struct fm_file *file = calloc(1, sizeof *file);
    if (file == NULL) {
        fm_fail(FM_NO_MEMORY, "out of memory opening %s", path);
        return NULL;
    }
    file->direct = -1;
    file->may_fall_back = mode == FM_IO_AUTO;
    file->buffered = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (file->buffered < 0 || fstat(file->buffered, &st) != 0) {
        fm_fail(FM_IO_ERROR, "cannot open %s: %s", path, strerror(errno));
        fm_file_close(file);
        return NULL;
    }
    file->size = (uint64_t)st.st_size;
#if defined(POSIX_FADV_RANDOM)
    /* experts are scattered: read-ahead by the kernel would read what nobody asked for */
    posix_fadvise(file->buffered, 0, 0, POSIX_FADV_RANDOM);
#endif
    if (mode != FM_IO_BUFFERED) {
        file->direct = open_direct(path);
        if (file->direct >= 0 && !direct_works(file->direct, file->size)) {
            close(file->direct);
            file->direct = -1;
        }
        if (file->direct < 0 && mode == FM_IO_DIRECT) {
            fm_fail(FM_IO_ERROR, "direct I/O does not work on %s", path);
            fm_file_close(file);
            return NULL;
        }
    }
    atomic_init(&file->use_direct, file->direct >= 0);
    return file;
}

void fm_file_close(struct fm_file *file) {
    if (file == NULL) {
        return;
    }
    if (file->direct >= 0) {
        close(file->direct);
    }
    if (file->buffered >= 0) {
        close(file->buffered);
    }
    free(file);
}

uint64_t fm_file_size(const struct fm_file *file) {
    return file->size;
}

bool fm_file_is_direct(const struct fm_file *file) {
    return atomic_load(&file->use_direct);
}

ssize_t fm_file_read(struct fm_file *file, void *dst, size_t bytes, uint64_t offset) {
    if (atomic_load_explicit(&file->use_direct, memory_order_relaxed)) {
        const ssize_t n = read_all(file->direct, dst, bytes, offset, FM_IO_ALIGN);
        if (n != -EINVAL || !file->may_fall_back) {
            return n;
        }
        atomic_store(&file->use_direct, false);
    }
    return read_all(file->buffered, dst, bytes, offset, 1);
}

ssize_t fm_file_read_buffered(struct fm_file *file, void *dst, size_t bytes, uint64_t offset) {
    return read_all(file->buffered, dst, bytes, offset, 1);
}
