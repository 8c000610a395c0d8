"""The good files that damage is done to: small, of every kind that is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import gguf_files
from flashmoe_gguf.pack import pack_model
from gguf_files import F16, F32, Gguf, Tensor, array, expert_tensors, moe_keys, scalar, string, u32
from tiny_models import spec
from tiny_models.builder import Builder


@dataclass(frozen=True)
class Seed:
    """The files of one model, the one to open first; `loads` where llama.cpp takes it."""

    name: str
    files: tuple[tuple[str, bytes], ...]
    packed: bool
    loads: bool


def make_seeds(work: Path) -> list[Seed]:
    """All seeds; the same bytes each time. `work` is a folder for the files meanwhile."""
    seeds = []
    for name, make, loads in _STOCK:
        folder = work / name
        folder.mkdir()
        first = make(folder)
        seeds.append(_read(name, folder, first, False, loads))
        if name == "dense":
            continue
        for kind, stripes in (("packed", 0), ("striped", 2)):
            out = work / f"{name}-{kind}"
            drives = [out / f"d{i}" for i in range(stripes)]
            for made in (out, *drives):
                made.mkdir()
            pack_model(first, out / "model.gguf", stripes=drives)
            for drive in drives:
                for file in drive.iterdir():
                    file.rename(out / file.name)
                drive.rmdir()
            if kind == "packed" or name == "qwen3moe":
                seeds.append(_read(f"{name}-{kind}", out, out / "model.gguf", True, loads))
                seeds[-1] = _without_path(seeds[-1], work)
    shutil.rmtree(work)
    work.mkdir()
    return seeds


def _read(name: str, folder: Path, first: Path, packed: bool, loads: bool) -> Seed:
    paths = sorted(folder.iterdir(), key=lambda path: (path != first, path.name))
    return Seed(name, tuple((p.name, p.read_bytes()) for p in paths), packed, loads)


def _without_path(seed: Seed, work: Path) -> Seed:
    """A packed file records the paths of its stripes; a run is to be the same everywhere."""
    path = str(work).encode()
    other = b"/".ljust(len(path), b"w")
    files = tuple((name, data.replace(path, other)) for name, data in seed.files)
    return replace(seed, files=files)


def _table_of_everything(folder: Path) -> Path:
    """Every kind of value, second blocks, bytes in gaps; far too little for llama.cpp."""
    keys = {
        **moe_keys(),
        "general.name": string("fuzz"),
        "general.alignment": u32(64),
        "olmoe.nextn_predict_layers": u32(0),
        "olmoe.expert_group_count": u32(1),
        "list": array("str", ["a", "bc", ""]),
        "numbers": array("i64", [-1, 2]),
        "none": array("u8", []),
        "flag": scalar("bool", 1),
        "half": scalar("f64", 0.5),
    }
    tensors = [
        Tensor("token_embd.weight", (32, 3), F16),
        *expert_tensors(0, width=32),
        *(
            Tensor(f"blk.0.ffn_{role}_chexps.weight", (32, 8, 2), F32)
            for role in ("up", "gate", "down")
        ),
        Tensor("blk.1.ffn_gate_up_exps.weight", (32, 4, 4), F16),
        Tensor("blk.1.ffn_down_exps.weight", (32, 4, 4), F16),
        Tensor("blk.1.ffn_up_exps.bias", (3, 4), F32),
    ]
    path = Gguf(keys, tensors).write(folder / "model.gguf")
    with path.open("ab") as file:
        file.write(b"left over")
    return path


def _small(kind: str, **sizes: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        builder = Builder(replace(spec(kind), **sizes))  # type: ignore[arg-type]
        builder.n_vocab = 32
        builder.spec.build(builder)
        return builder.write(folder / "model.gguf")

    return make


def _shards(folder: Path) -> Path:
    parts = [[Tensor("token_embd.weight", (32, 3), F16)], expert_tensors(0, width=32)]
    parts.append(expert_tensors(1, width=32))
    return gguf_files.write_shards(folder, moe_keys(), parts)[0]


def _dense(folder: Path) -> Path:
    keys = {
        "general.architecture": string("llama"),
        "llama.block_count": u32(2),
        "llama.context_length": u32(64),
    }
    tensors = [Tensor("token_embd.weight", (32, 3), F16), Tensor("output_norm.weight", (32,))]
    return Gguf(keys, tensors).write(folder / "model.gguf")


_QWEN = {"n_layer": 2, "n_expert": 4, "top_k": 2, "width": 64, "expert_width": 32}
_STOCK: tuple[tuple[str, Callable[[Path], Path], bool], ...] = (
    ("everything", _table_of_everything, False),
    ("shards", _shards, False),
    ("dense", _dense, False),
    ("qwen3moe", _small("qwen3moe", **_QWEN), True),
    ("split", _small("qwen3moe", **_QWEN, n_shard=3), True),
    ("deepseek2", _small("deepseek2lite-like", n_layer=2, n_expert=4, top_k=2), True),
)
