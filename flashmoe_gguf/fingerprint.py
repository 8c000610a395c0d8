"""What a model is known by: traces and policy files say which model they were made with."""

from __future__ import annotations

import os
import struct

import xxhash

from flashmoe_gguf.errors import ModelFileError
from flashmoe_gguf.gguf import Header
from flashmoe_gguf.gguf.cursor import shown


def header_fingerprint(header: Header) -> str:
    """XXH3-128 over each shard's size and header, in hex; `Geometry.fingerprint` is a model's.

    Raises ModelFileError when a header cannot be read any more.
    """
    digest = xxhash.xxh3_128()
    for shard in header.shards:
        digest.update(struct.pack("<Q", shard.size_bytes))
        try:
            with open(shard.path, "rb") as file:
                digest.update(file.read(min(shard.data_offset, shard.size_bytes)))
        except OSError as error:
            path = shown(os.fspath(shard.path))
            raise ModelFileError(f"{path}: cannot read: {error.strerror or error}") from None
    return digest.hexdigest()
