"""The command line. Commands import the model code when they run, so that help is instant."""

from __future__ import annotations

import click

from flashmoe_gguf.cli import (
    bench,
    chat,
    demo,
    doctor,
    inspect,
    models,
    pack,
    plan,
    pull,
    run,
    serve,
    simulate,
    trace,
    train,
    tune,
    unpack,
    verify,
)
from flashmoe_gguf.cli.exits import Commands
from flashmoe_gguf.cli.version import version_text

__all__ = ["main"]


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(version_text())
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 80,
        "show_default": True,
    },
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the versions and exit.",
)
def main() -> None:
    """Run MoE GGUF models that are larger than RAM, from SSD, through llama.cpp.

    The experts a token needs are read from the file into a cache of a size you choose (--ram);
    everything else stays in memory. Answers are the same as llama.cpp's.

    Answers go to stdout; progress, the plan, figures and errors go to stderr. Exit codes: 0 done,
    1 an unexpected failure, a demo or bench whose outputs differ, or a doctor that found what
    hurts, 2 bad input or options, 130 stopped with Ctrl-C.
    """


for _command in (
    run.run,
    chat.chat,
    serve.serve,
    plan.plan,
    inspect.inspect,
    pack.pack,
    unpack.unpack,
    verify.verify,
    bench.bench,
    tune.tune,
    trace.trace,
    simulate.simulate,
    train.train,
    models.models,
    pull.pull,
    doctor.doctor,
    demo.demo,
):
    main.add_command(_command)
