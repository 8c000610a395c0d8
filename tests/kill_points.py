"""Packing in a child that kills itself, as `kill -9` would, before its n-th change of the disk.

Counted are writes, syncs, truncations, renames and deletions. A write that is hit leaves half of
its bytes, as it may in life. Run as a script it reads one JSON request from stdin.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CALLS = ("pwrite", "fsync", "ftruncate", "truncate", "replace", "unlink")
NEVER = 1 << 40

_START = (
    "import sys; sys.path[:] = {path!r}; import runpy; runpy.run_path({me!r}, run_name='__main__')"
)


def pack_in_child(
    source: Path,
    out: Path,
    *,
    in_place: bool,
    kill_at: int = NEVER,
    stripes: Sequence[Path] = (),
) -> int | None:
    """None if it was killed, else how many changes it made; fails the test otherwise."""
    request = {
        "source": str(source),
        "out": str(out),
        "in_place": in_place,
        "kill_at": kill_at,
        "stripes": [str(folder) for folder in stripes],
    }
    done = subprocess.run(
        [sys.executable, "-c", _START.format(path=[p for p in sys.path if p], me=__file__)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def _main() -> None:
    from flashmoe_gguf.pack import pack_model

    request = json.load(sys.stdin)
    count = 0

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == request["kill_at"]:
                if name == "pwrite":
                    fd, data, offset = args
                    real(fd, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))
    pack_model(
        request["source"],
        request["out"],
        in_place=request["in_place"],
        stripes=request["stripes"],
    )
    print(count)


if __name__ == "__main__":
    _main()
