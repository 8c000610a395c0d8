"""Where files are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """flashmoe-gguf in $XDG_CACHE_HOME, or in ~/.cache. It need not exist."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "flashmoe-gguf"
