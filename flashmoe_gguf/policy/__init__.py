"""Policies in Python: twins of those in native/, step for step, and a user's own."""

from __future__ import annotations

from flashmoe_gguf.policy.arc import Arc
from flashmoe_gguf.policy.base import MayLeave, Policy
from flashmoe_gguf.policy.belady import NEVER, Belady, next_use
from flashmoe_gguf.policy.dlfu import Dlfu
from flashmoe_gguf.policy.find import PolicyClass, find_class
from flashmoe_gguf.policy.flashmoe import Flashmoe
from flashmoe_gguf.policy.learned import Learned
from flashmoe_gguf.policy.least_stale import LeastStale
from flashmoe_gguf.policy.lecar import Lecar
from flashmoe_gguf.policy.lfru import Lfru
from flashmoe_gguf.policy.lfu import Lfu
from flashmoe_gguf.policy.lru import Lru
from flashmoe_gguf.policy.random import Random

__all__ = [
    "NEVER",
    "SIMULATED",
    "TRAINED",
    "TWINS",
    "Belady",
    "MayLeave",
    "Policy",
    "PolicyClass",
    "find_class",
    "next_use",
]

# The Python twin of each policy that the C library has.
TWINS: dict[str, type[Policy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "dlfu": Dlfu,
    "arc": Arc,
    "lecar": Lecar,
    "lfru": Lfru,
    "least-stale": LeastStale,
    "random": Random,
    "learned": Learned,
    "flashmoe": Flashmoe,
}

# Those that need to know the future, which only the simulator has.
SIMULATED = ("belady", "belady-bypass")

# Those that decide nothing of their own before `flashmoe train` has made a file for them.
TRAINED = ("flashmoe",)
