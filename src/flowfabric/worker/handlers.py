"""Runs the handler of an execution that the worker holds, and reports what came of it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from flowfabric.app import Task
from flowfabric.client import current, passing
from flowfabric.contexts import Context
from flowfabric.contracts import Codecs
from flowfabric.errors import FlowFabricError, Interrupted, InvalidInput
from flowfabric.middleware import chain_execute, overriding
from flowfabric.models import Failure
from flowfabric.sync_contexts import SyncContext
from flowfabric.worker.durable import task_tree
from flowfabric.worker.durable.parking import park
from flowfabric.worker.durable.running import Running
from flowfabric.worker.durable.waits import HANDLER_ENDED
from flowfabric.worker.failures import BadResult, failure_of
from flowfabric.worker.runners.process_pool import ProcessPool
from flowfabric.worker.runners.threads import Interruptible, Threads

if TYPE_CHECKING:
    from flowfabric.worker.worker import Worker

log = logging.getLogger("flowfabric.worker")


class Handlers:
    """Runs the handlers of a worker: on its loop, in threads, in processes."""

    def __init__(self, worker: Worker, *, processes: int) -> None:
        app = worker.app
        self.hooks = overriding(app.middleware, "execute")
        self.shared: dict[type, Any] = {}  # what the app provides, made when the worker starts
        self._worker = worker
        self._codecs: Codecs = app.codecs
        self._threads: Threads = worker.threads
        self._process_count = processes
        self._processes: ProcessPool | None = None

    async def run(self, running: Running) -> None:
        """Run a handler to its end and report it. Raises only what is wrong with the worker itself."""
        current.running.set(running)
        task_tree.owner.set(running.tasks)
        task, claimed = running.task, running.claimed
        signature = task.signature
        try:
            data = self._codecs.open(claimed.input_payload, claimed.payload_encoding)
            if claimed.inputs is not None:
                data = passing.fill(data, claimed.inputs, self._codecs)
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
            if not running.is_first and not running.is_cancelled and (changed := await running.steps_changed()):
                raise changed
            result, encoding = self._sealed(task, value)
        except BaseException as error:
            await self._unsuccessful(running, error)
        else:
            if running.is_cancelled or running.is_parked:
                self._discard(running)
            else:
                self._worker.reports.complete(running, result, encoding)
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
        return (None, None) if result is None else self._codecs.seal(result)

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
                # Whatever became of it on the way out: it waits, and will be run again.
            if running.unwound_at is None:
                return value
            gate = running.unwound_at
            because = await park(running, [gate])
            if because is None:
                raise Interrupted("parked")
            # Nothing to wait for after all: from the top, with what is remembered.
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
        """End the processes of handlers at once. May be called by any thread."""
        if self._processes is not None:
            self._processes.kill()

    async def _unsuccessful(self, running: Running, error: BaseException) -> None:
        """What an exception that left the handler means."""
        if running.is_parked:
            return
        while not running.is_cancelled:
            try:
                failure = await failure_of(self._worker.engine, running, error)
            except Exception as trouble:
                if isinstance(trouble, FlowFabricError) and trouble.retryable:
                    await asyncio.sleep(0.5)
                    continue
                log.exception("execution %s: its failure could not be described", running.claimed.execution_id)
                failure = Failure(authority=running.handle, reason=f"{type(error).__name__} ({trouble})")
            self._worker.reports.fail(running, failure)
            return
        self._discard(running)

    def _discard(self, running: Running) -> None:
        """The handler ended, but its execution is not ours any more, or is about to be given back."""
        if running.is_lost or not running.is_stopping:
            self._worker.let_go(running)
