"""No speed without the same output: arms are held to each other, step by step, as they finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe_gguf.bench.arm import STOCK, STOCK_DEFAULT, STREAMED
from flashmoe_gguf.errors import FlashMoEError


class OutputDiffersError(FlashMoEError):
    """An arm gave another output, or did not do what it is compared for."""


@dataclass(frozen=True)
class Output:
    """What an arm gave, one entry per step: the greedy token, and a hash of all logits.

    Step 0 is the prompt, step n the n-th token decoded. `lookups` are the expert cache's, None for
    an arm without one.
    """

    arm: str
    kind: str
    logits: Sequence[str]
    tokens: Sequence[int]
    lookups: int | None = None


class Gate:
    """Compares each output with the longest one so far, which for all that came before is the same
    as comparing every pair for as many steps as the two have in common.

    STOCK_DEFAULT computes on repacked weights, whose sums are rounded in another order: its last
    bits are its own, and where two tokens are nearly as likely its text may be too. Nothing that
    streams could equal it and the other stock arm at once. So it is left out of the gate, and its
    greedy tokens are counted against the others' instead (`same_tokens`).
    """

    def __init__(self) -> None:
        self._longest: Output | None = None
        self._defaults: list[Output] = []
        self._steps: dict[str, int] = {STREAMED: 0, STOCK: 0}

    def add(self, output: Output) -> None:
        """Raises OutputDiffersError, with arm and step; also for an arm that did not stream."""
        if output.kind == STREAMED and not output.lookups:
            raise OutputDiffersError(
                f"the arm {output.arm} did not stream: no expert was looked up in the cache",
                "no speed is reported; is it a model with experts?",
            )
        if output.kind == STOCK_DEFAULT:
            self._defaults.append(output)
            return
        longest = self._longest or output
        step = _first_difference(output, longest)
        if step is not None:
            same_token = output.tokens[step] == longest.tokens[step]
            what = "other logits" if same_token else "another token"
            raise OutputDiffersError(
                f"the arm {output.arm} gave {what} than {longest.arm} at step {step} "
                + ("(the prompt)" if step == 0 else f"(token {step} after the prompt)"),
                "no speed is reported",
            )
        if self._longest is None or len(output.logits) > len(self._longest.logits):
            self._longest = output
        self._steps[output.kind] = max(self._steps[output.kind], len(output.logits))

    @property
    def steps(self) -> int:
        """Steps that a streamed and a stock arm have in common; 0 when one of them is missing."""
        return min(self._steps.values())

    @property
    def streamed(self) -> bool:
        """Whether any streamed arm got here."""
        return self._steps[STREAMED] > 0

    @property
    def longest(self) -> int:
        """Steps of the longest arm."""
        return len(self._longest.logits) if self._longest else 0

    def same_tokens(self) -> tuple[int, int] | None:
        """(greedy tokens of STOCK_DEFAULT up to the first that differs, those compared), of the
        worst run; None when it gave none, or nothing to compare with."""
        counts = []
        for output in self._defaults if self._longest else ():
            pairs = list(zip(output.tokens, self._longest.tokens, strict=False))  # type: ignore[union-attr]
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            counts.append((same, len(pairs)))
        return min(counts, default=None)


def _first_difference(a: Output, b: Output) -> int | None:
    for step, (one, other) in enumerate(zip(a.logits, b.logits, strict=False)):
        if one != other or a.tokens[step] != b.tokens[step]:
            return step
    return None
