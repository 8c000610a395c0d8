"""How a memory budget is spent: a pure function from sizes to slots.

The budget covers the whole process. What cannot shrink comes first (the process itself, dense
weights, the context with its compute buffers, the ring, a reserve); expert slots get the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe_gguf.errors import BudgetError, OptionError
from flashmoe_gguf.gguf import ArraySummary, Header

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

# Stacks of the compute threads, the graph's work buffer, sampling, malloc's slack.
RESERVE_BYTES = 48 << 20
RESERVE_SHARE = 0.02

RING_BYTES = 24 << 20
ALIGNMENT = 4096  # of direct reads; native/io.h

# For plans of models that are not loaded: Python with the libraries, and per compute thread its
# stack and its share of the graph's work buffer. What a load measures takes their place.
PROCESS_BYTES = 56 << 20
THREAD_BYTES = 256 << 10
# What a context takes beside KV cache and compute buffers; 46 to 53 MiB were measured.
CONTEXT_BYTES = 48 << 20

AUTO = "auto"


def parse_size(text: str | int) -> int:
    """Bytes of "8G", "1.5GiB", "900M" or a plain number; units are powers of 1024.

    Raises OptionError for anything else, zero and negative sizes included.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?)(?:i?B)?\s*", str(text), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise OptionError(f"'{text}' is not an amount of memory", "for example 8G or 900M")
    return size


def parse_ram(ram: str | int | None) -> int | None:
    """Bytes as `parse_size` reads them; None for None and "auto": what this machine allows."""
    if ram is None or str(ram).strip().lower() == AUTO:
        return None
    try:
        return parse_size(ram)
    except OptionError as error:
        raise OptionError(error.message, f"{error.hint}, or auto") from None


def format_size(size: float) -> str:
    """A size for people: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


@dataclass(frozen=True)
class GroupCost:
    """What caching costs in one group of experts: bytes per slot, and slots at most."""

    slot_bytes: int
    n_expert: int


@dataclass(frozen=True)
class Fixed:
    """The part of the budget that cannot shrink, in bytes."""

    process: int
    dense: int
    context: int
    ring: int
    policy: int = 0

    @property
    def reserve(self) -> int:
        """What stays free for what is not counted one by one."""
        counted = self.process + self.dense + self.context + self.ring + self.policy
        return RESERVE_BYTES + int(RESERVE_SHARE * counted)

    @property
    def total(self) -> int:
        counted = self.process + self.dense + self.context + self.ring + self.policy
        return counted + self.reserve

    def breakdown(self) -> str:
        """One line that names every piece."""
        return ", ".join(
            f"{name} {format_size(size)}"
            for name, size in (
                ("dense weights", self.dense),
                ("context and compute buffers", self.context),
                ("read ring", self.ring),
                ("eviction policy", self.policy),
                ("the process", self.process),
                ("reserve", self.reserve),
            )
            if size or name != "eviction policy"
        )


@dataclass(frozen=True)
class Plan:
    """What is resident and what is cached. `slots` has one entry per group. `quota_tokens`: how
    many tokens' routing says where slots save most; 0: every group has the same share.
    """

    ram_bytes: int
    fixed: Fixed
    slots: tuple[int, ...]
    slot_bytes: int
    all_slot_bytes: int
    quota_tokens: int = 0

    @property
    def total_bytes(self) -> int:
        return self.fixed.total + self.slot_bytes

    @property
    def cached_share(self) -> float:
        """Share of the expert weights that fit into slots, 0 to 1."""
        return self.slot_bytes / self.all_slot_bytes if self.all_slot_bytes else 0.0


def check_floor(ram_bytes: int, fixed: Fixed, uncounted: int = 0) -> None:
    """Raises BudgetError when the budget does not even hold what cannot shrink.

    `uncounted`: about what will come on top of `fixed`, for the hint.
    """
    if ram_bytes < fixed.total:
        least = "at least " if uncounted else ""
        raise BudgetError(
            f"{format_size(ram_bytes)} of memory is below the floor of {least}"
            f"{format_size(fixed.total)} for this model: {fixed.breakdown()}",
            f"give --ram {-(-(fixed.total + uncounted) // (1 << 20))}M or more, "
            "or a smaller context",
        )


def make_plan(
    ram_bytes: int,
    fixed: Fixed,
    groups: Sequence[GroupCost],
    order: Sequence[int] | None = None,
) -> Plan:
    """Spends the budget: every group gets the same share of its experts, to within one slot.
    `order` takes the place of `slot_order`: the group of each slot that can be had.

    Slots are taken in an order that does not depend on the budget, until one does not fit: more
    memory never means fewer slots anywhere, and less than one slot's size stays unspent. Raises
    BudgetError below the floor. Above it there is always a plan, if with no slots.
    """
    check_floor(ram_bytes, fixed)
    rest = ram_bytes - fixed.total
    slots = [0] * len(groups)
    for i in slot_order(groups) if order is None else order:
        rest -= groups[i].slot_bytes
        if rest < 0:
            break
        slots[i] += 1
    return Plan(
        ram_bytes,
        fixed,
        tuple(slots),
        _cost(groups, slots),
        _cost(groups, [g.n_expert for g in groups]),
    )


def slot_order(groups: Sequence[GroupCost]) -> list[int]:
    """The group of each slot that can be had, by the share of its experts it completes."""
    slots = [
        ((j + 1) / group.n_expert, i)
        for i, group in enumerate(groups)
        for j in range(group.n_expert)
    ]
    return [i for _, i in sorted(slots)]


def fixed_slots_plan(fixed: Fixed, groups: Sequence[GroupCost], n_slots: int) -> Plan:
    """The plan for a given number of slots per group, whatever it costs; that is its budget.

    Raises OptionError for a negative number.
    """
    if n_slots < 0:
        raise OptionError(f"{n_slots} slots per layer", "0 means that nothing is cached")
    slots = tuple(min(n_slots, g.n_expert) for g in groups)
    cost = _cost(groups, slots)
    return Plan(fixed.total + cost, fixed, slots, cost, _cost(groups, [g.n_expert for g in groups]))


def _cost(groups: Sequence[GroupCost], slots: Sequence[int]) -> int:
    return sum(g.slot_bytes * n for g, n in zip(groups, slots, strict=True))


@dataclass(frozen=True)
class ModelSizes:
    """What a plan needs to know of a model that is not loaded, from its header or models.toml.

    `groups` are those that decoding uses. `kv_values` is how many values of K and V a token of
    context takes over all layers, `n_head` and `n_vocab` size the compute buffers.
    """

    dense_bytes: int
    groups: tuple[GroupCost, ...]
    ring_bytes: int
    kv_values: int
    n_head: int
    n_vocab: int
    n_hidden: int


@dataclass(frozen=True)
class RunSizes:
    """How a model is to be run, as far as it takes memory; tokens and threads."""

    n_ctx: int
    n_ubatch: int
    n_threads: int
    flash_attn: bool = False


def ring_buffers(largest_part_bytes: int) -> int:
    """How many buffers the read ring has: as many as fit RING_BYTES, 4 to 64."""
    return max(4, min(64, RING_BYTES // max(largest_part_bytes, 1)))


def region_bytes(part_bytes: int, aligned: bool = False) -> int:
    """The memory of one part of an expert, as native/stream.c counts it: whole blocks, and one
    more where the part may begin inside one.
    """
    slack = 0 if aligned else ALIGNMENT - 1
    return (part_bytes + slack + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def estimate_fixed(sizes: ModelSizes, run: RunSizes) -> Fixed:
    """The part of a budget that cannot shrink, before anything is loaded.

    An estimate: the KV cache (f16) is that of a model whose layers all see the whole context,
    which is what llama.cpp allocates for sliding windows too (swa_full), and more than recurrent
    layers take. A load measures the real sizes: on generated models of the shapes of gpt-oss-20b
    and OLMoE, contexts of 512 to 4096, within 20 MiB of this.
    """
    return Fixed(
        process=PROCESS_BYTES + run.n_threads * THREAD_BYTES,
        dense=sizes.dense_bytes,
        context=2 * sizes.kv_values * run.n_ctx + _compute_bytes(sizes, run),
        ring=sizes.ring_bytes,
        policy=sum(learning_bytes(group.n_expert) for group in sizes.groups),
    )


def learning_bytes(n_expert: int) -> int:
    """What the policy `learned` and the routing predictor keep of a group: a row of numbers for
    each expert of the groups that they look back at, and for sets of experts seen together
    (native/policy_learned.h, policy_learned_model.c, predict_routing.c).
    """
    contexts = (9 if n_expert <= 64 else 5) + 5
    n_sets = 4096
    while n_sets > 1 and n_sets * n_expert > 65536:
        n_sets //= 2
    return 4 * n_expert * (contexts * n_expert + 2 * n_sets)


def _compute_bytes(sizes: ModelSizes, run: RunSizes) -> int:
    """A ubatch's mask, the largest of what takes turns in one buffer, and what stays beside."""
    n_ubatch = min(run.n_ubatch, run.n_ctx)
    scores = 0 if run.flash_attn else sizes.n_head * run.n_ctx
    per_token = run.n_ctx + max(sizes.n_vocab, scores, sizes.n_hidden) + sizes.n_hidden // 2
    return CONTEXT_BYTES + 4 * n_ubatch * per_token


def plan_model(sizes: ModelSizes, run: RunSizes, ram_bytes: int) -> Plan:
    """The plan for a model that is not loaded; raises BudgetError below its floor."""
    return make_plan(ram_bytes, estimate_fixed(sizes, run), sizes.groups)


def kv_bytes_at_least(header: Header, n_ctx: int, bytes_per_value: float = 2.0) -> int:
    """A lower bound of the KV cache for a context, from the header alone; 0 when unknown.

    It is there to refuse a hopeless budget before loading; the real size is measured after.
    Layers with sliding windows or recurrent states make it unknown.
    """
    heads = header.get("attention.head_count")
    if header.get("attention.sliding_window") or header.get("ssm.conv_kernel"):
        return 0
    n_layer, n_embd = header.get("block_count"), header.get("embedding_length")
    if not (
        isinstance(n_layer, int) and isinstance(n_embd, int) and isinstance(heads, int) and heads
    ):
        return 0
    if isinstance(rank := header.get("attention.kv_lora_rank"), int):
        return int(n_layer * n_ctx * rank * bytes_per_value)
    kv = header.get("attention.head_count_kv")
    kv_heads = sum(v for v in kv if isinstance(v, int)) if isinstance(kv, tuple) else None
    if kv_heads is None:
        kv_heads = n_layer * (kv if isinstance(kv, int) else heads)
    key, value = header.get("attention.key_length"), header.get("attention.value_length")
    width = (key if isinstance(key, int) else n_embd // heads) + (
        value if isinstance(value, int) else n_embd // heads
    )
    return int(kv_heads * n_ctx * width * bytes_per_value)


def compute_bytes_about(header: Header, n_ctx: int, n_ubatch: int) -> int:
    """Roughly what llama.cpp's compute buffers take without flash attention, from the header.

    The two largest pieces: logits of a ubatch, and its attention scores over the whole context.
    """
    heads, vocabulary = header.get("attention.head_count"), header.get("vocab_size")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, ArraySummary):
        vocabulary = tokens.length
    elif isinstance(tokens, tuple):
        vocabulary = len(tokens)
    n_vocab = vocabulary if isinstance(vocabulary, int) else 0
    n_head = heads if isinstance(heads, int) else 1
    return n_ubatch * 4 * (n_vocab + n_head * n_ctx)
