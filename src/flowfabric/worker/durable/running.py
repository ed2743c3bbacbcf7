"""One execution while its handler runs here: its lease, its recorded steps, and how it is stopped.

The rest is in the other files: `requests.py` compares what the handler asks for with the record, `records.py` adds to
the record, and `steps.py`, `waits.py` and `children.py` have the durable operations. When everything the handler waits
for needs no worker, the execution is parked (`parking.py`): the lease is given back, the handler is stopped, and later
it runs again from the top; finished steps return their stored result. Parking never raises inside the tasks of an async
handler: their futures just stay pending until the handler as a whole is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from flowfabric.app.context import not_begun
from flowfabric.errors import BudgetExceeded, ExecutionNotActive, LeaseLost, StepsChanged
from flowfabric.values.attempt import Claimed
from flowfabric.values.lease import Handle, HandleKind
from flowfabric.values.step import NewStep
from flowfabric.worker import told
from flowfabric.worker.durable import children, in_thread, mapping, records, requests, spending, steps, waits
from flowfabric.worker.durable import emitting as frames
from flowfabric.worker.durable.changes import Changes
from flowfabric.worker.durable.emitting import Emitting
from flowfabric.worker.durable.memory import Memory, describe
from flowfabric.worker.durable.order import Order, in_order
from flowfabric.worker.durable.parking import Gate, Parking
from flowfabric.worker.durable.spending import Needs
from flowfabric.worker.durable.task_tree import HandlerTasks
from flowfabric.worker.runners.threads import Interruptible

if TYPE_CHECKING:
    from flowfabric.app.task import Task
    from flowfabric.client.client import AsyncClient
    from flowfabric.client.connector import Connector
    from flowfabric.worker.worker import Worker

log = logging.getLogger("flowfabric.task")
_REFUSALS = 3  # calls of a stopped handler that are refused immediately
_MAX_WAIT = 1.0


class NotAwaited(Exception):
    """The handler called a durable operation without `await`, so that nothing happened."""


def _shown(call: Coroutine[Any, Any, Any]) -> str:
    """Return a call of the context as the handler wrote it."""
    made: Any = call
    given = {} if made.cr_frame is None else made.cr_frame.f_locals
    name = next((given[word] for word in ("name", "what", "key") if isinstance(given.get(word), str)), None)
    method = "step_with(...)" if made.__name__ == "__call__" else made.__name__
    return f"ctx.{method}({'...' if name is None else repr(name)})"


Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])


def noticed(method: Method) -> Method:
    """Notice when the handler itself cancels the operation, with `asyncio.timeout` for example."""

    @functools.wraps(method)
    async def operate(running: Running, *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(running, *args, **kwargs)
        except asyncio.CancelledError as error:
            if not running.is_cancelled and not running.is_parked and error.args != (waits.HANDLER_ENDED,):
                running.tasks.has_cancelled = True
            raise

    return cast("Method", operate)


class StepHook(Protocol):
    """Called before and after a step is recorded; for submissions and waits only afterwards."""

    async def before(self, running: Running, name: str, use: int) -> None: ...
    async def after(self, running: Running, name: str, use: int) -> None: ...


class Running:
    """One held execution. Lives on the worker's loop; `in_thread` is for the threads of synchronous handlers."""

    __slots__ = (
        "_changes",
        "_emitting",
        "_lag",
        "_log",
        "_memory_loading",
        "_order",
        "_parking",
        "_refused",
        "asyncio_task",
        "breach",
        "call",
        "calls",
        "claimed",
        "claimed_at",
        "handle",
        "in_threads",
        "is_doubtful",
        "is_lost",
        "is_parked",
        "is_stopping",
        "loaded_memory",
        "needs",
        "newly_read",
        "renewed_at",
        "steps",
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
        self.tasks = HandlerTasks()
        self.calls: list[Coroutine[Any, Any, Any]] = []
        self.call: Interruptible | None = None  # of a synchronous handler
        self.is_doubtful = False  # a notification said that leases were lost, and this one was not checked yet
        self.is_lost = False
        self.is_stopping = False
        self.is_parked = False
        self.stop_reason = ""
        self._parking: Parking | None = None
        self._changes: Changes | None = None
        # The gate at which a synchronous handler waits, until it has unwound.
        self.unwound_at: Gate | None = None
        self.needs: Needs | None = None  # of a synchronous handler that pauses for a budget
        self.breach: BudgetExceeded | None = None  # of a task that fails for it, even if the handler catches it
        self.steps = 0  # that have begun and are not recorded yet
        self._lag = time.monotonic() - claimed_at
        self.loaded_memory: Memory | None = None
        self._memory_loading: asyncio.Future[None] | None = None
        self._order: Order | None = None
        self.in_threads = 0  # calls for which threads of a synchronous handler wait
        self._refused = 0
        self._emitting: Emitting | None = None
        # Sleeps and waits that have ended since the last record, by kind, name and use.
        self.newly_read: dict[tuple[str, str, int], NewStep] = {}
        self._log: logging.LoggerAdapter[logging.Logger] | None = None

    @property
    def parking(self) -> Parking:
        """The gates that the handler waits for. Created when it first waits: most never do."""
        if self._parking is None:
            self._parking = Parking(self)
        return self._parking

    @property
    def emitting(self) -> Emitting:
        """The frames that the handler emits. Created with the first: most emit none."""
        if self._emitting is None:
            self._emitting = Emitting(self)
        return self._emitting

    @property
    def has_emitted(self) -> bool:
        return self._emitting is not None

    async def flushed(self) -> None:
        """Wait until everything the handler emitted is stored; raises the error of a frame that was refused."""
        await self.emitting.flushed()

    async def settled(self) -> None:
        """Wait until everything the handler emitted is stored or refused."""
        if self._emitting is not None:
            await self._emitting.settled()

    @property
    def changes(self) -> Changes:
        """The requests that are held because something recorded is missing. Created for the first one."""
        if self._changes is None:
            self._changes = Changes(self)
        return self._changes

    @property
    def was_changed(self) -> StepsChanged | None:
        """Why the run was stopped, if its code changed."""
        return None if self._changes is None else self._changes.found

    @property
    def order(self) -> Order:
        """The turns of the branches. Created when there is more than one: most handlers have one."""
        if self._order is None:
            self._order = Order(self)
        return self._order

    @property
    def has_order(self) -> bool:
        return self._order is not None

    @property
    def is_in_own_thread(self) -> bool:
        """Whether this is the thread of the synchronous handler, and not one that it has started."""
        return self.call is None or self.call.is_here

    @property
    def is_in_map(self) -> bool:
        """Whether the thread of a synchronous handler waits for a call of its context."""
        return self.call is not None and self.in_threads > 0

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Mark the current task as one that waits for the database, not for anything of the handler."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.calling.add(task)
        try:
            yield
        finally:
            self.tasks.calling.discard(task)

    @contextlib.contextmanager
    def leased(self) -> Iterator[None]:
        """Around a call with the handler's lease: stop the handler if the engine refuses because the lease is gone."""
        try:
            yield
        except (LeaseLost, ExecutionNotActive) as error:
            self.worker.handlers.lost(self, error)
            raise

    # For the context

    @property
    def is_cancelled(self) -> bool:
        return self.is_lost or self.is_stopping

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        if self._log is None:
            self._log = logging.LoggerAdapter(log, told.facts(self))
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
        is_fresh = self.handle.kind is HandleKind.FRESH and not claimed.has_steps
        return is_fresh and claimed.retry_count == 0 == claimed.replay_count

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
        self.loaded_memory = Memory(
            steps, claimed.retry_count + claimed.replay_count, strict=self.task.steps == "strict"
        )

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

    @in_order
    async def progress(self, percent: int | None, message: str | None) -> None:
        await self.check()
        if isinstance(message, str):
            message = self.worker.codecs.seal_text(message, self.claimed.execution_id)
        with self.leased():
            await self.worker.engine.progress(self.handle, percent=percent, message=message)

    @in_order
    async def heartbeat(self) -> None:
        await self.check()
        asked = time.monotonic()
        with self.leased():
            await self.worker.engine.renew(self.handle)
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

    # What the handler asks for, and what is recorded

    ask = requests.ask
    changed = requests.changed
    record = records.record
    record_end = records.record_end
    ended = records.ended
    mark_read = records.mark_read

    # Durable operations of the handler, by chapter

    step = noticed(steps.step)
    map_steps = mapping.map_steps
    patched = steps.patched
    now = steps.now
    sleep = noticed(waits.sleep)
    waitpoint = waits.waitpoint
    wait_for = waits.wait_for
    send = children.send
    submit_durably = children.submit_durably
    as_one_call = children.as_one_call
    flow_seed = children.flow_seed
    child_flow = children.child_flow
    outcome_of_flow = noticed(children.outcome_of_flow)
    outcome_of = noticed(children.outcome_of)
    end_of_flow = noticed(children.end_of_flow)
    in_thread = in_thread.in_thread
    emit = frames.emit
    emit_soon = frames.emit_soon
    summarize = frames.summarize
    report_usage = spending.report_usage
    reserve_usage = spending.reserve_usage
    settle_usage = spending.settle_usage
    cancel_reservation = spending.cancel_reservation

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
        self.unwound_at = self.needs = None
        self._refused = 0
        if self._emitting is not None:
            self._emitting.restart()
        self._order = None
        await self._load()

    def not_awaited(self) -> NotAwaited | None:
        """Return the error for a handler that ended without awaiting a durable operation that it called.

        While the handler left other tasks behind, one of them may be about to.
        """
        if not self.calls or len(self.tasks) > 1:
            return None
        left = not_begun(self.calls)
        shown = [_shown(one) for one in left]
        for one in left:
            one.close()
        return NotAwaited(f"{', '.join(shown)}: called and never awaited") if shown else None

    async def steps_changed(self) -> StepsChanged | None:
        """Return the error for a handler that ended without steps it recorded before."""
        gone = [key for key in (await self.memory()).missing if key[2] == 0]
        if not gone or self.tasks.is_unclear:
            return None
        return StepsChanged(
            f"an earlier run recorded {', '.join(describe(*key) for key in gone)} and this one ended without:"
            " the code changed while the execution was unfinished",
            execution_id=self.claimed.execution_id,
        )
