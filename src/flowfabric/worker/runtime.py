"""What runs in a worker: what is claimed becomes handlers, and what handlers do becomes reports.

The life of a worker around it, and what users may call, is `worker.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from flowfabric.app.app import App
from flowfabric.app.task import Task
from flowfabric.client import current, passing
from flowfabric.client.client import AsyncClient
from flowfabric.contexts import Context, SyncContext
from flowfabric.contracts.codecs import Codecs
from flowfabric.engine import Engine
from flowfabric.errors import ExecutionNotActive, FlowFabricError, Interrupted, InvalidInput, LeaseLost, StateError
from flowfabric.middleware import chain_execute, overriding
from flowfabric.values.attempt import Claimed, Failure
from flowfabric.values.lease import Handle
from flowfabric.values.step import NewStep
from flowfabric.values.wait import AlreadySatisfied
from flowfabric.worker import tree
from flowfabric.worker.claims import Shares
from flowfabric.worker.failures import BadResult, failure_of
from flowfabric.worker.parking import MOST, Wait
from flowfabric.worker.processes import ProcessPool
from flowfabric.worker.reports import Reports
from flowfabric.worker.running import HANDLER_ENDED, Running
from flowfabric.worker.threads import Interruptible, Threads

log = logging.getLogger("flowfabric.worker")
LAST_CALLS = 5.0  # seconds for giving back and reporting what the grace left over


class Runtime:
    """The executions that a worker holds, and what it does with them. The base of `Worker`; not for users."""

    engine: Engine
    client: AsyncClient
    reports: Reports
    loop: asyncio.AbstractEventLoop
    capabilities: tuple[str, ...]
    worker_id: str
    instance_id: str
    lease_ttl: timedelta
    grace: float  # seconds

    def __init__(
        self,
        app: App,
        tasks: Mapping[str, Task[Any, Any]],
        *,
        lanes: Mapping[str, int],
        concurrency: int,
        processes: int,
    ) -> None:
        self.app = app
        self.codecs: Codecs = app.codecs
        self.tasks = tasks
        self.lanes = lanes
        self.concurrency = concurrency
        self.held: dict[UUID, Running] = {}  # by lease
        self.step_hook: Callable[[Running, str, int], Coroutine[Any, Any, None]] | None = None
        self.thread_id = 0
        self.threads = Threads(concurrency)
        self.shared: dict[type, Any] = {}  # what the app provides, made when the worker starts
        self.slot_free = asyncio.Event()
        self.stopping = asyncio.Event()
        self._process_count = processes
        self._processes: ProcessPool | None = None
        self._execute_hooks = overriding(app.middleware, "execute")
        self._running: set[Running] = set()
        self._shares = Shares(lanes)
        self._kinds = sorted(tasks)
        self._ends_at: float | None = None  # time.monotonic() when the grace is over

    # Claiming

    async def claim(self, limit: int) -> list[Claimed]:
        """Take up to so many executions."""
        if len(self.lanes) == 1:
            return await self.engine.claim_many(
                next(iter(self.lanes)),
                limit=limit,
                worker_id=self.worker_id,
                worker_instance_id=self.instance_id,
                capabilities=self.capabilities,
                kinds=self._kinds,
                lease_ttl=self.lease_ttl,
            )
        return await self.engine.claim_lanes(
            self._shares.of(limit),
            limit=limit,
            worker_id=self.worker_id,
            worker_instance_id=self.instance_id,
            capabilities=self.capabilities,
            kinds=self._kinds,
            lease_ttl=self.lease_ttl,
        )

    @property
    def free_slots(self) -> int:
        """How many more may be claimed; none while the database does not take the results."""
        if self.reports.pending >= max(1000, 2 * self.concurrency):
            return 0
        return self.concurrency - len(self._running)

    # Running

    def begin(self, claimed: Sequence[Claimed], asked: float) -> None:
        """Run what was claimed. `asked` is when, by `time.monotonic()`."""
        for one in claimed:
            running = Running(self, one, self.tasks[one.execution_kind], asked)
            self.held[one.handle.lease_id] = running
            if self.stopping.is_set():
                running.is_stopping = True  # to be given back
                continue
            self._running.add(running)
            task: asyncio.Task[None] = asyncio.Task(self._execute(running), loop=self.loop)
            running.asyncio_task = task
            running.tasks.add(task)
            task.add_done_callback(partial(self._ended, running))

    def _ended(self, running: Running, task: asyncio.Task[None]) -> None:
        self._running.discard(running)
        running.asyncio_task = None  # with it the cycle of references goes, and the collector has nothing to do
        running.tasks.discard(task)
        self.slot_free.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("execution %s: the runtime failed", running.claimed.execution_id, exc_info=error)
            reason = f"the worker failed: {type(error).__name__}: {error}"
            self.reports.fail(running, Failure(authority=running.handle, reason=reason, category="worker_failed"))

    async def _execute(self, running: Running) -> None:
        current.running.set(running)
        tree.owner.set(running.tasks)
        task, claimed = running.task, running.claimed
        signature = task.signature
        try:
            data = self.codecs.open(claimed.input_payload, claimed.payload_encoding)
            if claimed.inputs is not None:
                data = passing.fill(data, claimed.inputs, self.codecs)
            kwargs = signature.decode(data)
            if signature.data:
                kwargs.update({name: self.shared[cls] for name, cls in signature.data.items()})
            if self._execute_hooks:
                context: Any = Context(running) if signature.is_async else SyncContext(running)
                value = await chain_execute(self._execute_hooks, context, partial(self._call, running, task, kwargs))()
            elif signature.is_async:
                if signature.context_param is not None:
                    kwargs[signature.context_param] = Context(running)
                value = await task.function(**kwargs)
            else:
                value = await self._call(running, task, kwargs)
            if not running.is_first and not running.is_cancelled and (changed := await running.steps_changed()):
                raise changed
            result, encoding = self._sealed(task, value)
        except BaseException as error:
            await self._unsuccessful(running, error)
        else:
            if running.is_cancelled or running.is_parked:
                self._discard(running)
            else:
                self.reports.complete(running, result, encoding)
        if len(running.tasks) > 1:
            # What the handler left behind has nobody to report to.
            this = asyncio.current_task()
            for other in list(running.tasks):
                if other is not this:
                    other.cancel(HANDLER_ENDED)

    def _sealed(self, task: Task[Any, Any], value: Any) -> tuple[bytes | None, str | None]:
        """A result as it is stored."""
        try:
            result = task.signature.result.encode(value)
        except InvalidInput as error:
            raise BadResult(str(error)) from error
        return (None, None) if result is None else self.codecs.seal(result)

    async def _call(self, running: Running, task: Task[Any, Any], kwargs: dict[str, Any]) -> Any:
        parameter = task.signature.context_param
        if task.signature.is_async:
            if parameter is not None:
                kwargs[parameter] = Context(running)
            return await task.function(**kwargs)
        if task.pool == "process":
            return await self._pool().run(task.function.__module__, task.function.__qualname__, kwargs)
        if parameter is not None:
            kwargs[parameter] = SyncContext(running)
        while True:
            try:
                running.call = Interruptible()
                value = await self.threads.run(running.call, task.function, kwargs)
            except BaseException:
                if running.wants_park is None or running.is_cancelled:
                    raise
                # Whatever became of it on the way out: it waits, and will be run again.
            if running.wants_park is None:
                return value
            wait: Wait = running.wants_park
            because = await self.rest(running, [wait])
            if because is None:
                raise Interrupted("parked")
            # Nothing to wait for after all: from the top, with what is remembered.
            if because == "due" and wait.until is not None:
                running.parking.pass_time(wait.until)
            await running.forget()

    def _pool(self) -> ProcessPool:
        if self._processes is None:
            self._processes = ProcessPool(self._process_count)
        return self._processes

    async def _close_processes(self) -> None:
        if self._processes is not None:
            await self._processes.close()
            self._processes = None

    def kill_processes(self) -> None:
        """End the processes of handlers at once. May be called by any thread."""
        if self._processes is not None:
            self._processes.kill()

    async def _unsuccessful(self, running: Running, error: BaseException) -> None:
        """What an exception that left the handler means."""
        if running.is_parked:
            return
        while not running.is_cancelled:
            try:
                failure = await failure_of(self.engine, running, error)
            except Exception as trouble:
                if isinstance(trouble, FlowFabricError) and trouble.retryable:
                    await asyncio.sleep(0.5)
                    continue
                log.exception("execution %s: its failure could not be described", running.claimed.execution_id)
                failure = Failure(authority=running.handle, reason=f"{type(error).__name__} ({trouble})")
            self.reports.fail(running, failure)
            return
        self._discard(running)

    def _discard(self, running: Running) -> None:
        """The handler ended, but its execution is not ours any more, or is about to be given back."""
        if running.is_lost or not running.is_stopping:
            self.let_go(running)

    def let_go(self, running: Running) -> bool:
        """The lease is not ours any more; False when that was known."""
        return self.held.pop(running.handle.lease_id, None) is not None

    def lost(self, running: Running, error: FlowFabricError) -> None:
        """The lease is gone: stop the handler; whatever it writes from now on is refused."""
        if not self.let_go(running):
            return
        running.is_lost = True
        if running.asyncio_task is None:
            return  # the handler has ended; what it reports is answered by itself
        log.warning("execution %s: %s; its handler is stopped", running.claimed.execution_id, error)
        running.stop(str(error))

    def must_end(self) -> None:
        """The grace begins. May be called by any thread, before `stop`."""
        if self._ends_at is None:
            self._ends_at = time.monotonic() + self.grace

    def is_over(self, running: Running) -> bool:
        """Whether a handler may not run any longer. May be called by any thread."""
        return running.is_cancelled or (self._ends_at is not None and time.monotonic() > self._ends_at)

    async def rest(self, running: Running, waits: Sequence[Wait]) -> str | None:
        """Give the lease back until one of the waits is over; else which is: `ended`, `due` or `signal`."""
        while not running.is_cancelled:
            try:
                because = await self._rest(running, waits)
            except (LeaseLost, ExecutionNotActive) as error:
                self.lost(running, error)
                break
            except FlowFabricError as error:
                if not error.retryable:
                    raise
                log.warning("execution %s could not be parked: %s", running.claimed.execution_id, error)
                await asyncio.sleep(0.5)
                continue
            if because is not None:
                return because
            running.is_parked = True
            self.let_go(running)
            running.stop("it waits without a worker")
            break
        return None

    async def _rest(self, running: Running, waits: Sequence[Wait]) -> str | None:
        """Once: suspend on the signals of one wait alone, park for anything else."""
        waits = [wait for wait in waits if wait.is_for_something]
        if not waits:
            raise InvalidInput("all it waits for was given up", field="wait_for")
        first = min((wait.until for wait in waits if wait.until is not None), default=None)
        alone = waits[0].signals if len(waits) == 1 else None
        if alone is None:
            ends = sorted({wait.execution_id for wait in waits if wait.execution_id is not None})[:MOST]
            signals = {
                waitpoint: seen
                for wait in waits
                if wait.signals is not None
                for waitpoint, seen in zip(wait.signals.waitpoints, wait.signals.seen, strict=True)
            }
            parked = await self.engine.park(running.handle, until=first, ends_of=ends, signals_on=signals)
            return None if parked.parked else parked.because
        if first is not None and running.parking.is_over(first):
            return "due"
        deadline = alone.deadline
        if deadline is not None:
            deadline = max(deadline, running.database_now())  # one long over is refused; this one is done at once
        try:
            answer = await self.engine.suspend_on(
                running.handle,
                alone.waitpoints,
                alone.request.condition,
                reason_code=alone.request.reason,
                timeout_at=deadline,
                timeout_behavior=alone.request.behavior,
            )
        except StateError as error:
            if error.kind == "already_suspended":  # by a call whose answer was lost
                return None
            if error.kind == "waitpoint_not_pending":
                return "signal"
            raise
        return "signal" if isinstance(answer, AlreadySatisfied) else None

    async def record(self, handle: Handle, step: NewStep) -> datetime | FlowFabricError | None:
        """Remember a step, together with those of other executions."""
        return await self.reports.record(handle, step)

    def of_task(self, task: asyncio.Task[Any] | None) -> Running | None:
        """Whose handler an asyncio task belongs to."""
        if task is None:
            return None
        return next((one for one in list(self._running) if task in one.tasks), None)

    async def _give_back(self) -> None:
        """Release what was stopped, for others to go on with at once."""
        stopped = [one for one in self.held.values() if one.is_stopping and not one.is_lost]
        if not stopped:
            return
        _, late = await asyncio.wait([asyncio.ensure_future(self._release(one)) for one in stopped], timeout=LAST_CALLS)
        for task in late:
            task.cancel()
        if late:
            log.warning("%d executions could not be given back; their leases will lapse", len(late))

    async def _release(self, one: Running) -> None:
        self.let_go(one)
        try:
            await self.engine.release(one.handle)
        except FlowFabricError as error:
            log.warning("execution %s could not be given back: %s", one.claimed.execution_id, error)
