"""A tiny random model of any architecture in `arch_table`: metadata from there, tensors as wanted.

The tensors are those that llama.cpp asks for when it is given the metadata (`wanted.py`), so
making a model needs the stock libraries. It asks once for all architectures.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from gguf import GGMLQuantizationType as T

from .arch_keys import BASE, N_EXPERT, TOP_K, WIDTH, Arch
from .arch_table import ROWS
from .builder import Builder, Spec
from .child import stock_libraries
from .fill import fill
from .wanted import Shape, wanted

ARCHS: tuple[str, ...] = tuple(row.name for row in ROWS)
_ROWS = {row.name: row for row in ROWS}

# All have blocks of 32 weights, so that every width here is whole blocks.
_EXPERT_TYPES = (T.Q8_0, T.Q4_0, T.Q5_1, T.IQ4_NL, T.MXFP4, T.Q4_1, T.Q5_0)


def expert_type(arch: str) -> T:
    """The type of the experts of an architecture's model; they take turns."""
    return _EXPERT_TYPES[ARCHS.index(arch) % len(_EXPERT_TYPES)]


def arch_row(arch: str) -> Arch:
    """The description of an architecture of ARCHS."""
    return _ROWS[arch]


def make_arch(path: Path, arch: str) -> Path:
    """Write the tiny model of an architecture of ARCHS and return its file.

    KeyError for another name; RuntimeError with llama.cpp's words if it refuses the metadata.
    """
    row = _ROWS[arch]
    builder = _builder(row)
    tensors = _tensors()[arch]
    if isinstance(tensors, str):
        raise RuntimeError(f"llama.cpp wants no {arch}: {tensors}")
    for name, shape in tensors.items():
        if not _is_spare(name):
            fill(builder, name, shape, expert_type(arch))
    return builder.write(path)


def metadata_of(arch: str) -> Builder:
    """The model of an architecture of ARCHS before it has tensors."""
    return _builder(_ROWS[arch])


def _is_spare(name: str) -> bool:
    """Whether a file does well without it: the scales of weights other than the experts'."""
    return name.endswith(".input_scale") or (
        name.endswith(".scale") and "exps." not in name and "gate_inp" not in name
    )


def _no_tensors(_: Builder) -> None:
    """Its tensors are added one by one."""


def _builder(row: Arch) -> Builder:
    spec = Spec(
        f"{row.name}-arch",
        row.name,
        row.what,
        _no_tensors,
        n_layer=row.n_layer,
        n_expert=N_EXPERT,
        top_k=TOP_K,
        width=WIDTH,
    )
    builder = Builder(spec)
    builder.metadata["general.name"] = f"tiny {row.name}"
    builder.metadata["tokenizer.ggml.model"] = "no_vocab"
    builder.metadata["tokenizer.ggml.token_type_count"] = 1
    keys = {"vocab_size": builder.n_vocab, "block_count": row.n_layer, **BASE, **row.keys}
    builder.metadata |= {f"{row.name}.{key}": value for key, value in keys.items()}
    return builder


@cache
def _tensors() -> dict[str, dict[str, Shape] | str]:
    """What llama.cpp wants for every row; RuntimeError without the stock libraries."""
    library_dir = stock_libraries()
    if library_dir is None:
        raise RuntimeError("the stock llama.cpp libraries are not built")
    with tempfile.TemporaryDirectory() as folder:
        headers = {row.name: _builder(row).write(Path(folder) / f"{row.name}.gguf") for row in ROWS}
        return wanted(library_dir, headers)
