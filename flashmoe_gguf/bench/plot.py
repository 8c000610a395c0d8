"""A picture of a bench: tok/s per arm, or over the limit for a sweep."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashmoe_gguf.bench.cases import limit_text
from flashmoe_gguf.bench.summary import Line, Spread
from flashmoe_gguf.errors import FlashMoEError, OptionError
from flashmoe_gguf.replacing import first_bytes

_GIB = 1 << 30


def need_matplotlib() -> None:
    """Raises OptionError where there is no matplotlib: before an hour of measuring, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError(
            "--plot needs matplotlib, which is not installed",
            "pip install 'flashmoe-gguf[plot]'",
        )


def check_picture(path: Path) -> None:
    """Raises FlashMoEError for a file that is no PNG: it would be written over."""
    if first_bytes(path, 4) not in (b"", b"\x89PNG"):
        raise FlashMoEError(f"{path}: a file that is no PNG is there", "give another name")


def draw(lines: Sequence[Line], title: str, path: Path) -> None:
    """Writes a PNG. Raises OptionError without matplotlib, FlashMoEError if writing fails."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    measured = [(line, s) for line in lines if (s := line.spread("decode_tok_s")) is not None]
    if len({line.limit_bytes for line, _ in measured if line.limit_bytes is not None}) > 1:
        _curves(axes, measured)
    else:
        _bars(axes, measured)
    axes.set_title(title)
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise FlashMoEError(
            f"cannot write {path}: {error.strerror or error}", "name a file in a folder that exists"
        ) from error


def _bars(axes: Any, measured: Sequence[tuple[Line, Spread]]) -> None:
    names = [f"{line.arm}\n{limit_text(line.limit_bytes)}" for line, _ in measured]
    medians = [spread.median for _, spread in measured]
    below = [spread.median - spread.least for _, spread in measured]
    above = [spread.most - spread.median for _, spread in measured]
    bars = axes.bar(names, medians, yerr=[below, above], capsize=4)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set_ylabel("decode, tok/s")


def _curves(axes: Any, measured: Sequence[tuple[Line, Spread]]) -> None:
    for arm in dict.fromkeys(line.arm for line, _ in measured):
        points = sorted(
            (
                (line.limit_bytes / _GIB, spread)
                for line, spread in measured
                if line.arm == arm and line.limit_bytes is not None
            ),
            key=lambda point: point[0],
        )
        if not points:
            for line, spread in measured:
                if line.arm == arm:
                    axes.axhline(spread.median, linestyle="--", color="grey", label=arm)
            continue
        x = [at for at, _ in points]
        axes.plot(x, [s.median for _, s in points], marker="o", label=arm)
        axes.fill_between(x, [s.least for _, s in points], [s.most for _, s in points], alpha=0.2)
    axes.set_xlabel("memory limit, GiB")
    axes.set_ylabel("decode, tok/s")
    axes.set_ylim(bottom=0)
    axes.legend()
