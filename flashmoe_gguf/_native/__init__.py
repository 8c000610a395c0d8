"""The C library: the only part that uses cffi."""

from flashmoe_gguf._native.foreign import ForeignPolicy
from flashmoe_gguf._native.library import policy_names
from flashmoe_gguf._native.simulation import LayerCounts, simulate
from flashmoe_gguf._native.stream import GroupCounts, LatchedError, NativeStream, TraceCounts

__all__ = [
    "ForeignPolicy",
    "GroupCounts",
    "LatchedError",
    "LayerCounts",
    "NativeStream",
    "TraceCounts",
    "policy_names",
    "simulate",
]
