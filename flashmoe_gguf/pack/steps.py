"""The work of packing in steps, each of which reaches the disk before it counts as done.

Pure. A step is one group of experts or a run of dense tensors; they are ordered by where their
last byte lies in the source. Done from last to first, the end of each source file falls free
behind them: that is how packing in place gives back the space that it takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from flashmoe_gguf.gguf import TensorInfo
from flashmoe_gguf.pack.layout import DenseTensor, Layout, PackedGroup, Span, padded

_RUN_BYTES = 64 << 20  # of dense tensors in one step


@dataclass(frozen=True)
class Step:
    """A group, or dense tensors that follow each other in one source file."""

    name: str
    group: PackedGroup | None
    dense: tuple[DenseTensor, ...]
    spans: tuple[Span, ...]

    @property
    def source_bytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    @property
    def packed_bytes(self) -> int:
        """What the step adds to the packed file."""
        if self.group is not None:
            return self.group.block_bytes * self.group.n_expert
        return sum(padded(span.nbytes) for span in self.spans)

    @property
    def last(self) -> tuple[int, int]:
        """Source file and offset where its last byte ends."""
        return max((span.shard, span.end) for span in self.spans)


def plan_steps(layout: Layout) -> list[Step]:
    """All steps, in the order of the source."""
    units = [_group_step(number, group) for number, group in enumerate(layout.groups)]
    units += [_dense_step(number, [dense]) for number, dense in enumerate(layout.dense)]
    units.sort(key=lambda step: step.last)
    steps: list[Step] = []
    for unit in units:
        before = steps[-1] if steps else None
        if (
            before is not None
            and unit.dense
            and before.dense
            and before.last[0] == unit.last[0]
            and before.source_bytes + unit.source_bytes <= _RUN_BYTES
        ):
            number = int(before.name.rpartition(" ")[2])
            steps[-1] = _dense_step(number, [*before.dense, *unit.dense])
        else:
            steps.append(unit)
    return steps


def _group_step(number: int, group: PackedGroup) -> Step:
    return Step(f"group {number}", group, (), tuple(_span_of(p.tensor) for p in group.parts))


def _dense_step(number: int, dense: Sequence[DenseTensor]) -> Step:
    """Named after its first tensor's place among the dense ones."""
    return Step(f"dense {number}", None, tuple(dense), tuple(_span_of(d.tensor) for d in dense))


def _span_of(tensor: TensorInfo) -> Span:
    return Span(tensor.shard, tensor.offset, tensor.nbytes)


def lengths_needed(pending: Collection[Step], n_files: int) -> list[int]:
    """How much of each source file the pending steps still read, from its start."""
    needed = [0] * n_files
    for step in pending:
        for span in step.spans:
            needed[span.shard] = max(needed[span.shard], span.end)
    return needed


def in_place_steps(pending: Sequence[Step], n_files: int) -> Iterator[tuple[Step, list[int]]]:
    """The pending steps from last to first, each with what is needed once it is done."""
    left = list(pending)
    while left:
        step = left.pop()
        yield step, lengths_needed(left, n_files)


def in_place_peak(pending: Sequence[Step], sizes: Sequence[int], block: int) -> int:
    """The most bytes that packing in place takes beyond what it has given back by then.

    `sizes` are what the source files have now; the disk gives space back in `block`s.
    """
    taken = peak = 0
    have = list(sizes)
    for step, needed in in_place_steps(pending, len(have)):
        taken += step.packed_bytes
        peak = max(peak, taken)
        for i, length in enumerate(needed):
            if length < have[i]:
                taken -= max(0, have[i] - length - block)
                have[i] = length
    return peak
