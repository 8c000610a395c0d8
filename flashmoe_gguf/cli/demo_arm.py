"""One arm of `flashmoe demo`, in a process of its own: a process holds one set of libraries.

Reads a request (JSON) from stdin and writes events to stdout, one JSON object per line: `piece`
while the answer is made, then `result`; or `error`, with exit code 2.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashmoe_gguf.errors import FlashMoEError, OptionError

# The child imports what its parent imports, wherever it was started.
_START = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from flashmoe_gguf.cli.demo_arm import main; sys.exit(main())"
)


@dataclass(frozen=True)
class Request:
    """What both arms are asked. `n_slots` None: the stock library."""

    model: str
    question: str
    max_tokens: int
    threads: int
    n_slots: int | None = None
    n_ctx: int = 1024
    n_ubatch: int = 512


@dataclass(frozen=True)
class Result:
    """What one arm did. `logits` has a sha256 per step: what each token was chosen from.

    `peak_bytes` is the process's largest resident size, mapped files included.
    """

    tokens: list[int]
    logits: list[str]
    prompt_tokens: int
    prompt_seconds: float
    decode_seconds: float
    peak_bytes: int
    hit_rate: float = 0.0
    bytes_read: int = 0

    @property
    def prompt_rate(self) -> float:
        """Tokens per second."""
        return self.prompt_tokens / self.prompt_seconds

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first; 0 when there was one token only."""
        steps = len(self.logits) - 1
        return steps / self.decode_seconds if steps else 0.0

    def same_output(self, other: Result) -> bool:
        """Whether every token and every bit of every step's logits agree."""
        return self.tokens == other.tokens and self.logits == other.logits


def run_arm(request: Request, on_piece: Callable[[str], None]) -> Result:
    """Runs one arm in a child process. Raises FlashMoEError when it fails or dies."""
    child = subprocess.Popen(
        [sys.executable, "-c", _START, *(path for path in sys.path if path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    with child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        try:
            child.stdin.write(json.dumps(asdict(request)))
            child.stdin.close()
            for line in child.stdout:
                event = json.loads(line)
                if event["event"] == "piece":
                    on_piece(event["text"])
                elif event["event"] == "error":
                    raise FlashMoEError(event["message"], event["hint"])
                else:
                    return Result(**event["result"])
            last = child.stderr.read().strip().splitlines()[-1:]
        except BaseException:
            child.kill()
            raise
    which = "stock llama.cpp" if request.n_slots is None else "flashmoe"
    raise FlashMoEError(
        f"the run with {which} ended with code {child.returncode}: {' '.join(last) or 'no message'}"
    )


def main() -> int:
    """The child."""
    # llama.cpp may print to stdout; events have it for themselves
    events = sys.stdout
    sys.stdout = sys.stderr
    try:
        for event in _answer(Request(**json.load(sys.stdin))):
            print(json.dumps(event), file=events, flush=True)
    except FlashMoEError as error:
        event = {"event": "error", "message": error.message, "hint": error.hint}
        print(json.dumps(event), file=events, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _answer(request: Request) -> Iterator[dict[str, Any]]:
    import numpy as np

    from flashmoe_gguf.chat import LlamaEngine, Sampling

    with closing(_load(request)) as llm:
        import llama_cpp

        engine = LlamaEngine(llm)
        prompt = engine.tokenize(engine.render([{"role": "user", "content": request.question}]))
        if len(prompt) + request.max_tokens > request.n_ctx:
            raise OptionError(
                f"the question takes {len(prompt)} tokens, "
                f"the demo has room for {request.n_ctx - request.max_tokens}",
                "ask something shorter",
            )
        tokens: list[int] = []
        logits: list[str] = []
        text = codecs.getincrementaldecoder("utf-8")("replace")
        seconds: list[float] = []
        started = time.perf_counter()
        steps = engine.generate(prompt, Sampling(temperature=0.0), lambda: False)
        for token in steps:
            seconds.append(time.perf_counter() - started)
            row = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
            values = np.ctypeslib.as_array(row, (llm.n_vocab(),))
            logits.append(hashlib.sha256(values.tobytes()).hexdigest())
            if engine.is_end(token):
                break
            tokens.append(token)
            yield {"event": "piece", "text": text.decode(engine.piece(token))}
            if len(tokens) == request.max_tokens:
                break
            started = time.perf_counter()
        steps.close()
        stats = engine.stats()
        result = Result(
            tokens=tokens,
            logits=logits,
            prompt_tokens=len(prompt),
            prompt_seconds=seconds[0],
            decode_seconds=sum(seconds[1:]),
            peak_bytes=peak_memory(),
            hit_rate=stats.decode_hit_rate if stats else 0.0,
            bytes_read=stats.bytes_read if stats else 0,
        )
        yield {"event": "result", "result": asdict(result)}


def _load(request: Request) -> Any:
    arguments: dict[str, Any] = {
        "n_ctx": request.n_ctx,
        "n_batch": request.n_ubatch,
        "n_ubatch": request.n_ubatch,
        "n_threads": request.threads,
        "n_threads_batch": request.threads,
        "verbose": False,
    }
    if request.n_slots is not None:
        from flashmoe_gguf.llama import Llama

        return Llama(request.model, n_slots=request.n_slots, **arguments)
    from flashmoe_gguf.stock import plain_llama, without_repacking

    return plain_llama("stock", without_repacking)(request.model, **arguments)


def peak_memory(status: Path = Path("/proc/self/status")) -> int:
    """The largest resident size of this process so far, in bytes.

    getrusage would do, but on Linux a child starts with its parent's figure.
    """
    try:
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    from flashmoe_gguf.host import process_memory

    return process_memory()[0]
