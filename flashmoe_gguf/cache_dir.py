"""Where files are kept that can be made again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """flashmoe-gguf in $XDG_CACHE_HOME, or in ~/.cache. It need not exist.

    A user without a home, as in many containers, has one of the user's own among temporary files.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    if root and Path(root).is_absolute():  # others are to be ignored, says the XDG specification
        return Path(root) / "flashmoe-gguf"
    try:
        return Path.home() / ".cache" / "flashmoe-gguf"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"flashmoe-gguf-{os.getuid()}"
