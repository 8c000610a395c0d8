"""How a model is streamed: the arguments of `Llama` that llama_cpp does not have."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.lookahead import parse_lookahead
from flashmoe_gguf.trace import check_target
from flashmoe_gguf.tuning import AUTO, Kept, Tuning, check_readers, tuning_words

QUOTAS = (AUTO, "even")


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
    quotas: str = AUTO
    n_workers: int | None = None
    request_bytes: int | None = None
    trace: str | None = None
    trace_probs: bool = False

    def check(self) -> None:
        """Raises OptionError for what contradicts itself, TraceError for an impossible trace."""
        parse_lookahead(self.lookahead)
        check_readers(self.n_workers, self.request_bytes)
        if self.quotas not in QUOTAS:
            raise OptionError(f"quotas '{self.quotas}'", f"one of {', '.join(QUOTAS)}")
        if self.trace is not None:
            check_target(Path(self.trace))
        elif self.trace_probs:
            raise OptionError("trace_probs needs trace", "give the file: trace=")
        if self.forget and self.policy_file is not None:
            raise OptionError(
                "forget is about what is kept per model, not about a policy file",
                "remove the file, or leave it out",
            )

    def tuned(self, kept: Kept | None) -> tuple[StreamSettings, str]:
        """The same with what `flashmoe tune` has found where the user has not chosen, and in words
        what of it that is. Without, the defaults.
        """
        found = kept.tuning if kept is not None else Tuning()
        open_fields = tuple(
            name
            for name, unset in (
                ("n_workers", None),
                ("request_bytes", None),
                ("lookahead", AUTO),
                ("policy", AUTO),
            )
            if getattr(self, name) == unset
            # a file of weights is for the policy that learned them, not for the fastest
            and not (name == "policy" and self.policy_file is not None)
        )
        changes = {name: getattr(found, name) for name in open_fields}
        return replace(self, **changes), tuning_words(found, open_fields)

    def for_a_copy(self) -> dict[str, Any]:
        """The same as keyword arguments, for an object that must not write to the same files."""
        return {**asdict(self), "trace": None, "trace_probs": False}
