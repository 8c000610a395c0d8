"""Unified diffs, applied exactly or not at all.

Owns: reading ``patches/*.patch`` and computing the patched text of a file, in
memory. Leaves to others: where files lie, when to write them, what to rebuild.

Why not a patch library: the archive is pinned by hash, so every hunk must match
at the very line it names. Anything else (an offset, fuzz, "already applied", a
hunk whose counts are wrong) means that the patch was made for other sources and
has to stop the build, before an hour of compiling, naming file and hunk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_UNSUPPORTED = (
    b"GIT binary patch",
    b"Binary files ",
    b"rename from ",
    b"copy from ",
    b"deleted file mode ",
    b"old mode ",
)
_NO_NEWLINE = b"\\ No newline at end of file"


class PatchError(Exception):
    """A patch is malformed or does not match the sources; the message says where."""


@dataclass(frozen=True)
class Hunk:
    """One hunk: its header, the 1-based line it starts at, what it expects and what it leaves."""

    header: str
    old_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    added: int


@dataclass(frozen=True)
class FilePatch:
    """All hunks of one patch file for one source file; ``path`` has no ``a/`` or ``b/``."""

    path: str
    creates: bool
    hunks: tuple[Hunk, ...]

    @property
    def added(self) -> int:
        """Number of added lines."""
        return sum(hunk.added for hunk in self.hunks)


def parse(text: bytes, name: str) -> tuple[FilePatch, ...]:
    """Read a unified diff (plain or git's); ``name`` is used in messages.

    Text before a file's ``---`` line is a description and is skipped. Raises
    PatchError for deletions, renames, mode changes, binary hunks, unsafe paths
    and hunks whose line counts do not match their header.
    """
    lines = _lines(text)
    files: list[FilePatch] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(_UNSUPPORTED):
            raise PatchError(f"{name}:{at + 1}: not supported: {_show(line)}")
        if line.startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ "):
            file, at = _parse_file(lines, at, name)
            files.append(file)
        elif files and line[:1] in (b"+", b"-", b" ", b"@", b"\\") and line.rstrip() != b"--":
            raise PatchError(f"{name}:{at + 1}: line outside a hunk: {_show(line)}")
        elif _HUNK.match(line):
            raise PatchError(f"{name}:{at + 1}: hunk without a file header")
        else:
            at += 1
    if not files:
        raise PatchError(f"{name}: no file header (--- / +++) found")
    return tuple(files)


def apply(source: bytes | None, patch: FilePatch, name: str) -> bytes:
    """The patched text of ``source`` (None: the file does not exist).

    Every hunk must match byte for byte at the line that its header names.
    Raises PatchError naming the patch, the file and the hunk.
    """
    if patch.creates:
        if source is not None:
            raise PatchError(f"{name}: creates {patch.path}, which exists already")
        return b"".join(patch.hunks[0].new)
    if source is None:
        raise PatchError(f"{name}: changes {patch.path}, which does not exist")

    lines = _lines(source)
    result: list[bytes] = []
    done = 0
    for number, hunk in enumerate(patch.hunks, 1):
        # A hunk that only inserts names the line before the insertion.
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        where = f"{name}: hunk {number} ({hunk.header}) does not apply to {patch.path}"
        if start < done:
            raise PatchError(f"{where}: it overlaps the hunk before it")
        found = tuple(lines[start : start + len(hunk.old)])
        if found != hunk.old or start > len(lines):
            raise PatchError(where + _difference(hunk, found, start, lines))
        result += lines[done:start]
        result += hunk.new
        done = start + len(hunk.old)
    result += lines[done:]
    return b"".join(result)


def _parse_file(lines: list[bytes], at: int, name: str) -> tuple[FilePatch, int]:
    old, new = _path(lines[at]), _path(lines[at + 1])
    if new == "/dev/null":
        raise PatchError(f"{name}:{at + 2}: deleting a file is not supported")
    path = new.partition("/")[2]
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise PatchError(f"{name}:{at + 2}: unsafe path {new!r} (expected b/...)")
    if old not in ("/dev/null", f"a/{path}"):
        raise PatchError(f"{name}:{at + 1}: {old!r} and {new!r} are not one file")
    hunks: list[Hunk] = []
    at += 2
    while at < len(lines) and _HUNK.match(lines[at]):
        hunk, at = _parse_hunk(lines, at, name)
        hunks.append(hunk)
    if not hunks:
        raise PatchError(f"{name}:{at}: {path} has no hunk")
    creates = old == "/dev/null"
    if creates and (len(hunks) != 1 or hunks[0].old):
        raise PatchError(f"{name}: {path} is new but expects old lines")
    return FilePatch(path, creates, tuple(hunks)), at


def _parse_hunk(lines: list[bytes], at: int, name: str) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[at])
    assert match is not None
    header = match.group(0).decode()
    old_left, new_left = (int(match.group(i) or b"1") for i in (2, 4))
    old: list[bytes] = []
    new: list[bytes] = []
    added = 0
    head, at = at, at + 1
    while old_left or new_left:
        line = lines[at] if at < len(lines) else b""
        tag, rest = line[:1], line[1:]
        if tag == b"\n":  # some editors strip the space of an empty context line
            tag, rest = b" ", b"\n"
        if tag == b" ":
            sides = [old, new]
        elif tag == b"-":
            sides = [old]
        elif tag == b"+":
            sides = [new]
            added += 1
        elif line.startswith(_NO_NEWLINE):
            _cut_newline(lines[at - 1], old, new)
            at += 1
            continue
        else:
            raise PatchError(f"{name}:{head + 1}: hunk {header} is shorter than it says")
        for side in sides:
            side.append(rest)
        old_left -= tag != b"+"
        new_left -= tag != b"-"
        if old_left < 0 or new_left < 0:
            raise PatchError(f"{name}:{head + 1}: hunk {header} is longer than it says")
        at += 1
    if at < len(lines) and lines[at].startswith(_NO_NEWLINE):
        _cut_newline(lines[at - 1], old, new)
        at += 1
    return Hunk(header, int(match.group(1)), tuple(old), tuple(new), added), at


def _cut_newline(previous: bytes, old: list[bytes], new: list[bytes]) -> None:
    for side, tags in ((old, b" -"), (new, b" +")):
        if previous[:1] in tags and side:
            side[-1] = side[-1].removesuffix(b"\n")


def _lines(text: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", text)  # splitlines would also split at a lone \r


def _path(line: bytes) -> str:
    return line[4:].split(b"\t")[0].strip().decode("utf-8")


def _difference(hunk: Hunk, found: tuple[bytes, ...], start: int, lines: list[bytes]) -> str:
    """Says which line differs and, if they moved, where the expected lines are."""
    text = ""
    for offset, expected in enumerate(hunk.old):
        actual = found[offset] if offset < len(found) else None
        if actual != expected:
            shown = "(end of file)" if actual is None else _show(actual)
            text = (
                f" at line {start + offset + 1}\n"
                f"  the patch expects: {_show(expected)}\n"
                f"  the file has:      {shown}"
            )
            break
    size = len(hunk.old)
    moved = [i + 1 for i in range(len(lines)) if size and tuple(lines[i : i + size]) == hunk.old]
    if moved:
        places = ", ".join(map(str, moved))
        text += f"\n  the expected lines are at line {places}: refresh the patch"
    return text or f": the file has only {len(lines)} lines"


def _show(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r\n")
