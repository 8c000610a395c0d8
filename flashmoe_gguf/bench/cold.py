"""Cold caches before a run: nothing of the model is left in the page cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flashmoe_gguf.errors import FlashMoEError, OptionError

WAYS = ("auto", "drop", "advise")

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def make_cold(files: Sequence[Path], way: str = "auto", drop_caches: Path = _DROP_CACHES) -> str:
    """Empties the page cache of `files`; returns how: "drop" or "advise".

    "drop" empties the whole system's caches, which takes root; "advise" asks the kernel to forget
    these files alone (posix_fadvise), which it does for pages that no process has mapped. "auto"
    drops where it may. Raises OptionError where the way asked for does not work.
    """
    if way in ("auto", "drop"):
        try:
            os.sync()
            drop_caches.write_text("3")
            return "drop"
        except OSError as error:
            if way == "drop":
                raise OptionError(
                    f"cannot drop the system's caches: {error.strerror or error}",
                    "run it as root, or with --cold advise",
                ) from error
    if not hasattr(os, "posix_fadvise"):
        raise FlashMoEError("this system cannot evict a file from its cache", "use Linux")
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages that are not written yet are not dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return "advise"
