"""The stock llama.cpp library with its default settings, for `--no-stream`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashmoe_gguf.arguments import check_path
from flashmoe_gguf.devices import keep_experts_on_host
from flashmoe_gguf.errors import ModelFileError
from flashmoe_gguf.libs import load_llama_cpp
from flashmoe_gguf.placement import place_model
from flashmoe_gguf.stock import plain_llama
from flashmoe_gguf.store import Geometry

_log_callback: Any = None


def load_stock(
    model: str,
    geometry: Geometry,
    progress: Callable[[float], None],
    arguments: dict[str, Any],
) -> Any:
    """A `llama_cpp.Llama` on the stock library set; `progress` may raise KeyboardInterrupt.

    Layers on a device have their experts on the processor's side, as with --cpu-moe; `placement`
    of the object says which. Raises ModelFileError, OptionError for a path that is not UTF-8, and
    LibraryError when the process has the patched set; what `place_model` raises.
    """
    check_path(model)
    llama_cpp: Any = load_llama_cpp("stock")
    placement = place_model(llama_cpp, geometry, arguments, with_experts=False)
    n_layers = placement.n_layers if placement is not None else 0

    def on_progress(fraction: float, _data: Any) -> bool:
        try:
            progress(fraction)
        except KeyboardInterrupt:
            return False  # llama.cpp stops loading; the caller looks at its flag
        return True

    callback = llama_cpp.llama_progress_callback(on_progress)
    said: list[str] = []
    if not arguments["verbose"]:
        llama_cpp.llama_log_set(_collect_log(llama_cpp, said), None)

    def adjust(params: Any) -> None:
        params.progress_callback = callback
        if n_layers:
            keep_experts_on_host(llama_cpp, params)

    try:
        llm: Any = plain_llama("stock", adjust)(model, **{**arguments, "n_gpu_layers": n_layers})
        llm.placement = placement
        return llm
    except ValueError as error:
        progress(0.0)  # it may be that Ctrl-C ended the loading
        causes = [line for line in said if "error loading model: " in line]
        cause = causes[0].partition("error loading model: ")[2] if causes else str(error)
        raise ModelFileError(
            f"{Path(model).name}: {' '.join(cause.split())}", "--verbose shows llama.cpp's log"
        ) from error


def _collect_log(llama_cpp: Any, lines: list[str]) -> Any:
    global _log_callback  # llama.cpp keeps only the pointer

    def collect(_level: int, text: bytes, _data: Any) -> None:
        lines.append(text.decode("utf-8", "replace"))
        del lines[:-50]

    _log_callback = llama_cpp.llama_log_callback(collect)
    return _log_callback
