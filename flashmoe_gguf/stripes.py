"""The files over which a packed file's experts are spread: how they are called, found, checked.

The packed file names its stripes (`flashmoe.stripes`, see `flashmoe_gguf.pack`). Each is looked
for where it was written, then beside the packed file, so that moving all of them together works.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from flashmoe_gguf.errors import ModelFileError
from flashmoe_gguf.gguf import Header, read_header
from flashmoe_gguf.gguf.cursor import shown

MAX_STRIPES = 16  # FM_MAX_PLACES in native/stream.h

_NAME = re.compile(r"(?P<main>.+)\.stripe-[1-9][0-9]?-of-[1-9][0-9]?\.gguf")


def stripe_name(packed_name: str, index: int, count: int) -> str:
    """The file name of stripe `index`, from 0, of `count`."""
    return f"{packed_name}.stripe-{index + 1}-of-{count}.gguf"


def experts_in(index: int, count: int, n_expert: int) -> int:
    """How many of a group's experts lie in stripe `index` of `count`."""
    return len(range(index, n_expert, count))


def recorded_stripes(header: Header) -> tuple[str, ...]:
    """Where the stripes were written, () for a file without; raises ModelFileError."""
    value = header.metadata.get("flashmoe.stripes")
    if value is None:
        return ()
    paths = tuple(v for v in value if isinstance(v, str)) if isinstance(value, tuple) else ()
    ends = [stripe_name("", i, len(paths)) for i in range(len(paths))]
    if (
        not isinstance(value, tuple)
        or not 1 <= len(paths) <= MAX_STRIPES
        or len(paths) != len(value)
        or not all(path.endswith(end) for path, end in zip(paths, ends, strict=True))
    ):
        raise ModelFileError(
            f"{shown(header.path)}: flashmoe.stripes is not a list of stripes",
            "the packed file is damaged: pack the model again",
        )
    return paths


def find_stripes(header: Header) -> tuple[Header, ...]:
    """The stripes of a packed file, () for a file without.

    Raises ModelFileError, which names the one that is missing, damaged or another's.
    """
    recorded = recorded_stripes(header)
    return tuple(_open(header, path, i, len(recorded)) for i, path in enumerate(recorded))


def refuse_stripe(header: Header) -> None:
    """Raise ModelFileError for a stripe, which is no model by itself."""
    if "flashmoe.stripe.index" not in header.metadata:
        return
    name = _NAME.fullmatch(header.path.name)
    main = shown(name["main"]) if name else "the packed file that it belongs to"
    raise ModelFileError(f"{shown(header.path)}: this is a stripe of a packed file", f"give {main}")


def _open(header: Header, recorded: str, index: int, count: int) -> Header:
    path = Path(recorded)
    if not os.path.exists(path):
        path = header.path.with_name(path.name)
    which = f"stripe {index + 1} of {count} of {shown(header.path.name)}"
    if not os.path.exists(path):
        raise ModelFileError(
            f"{shown(recorded)}: {which} is missing",
            f"connect its drive, or put it beside {shown(header.path.name)}",
        )
    stripe = read_header(path)
    keys = ("flashmoe.version", "flashmoe.stripe.index", "flashmoe.stripe.count")
    wanted = (header.metadata.get("flashmoe.version"), index, count)
    hint = f"put the right {shown(path.name)} there, or pack the model again"
    if tuple(map(stripe.metadata.get, keys)) != wanted or len(stripe.shards) != 1:
        raise ModelFileError(f"{shown(path)}: this is not {which}", hint)
    key = "flashmoe.source.fingerprint"
    if stripe.metadata.get(key) != header.metadata.get(key):
        raise ModelFileError(f"{shown(path)}: this is not {which} but another model's", hint)
    return stripe
