"""What the cache did: the counters that users see."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from flashmoe_gguf._native import GroupCounts
from flashmoe_gguf.regret import Regret


@dataclass(frozen=True)
class Stats:
    """What the cache did since the model was loaded, or between two moments (`b - a`).

    Bytes, seconds and counts. `hits` and `lookups` count distinct experts per layer pass;
    the `decode_` ones only passes of one token. `wait_seconds` is time that compute threads
    slept for experts, per thread. `policy_reason` says why "auto" picked this policy; `regret` is
    measured in the background, None before the first time. `policy_seconds` is time spent in a
    policy written in Python; `policy_failure` says why lru has taken its place, and is empty while
    it works; between two moments it is what failed meanwhile. `tuned`: the settings that
    `flashmoe tune` has found and that are in use, in words.
    `given_back_bytes`: slots that the governor has closed. Sizes (`*_bytes` of memory, `n_slots`)
    are as of now.
    """

    policy: str
    policy_reason: str
    policy_failure: str
    tuned: str
    io_mode: str
    n_slots: int
    budget_bytes: int
    slot_bytes: int
    given_back_bytes: int
    resident_bytes: int
    ring_bytes: int
    dense_bytes: int
    regret: Regret | None
    tokens: int
    operations: int
    lookups: int
    hits: int
    decode_lookups: int
    decode_hits: int
    bypassed: int
    inserted: int
    evicted: int
    missed_bytes: int
    bytes_read: int
    reads: int
    ahead_issued: int
    ahead_used: int
    ahead_dropped: int
    guesses: int
    guesses_used: int
    guesses_wasted: int
    guesses_overtaken: int
    waits: int
    wait_seconds: float
    failed_loads: int
    verified: int
    policy_seconds: float

    @property
    def misses(self) -> int:
        return self.lookups - self.hits

    @property
    def hit_rate(self) -> float:
        """Share of lookups that found their expert, 0 to 1; 0 before the first."""
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def decode_hit_rate(self) -> float:
        """The same for decoding only, which is the figure that policies are compared by."""
        return self.decode_hits / self.decode_lookups if self.decode_lookups else 0.0

    @property
    def policy_ms_per_token(self) -> float:
        """Milliseconds per token in a policy written in Python; 0 for others."""
        return 1e3 * self.policy_seconds / max(self.tokens, 1)

    def __sub__(self, earlier: Stats) -> Stats:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in _COUNTERS:
            values[name] -= getattr(earlier, name)
        if earlier.policy_failure:
            values["policy_failure"] = ""  # it is no news
        return Stats(**values)


@dataclass(frozen=True)
class ExpertUse:
    """One group's counters, and per expert, each [n_expert]: whether it has a slot now (0 or 1),
    and how many tokens have used it since the model was loaded.
    """

    counts: GroupCounts
    resident: npt.NDArray[np.uint8]
    uses: npt.NDArray[np.uint64]


_NAMES = [f.name for f in fields(Stats)]
_COUNTERS = _NAMES[_NAMES.index("tokens") :]
