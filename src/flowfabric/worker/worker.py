"""The worker: claims executions, runs their handlers, reports the results.

A claim takes as many executions as there are free slots; results are reported in batches. Another thread renews the
leases (`second_thread.py`). No failure of one execution, one call or the connection ends the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self

from flowfabric.app.app import App
from flowfabric.app.declaring import store_limits
from flowfabric.app.task import Task
from flowfabric.client.client import AsyncClient
from flowfabric.contracts.codecs import Codecs
from flowfabric.engine import Engine
from flowfabric.engine.claims import check_namespace
from flowfabric.engine.service import embedded_place
from flowfabric.errors import InvalidInput, Unavailable
from flowfabric.values.checks import as_worker, check_worker, worker_capabilities
from flowfabric.values.durations import Duration, counted, duration
from flowfabric.values.grant import ClaimGrant, Granted, ReclaimGranted
from flowfabric.values.ids import ExecutionId, mint_uuid
from flowfabric.values.options import named_arguments
from flowfabric.values.worker import Serves, Serving
from flowfabric.worker import main, told
from flowfabric.worker.claims import Claims, lane_weights
from flowfabric.worker.durable import task_tree
from flowfabric.worker.durable.running import Running, StepHook
from flowfabric.worker.handlers import LAST_CALLS, Handlers
from flowfabric.worker.registration import Registration
from flowfabric.worker.reports import Reports
from flowfabric.worker.revival import keep_alive
from flowfabric.worker.runners.process_pool import is_loading_main
from flowfabric.worker.runners.threads import Threads
from flowfabric.worker.schedules import declare
from flowfabric.worker.second_thread import SecondThread
from flowfabric.worker.shared import check_provided, make

log = logging.getLogger("flowfabric.worker")
_PATIENCE = timedelta(seconds=20)  # timeout of a call; a call that takes longer is repeated
_STOP_GRACE = 3.0  # seconds for a handler that was asked to stop
Ack = Literal["batch", "each"]


class Worker:
    """Runs the tasks of an app. `await worker.run()`, or `async with worker:` beside something else.

    `lanes` are names, or names with weights: while both have work, the worker starts three executions of a lane of
    weight 3 for each of a lane of weight 1; a lane alone uses all slots. Without `lanes` it serves those that the
    app's tasks and schedules name. `concurrency` is how many handlers run at the same time. `ack="each"` reports every
    execution in its own call instead of in batches. `grace` is how long running handlers may continue after `stop`.
    `worker_id` names the pool in the history, `instance_id` this worker; two live workers cannot have the same, so by
    default it is made up. With a `namespace` it runs only executions of that one. `duties=False` leaves timers and
    schedules to other processes; at least one must run them.
    """

    # The test kit replaces these
    _claims_class: type[Claims] = Claims
    _handlers_class: type[Handlers] = Handlers

    # Since `start`
    loop: asyncio.AbstractEventLoop
    thread_id: int
    engine: Engine
    client: AsyncClient
    reports: Reports
    second_thread: SecondThread
    _claims: Claims
    _claiming: asyncio.Task[None]

    @named_arguments
    def __init__(
        self,
        app: App,
        *,
        lanes: Sequence[str] | Mapping[str, int] | None = None,
        concurrency: int = 100,
        capabilities: Collection[str] = (),
        tasks: Collection[str] | None = None,
        namespace: str | None = None,
        worker_id: str | None = None,
        instance_id: str | None = None,
        lease_ttl: Duration = timedelta(seconds=30),
        grace: Duration = timedelta(seconds=30),
        poll: Duration = timedelta(seconds=1),
        ack: Ack = "batch",
        processes: int | None = None,
        duties: bool = True,
        connections: int = 4,
    ) -> None:
        if not isinstance(app, App):
            raise InvalidInput(f"got {type(app).__name__}", field="app", allowed="an App")
        self.app = app
        self.codecs: Codecs = app.codecs
        self.tasks = _chosen(app, tasks)
        self.serving = Serving(
            {name: Serves(versions=one.versions, digest=one.code_digest) for name, one in self.tasks.items()}
        )
        self.lanes = lane_weights(app.lanes if lanes is None else lanes)
        self.concurrency = _at_least_one(concurrency, "concurrency")
        self.capabilities = tuple(worker_capabilities(capabilities))
        self.namespace = check_namespace(namespace)
        self.worker_id = check_worker(worker_id or as_worker(f"{app.name}@{socket.gethostname()}"))
        made = f"{self.worker_id}/{os.getpid()}/{mint_uuid().hex[-12:]}"
        self.instance_id = check_worker(instance_id or made, "instance_id")
        self.lease_ttl = duration(lease_ttl, "lease_ttl")
        if self.lease_ttl < timedelta(milliseconds=300):
            raise InvalidInput(f"got {lease_ttl!r}", field="lease_ttl", allowed="0.3 seconds or more")
        self.grace = duration(grace, "grace").total_seconds()
        self.poll = duration(poll, "poll").total_seconds()
        if ack not in ("batch", "each"):
            raise InvalidInput(f"got {ack!r}", field="ack", allowed="batch, each")
        self._ack: Ack = ack
        self._connections = _at_least_one(connections, "connections")
        self._runs_duties = duties
        self.slot_free = asyncio.Event()
        self.stopping = asyncio.Event()
        self.step_hook: StepHook | None = None
        self.threads = Threads(self.concurrency)
        self.handlers = self._handlers_class(
            self, processes=_at_least_one(processes or os.cpu_count() or 1, "processes")
        )
        self.held = self.handlers.held
        self._running = self.handlers.running
        self.registration = Registration(self)
        self._life: contextlib.AsyncExitStack | None = None

    # Life

    async def start(self) -> None:
        """Connect and start working."""
        if is_loading_main():
            raise Unavailable("Worker.start", 'a child process loads this script: guard it with __name__ == "__main__"')
        wanted = check_provided(self.tasks.values(), self.app.provided)
        self.loop = asyncio.get_running_loop()
        self.thread_id = threading.get_ident()
        self.stopping.clear()
        self.handlers.ends_at = None
        async with contextlib.AsyncExitStack() as life:
            self.second_thread = SecondThread(self, duties=self._runs_duties)
            life.push_async_callback(self.second_thread.stopped)
            await self.second_thread.started()
            self.engine = await self._open_engine()
            life.push_async_callback(self._close_engine)
            self.client = AsyncClient(self.engine, self.app)
            life.push_async_callback(self.client.outcomes.close)
            self.app.adopt(self.client)
            life.callback(self.app.forget, self.client)
            self.reports = Reports(self, each=self._ack == "each", lines=max(1, self._connections - 1))
            life.push_async_callback(self._close_reports)
            life.callback(task_tree.install(self.loop))
            self.handlers.shared = {cls: await make(life, cls, maker) for cls, maker in wanted.items()}
            life.push_async_callback(self.handlers.close_processes)
            for done in await store_limits(self.engine, self.app.limit_names):
                log.info("%s", done)
            if self._runs_duties:
                await declare(self.engine, self.app)
            if (place := embedded_place(self.engine)) is not None:
                reviving = asyncio.create_task(keep_alive(place, self.stopping), name="flowfabric revival")
                life.push_async_callback(_cancelled, reviving)
            self._claims = self._claims_class(self)
            self._claiming = asyncio.create_task(self._claims.run(), name="flowfabric claims")
            self._life = life.pop_all()
        log.info(
            "worker %s: %s, lanes %s, tasks %s, database %s",
            self.instance_id,
            counted(self.concurrency, "slot"),
            ", ".join(self.lanes),
            ", ".join(sorted(self.tasks)) or "(none)",
            self.engine.target,
        )

    async def _open_engine(self) -> Engine:
        return await self.app.open_engine(
            min_size=1,
            max_size=self._connections,
            command_timeout=_PATIENCE,
            # A handler waits for the database as long as its lease may last.
            reconnect_for=max(self.lease_ttl, timedelta(seconds=15)),
        )

    async def _close_engine(self) -> None:
        await self.engine.close()

    @property
    def is_started(self) -> bool:
        """Whether it has started and was not closed."""
        return self._life is not None

    def stop(self) -> None:
        """Start to stop: claim nothing more. `run` returns once running executions have ended or were given back."""
        if not self.stopping.is_set():
            log.info("worker %s is stopping: %d running", self.instance_id, len(self._running))
        self.handlers.must_end()
        self.stopping.set()
        self.slot_free.set()

    async def close(self) -> None:
        """Stop and wait: running handlers get `grace`, then their executions are given back to other workers."""
        if self._life is None:
            return
        life, self._life = self._life, None
        self.stop()
        async with life:
            # At the same time: a hanging claim must not stop executions from being given back while their leases last.
            await asyncio.gather(self._end_claims(), self._drain())
            await self.handlers.give_back()  # executions claimed too late to start
        log.info("worker %s has stopped", self.instance_id)
        if not self._claiming.cancelled() and (error := self._claiming.exception()) is not None:
            raise error

    async def _end_claims(self) -> None:
        _, late = await asyncio.wait([self._claiming], timeout=LAST_CALLS)
        for claiming in late:  # executions it may have claimed come back when their leases expire
            claiming.cancel()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run(self, *, until_idle: bool = False) -> None:
        """Work until `stop` is called; with `until_idle`, until there is nothing to do."""
        await self.start()
        try:
            if until_idle:
                await self.idle()
            else:
                stopped = asyncio.ensure_future(self.stopping.wait())
                await asyncio.wait([self._claiming, stopped], return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
        finally:
            await self.close()

    async def idle(self, quiet: float = 0.1) -> None:
        """Wait until nothing runs and claims have found nothing for a little while."""
        while not self.stopping.is_set():
            since = self._claims.idle_since
            if since is not None and not self._running and time.monotonic() - since >= quiet:
                await self.reports.flushed()
                # The last report may have made other work claimable: a parent continues after its child.
                await self._claims.look()
                if self._claims.idle_since == since and not self._running:
                    return
            await asyncio.sleep(0.01)

    async def claim_from_grant(self, grant: ClaimGrant | Granted | ReclaimGranted) -> ExecutionId:
        """Consume a grant that a scheduler gave this worker, and run its handler; returns once it starts.

        `WorkerAtCapacity` without a free slot: the grant is untouched and valid until it expires. `Contention` if the
        grant is no longer valid. The scheduler asked with `engine.claim_for_worker` and this worker's `worker_id`.
        """
        if isinstance(grant, Granted | ReclaimGranted):
            grant = grant.grant
        if not isinstance(grant, ClaimGrant):
            raise InvalidInput(f"got {type(grant).__name__}", field="grant", allowed="what claim_for_worker returned")
        if self._life is None or self.stopping.is_set():
            raise Unavailable("claim_from_grant", "the worker has not started, or stops")
        return await self._claims.consume(grant)

    def main(self) -> None:
        """Run in this process until SIGTERM or SIGINT; a second signal exits immediately. For programs and the CLI."""
        main.run(self)

    def code_changed(self, running: Running, problem: str) -> None:
        """Report that an execution does not fit this worker's code."""
        told.changed(running, problem)

    async def _drain(self) -> None:
        """Let running handlers end within the grace period; give the rest back."""
        ends_at = self.handlers.ends_at
        assert ends_at is not None
        while self._running and (left := ends_at - time.monotonic()) > 0:
            self.slot_free.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.slot_free.wait(), min(left, 1.0))
        left_over = list(self._running)
        if left_over:
            log.warning("%s did not end in time; giving the executions back", counted(len(left_over), "handler"))
        tasks = [one.asyncio_task for one in left_over if one.asyncio_task is not None]
        for one in left_over:
            one.stop("the worker stops")
        # All together: the worker that takes over must not wait for a handler that ignores the stop, or for a late
        # report.
        _, flushed, *_ = await asyncio.gather(
            self.handlers.give_back(),
            self.reports.flushed(max(ends_at - time.monotonic(), LAST_CALLS)),
            *([asyncio.wait(tasks, timeout=_STOP_GRACE)] if tasks else []),
        )
        if self._running or self.threads.abandoned:
            log.warning(
                "%s and %s ignored the stop request and will run until the process exits",
                counted(len(self._running), "handler"),
                counted(self.threads.abandoned, "thread"),
            )
        if not flushed:
            log.warning("the last results could not be reported; their executions will run again")

    async def _close_reports(self) -> None:
        self.reports.close()
        await self.reports.flushed(1.0)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _at_least_one(value: int, field: str) -> int:
    if type(value) is not int or not 1 <= value <= 100_000:
        raise InvalidInput(f"got {value!r}", field=field, allowed="1..100000")
    return value


def _chosen(app: App, names: Collection[str] | None) -> dict[str, Task[Any, Any]]:
    if names is None:
        return dict(app.tasks)
    unknown = sorted(set(names) - app.tasks.keys())
    if unknown:
        raise InvalidInput(f"no task {unknown[0]!r}", field="tasks", allowed=", ".join(sorted(app.tasks)) or "none")
    return {name: app.tasks[name] for name in names}
