"""The options of `flashmoe bench`, as one frozen value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from flashmoe_gguf.bench.arm import STREAMED, Arm
from flashmoe_gguf.bench.cases import ARMS, IN_RAM, NamedArm, parse_arm
from flashmoe_gguf.bench.cold import WAYS
from flashmoe_gguf.budget import parse_size
from flashmoe_gguf.cli.options import Finite, default_threads, ngl_option, threads_option
from flashmoe_gguf.cli.paths import FilePath
from flashmoe_gguf.errors import OptionError

F = TypeVar("F", bound=Callable[..., Any])

SYNTHETIC = ("olmoe", "qwen3-30b", "gpt-oss-20b", "custom")
_LEAST_CTX = 1024
_COUNT = click.IntRange(min=1)


@dataclass(frozen=True)
class BenchOptions:
    """What was asked for, as click gives it; the properties are what it means."""

    model: str | None
    ram: str | None
    sweep: int | None
    arms: str | None
    named: tuple[str, ...]
    packed: str | None
    prompt: int
    prompt_file: str | None
    gen: int
    warmup: int
    seconds: float
    timeout: float
    again: bool
    rounds: int
    ctx: int | None
    threads: int | None
    ubatch: int
    slots: int | None
    ngl: int | str
    cold: str
    synthetic: str | None
    shape: str | None
    trace: str | None
    jsonl: str | None
    plot: str | None
    as_json: bool

    @property
    def limit_bytes(self) -> int | None:
        """The memory limit; None: `--ram none`, and for a sweep, which has several."""
        return None if self.ram is None or self.ram == "none" else parse_size(self.ram)

    @property
    def arm_names(self) -> tuple[str, ...]:
        """The built-in arms to run; a sweep leaves out what tells nothing there."""
        if self.arms is None:
            return ARMS if self.sweep is None else ("stock", STREAMED, IN_RAM)
        names = tuple(name.strip() for name in self.arms.split(","))
        for name in names:
            if name not in ARMS:
                raise OptionError(f"there is no arm '{name}'", f"--arms takes {', '.join(ARMS)}")
        return names

    @property
    def named_arms(self) -> list[NamedArm]:
        return [parse_arm(text) for text in self.named]

    @property
    def n_ctx(self) -> int:
        """As asked for, or what the tokens need, in steps of 256; 1024 at least."""
        needed = self.prompt + self.warmup + self.gen
        if self.ctx is None:
            return max(_LEAST_CTX, -(-needed // 256) * 256)
        if self.ctx < needed:
            raise OptionError(
                f"{self.prompt} + {self.warmup} + {self.gen} tokens do not fit into a context of "
                f"{self.ctx}",
                "give a larger --ctx, or fewer tokens with --prompt, --warmup and --gen",
            )
        return self.ctx

    def base_arm(self, model: Path) -> Arm:
        """What all arms have in common, but for the prompt."""
        return Arm(
            name="",
            model=str(model),
            n_gen=self.gen,
            n_prompt=self.prompt,
            n_warmup=self.warmup,
            seconds=self.seconds or None,
            again=self.again,
            n_ctx=self.n_ctx,
            n_ubatch=self.ubatch,
            n_threads=self.threads or default_threads(),
            n_slots=self.slots,
            n_gpu_layers=self.ngl,
        )

    def check(self) -> None:
        """Raises click's usage errors for options that contradict each other."""
        if (self.model is None) == (self.synthetic is None):
            raise click.UsageError("Give MODEL, or --synthetic NAME instead of it.")
        if (self.ram is None) == (self.sweep is None):
            raise click.UsageError("Give a memory limit with --ram SIZE, or several: --sweep N.")
        if self.shape is not None and self.synthetic != "custom":
            raise click.UsageError("--shape needs --synthetic custom.")
        if self.slots is not None and self.sweep is not None:
            raise click.UsageError("--slots and --sweep exclude each other.")
        if self.packed is not None and not any(arm.packed for arm in self.named_arms):
            raise click.UsageError("--packed needs --arm layout=packed.")
        _ = self.n_ctx, self.named_arms, self.arm_names, self.limit_bytes  # may raise OptionError


def bench_options(command: F) -> F:
    """The command gets one `options: BenchOptions`."""
    for option in reversed(_OPTIONS):
        command = option(command)

    def wrapped(**values: Any) -> Any:
        options = BenchOptions(**{f.name: values.pop(f.name) for f in fields(BenchOptions)})
        options.check()
        return command(options=options, **values)

    for attribute in ("__name__", "__doc__", "__click_params__"):
        if hasattr(command, attribute):
            setattr(wrapped, attribute, getattr(command, attribute))
    return wrapped  # type: ignore[return-value]


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.argument("model", type=FilePath(), required=False),
    click.option(
        "--ram",
        metavar="SIZE",
        help="The memory limit of every arm, such as 8G; none: no limit, for models that fit.",
    ),
    click.option(
        "--sweep",
        type=click.IntRange(1, 100),
        metavar="N",
        help="N limits instead of one, from the least that works to 110 % of the model; each is "
        "compared with the one before.",
    ),
    click.option(
        "--arms",
        metavar="NAMES",
        help="Which of the arms stock, stock-default, streamed and in-ram to run.",
        show_default="all; a sweep leaves out stock-default",
    ),
    click.option(
        "--arm",
        "named",
        multiple=True,
        metavar="KEY=VALUE,...",
        help="One more streamed arm with other settings: policy=, policy_file=, io=, slots=, "
        "threads=, lookahead=, workers=, request=, layout=packed. Can be given several times.",
    ),
    click.option(
        "--packed",
        type=FilePath(),
        metavar="FILE",
        help="The packed file of layout=packed; without it MODEL is packed into the cache "
        "directory.",
    ),
    click.option("--prompt", type=_COUNT, default=64, metavar="N", help="Tokens of the prompt."),
    click.option(
        "--prompt-file",
        type=FilePath(),
        metavar="FILE",
        help="Text of the prompt, repeated or cut to its length.  [default: a built-in text]",
    ),
    click.option(
        "--gen", type=_COUNT, default=512, metavar="N", help="Tokens to decode, greedily."
    ),
    click.option(
        "--warmup",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Tokens decoded before the clock starts.",
    ),
    click.option(
        "--seconds",
        type=Finite(min=0),
        default=60.0,
        metavar="X",
        help="An arm stops decoding after so long, with fewer tokens: stock llama.cpp would take "
        "hours. 0: it does not. The warm-up has as long.",
    ),
    click.option(
        "--timeout",
        type=Finite(min=0),
        default=1800.0,
        metavar="X",
        help="Seconds that an arm may take in all, loading and prompt included; then it is ended "
        "and reported as that. 0: as long as it takes.",
    ),
    click.option(
        "--again",
        is_flag=True,
        help="Compute the prompt once more after decoding, from an empty context, and report its "
        "speed too: what a prompt takes when experts are cached.",
    ),
    click.option(
        "--rounds", type=_COUNT, default=5, metavar="N", help="Runs of each arm, taking turns."
    ),
    click.option(
        "-c",
        "--ctx",
        type=click.IntRange(1, 2**31 - 1),
        metavar="N",
        help="Tokens of context.",
        show_default="what the tokens need, 1024 at least",
    ),
    threads_option,
    click.option(
        "--ubatch", type=_COUNT, default=128, metavar="N", help="Prompt tokens computed at once."
    ),
    click.option(
        "--slots",
        type=click.IntRange(min=0),
        metavar="N",
        help="Experts cached per layer, instead of what the limit allows.",
    ),
    ngl_option,
    click.option(
        "--cold",
        type=click.Choice(WAYS),
        default="auto",
        help="How caches are emptied before each arm: drop empties the system's, as root; advise "
        "evicts the model's files; auto drops where it may.",
    ),
    click.option(
        "--synthetic",
        type=click.Choice(SYNTHETIC),
        help="A generated model of this shape instead of MODEL; kept in the cache directory.",
    ),
    click.option(
        "--shape",
        metavar="KEY=N,...",
        help="Sizes of --synthetic custom: n_layer, n_expert, top_k, width, expert_width, n_head, "
        "n_head_kv, head_width.",
    ),
    click.option(
        "--trace",
        type=FilePath(),
        metavar="FILE",
        help="The routing (.npz) that a synthetic model replays. For MODEL, the routing of this "
        "very prompt and its answer, instead of one more run that records it: the roofline needs "
        "it.",
    ),
    click.option(
        "--jsonl", type=FilePath(), metavar="FILE", help="Append every run to it, a JSON row each."
    ),
    click.option("--plot", type=FilePath(), metavar="FILE", help="Draw the result: a PNG."),
    click.option("--json", "as_json", is_flag=True, help="The result as JSON."),
)
