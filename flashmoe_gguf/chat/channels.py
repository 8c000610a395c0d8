"""Answers in channels, as gpt-oss writes them: only the final one is the answer.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>answer

Source: OpenAI's harmony response format. The markers are single tokens without text of their own.
"""

from __future__ import annotations

_FINAL = "final"


class Channels:
    """Takes markers and text in turn and says which text is part of the answer.

    Without a `<|channel|>` marker, which other models do not have, all of it is.
    """

    def __init__(self) -> None:
        self._header: str | None = None  # the text of a message's head, while in it
        self._in_use = False
        self._hidden = False

    def marker(self, name: str) -> None:
        """A token that stands for no text, by its name in the vocabulary."""
        if name == "<|channel|>":
            self._header, self._in_use = "", True
        elif not self._in_use:
            return
        elif name == "<|start|>":
            self._header = ""
        elif name == "<|message|>" and self._header is not None:
            self._hidden = self._header.split()[:1] != [_FINAL]
            self._header = None

    def text(self, piece: str) -> str:
        """What of a piece of text is the answer."""
        if self._header is not None:
            self._header += piece
            return ""
        return "" if self._hidden else piece
