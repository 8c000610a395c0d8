"""Every number, or every tensor, of every architecture: what ends the process while loading.

`python -m fuzz.sweep [--tensors] [ARCH ...]`. What our checks refuse is not tried; what llama.cpp
refuses is fine. The exit code is 1 if a child died.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flashmoe_gguf.llama  # noqa: F401  the patched libraries
import tiny_models
from flashmoe_gguf.errors import FlashMoEError
from flashmoe_gguf.gguf import GGML_TYPES, read_header
from flashmoe_gguf.shapes import check_heads, check_loadable, check_numbers, check_top_k
from flashmoe_gguf.store import _MAX_EXPERTS, _count, _layer_top_k, read_geometry
from fuzz import target
from fuzz.gguf_head import Head, padded, parse
from fuzz.headers import decode, reserve
from tiny_models.arch_keys import BASE
from tiny_models.every_arch import arch_row, metadata_of

VALUES = (0, 1, 2, 3, 5, 8, 16, 24, 31, 32, 33, 48, 64, 96, 128, 257, 512, (1 << 31) - 1)
MORE = (
    "attention.key_length attention.value_length attention.key_length_swa "
    "attention.value_length_swa attention.sliding_window attention.shared_kv_layers "
    "attention.q_lora_rank attention.kv_lora_rank rope.dimension_count rope.dimension_count_swa "
    "nextn_predict_layers leading_dense_block_count expert_shared_count embedding_length_out "
    "expert_gating_func interleave_moe_layer_step full_attention_interval pooling_type"
)
TYPES = ("F32", "F16", "Q8_0", "I8", "I32", "F64")
_MEMORY_BYTES = 2 << 30
_SECONDS = 60


class Case(NamedTuple):
    """What is changed, and how to write the file."""

    what: str
    write: Callable[[Path], Path]


def numbers(arch: str, n_random: int) -> Iterator[Case]:
    """Headers without tensors: one number changed, then `n_random` with two or three."""
    keys = {k: v for k, v in metadata_of(arch).metadata.items() if k.startswith(f"{arch}.")}
    n_layer = arch_row(arch).n_layer
    for key in dict.fromkeys([*keys, *(f"{arch}.{more}" for more in MORE.split())]):
        for value in _values(keys.get(key, 0), n_layer, key.removeprefix(f"{arch}.") in BASE):
            yield _number_case(arch, {key: value})
    rng = random.Random(arch)
    counts = [key for key, value in keys.items() if type(value) is int]
    for _ in range(n_random):
        chosen = rng.sample(counts, rng.choice((2, 2, 3)))
        yield _number_case(arch, {key: rng.choice(VALUES[:-1]) for key in chosen})


def _values(old: Any, n_layer: int, by_layer: bool) -> Iterator[Any]:
    if isinstance(old, bool):
        yield not old
    elif isinstance(old, float):
        yield from (0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan"))
    elif isinstance(old, list):
        yield from (type(old)(new) for new in ([old[0]] * len(old), old[:-1], old + old))
        for i in range(len(old)):
            for value in (0, 1, 3, 64, 4096):
                new = type(old)(old)
                new[i] = type(old[i])(value)
                yield new
    elif isinstance(old, int):
        yield from VALUES
        for i in range(n_layer if by_layer else 0):
            yield from ([old] * i + [value] + [old] * (n_layer - i - 1) for value in (0, 1, 3))


def _number_case(arch: str, change: dict[str, Any]) -> Case:
    def write(path: Path) -> Path:
        builder = metadata_of(arch)
        builder.metadata |= change
        return builder.write(path)

    return Case(json.dumps(change), write)


def tensors(model: bytes) -> Iterator[Case]:
    """Whole files: the tensors of one name missing, in all layers or the last, or of a type."""
    head, _ = parse(model)
    rows: dict[bytes, list[int]] = {}
    for i, row in enumerate(head.rows):
        rows.setdefault(re.sub(rb"^blk\.[0-9]+\.", b"", row.name), []).append(i)
    for name, indices in rows.items():
        for which in (indices, indices[-1:]):
            yield _tensor_case(head, f"without {name.decode()} in {len(which)}", which, None)
        for number, (type_name, block, _) in GGML_TYPES.items():
            row = head.rows[indices[0]]
            if type_name in TYPES and row.ggml_type != number and row.shape[0] % block == 0:
                yield _tensor_case(head, f"{name.decode()} as {type_name}", indices, number)


def _tensor_case(head: Head, what: str, indices: list[int], ggml_type: int | None) -> Case:
    def write(path: Path) -> Path:
        new = head.copy()
        for i in indices:
            new.rows[i].ggml_type = ggml_type or 0
        if ggml_type is None:
            new.rows = [row for i, row in enumerate(new.rows) if i not in indices]
        new.n_rows = len(new.rows)
        nbytes = new.repair() or 0
        raw = new.to_bytes()
        with path.open("wb") as file:
            file.write(raw)
            file.truncate(padded(len(raw), new.alignment) + nbytes)
        return path

    return Case(what, write)


def check_numbers_alone(path: Path) -> None:
    """What check_loadable does with a header that has no tensors yet."""
    geometry, header = read_geometry(path), read_header(path)
    n_layer = geometry.n_layer - geometry.n_nextn
    routed = [i for i in range(n_layer) if i >= (header.get("leading_dense_block_count") or 0)]
    widths = header.get("feed_forward_length")
    if geometry.architecture.startswith("nemotron_h") and isinstance(widths, tuple):
        routed = [i for i, width in enumerate(widths[:n_layer]) if width]
    # A header without tensors has no experts yet, so that its geometry has no top_k either.
    n_expert = _count(header, "expert_count", range(1, _MAX_EXPERTS + 1))
    check_top_k(header, _layer_top_k(header, geometry.n_layer, n_expert), routed)
    check_numbers(header, n_layer)
    check_heads(header, geometry.n_layer)


def run(cases: list[Case], with_tensors: bool, work: Path) -> Iterator[tuple[str, str]]:
    """The cases on which a child died: what was changed, and how it died."""
    at = 0
    while at < len(cases):
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(readable)
            try:
                target.limit_memory(_MEMORY_BYTES)
                os.dup2(os.open(work / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
                for index in range(at, len(cases)):
                    os.write(writable, index.to_bytes(4, "little"))
                    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
                    _try(cases[index].write(work / "model.gguf"), with_tensors)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writable)
        with open(readable, "rb") as pipe:
            seen = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0:
            return
        at = int.from_bytes(seen[-4:], "little")
        words = (work / "stderr").read_text(errors="replace").strip().splitlines()
        how = signal.Signals(-status).name if status < 0 else f"exit {status}"
        yield cases[at].what, f"{how} {words[-1] if words else ''}"
        at += 1


def _try(path: Path, with_tensors: bool) -> None:
    try:
        if with_tensors:
            check_loadable(read_geometry(path))
        else:
            check_numbers_alone(path)
    except FlashMoEError:
        return
    if with_tensors:
        decode(path)
    else:
        reserve(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archs", nargs="*", metavar="ARCH", default=tiny_models.ARCHS)
    parser.add_argument("--tensors", action="store_true", help="tensors instead of numbers")
    parser.add_argument("--random", type=int, default=50, help="cases with several numbers")
    options = parser.parse_args()
    os.environ["GGML_NO_BACKTRACE"] = "1"
    died = 0
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for arch in options.archs:
            if options.tensors:
                model = tiny_models.make_arch(work / "made.gguf", arch).read_bytes()
                cases = list(tensors(model))
            else:
                cases = list(numbers(arch, options.random))
            print(f"{arch}: {len(cases):,} cases")
            for what, how in run(cases, options.tensors, work):
                died += 1
                print(f"FOUND {arch} {what}: {how}")
            sys.stdout.flush()
    print(f"{died} found" if died else "nothing found")
    return 1 if died else 0


if __name__ == "__main__":
    sys.exit(main())
