"""Requests that arrive together are one call to the database.

The first request makes a call at once. Requests that arrive while calls are under way wait for the next call, which
takes all of them: an idle server delays no request, and the busier it is, the larger the calls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from flowfabric.errors import FlowFabricError, TransportError

CALLS: Final = 2  # at the same time
_MOST_ITEMS: Final = 500  # of one call
_MOST_BYTES: Final = 8 * 1024 * 1024
Item = TypeVar("Item")
Found = TypeVar("Found")


class Together(Generic[Item, Found]):
    """Makes one call for what arrives together: `call` gets items and returns a result or a refusal for each."""

    def __init__(
        self,
        call: Callable[[list[Item]], Awaitable[Sequence[Found | FlowFabricError]]],
        *,
        weigh: Callable[[Item], int] = lambda _: 0,
        calls: int = CALLS,
    ) -> None:
        """`weigh` returns the bytes of an item."""
        self._call = call
        self._weigh = weigh
        self._free = calls
        self._waiting: deque[tuple[Item, asyncio.Future[Found]]] = deque()
        self._running: set[asyncio.Task[None]] = set()

    async def ask(self, item: Item) -> Found:
        """The result for one item; its own refusal is raised."""
        if self._free and not self._waiting:
            self._free -= 1
            try:
                return _raised((await self._call([item]))[0])
            finally:
                self._free += 1
                self._next()
        future: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        return await future

    def _next(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            task = asyncio.get_running_loop().create_task(self._run(self._take()))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _take(self) -> list[tuple[Item, asyncio.Future[Found]]]:
        taken: list[tuple[Item, asyncio.Future[Found]]] = []
        size = 0
        while self._waiting and len(taken) < _MOST_ITEMS:
            size += self._weigh(self._waiting[0][0])
            if taken and size > _MOST_BYTES:
                break
            one = self._waiting.popleft()
            if not one[1].cancelled():  # its client may have left
                taken.append(one)
        return taken

    async def _run(self, taken: list[tuple[Item, asyncio.Future[Found]]]) -> None:
        try:
            try:
                results = await self._call([item for item, _ in taken]) if taken else []
            except TransportError as error:
                _settle(taken, [error] * len(taken))
            except FlowFabricError:
                # Refused as a whole: each item is tried alone, to find the one at fault.
                for one in taken:
                    await self._run_alone(one)
            else:
                _settle(taken, results)
        except Exception as error:
            for _, future in taken:
                if not future.done():
                    future.set_exception(error)
        finally:
            self._free += 1
            self._next()

    async def _run_alone(self, one: tuple[Item, asyncio.Future[Found]]) -> None:
        try:
            _settle([one], await self._call([one[0]]))
        except FlowFabricError as error:
            _settle([one], [error])


def _settle(taken: Sequence[tuple[Item, asyncio.Future[Found]]], results: Sequence[Found | FlowFabricError]) -> None:
    for (_, future), result in zip(taken, results, strict=True):
        if future.done():
            continue
        if isinstance(result, FlowFabricError):
            future.set_exception(result)
        else:
            future.set_result(result)


def _raised(result: Found | FlowFabricError) -> Found:
    if isinstance(result, FlowFabricError):
        raise result
    return result
