"""A dry run: handlers of waiting executions against what they recorded.

The handler runs from the top and gets its results from the record. The first request that is not recorded ends the
run, before anything is called, recorded, leased or submitted. Code between the requests does run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec

from flowfabric.client import current
from flowfabric.client.client import AsyncClient
from flowfabric.errors import NotFound, Unavailable
from flowfabric.values.attempt import Failure
from flowfabric.values.budget import OnLost, Reserved
from flowfabric.values.execution import Outcome
from flowfabric.values.flow import FlowOutcome
from flowfabric.values.history import Fit, Fits, History
from flowfabric.values.ids import ExecutionId, FlowId, ReservationId, mint_uuid
from flowfabric.values.lease import Handle
from flowfabric.values.spending import Used
from flowfabric.values.step import NewStep, Parked, Step, StepKind
from flowfabric.values.stream import FrameKind
from flowfabric.values.wait import BoundWaitpoint, OpenWait, WaitpointToken, WaitResult
from flowfabric.worker.durable import task_tree
from flowfabric.worker.durable.changes import differs, is_compared
from flowfabric.worker.durable.memory import Memory, Request
from flowfabric.worker.durable.order import in_order
from flowfabric.worker.durable.parking import Gate
from flowfabric.worker.durable.running import Running
from flowfabric.worker.durable.steps import in_step
from flowfabric.worker.shared import check_provided, make
from flowfabric.worker.worker import Worker

if TYPE_CHECKING:
    from flowfabric.app.app import App
    from flowfabric.app.task import Task
    from flowfabric.engine import Engine
    from flowfabric.worker.reports import Reports

_PATIENCE = 10.0  # seconds until a handler should have reached something that it waits for
_NO_TOKEN = WaitpointToken(f"dry-run:{'0' * 64}")  # it has the form of a token, so that links can be made of it


async def read_histories(engine: Engine, execution_ids: Sequence[ExecutionId]) -> list[History]:
    """Return what up to 1,000 executions recorded; those that have not started or have ended are left out."""
    steps: dict[ExecutionId, list[Step]] = defaultdict(list)
    for step in await engine.read_steps(execution_ids):
        steps[step.execution_id].append(step)
    started = await engine.read_started(execution_ids)
    count = engine.flow_partitions
    return [
        History(claimed=one.claimed, steps=steps[one.claimed.execution_id], version=one.version, flow_partitions=count)
        for one in started
    ]


class DryRuns:
    """Compares the code of an app with recorded executions, one after the other."""

    def __init__(self, app: App, *, patience: float = _PATIENCE) -> None:
        self._app = app
        self._patience = patience
        self._worker = _DryWorker(app)
        self._life = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as life:
            await self._worker.prepare(life)
            self._life = life.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._life.aclose()

    async def check(self, history: History) -> Fit:
        """Run the handler of one execution up to the first thing that is not recorded."""
        kind = history.claimed.execution_kind
        task = self._app.tasks.get(kind)
        if task is None:
            return _fit(history, "fails", f"the app has no task {kind}")
        if is_left(task, history.version):
            return _fit(history, "left", f"left to workers of version {history.version}")
        if task.pool == "process":
            return _fit(history, "continues")  # it can record nothing
        running = _DryRun(self._worker, history)
        await running.finish(self._patience)
        return _fit(history, running.verdict, running.why)


def is_left(task: Task[Any, Any], version: int | None) -> bool:
    """Whether an execution that began in this version is never given to a worker with this task."""
    return version is not None and version not in task.versions


def _fit(history: History, verdict: Fits, why: str | None = None) -> Fit:
    return Fit(execution_id=history.execution_id, kind=history.claimed.execution_kind, verdict=verdict, why=why)


class _Reached(Gate):
    """Where a branch ends that reached something that is not recorded."""

    __slots__ = ()

    @property
    def can_open(self) -> bool:
        return True


class _DryRun(Running):
    """One handler on its record."""

    __slots__ = ("verdict", "why")

    def __init__(self, worker: _DryWorker, history: History) -> None:
        lease = msgspec.structs.replace(history.claimed.handle, lease_id=mint_uuid(), lease_ttl=timedelta())
        claimed = msgspec.structs.replace(history.claimed, handle=lease)
        task = worker.app.tasks[claimed.execution_kind]
        super().__init__(worker, claimed, task, time.monotonic())
        run = claimed.retry_count + claimed.replay_count
        self.loaded_memory = Memory(history.steps, run, strict=task.steps == "strict")
        self.verdict: Fits = "unknown"
        self.why: str | None = None

    async def finish(self, patience: float) -> None:
        """Run until it waits, ends or is stopped."""
        handlers = self.worker.handlers
        handlers.held[self.handle.lease_id] = self
        task = asyncio.Task(handlers.run(self), loop=self.worker.loop)
        self.asyncio_task = task
        self.tasks.add(task)
        _, late = await asyncio.wait([task], timeout=patience)
        if late:
            self.why = f"the handler did not come to a wait within {patience:g} s"
            self.stop("the dry run ends")
            await asyncio.wait([task], timeout=1.0)
        for left in list(self.tasks):
            left.cancel()
        handlers.held.pop(self.handle.lease_id, None)

    def decide(self, verdict: Fits, why: str | None = None) -> None:
        if self.verdict == "unknown" and self.why is None:
            self.verdict, self.why = verdict, why

    def waits(self) -> None:
        """Every branch reached the end of its record: a run of the same code has asked for all of it by now."""
        memory = self.loaded_memory
        assert memory is not None
        if memory.missing and not self.tasks.has_cancelled:
            self.decide("stops", differs(memory, []))
        else:
            self.decide("continues")

    async def ask(self, name: str, kind: StepKind, was: str | None = None) -> Request:
        request = await super().ask(name, kind, was)
        if is_compared(request, await self.memory()):
            await self.reach()
        return request

    async def reach(self) -> None:
        """End this branch: it reached something that is not recorded."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.calling.discard(task)  # where a worker would call the database
        with self.order.holding():
            while True:
                await self.parking.wait(_Reached())
                await self.check()

    async def record(self, step: NewStep) -> datetime | None:
        return self.database_now() if step.kind == "now" else None

    @in_order
    async def progress(self, percent: int | None, message: str | None) -> None:
        await self.check()

    @in_order
    async def heartbeat(self) -> None:
        await self.check()

    @in_order
    async def emit(self, data: Any, **_: Any) -> None:
        await self.check()

    @in_order
    async def summarize(self, patch: Any, **_: Any) -> None:
        await self.check()

    @in_order
    async def report_usage(self, amounts: Mapping[str, int], budgets: Collection[str] | None, name: str) -> Used:
        await self._use(name)
        return Used(remaining={})

    @in_order
    async def reserve_usage(
        self, amounts: Mapping[str, int], budgets: Collection[str] | None, name: str, on_lost: OnLost
    ) -> Reserved:
        await self._use(name)
        return Reserved(reservation_id=ReservationId(mint_uuid()), state="settled", amounts=dict(amounts))

    async def _use(self, name: str) -> None:
        await self.check()
        if not in_step.get():
            await self.ask(name, "usage")

    def emit_soon(self, line: str, type: str, kind: FrameKind) -> None:  # noqa: A002 - as in the frame
        """Nothing is stored."""

    async def end_of_flow(
        self, flow_id: FlowId, live: Callable[[], Awaitable[list[ExecutionId]]], timeout: timedelta | None = None
    ) -> None:
        await super().end_of_flow(flow_id, self._never, timeout)

    async def outcome_of_flow(
        self,
        flow_id: FlowId,
        live: Callable[[], Awaitable[list[ExecutionId]]],
        read: Callable[[], Awaitable[FlowOutcome | None]],
        timeout: timedelta | None = None,
    ) -> FlowOutcome:
        return await super().outcome_of_flow(flow_id, self._never, self._never_read, timeout)

    async def _never(self) -> list[ExecutionId]:
        await self.reach()
        return []

    async def _never_read(self) -> FlowOutcome | None:
        await self.reach()
        return None

    async def forget(self) -> None:
        raise AssertionError("a dry run is not repeated")


class _DryWorker(Worker):
    """Has handlers, and neither a database nor a thread for leases."""

    def __init__(self, app: App) -> None:
        super().__init__(app, duties=False)
        self.handlers.hooks = []

    async def prepare(self, life: contextlib.AsyncExitStack) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = cast("Engine", _NoEngine(self))
        self.reports = cast("Reports", _NoReports())
        self.client = AsyncClient(self.engine, self.app)
        self.app.adopt(self.client)
        life.callback(self.app.forget, self.client)
        life.callback(task_tree.install(self.loop))
        wanted = check_provided(self.tasks.values(), self.app.provided)
        self.handlers.shared = {cls: await make(life, cls, maker) for cls, maker in wanted.items()}

    def code_changed(self, running: Running, problem: str) -> None:
        """The verdict says it."""

    def run_of(self, handle: Handle) -> _DryRun:
        return cast("_DryRun", self.held[handle.lease_id])


class _NoEngine:
    """Returns what is recorded to a handler that repeats it; everything else is refused."""

    flow_partitions = 256

    def __init__(self, worker: _DryWorker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        running = current.running.get()
        if isinstance(running, _DryRun):
            running.decide("unknown", f"the handler itself reads or writes the database there, with {name}")
        raise Unavailable(name, "this is a dry run, which has no database")

    async def park(self, handle: Handle, **_: Any) -> Parked:
        self._worker.run_of(handle).waits()
        return Parked(handle.execution_id, parked=True)

    async def suspend_on(self, handle: Handle, *_: Any, **__: Any) -> None:
        self._worker.run_of(handle).waits()

    async def stop_changed(self, handle: Handle, *, detail: str, digest: str) -> None:
        self._worker.run_of(handle).decide("stops", detail)

    async def open_wait(self, handle: Handle, name: str, use: int, keys: Sequence[str], *_: Any) -> OpenWait:
        running = self._worker.run_of(handle)
        known = (await running.memory()).known(name, "wait", use)
        # A wait that a replay made start again has waitpoints that are not read here.
        ids = [mint_uuid() for _ in keys] if known is None else known.waitpoint_ids
        bound = tuple(
            BoundWaitpoint(waitpoint_key=key, waitpoint_id=one, waitpoint_token=_NO_TOKEN)
            for key, one in zip(keys, ids, strict=True)
        )
        return OpenWait(use=use, waitpoints=bound, deadline=None if known is None else known.at)

    async def settle_wait(self, handle: Handle, *_: Any, **__: Any) -> WaitResult:
        await self._worker.run_of(handle).reach()
        raise AssertionError("a dry run waits here until it is stopped")

    async def list_flow_members(self, flow_id: FlowId, **_: Any) -> Any:
        raise NotFound("flow", flow_id)  # the handler continues with the nodes that it has built

    async def extend_flow(self, flow_id: FlowId, *_: Any) -> Any:
        return _Known(flow_id)


class _Known:
    existed = True

    def __init__(self, flow_id: FlowId) -> None:
        self.flow_id = flow_id


class _NoReports:
    """Takes the end of a handler as the verdict."""

    async def outcome(self, execution_id: ExecutionId) -> Outcome | None:
        return None  # not recorded: the handler waits

    async def record(self, handle: Handle, step: NewStep) -> None:
        """Nothing is recorded."""

    def complete(self, running: _DryRun, result: bytes | None, encoding: str | None) -> None:
        running.decide("continues")

    def fail(self, running: _DryRun, failure: Failure) -> None:
        verdict: Fits = "stops" if failure.category == "steps_changed" else "fails"
        running.decide(verdict, failure.reason)
