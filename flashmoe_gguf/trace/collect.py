"""Rows of a recording as they are drained, and the trace that they make in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashmoe_gguf.trace.file import NO_EXPERT, Experts, Trace


@dataclass(frozen=True)
class Column:
    """One group of experts in a recording. `at`: its index in the recorded rows."""

    at: int
    layer: int
    n_expert: int


@dataclass(frozen=True)
class Rows:
    """What a recording gave at one time.

    ids [n_rows, n_groups, k], probs the same or None, phases [n_rows] (0 prompt, 1 answer),
    starts [n_rows] (1 where a sequence begins).
    """

    ids: Experts
    probs: npt.NDArray[np.float32] | None
    phases: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.uint8]


class Collection:
    """Keeps rows, 2 bytes per expert and token; `trace()` may be asked for at any time."""

    def __init__(self, columns: Sequence[Column], fingerprint: str) -> None:
        self._columns = tuple(columns)
        self._fingerprint = fingerprint
        self._rows: list[Rows] = []

    @property
    def n_tokens(self) -> int:
        """Tokens so far."""
        return sum(len(rows.phases) for rows in self._rows)

    def add(self, rows: Rows) -> None:
        """Takes rows over; only the columns that the model uses are kept."""
        at = [column.at for column in self._columns]
        ids = rows.ids[:, at]
        _drop_repeated(ids)
        probs = rows.probs
        if probs is not None:
            probs = probs[:, at]
        self._rows.append(Rows(ids, probs, rows.phases, rows.starts))

    def trace(self) -> Trace:
        """All that was added, as one trace."""
        k = max((rows.ids.shape[2] for rows in self._rows), default=1)
        n_layers = len(self._columns)
        if self._rows:
            ids = np.concatenate([rows.ids for rows in self._rows])
            phases = np.concatenate([rows.phases for rows in self._rows])
            starts = np.concatenate([rows.starts for rows in self._rows])
        else:
            ids = np.zeros((0, n_layers, k), np.uint16)
            phases = starts = np.zeros(0, np.uint8)
        kept = [rows.probs for rows in self._rows if rows.probs is not None]
        probs = np.concatenate(kept).astype(np.float16) if kept else None
        begins = np.flatnonzero(starts)
        if not len(begins) or begins[0] != 0:
            begins = np.concatenate([[0], begins])
        return Trace(
            ids,
            np.concatenate([begins, [len(ids)]]).astype(np.int64),
            np.array([column.n_expert for column in self._columns], np.int32),
            np.array([column.layer for column in self._columns], np.int32),
            probs,
            self._fingerprint,
            phases,
        )


def _drop_repeated(ids: Experts) -> None:
    """A token may name an expert several times (grovemoe's groups of experts); it is used once."""
    for i in range(1, ids.shape[2]):
        again = (ids[:, :, :i] == ids[:, :, i : i + 1]).any(axis=2)
        ids[:, :, i][again] = NO_EXPERT
