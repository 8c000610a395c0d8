"""Run MoE GGUF models larger than RAM from SSD, through llama.cpp, with the same logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashmoe_gguf.errors import (
    BudgetError,
    ExpertReadError,
    FlashMoEError,
    LibraryError,
    ModelFileError,
    OptionError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from flashmoe_gguf.llama import Llama as Llama
    from flashmoe_gguf.stats import Stats as Stats

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ExpertReadError",
    "FlashMoEError",
    "LibraryError",
    "Llama",
    "ModelFileError",
    "OptionError",
    "Stats",
    "UnsupportedModelError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Importing Llama loads llama.cpp; reading a header or printing help does not need it.
    if name == "Llama":
        from flashmoe_gguf.llama import Llama

        return Llama
    if name == "Stats":
        from flashmoe_gguf.stats import Stats

        return Stats
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
