"""Waiting for executions to end: one watcher per process, however many wait.

The database tells a process that watches an execution when it ends. That is a hint: the watcher also looks by itself,
soon after somebody begins to wait and then ever more rarely, for all of them in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from datetime import timedelta

from flowfabric._waiting import first_of
from flowfabric.client.current import background
from flowfabric.engine import Engine
from flowfabric.errors import FlowFabricError, TransportError
from flowfabric.values.execution import Outcome
from flowfabric.values.ids import ExecutionId

log = logging.getLogger("flowfabric.client")
_FIRST_LOOK = 0.005
_LAST_LOOK = 2.0
_LAST_LOOK_UNTOLD = 0.5  # without notifications
_ONE_LOOK = 1.0  # what the first look may take
_WATCHED_FOR = 60.0
_CHUNK = 1000


class Outcomes:
    """Gives out how executions ended, once they have."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[ExecutionId, set[asyncio.Future[Outcome]]] = {}
        self._new: set[ExecutionId] = set()
        self._given_up: set[ExecutionId] = set()
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def future(self, execution_id: ExecutionId) -> asyncio.Future[Outcome]:
        """A future that gets the outcome. Cancel it to stop waiting."""
        waiter: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(execution_id, set()).add(waiter)
        waiter.add_done_callback(lambda done: self._left(execution_id, done))
        self._new.add(execution_id)
        self._woken.set()
        if self._task is None or self._task.done():
            self._task = background(self._run(), "flowfabric outcomes")
        return waiter

    async def wait(self, execution_id: ExecutionId, timeout: float | None = None) -> Outcome:
        """The outcome; `TimeoutError` when it has not come in time. It is looked for once, however short that is."""
        begun = time.monotonic()
        async with asyncio.timeout(None if timeout is None else max(timeout, _ONE_LOOK)):
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
                if waiter.cancelled() and execution_id not in self._new:
                    self._given_up.add(execution_id)
                self._new.discard(execution_id)

    async def _run(self) -> None:
        with self._engine.ended_wakeups() as told:
            pause = _FIRST_LOOK
            watched_until = 0.0
            loop = asyncio.get_running_loop()
            while self._waiting or self._given_up:
                self._woken.clear()
                if told is not None:
                    told.clear()
                try:
                    given_up, self._given_up = self._given_up - self._waiting.keys(), set()
                    if told is not None:
                        for chunk in _chunks(given_up):
                            await self._engine.unwatch(chunk)
                    fresh, self._new = self._new, set()
                    if told is not None and loop.time() >= watched_until:
                        fresh = set(self._waiting)
                        watched_until = loop.time() + _WATCHED_FOR / 2
                    if fresh:
                        pause = _FIRST_LOOK
                        if told is not None:
                            for chunk in _chunks(fresh):
                                await self._engine.watch(chunk, timedelta(seconds=_WATCHED_FOR))
                    for chunk in _chunks(self._waiting):
                        for execution_id, outcome in (await self._engine.read_outcomes(chunk)).items():
                            for waiter in list(self._waiting.get(execution_id, ())):
                                if not waiter.done():
                                    waiter.set_result(outcome)
                except Exception as error:
                    log.warning("waiting for results: %s", error, exc_info=not isinstance(error, FlowFabricError))
                    watched_until = 0.0
                    pause = max(pause, 0.5)
                await asyncio.sleep(0)  # let those who got their answer leave
                if self._waiting:
                    await first_of(pause, self._woken, told)
                    pause = min(pause * 4, _LAST_LOOK if told is not None else _LAST_LOOK_UNTOLD)

    async def close(self) -> None:
        """Stop; whoever still waits is told."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for waiters in list(self._waiting.values()):
            for waiter in list(waiters):
                if not waiter.done():
                    waiter.set_exception(TransportError("transport", "the client was closed"))
                    waiter.exception()  # seen, should nobody look any more


def _chunks(ids: Iterable[ExecutionId]) -> list[list[ExecutionId]]:
    every = list(ids)
    return [every[at : at + _CHUNK] for at in range(0, len(every), _CHUNK)]
