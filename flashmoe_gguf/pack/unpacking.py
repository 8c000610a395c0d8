"""From a packed file back to the files that it was made from, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from flashmoe_gguf.errors import ModelFileError, PackError
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.pack.files import (
    open_target,
    opened,
    read_chunks,
    read_exact,
    require_space,
    sync_folder,
    write_exact,
    writing,
)
from flashmoe_gguf.pack.layout import GAP_HEAD, DenseTensor, PackedGroup, PackedPart
from flashmoe_gguf.pack.opening import PackedFile, open_packed
from flashmoe_gguf.pack.verifying import Damage, read_dense_sum, read_sums
from flashmoe_gguf.pack.writer import Progress


@dataclass(frozen=True)
class UnpackReport:
    """The restored files, in order, and their bytes in all."""

    files: tuple[Path, ...]
    nbytes: int


def unpack_model(
    packed: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    force: bool = False,
) -> UnpackReport:
    """Restore the original files in `out_dir`, under their old names, one after the other.

    Each is written to NAME.partial and renamed when it is whole; all checksums are compared on
    the way. `force` replaces files that exist. Memory: one part of one expert.
    Raises ModelFileError for a damaged file, PackError for what is wrong with the target.
    """
    file = open_packed(packed)
    folder = Path(out_dir)
    if not folder.is_dir():
        raise PackError(f"{shown(folder)}: there is no such folder", "make it, or choose another")
    targets = tuple(folder / name for name in file.source.names)
    for target in targets:
        if target.exists() and any(os.path.samefile(target, path) for path in file.files):
            raise PackError(
                f"{shown(target)}: source and target are the same file",
                "choose another folder with -o",
            )
        if target.exists() and not force:
            raise PackError(
                f"{shown(target)}: a file of this name is there already",
                "delete it, choose another folder with -o, or use --force to replace it",
            )
    sizes = [shard.size_bytes for shard in file.source.shards]
    require_space(folder, sum(sizes))
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, sum(sizes))

    with opened(file.files) as fds:
        add(0)
        for number, target in enumerate(targets):
            _Shard(file, fds, number, target).write(add)
    return UnpackReport(targets, sum(sizes))


class _Shard:
    """One source file being restored."""

    def __init__(self, file: PackedFile, fds: Sequence[int], number: int, target: Path) -> None:
        self._file = file
        self._fds = fds
        self._fd = fds[0]
        self._number = number
        self._target = target
        self._partial = target.with_name(target.name + ".partial")
        self._out = -1

    def write(self, add: Callable[[int], None]) -> None:
        source = self._file.source
        self._out = open_target(self._partial, os.O_TRUNC)
        try:
            with writing(self._partial):
                os.ftruncate(self._out, source.shards[self._number].size_bytes)
            self._write(source.headers[self._number], 0)
            add(len(source.headers[self._number]))
            self._write_tensors(add)
            self._write_gaps()
            with writing(self._partial):
                os.fsync(self._out)
                os.replace(self._partial, self._target)
            sync_folder(self._target.parent)
        except BaseException:
            self._partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(self._out)

    def _write_tensors(self, add: Callable[[int], None]) -> None:
        for dense in self._file.layout.dense:
            if dense.tensor.shard == self._number:
                self._write_dense(dense, add)
        for group in self._file.layout.groups:
            for part in group.parts:
                if part.tensor.shard == self._number:
                    self._write_part(group, part, add)

    def _write_dense(self, dense: DenseTensor, add: Callable[[int], None]) -> None:
        tensor = dense.tensor
        digest = xxhash.xxh3_64()
        for at, data in read_chunks(self._fd, tensor.nbytes, dense.offset, self._file.path):
            digest.update(data)
            self._write(data, tensor.offset + at)
            add(len(data))
        if digest.intdigest() != read_dense_sum(self._fd, self._file.path, dense):
            raise _damaged(self._file.path, Damage(tensor.name))

    def _write_part(self, group: PackedGroup, part: PackedPart, add: Callable[[int], None]) -> None:
        nbytes = part.expert_bytes
        sums = read_sums(self._fd, self._file.path, self._file.layout, group, part)
        for expert in range(group.n_expert):
            block = group.block(expert)
            path = self._file.files[block.file]
            at = block.offset + part.block_offset
            data = read_exact(self._fds[block.file], nbytes, at, path)
            if xxhash.xxh3_64_intdigest(data) != sums[expert]:
                raise _damaged(path, Damage(part.tensor.name, group.layer, group.family, expert))
            self._write(data, part.tensor.offset + expert * nbytes)
            add(nbytes)

    def _write_gaps(self) -> None:
        for gap in self._file.layout.gaps:
            for at, span in gap.records():
                if span.shard == self._number:
                    at += GAP_HEAD.size
                    data = read_exact(self._fd, span.nbytes, at, self._file.path)
                    self._write(data, span.offset)

    def _write(self, data: bytes, offset: int) -> None:
        write_exact(self._out, data, offset, self._partial)


def _damaged(path: Path, damage: Damage) -> ModelFileError:
    return ModelFileError(
        f"{shown(path)}: damaged at {damage}",
        "copy the packed file again; flashmoe verify lists all damage",
    )
