"""Running the command line in tests: in this process, as a child, or in a terminal (a pty)."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil
from click.testing import CliRunner, Result

from flashmoe_gguf.bench.synthetic import build_replay_model, synthetic_trace
from flashmoe_gguf.cli import main

# The child imports what the tests import, wherever they were started.
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from flashmoe_gguf.cli import main; main(prog_name='flashmoe')"
)
# Ctrl-C reaches only whose terminal it is.
_TAKE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
_TIMEOUT_SECONDS = 120


def flashmoe(*arguments: str | Path, stdin: str = "") -> Result:
    """Runs a command in this process, on one thread where it computes."""
    return CliRunner().invoke(main, [str(a) for a in arguments], input=stdin, prog_name="flashmoe")


def command(*arguments: str | Path) -> list[str]:
    """The same as a command for `subprocess`."""
    start = _START.format(path=[p for p in sys.path if p])
    return [sys.executable, "-c", start, *(str(a) for a in arguments)]


def flashmoe_child(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own."""
    return subprocess.run(
        command(*arguments),
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )


def assert_error(result: Result, message: str, hint: str) -> None:
    """Exit code 2, one error line with `message` in it, a hint with `hint`, nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    hints = [line for line in result.stderr.splitlines() if line.startswith("hint: ")]
    assert len(errors) == len(hints) == 1, result.stderr
    assert message in errors[0]
    assert hint in hints[0]
    assert result.stderr.splitlines()[-2:] == [*errors, *hints]


def make_replay_model(path: Path, n_tokens: int) -> Path:
    """A tiny model with a vocabulary whose greedy answers replay a trace of so many tokens."""
    trace = synthetic_trace(n_tokens, 3, 8, 2)
    return build_replay_model(
        path,
        trace,
        n_expert=8,
        width=256,
        expert_width=256,
        n_head=4,
        n_head_kv=2,
        n_ctx=n_tokens + 256,
    )


class Terminal:
    """A command in a pty, as a user would see it; `expect` waits for words to appear."""

    def __init__(self, *arguments: str | Path) -> None:
        import pty  # not on Windows

        self._fd, far_end = pty.openpty()
        python, option, start, *rest = command(*arguments)
        self._child = subprocess.Popen(
            [python, option, _TAKE_TERMINAL + start, *rest],
            stdin=far_end,
            stdout=far_end,
            stderr=far_end,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"},
        )
        os.close(far_end)
        self._seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.kill()
        self._child.wait()
        os.close(self._fd)

    def send(self, keys: str) -> None:
        """Types."""
        os.write(self._fd, keys.encode())

    def interrupt_prompt(self) -> None:
        """Types Ctrl-C once the command waits for a line, and again if nothing comes of it.

        CPython shows the prompt first and waits after it. What a Ctrl-C between the two has to say
        is heard with the next one only, as one: this is too early for a user's hand, and not for a
        program's. A command that sleeps may also wait for another of its threads.
        """
        command = psutil.Process(self._child.pid)
        for _ in range(_TIMEOUT_SECONDS // 20):
            deadline = time.monotonic() + 20
            while command.status() != psutil.STATUS_SLEEPING and time.monotonic() < deadline:
                time.sleep(0.001)
            self.send("\x03")
            if select.select([self._fd], [], [], 20)[0]:
                return
        raise AssertionError("the command does not hear Ctrl-C")

    def expect(self, pattern: str) -> str:
        """What the screen showed up to and with `pattern`, since the last call."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not (found := re.search(pattern, self._seen)):
            if not self._read(deadline):
                raise AssertionError(f"no {pattern!r} in {self._seen!r}")
        shown, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return shown

    def exit_code(self) -> int:
        """Waits for the end."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while self._read(deadline):
            pass
        return self._child.wait(_TIMEOUT_SECONDS)

    @property
    def rest(self) -> str:
        """What was shown and not yet expected."""
        return self._seen

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            raise AssertionError(f"nothing more came after {self._seen!r}")
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # Linux's way to say that the other side is gone
            return False
        self._seen += data.decode("utf-8", "replace")
        return bool(data)


def lines_like(text: str, patterns: Sequence[str]) -> bool:
    """Whether each line of `text` fully matches its pattern."""
    lines = text.splitlines()
    return len(lines) == len(patterns) and all(
        re.fullmatch(pattern, line) for pattern, line in zip(patterns, lines, strict=True)
    )
