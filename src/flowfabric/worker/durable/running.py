"""One execution while its handler runs here: its lease, its recorded steps, and how it is stopped.

The durable operations of a handler are in the other files: `steps.py`, `waits.py`, `children.py`. When everything the
handler waits for needs no worker, the execution is parked (`parking.py`): the lease is given back, the handler is
stopped, and later it runs again from the top; finished steps return their stored result. Parking never raises inside
the tasks of an async handler: their futures just stay pending until the handler as a whole is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from flowfabric.errors import ExecutionNotActive, FlowFabricError, LeaseLost, StepsChanged
from flowfabric.values.attempt import Claimed
from flowfabric.values.lease import Handle, HandleKind
from flowfabric.values.step import NewStep
from flowfabric.worker.durable import children, in_thread, steps, waits
from flowfabric.worker.durable.memory import Memory
from flowfabric.worker.durable.parking import Gate, Parking
from flowfabric.worker.runners.threads import Interruptible

if TYPE_CHECKING:
    from flowfabric.app.task import Task
    from flowfabric.client.client import AsyncClient
    from flowfabric.client.connector import Connector
    from flowfabric.worker.worker import Worker

log = logging.getLogger("flowfabric.task")
_REFUSALS = 3  # calls of a stopped handler that are refused immediately
_MAX_WAIT = 1.0


class StepHook(Protocol):
    """Called before and after a step is recorded; for submissions and waits only afterwards."""

    async def before(self, running: Running, name: str, use: int) -> None: ...
    async def after(self, running: Running, name: str, use: int) -> None: ...


class Running:
    """One held execution. Lives on the worker's loop; `in_thread` is for the threads of synchronous handlers."""

    __slots__ = (
        "_lag",
        "_log",
        "_memory_loading",
        "_parking",
        "_refused",
        "asyncio_task",
        "call",
        "claimed",
        "claimed_at",
        "handle",
        "is_lost",
        "is_parked",
        "is_stopping",
        "loaded_memory",
        "renewed_at",
        "stop_reason",
        "task",
        "tasks",
        "unwound_at",
        "worker",
    )

    def __init__(self, worker: Worker, claimed: Claimed, task: Task[Any, Any], claimed_at: float) -> None:
        self.worker = worker
        self.claimed = claimed
        self.handle: Handle = claimed.handle
        self.task = task
        self.claimed_at = claimed_at  # time.monotonic() when the claim was sent
        self.renewed_at = claimed_at
        self.asyncio_task: asyncio.Task[Any] | None = None
        self.tasks: set[asyncio.Task[Any]] = set()
        self.call: Interruptible | None = None  # of a synchronous handler
        self.is_lost = False
        self.is_stopping = False
        self.is_parked = False
        self.stop_reason = ""
        self._parking: Parking | None = None
        # The gate at which a synchronous handler waits, until it has unwound.
        self.unwound_at: Gate | None = None
        self._lag = time.monotonic() - claimed_at
        self.loaded_memory: Memory | None = None
        self._memory_loading: asyncio.Future[None] | None = None
        self._refused = 0
        self._log: logging.LoggerAdapter[logging.Logger] | None = None

    @property
    def parking(self) -> Parking:
        """The gates that the handler waits for. Created when it first waits: most never do."""
        if self._parking is None:
            self._parking = Parking(self)
        return self._parking

    # For the context

    @property
    def is_cancelled(self) -> bool:
        return self.is_lost or self.is_stopping

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        if self._log is None:
            self._log = logging.LoggerAdapter(
                log,
                {
                    "execution_id": str(self.claimed.execution_id),
                    "attempt": self.handle.attempt_index,
                    "kind": self.claimed.execution_kind,
                    "lane": self.handle.lane_id,
                },
            )
        return self._log

    def database_now(self) -> datetime:
        """Estimate the database's clock, never ahead of it: its time at the claim plus the time since."""
        at_claim = self.claimed.lease_expires_at - self.handle.lease_ttl
        return at_claim + timedelta(seconds=time.monotonic() - self.claimed_at - self._lag)

    # Memory

    @property
    def is_first(self) -> bool:
        """Whether this is the first run, so there are no recorded steps."""
        claimed = self.claimed
        return self.handle.kind is HandleKind.FRESH and claimed.retry_count == 0 == claimed.replay_count

    async def memory(self) -> Memory:
        if self.loaded_memory is None:
            if self.is_first:
                self.loaded_memory = Memory()
                return self.loaded_memory
            if self._memory_loading is None or self._memory_loading.done():
                self._memory_loading = asyncio.ensure_future(self._load())
            await asyncio.shield(self._memory_loading)
        assert self.loaded_memory is not None
        return self.loaded_memory

    async def _load(self) -> None:
        claimed = self.claimed
        steps = await self.worker.reports.load_steps(claimed.execution_id)
        self.loaded_memory = Memory(steps, claimed.retry_count + claimed.replay_count)

    async def check(self) -> None:
        """Refuse calls of a handler that was asked to stop."""
        if not self.is_cancelled:
            return
        if wait := self.refused():
            await asyncio.sleep(wait)
        raise asyncio.CancelledError(self.stop_reason)

    def refused(self) -> float:
        """Count a refusal; returns for how many seconds the handler must wait for it.

        A handler that ignores the first refusals and keeps calling must not block the loop.
        """
        self._refused += 1
        return min(0.001 * 2 ** min(self._refused, 20), _MAX_WAIT) if self._refused > _REFUSALS else 0

    async def record(self, step: NewStep) -> datetime | None:
        """Record a step; concurrent executions share calls."""
        await self.check()
        hook = self.worker.step_hook
        if hook is not None:
            await hook.before(self, step.name, step.n)
        answer = await self.worker.reports.record(self.handle, step)
        if isinstance(answer, FlowFabricError):
            if isinstance(answer, LeaseLost | ExecutionNotActive):
                self.worker.handlers.lost(self, answer)
            raise answer
        if hook is not None:
            await hook.after(self, step.name, step.n)
        return answer

    async def progress(self, percent: int | None, message: str | None) -> None:
        await self.check()
        try:
            await self.worker.engine.progress(self.handle, percent=percent, message=message)
        except (LeaseLost, ExecutionNotActive) as error:
            self.worker.handlers.lost(self, error)
            raise

    async def heartbeat(self) -> None:
        await self.check()
        asked = time.monotonic()
        try:
            await self.worker.engine.renew(self.handle)
        except (LeaseLost, ExecutionNotActive) as error:
            self.worker.handlers.lost(self, error)
            raise
        self.renewed_at = asked

    @property
    def client(self) -> AsyncClient:
        """The client for the handler's submissions."""
        return self.worker.client

    @property
    def app(self) -> Connector:
        """The app that its flows are submitted to."""
        return self.worker.app

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The worker's event loop."""
        return self.worker.loop

    # Durable operations of the handler, by chapter

    step = steps.step
    now = steps.now
    sleep = waits.sleep
    waitpoint = waits.waitpoint
    wait_for = waits.wait_for
    submit_durably = children.submit_durably
    flow_seed = children.flow_seed
    outcome_of = children.outcome_of
    end_of_flow = children.end_of_flow
    in_thread = in_thread.in_thread

    # The end

    def stop(self, reason: str) -> None:
        """Stop the handler: its tasks are cancelled, a synchronous one unwinds at its next line."""
        self.is_stopping = True
        self.stop_reason = reason
        for task in list(self.tasks):
            task.cancel(reason)
        self.interrupt_thread()

    def interrupt_thread(self) -> None:
        """Raise `Interrupted` in the handler's thread, if it runs in one."""
        if self.call is not None:
            self.call.interrupt()

    async def forget(self) -> None:
        """Restart the handler: the recorded steps are read again."""
        self.unwound_at = None
        self._refused = 0
        await self._load()

    async def left_out(self) -> list[tuple[str, int]]:
        """Return the steps that an earlier run recorded and this one has not reached, by name and use."""
        return (await self.memory()).not_reached() if self.task.steps == "strict" else []

    async def steps_changed(self) -> StepsChanged | None:
        """Return the error for a handler that ended without steps it recorded before."""
        gone = [name for name, use in await self.left_out() if use == 0]
        if not gone:
            return None
        return StepsChanged(
            f"an earlier run recorded {', '.join(map(repr, gone))} and this one ended without:"
            " the code changed while the execution was unfinished",
            execution_id=self.claimed.execution_id,
        )
