"""Recording the routing of a running model: what the stream notes down, as a trace."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flashmoe_gguf._native import NativeStream
from flashmoe_gguf.errors import TraceError
from flashmoe_gguf.store import Geometry
from flashmoe_gguf.trace import Collection, Column, Trace

_DRAIN_ROWS = 4096
_MAX_BYTES = 256 << 20  # rows that wait in C; they are taken after every decode


def used_experts(geometry: Geometry, overrides: Mapping[str, object] | None) -> int:
    """Experts that a token uses in a layer at most; the user may have overridden the file."""
    override = (overrides or {}).get(f"{geometry.architecture}.expert_used_count", 0)
    return max(geometry.top_k, override if isinstance(override, int) else 0)


class Recording:
    """The routing of one model from now on. Belongs to the thread that computes.

    `n_bound` [n_groups]: the tensors of each group that the loaded model uses. `k`: experts that a
    token uses at most.
    """

    def __init__(
        self,
        native: NativeStream,
        geometry: Geometry,
        n_bound: list[int],
        k: int,
        with_probs: bool,
    ) -> None:
        self._native = native
        self._n_groups = len(geometry.groups)
        self._k = k
        self._with_probs = with_probs
        self._seen_probs = False
        self._answering = False
        self._rows = 0  # of decodes that have succeeded
        columns = [
            Column(i, group.layer, group.n_expert)
            for i, group in enumerate(geometry.groups)
            if n_bound[i]
        ]
        self._collection = Collection(columns, geometry.fingerprint)
        row_bytes = self._n_groups * k * (6 if with_probs else 2)
        native.start_trace(k, max(1, _MAX_BYTES // row_bytes), with_probs)

    @property
    def n_tokens(self) -> int:
        """Tokens of decodes that have succeeded."""
        return self._rows

    def set_phase(self, answering: bool) -> None:
        """What is computed next: an answer's token or a prompt's."""
        if answering != self._answering:
            self._answering = answering
            self._native.set_phase(answering)

    def cut(self) -> None:
        """Forgets the last decode, which has failed."""
        self._native.cut_trace(self._rows)

    def drain(self, everything: bool = False) -> None:
        """Takes rows over, so that C keeps few. After each decode; raises TraceError."""
        counts = self._native.trace_counts()
        self._rows, waiting = counts.rows, counts.waiting
        first_probs = self._with_probs and not self._seen_probs
        if waiting and (everything or first_probs or waiting >= _DRAIN_ROWS):
            rows = self._native.take_trace(self._n_groups, self._k, self._with_probs)
            if first_probs and rows.probs is not None and np.isnan(rows.probs).all():
                raise TraceError(
                    "this model's graph does not name its router's probabilities, "
                    "or another callback took them",
                    "record without probabilities",
                )
            self._seen_probs = self._with_probs
            self._collection.add(rows)

    def trace(self) -> Trace:
        """All so far. Raises TraceError when rows were lost."""
        self.drain(everything=True)
        if lost := self._native.trace_counts().lost:
            raise TraceError(
                f"{lost} tokens' routing found no room in memory or did not fit the model",
                "record fewer tokens at once",
            )
        return self._collection.trace()
