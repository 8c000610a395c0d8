"""Expert-routing traces: which experts each token used in each layer."""

from flashmoe_gguf.trace.collect import Collection, Column, Rows
from flashmoe_gguf.trace.file import (
    NO_EXPERT,
    Trace,
    check_target,
    check_writable,
    read_trace,
    write_trace,
)
from flashmoe_gguf.trace.importing import import_routes
from flashmoe_gguf.trace.prompts import read_prompts

__all__ = [
    "NO_EXPERT",
    "Collection",
    "Column",
    "Rows",
    "Trace",
    "check_target",
    "check_writable",
    "import_routes",
    "read_prompts",
    "read_trace",
    "write_trace",
]
