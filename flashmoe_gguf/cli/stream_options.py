"""Options about how experts are streamed."""

from __future__ import annotations

import click

from flashmoe_gguf.cli.paths import FilePath

STREAM_OPTIONS = (
    click.option(
        "--policy",
        metavar="NAME",
        default="auto",
        help="Which expert leaves the cache: learned, dlfu, lru, lfu, lfru, arc, lecar, "
        "least-stale, random, flashmoe, or package.module:Class for one in Python. auto: learned, "
        "unless another did better on what this model did last.",
    ),
    click.option(
        "--policy-file",
        type=FilePath(),
        metavar="FILE",
        help="Where a policy keeps what it has learned, or what `flashmoe train` has made.",
        show_default="one per model in the cache directory",
    ),
    click.option(
        "--no-learn",
        is_flag=True,
        help="Learn nothing from this run, and keep nothing of it.",
    ),
    click.option(
        "--forget",
        is_flag=True,
        help="Begin without what was learned about this model before.",
    ),
    click.option(
        "--lookahead",
        metavar="auto|off|N",
        default="auto",
        help="Read likely experts of the next layers early, N each at most; auto: one, while that "
        "is measured to be faster. routing:N and router:N choose how they are guessed.",
    ),
    click.option(
        "--io",
        type=click.Choice(("auto", "direct", "buffered")),
        default="auto",
        help="How experts are read; auto is direct where the file system allows it.",
    ),
    click.option(
        "--verify",
        type=click.Choice(("first", "always", "off")),
        default="first",
        help="When to check the experts of a packed file against their checksums: when "
        "first read, at every read, or never.",
    ),
    click.option(
        "--n-slots",
        type=click.IntRange(min=0),
        metavar="N",
        help="Experts cached per layer, in place of --ram; 0: none.",
    ),
)
