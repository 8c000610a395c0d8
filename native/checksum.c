/* checksum.c: the hash of packed files, XXH3-64 from the library in llama.cpp's archive. Known answers
 * are in tests/test_streaming_packed.py, through files that the Python side has packed. */

#define XXH_INLINE_ALL
#include "xxhash.h"

#include "stream.h"

uint64_t fm_checksum(const void *data, size_t bytes) {
    return XXH3_64bits(data, bytes);
}
