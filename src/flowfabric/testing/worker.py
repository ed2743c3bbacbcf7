"""A worker that can die as a killed process does, run handlers again at every step, and say when it has nothing to do.

Everything else is the real worker's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from flowfabric.app.app import App
from flowfabric.client import current
from flowfabric.errors import ExecutionNotActive, FlowFabricError, LeaseLost, Reject
from flowfabric.middleware import Middleware
from flowfabric.middleware.base import Running as Attempt
from flowfabric.testing.errors import Nondeterministic
from flowfabric.testing.faults import End, Faults
from flowfabric.values.attempt import Claimed
from flowfabric.values.ids import ExecutionId
from flowfabric.values.lease import Handle
from flowfabric.values.step import NewStep
from flowfabric.worker import tree
from flowfabric.worker.running import Running
from flowfabric.worker.worker import Worker

log = logging.getLogger("flowfabric.testing")
_POLL = timedelta(milliseconds=10)
_LOOK = 0.002  # seconds between two looks at whether something has come about
_LAST_WORDS = 2.0  # seconds that handlers get to notice that they were cut off
_REST = 1.0  # seconds that a handler gets to come to rest before it is run again


class KitWorker(Worker):
    """A worker of the kit's. Duties are left to the kit, which runs them when it wants to."""

    def __init__(self, app: App, faults: Faults, *, lanes: Collection[str], capabilities: Collection[str]) -> None:
        super().__init__(app, lanes=sorted(lanes), capabilities=capabilities, poll=_POLL, duties=False)
        self.dead = asyncio.Event()
        self.left_behind: list[Handle] = []  # what it held when it died
        self.begun = 0
        self._faults = faults
        self._asked = 0
        self._found_nothing = 0  # the number of the last claim that did
        self._noted: set[tuple[UUID, str, int]] = set()
        self._resting: dict[Running, set[asyncio.Future[None]]] = {}
        self.step_hook = self._submitted
        if faults.replays:
            self._execute_hooks = [*self._execute_hooks, _RunTwice(self)]

    # Idleness

    async def claim(self, limit: int) -> list[Claimed]:
        self._asked += 1
        number = self._asked
        found = await super().claim(limit)
        if found:
            self.begun += len(found)
        else:
            self._found_nothing = number
        return found

    def begin(self, claimed: Sequence[Claimed], asked: float) -> None:
        if self.dead.is_set():
            self.left_behind += [one.handle for one in claimed]  # the answer came to nobody
        else:
            super().begin(claimed, asked)

    async def settled(self) -> None:
        """Wait until nothing runs, everything is reported, and a claim after that has found nothing; or until death."""
        asked: int | None = None
        while not self.dead.is_set():
            if self._running:
                asked = None
            elif asked is None:
                await self.reports.flushed()
                asked = self._asked
                if self.engine.listener is not None:
                    self.engine.listener.wake("work")  # look at once
            elif self._found_nothing > asked:
                return
            await asyncio.sleep(_LOOK)

    def clock_moved(self, by: timedelta) -> None:
        """The database's clock was set forward: so is what handlers think it says, and sleeps that are over end."""
        for one in list(self._running):
            one.claimed_at -= by.total_seconds()
            now = one.database_now()
            for gate, wait in list(one.parking.waits.items()):
                # While it is being parked the database decides.
                is_over = wait.until is not None and wait.until <= now
                if is_over and not one.parking.is_under_way and not gate.done():
                    gate.set_result(None)

    # Steps

    async def record(self, handle: Handle, step: NewStep) -> datetime | FlowFabricError | None:
        running = self.held.get(handle.lease_id)
        if running is None:
            return await super().record(handle, step)
        point = self._faults.point(running.claimed.execution_id, running.task.name, step.name, step.n)
        if self._faults.strikes("before", point):
            await self._die(f"before {point}")
        self._check_second_run(running, step.name, step.n)
        answer = await super().record(handle, step)
        if not isinstance(answer, FlowFabricError):
            await self._after(running, step.name, step.n)
        return answer

    async def _submitted(self, running: Running, name: str, n: int) -> None:
        """Called after steps, seen by `record` already, and after submissions, which are not recorded through it."""
        if (running.handle.attempt_id, name, n) not in self._noted:
            self._check_second_run(running, name, n)
            await self._after(running, name, n)

    async def _after(self, running: Running, name: str, n: int) -> None:
        point = self._faults.point(running.claimed.execution_id, running.task.name, name, n)
        self._noted.add((running.handle.attempt_id, name, n))
        self._faults.recorded.append((running.claimed.execution_id, point))
        if self._faults.strikes("after", point):
            await self._die(f"after {point}")
        if self._faults.replays:
            await self.run_again(running)

    # Death

    async def _die(self, where: str) -> None:
        """End as a killed process: from here on nothing reaches the database, and no lease is renewed."""
        log.info("the worker is killed %s", where)
        self.left_behind = [one.handle for one in self.held.values()]
        self.held.clear()
        self.grace = _LAST_WORDS
        self.engine._database._pool._closing = True  # what is under way may still arrive, nothing else is sent
        for one in list(self._running):
            one.stop("the worker was killed")
        self.dead.set()
        await asyncio.Event().wait()  # until the cancellation arrives

    async def close(self) -> None:
        if self.dead.is_set():
            await asyncio.sleep(0)
            self.reports.close()  # nobody takes them any more
            self.kill_processes()
        await super().close()

    # Forced replay

    async def run_again(self, running: Running) -> None:
        """Stop the handler here and let it be run from the top. Returns never: it is cancelled."""
        if running not in self._resting:
            self._resting[running] = set()
            current.background(self._release_at_rest(running), "flowfabric forced replay")
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resting[running].add(gate)
        await gate

    async def _release_at_rest(self, running: Running) -> None:
        until = time.monotonic() + _REST
        gates = self._resting[running]
        # What goes on beside it comes to an end first: a function cut off in the middle would be run again.
        while running.task.signature.is_async and time.monotonic() < until:
            if tree.all_wait(running.tasks, {*gates, *running.parking.waits}):
                break
            await asyncio.sleep(_LOOK)
        del self._resting[running]
        if running.is_cancelled or running.is_parked:
            return
        try:
            await self.engine.release(running.handle)
        except (LeaseLost, ExecutionNotActive) as error:
            self.lost(running, error)
            return
        except FlowFabricError as error:
            log.warning("execution %s could not be run again: %s", running.claimed.execution_id, error)
        running.is_parked = True
        self.let_go(running)
        running.stop("it is run again from the top")

    def _run_of(self, running: Running) -> tuple[ExecutionId, int]:
        claimed = running.claimed
        return claimed.execution_id, claimed.retry_count + claimed.replay_count

    def _check_second_run(self, running: Running, name: str, n: int) -> None:
        """Nothing is new to a handler that is run once more after its end."""
        if self._run_of(running) in self._faults.first_ends:
            self._refuse(running, f"does {_use(name, n)}, which it had not done when it ended before")

    def _refuse(self, running: Running, what: str) -> None:
        message = f"{running.task.name}, run again with what is remembered, {what}"
        self._faults.trouble.append(Nondeterministic(message))
        raise Reject(message)

    async def twice(self, running: Running, proceed: Callable[[], Awaitable[Any]]) -> Any:
        """Run the handler to its end, then once more with all its steps answered from memory; it must end the same."""
        error: Exception | None = None
        value: Any = None
        try:
            value = await proceed()
            end = End(encoded=running.task.signature.result.encode(value))
        except Exception as raised:
            error, end = raised, End(raised=type(raised).__name__)
        if running.is_cancelled or self._faults.trouble:
            if error is not None:
                raise error
            return value
        if error is None and (left_out := _left_out(running)):
            self._refuse(running, f"ends without {', '.join(_use(*one) for one in left_out)}, which it did before")
        key = self._run_of(running)
        first = self._faults.first_ends.get(key)
        if first is None:
            self._faults.first_ends[key] = end
            await self.run_again(running)
        elif not first.is_like(end):
            self._refuse(running, f"{end} where it {first} before")
        if error is not None:
            raise error
        return value


class _RunTwice(Middleware):
    """Innermost: around the handler alone."""

    def __init__(self, worker: KitWorker) -> None:
        self._worker = worker

    async def execute(self, task: Attempt, proceed: Callable[[], Awaitable[Any]]) -> Any:
        running = current.running.get()
        assert isinstance(running, Running)
        return await self._worker.twice(running, proceed)


def _left_out(running: Running) -> list[tuple[str, int]]:
    """The steps that are remembered and were not asked for, by name and use."""
    memory = running._memory
    return [] if memory is None or running.task.steps == "lenient" else memory.not_reached()


def _use(name: str, n: int) -> str:
    return f"step {name!r}" + (f" (use {n})" if n else "")
