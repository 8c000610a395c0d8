"""Expert-routing traces: which experts each token used in each layer."""

from flashmoe_gguf.trace.file import NO_EXPERT, Trace, read_trace, write_trace

__all__ = ["NO_EXPERT", "Trace", "read_trace", "write_trace"]
