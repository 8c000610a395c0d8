"""Which arms a bench runs under which limits, from what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashmoe_gguf.bench.arm import STOCK, STOCK_DEFAULT, STREAMED, Arm
from flashmoe_gguf.budget import format_size, parse_size
from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.lookahead import parse_lookahead
from flashmoe_gguf.store import Geometry
from flashmoe_gguf.tuning import check_readers

IN_RAM = "in-ram"
ARMS = (STOCK, STOCK_DEFAULT, STREAMED, IN_RAM)

# What a process needs beside the model's own bytes to keep all of it in memory: the interpreter,
# the context, and a tenth for the system.
_BESIDE_BYTES = 1 << 30

# A neutral text for models that read: several subjects, so that many experts have work.
PROMPT_TEXT = """\
The harbour was quiet when the survey ship came in. Its crew had measured the sea floor for eleven
weeks, a strip of some forty metres at a time, and had found what nobody had drawn on a map before:
a chain of hills, each about as high as a church, running north to south. Why they are there is not
known. One idea is that gas rose through the mud and carried it along; another is that a glacier
left them. To decide, one would have to drill. Drilling costs 90,000 a day, so the question waits.

To make bread for four, mix 500 g of flour, 350 g of water, 10 g of salt and 3 g of yeast. Let it
rest overnight in a cool place. Fold it twice, an hour apart, and bake it at 240 degrees until the
crust is dark. If it is pale after forty minutes, the oven is colder than it says.

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

Question: A train leaves at 9:40 and arrives at 12:05. It stands still for a quarter of an hour on
the way. How long does it move? Answer: The journey takes 2 hours and 25 minutes; without the stop
that is 2 hours and 10 minutes.

Le marché ouvre à sept heures. Die Bäckerei ist schon seit fünf Uhr auf. In the end the two towns
agreed: each would pay half of the bridge, and the toll would go to whoever repairs it. The treaty
has three articles. The first names the river. The second says who may cross, and when. The third,
which was added later by another hand, forbids the keeping of bees within a mile of the water.
"""


@dataclass(frozen=True)
class Case:
    """An arm and the memory limit that it runs under; None: measured, not limited."""

    arm: Arm
    limit_bytes: int | None
    layout: str = "in place"

    @property
    def name(self) -> str:
        return self.arm.name


@dataclass(frozen=True)
class NamedArm:
    """The settings of one `--arm`, as changes to the streamed arm. `threads` None: unchanged."""

    name: str
    packed: bool
    changes: tuple[tuple[str, Any], ...]


def _whole(least: int) -> Callable[[str, str], int]:
    def convert(key: str, text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise OptionError(
                f"{key}={text} in --arm is no whole number", f"give one from {least} on"
            )
        return int(text)

    return convert


def _one_of(*allowed: str) -> Callable[[str, str], str]:
    def convert(key: str, text: str) -> str:
        if text not in allowed:
            raise OptionError(f"{key}={text} in --arm", f"{key} is one of {', '.join(allowed)}")
        return text

    return convert


def _lookahead(_key: str, text: str) -> str:
    parse_lookahead(text)
    return text


def _readers(key: str, text: str) -> int:
    n_workers: int = _whole(1)(key, text)
    check_readers(n_workers, None)
    return n_workers


def _request(_key: str, text: str) -> int:
    request_bytes = parse_size(text)
    check_readers(None, request_bytes)
    return request_bytes


# Key of --arm -> field of Arm, and how its value is read. `layout` chooses another file.
_SETTINGS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "policy": ("policy", lambda _key, text: text),
    "policy_file": ("policy_file", lambda _key, text: text),
    "layout": ("", _one_of("packed", "in-place")),
    "io": ("io", _one_of("auto", "direct", "buffered")),
    "slots": ("n_slots", _whole(0)),
    "threads": ("n_threads", _whole(1)),
    "lookahead": ("lookahead", _lookahead),
    "workers": ("n_workers", _readers),
    "request": ("request_bytes", _request),
}


def parse_arm(text: str) -> NamedArm:
    """One `--arm KEY=VALUE[,KEY=VALUE...]`; raises OptionError."""
    changes: dict[str, Any] = {}
    packed = False
    for setting in text.split(","):
        key, equals, value = setting.strip().partition("=")
        if key not in _SETTINGS or not equals or not value:
            raise OptionError(
                f"'{setting}' is no setting of an arm",
                f"KEY=VALUE, and KEY one of {', '.join(_SETTINGS)}",
            )
        field, convert = _SETTINGS[key]
        if field in changes or (key == "layout" and packed):
            raise OptionError(f"{key} is given twice in --arm {text}", "give it once")
        converted = convert(key, value)
        if key == "layout":
            packed = converted == "packed"
        else:
            changes[field] = converted
    return NamedArm(text.replace(" ", ""), packed, tuple(changes.items()))


def make_cases(
    base: Arm,
    limits: Sequence[int | None],
    *,
    arms: Iterable[str] = ARMS,
    named: Sequence[NamedArm] = (),
    packed: Path | None = None,
    fits: bool = True,
) -> list[Case]:
    """Every arm under every limit, in the order in which a round runs them; `in-ram` once.

    `base` has everything but name, kind and budget. `packed` is the file of `layout=packed` arms.
    `fits`: whether all of the model has room in memory; without, there is no `in-ram`, and without
    a limit `stock` is already that.
    """
    wanted = set(arms)
    cases = []
    if IN_RAM in wanted and fits and None not in limits:
        cases.append(Case(replace(base, name=IN_RAM, kind=STOCK), None))
    for limit in limits:
        for kind in (STOCK, STOCK_DEFAULT):
            if kind in wanted:
                cases.append(Case(replace(base, name=kind, kind=kind), limit))
        streamed = replace(base, kind=STREAMED, ram=limit)
        if STREAMED in wanted:
            cases.append(Case(replace(streamed, name=STREAMED), limit))
        for row in named:
            arm = replace(streamed, name=row.name, **dict(row.changes))
            if row.packed:
                assert packed is not None
                cases.append(Case(replace(arm, model=str(packed)), limit, "packed"))
            else:
                cases.append(Case(arm, limit))
    names = [(case.name, case.limit_bytes) for case in cases]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"there are two arms called {name[0]}", "give each of them once")
    if not any(case.arm.kind == STREAMED for case in cases):
        raise OptionError("no arm streams: nothing to compare", "add streamed to --arms")
    return cases


def sweep_limits(floor: int, model_bytes: int, steps: int) -> list[int]:
    """`steps` limits at equal distances from the floor to 110 % of the model, in whole MiB."""
    top = max(model_bytes * 11 // 10, floor)
    if steps == 1:
        return [_mib(floor)]
    return [_mib(floor + (top - floor) * i // (steps - 1)) for i in range(steps)]


def _mib(size: int) -> int:
    return -(-size // (1 << 20)) << 20


def model_bytes(geometry: Geometry) -> int:
    """The size of all files of a model."""
    return sum(file.size_bytes for file in geometry.files)


def fits_in_memory(geometry: Geometry, available_bytes: int) -> bool:
    """Whether stock llama.cpp could keep all of the model in so much memory."""
    return model_bytes(geometry) * 11 // 10 + _BESIDE_BYTES <= available_bytes


def is_replay(geometry: Geometry) -> bool:
    """Whether it is one of our generated models, whose greedy decoding follows a trace."""
    description = geometry.header.metadata.get("general.description")
    return isinstance(description, str) and description.startswith("Generated: greedy decoding")


def has_vocabulary(geometry: Geometry) -> bool:
    """Whether it can read text."""
    return geometry.header.metadata.get("tokenizer.ggml.model") not in ("no_vocab", "none", None)


def prompt_of(geometry: Geometry, n_prompt: int, text: str | None) -> tuple[Sequence[int], str]:
    """(token ids, text) of the prompt, one of the two empty: a replay model starts at the trace's
    first token, a model that cannot read gets the first ids, any other one text.
    """
    if is_replay(geometry) or not has_vocabulary(geometry):
        if text is not None:
            raise OptionError(
                f"{geometry.header.path.name} cannot read text", "leave out --prompt-file"
            )
        return range(n_prompt), ""
    return (), PROMPT_TEXT if text is None else text


def limit_text(limit_bytes: int | None) -> str:
    """A limit for people."""
    return "no limit" if limit_bytes is None else format_size(limit_bytes)
