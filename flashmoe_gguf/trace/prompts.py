"""Prompts out of a JSON Lines or text file, whatever the data set calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashmoe_gguf.errors import TraceError

# In this order: what data sets of questions call the text that is put to the model.
_FIELDS = (
    "prompt",
    "question",
    "turns",
    "instruction",
    "input",
    "text",
    "messages",
    "conversations",
)


def read_prompts(path: Path, field: str | None = None) -> list[tuple[str, ...]]:
    """Each prompt of a file as the user's turns of one conversation.

    In JSON Lines, an object per line, the text is in `field` or in the first of the usual fields
    that is there: a string, a list of strings (turns), or a list of messages of which the user's
    are taken. In any other file, each line that is not empty is a prompt. Raises TraceError.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = "this is not UTF-8 text" if isinstance(error, ValueError) else error.strerror
        raise TraceError(f"cannot read {path}: {what}", "check the path") from error
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise TraceError(f"{path.name}: there are no prompts in it")
    if not numbered[0][1].lstrip().startswith("{"):
        if field is not None:
            raise TraceError(f"{path.name}: plain lines have no fields", "leave --field out")
        return [(line,) for _, line in numbered]
    return [_turns(path, i, line, field) for i, line in numbered]


def _turns(path: Path, number: int, line: str, field: str | None) -> tuple[str, ...]:
    where = f"{path.name}, line {number}"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: this is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TraceError(f"{where}: this is no JSON object")
    names = [field] if field is not None else [name for name in _FIELDS if name in value]
    if not names or names[0] not in value:
        raise TraceError(
            f"{where}: no prompt found", f"--field names it, one of: {', '.join(value) or 'none'}"
        )
    turns = _texts(value[names[0]])
    if not turns:
        raise TraceError(f"{where}: '{names[0]}' is no text", "--field names another one")
    return turns


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    if not isinstance(value, list):
        return ()
    texts = []
    for item in value:
        if isinstance(item, dict):
            role = item.get("role", item.get("from", "user"))
            item = item.get("content", item.get("value")) if role in ("user", "human") else ""
        if isinstance(item, str) and item.strip():
            texts.append(item)
    return tuple(texts)
