"""What `--version` says."""

from __future__ import annotations

from importlib import metadata

from flashmoe_gguf import __version__


def version_text() -> str:
    """Our version and that of llama-cpp-python, which pins llama.cpp's."""
    try:
        bindings = metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        bindings = "not installed"
    return f"flashmoe-gguf {__version__} (llama-cpp-python {bindings})"
