"""Arguments of `Llama` checked before anything is loaded, and llama.cpp's refusals in our words."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from flashmoe_gguf.assertions import failed_assertion
from flashmoe_gguf.errors import FlashMoEError, ModelFileError, OptionError, UnsupportedModelError
from flashmoe_gguf.gguf.cursor import shown


def check_path(model_path: str | os.PathLike[str]) -> None:
    """Raises OptionError for a path that llama_cpp cannot hand on, which it does as UTF-8."""
    path = os.fspath(model_path)
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise OptionError(
            f"the model's path is not valid UTF-8: {shown(path)}", "rename the file"
        ) from None


def check_arguments(
    model_path: str | os.PathLike[str],
    ram: str | int | None,
    n_slots: int | None,
    kwargs: dict[str, Any],
    base: type,
) -> None:
    """Raises OptionError for values that llama.cpp would answer with a crash or a riddle, and
    TypeError for arguments that `base`, whose constructor takes anything, does not have.
    """
    check_path(model_path)
    known = inspect.signature(base).parameters
    unknown = sorted(set(kwargs) - set(known))
    if unknown:
        raise TypeError(f"Llama() has no argument {', '.join(map(repr, unknown))}")
    if n_slots is not None and type(n_slots) is not int:
        raise OptionError(f"n_slots is {n_slots!r}, not a whole number")
    if n_slots is not None and ram is not None:
        raise OptionError("ram and n_slots exclude each other", "give one of them")
    for name, least in (("n_ctx", 0), ("n_batch", 1), ("n_ubatch", 1)):
        value = kwargs.get(name, least)
        if name == "n_ubatch" and value == "auto":
            continue
        if not isinstance(value, int) or value < least:
            raise OptionError(f"{name} is {value!r}", f"give a whole number from {least} on")


def refuse_unstreamable(kwargs: dict[str, Any]) -> None:
    """Raises OptionError for what would read all experts, or change them behind the cache."""
    if kwargs.get("use_mlock"):
        raise OptionError(
            "mlock would pin experts that are not in memory",
            "leave it out: dense weights are resident anyway; or use --no-stream",
        )
    if kwargs.get("lora_path"):
        raise OptionError(
            "LoRA adapters are not supported on a streamed model",
            "merge the adapter into the GGUF first, or use --no-stream",
        )


def load_error(model_path: str, error: ValueError, log: list[str]) -> FlashMoEError:
    """llama_cpp says only that loading failed; llama.cpp's log says why."""
    for failed in filter(None, map(failed_assertion, log)):
        return ModelFileError(
            f"{Path(model_path).name}: llama.cpp cannot run this model: {failed}",
            "the file is damaged, or made for another llama.cpp",
        )
    causes = [line.split(": ", 1)[-1] for line in log if "error loading model" in line]
    cause = causes[0] if causes else log[0] if log else str(error)
    message = f"{Path(model_path).name}: {cause}"
    if "architecture" in cause:
        return UnsupportedModelError(message, "this llama.cpp does not know it; a newer one may")
    if "context" in str(error):
        return OptionError(message, "the model is fine; give another context or batch size")
    return ModelFileError(message, "the file may be damaged or made for another llama.cpp")
