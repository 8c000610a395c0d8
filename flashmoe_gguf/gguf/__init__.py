"""A strict reader of GGUF headers: what is in a model file, and where each tensor's bytes lie.

It owns the file format: magic, metadata, tensor table, shards. It reads no tensor data and
knows nothing about experts. gguf-py's reader maps the whole file, does not follow shards and
answers a damaged file with whatever numpy raises; this one reads the header alone, front to
back, checks every count and length against the bytes that are left before it allocates for
them, and answers every damaged file with a `ModelFileError`.

| part     | layout (little endian)                                                        |
|----------|-------------------------------------------------------------------------------|
| start    | "GGUF", u32 version, u64 tensors, u64 keys                                    |
| a string | u64 bytes, UTF-8                                                              |
| a key    | string name, u32 type, value; an array is u32 type, u64 count, values         |
| a tensor | string name, u32 dims, u64 per dim (fastest first), u32 ggml type, u64 offset |
| data     | starts at the next multiple of `general.alignment` (32 if absent)             |

Source: llama.cpp's ggml/src/gguf.cpp and the GGUF specification in ggml's docs/gguf.md. Where
they leave room, the rules here are those of gguf.cpp, so that a header read here is one that
llama.cpp will load: tensor offsets must be the running sum of the padded sizes, and tensor
names shorter than 64 bytes.
"""

from flashmoe_gguf.gguf.header import (
    GGML_TYPES,
    ArraySummary,
    Header,
    Scalar,
    Shard,
    TensorInfo,
    Value,
)
from flashmoe_gguf.gguf.shards import read_header

__all__ = [
    "GGML_TYPES",
    "ArraySummary",
    "Header",
    "Scalar",
    "Shard",
    "TensorInfo",
    "Value",
    "read_header",
]
