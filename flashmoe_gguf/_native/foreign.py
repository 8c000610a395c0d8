"""Eviction policies that are Python objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flashmoe_gguf._native.library import library

_EVENTS = {  # of a policy: name, C type of the function
    "on_hit": "void(int32_t, int32_t)",
    "on_miss": "void(int32_t, int32_t)",
    "on_insert": "void(int32_t, int32_t)",
    "on_remove": "void(int32_t, int32_t)",
    "end_token": "void(int32_t)",
    "begin_sequence": "void()",
}
_NAMED_WRONG = 2


class ForeignPolicy:
    """A policy object of Python's, for the C library to call: see flashmoe_gguf.policy.Policy.

    `victim` must be there; what else it lacks is left out. The library calls from its computing
    threads, under its lock, one call at a time. An exception, or a victim that may not leave, ends
    the calls: lru takes over, and `failure` says why.
    """

    def __init__(self, name: str, policy: Any, n_expert: Sequence[int]) -> None:
        self.name = name
        self._ffi, _ = library()
        self._victim: Callable[[int, npt.NDArray[np.bool_]], int] = policy.victim
        self._n_expert = list(n_expert)
        self._raised: BaseException | None = None
        self._interrupt: KeyboardInterrupt | None = None
        self.struct = self._ffi.new("struct fm_foreign_policy *")
        self._functions = [self._ffi.callback("int32_t(int32_t, const uint8_t *)", self._name)]
        self.struct.victim = self._functions[0]
        for event, kind in _EVENTS.items():
            method = getattr(policy, event, None)
            if method is not None:
                function = self._ffi.callback(kind, self._event(method))
                setattr(self.struct, event, function)
                self._functions.append(function)

    def _event(self, method: Callable[..., Any]) -> Callable[..., None]:
        def call(*numbers: int) -> None:
            try:
                method(*numbers)
            except KeyboardInterrupt as interrupt:  # meant for the program, not for the policy
                self._interrupt = interrupt
            except BaseException as error:
                self._fail(error)

        return call

    def _name(self, group: int, may_leave: Any) -> int:
        raw = self._ffi.buffer(may_leave, self._n_expert[group])
        for _ in range(2):  # again after Ctrl-C
            try:
                return int(self._victim(group, np.frombuffer(raw, np.bool_)))
            except KeyboardInterrupt as interrupt:
                self._interrupt = interrupt
            except BaseException as error:
                self._fail(error)
                break
        return -1

    def _fail(self, error: BaseException) -> None:
        self._raised = error
        self.struct.failed = 1

    @property
    def failure(self) -> str:
        """Why lru has taken over; empty while the policy works."""
        if self._raised is not None:
            return f"{type(self._raised).__name__}: {self._raised}".rstrip(": ")
        if self.struct.failed == _NAMED_WRONG:
            return f"it named expert {self.struct.named}, which may not leave"
        return ""

    @property
    def seconds(self) -> float:
        """Time spent in the policy so far."""
        return float(self.struct.ns) / 1e9

    def raise_interrupt(self) -> None:
        """Raises the KeyboardInterrupt that came while the policy was called, once."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt
