"""Which architectures of a llama.cpp source tree have routed experts.

Computed from the source's own tables, so that a new architecture of a new pin shows up in the
list, and from there in the tests. Run as a script it writes the list as JSON:

    python moe_archs.py SOURCE OUT

where SOURCE holds llama.cpp's src/. What it reads there:

- src/llama-arch.cpp, LLM_ARCH_NAMES: enumerator -> the name in `general.architecture`;
- src/llama-model.cpp, llama_model_mapping: enumerator -> the class that loads it;
- src/models/models.h: a class -> its base, whose loading it inherits;
- src/models/*.cpp: which classes' load_arch_tensors create expert weights.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

_NAME = re.compile(r"\{\s*(LLM_ARCH_\w+)\s*,\s*\"([^\"]+)\"\s*\}")
_CASES = re.compile(r"((?:case\s+LLM_ARCH_\w+\s*:\s*)+)return\s+new\s+(llama_model_\w+)\s*\(")
_CASE = re.compile(r"LLM_ARCH_\w+")
_CLASS = re.compile(
    r"struct\s+(llama_model_\w+)\s*(?:final\s*)?:\s*(?:public\s+)?(llama_model_\w+)"
)
_LOAD = re.compile(r"void\s+(llama_model_\w+)::load_arch_tensors\s*\(")
_EXPERTS = re.compile(
    r"LLM_TENSOR_FFN_(?:UP|GATE|DOWN|GATE_UP)_(?:EXPS|CHEXPS)\b|create_tensor_gate_up_exps"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class SourceTableError(Exception):
    """The source does not have a table where this module looks for it."""


def moe_architectures(source: Path) -> list[str]:
    """The names of all architectures whose loader can create routed-expert weights, sorted.

    `source` is the folder that holds llama.cpp's src/. Raises SourceTableError if a table is
    missing or an architecture's loader cannot be found: a changed source must not look like
    one without experts.
    """
    src = source / "src"
    names = dict(_NAME.findall(_between(src / "llama-arch.cpp", "LLM_ARCH_NAMES", "};")))
    mapping = _between(src / "llama-model.cpp", "llama_model_mapping(", "\n}")
    loads = {
        arch: loader for cases, loader in _CASES.findall(mapping) for arch in _CASE.findall(cases)
    }
    bases = dict(_CLASS.findall(_text(src / "models" / "models.h")))
    bodies = _loaders(src / "models")
    if not (names and loads and bases and bodies):
        raise SourceTableError(f"{src}: a table of architectures is empty")
    unknown = sorted(set(loads) - set(names))
    if unknown:
        raise SourceTableError(f"{src}: {', '.join(unknown)} has a loader and no name")
    found = []
    for arch, loader in loads.items():
        owner = loader
        while owner not in bodies:
            if owner not in bases:
                raise SourceTableError(f"{src}: no load_arch_tensors for {loader}")
            owner = bases[owner]
        if _EXPERTS.search(bodies[owner]):
            found.append(names[arch])
    return sorted(found)


def _text(path: Path) -> str:
    """A source file without its comments."""
    try:
        return _COMMENT.sub("", path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceTableError(f"{path}: {error.strerror}") from error


def _between(path: Path, start: str, end: str) -> str:
    """The first text of the file from `start` to the next `end`."""
    _, found, rest = _text(path).partition(start)
    if not found or end not in rest:
        raise SourceTableError(f"{path}: no {start}")
    return rest.partition(end)[0]


def _loaders(folder: Path) -> dict[str, str]:
    """Class -> body of its load_arch_tensors; a file may hold several."""
    bodies: dict[str, str] = {}
    for path in sorted(folder.glob("*.cpp")):
        text = _text(path)
        for match in _LOAD.finditer(text):
            body = text[match.start() :].partition("\n}")[0]
            bodies[match.group(1)] = body
    return bodies


def main(arguments: list[str]) -> None:
    source, out = (Path(a) for a in arguments)
    out.write_text(json.dumps(moe_architectures(source), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
