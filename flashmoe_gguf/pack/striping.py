"""Where the stripes of a new packed file go, and what must not be there already."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flashmoe_gguf.errors import PackError
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.pack.files import open_source, writing
from flashmoe_gguf.pack.layout import Layout, Source
from flashmoe_gguf.stripes import MAX_STRIPES, stripe_name


def stripe_paths(
    source: Source, out: Path, folders: Sequence[str | os.PathLike[str]]
) -> tuple[str, ...]:
    """The files for `out`'s stripes, one per folder; raises PackError."""
    if len(folders) > MAX_STRIPES:
        raise PackError(
            f"{shown(out)}: {len(folders)} stripes are too many", f"at most {MAX_STRIPES} can be"
        )
    most = max(group.tensors[0].shape[2] for group in source.groups)
    if len(folders) > most:
        raise PackError(
            f"{shown(out)}: {len(folders)} stripes are too many for {most} experts per layer",
            "give fewer folders",
        )
    paths = []
    for i, folder in enumerate(folders):
        where = os.fspath(folder)
        if not os.path.isdir(where):
            raise PackError(f"{shown(where)}: there is no such folder", "make it, or give another")
        path = os.path.join(os.path.abspath(where), stripe_name(out.name, i, len(folders)))
        try:
            path.encode()
        except UnicodeEncodeError:
            raise PackError(
                f"{shown(path)}: the path is not valid UTF-8", "give another folder or name"
            ) from None
        paths.append(path)
    return tuple(paths)


def check_stripe_targets(layout: Layout) -> None:
    """Raise PackError where a file is in a stripe's way, other than that very stripe's like."""
    for stripe in layout.stripes:
        path = Path(stripe.path)
        if not os.path.lexists(path):
            continue
        fd = open_source(path)
        try:
            with writing(path):
                start = os.pread(fd, len(stripe.header), 0)
        finally:
            os.close(fd)
        if start != stripe.header:
            raise PackError(
                f"{shown(path)}: a file of this name is there already",
                "delete it, choose another folder, or use --force to replace it",
            )
