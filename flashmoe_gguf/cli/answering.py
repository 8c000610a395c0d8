"""Shows one answer as it is made: prompt progress, text, Ctrl-C, and the summary line."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing

from flashmoe_gguf.budget import format_size
from flashmoe_gguf.chat import Completion, Summary
from flashmoe_gguf.cli.interrupts import interrupt_flag
from flashmoe_gguf.cli.progress import Activity, State, format_rate
from flashmoe_gguf.cli.screen import Screen, count

# Bytes that would move the cursor or reprogram the terminal; a model may have learned them.
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]


def show(screen: Screen, completion: Completion, pieces: Generator[str, None, None]) -> bool:
    """Writes the answer to stdout and ends its line; returns whether Ctrl-C stopped it.

    `pieces` draws from `completion`. What either raises comes through, after the line has ended.
    """
    on_terminal = sys.stdout.isatty()
    last = ""
    with (
        closing(pieces),  # before the model is closed, also when writing fails
        interrupt_flag(completion.cancel) as interrupted,
        Activity(screen, "prompt", lambda: _state(completion)) as activity,
    ):
        try:
            for piece in pieces:
                activity.stop()
                _write(piece.translate(_CONTROLS) if on_terminal else piece)
                last = piece
        finally:
            activity.stop()
            if last and not last.endswith("\n"):
                _write("\n")
    return interrupted.is_set()


def _state(completion: Completion) -> State | None:
    if not completion.in_prompt:  # text that is not part of the answer
        return State(words=f"thinking, {count(completion.answer_tokens, 'token')}")
    progress = completion.progress()
    return None if progress is None else State(*progress, tokens=True)


def _write(text: str) -> None:
    # not every terminal's encoding has every character
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def summary_line(summary: Summary) -> str:
    """One line: rates, and what the expert cache did."""
    parts = [
        _tokens("prompt", summary.prompt_tokens, summary.prompt_rate),
        _tokens("answer", summary.answer_tokens, summary.decode_rate),
    ]
    if (cache := summary.cache) is not None:
        parts.append(
            f"hits {100 * cache.decode_hit_rate:.1f} %" if cache.decode_lookups else "hits -"
        )
        parts.append(f"read {format_size(cache.bytes_read)}")
        parts.append(f"waited {100 * summary.wait_share:.0f} %")
        if cache.policy_seconds:
            parts.append(f"policy {cache.policy_ms_per_token:.2f} ms per token")
    return "; ".join(parts)


def note_failed_policy(screen: Screen, summary: Summary) -> None:
    """Says that a policy in Python failed during this answer."""
    if summary.cache is not None and summary.cache.policy_failure:
        screen.note(f"the policy is {summary.cache.policy}: {summary.cache.policy_failure}")


def _tokens(what: str, tokens: int, rate: float) -> str:
    text = f"{what} {count(tokens, 'token')}"
    return f"{text}, {format_rate(rate)} tok/s" if rate > 0 else text
