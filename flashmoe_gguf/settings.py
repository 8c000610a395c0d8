"""How a model is streamed: the arguments of `Llama` that llama_cpp does not have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.lookahead import parse_lookahead
from flashmoe_gguf.trace import check_target


@dataclass(frozen=True)
class StreamSettings:
    """See `Llama` for what they mean; `policy` is not looked up yet."""

    ram: str | int | None = None
    n_slots: int | None = None
    policy: str = "auto"
    policy_file: str | None = None
    learn: bool = True
    forget: bool = False
    io: str = "auto"
    verify: str = "first"
    lookahead: str | int = "auto"
    trace: str | None = None
    trace_probs: bool = False

    def check(self) -> None:
        """Raises OptionError for what contradicts itself, TraceError for an impossible trace."""
        parse_lookahead(self.lookahead)
        if self.trace is not None:
            check_target(Path(self.trace))
        elif self.trace_probs:
            raise OptionError("trace_probs needs trace", "give the file: trace=")
        if self.forget and self.policy_file is not None:
            raise OptionError(
                "forget is about what is kept per model, not about a policy file",
                "remove the file, or leave it out",
            )

    def for_a_copy(self) -> dict[str, Any]:
        """The same as keyword arguments, for an object that must not write to the same files."""
        return {**asdict(self), "trace": None, "trace_probs": False}
