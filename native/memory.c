/* memory.c: memory for slots and ring. Reserved once and kept: giving every evicted slot back to the
 * kernel costs more in page faults than it saves. Only when memory is short, slots are. */

#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "stream.h"

uint8_t *fm_memory_new(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        fm_fail(FM_NO_MEMORY, "cannot reserve %zu bytes: %s", bytes, strerror(errno));
        return NULL;
    }
#if defined(MADV_HUGEPAGE)
    madvise(memory, bytes, MADV_HUGEPAGE); /* only advice: small pages work as well, slower */
#endif
    return memory;
}

uint8_t *fm_memory_new_zeros(size_t bytes) {
    /* read only and never touched by anybody else: the kernel's zero page, whatever the size */
    void *memory = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        fm_fail(FM_NO_MEMORY, "cannot reserve %zu bytes: %s", bytes, strerror(errno));
        return NULL;
    }
    return memory;
}

void fm_memory_drop(uint8_t *memory, size_t bytes) {
#if defined(MADV_DONTNEED)
    const uintptr_t page = FM_IO_ALIGN;
    const uintptr_t begin = ((uintptr_t)memory + page - 1) & ~(page - 1);
    const uintptr_t end = ((uintptr_t)memory + bytes) & ~(page - 1);
    if (begin < end) {
        madvise((void *)begin, end - begin, MADV_DONTNEED);
    }
#else
    (void)memory, (void)bytes;
#endif
}

void fm_memory_free(uint8_t *memory, size_t bytes) {
    if (memory != NULL) {
        munmap(memory, bytes);
    }
}
