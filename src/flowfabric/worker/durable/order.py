"""Recorded things are returned to a handler in the order in which they were recorded.

Branches of a handler that is run again get all their recorded results at once. They would pass a lock, a queue or
`as_completed` in another order than before, and the handler would take its next steps in another order too. So a branch
that asks for something recorded waits until the handler has asked for everything recorded before it. If that does not
happen within the turns of the loop that parking takes, it continues.
"""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from flowfabric.worker.durable.parking import STEADY

if TYPE_CHECKING:
    from flowfabric.worker.durable.memory import Memory


class Order:
    """The branches of one handler that wait for their turn."""

    __slots__ = ("_going", "_held", "_memory", "_turns")

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: list[tuple[int, int, asyncio.Future[None]]] = []
        self._going: set[asyncio.Future[None]] = set()  # branches whose turn it is, and that did not go on yet
        self._turns = 0

    @property
    def is_held(self) -> bool:
        """Whether a branch waits."""
        return bool(self._held)

    async def turn(self, place: int) -> None:
        """Wait until everything recorded before this place was asked for, and whoever asked for it goes on."""
        first = self._memory.first_unasked
        is_next = (first is None or place < first) and not self._going
        if is_next and not (self._held and self._held[0][0] < place):
            self.asked()
            return
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        if not self._held:
            loop.call_soon(self._tick)
        heappush(self._held, (place, id(opened), opened))
        self.asked()
        try:
            await opened
        finally:
            self._going.discard(opened)

    def asked(self) -> None:
        """Something recorded was asked for: branches may have their turn."""
        if self._held:
            self._turns = 0
            self._release()

    def _release(self) -> None:
        first = self._memory.first_unasked
        while self._held and (first is None or self._held[0][0] < first):
            self._pass()

    def _pass(self) -> None:
        opened = heappop(self._held)[2]
        if not opened.done():
            # Not at once: a branch that does not wait for it yet would overtake those before it.
            self._going.add(opened)
            asyncio.get_running_loop().call_soon(_open, opened)

    def _tick(self) -> None:
        if not self._held:
            return
        self._turns += 1
        if self._turns >= STEADY:
            self._turns = 0
            self._pass()
            self._release()
        asyncio.get_running_loop().call_soon(self._tick)


def _open(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
