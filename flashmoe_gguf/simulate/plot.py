"""Hit rate against cache size as a picture; matplotlib is an extra, `flashmoe-gguf[plot]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.policy import SIMULATED
from flashmoe_gguf.simulate.replay import Replay


def write_plot(path: Path, blocks: Sequence[Sequence[Replay]], title: str) -> None:
    """One line per policy over all sizes, Belady's thick and black.

    The ending of the name says the format. Raises OptionError without matplotlib, for an ending
    that it does not know, and for a path that cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("--plot needs matplotlib", "pip install 'flashmoe-gguf[plot]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for policy in [replay.policy for replay in blocks[-1]]:
        points = sorted(
            (100 * r.cached_share, 100 * r.hit_rate)
            for block in blocks
            for r in block
            if r.policy == policy
        )
        best = policy in SIMULATED
        axes.plot(
            [share for share, _ in points],
            [rate for _, rate in points],
            marker="o",
            markersize=4,
            color="black" if best else None,
            linestyle="--" if policy == "belady-bypass" else "-",
            linewidth=2.5 if best else 1.2,
            label=policy,
        )
    axes.set_xlabel("cache size, % of the experts of a layer")
    axes.set_ylabel("hit rate, %")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    known = canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise OptionError(
            f"{path.name} does not say what kind of picture it is",
            f"end it with one of {', '.join(sorted(known))}",
        )
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise OptionError(
            f"cannot write {path}: {error.strerror or error}", "give a path that can be written"
        ) from error
