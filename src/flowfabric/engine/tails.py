"""Waiting for frames: one loop per engine reads for all waiters together, and none of them holds a connection.

The database notifies processes that announced that they wait; an announcement lasts for one notification. Notifications
may get lost, so the loop also polls: soon after a wait begins, and then at growing intervals, at least every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from flowfabric._waiting import first_of
from flowfabric.errors import FlowFabricError, NotAllowed, ResourceExhausted, Unavailable
from flowfabric.values.ids import ExecutionId
from flowfabric.values.stream import Position, StreamPage

if TYPE_CHECKING:
    from flowfabric.engine import Engine

log = logging.getLogger("flowfabric.streams")
_FIRST_POLL = 0.02
_MAX_POLL = 1.0
_WATCHED_FOR = 60.0
_AFTER_ERROR = 0.5
_LINGER = 0.2  # seconds; a reader that has got frames comes back for more
_CHUNK = 500
_Item = TypeVar("_Item")


class StreamPermits:
    """How many reads and tails of streams an engine runs at a time; beyond that they are refused at once."""

    def __init__(self, most: int = 64) -> None:
        self.most = most
        self.is_closing = False
        self._taken = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Hold a permit in this block."""
        if self.is_closing:
            raise Unavailable("stream_ops", "the engine shuts down")
        if self._taken >= self.most:
            raise ResourceExhausted("stream_ops", self.most, max(25, 25 * self.most))
        self._taken += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._taken -= 1
            if not self._taken:
                self._idle.set()

    async def drained(self, timeout: float) -> bool:
        """Wait until no call runs; False if that takes too long."""
        await first_of(timeout, self._idle)
        return self._idle.is_set()


class Waiter:
    """A wait for one stream: what to read of it, and which page ends the wait."""

    __slots__ = (
        "_pause",
        "attempt",
        "begin",
        "execution_id",
        "frames",
        "future",
        "is_ready",
        "limit",
        "live",
        "poll_at",
    )

    def __init__(
        self,
        execution_id: ExecutionId,
        attempt: int | None,
        begin: Position,
        limit: int,
        live: bool,
        is_ready: Callable[[StreamPage], bool],
    ) -> None:
        self.execution_id = execution_id
        self.attempt = attempt
        self.begin = begin
        self.limit = limit
        self.live = live
        self.is_ready = is_ready
        self.frames: int | None = None  # how many the stream had when it was read
        self.future: asyncio.Future[StreamPage | None] | None = None
        self.poll_at = 0.0
        self._pause = _FIRST_POLL

    def was_read(self, now: float) -> None:
        """Poll again after a longer pause than before, at a time that other waiters have too."""
        self.poll_at = (now // self._pause + 1) * self._pause
        self._pause = min(self._pause * 4, _MAX_POLL)


class Tails:
    """Resolves waiters when their streams have news."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[ExecutionId, set[Waiter]] = {}
        self._new: set[ExecutionId] = set()  # to announce, and to read
        self._left: dict[ExecutionId, float] = {}  # without a waiter, and when to take the announcement back
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_closing = False  # the engine shuts down: nothing waits any more

    @property
    def count(self) -> int:
        """How many waiters there are."""
        return sum(map(len, self._waiting.values()))

    async def wait(self, waiter: Waiter, timeout: float | None) -> StreamPage | None:
        """Wait for the page that ends the wait; None if that takes too long, or the engine shuts down."""
        if self.is_closing:
            return None
        waiter.future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(waiter.execution_id, set()).add(waiter)
        self._new.add(waiter.execution_id)
        self._left.pop(waiter.execution_id, None)
        self._woken.set()
        if self._task is None or self._task.done():
            # Of the process, not of the handler that happens to be the first to wait.
            loop = asyncio.get_running_loop()
            self._task = asyncio.Task(self._run(), loop=loop, name="flowfabric tails", context=Context())
        try:
            async with asyncio.timeout(timeout):
                return await waiter.future
        except TimeoutError:
            return None
        finally:
            self._leave(waiter)

    def _leave(self, waiter: Waiter) -> None:
        waiters = self._waiting.get(waiter.execution_id)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiting[waiter.execution_id]
                self._new.discard(waiter.execution_id)
                self._left[waiter.execution_id] = asyncio.get_running_loop().time() + _LINGER

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        watched_until = 0.0
        with self._engine.wakeups("frames") as wakeup:
            notified = wakeup
            while self._waiting or self._left:
                self._woken.clear()
                if notified is not None:
                    notified.clear()
                told = self._engine.take_told()
                fresh, self._new = self._new, set()
                left = [one for one, at in self._left.items() if at <= loop.time()]
                for one in left:
                    del self._left[one]
                try:
                    if notified is not None:
                        if loop.time() >= watched_until:
                            fresh = set(self._waiting)
                            watched_until = loop.time() + _WATCHED_FOR / 2
                        # Announce first, then read: what is appended after the read brings a notification.
                        notified = await self._announce(notified, fresh, left)
                    await self._read(self._due(loop.time(), fresh if told is None else told | fresh, told is None))
                except Exception as error:
                    log.warning("waiting for frames: %s", error, exc_info=not isinstance(error, FlowFabricError))
                    watched_until = 0.0
                    await asyncio.sleep(_AFTER_ERROR)
                await asyncio.sleep(0)  # let the waiters that were just resolved leave
                times = [waiter.poll_at for waiters in self._waiting.values() for waiter in waiters]
                times += self._left.values()
                if times and not self._new:
                    await first_of(max(min(times) - loop.time(), 0), self._woken, notified)

    async def _announce(
        self, notified: asyncio.Event, fresh: Iterable[ExecutionId], left: Iterable[ExecutionId]
    ) -> asyncio.Event | None:
        """Say which executions this process waits for; None if this database user may only read."""
        try:
            for chunk in _chunks(left):
                await self._engine.unwatch(chunk, topic="frames")
            for chunk in _chunks(fresh):
                await self._engine.watch(chunk, timedelta(seconds=_WATCHED_FOR), topic="frames")
        except NotAllowed:
            return None
        return notified

    def _due(self, now: float, named: set[ExecutionId], every: bool) -> list[Waiter]:
        """Return the waiters to read for: those of the named executions, and those that were not read for a while."""
        return [
            waiter
            for execution_id, waiters in self._waiting.items()
            for waiter in waiters
            if every or execution_id in named or waiter.poll_at <= now
        ]

    async def _read(self, waiters: Sequence[Waiter]) -> None:
        for _, group in itertools.groupby(sorted(waiters, key=_form), _form):
            # Readers at the same position of a stream share one page.
            same: dict[tuple[ExecutionId, int | None, Position], list[Waiter]] = {}
            for waiter in group:
                same.setdefault((waiter.execution_id, waiter.attempt, waiter.begin), []).append(waiter)
            for chunk in _chunks(same):
                first = same[chunk[0]][0]
                pages = await self._engine.read_streams(
                    chunk, count_limit=first.limit, visibility="all" if first.live else "exclude_best_effort"
                )
                for place, page in zip(chunk, pages, strict=True):
                    for waiter in same[place]:
                        self._give(waiter, page)

    def _give(self, waiter: Waiter, page: StreamPage) -> None:
        waiter.was_read(asyncio.get_running_loop().time())
        if waiter.future is None or waiter.future.done():
            return
        if waiter.is_ready(page):
            waiter.future.set_result(page)
        elif page.frame_count != waiter.frames:
            # Frames that it does not show: the announcement is used up.
            if waiter.frames is not None:
                self._new.add(waiter.execution_id)
            waiter.frames = page.frame_count

    def end_waits(self) -> None:
        """Let every call that waits return without frames, and every later one at once."""
        self.is_closing = True
        for waiters in list(self._waiting.values()):
            for waiter in list(waiters):
                if waiter.future is not None and not waiter.future.done():
                    waiter.future.set_result(None)

    async def close(self) -> None:
        """End the waits, and stop."""
        self.end_waits()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


def _form(waiter: Waiter) -> tuple[int, bool]:
    """Waiters of one form are read in one call."""
    return waiter.limit, waiter.live


def _chunks(items: Iterable[_Item]) -> list[list[_Item]]:
    every = list(items)
    return [every[at : at + _CHUNK] for at in range(0, len(every), _CHUNK)]
