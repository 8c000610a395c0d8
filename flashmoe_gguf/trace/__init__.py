"""Expert-routing traces: which experts each token used in each layer."""

from flashmoe_gguf.trace.collect import Collection, Column, Rows
from flashmoe_gguf.trace.file import NO_EXPERT, Trace, check_target, read_trace, write_trace

__all__ = [
    "NO_EXPERT",
    "Collection",
    "Column",
    "Rows",
    "Trace",
    "check_target",
    "read_trace",
    "write_trace",
]
