"""Whose turn it is to compute: one request at a time, clients one after the other."""

from __future__ import annotations

from collections import deque

import anyio


class Turns:
    """A queue per client, served in rotation: many requests of one do not hold up another's.

    Requests of one client keep their order. All methods belong to one event loop.
    """

    def __init__(self) -> None:
        self._taken = False
        self._queues: dict[str, deque[anyio.Event]] = {}  # in the order in which they are served

    async def take(self, client: str) -> None:
        """Waits for its turn. Whoever is cancelled meanwhile has none."""
        if not self._taken:
            self._taken = True
            return
        mine = anyio.Event()
        self._queues.setdefault(client, deque()).append(mine)
        try:
            await mine.wait()
        except BaseException:
            if mine.is_set():  # it came at the same moment
                self.give_back()
            else:
                self._queues[client].remove(mine)
                if not self._queues[client]:
                    del self._queues[client]
            raise

    def give_back(self) -> None:
        """Ends the turn: the next client in rotation has its own."""
        if not self._queues:
            self._taken = False
            return
        client = next(iter(self._queues))
        queue = self._queues.pop(client)
        queue.popleft().set()
        if queue:
            self._queues[client] = queue  # again, behind the others
