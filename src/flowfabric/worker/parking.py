"""Waiting without a worker: what a handler waits for, and giving its lease back once all of it waits.

A wait is a future (its gate) that opens when the time has come, the other execution has ended or a signal has arrived.
When every task of the handler stands at a gate, the execution is parked in the database, or suspended if it waits for
the signals of one wait alone, and the handler is stopped; it never learns from the gates themselves. While something
else goes on the waits go on here, and parking is considered again now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from flowfabric.client.current import background
from flowfabric.contracts.waits import WaitRequest
from flowfabric.values.execution import Outcome
from flowfabric.values.ids import ExecutionId
from flowfabric.worker import tree

if TYPE_CHECKING:
    from flowfabric.worker.running import Running

log = logging.getLogger("flowfabric.worker")
_FIRST_LOOK = 0.02  # seconds until parking is considered again
_LAST_LOOK = 1.0
MOST = 1000  # executions that one parking can wait for
# Turns of the loop for which a handler must not have moved. Something that is done reaches whoever waits for it through
# callbacks, one turn for each future in between.
_STEADY = 10


class SignalWait:
    """A wait for signals that is open: its waitpoints, how many signals are known on each, and what would end it."""

    __slots__ = ("deadline", "n", "request", "seen", "waitpoints")

    def __init__(
        self, request: WaitRequest, n: int, waitpoints: Sequence[UUID], deadline: datetime | None, seen: Sequence[int]
    ) -> None:
        self.request = request
        self.n = n
        self.waitpoints = waitpoints
        self.deadline = deadline
        self.seen = seen

    @property
    def until(self) -> datetime | None:
        """When the handler has something to do about it: what is escalated goes on waiting."""
        return None if self.request.behavior == "escalate" else self.deadline

    @property
    def ends_execution(self) -> bool:
        """Whether the execution ends with its time, which is the engine's to do."""
        return self.request.behavior in ("fail", "cancel", "expire")


class Wait:
    """What one gate waits for: a time, the end of an execution, signals, or the first of them."""

    __slots__ = ("execution_id", "signals", "told", "until")

    def __init__(
        self, until: datetime | None, execution_id: ExecutionId | None = None, signals: SignalWait | None = None
    ) -> None:
        self.until = until
        self.execution_id = execution_id
        self.signals = signals
        self.told: asyncio.Future[Outcome] | None = None  # while it cannot be parked

    @property
    def is_for_something(self) -> bool:
        """False for what was given up in an earlier run, which nothing ends."""
        return self.until is not None or self.execution_id is not None or self.signals is not None


class Parking:
    """The waits of one handler."""

    __slots__ = ("_look", "_passed", "_pause", "_running", "_steady", "_task", "waits")

    def __init__(self, running: Running) -> None:
        self.waits: dict[asyncio.Future[Any], Wait] = {}
        self._running = running
        self._task: asyncio.Task[None] | None = None
        self._look: asyncio.Handle | None = None
        self._pause = _FIRST_LOOK
        self._passed: datetime | None = None
        self._steady = 0

    @property
    def is_under_way(self) -> bool:
        """Whether the lease is being given back: no gate opens meanwhile."""
        return self._task is not None

    def is_over(self, until: datetime) -> bool:
        """Whether a time has come."""
        return until <= self._running.database_now() or (self._passed is not None and until <= self._passed)

    def pass_time(self, until: datetime) -> None:
        """The database said that this time has come, whatever is thought of it here."""
        self._passed = until if self._passed is None else max(until, self._passed)

    async def wait(self, wait: Wait, *, again: bool = False) -> None:
        """Wait for what it says; may come back early. `again`: it did, and there is no reason to look at once."""
        loop = asyncio.get_running_loop()
        gate: asyncio.Future[None] = loop.create_future()
        self.waits[gate] = wait
        until = wait.until
        left = None if until is None else max((until - self._running.database_now()).total_seconds(), 0)
        timer = None if left is None else loop.call_later(left, self._open, gate)
        if again:
            self._look_later()
        else:
            # One look for all that begin to wait in this turn of the loop.
            if self._look is not None:
                self._look.cancel()
            self._look = loop.call_soon(self.consider)
            self._pause = _FIRST_LOOK
        self._steady = 0
        try:
            await gate
        finally:
            if timer is not None:
                timer.cancel()
            del self.waits[gate]
            if wait.told is not None:
                wait.told.cancel()

    def _open(self, gate: asyncio.Future[None]) -> None:
        # What comes while the lease is being given back is looked at afterwards.
        if not self.is_under_way and not self._running.is_parked and not gate.done():
            gate.set_result(None)

    def _told(self, gate: asyncio.Future[None], _: asyncio.Future[Outcome]) -> None:
        self._open(gate)

    def consider(self) -> None:
        """Park, if every task of the handler waits for something that needs no worker."""
        self._look = None
        running = self._running
        if not self.waits or self.is_under_way or running.is_cancelled or running.is_parked:
            return
        if 0 < self._steady < _STEADY:
            self._steady += 1
            self._look = asyncio.get_running_loop().call_soon(self.consider)
            return
        if tree.all_wait(running.tasks, self.waits):
            if self._steady:
                self._task = background(self._park(), "flowfabric parking")
                self._steady = 0
            else:
                self._steady = 1
                self._look = asyncio.get_running_loop().call_soon(self.consider)
            return
        self._steady = 0
        # Something else goes on, and nobody says when it ends.
        if self._pause > _FIRST_LOOK:
            self._listen()
        self._look_later()

    def _look_later(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(self._pause, self.consider)
            self._pause = min(self._pause * 2, _LAST_LOOK)

    def _listen(self) -> None:
        """Have the ends told here, since they are not waited for in the database; signals are looked for."""
        for gate, wait in list(self.waits.items()):
            if wait.signals is not None:
                self._open(gate)
            elif wait.execution_id is not None and wait.told is None:
                wait.told = self._running.worker.client.outcomes.future(wait.execution_id)
                wait.told.add_done_callback(partial(self._told, gate))

    async def _park(self) -> None:
        running = self._running
        waits = list(self.waits.values())
        first = min((wait.until for wait in waits if wait.until is not None), default=None)
        ends = sorted({wait.execution_id for wait in waits if wait.execution_id is not None})[:MOST]
        ended: set[ExecutionId] = set()
        try:
            because = await running.worker.rest(running, waits)
            if because == "ended":
                ended = set(await running.worker.engine.read_outcomes(ends))
        except Exception:
            log.exception("execution %s could not be parked", running.claimed.execution_id)
            because = "trouble"
        finally:
            self._task = None
        if because is None:
            return
        # Nothing to wait for after all: whoever may go on, does.
        if because == "due" and first is not None:
            self.pass_time(first)
        for gate, wait in list(self.waits.items()):
            if (
                wait.execution_id in ended
                or (because == "signal" and wait.signals is not None)
                or (wait.until is not None and self.is_over(wait.until))
                or (wait.told is not None and wait.told.done())
            ):
                self._open(gate)
        self._look_later()
