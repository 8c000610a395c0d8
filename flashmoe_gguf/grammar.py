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

_MAX_CHARACTERS = 128 << 10
_MAX_DEPTH = 1000  # llama.cpp's parser recurses
MAX_REPEATS = _MAX_DEPTH  # llama_cpp nests what may come up to so many times
# Places that one character can lead on from: 60 take llama.cpp a second, 120 a minute. Of longer
# texts, such as the names of properties, 300 take it a third of a second.
_MAX_PLACES = 64
_OF_A_LONG_ONE = 16

_TOKENS = re.compile(
    r'\s+|\#[^\n]*|(?P<rule>[A-Za-z0-9-]+)\s*::=|(?P<name>[A-Za-z0-9-]+)|(?P<text>"(?:\\.|[^"\\])*")|'
    r"(?P<class>\[(?:\\.|[^\]\\])*\])|(?P<repeat>[*+?]|\{\s*\d*\s*,?\s*\d*\s*\})|(?P<other>.)"
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)")
_BOUNDS = ("minItems", "maxItems", "minLength", "maxLength")
_VALUES = ("const", "default", "enum", "examples")  # of a schema: what is no schema


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
            f"the grammar has more than {_MAX_PLACES} parts in a row that may be left out, "
            f"or {_OF_A_LONG_ONE * _MAX_PLACES} longer ones, which takes llama.cpp too long",
            'repeat what cannot be empty: "a"{0,500} and not ("a"?){500}',
        )


def parses(lib: Any, vocab: Any, text: str) -> bool:
    """Whether llama.cpp can parse a grammar: with one that it cannot, llama_cpp would go on with a
    null pointer. Raises OptionError as `check_grammar`. `lib`: the module llama_cpp.
    """
    check_grammar(text)
    sampler = lib.llama_sampler_init_grammar(vocab, text.encode("utf-8"), b"root")
    if sampler:
        lib.llama_sampler_free(sampler)
    return bool(sampler)


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
        self._short: set[str | None] = set()  # that may be a single character
        self._entries = dict.fromkeys(self._rules, 0.0)  # by rule, where it can begin
        self.most = 0.0
        for grows in (self._becomes_empty, self._becomes_short, self._begins_at_more):
            self._spread(grows)

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
                length = len(_ESCAPE.sub("x", word[1:-1])) if kind == "text" else 1
                parts.append(_Part(length=length, least=min(length, 1)))
            elif kind == "repeat" and parts:
                parts[-1] = parts[-1].repeated(word)
            elif word == ")" and len(open_rules) > 1:
                open_rules.pop()
            elif word == "|":
                self._rules[open_rules[-1]].append([])

    def _spread(self, grows: Callable[[str], bool]) -> None:
        """Asks of each rule, and again where one that it names has grown."""
        pending = dict.fromkeys(reversed(self._rules))  # what lies inside comes later
        while pending and self.most <= _MAX_PLACES:
            name = next(iter(pending))
            del pending[name]
            if grows(name):
                pending |= dict.fromkeys(self._users.get(name, ()))

    def _becomes_empty(self, name: str) -> bool:
        if name in self._empty:
            return False
        if any(all(map(self._may_be_empty, parts)) for parts in self._rules[name]):
            self._empty.add(name)
        return name in self._empty

    def _becomes_short(self, name: str) -> bool:
        if name in self._short:
            return False
        for parts in self._rules[name]:
            needed = [part for part in parts if not self._may_be_empty(part)]
            if len(needed) < 2 and any(map(self._may_be_short, needed or parts)):
                self._short.add(name)
        return name in self._short

    def _begins_at_more(self, name: str) -> bool:
        before = self._entries[name]
        for parts in self._rules[name]:
            row, begins = 0.0, True
            for part in parts:
                row += self._places(part)
                self.most = max(self.most, row)
                if begins:
                    self._entries[name] = max(self._entries[name], row)
                if not self._may_be_empty(part):
                    row, begins = 0.0, False
        return self._entries[name] > before

    def _may_be_empty(self, part: _Part) -> bool:
        return part.least == 0 or part.name in self._empty

    def _may_be_short(self, part: _Part) -> bool:
        short = part.length == 1 if part.name is None else part.name in self._short
        return short and (part.least < 2 or part.name in self._empty)

    def _places(self, part: _Part) -> float:
        inner = max(self._entries.get(part.name or "", 0.0), 1.0)
        # what cannot be empty itself is entered once, however often it comes
        times = part.most if part.name in self._empty else 1
        return inner * times / (1 if self._may_be_short(part) else _OF_A_LONG_ONE)


@dataclass(frozen=True)
class _Part:
    """A part of a sequence: what a rule says, or (None) so many characters."""

    name: str | None = None
    length: int = 1
    least: int = 1
    most: int = 1

    def repeated(self, word: str) -> _Part:
        """The same with *, +, ? or {m,n} behind it."""
        low, _, high = (part.strip() for part in word.strip("{}").partition(","))
        if word in ("*", "+", "?"):
            low, high = "1" if word == "+" else "0", "1"
        least = _number(low)
        most = _number(high) if high else max(least, 1)
        return replace(self, least=self.least * least, most=self.most * most)


def _number(digits: str) -> int:
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) < 10 else 10**9


def check_schema(schema: Any) -> None:
    """Raises OptionError for a JSON schema whose grammar would be too large to be written."""
    if not isinstance(schema, dict):
        raise OptionError("a JSON schema is an object")
    pending: list[Any] = [schema]
    while pending:
        values = pending.pop()
        if isinstance(values, dict):
            counts = [values[key] for key in _BOUNDS if isinstance(values.get(key), int | float)]
            if isinstance(pattern := values.get("pattern"), str):
                found = re.findall(r"\d+", " ".join(re.findall(r"\{[\d,\s]*\}", pattern)))
                counts += map(_number, found)
            if any(count > MAX_REPEATS for count in counts):
                raise OptionError(
                    f"the JSON schema repeats something more than {MAX_REPEATS} times",
                    f"{', '.join(_BOUNDS)} and counts in a pattern may not be larger",
                )
            values = [inner for key, inner in values.items() if key not in _VALUES]
        pending += [inner for inner in values if isinstance(inner, dict | list)]


_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


def guarded(lib: Any, sampler: Any, n_vocab: int, grammar: Any) -> Any:
    """A `LlamaSampler` that, where there is a grammar, chooses as llama_sampler_sample does, and
    raises OptionError where the grammar allows no token. `lib`: the module llama_cpp.
    """
    if grammar is None:
        return sampler
    chain = sampler.sampler
    ids, data = np.arange(n_vocab, dtype=np.int32), np.zeros(n_vocab, _TOKEN_DATA)

    def sample(ctx: Any, idx: int = -1) -> int:
        logits = lib.llama_get_logits_ith(ctx.ctx, idx)
        data["id"] = ids  # samplers sort
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
                "it asks for text that this model cannot write, or is at its end, for which the "
                "model has no token",
            )
        lib.llama_sampler_accept(chain, chosen.id)
        return int(chosen.id)

    sampler.sample = sample
    return sampler
