"""A program that uses a device: the one that the libraries find, or one that needs no GPU.

The latter is llama.cpp's RPC server on this machine. It computes on the processor, but to llama.cpp
it is a device like any other: its buffers are no host memory, tensors are copied to and from it.
A process that has found a device keeps it for good, so what uses it runs in a child: `run()` does
that, and this file is the child's program. `port` is the server's, or OWN. The server needs
libraries built with GGML_RPC=ON.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import scenarios

OWN = 0  # in place of the server's port: the devices that the libraries find
LEAST_ROWS = 32  # ggml-cuda.cu, ggml-vulkan.cpp: batches from here on are worth an upload

# ggml-backend-impl.h: place in struct ggml_backend_device_i
_OFFLOAD_OP = 11


class Tensor(ctypes.Structure):
    """ggml.h, struct ggml_tensor"""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.POINTER(Tensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]


def function(lib: Any, name: str, result: Any, *arguments: Any) -> Any:
    found = lib[name]
    found.restype, found.argtypes = result, list(arguments)
    return found


def buffer_type(lib: Any, tensor: Tensor) -> str:
    """The name of the buffer type that a tensor's data is in, or "host" for host memory."""
    get_type = function(lib, "ggml_backend_buffer_get_type", ctypes.c_void_p, ctypes.c_void_p)
    get_name = function(lib, "ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
    is_host = function(lib, "ggml_backend_buft_is_host", ctypes.c_bool, ctypes.c_void_p)
    kind = get_type(tensor.buffer)
    return "host" if is_host(kind) else str(get_name(kind).decode())


def is_expert_matmul(lib: Any, tensor: Tensor) -> bool:
    return bool(
        function(lib, "ggml_op_name", ctypes.c_char_p, ctypes.c_int)(tensor.op) == b"MUL_MAT_ID"
    )


@dataclass(frozen=True)
class Run:
    """One load of the model and what it is asked. `options` as for `Llama`; `steps`: how many
    tokens are evaluated at once, one after the other, then `n_greedy` single ones. `watch`: note
    where each expert matmul has its weights. `faulty`: first with a read that fails. `parallel`:
    let llama.cpp compute ubatches in parallel on several devices, which ours otherwise does not.

    Stock runs without `op_offload` unless it is given, as ours do. A watched run computes node by
    node, where a GPU's backend otherwise fuses some: it compares with a watched one only.
    """

    name: str
    options: dict[str, Any]
    steps: Sequence[int] = (512,)
    n_greedy: int = 0
    watch: bool = False
    faulty: bool = False
    parallel: bool = False


def run(
    folder: Path,
    libraries: str,
    port: int,
    model: Path,
    runs: Sequence[Run],
    *,
    offload: bool = False,
) -> dict[str, Any]:
    """Logits by run, [1 + n_greedy, n_vocab] of the last tokens; `NAME.seen`, `NAME.said`.

    `offload`: the server's devices say about large batches that they want them, as GPUs do.
    """
    request = {
        "libraries": libraries,
        "port": port,
        "model": str(model),
        "runs": [vars(r) for r in runs],
        "offload": offload,
    }
    out = folder / f"{libraries}.npz"
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), str(out)],
        input=json.dumps(request, default=list).encode(),
        capture_output=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr.decode(errors="replace")[-3000:])
    with np.load(out) as data:
        arrays = dict(data)
    for name in list(arrays):
        if name.endswith((".seen", ".said", ".stats")):
            arrays[name] = json.loads(str(arrays[name]))
    return arrays


@contextlib.contextmanager
def serving(n_devices: int = 1) -> Iterator[int]:
    """The port of a server that offers the processor as so many devices."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__)), "--serve", str(port), str(n_devices)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(server, port)
        yield port
    finally:
        server.kill()
        server.communicate()


def _wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    """Until the server listens; it says "transport" just before."""
    assert server.stdout is not None
    ready, _, _ = select.select([server.stdout], [], [], 60)
    assert ready and server.stdout.readline() == b"listening soon\n", "the RPC server did not start"
    for _ in range(100):
        assert server.poll() is None, "the RPC server ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        select.select([], [], [], 0.1)
    raise AssertionError("the RPC server does not listen")


def _serve(port: int, n_devices: int) -> None:
    from flashmoe_gguf.libs import load_llama_cpp

    lib = load_llama_cpp("stock").llama_cpp._lib
    by_type = function(lib, "ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)
    devices = (ctypes.c_void_p * n_devices)(*[by_type(0)] * n_devices)
    start = function(
        lib,
        "ggml_backend_rpc_start_server",
        None,
        *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p),
    )
    print("listening soon", flush=True)
    start(f"127.0.0.1:{port}".encode(), None, 1, n_devices, devices)


def add_devices(lib: Any, port: int) -> list[int]:
    """Makes the server's devices known to ggml; their handles."""
    if port == OWN:
        return []
    add = function(lib, "ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    reg = add(f"127.0.0.1:{port}".encode())
    function(lib, "ggml_backend_register", None, ctypes.c_void_p)(reg)
    count = function(lib, "ggml_backend_reg_dev_count", ctypes.c_size_t, ctypes.c_void_p)(reg)
    get = function(
        lib, "ggml_backend_reg_dev_get", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    )
    return [get(reg, i) for i in range(count)]


def want_batches(lib: Any, devices: Sequence[int]) -> Any:
    """Gives devices an `offload_op` like that of GPUs; keep what is returned."""

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.POINTER(Tensor))
    def offload_op(_device: int, op: Any) -> bool:
        rows = op.contents.ne[2] if is_expert_matmul(lib, op.contents) else op.contents.ne[1]
        return bool(rows >= LEAST_ROWS)

    address = ctypes.cast(offload_op, ctypes.c_void_p).value
    for device in devices:
        (ctypes.c_void_p * (_OFFLOAD_OP + 1)).from_address(device)[_OFFLOAD_OP] = address
    return offload_op


class _Watch:
    """An eval callback that notes [rows, buffer type of the weights] of expert matmuls."""

    def __init__(self, llama_cpp: Any) -> None:
        self.seen: set[tuple[int, str]] = set()
        lib = llama_cpp.llama_cpp._lib

        def look(node: int, ask: bool, _data: Any) -> bool:
            tensor = Tensor.from_address(node)
            if ask and is_expert_matmul(lib, tensor):
                self.seen.add((tensor.ne[2], buffer_type(lib, tensor.src[0].contents)))
            return not ask

        self.callback = llama_cpp.ggml_backend_sched_eval_callback(look)


def _watched(base: type, watch: _Watch) -> type:
    class Watched(base):  # type: ignore[misc]
        @property
        def context_params(self) -> Any:
            return self._params

        @context_params.setter
        def context_params(self, params: Any) -> None:
            params.cb_eval = watch.callback
            self._params = params

    return Watched


def _base(libraries: str) -> tuple[type, Any]:
    """(the class that loads the model, llama_cpp)"""
    if libraries == "patched":
        import flashmoe_gguf.llama as ours

        return ours.Llama, ours.llama_cpp
    from flashmoe_gguf.devices import keep_experts_on_host
    from flashmoe_gguf.libs import load_llama_cpp
    from flashmoe_gguf.stock import plain_llama, without_repacking

    llama_cpp = load_llama_cpp("stock")

    def adjust(params: Any) -> None:
        without_repacking(params)
        keep_experts_on_host(llama_cpp, params)

    return plain_llama("stock", adjust), llama_cpp


def in_software(llama_cpp: Any) -> bool:
    """Mesa's GPU on the processor: it takes minutes to compile a kernel for larger batches."""
    from flashmoe_gguf.devices import list_devices

    return any("llvmpipe" in device.description for device in list_devices(llama_cpp))


def _evaluate(llm: Any, steps: Sequence[int], n_greedy: int) -> Any:
    n_vocab = llm.n_vocab()
    tokens = [int(t) for t in np.random.default_rng(7).integers(0, n_vocab, sum(steps))]
    rows, at = [], 0
    for n in steps:
        llm.eval(tokens[at : at + n])
        rows.append(scenarios.last_logits(llm))
        at += n
    if n_greedy:
        rows += list(scenarios.follow(llm, [int(rows[-1].argmax())], n_greedy - 1))
    return np.stack(rows)


def _fail(llm: Any, one: Run) -> str:
    """The error of a run whose first read fails; the model can be used again after it."""
    from flashmoe_gguf import ExpertReadError

    llm._experts.native.set_fault(errno=errno.EIO, after=0, count=1)
    try:
        _evaluate(llm, one.steps, one.n_greedy)
    except ExpertReadError as error:
        return error.tensor
    finally:
        llm._experts.native.set_fault(count=0)
        llm.reset()
    return ""


def _main(request: dict[str, Any]) -> dict[str, Any]:
    base, llama_cpp = _base(request["libraries"])
    lib = llama_cpp.llama_cpp._lib
    devices = add_devices(lib, request["port"])
    kept = want_batches(lib, devices) if request["offload"] else None
    n_ubatch = LEAST_ROWS if in_software(llama_cpp) else 256
    said: list[str] = []
    log = llama_cpp.llama_log_callback(lambda _l, text, _d: said.append(text.decode()))
    llama_cpp.llama_log_set(log, None)
    arrays: dict[str, Any] = {}
    for each in request["runs"]:
        one = Run(**each)
        watch = _Watch(llama_cpp) if one.watch else None
        kind = _watched(base, watch) if watch is not None else base
        if one.parallel:
            import flashmoe_gguf.llama as ours

            ours.keep_experts_on_host = lambda *_: None
        said.clear()
        defaults = {**scenarios.context_options(2), "n_ubatch": n_ubatch}
        if request["libraries"] == "stock":
            defaults["op_offload"] = False
        llm = kind(request["model"], **{**defaults, **one.options})
        try:
            if one.faulty:
                arrays[f"{one.name}.error"] = _fail(llm, one)
            arrays[one.name] = _evaluate(llm, one.steps, one.n_greedy)
            if request["libraries"] == "patched":
                llm._experts.native.verify()
                stats = llm.stats()
                arrays[f"{one.name}.stats"] = json.dumps(
                    {name: getattr(stats, name) for name in ("lookups", "hits", "bytes_read")}
                )
        finally:
            llm.close()
        arrays[f"{one.name}.seen"] = json.dumps(sorted(watch.seen) if watch is not None else [])
        arrays[f"{one.name}.said"] = json.dumps("".join(said))
    del kept
    return arrays


def command_line(port: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`flashmoe ARGUMENTS` in a process that knows the devices."""
    return subprocess.run(
        [sys.executable, str(Path(__file__)), "--cli", str(port), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _command_line(port: int, arguments: list[str]) -> None:
    from flashmoe_gguf.cli import main
    from flashmoe_gguf.libs import load_llama_cpp

    libraries = load_llama_cpp("stock" if "--no-stream" in arguments else "patched")
    add_devices(libraries.llama_cpp._lib, port)
    if arguments[0] == "bench":  # its arms are processes of their own
        from flashmoe_gguf.bench import arm as arm_process

        arm_process.command = lambda: _arm_command(port)
    sys.argv = ["flashmoe", *arguments]
    main(prog_name="flashmoe")


def arm(port: int, of_bench: Any) -> dict[str, Any]:
    """What one arm of a bench reports, in a process that knows the devices."""
    from flashmoe_gguf.bench.arm import to_json

    done = subprocess.run(
        _arm_command(port),
        input=to_json(of_bench).encode(),
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr.decode(errors="replace")[-2000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["result"]
    return result


def _arm_command(port: int) -> list[str]:
    return [sys.executable, str(Path(__file__)), "--arm", str(port)]


def _arm(port: int) -> int:
    from flashmoe_gguf.bench.arm import STREAMED, main
    from flashmoe_gguf.libs import load_llama_cpp

    request = sys.stdin.read()
    streams = json.loads(request)["kind"] == STREAMED
    libraries = load_llama_cpp("patched" if streams else "stock")
    add_devices(libraries.llama_cpp._lib, port)
    sys.stdin = io.StringIO(request)
    return main()


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "--cli":
        _command_line(int(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1] == "--arm":
        sys.exit(_arm(int(sys.argv[2])))
    else:
        np.savez(sys.argv[1], **_main(json.load(sys.stdin)))
