"""A worker that can crash like a killed process, re-run handlers at every step, and report when it is idle.

Everything else is the real worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from flowfabric.app import App
from flowfabric.client import current
from flowfabric.errors import ExecutionNotActive, FlowFabricError, LeaseLost, Reject
from flowfabric.ids import ExecutionId
from flowfabric.middleware import Middleware
from flowfabric.middleware.base import Running as Attempt
from flowfabric.models import Claimed, Handle, NewStep
from flowfabric.testing.errors import Nondeterministic
from flowfabric.testing.faults import End, Faults
from flowfabric.worker import tree
from flowfabric.worker.running import Running
from flowfabric.worker.worker import Worker

log = logging.getLogger("flowfabric.testing")
_POLL = timedelta(milliseconds=10)
_POLL_SECONDS = 0.002  # between two checks of a condition
_CRASH_GRACE = 2.0  # seconds that handlers get to notice that they were cut off
_REST = 1.0  # seconds that a handler gets to come to rest before it is run again


class KitWorker(Worker):
    """A worker of the kit, which runs the duties itself."""

    def __init__(self, app: App, faults: Faults, *, lanes: Collection[str], capabilities: Collection[str]) -> None:
        super().__init__(app, lanes=sorted(lanes), capabilities=capabilities, poll=_POLL, duties=False)
        self.dead = asyncio.Event()
        self.left_behind: list[Handle] = []  # held when it crashed
        self.begun = 0
        self._faults = faults
        self._asked = 0
        self._found_nothing = 0  # number of the last claim that found nothing
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
            self.left_behind += [one.handle for one in claimed]  # claimed while it crashed
        else:
            super().begin(claimed, asked)

    async def settled(self) -> None:
        """Wait until nothing runs, everything is reported and a later claim found nothing; or until it crashes."""
        asked: int | None = None
        while not self.dead.is_set():
            if self._running:
                asked = None
            elif asked is None:
                await self.reports.flushed()
                asked = self._asked
                if self.engine.listener is not None:
                    self.engine.listener.wake("work")  # claim now
            elif self._found_nothing > asked:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def clock_moved(self, by: timedelta) -> None:
        """Apply a move of the database's clock: handlers see the new time, and sleeps that are due end."""
        for one in list(self._running):
            one.claimed_at -= by.total_seconds()
            now = one.database_now()
            for gate, wait in list(one.parking.waits.items()):
                # While it is being parked, the database decides.
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
        """Called after steps, which `record` has already seen, and after submissions, which it has not."""
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

    # Crash

    async def _die(self, where: str) -> None:
        """Stop like a killed process: nothing more reaches the database, and no lease is renewed."""
        log.info("the worker is killed %s", where)
        self.left_behind = [one.handle for one in self.held.values()]
        self.held.clear()
        self.grace = _CRASH_GRACE
        self.engine._database._pool._closing = True  # calls already sent may still arrive
        for one in list(self._running):
            one.stop("the worker was killed")
        self.dead.set()
        await asyncio.Event().wait()  # until the cancellation arrives

    async def close(self) -> None:
        if self.dead.is_set():
            await asyncio.sleep(0)
            self.reports.close()  # they are lost
            self.kill_processes()
        await super().close()

    # Forced replay

    async def run_again(self, running: Running) -> None:
        """Stop the handler here and let it run again from the top. Never returns: the handler is cancelled."""
        if running not in self._resting:
            self._resting[running] = set()
            current.background(self._release_at_rest(running), "flowfabric forced replay")
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resting[running].add(gate)
        await gate

    async def _release_at_rest(self, running: Running) -> None:
        until = time.monotonic() + _REST
        gates = self._resting[running]
        # Let concurrent steps finish first: a function that is cut off in the middle would run again.
        while running.task.signature.is_async and time.monotonic() < until:
            if tree.all_wait(running.tasks, {*gates, *running.parking.waits}):
                break
            await asyncio.sleep(_POLL_SECONDS)
        del self._resting[running]
        if running.is_cancelled or running.is_parked:
            return
        try:
            await self.engine.release(running.handle)
        except (LeaseLost, ExecutionNotActive) as error:
            self.lost(running, error)
            return
        except FlowFabricError as error:
            log.warning("execution %s could not be re-run: %s", running.claimed.execution_id, error)
        running.is_parked = True
        self.let_go(running)
        running.stop("it runs again from the top")

    def _run_of(self, running: Running) -> tuple[ExecutionId, int]:
        claimed = running.claimed
        return claimed.execution_id, claimed.retry_count + claimed.replay_count

    def _check_second_run(self, running: Running, name: str, n: int) -> None:
        """A handler that is re-run after its end must not take new steps."""
        if self._run_of(running) in self._faults.first_ends:
            self._refuse(running, f"takes {_use(name, n)}, which it did not take before")

    def _refuse(self, running: Running, what: str) -> None:
        message = f"{running.task.name}, re-run with its recorded steps, {what}"
        self._faults.trouble.append(Nondeterministic(message))
        raise Reject(message)

    async def twice(self, running: Running, proceed: Callable[[], Awaitable[Any]]) -> Any:
        """Run the handler to its end, then once more with all its steps recorded; it must end the same way."""
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
            self._refuse(running, f"ends without {', '.join(_use(*one) for one in left_out)}, which it took before")
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
    """The innermost middleware: around the handler only."""

    def __init__(self, worker: KitWorker) -> None:
        self._worker = worker

    async def execute(self, task: Attempt, proceed: Callable[[], Awaitable[Any]]) -> Any:
        running = current.running.get()
        assert isinstance(running, Running)
        return await self._worker.twice(running, proceed)


def _left_out(running: Running) -> list[tuple[str, int]]:
    """The recorded steps that the handler did not reach, by name and use."""
    memory = running._memory
    return [] if memory is None or running.task.steps == "lenient" else memory.not_reached()


def _use(name: str, n: int) -> str:
    return f"step {name!r}" + (f" (use {n})" if n else "")
