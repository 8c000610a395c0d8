"""Options that commands share, as frozen values and the decorators that fill them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from flashmoe_gguf.budget import parse_ram
from flashmoe_gguf.chat import Sampling
from flashmoe_gguf.cli.paths import FilePath
from flashmoe_gguf.cli.std_streams import need_stdin
from flashmoe_gguf.cli.stream_options import STREAM_OPTIONS
from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.host import default_threads as default_threads  # others take it from here
from flashmoe_gguf.placement import parse_gpu_layers

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_CTX = 4096
DEFAULT_BATCH = 512

MAX_THREADS = 512  # ggml.h: GGML_MAX_N_THREADS; more ends the process

ctx_option = click.option(
    "-c",
    "--ctx",
    type=click.IntRange(0, 2**31 - 1),
    metavar="N",
    help="Tokens of context; 0: as many as the model was trained for.",
    show_default=f"{DEFAULT_CTX}, or the model's own if that is less",
)
threads_option = click.option(
    "-t",
    "--threads",
    type=click.IntRange(1, MAX_THREADS),
    metavar="N",
    help="Compute threads.",
    show_default="one per physical core",
)
_NO_STREAM = click.option(
    "--no-stream",
    is_flag=True,
    help="Stock llama.cpp instead: its unchanged library with its default settings "
    "(mmap), for comparison.",
)
_HOW_TO_STREAM = (
    "ram",
    "policy",
    "policy_file",
    "no_learn",
    "forget",
    "lookahead",
    "io",
    "verify",
    "n_slots",
)
_STREAM_ONLY = (*_HOW_TO_STREAM, "trace")


class Finite(click.FloatRange):
    """A number in a range; the sampler cannot do with "nan" and "inf", which floats may be."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def _parse_ngl(_ctx: click.Context, _param: click.Parameter, value: str) -> int | str:
    try:
        return parse_gpu_layers(value)
    except OptionError as error:
        raise click.BadParameter(str(error)) from None


def _ngl_option(auto: str) -> Callable[[F], F]:
    return click.option(
        "--ngl",
        metavar="N",
        default="0",
        callback=_parse_ngl,
        help="Layers whose dense weights and KV cache go to the GPU, as llama.cpp counts them; -1: "
        f"all{auto}. Experts stay on the processor's side.",
    )


ngl_option = _ngl_option("; auto: as many as fit")  # the command gets `ngl: int | str`


@dataclass(frozen=True)
class LoadOptions:
    """How to load a model. `ctx` 0: the model's own; None: the same, DEFAULT_CTX at most."""

    model: str
    ram: str | None = None
    policy: str = "auto"
    policy_file: str | None = None
    no_learn: bool = False
    forget: bool = False
    lookahead: str = "auto"
    io: str = "auto"
    verify: str = "first"
    n_slots: int | None = None
    stream: bool = True
    ctx: int | None = None
    threads: int | None = None
    batch: int | None = None
    ubatch: int | None = None
    flash_attn: bool = False
    ngl: int | str = 0
    verbose: bool = False
    trace: str | None = None
    trace_probs: bool = False

    @property
    def streaming(self) -> dict[str, Any]:
        """The arguments of `flashmoe_gguf.Llama` that say how to stream."""
        names = ("ram", "policy", "policy_file", "forget", "lookahead", "io", "verify", "n_slots")
        return {name: getattr(self, name) for name in names} | {"learn": not self.no_learn}

    @property
    def n_threads(self) -> int:
        """As asked for, or one per physical core that this process may use."""
        return self.threads or default_threads()

    @property
    def n_batch(self) -> int:
        """As asked for, or as small as a ubatch allows. The context caps both when it loads."""
        return self.batch or max(DEFAULT_BATCH, self.ubatch or 0)


def load_options(command: F) -> F:
    """MODEL and everything that says how to load it; the command gets `load: LoadOptions`."""
    option = click.option(
        "--trace",
        type=FilePath(),
        metavar="FILE",
        help="Record which experts every token uses, as `flashmoe trace` does.",
    )
    return load_options_without_trace(option(_NO_STREAM(command)), model_required=True)


def load_options_of_many(command: F) -> F:
    """MODEL... and how to stream them: the command gets `models`, and a `load` without a model."""
    return load_options_without_trace(command, model_required=False, many=True)


def load_options_without_trace(command: F, *, model_required: bool, many: bool = False) -> F:
    """The same for a command that always streams and has its own option for a trace, or none; no
    MODEL: `load.model` is empty.
    """
    one = click.argument("model", type=FilePath(), required=model_required)
    for option in reversed(
        (
            click.argument("models", nargs=-1, type=FilePath()) if many else one,
            click.option(
                "--ram",
                metavar="SIZE",
                help="Memory for the whole process, such as 8G or 900M: dense weights, context, "
                "buffers and expert cache. auto: what is available, less a tenth.",
                show_default="auto",
            ),
            ctx_option,
            threads_option,
            click.option(
                "-b",
                "--batch",
                type=click.IntRange(min=1),
                metavar="N",
                help="Prompt tokens handed to llama.cpp at once; the context at most.",
                show_default=f"{DEFAULT_BATCH}, or --ubatch if that is more",
            ),
            click.option(
                "--ubatch",
                type=click.IntRange(min=1),
                metavar="N",
                help="Prompt tokens computed at once: more means fewer passes over the experts "
                "and more memory.",
                show_default=str(DEFAULT_BATCH)
                + ("" if many else ", or more where reading would take longer than computing"),
            ),
            click.option(
                "--flash-attn",
                is_flag=True,
                help="Flash attention: long contexts take much less memory for compute buffers. "
                "Results equal those of llama.cpp with flash attention, whose last bits differ "
                "from those without.",
            ),
            _ngl_option("") if many else ngl_option,
            *STREAM_OPTIONS,
            click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's own log as well."),
        )
    ):
        command = option(command)
    return _gather(command, "load", _make_load_options)


def sampling_options(command: F) -> F:
    """How tokens are chosen; the command gets `choice: Choice`."""
    for option in reversed(
        (
            click.option(
                "-n",
                "--max-tokens",
                type=click.IntRange(min=-1),
                metavar="N",
                default=-1,
                help="Tokens of an answer at most; -1: until it ends or the context is full.",
            ),
            click.option(
                "--temp",
                type=Finite(min=0),
                metavar="X",
                default=0.8,
                help="Temperature; 0: always the likeliest token.",
            ),
            click.option(
                "--top-k",
                type=click.IntRange(min=0),
                metavar="N",
                default=40,
                help="Choose among the N likeliest tokens; 0: among all.",
            ),
            click.option(
                "--top-p",
                type=Finite(0, 1),
                metavar="X",
                default=0.95,
                help="Choose among the likeliest tokens that make up this share of the "
                "probability; 1: among all.",
            ),
            click.option(
                "--min-p",
                type=Finite(0, 1),
                metavar="X",
                default=0.05,
                help="Drop tokens less likely than this share of the likeliest; 0: none.",
            ),
            click.option(
                "--repeat-penalty",
                type=Finite(min=0, min_open=True),
                metavar="X",
                default=1.0,
                help="Penalise tokens among the last 64; 1: not at all.",
            ),
            click.option(
                "-s",
                "--seed",
                type=click.IntRange(-1, 2**32 - 2),
                metavar="N",
                default=-1,
                help="For the random choice; -1: another one each time.",
            ),
            click.option(
                "--stop",
                multiple=True,
                metavar="TEXT",
                help="End an answer before this text; can be given several times.",
            ),
            click.option(
                "--grammar-file",
                type=FilePath(exists=True, dir_okay=False),
                metavar="FILE",
                help="Answers follow this GBNF grammar.",
            ),
            click.option(
                "--json-schema-file",
                type=FilePath(exists=True, dir_okay=False),
                metavar="FILE",
                help="Answers are JSON that follows this schema.",
            ),
        )
    ):
        command = option(command)
    return _gather(command, "choice", _make_choice)


@dataclass(frozen=True)
class Choice:
    """Sampling as given on the command line; a JSON schema still has to become a grammar."""

    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...]
    json_schema: str | None


def _gather(command: F, name: str, make: Callable[[dict[str, Any]], Any]) -> F:
    """Wraps a command so that `make` takes its options out and puts one value in."""

    def wrapped(**options: Any) -> Any:
        return command(**{name: make(options), **options})

    for attribute in ("__name__", "__doc__", "__click_params__"):
        if hasattr(command, attribute):
            setattr(wrapped, attribute, getattr(command, attribute))
    return wrapped  # type: ignore[return-value]


def _make_load_options(options: dict[str, Any]) -> LoadOptions:
    no_stream = options.pop("no_stream", False)
    names = (*_HOW_TO_STREAM, "ctx", "threads", "batch")
    values = {
        name: options.pop(name) for name in (*names, "ubatch", "flash_attn", "ngl", "verbose")
    }
    if parse_ram(values["ram"]) is None:
        values["ram"] = None  # "auto"
    model, trace = options.pop("model", None) or "", options.pop("trace", None)
    load = LoadOptions(model, **values, trace=trace, stream=not no_stream)
    if no_stream:
        for name in _STREAM_ONLY:
            if getattr(load, name) != getattr(LoadOptions, name):
                flag = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"{flag} means nothing with --no-stream.")
    if load.ram is not None and load.n_slots is not None:
        raise click.UsageError("--ram and --n-slots exclude each other.")
    if load.batch is not None and load.ubatch is not None and load.batch < load.ubatch:
        raise click.UsageError("--ubatch is more than --batch.")
    return load


def _make_choice(options: dict[str, Any]) -> Choice:
    grammar_file, schema_file = options.pop("grammar_file"), options.pop("json_schema_file")
    if grammar_file and schema_file:
        raise click.UsageError("--grammar-file and --json-schema-file exclude each other.")
    seed, max_tokens = options.pop("seed"), options.pop("max_tokens")
    sampling = Sampling(
        temperature=options.pop("temp"),
        top_k=options.pop("top_k"),
        top_p=options.pop("top_p"),
        min_p=options.pop("min_p"),
        repeat_penalty=options.pop("repeat_penalty"),
        seed=None if seed < 0 else seed,
        grammar=read_text(grammar_file) if grammar_file else None,
    )
    return Choice(
        sampling,
        None if max_tokens < 0 else max_tokens,
        options.pop("stop"),
        read_text(schema_file) if schema_file else None,
    )


def read_text(path: str) -> str:
    """A file's text, stdin's for "-"; raises OptionError for one that cannot be read."""
    if path == "-":
        need_stdin()
    try:
        with click.open_file(path, encoding="utf-8") as file:
            return str(file.read())
    except OSError as error:
        raise OptionError(
            f"{path}: cannot read: {error.strerror or error}", "check the path"
        ) from None
    except UnicodeDecodeError:
        raise OptionError(f"{path}: this is not UTF-8 text", "convert it first") from None
