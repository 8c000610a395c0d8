"""docs/ARCHITECTURES.md, generated from `arch_table`. From tests/:

python -m tiny_models.arch_docs > ../docs/ARCHITECTURES.md
"""

from __future__ import annotations

from .arch_table import EXCEPTIONS, ROWS

_HEAD = """\
# Architectures

Every architecture of the pinned llama.cpp whose loader knows routed experts. For each of the
{n_run} in the first table the tests generate a tiny random model and run it in stock llama.cpp and
streamed, with as many slots as a token uses experts and with none at all: a prompt of 64 tokens,
then 64 greedy ones. The logits are the same bit for bit. The list itself is computed from
llama.cpp's source when the package is built, so that an architecture that a new version adds fails
a test until it has a row.

This page is generated: `python -m tiny_models.arch_docs > ../docs/ARCHITECTURES.md` in tests/.

## Tested

| architecture | what is special | kind |
|---|---|---|
"""
_KINDS = """
A decoder predicts the next token. A diffusion model has no memory: each batch is computed anew
from its last 16 tokens. An encoder gives embeddings, and these are compared.

## Not tested

| architecture | reason |
|---|---|
"""


def markdown() -> str:
    """The whole page."""
    rows = sorted(ROWS, key=lambda row: row.name)
    tested = "".join(f"| `{row.name}` | {row.what} | {row.kind} |\n" for row in rows)
    reasons = "".join(f"| `{name}` | {why} |\n" for name, why in sorted(EXCEPTIONS.items()))
    return _HEAD.format(n_run=len(rows)) + tested + _KINDS + reasons


if __name__ == "__main__":
    print(markdown(), end="")
