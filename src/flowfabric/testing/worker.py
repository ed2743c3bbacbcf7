"""A worker that can crash like a killed process, re-run handlers at every step, and report when it is idle.

Everything else is the real worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

from flowfabric.app.app import App
from flowfabric.client import current
from flowfabric.engine import Engine
from flowfabric.errors import ExecutionNotActive, FlowFabricError, LeaseLost, Reject, StepsChanged
from flowfabric.middleware import Middleware
from flowfabric.middleware.base import Running as Attempt
from flowfabric.testing.engines import Engines
from flowfabric.testing.errors import Nondeterministic
from flowfabric.testing.faults import End, Faults
from flowfabric.values.attempt import Claimed
from flowfabric.values.ids import ExecutionId
from flowfabric.values.lease import Handle
from flowfabric.worker.claims import Claims
from flowfabric.worker.durable import task_tree
from flowfabric.worker.durable.running import Running
from flowfabric.worker.handlers import Handlers
from flowfabric.worker.worker import Worker

log = logging.getLogger("flowfabric.testing")
_POLL = timedelta(milliseconds=10)
_POLL_SECONDS = 0.002  # between two checks of a condition
_CRASH_GRACE = 2.0  # seconds that handlers get to notice that they were cut off
_SETTLE = 1.0  # seconds that the tasks of a handler get to wait or end before it is run again


class _KitClaims(Claims):
    """Counts, so that the kit knows when there is nothing to do."""

    async def claim(self, limit: int) -> list[Claimed]:
        worker = self._worker
        assert isinstance(worker, KitWorker)
        worker.asked += 1
        number = worker.asked
        found = await super().claim(limit)
        if found:
            worker.begun += len(found)
        else:
            worker.found_nothing = number
        return found


class _KitHandlers(Handlers):
    """Begins nothing once the worker is dead."""

    def begin(self, claimed: Sequence[Claimed], asked: float) -> None:
        worker = self._worker
        assert isinstance(worker, KitWorker)
        if worker.dead.is_set():
            worker.left_behind += [one.handle for one in claimed]  # claimed while it crashed
        else:
            super().begin(claimed, asked)


class KitWorker(Worker):
    """A worker of the kit, which runs the duties itself."""

    _claims_class = _KitClaims
    _handlers_class = _KitHandlers

    def __init__(
        self,
        app: App,
        faults: Faults,
        engines: Engines,
        *,
        lanes: Collection[str],
        capabilities: Collection[str],
    ) -> None:
        super().__init__(app, lanes=sorted(lanes), capabilities=capabilities, poll=_POLL, duties=False, connections=2)
        self.dead = asyncio.Event()
        self.left_behind: list[Handle] = []  # held when it crashed
        self.begun = 0
        self.asked = 0
        self.found_nothing = 0  # the number of the last claim that did
        self._faults = faults
        self._engines = engines
        self._rerun_at: dict[Running, set[asyncio.Future[None]]] = {}
        self.step_hook = self
        if faults.replays:
            self.handlers.hooks = [*self.handlers.hooks, _RunTwice(self)]

    async def _open_engine(self) -> Engine:
        return await self._engines.take(self.app, super()._open_engine)

    async def _close_engine(self) -> None:
        if self.dead.is_set():
            await self._engines.close(self.engine)
        else:
            self._engines.give(self.app, self.engine)

    # Idleness

    async def settled(self) -> None:
        """Wait until nothing runs, everything is reported and a later claim found nothing; or until it crashes."""
        asked: int | None = None
        while not self.dead.is_set():
            if self._running:
                asked = None
            elif asked is None:
                await self.reports.flushed()
                asked = self.asked
                if self.engine.listener is not None:
                    self.engine.listener.wake("work")  # claim now
            elif self.found_nothing > asked:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def clock_moved(self, by: timedelta) -> None:
        """Apply a move of the database's clock: handlers see the new time, and sleeps that are due end."""
        self.registration.clock_moved()
        for one in list(self._running):
            one.claimed_at -= by.total_seconds()
            now = one.database_now()
            for opened, gate in list(one.parking.gates.items()):
                # While it is being parked the database decides.
                is_over = gate.until is not None and gate.until <= now
                if is_over and not one.parking.is_under_way and not opened.done():
                    opened.set_result(None)

    # Steps

    async def before(self, running: Running, name: str, use: int) -> None:
        """A step is about to be recorded."""
        if running.handle.lease_id not in self.held:
            return
        point = self._faults.point(running.claimed.execution_id, running.task.name, name, use)
        if self._faults.strikes("before", point):
            await self._die(f"before {point}")
        self._check_second_run(running, name, use)

    async def after(self, running: Running, name: str, use: int) -> None:
        """A step, a submission or a wait was recorded."""
        if running.handle.lease_id not in self.held:
            return
        self._check_second_run(running, name, use)
        point = self._faults.point(running.claimed.execution_id, running.task.name, name, use)
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
        self.registration.is_abandoned = True
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
            self.handlers.kill_processes()
        await super().close()

    # Forced replay

    async def run_again(self, running: Running) -> None:
        """Stop the handler here and let it run again from the top. Never returns: the handler is cancelled."""
        if running not in self._rerun_at:
            self._rerun_at[running] = set()
            current.background(self._release_when_all_wait(running), "flowfabric forced replay")
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rerun_at[running].add(gate)
        await gate

    async def _release_when_all_wait(self, running: Running) -> None:
        until = time.monotonic() + _SETTLE
        gates = self._rerun_at[running]
        # Let concurrent steps finish first: a function that is cut off in the middle would run again.
        while running.task.signature.is_async and time.monotonic() < until:
            if task_tree.all_wait(running.tasks, {*gates, *running.parking.gates, *running.order.waiting}):
                break
            await asyncio.sleep(_POLL_SECONDS)
        del self._rerun_at[running]
        if running.is_cancelled or running.is_parked:
            return
        try:
            await self.engine.release(running.handle)
        except (LeaseLost, ExecutionNotActive) as error:
            self.handlers.lost(running, error)
            return
        except FlowFabricError as error:
            log.warning("execution %s could not be re-run: %s", running.claimed.execution_id, error)
        running.is_parked = True
        self.handlers.let_go(running)
        running.stop("it runs again from the top")

    def _run_of(self, running: Running) -> tuple[ExecutionId, int]:
        claimed = running.claimed
        return claimed.execution_id, claimed.retry_count + claimed.replay_count

    def _check_second_run(self, running: Running, name: str, n: int) -> None:
        """A handler that is re-run after its end must not take new steps."""
        if self._run_of(running) in self._faults.first_ends:
            self._refuse(running, f"takes {_use(name, n)}, which it did not take before")

    def code_changed(self, running: Running, problem: str) -> None:
        if self._faults.replays:
            self._faults.trouble.append(Nondeterministic(_rerun(running, f"does otherwise: {problem}")))
        else:
            self._faults.trouble.append(StepsChanged(problem, execution_id=running.claimed.execution_id))

    def _refuse(self, running: Running, what: str) -> None:
        message = _rerun(running, what)
        self._faults.trouble.append(Nondeterministic(message))
        raise Reject(message)

    async def twice(self, running: Running, proceed: Callable[[], Awaitable[Any]]) -> Any:
        """Run the handler to its end, then again with all its steps recorded; it must end the same way."""
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


def _rerun(running: Running, what: str) -> str:
    return f"{running.task.name}, re-run with its recorded steps, {what}"


def _left_out(running: Running) -> list[tuple[str, int]]:
    """The recorded steps that the handler did not reach, by name and use."""
    memory = running.loaded_memory
    return [] if memory is None else [(name, use) for _, name, use in memory.missing]


def _use(name: str, n: int) -> str:
    return f"step {name!r}" + (f" (use {n})" if n else "")
