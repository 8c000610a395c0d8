"""Every error this package raises on purpose.

One base class carries what went wrong in one line and a hint at what to do
about it. The command line turns it into two lines and exit code 2; library
code never prints and never exits.
"""

from __future__ import annotations

import os


class FlashMoEError(Exception):
    """What went wrong in one line (`message`), and what to do (`hint`, may be empty)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ModelFileError(FlashMoEError):
    """The model file cannot be used: not a GGUF, truncated, a shard missing, a field corrupt."""


class UnsupportedModelError(FlashMoEError):
    """A well-formed model that this llama.cpp cannot run, such as an unknown architecture."""


class PackError(FlashMoEError):
    """A packed file cannot be made or unpacked here: disk full, read-only, in the way, too new."""


class TraceError(FlashMoEError):
    """A routing trace or a policy file cannot be read, written or used with this model."""


class BudgetError(FlashMoEError):
    """The memory budget is below what the model needs at the least."""


class DiskError(FlashMoEError):
    """A drive cannot be measured: no such file, no direct I/O there, or reading fails."""


class HubError(FlashMoEError):
    """A model cannot be downloaded: no network, no room, not there, or not what it should be."""


class OptionError(FlashMoEError):
    """Options that contradict each other or that a streamed model cannot honour."""


class LibraryError(FlashMoEError):
    """The llama.cpp libraries are missing, or `llama_cpp` was imported with others."""


class ExpertReadError(FlashMoEError):
    """An expert's bytes could not be read while decoding; no token was made from them.

    `errno` is the operating system's error number, or 0 for a short read and when `corrupt`: the
    bytes of a packed file do not match their checksum. `expert` is -1 when all
    of a tensor was asked for.
    """

    def __init__(
        self,
        *,
        file: str,
        layer: int,
        expert: int,
        tensor: str,
        errno: int,
        corrupt: bool = False,
    ) -> None:
        self.file = file
        self.layer = layer
        self.expert = expert
        self.tensor = tensor
        self.errno = errno
        self.corrupt = corrupt
        cause = os.strerror(errno) if errno else "the file ended early"
        if corrupt:
            cause = "its checksum does not match"
        what = f"expert {expert}" if expert >= 0 else "the experts"
        super().__init__(
            f"cannot read {what} of layer {layer} ({tensor}) from {file}: {cause}",
            "the tokens of this step were discarded; check the drive and the file, then try again",
        )
