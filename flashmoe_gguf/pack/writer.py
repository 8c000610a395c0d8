"""Copies a model's bytes to their places in a packed file. What is done when, others decide."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from flashmoe_gguf.pack.files import open_source, read_chunks, read_exact, write_exact
from flashmoe_gguf.pack.layout import (
    GAP_HEAD,
    SUM_BYTES,
    DenseTensor,
    Layout,
    PackedGroup,
    Source,
    Span,
)
from flashmoe_gguf.pack.steps import Step

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class Writer:
    """Writes into the open files `fds`, the packed file and its stripes, which are all zeros
    where nothing was written before; `targets` are their names.

    `paths` are where the source's files are. Holds one part of one expert at a time. Reading
    raises ModelFileError, writing PackError.
    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        paths: Sequence[Path],
        fds: Sequence[int],
        targets: Sequence[Path],
    ) -> None:
        self._source = source
        self._layout = layout
        self._paths = paths
        self._fds = fds
        self._targets = targets
        self._open: dict[int, int] = {}

    def close(self) -> None:
        """Close the source's files; the target is its owner's."""
        while self._open:
            os.close(self._open.popitem()[1])

    def write_start(self) -> None:
        """The header, the source's headers, and its gaps: all that the model can be told by."""
        self._write(self._layout.header, 0)
        for file, stripe in enumerate(self._layout.stripes, start=1):
            self._write(stripe.header, 0, file)
        for header, offset in zip(self._source.headers, self._layout.header_offsets, strict=True):
            self._write(header, offset)
        for gap in self._layout.gaps:
            for at, span in gap.records():
                data = self._read(span)
                self._write(GAP_HEAD.pack(span.offset, span.nbytes) + data, at)

    def write_step(self, step: Step, on_bytes: Callable[[int], None]) -> None:
        """One step; `on_bytes` is told how many bytes of the source were copied."""
        if step.group is not None:
            self._write_group(step.group, on_bytes)
        for dense in step.dense:
            self._write_dense(dense, on_bytes)

    def _write_dense(self, dense: DenseTensor, on_bytes: Callable[[int], None]) -> None:
        tensor = dense.tensor
        path, fd = self._paths[tensor.shard], self._source_fd(tensor.shard)
        digest = xxhash.xxh3_64()
        for at, data in read_chunks(fd, tensor.nbytes, tensor.offset, path):
            digest.update(data)
            self._write(data, dense.offset + at)
            on_bytes(len(data))
        self._write(struct.pack("<Q", digest.intdigest()), dense.sum_offset)

    def _write_group(self, group: PackedGroup, on_bytes: Callable[[int], None]) -> None:
        sums: list[list[int]] = [[] for _ in group.parts]
        for expert in range(group.n_expert):
            self._announce(group, expert + 1)
            block = group.block(expert)
            for part, its_sums in zip(group.parts, sums, strict=True):
                tensor, nbytes = part.tensor, part.expert_bytes
                data = self._read(Span(tensor.shard, tensor.offset + expert * nbytes, nbytes))
                its_sums.append(xxhash.xxh3_64_intdigest(data))
                self._write(data, block.offset + part.block_offset, block.file)
                on_bytes(nbytes)
        for part, its_sums in zip(group.parts, sums, strict=True):
            at = self._layout.sums_offset + SUM_BYTES * part.first_sum
            self._write(struct.pack(f"<{len(its_sums)}Q", *its_sums), at)

    def _announce(self, group: PackedGroup, expert: int) -> None:
        """Have the system read the next expert while this one is hashed and written."""
        if expert >= group.n_expert or not hasattr(os, "posix_fadvise"):
            return
        for part in group.parts:
            offset = part.tensor.offset + expert * part.expert_bytes
            fd = self._source_fd(part.tensor.shard)
            os.posix_fadvise(fd, offset, part.expert_bytes, os.POSIX_FADV_WILLNEED)

    def _source_fd(self, shard: int) -> int:
        if shard not in self._open:
            self._open[shard] = open_source(self._paths[shard])
        return self._open[shard]

    def _read(self, span: Span) -> bytes:
        path = self._paths[span.shard]
        return read_exact(self._source_fd(span.shard), span.nbytes, span.offset, path)

    def _write(self, data: bytes, offset: int, file: int = 0) -> None:
        write_exact(self._fds[file], data, offset, self._targets[file])
