"""What `flashmoe tune` found for a model on this machine: a small JSON file per model.

| key                       | what                                                               |
|---------------------------|--------------------------------------------------------------------|
| `format`                  | 1; another number is ignored                                       |
| `version`, `host`, `cpu`, `drive` | where it was measured; elsewhere it says nothing           |
| `settings`                | the fields of `Tuning`                                             |
| `ram_bytes`               | the budget that it was measured under                              |
| `before_tok_s`, `after_tok_s` | decoding speed with the defaults and with `settings`           |

Loading a model uses the file where it fits and passes over it where it does not: another version,
another machine or drive, or a file that is damaged. What the user asks for comes before it.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flashmoe_gguf._native import policy_names
from flashmoe_gguf.cache_dir import cache_dir
from flashmoe_gguf.errors import FlashMoEError, OptionError
from flashmoe_gguf.hardware import cpu_name, drive_of
from flashmoe_gguf.lookahead import parse_lookahead
from flashmoe_gguf.replacing import replacing
from flashmoe_gguf.store import Geometry

# Four readers with requests of 1 MiB keep an NVMe drive busy and two cores free (docs/DESIGN.md).
N_WORKERS = 4
REQUEST_BYTES = 1 << 20
AUTO = "auto"

MAX_WORKERS = 64  # native/io.c
MAX_REQUEST_BYTES = 1 << 30  # pread takes no more than 2 GiB at once
_BLOCK = 4096
_FORMAT = 1


@dataclass(frozen=True)
class Tuning:
    """How experts are read and kept: reading threads per drive, bytes of one read at most, and
    what `lookahead="auto"` and `policy="auto"` stand for.
    """

    n_workers: int = N_WORKERS
    request_bytes: int = REQUEST_BYTES
    lookahead: str = AUTO
    policy: str = AUTO

    def check(self) -> None:
        """Raises OptionError for what cannot be."""
        check_readers(self.n_workers, self.request_bytes)
        parse_lookahead(self.lookahead)
        if self.policy not in (AUTO, *policy_names()):
            raise OptionError(f"there is no policy '{self.policy}'")


def check_readers(n_workers: int | None, request_bytes: int | None) -> None:
    """Raises OptionError for numbers that cannot be; None: not given."""
    if n_workers is not None and not (type(n_workers) is int and 1 <= n_workers <= MAX_WORKERS):
        raise OptionError(f"{n_workers!r} reading threads", f"give 1 to {MAX_WORKERS}")
    if request_bytes is None:
        return
    whole = type(request_bytes) is int and request_bytes % _BLOCK == 0
    if not whole or not _BLOCK <= request_bytes <= MAX_REQUEST_BYTES:
        raise OptionError(
            f"reads of {request_bytes!r} bytes at most", f"give a multiple of {_BLOCK}, up to 1 GiB"
        )


@dataclass(frozen=True)
class Kept:
    """A tuning, the budget in bytes that it was measured under, and tok/s before and after."""

    tuning: Tuning
    ram_bytes: int
    before_tok_s: float
    after_tok_s: float


def tuned_file(geometry: Geometry) -> Path:
    """Where what was found for a model is kept. A packed file shares it with its source."""
    return cache_dir() / "tuned" / f"{geometry.fingerprint}.json"


def machine_of(geometry: Geometry) -> dict[str, str]:
    """What must be the same for a tuning to hold: this version, this machine, the model's drive."""
    return {
        # the package is being imported, or has been; its name for it would be an import upwards
        "version": str(sys.modules[__package__ or ""].__dict__["__version__"]),
        "host": platform.node(),
        "cpu": cpu_name(),
        "drive": str(drive_of(geometry.files[0].path.resolve())["disk"]),
    }


def save_tuning(geometry: Geometry, kept: Kept) -> Path:
    """Writes the file as a whole or not at all; raises FlashMoEError when that fails."""
    path = tuned_file(geometry)
    document = {
        "format": _FORMAT,
        **machine_of(geometry),
        "settings": asdict(kept.tuning),
        "ram_bytes": kept.ram_bytes,
        "before_tok_s": kept.before_tok_s,
        "after_tok_s": kept.after_tok_s,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise FlashMoEError(
            f"cannot write {path}: {error.strerror or error}",
            "set XDG_CACHE_HOME to a folder that can be written",
        ) from error
    return path


def load_tuning(geometry: Geometry) -> Kept | None:
    """What was found for this model on this machine; None where nothing was, or it is stale."""
    try:
        document = json.loads(tuned_file(geometry).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        return None
    if any(document.get(key) != value for key, value in machine_of(geometry).items()):
        return None
    try:
        kept = Kept(
            Tuning(**document["settings"]),
            int(document["ram_bytes"]),
            float(document["before_tok_s"]),
            float(document["after_tok_s"]),
        )
        kept.tuning.check()
    except (OptionError, KeyError, TypeError, ValueError):
        return None
    return kept


def forget_tuning(geometry: Geometry) -> bool:
    """Removes the file; whether there was one. Raises FlashMoEError when it cannot be removed."""
    path = tuned_file(geometry)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise FlashMoEError(f"cannot remove {path}: {error.strerror or error}") from error
    return True


def tuning_words(tuning: Tuning, of: tuple[str, ...] | None = None) -> str:
    """What differs from the defaults, for people; `of`: only these fields."""
    changed = [
        _WORDS[f.name](getattr(tuning, f.name))
        for f in fields(Tuning)
        if getattr(tuning, f.name) != f.default and (of is None or f.name in of)
    ]
    return ", ".join(changed)


def setting_words(field: str, value: Any) -> str:
    """One setting, for people: "2 readers", "512 KiB"."""
    return str(_WORDS[field](value))


def _size(nbytes: int) -> str:
    mib = nbytes / (1 << 20)
    return f"{mib:g} MiB" if mib >= 1 else f"{nbytes / 1024:g} KiB"


_WORDS: dict[str, Any] = {
    "n_workers": lambda n: f"{n} reader" if n == 1 else f"{n} readers",
    "request_bytes": lambda n: f"{_size(n)} a read",
    "lookahead": lambda text: f"lookahead {text}",
    "policy": lambda text: f"policy {text}",
}
