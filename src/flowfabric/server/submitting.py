"""Submissions that arrive together are stored together.

The first one is stored at once. What arrives while calls are under way waits for the next call, which takes all of it:
nothing is delayed while the server is idle, and the busier it is, the larger the calls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias

from flowfabric.engine import Engine
from flowfabric.errors import FlowFabricError, TransportError
from flowfabric.values.execution import Created, Duplicate, NewExecution

CALLS: Final = 2  # at the same time
_MOST_ITEMS: Final = 500  # of one call
_MOST_BYTES: Final = 8 * 1024 * 1024

_Made: TypeAlias = Created | Duplicate
_Waiting: TypeAlias = tuple[NewExecution, "asyncio.Future[_Made]"]


class Submissions:
    """Stores what arrives."""

    def __init__(self, engine: Engine, *, calls: int = CALLS) -> None:
        self._engine = engine
        self._free = calls
        self._waiting: deque[_Waiting] = deque()
        self._running: set[asyncio.Task[None]] = set()

    async def submit(self, item: NewExecution) -> _Made:
        """Store one execution; its own refusal is raised."""
        if self._free and not self._waiting:
            self._free -= 1
            try:
                return _raised((await self._engine.create_many([item]))[0])
            finally:
                self._free += 1
                self._next()
        future: asyncio.Future[_Made] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        return await future

    def _next(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            task = asyncio.get_running_loop().create_task(self._store(self._take()))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _take(self) -> list[_Waiting]:
        taken: list[_Waiting] = []
        size = 0
        while self._waiting and len(taken) < _MOST_ITEMS:
            size += len(self._waiting[0][0].input_payload)
            if taken and size > _MOST_BYTES:
                break
            one = self._waiting.popleft()
            if not one[1].cancelled():  # its client may have left
                taken.append(one)
        return taken

    async def _store(self, taken: list[_Waiting]) -> None:
        try:
            try:
                answers = await self._engine.create_many([item for item, _ in taken]) if taken else []
            except TransportError as error:
                _settle(taken, [error] * len(taken))
            except FlowFabricError:
                # Refused as a whole: whose fault it is shows when each is stored alone.
                for one in taken:
                    await self._store_alone(one)
            else:
                _settle(taken, answers)
        except Exception as error:
            for _, future in taken:
                if not future.done():
                    future.set_exception(error)
        finally:
            self._free += 1
            self._next()

    async def _store_alone(self, one: _Waiting) -> None:
        try:
            _settle([one], await self._engine.create_many([one[0]]))
        except FlowFabricError as error:
            _settle([one], [error])


def _settle(taken: list[_Waiting], answers: Sequence[Created | Duplicate | FlowFabricError]) -> None:
    for (_, future), answer in zip(taken, answers, strict=True):
        if future.done():
            continue
        if isinstance(answer, FlowFabricError):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _raised(answer: Created | Duplicate | FlowFabricError) -> _Made:
    if isinstance(answer, FlowFabricError):
        raise answer
    return answer
