"""What a check says, and where checks read the system from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# "hurts": streaming will be slow or fail here; "note": worth knowing.
State = Literal["good", "note", "hurts"]


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do about it ("" if nothing).

    `data` is the same for programs.
    """

    name: str
    state: State
    value: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class System:
    """The files by which Linux describes itself, under `root` so that tests can make them up."""

    root: Path = Path("/")

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """A file's text without the end; "" when it is not there."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""
