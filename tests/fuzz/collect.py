"""The corpus: one small file for each kind of answer that a run met, and what is done with it.

`python -m fuzz.collect DIR` takes what `python -m fuzz.run --keep DIR` left there and adds one
file for each new kind of answer; without DIR it only writes answers.json anew. A file of the corpus
is a whole model file, compressed by zlib; answers.json says which steps it passes.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import zlib
from pathlib import Path

from fuzz import target
from fuzz.mutate import damaged
from fuzz.seeds import make_seeds

CORPUS = Path(__file__).with_name("corpus")
ANSWERS = CORPUS / "answers.json"
_MAX_BYTES = 6000


def read(name: str) -> bytes:
    """The model file that a file of the corpus holds."""
    return zlib.decompress((CORPUS / name).read_bytes())


def answers(data: bytes, folder: Path) -> dict[str, str]:
    """What `target.examine` says of one file, with all messages as "refused"."""
    model = target.write(folder / "model", [("model.gguf", data)])
    results = target.examine(model, folder / "work")
    return {step: "passes" if r == "passes" else "refused" for step, r in results.items()}


def _label(message: str) -> str:
    """A name for a kind of message: its words, without those that come from the file."""
    label = re.sub(r"[^a-z]+", "-", message.lower()).strip("-")
    label = re.sub(r"^(tensor|key)-.*?(has|is|lies)-", r"\1-\2-", label)
    label = re.sub(r"(the-value-of-).*(has|is|needs)-", r"\1\2-", label)
    label = re.sub(r"(rows-of-elements|impossible-shape|format-version)-.*", r"\1", label)
    return label[:60].rstrip("-")


def main(kept: Path | None) -> None:
    """Add to the corpus, then write down what each of its files passes."""
    have = {re.sub(r"^[0-9]+-|\.bin$", "", p.name) for p in CORPUS.glob("*.bin")}
    number = len(have)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        seeds = make_seeds(work)
        lines = (kept / "kinds.jsonl").read_text().splitlines() if kept else []
        rows = [json.loads(line) for line in lines]
        for row in sorted(rows, key=lambda row: (row["kind"].split(": ", 1)[1], row["size"])):
            step, _, message = row["kind"].partition(": ")
            label = f"passes-{step.split()[0]}" if message == "passes" else _label(message)
            if step == "load" or label in have or row["files"] > 1:
                continue
            ((_, data),) = damaged(seeds, row["run"], row["index"]).files
            packed = zlib.compress(data, 9)
            if len(packed) <= _MAX_BYTES:
                have.add(label)
                (CORPUS / f"{number:03}-{label}.bin").write_bytes(packed)
                number += 1
        names = sorted(p.name for p in CORPUS.glob("*.bin"))
        (work / "answers").mkdir()
        found = {name: answers(read(name), work / "answers") for name in names}
    ANSWERS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
