"""The executions that a worker holds: it runs their handlers and reports the results."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from flowfabric.app.context import Context
from flowfabric.app.sync_context import SyncContext
from flowfabric.app.task import Task
from flowfabric.client import current, node_arguments
from flowfabric.client.hooks import facts_as_arguments
from flowfabric.contracts.codecs import Codecs
from flowfabric.errors import FlowFabricError, Interrupted, InvalidInput
from flowfabric.middleware import chain_execute, overriding
from flowfabric.values.attempt import Claimed, Failure
from flowfabric.values.checks import escape_text
from flowfabric.values.durations import counted
from flowfabric.values.hooks import FACTS
from flowfabric.worker import told
from flowfabric.worker.durable import task_tree
from flowfabric.worker.durable.changes import give_back
from flowfabric.worker.durable.parking import park
from flowfabric.worker.durable.running import Running
from flowfabric.worker.durable.spending import pause
from flowfabric.worker.durable.waits import HANDLER_ENDED
from flowfabric.worker.failures import BadResult, failure_of
from flowfabric.worker.runners.process_pool import ProcessPool
from flowfabric.worker.runners.threads import Interruptible, Threads

if TYPE_CHECKING:
    from flowfabric.worker.worker import Worker

_MOST_SEALED_BYTES = 64 * 1024  # of the text of a failure; what becomes of it must fit where it is stored

log = logging.getLogger("flowfabric.worker")
_MAX_PAUSE = 5.0
LAST_CALLS = 5.0  # seconds to give back and report the rest after the grace period


class Handlers:
    """The executions that a worker holds, and their handlers: on its loop, in threads, in processes."""

    def __init__(self, worker: Worker, *, processes: int) -> None:
        app = worker.app
        self.held: dict[UUID, Running] = {}  # by lease
        self.running: set[Running] = set()  # those whose handler has not ended
        self.ends_at: float | None = None  # time.monotonic() at the end of the grace period
        self.hooks = overriding(app.middleware, "execute")
        self.shared: dict[type, Any] = {}  # objects that the app provides, made when the worker starts
        self._worker = worker
        self._codecs: Codecs = app.codecs
        self._threads: Threads = worker.threads
        self._process_count = processes
        self._processes: ProcessPool | None = None

    def begin(self, claimed: Sequence[Claimed], asked: float) -> None:
        """Run claimed executions. `asked` is the `time.monotonic()` of the claim."""
        worker = self._worker
        for one in claimed:
            running = Running(worker, one, worker.tasks[one.execution_kind], asked)
            self.held[one.handle.lease_id] = running
            if worker.stopping.is_set():
                running.is_stopping = True  # to be given back
                continue
            self.running.add(running)
            task: asyncio.Task[None] = asyncio.Task(self.run(running), loop=worker.loop)
            running.asyncio_task = task
            running.tasks.add(task)
            told.started(running)
            task.add_done_callback(partial(self._ended, running))

    def _ended(self, running: Running, task: asyncio.Task[None]) -> None:
        self.running.discard(running)
        running.asyncio_task = None  # breaks the reference cycle, so that the garbage collector has nothing to do
        running.tasks.discard(task)
        self._worker.slot_free.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("execution %s: the worker itself failed", running.claimed.execution_id, exc_info=error)
            reason = f"the worker failed: {type(error).__name__}: {error}"
            self._worker.reports.fail(
                running, Failure(authority=running.handle, reason=reason, category="worker_failed")
            )

    async def run(self, running: Running) -> None:
        """Run a handler to its end and report it. Raises only errors of the worker itself."""
        current.running.set(running)
        current.handled.set(running)
        task_tree.owner.set(running.tasks)
        task, claimed = running.task, running.claimed
        signature = task.signature
        try:
            if claimed.payload_encoding == FACTS:
                data = facts_as_arguments(claimed.input_payload, signature, self._codecs)
            else:
                data = self._codecs.open(claimed.input_payload, claimed.payload_encoding, claimed.execution_id)
            if claimed.inputs is not None:
                data = node_arguments.fill(data, claimed.inputs, self._codecs)
            kwargs = signature.decode(data)
            if signature.data:
                kwargs.update({name: self.shared[cls] for name, cls in signature.data.items()})
            if self.hooks:
                context: Any = Context(running) if signature.is_async else SyncContext(running)
                value = await chain_execute(self.hooks, context, partial(self._call, running, task, kwargs))()
            elif signature.is_async:
                if signature.context_param is not None:
                    kwargs[signature.context_param] = Context(running)
                value = await task.function(**kwargs)
            else:
                value = await self._call(running, task, kwargs)
            if running.calls and (forgotten := running.not_awaited()) is not None:
                raise forgotten
            if running.breach is not None:
                raise running.breach
            if running.has_emitted:
                await running.flushed()
            if not running.is_first and not running.is_cancelled and (changed := await running.steps_changed()):
                raise changed
            result, encoding = self._sealed(running, value)
        except BaseException as error:
            await self._unsuccessful(running, error)
        else:
            if running.is_cancelled or running.is_parked:
                self._discard(running)
            else:
                self._worker.reports.complete(running, result, encoding)
        if len(running.tasks) > 1:
            # Tasks that the handler left running are cancelled: nothing awaits them.
            this = asyncio.current_task()
            for other in list(running.tasks):
                if other is not this:
                    other.cancel(HANDLER_ENDED)

    def _sealed(self, running: Running, value: Any) -> tuple[bytes | None, str | None]:
        """Return a result as stored."""
        try:
            result = running.task.signature.result.encode(value)
        except InvalidInput as error:
            raise BadResult(str(error)) from error
        return (None, None) if result is None else self._codecs.seal(result, running.claimed.execution_id)

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
                value = await self._threads.run(running.call, task.function, kwargs)
            except BaseException:
                if running.unwound_at is None or running.is_cancelled:
                    raise
                # However it unwound: it waits, and will run again.
            if running.unwound_at is None:
                return value
            gate = running.unwound_at
            if (changed := running.was_changed) is not None:
                because = await give_back(running, changed.detail)
            elif running.needs is not None:
                because = await pause(running, running.needs)
            else:
                because = await park(running, [gate])
            if because is None:
                raise Interrupted("parked")
            # Nothing left to wait for: run again from the top, with the recorded steps.
            if because == "due" and gate.until is not None:
                running.parking.pass_time(gate.until)
            await running.forget()

    def _pool(self) -> ProcessPool:
        if self._processes is None:
            self._processes = ProcessPool(self._process_count)
        return self._processes

    async def close_processes(self) -> None:
        if self._processes is not None:
            await self._processes.close()
            self._processes = None

    def kill_processes(self) -> None:
        """Kill the processes of handlers immediately. Any thread may call it."""
        if self._processes is not None:
            self._processes.kill()

    async def _unsuccessful(self, running: Running, error: BaseException) -> None:
        """Report the exception of a handler."""
        if running.is_parked:
            return
        pause = 0.5
        while not running.is_cancelled:
            try:
                failure = self._sealed_failure(running, await failure_of(self._worker.engine, running, error))
            except Exception as trouble:
                if isinstance(trouble, FlowFabricError) and trouble.retryable:
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _MAX_PAUSE)
                    continue
                log.exception("execution %s: its failure could not be described", running.claimed.execution_id)
                why = f" ({trouble})" if self._codecs.is_plain else ""
                failure = Failure(authority=running.handle, reason=f"{type(error).__name__}{why}")
            await running.settled()
            self._worker.reports.fail(running, failure)
            return
        self._discard(running)

    def _sealed_failure(self, running: Running, failure: Failure) -> Failure:
        """Return a failure with its text as stored: what a handler raises may quote its arguments."""
        if self._codecs.is_plain:
            return failure
        try:
            text = escape_text(failure.reason, _MOST_SEALED_BYTES)
            stored = self._codecs.seal_text(text, running.claimed.execution_id)
        except Exception:
            # Without the traceback: it ends with the text.
            log.error("execution %s: the text of its failure could not be encoded", running.claimed.execution_id)  # noqa: TRY400
            stored = f"{failure.category}: its text could not be encoded"
        return msgspec.structs.replace(failure, reason=stored)

    def _discard(self, running: Running) -> None:
        """Drop the result: this worker no longer holds the execution, or is about to give it back."""
        if running.is_lost or not running.is_stopping:
            self.let_go(running)

    # Leases

    def let_go(self, running: Running) -> bool:
        """Forget a lease that this worker no longer holds; False if it was already forgotten."""
        return self.held.pop(running.handle.lease_id, None) is not None

    def lost(self, running: Running, error: FlowFabricError) -> None:
        """Stop the handler of a lost lease; the database refuses its later writes."""
        if not self.let_go(running):
            return
        running.is_lost = True
        if running.asyncio_task is None:
            return  # the handler has ended; its report gets its own verdict
        if not self._worker.engine.outage.is_on:  # otherwise one line says how many there are
            told.stopped(running, error, "its handler stops")
        running.stop(told.why_stopped(running, error))

    def must_end(self) -> None:
        """Start the grace period. Any thread may call it, before `stop`."""
        if self.ends_at is None:
            self.ends_at = time.monotonic() + self._worker.grace

    def is_over(self, running: Running) -> bool:
        """Whether handlers have to end now. Any thread may call it."""
        return running.is_cancelled or (self.ends_at is not None and time.monotonic() > self.ends_at)

    def of_task(self, task: asyncio.Task[Any] | None) -> Running | None:
        """Return the execution that an asyncio task belongs to."""
        if task is None:
            return None
        return next((one for one in list(self.running) if task in one.tasks), None)

    async def give_back(self) -> None:
        """Release stopped executions, so that other workers can continue them immediately."""
        stopped = [one for one in self.held.values() if one.is_stopping and not one.is_lost]
        if not stopped:
            return
        done, late = await asyncio.wait(
            [asyncio.ensure_future(self._release(one)) for one in stopped], timeout=LAST_CALLS
        )
        for task in late:
            task.cancel()
        if count := len(late) + sum(not task.result() for task in done):
            log.warning("%s could not be given back; the leases will expire", counted(count, "execution"))

    async def _release(self, one: Running) -> bool:
        self.let_go(one)
        try:
            await one.settled()
            await self._worker.engine.release(one.handle)
        except FlowFabricError as error:
            if self._worker.engine.outage.covers(error):
                return False
            told.stopped(one, error, "it could not be given back")
        return True
