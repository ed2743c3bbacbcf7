"""Waiting for executions to end: one watcher per client, for any number of waiters.

The database notifies processes that watch an execution when it ends. A notification may get lost, so the watcher also
polls: soon after a wait begins and then at growing intervals, for all waiting executions in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from flowfabric._waiting import first_of
from flowfabric.client.current import background
from flowfabric.engine import Engine
from flowfabric.errors import FlowFabricError, TransportError
from flowfabric.values.execution import Outcome
from flowfabric.values.ids import ExecutionId
from flowfabric.values.worker import why_unserved

log = logging.getLogger("flowfabric.client")
_FIRST_POLL = 0.005
_MAX_POLL = 2.0
_MAX_POLL_WITHOUT_NOTIFY = 0.5
_FIRST_READ = 1.0  # what the first read may take, even with a shorter timeout
_WATCHED_FOR = 60.0
_CHUNK = 1000
_MAX_PAUSE = 5.0  # seconds between polls that fail
_UNSERVED_AFTER = 5.0  # seconds of waiting after which work that no worker serves is reported


class Outcomes:
    """Resolves waiting futures when executions end."""

    def __init__(self, engine: Engine, report: Callable[[str], None] | None = None) -> None:
        """`report` receives the line that says why nothing happens; by default it is logged."""
        self._engine = engine
        self._report = report or log.warning
        self._unchecked: dict[ExecutionId, float] = {}  # when to check whether a worker serves them, earliest first
        self._reported: set[str] = set()
        self._waiting: dict[ExecutionId, set[asyncio.Future[Outcome]]] = {}
        self._new: set[ExecutionId] = set()
        self._given_up: set[ExecutionId] = set()
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def future(self, execution_id: ExecutionId) -> asyncio.Future[Outcome]:
        """A future that receives the outcome. Cancel it to stop waiting."""
        waiter: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(execution_id, set()).add(waiter)
        waiter.add_done_callback(lambda done: self._left(execution_id, done))
        self._new.add(execution_id)
        self._unchecked.setdefault(execution_id, time.monotonic() + _UNSERVED_AFTER)
        self._woken.set()
        if self._task is None or self._task.done():
            self._task = background(self._run(), "flowfabric outcomes")
        return waiter

    async def wait(self, execution_id: ExecutionId, timeout: float | None = None) -> Outcome:
        """Wait for the outcome; `TimeoutError` if it takes too long. Always checks once, even with a zero timeout."""
        begun = time.monotonic()
        async with asyncio.timeout(None if timeout is None else max(timeout, _FIRST_READ)):
            known = (await self._engine.read_outcomes([execution_id])).get(execution_id)
        if known is not None:
            return known
        async with asyncio.timeout(None if timeout is None else begun + timeout - time.monotonic()):
            return await self.future(execution_id)

    def _left(self, execution_id: ExecutionId, waiter: asyncio.Future[Outcome]) -> None:
        waiters = self._waiting.get(execution_id)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiting[execution_id]
                self._unchecked.pop(execution_id, None)
                if waiter.cancelled() and execution_id not in self._new:
                    self._given_up.add(execution_id)
                self._new.discard(execution_id)

    async def _run(self) -> None:
        with self._engine.wakeups("ended") as notified:
            pause = _FIRST_POLL
            watched_until = 0.0
            trouble = 0
            loop = asyncio.get_running_loop()
            while self._waiting or self._given_up:
                self._woken.clear()
                if notified is not None:
                    notified.clear()
                try:
                    given_up, self._given_up = self._given_up - self._waiting.keys(), set()
                    if notified is not None:
                        for chunk in _chunks(given_up):
                            await self._engine.unwatch(chunk)
                    fresh, self._new = self._new, set()
                    if notified is not None and loop.time() >= watched_until:
                        fresh = set(self._waiting)
                        watched_until = loop.time() + _WATCHED_FOR / 2
                    if fresh:
                        pause = _FIRST_POLL
                        if notified is not None:
                            for chunk in _chunks(fresh):
                                await self._engine.watch(chunk, timedelta(seconds=_WATCHED_FOR))
                    for chunk in _chunks(self._waiting):
                        for execution_id, outcome in (await self._engine.read_outcomes(chunk)).items():
                            for waiter in list(self._waiting.get(execution_id, ())):
                                if not waiter.done():
                                    waiter.set_result(outcome)
                    await asyncio.sleep(0)  # let the waiters that were just resolved leave
                    await self._say_why()
                    if trouble:
                        trouble, pause = 0, _FIRST_POLL
                except Exception as error:
                    if not self._engine.outage.covers(error):
                        log.warning("waiting for results: %s", error, exc_info=not isinstance(error, FlowFabricError))
                    watched_until = 0.0
                    pause = min(0.5 * 2.0**trouble, _MAX_PAUSE)
                    trouble = min(trouble + 1, 10)
                await asyncio.sleep(0)  # let the waiters that were just resolved leave
                if self._waiting and trouble:
                    await first_of(pause, self._woken, notified)
                elif self._waiting:
                    check_in = next(iter(self._unchecked.values()), math.inf) - time.monotonic()
                    await first_of(min(pause, max(check_in, _FIRST_POLL)), self._woken, notified)
                    pause = min(pause * 4, _MAX_POLL if notified is not None else _MAX_POLL_WITHOUT_NOTIFY)

    async def _say_why(self) -> None:
        """Report, once for each kind and lane, that no worker serves an execution awaited for some seconds."""
        now = time.monotonic()
        late: list[ExecutionId] = []
        for execution_id, at in self._unchecked.items():
            if at > now or len(late) == _CHUNK:
                break
            late.append(execution_id)
        if not late:
            return
        for execution_id in late:
            del self._unchecked[execution_id]
        try:
            unserved = await self._engine.find_unserved(late)
        except FlowFabricError as error:  # a hint, which the role may not be allowed to read
            log.debug("cannot say which work no worker serves: %s", error)
            return
        for found in unserved:
            line = why_unserved(found)
            if line not in self._reported:
                self._reported.add(line)
                self._report(line)

    async def close(self) -> None:
        """Stop; the remaining futures get a `TransportError`."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for waiters in list(self._waiting.values()):
            for waiter in list(waiters):
                if not waiter.done():
                    waiter.set_exception(TransportError("transport", "the client was closed"))
                    waiter.exception()  # marks it as retrieved, in case nothing awaits it any more


def _chunks(ids: Iterable[ExecutionId]) -> list[list[ExecutionId]]:
    every = list(ids)
    return [every[at : at + _CHUNK] for at in range(0, len(every), _CHUNK)]
