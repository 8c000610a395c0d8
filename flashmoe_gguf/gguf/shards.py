"""Reading a whole model, which may be split over several files.

llama.cpp's naming: the parts of NAME are NAME-00001-of-0000N.gguf and so on. The first holds
the metadata and `split.count`; each holds its own number, from 0, as `split.no`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from flashmoe_gguf.errors import ModelFileError
from flashmoe_gguf.gguf.cursor import DAMAGED, shown
from flashmoe_gguf.gguf.header import Header, TensorInfo, Value
from flashmoe_gguf.gguf.table import read_file

_MIXED_UP = "the parts of two models are mixed up: download them again"
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.S)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a model: one GGUF file, or the first of its shards.

    Raises ModelFileError, and nothing else, whatever the path or the bytes.
    """
    first = Path(path)
    shard, metadata, tensors = read_file(first, 0)
    shards = [shard]
    paths = _shard_paths(first, metadata)
    for number, other in enumerate(paths[1:], start=1):
        shard, its_metadata, its_tensors = read_file(other, number)
        _check_shard(other, its_metadata, number, len(paths))
        shards.append(shard)
        tensors += its_tensors
    if len(paths) > 1:
        _check_union(first, metadata, tensors)
    return Header(first, tuple(shards), MappingProxyType(metadata), tuple(tensors))


def _split_key(path: Path, metadata: Mapping[str, Value], key: str, default: int | None) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ModelFileError(f"{shown(path)}: {key} is missing or not a count", DAMAGED)
    return value


def _shard_paths(path: Path, metadata: Mapping[str, Value]) -> list[Path]:
    """The files of the model whose first one is `path`; all of them exist."""
    count = _split_key(path, metadata, "split.count", 0)
    if count <= 1:
        return [path]
    number = _split_key(path, metadata, "split.no", 0)
    name = _SHARD_NAME.fullmatch(path.name)
    if number:
        first = "the first part, whose name ends in " + f"-00001-of-{count:05}.gguf"
        if name and int(name["count"]) == count:
            first = shown(path.with_name(f"{name['stem']}-00001-of-{count:05}.gguf"))
        raise ModelFileError(
            f"{shown(path)}: this is part {number + 1} of {count} of a split model", f"give {first}"
        )
    if not name or (int(name["number"]), int(name["count"])) != (1, count):
        raise ModelFileError(
            f"{shown(path)}: this is part 1 of {count}, but its name does not say so",
            f"the name must end in -00001-of-{count:05}.gguf, and the others' likewise",
        )
    paths = [path]
    for part in range(2, count + 1):
        other = path.with_name(f"{name['stem']}-{part:05}-of-{count:05}.gguf")
        if not os.path.exists(other):
            raise ModelFileError(
                f"{shown(other)}: this part of the model is missing",
                f"all {count} parts must be in one folder",
            )
        paths.append(other)
    return paths


def _check_shard(path: Path, metadata: Mapping[str, Value], number: int, count: int) -> None:
    its_number = _split_key(path, metadata, "split.no", None)
    its_count = _split_key(path, metadata, "split.count", count)
    if (its_number, its_count) != (number, count):
        raise ModelFileError(
            f"{shown(path)}: the file says it is part {its_number + 1} of {its_count}, "
            f"its name says part {number + 1} of {count}",
            _MIXED_UP,
        )


def _check_union(path: Path, metadata: Mapping[str, Value], tensors: list[TensorInfo]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise ModelFileError(
                f"{shown(path)}: tensor {shown(tensor.name)} is in two parts of the model",
                _MIXED_UP,
            )
        seen.add(tensor.name)
    expected = _split_key(path, metadata, "split.tensors.count", None)
    if expected != len(tensors):
        raise ModelFileError(
            f"{shown(path)}: the parts hold {len(tensors):,} tensors, not {expected:,}",
            _MIXED_UP,
        )
