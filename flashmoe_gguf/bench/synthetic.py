"""Generated models of real shape that replay an expert-routing trace when they decode.

Greedy decoding of such a model, in any llama.cpp program, walks through the
trace: token i of the vocabulary stands for token i of the trace, routes to its
experts in every layer, and is followed by token i + 1. So speed can be measured on
real routing and real sizes without real weights. With more experts than dimensions
some routes may differ from the trace: `ReplayModel.routing` has the real ones.

The routing part never changes from layer to layer: a predictor that applies the
next layer's router early is always right here. Never quote such gains from it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from gguf import GGUF_DEFAULT_ALIGNMENT, GGUFWriter, TokenType

from flashmoe_gguf.bench.replay_weights import ReplayModel, ReplayTensor, replay_text
from flashmoe_gguf.bench.synthetic_file import DirectWriter
from flashmoe_gguf.bench.synthetic_trace import synthetic_trace
from flashmoe_gguf.errors import FlashMoEError

__all__ = [
    "SHAPES",
    "Shape",
    "build_replay_model",
    "replay_text",
    "synthetic_trace",
    "write_replay_model",
]

Experts = npt.NDArray[np.integer[Any]]

# In the file: the share of the wished experts that it obtains.
SHARE_KEY = "replay.wished_share"
_FREE_SPACE_MARGIN = 64 << 20
# Progress is reported about this often.
_REPORT_BYTES = 32 << 20


@dataclass(frozen=True)
class Shape:
    """Dimensions of a replay model; widths in weights, `top_k` experts per token and layer."""

    n_layer: int
    n_expert: int
    top_k: int
    width: int
    expert_width: int
    n_head: int
    n_head_kv: int
    head_width: int = 128


SHAPES: dict[str, Shape] = {
    # gpt-oss-20b's routing over experts of 5.3 MB, 4.1 GB of them (the real ones: 13.2 MB).
    "gpt-oss-20b": Shape(24, 32, 4, 2048, 1536, 16, 4),
    "olmoe": Shape(16, 64, 8, 2048, 1024, 16, 16),
    "qwen3-30b": Shape(48, 128, 8, 2048, 768, 32, 4),
}


def build_replay_model(
    path: Path,
    experts: Experts,
    *,
    n_expert: int,
    width: int,
    expert_width: int,
    n_head: int,
    n_head_kv: int,
    n_ctx: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a model to `path` that replays `experts` [tokens, layers, k]; return `path`.

    Raises what `write_replay_model` does, and OptionError for sizes or a trace that cannot
    be replayed.
    """
    model = ReplayModel(np.asarray(experts), n_expert, width, expert_width, n_head, n_head_kv, seed)
    write_replay_model(path, model, n_ctx=n_ctx, progress=progress)
    return path


def write_replay_model(
    path: Path,
    model: ReplayModel,
    *,
    n_ctx: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `model` to `path`.

    The vocabulary is the trace tokens, then `</s>` (which follows the last of them), `<s>`,
    `<unk>` and the 256 bytes (each standing for some trace token, so that any text is a
    valid prompt). The same model gives the same bytes. The file appears under its name
    only when complete; one expert at a time is in memory. `progress(done_bytes,
    total_bytes)` is called every few megabytes.

    Raises OptionError for a model that cannot be, FlashMoEError if the disk has not enough
    room or another process is writing the same file.
    """
    model.check()
    tensors = list(model.tensors())
    unfinished = unfinished_path(path)
    with _sole_writer(unfinished):
        try:
            check_space(path, model)
            _write_header(unfinished, model, tensors, n_ctx)
            _append_tensors(unfinished, tensors, progress)
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def unfinished_path(path: Path) -> Path:
    """Where the bytes of `path` are until all of them are there."""
    return path.with_name(path.name + ".partial")


def is_being_written(path: Path) -> bool:
    """Whether some process, this one included, is writing `path` now."""
    try:
        with unfinished_path(path).open("rb+") as file:
            return not _lock(file)
    except OSError:
        return False


@contextmanager
def _sole_writer(unfinished: Path) -> Iterator[None]:
    """Holds a lock on the unfinished file, which the kernel drops when a builder dies."""
    try:
        with unfinished.open("ab") as file:
            if not _lock(file):
                raise FlashMoEError(
                    f"another process is writing {unfinished.name}", "wait until it is done"
                )
            yield
    except OSError as error:
        raise FlashMoEError(
            f"cannot write {unfinished}: {error.strerror or error}", "choose another folder"
        ) from error


def _lock(file: IO[bytes]) -> bool:
    """Takes the lock that goes with this open file; False if another has it."""
    if sys.platform != "win32":  # without flock two builders disturb each other
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _write_header(
    unfinished: Path, model: ReplayModel, tensors: list[ReplayTensor], n_ctx: int
) -> None:
    writer = GGUFWriter(unfinished, "qwen3moe")
    try:
        _add_metadata(writer, model, n_ctx)
        for t in tensors:
            writer.add_tensor_info(t.name, t.row_shape, np.dtype(np.uint8), t.n_bytes, t.qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        with suppress(Exception):
            writer.close()


def _append_tensors(
    unfinished: Path, tensors: list[ReplayTensor], progress: Callable[[int, int], None] | None
) -> None:
    """Writes all tensor data, each on the next multiple of the alignment, and syncs it."""
    done, told, total = 0, 0, sum(tensor.n_bytes for tensor in tensors)
    with DirectWriter(unfinished) as file:
        _pad(file)
        for tensor in tensors:
            for part in tensor.parts():
                file.write(part.reshape(-1).view(np.uint8).data)
                done += part.nbytes
                if progress is not None and (done - told >= _REPORT_BYTES or done == total):
                    progress(done, total)
                    told = done
            _pad(file)


def _pad(file: DirectWriter) -> None:
    file.write(memoryview(bytes(-file.n_bytes % GGUF_DEFAULT_ALIGNMENT)))


def _add_metadata(writer: GGUFWriter, model: ReplayModel, n_ctx: int) -> None:
    n = model.n_tokens
    writer.add_name(f"replay of {n} tokens, {model.n_layer} x {model.n_expert} experts")
    writer.add_description(
        "Generated: greedy decoding replays an expert-routing trace. Its words mean nothing, and "
        "its routing is known from the first layer on, so lookahead always succeeds."
    )
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(model.width)
    writer.add_block_count(model.n_layer)
    writer.add_feed_forward_length(model.expert_width)
    writer.add_expert_feed_forward_length(model.expert_width)
    writer.add_expert_count(model.n_expert)
    writer.add_expert_used_count(model.top_k)
    writer.add_head_count(model.n_head)
    writer.add_head_count_kv(model.n_head_kv)
    if model.head_width:
        writer.add_key_length(model.head_width)
        writer.add_value_length(model.head_width)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(model.n_vocab)
    writer.add_float32(SHARE_KEY, model.routing.wished_share)

    kinds = [TokenType.NORMAL] * n + [TokenType.CONTROL] * 2 + [TokenType.UNKNOWN]
    words = [*replay_text(0, n), "</s>", "<s>", "<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    writer.add_tokenizer_model("llama")  # SentencePiece
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types(kinds + [TokenType.BYTE] * 256)
    writer.add_eos_token_id(n)
    writer.add_bos_token_id(n + 1)
    writer.add_unk_token_id(n + 2)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def check_space(path: Path, model: ReplayModel) -> None:
    """Raise FlashMoEError if there is no room for `model` at `path`."""
    needed = sum(tensor.n_bytes for tensor in model.tensors()) + _FREE_SPACE_MARGIN
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise FlashMoEError(
            f"the model needs {needed / 1e9:.2f} GB in {path.parent}, which has {free / 1e9:.2f}",
            "free some space or choose another folder",
        )
