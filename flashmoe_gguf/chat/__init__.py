"""Making answers: one completion, or a conversation. It prints nothing and reads nothing."""

from flashmoe_gguf.chat.completion import Completion, Summary
from flashmoe_gguf.chat.engine import Engine, LlamaEngine, Sampling, grammar_from_json_schema
from flashmoe_gguf.chat.session import ChatSession, Turn

__all__ = [
    "ChatSession",
    "Completion",
    "Engine",
    "LlamaEngine",
    "Sampling",
    "Summary",
    "Turn",
    "grammar_from_json_schema",
]
