"""Grammars and JSON schemas that llama.cpp and llama_cpp would not survive, refused; and sampling
that can fail in a grammar.

llama.cpp keeps a stack for every place of the grammar where the text may be, and finding them
cannot be interrupted: `("a"?){500}` takes it longer than anyone waits. llama_cpp writes a schema's
bounds out, gigabytes of them if it is asked to. Where no token fits, llama.cpp takes one that does
not, and ends the process (src/llama-grammar.cpp, llama_grammar_accept_impl).
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashmoe_gguf.errors import OptionError

_MAX_CHARACTERS = 256 << 10
_MAX_DEPTH = 1000  # llama.cpp's parser recurses
_MAX_PLACES = 64  # 60 take llama.cpp seconds, 120 a minute
MAX_REPEATS = _MAX_DEPTH  # llama_cpp nests what may come up to so many times

_TOKENS = re.compile(
    r'\s+|\#[^\n]*|(?P<rule>[A-Za-z0-9-]+)\s*::=|(?P<name>[A-Za-z0-9-]+)|(?P<text>"(?:\\.|[^"\\])*")|'
    r"(?P<class>\[(?:\\.|[^\]\\])*\])|(?P<repeat>[*+?]|\{\s*\d{0,9}\s*,?\s*\d{0,9}\s*\})|(?P<other>.)"
)
_BOUNDS = ("minItems", "maxItems", "minLength", "maxLength")


def check_grammar(text: str) -> None:
    """Raises OptionError for a GBNF grammar that is too much for llama.cpp; not for a wrong one."""
    depth = deepest = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    if len(text) > _MAX_CHARACTERS or deepest > _MAX_DEPTH:
        raise OptionError(
            f"the grammar has {len(text)} characters, nested {deepest} deep",
            f"{_MAX_CHARACTERS} characters and {_MAX_DEPTH} levels at most",
        )
    if _Places(text).most > _MAX_PLACES:
        raise OptionError(
            f"the grammar has more than {_MAX_PLACES} parts in a row that may be left out, which "
            "takes llama.cpp too long",
            'repeat what cannot be empty: "a"{0,500} and not ("a"?){500}',
        )


class _Places:
    """How many places of a grammar can be the next one at once: parts in a row that may be empty,
    and the one behind them. `most`: the largest such count, over all places of all rules; where
    rules go in circles without reading anything, which llama.cpp refuses, some large number.
    """

    def __init__(self, text: str) -> None:
        self._rules: dict[str, list[list[_Part]]] = {}  # choices of sequences; groups are rules too
        self._users: dict[str, set[str]] = {}  # by rule, those that name it
        self._parse(text)
        self._empty: set[str | None] = set()  # rules that may be empty
        self._find_empty()
        self._entries = dict.fromkeys(self._rules, 1)  # by rule, where it can begin
        self.most = 1
        for _ in range(_MAX_PLACES):
            before = dict(self._entries)
            for name in reversed(self._rules):  # what lies inside comes later
                self._count(name)
            if self._entries == before or self.most > _MAX_PLACES:
                break

    def _parse(self, text: str) -> None:
        open_rules = [""]
        self._rules[""] = [[]]
        for found in _TOKENS.finditer(text):
            kind, word = found.lastgroup, found.group(found.lastgroup or 0)
            parts = self._rules[open_rules[-1]][-1]
            if kind == "rule":
                open_rules = [word]
                self._rules[word] = [[]]
            elif kind == "name" or word == "(":
                name = word if kind == "name" else f"({len(self._rules)}"
                parts.append(_Part(name))
                self._users.setdefault(name, set()).add(open_rules[-1])
                if word == "(":
                    open_rules.append(name)
                    self._rules[name] = [[]]
            elif kind in ("text", "class") or word == ".":
                parts.append(_Part(least=0 if word == '""' else 1))
            elif kind == "repeat" and parts:
                parts[-1] = parts[-1].repeated(word)
            elif word == ")" and len(open_rules) > 1:
                open_rules.pop()
            elif word == "|":
                self._rules[open_rules[-1]].append([])

    def _find_empty(self) -> None:
        pending = list(self._rules)
        while pending:
            name = pending.pop()
            if name not in self._empty and name in self._rules:
                choices = self._rules[name]
                if any(all(map(self._may_be_empty, parts)) for parts in choices):
                    self._empty.add(name)
                    pending += self._users.get(name, ())

    def _may_be_empty(self, part: _Part) -> bool:
        return part.least == 0 or part.name in self._empty

    def _count(self, name: str) -> None:
        for parts in self._rules[name]:
            row, begins = 0, True
            for part in parts:
                inner = self._entries.get(part.name or "", 1)
                # what cannot be empty itself is entered once, however often it comes
                row += inner * (part.most if part.name in self._empty else 1)
                self.most = max(self.most, row)
                if begins:
                    self._entries[name] = max(self._entries[name], row)
                if not self._may_be_empty(part):
                    row, begins = 0, False


@dataclass(frozen=True)
class _Part:
    """A part of a sequence: what a rule says, or text, a class or a dot (None)."""

    name: str | None = None
    least: int = 1
    most: int = 1

    def repeated(self, word: str) -> _Part:
        """The same with *, +, ? or {m,n} behind it."""
        low, _, high = (part.strip() for part in word.strip("{}").partition(","))
        if word in ("*", "+", "?"):
            low, high = "1" if word == "+" else "0", "1"
        least = int(low or 0)
        most = int(high) if high else max(least, 1)
        return replace(self, least=self.least * least, most=self.most * most)


def check_schema(schema: Any) -> None:
    """Raises OptionError for a JSON schema whose grammar would be too large to be written."""
    if isinstance(schema, dict):
        counts = [schema[key] for key in _BOUNDS if isinstance(schema.get(key), int | float)]
        if isinstance(pattern := schema.get("pattern"), str):
            counts += map(int, re.findall(r"\d+", " ".join(re.findall(r"\{[\d,\s]*\}", pattern))))
        if any(count > MAX_REPEATS for count in counts):
            raise OptionError(
                f"the JSON schema repeats something {max(counts):.15g} times",
                f"{MAX_REPEATS} times at most: {', '.join(_BOUNDS)} and counts in a pattern",
            )
    for inner in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(inner, dict | list):
            check_schema(inner)


_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


def sample_in_grammar(lib: Any, chain: Any, n_vocab: int) -> Callable[[Any, int], int]:
    """`LlamaSampler.sample` for a chain with a grammar: as llama_sampler_sample, and OptionError
    where the grammar allows no token.
    """
    data = np.zeros(n_vocab, _TOKEN_DATA)

    def sample(ctx: Any, idx: int = -1) -> int:
        logits = lib.llama_get_logits_ith(ctx.ctx, idx)
        data["id"] = np.arange(n_vocab, dtype=np.int32)
        data["logit"] = np.ctypeslib.as_array(logits, (n_vocab,))
        data["p"] = 0
        array = lib.llama_token_data_array(
            data=ctypes.cast(data.ctypes.data, lib.llama_token_data_p),
            size=n_vocab,
            selected=-1,
            sorted=False,
        )
        lib.llama_sampler_apply(chain, ctypes.byref(array))
        chosen = array.data[array.selected]
        if not chosen.logit > -math.inf:
            raise OptionError(
                "the grammar allows none of the model's tokens here",
                "it asks for text that this model cannot write, such as a zero byte",
            )
        lib.llama_sampler_accept(chain, chosen.id)
        return int(chosen.id)

    return sample
