"""`flashmoe train`: routing traces to what a policy learns from them."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from flashmoe_gguf.cli.paths import FilePath, refuse_to_replace
from flashmoe_gguf.cli.progress import Activity, State
from flashmoe_gguf.cli.screen import Screen, format_rows, format_table
from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.trace import Trace, read_trace
from flashmoe_gguf.train.compare import Result, compare
from flashmoe_gguf.train.file import PolicyFile, check_policy_target, write_policy_file
from flashmoe_gguf.train.training import Learned, join, split, train_flashmoe, train_learned


def _sizes(_ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    """Shares of a layer's experts out of "25%,50%"."""
    try:
        sizes = tuple(float(word.strip().removesuffix("%")) for word in value.split(","))
    except ValueError:
        sizes = ()
    if not sizes or not all(0 < size <= 100 for size in sizes):
        raise click.BadParameter(f'{value!r} is no list of shares such as "25%,50%".', param=param)
    return tuple(size / 100 for size in sizes)


@click.command(short_help="Train a policy on traces.")
@click.argument("traces", type=FilePath(), nargs=-1, required=True, metavar="TRACE...")
@click.option(
    "-o",
    "--out",
    type=FilePath(),
    metavar="OUT",
    required=True,
    help="The policy file, .safetensors.",
)
@click.option(
    "--policy",
    type=click.Choice(("flashmoe", "learned")),
    default="flashmoe",
    help="flashmoe: the network of the FlashMoE paper, which needs torch. learned: a warm start "
    "for the policy that learns while it runs.",
)
@click.option(
    "--sizes",
    callback=_sizes,
    metavar="LIST",
    default="25%,50%",
    help="Cache sizes to train and compare at, as shares of a layer's experts.",
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Epochs at most; training ends early when held-out sequences stop improving. For learned: "
    "how often it sees the traces.",
    show_default="30; learned: 1",
)
@click.option(
    "--dagger",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="More rounds that each learn from the caches that the network leads to.",
)
@click.option(
    "-s",
    "--seed",
    type=click.IntRange(0, 2**31),
    metavar="N",
    default=0,
    help="For all that is "
    "drawn by lot: which fifth of the sequences is held out, and where the network begins.",
)
@click.option(
    "--test",
    type=FilePath(),
    metavar="FILE",
    help="Compare on this trace, such as one of other prompts, instead of on the held-out fifth.",
)
@click.option(
    "--n-expert",
    type=click.IntRange(1, 65535),
    metavar="N",
    help="Experts in each layer, for traces that do not say it.",
)
def train(
    traces: tuple[str, ...],
    out: str,
    policy: str,
    sizes: tuple[float, ...],
    epochs: int | None,
    dagger: int,
    seed: int,
    test: str | None,
    n_expert: int | None,
) -> None:
    """Train a policy on traces and compare it with the others on what it has not seen.

    One fifth of the sequences is held out: training stops by them, and without --test the table
    is of them. The gap is how far a policy gets from LRU (0 %) to Belady (100 %), who knows the
    future. As training stops by the held-out sequences, a --test file gives the fairer figures.
    learned needs nothing to stop by: with --test it learns from all of the traces.

    \b
    Examples:
      flashmoe train model.npz -o model.safetensors
      flashmoe train math.npz chat.npz -o model.safetensors --dagger 2 --test code.npz
      flashmoe train model.npz --policy learned -o warm.safetensors
    """
    if policy == "learned" and dagger:
        raise click.UsageError("--dagger means nothing with --policy learned.")
    target = Path(out)
    refuse_to_replace(out, [*traces, test])
    check_policy_target(target)
    whole = join([read_trace(Path(path), n_expert) for path in traces])
    parts = split(whole, seed)
    judge = parts.held_out if test is None else _test_trace(Path(test), whole, n_expert)
    holds_out = policy == "flashmoe" or test is None
    done: list[State] = []

    def progress(what: str, share: float) -> None:
        done[:] = [State(share, 1.0, words=what)]

    with Screen() as screen:
        with Activity(screen, "training", lambda: done[0] if done else None):
            if policy == "flashmoe":
                learned = train_flashmoe(
                    parts,
                    sizes,
                    seed=seed,
                    max_epochs=epochs or 30,
                    dagger=dagger,
                    progress=progress,
                )
            else:
                learned = train_learned(
                    parts.training if holds_out else whole,
                    sizes,
                    passes=epochs or 1,
                    progress=progress,
                )
        note = _note(policy, whole, learned, seed, dagger, holds_out)
        counts = tuple(int(n) for n in whole.n_expert)
        write_policy_file(
            target,
            PolicyFile(policy, learned.weights, counts, whole.fingerprint, note, learned.networks),
        )
        done.clear()
        with Activity(screen, "comparing", lambda: done[0] if done else None):
            results = compare(
                judge,
                sizes,
                {policy: learned.weights},
                progress=lambda n, total: progress(f"replay {n} of {total}", n / total),
            )
    where = "held-out sequences" if test is None else shown(test)
    rows = [("policy", f"{policy} in {shown(out)}"), ("trained on", note)]
    rows.append(("compared on", f"{where}: {judge.answers().n_tokens} tokens, cold caches"))
    for line in format_rows(rows):
        click.echo(line)
    click.echo()
    for line in format_table(_table(results, sizes)):
        click.echo(line)


def _test_trace(path: Path, trained_on: Trace, n_expert: int | None) -> Trace:
    test = read_trace(path, n_expert)
    if not np.array_equal(test.n_expert, trained_on.n_expert):
        raise OptionError(
            f"{path.name} has {test.n_layers} layers of {int(test.n_expert.max())} experts, the "
            f"traces {trained_on.n_layers} of {int(trained_on.n_expert.max())}",
            "give a trace of the same model; --n-expert where files do not say it",
        )
    return test


def _note(
    policy: str, trace: Trace, learned: Learned, seed: int, dagger: int, holds_out: bool
) -> str:
    note = f"{trace.n_tokens} tokens of {len(trace.seq) - 1} sequences"
    if holds_out:
        note += ", a fifth held out"
    if policy == "flashmoe":
        epochs = "+".join(map(str, learned.epochs))
        loss = f"held-out loss {learned.loss[-1]:.4f}"
        note += f"; seed {seed}, {dagger} DAgger rounds, {epochs} epochs, {loss}"
    return note


def _table(results: list[Result], sizes: tuple[float, ...]) -> list[list[str]]:
    """A row per policy; hit rate, gap and refetch rate for each size."""
    head = ["policy"]
    for size in sizes:
        head += [f"hits at {100 * size:g} %", "gap", "refetched in 5"]
    by_policy: dict[str, list[str]] = {}
    for r in results:
        cells = [f"{100 * r.hit_rate:.2f} %", f"{100 * r.gap:.0f} %", f"{100 * r.refetched:.1f} %"]
        by_policy.setdefault(r.policy, []).extend(cells)
    return [head, *([name, *cells] for name, cells in by_policy.items())]
