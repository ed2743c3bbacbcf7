"""Natural batching: items that arrive during a call go with the next one. No delay is ever added."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from flowfabric.client.current import background
from flowfabric.errors import FlowFabricError, TransportError
from flowfabric.middleware import RateLimited
from flowfabric.values.durations import counted

log = logging.getLogger("flowfabric.worker")
Item = TypeVar("Item")
Answer = TypeVar("Answer")
T = TypeVar("T")
_MAX_PAUSE = 5.0
_MAX_BYTES = 16 << 20  # per call: larger calls only take longer


class Batcher(Generic[Item, Answer]):
    """Sends items in calls of up to `limit`, `lines` calls at a time. `weigh` returns the bytes of an item.

    It calls `answered` with every item and its verdict, which may be an error. A call that fails because the database
    is unreachable, or because a limit holds it back, is repeated until it succeeds or until `close`. A call that takes
    too long is repeated in halves. A call that fails otherwise is repeated item by item, so that one bad item does not
    fail the others.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | FlowFabricError]]],
        answered: Callable[[Item, Answer | FlowFabricError], None],
        *,
        weigh: Callable[[Item], int],
        limit: int = 1000,
        lines: int = 1,
        is_reported: Callable[[FlowFabricError], bool] = lambda _: False,
    ) -> None:
        """`is_reported` says whether the log already has the reason why a call is repeated."""
        self._name = name
        self._is_reported = is_reported
        self._call = call
        self._answered = answered
        self._weigh = weigh
        self._limit = limit
        self._lines = lines
        self._busy = 0
        self._queue: deque[Item] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closed = False

    @property
    def pending(self) -> int:
        """How many items wait for their call."""
        return len(self._queue)

    def put(self, item: Item) -> None:
        """Send an item with the next call."""
        self._queue.append(item)
        if self._busy < self._lines:
            self._busy += 1
            self._idle.clear()
            task = background(self._work(), f"flowfabric {self._name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self) -> None:
        try:
            # Items that become ready in this turn of the loop go with the same call.
            await asyncio.sleep(0)
            while self._queue:
                batch = self._take()
                verdicts: Sequence[Answer | FlowFabricError] | None = None
                with contextlib.suppress(asyncio.CancelledError):  # by `close`
                    if not self._is_closed:
                        verdicts = await self._interruptibly(self._send(batch))
                if verdicts is None:
                    error = TransportError("transport", "the worker stopped before the database answered")
                    verdicts = [error] * len(batch)
                for item, verdict in zip(batch, verdicts, strict=True):
                    try:
                        self._answered(item, verdict)
                    except Exception:
                        log.exception("%s: handling the response failed", self._name)
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    async def _interruptibly(self, call: Awaitable[T]) -> T:
        """Make a call that `close` can cancel; cancelled anywhere else, a task would leave items without a verdict."""
        task = asyncio.current_task()
        assert task is not None
        self._sending.add(task)
        try:
            return await call
        finally:
            self._sending.discard(task)

    def _take(self) -> list[Item]:
        queue, weigh = self._queue, self._weigh
        batch = [queue.popleft()]
        weight = weigh(batch[0])
        while queue and len(batch) < self._limit and (weight := weight + weigh(queue[0])) <= _MAX_BYTES:
            batch.append(queue.popleft())
        return batch

    async def _send(self, batch: list[Item]) -> Sequence[Answer | FlowFabricError]:
        pause = 0.05
        while True:
            try:
                verdicts = await self._call(batch)
            except Exception as error:
                if isinstance(error, FlowFabricError):
                    failure = error
                else:
                    log.exception("%s failed", self._name)
                    failure = TransportError("other", f"{type(error).__name__}: {error}")
                if failure.retryable:
                    if not self._is_reported(failure):
                        log.warning("%s: %s; sending %s again", self._name, failure, counted(len(batch), "item"))
                    if isinstance(failure, RateLimited):
                        # Twice, because the sleep may be half of it.
                        pause = min(max(pause, failure.retry_after.total_seconds() * 2), _MAX_PAUSE)
                    await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - spreads the retries
                    pause = min(pause * 2, _MAX_PAUSE)
                    if failure.kind == "timeout" and len(batch) > 1:
                        half = len(batch) // 2
                        return [*await self._send(batch[:half]), *await self._send(batch[half:])]
                elif len(batch) == 1:
                    return [failure]
                else:
                    return [(await self._send([item]))[0] for item in batch]
            else:
                return verdicts

    async def flushed(self, timeout: float | None = None) -> bool:
        """Wait until no call is open; False if that takes too long."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Give up on open calls and later items: their verdict is an error."""
        self._is_closed = True
        for task in self._sending:
            task.cancel()
