"""The worker: claims executions, runs their handlers, reports what came of them.

Claims ask for as many as there are free slots; finished work goes back with whatever else is finished by then. Leases
are renewed in another thread (`service.py`). Nothing that happens to one execution, to one call or to the connection
ends the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from uuid import UUID

from flowfabric.app import App, Task
from flowfabric.client import current
from flowfabric.client.client import AsyncClient
from flowfabric.client.failure import describe_failure
from flowfabric.contexts import Context, SyncContext
from flowfabric.contracts import CannotDecode, Codecs
from flowfabric.engine import Engine
from flowfabric.errors import (
    ExecutionNotActive,
    FlowFabricError,
    Interrupted,
    InvalidInput,
    LeaseLost,
    Reject,
    RetryLater,
    StepsChanged,
)
from flowfabric.ids import ExecutionId, check_lane, check_worker, mint_uuid, worker_capabilities
from flowfabric.middleware import chain_execute, overriding
from flowfabric.models import Claimed, Completed, Completion, Failure, Handle, NewStep, Step
from flowfabric.policies import Duration, Exponential, Fixed, RetryPolicy, duration
from flowfabric.worker import tree
from flowfabric.worker.batching import Batcher
from flowfabric.worker.processes import ChildDied, ProcessPool
from flowfabric.worker.running import Running
from flowfabric.worker.schedules import declare
from flowfabric.worker.service import Service
from flowfabric.worker.shared import check_provided, make
from flowfabric.worker.threads import Threads

log = logging.getLogger("flowfabric.worker")
_OWN_FILES = str(Path(__file__).parent.parent)
_MAX_PAUSE = 5.0
_RETRY_LATER_AT_MOST = 100  # for a task without a retry policy
Ack = Literal["batch", "each"]


class Worker:
    """Runs the tasks of an app. `await worker.run()`, or `async with worker:` beside something else.

    `lanes` are names, or names with weights: a lane of weight 3 gets three times the slots of one of weight 1 while
    both have work, and all of them when the other has none. `concurrency` is how many handlers run at once.
    `ack="each"` reports every execution in a call of its own instead of together with others. `grace` is how long
    running handlers may go on after `stop`. `duties=False` leaves timers and schedules to other processes; at least
    one must run them.
    """

    def __init__(
        self,
        app: App,
        *,
        lanes: Sequence[str] | Mapping[str, int] = ("default",),
        concurrency: int = 100,
        capabilities: Collection[str] = (),
        tasks: Collection[str] | None = None,
        worker_id: str | None = None,
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
        self.lanes = _weights(lanes)
        self.concurrency = _at_least_one(concurrency, "concurrency")
        self.capabilities = tuple(worker_capabilities(capabilities))
        self.tasks = _chosen(app, tasks)
        self.worker_id = check_worker(worker_id or f"{app.name}@{socket.gethostname()}"[:200])
        self.instance_id = f"{self.worker_id}/{os.getpid()}/{mint_uuid().hex[-12:]}"
        self.lease_ttl = duration(lease_ttl, "lease_ttl")
        if self.lease_ttl < timedelta(milliseconds=300):
            raise InvalidInput(f"got {lease_ttl!r}", field="lease_ttl", allowed="0.3 seconds or more")
        self.grace = duration(grace, "grace").total_seconds()
        self.poll = duration(poll, "poll").total_seconds()
        if ack not in ("batch", "each"):
            raise InvalidInput(f"got {ack!r}", field="ack", allowed="batch, each")
        self.held: dict[UUID, Running] = {}
        self.step_hook: Callable[[Running, str, int], Awaitable[None]] | None = None
        self.loop: asyncio.AbstractEventLoop
        self.thread_id = 0
        self.engine: Engine
        self.client: AsyncClient
        self.threads = Threads(self.concurrency)
        self.shared: dict[type, Any] = {}  # what the app provides, made when the worker starts
        self._shared_life = contextlib.AsyncExitStack()
        self.completed_count = 0
        self.failed_count = 0
        self._ack: Ack = ack
        self._connections = _at_least_one(connections, "connections")
        self._runs_duties = duties
        self._process_count = _at_least_one(processes or os.cpu_count() or 1, "processes")
        self._processes: ProcessPool | None = None
        self._execute_hooks = overriding(app.middleware, "execute")
        self._running: set[Running] = set()
        self._slot_free = asyncio.Event()
        self._stopping = asyncio.Event()
        self._claiming: asyncio.Task[None] | None = None
        self._service: Service | None = None
        self._turn = 0
        self._idle_since: float | None = None
        self._completions: Batcher[tuple[Running, Completion], Completed]
        self._failures: Batcher[tuple[Running, Failure], Any]
        self._records: Batcher[_Record, datetime | None]
        self._reads: Batcher[_Read, list[Step]]

    # Life

    async def start(self) -> None:
        """Connect and begin to work."""
        self.loop = asyncio.get_running_loop()
        self.thread_id = threading.get_ident()
        self._stopping.clear()
        wanted = check_provided(self.tasks.values(), self.app.provided)
        self._service = Service(self, duties=self._runs_duties)
        beside = await self._service.started()
        try:
            self.engine = await self.app.open_engine(
                min_size=1,
                max_size=self._connections,
                command_timeout=max(self.lease_ttl, timedelta(seconds=10)),
                listener=beside.listener,
            )
        except BaseException:
            await self._service.stopped()
            raise
        self.client = AsyncClient(self.engine, self.app)
        self.app.adopt(self.client)
        self.loop.set_task_factory(tree.factory)  # type: ignore[arg-type]  # the stub names no options
        each = self._ack == "each"
        self._completions = Batcher(
            "completions",
            self._complete,
            self._completed,
            limit=1 if each else 1000,
            lines=max(1, self._connections - 1) if each else 1,
        )
        self._failures = Batcher("failures", self._fail, self._failed, limit=1 if each else 1000)
        self._records = Batcher("steps", self._record_steps, self._recorded)
        self._reads = Batcher("step reads", self._read_steps, self._read)
        self.shared = {cls: await make(self._shared_life, cls, maker) for cls, maker in wanted.items()}
        if self._runs_duties:
            await declare(self.engine, self.app)
        self._claiming = asyncio.create_task(self._claims(), name="flowfabric claims")
        log.info(
            "worker %s: %d slots, lanes %s, tasks %s, database %s",
            self.instance_id,
            self.concurrency,
            ", ".join(self.lanes),
            ", ".join(sorted(self.tasks)) or "(none)",
            self.engine.target,
        )

    def stop(self) -> None:
        """Begin to stop: claim nothing more. `run` returns once what is running has ended or was given back."""
        if not self._stopping.is_set():
            log.info("worker %s stops: %d running", self.instance_id, len(self._running))
        self._stopping.set()
        self._slot_free.set()

    async def close(self) -> None:
        """Stop and wait: running handlers get `grace`, then their executions are given back for others."""
        if self._service is None:
            return
        self.stop()
        try:
            if self._claiming is not None:
                await self._claiming
            await self._drain()
        finally:
            self._completions.close()
            self._failures.close()
            self._records.close()
            self._reads.close()
            if self._processes is not None:
                await self._processes.close()
                self._processes = None
            self.app.forget()
            await self._shared_life.aclose()
            await self.client.outcomes.close()
            await self._service.stopped()
            self._service = None
            await self.engine.close()
            self.loop.set_task_factory(None)
            log.info("worker %s has stopped", self.instance_id)

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
                assert self._claiming is not None
                await asyncio.wait([self._claiming])
        finally:
            await self.close()

    async def idle(self, quiet: float = 0.1) -> None:
        """Wait until nothing runs and claims have found nothing for a little while."""
        while not self._stopping.is_set():
            since = self._idle_since
            if since is not None and not self._running and time.monotonic() - since >= quiet:
                await self._completions.flushed()
                await self._failures.flushed()
                return
            await asyncio.sleep(0.01)

    def main(self) -> None:
        """Run in this process until SIGTERM or SIGINT; a second signal stops at once. For programs and the CLI."""
        try:
            import uvloop  # noqa: PLC0415 - faster where it is installed
        except ImportError:
            asyncio.run(self._main())
        else:
            uvloop.run(self._main())

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        await self.run()

    def _signalled(self, number: int) -> None:
        if not self._stopping.is_set():
            self.stop()
            return
        log.warning("worker %s stops at once; its leases will lapse", self.instance_id)
        if self._processes is not None:
            self._processes.kill()
        os._exit(128 + number)

    async def _drain(self) -> None:
        """Let what runs end within the grace; give the rest back."""
        until = time.monotonic() + self.grace
        while self._running and (left := until - time.monotonic()) > 0:
            self._slot_free.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._slot_free.wait(), min(left, 1.0))
        left_over = list(self._running)
        if left_over:
            log.warning("%d handlers did not end in time; giving their executions back", len(left_over))
            for one in left_over:
                one.stop("the worker stops")
            # The leases first: whoever takes over must not wait for a handler that does not listen.
            await asyncio.gather(*(self._release(one) for one in left_over))
            tasks = [one.asyncio_task for one in left_over if one.asyncio_task is not None]
            if tasks:
                await asyncio.wait(tasks, timeout=5.0)
        await self._completions.flushed(10)
        await self._failures.flushed(10)

    async def _release(self, one: Running) -> None:
        if self.held.pop(one.handle.attempt_id, None) is None:
            return
        try:
            await self.engine.release(one.handle)
        except FlowFabricError as error:
            log.warning("execution %s could not be given back: %s", one.claimed.execution_id, error)

    # Claiming

    async def _claims(self) -> None:
        """Claim as many as fit, again and again; when there is nothing, sleep until somebody submits or it is time."""
        announced = 0.0
        trouble = 0
        kinds = sorted(self.tasks)
        # Half at a time: while one half begins, the other is being claimed.
        most = min(max(self.concurrency // 2, 1), 500)
        with self.engine.work_wakeups() as woken:
            while not self._stopping.is_set():
                free = self.concurrency - len(self._running)
                if free <= 0 or self._completions.pending >= max(1000, 2 * self.concurrency):
                    self._idle_since = None
                    self._slot_free.clear()
                    if free <= 0 or self._completions.pending:
                        await self._slot_free.wait()
                    continue
                if woken is not None:
                    woken.clear()
                asked = time.monotonic()
                try:
                    claimed = await self._claim(min(free, most), kinds)
                    if trouble:
                        log.info("claims work again")
                    trouble = 0
                except Exception as error:
                    trouble += 1
                    pause = min(0.1 * 2**trouble, _MAX_PAUSE) * random.uniform(0.5, 1)  # noqa: S311 - spreads workers
                    known = isinstance(error, FlowFabricError)
                    log.warning("a claim failed: %s; again in %.1f s", error, pause, exc_info=not known)
                    await self._pause(pause, None)
                    continue
                if claimed:
                    self._idle_since = None
                    for one in claimed:
                        self._begin(one, asked)
                    continue
                now = time.monotonic()
                if woken is not None and now >= announced:
                    # Announce, look again, then sleep: whoever submits after that look sees the announcement.
                    try:
                        await self.engine.sleep_for_work(timedelta(seconds=self.poll + 0.25))
                    except FlowFabricError as error:
                        log.warning("waiting for work: %s", error)
                        await self._pause(0.5, None)
                        continue
                    announced = now + self.poll
                    continue
                if self._idle_since is None:
                    self._idle_since = now
                await self._pause(max(announced - now, 0.01) if woken is not None else self.poll, woken)

    async def _pause(self, seconds: float, woken: asyncio.Event | None) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._stopping, woken) if event is not None]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _claim(self, limit: int, kinds: list[str]) -> list[Claimed]:
        if len(self.lanes) == 1:
            return await self.engine.claim_many(
                next(iter(self.lanes)),
                limit=limit,
                worker_id=self.worker_id,
                worker_instance_id=self.instance_id,
                capabilities=self.capabilities,
                kinds=kinds,
                lease_ttl=self.lease_ttl,
            )
        return await self.engine.claim_lanes(
            self._shares(limit),
            limit=limit,
            worker_id=self.worker_id,
            worker_instance_id=self.instance_id,
            capabilities=self.capabilities,
            kinds=kinds,
            lease_ttl=self.lease_ttl,
        )

    def _shares(self, limit: int) -> dict[str, int]:
        """The slots of each lane by weight. What does not divide goes round, so that few slots are fair in time."""
        total = sum(self.lanes.values())
        self._turn += 1
        # Each lane's place on a wheel of `total` spokes that turns with every claim.
        wheel = [lane for lane, weight in self.lanes.items() for _ in range(weight)]
        start = (self._turn * 7919) % total
        shares = {lane: limit * weight // total for lane, weight in self.lanes.items()}
        spare = limit - sum(shares.values())
        order: dict[str, None] = {}
        for at in range(total):
            lane = wheel[(start + at) % total]
            order.setdefault(lane)
            if at < spare:
                shares[lane] += 1
        return {lane: shares[lane] for lane in order}

    # Running

    def _begin(self, claimed: Claimed, asked: float) -> None:
        running = Running(self, claimed, self.tasks[claimed.execution_kind], asked)
        self.held[claimed.handle.attempt_id] = running
        self._running.add(running)
        task: asyncio.Task[None] = asyncio.Task(self._execute(running), loop=self.loop)
        running.asyncio_task = task
        running.tasks.add(task)
        task.add_done_callback(partial(self._ended, running))

    def _ended(self, running: Running, task: asyncio.Task[None]) -> None:
        self._running.discard(running)
        running.asyncio_task = None  # with it the cycle of references goes, and the collector has nothing to do
        running.tasks.discard(task)
        self._slot_free.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("execution %s: the runtime failed", running.claimed.execution_id, exc_info=error)

    async def _execute(self, running: Running) -> None:
        current.running.set(running)
        tree.owner.set(running.tasks)
        task, claimed = running.task, running.claimed
        signature = task.signature
        try:
            kwargs = signature.decode(self.codecs.open(claimed.input_payload, claimed.payload_encoding))
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
            result = signature.result.encode(value)
            changed = running.steps_left_out()
            if changed is not None:
                raise changed
        except BaseException as error:
            await self._unsuccessful(running, error)
        else:
            if running.is_cancelled or running.is_parked:
                self._discard(running)
            else:
                encoding = None
                if result is not None:
                    result, encoding = self.codecs.seal(result)
                self._completions.put((running, Completion(running.handle, result, encoding)))
        if len(running.tasks) > 1:
            # What the handler left behind has nobody to report to.
            this = asyncio.current_task()
            for other in list(running.tasks):
                if other is not this:
                    other.cancel("the handler has ended")

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
                value = await self.threads.run(self._in_thread, running, task.function, kwargs)
            except Interrupted:
                if running.wants_park is None or running.is_cancelled:
                    raise
            if running.wants_park is None:
                return value
            until, child = running.wants_park
            if await self.park(running, until, [] if child is None else [child]):
                raise Interrupted("parked")
            # Nothing to wait for after all: from the top, with what is remembered.
            await running.forget()

    @staticmethod
    def _in_thread(running: Running, function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        running.thread_id = threading.get_ident()
        try:
            return function(**kwargs)
        finally:
            running.thread_id = None

    def _pool(self) -> ProcessPool:
        if self._processes is None:
            self._processes = ProcessPool(self._process_count)
        return self._processes

    async def _unsuccessful(self, running: Running, error: BaseException) -> None:
        """What an exception that left the handler means."""
        if running.is_parked:
            return
        if running.is_lost or running.is_stopping:
            self._discard(running)
            return
        try:
            failure = await self._failure(running, error)
        except Exception as trouble:
            log.exception("execution %s: its failure could not be described", running.claimed.execution_id)
            failure = Failure(authority=running.handle, reason=f"{type(error).__name__} ({trouble})")
        self._failures.put((running, failure))

    async def _failure(self, running: Running, error: BaseException) -> Failure:
        handle = running.handle
        task = running.task
        match error:
            case Reject():
                reason = error.reason or "rejected"
                return Failure(authority=handle, reason=reason, failure_class="permanent", category="rejected")
            case RetryLater():
                return Failure(
                    authority=handle,
                    reason=error.reason or "asked to be retried later",
                    failure_class="transient",
                    category="retry_later",
                    retry_policy=await self._later(running, error),
                )
            case CannotDecode():
                category, failure_class = "bad_arguments", "permanent"
            case StepsChanged():
                category, failure_class = "steps_changed", "permanent"
            case ChildDied():
                category, failure_class = "child_died", "infra_crash"
            case _ if isinstance(error, task.permanent):
                category, failure_class = type(error).__name__, "permanent"
            case _:
                category, failure_class = type(error).__name__, "transient"
        reason = describe_failure(error, skip=lambda filename: filename.startswith(_OWN_FILES))
        return Failure(authority=handle, reason=reason, failure_class=failure_class, category=category)

    async def _later(self, running: Running, error: RetryLater) -> RetryPolicy | dict[str, Any]:
        """The retry that a handler asked for: when it says, as often as the execution's policy allows."""
        found = await self.engine.read_execution(running.claimed.execution_id)
        frozen = ((found.policy or {}) if found is not None else {}).get("retry_policy")
        if error.after is not None:
            most = frozen.get("max_retries", 3) if frozen else _RETRY_LATER_AT_MOST
            return RetryPolicy(max_retries=most, backoff=Fixed(delay=duration(error.after, "after")))
        if frozen:
            policy: dict[str, Any] = {**frozen, "retryable_categories": []}
            return policy
        return RetryPolicy(max_retries=_RETRY_LATER_AT_MOST, backoff=Exponential())

    def _discard(self, running: Running) -> None:
        """The handler ended, but its execution is not ours any more."""
        if self.held.pop(running.handle.attempt_id, None) is not None and running.is_stopping:
            # It was stopped by a drain that had not come to release it yet.
            self.held[running.handle.attempt_id] = running

    def lost(self, running: Running, error: FlowFabricError) -> None:
        """The lease is gone: stop the handler; whatever it writes from now on is refused."""
        if self.held.pop(running.handle.attempt_id, None) is None:
            return
        running.is_lost = True
        log.warning("execution %s: %s; its handler is stopped", running.claimed.execution_id, error)
        running.stop(str(error))

    async def park(self, running: Running, until: datetime | None, ends_of: Sequence[ExecutionId]) -> bool:
        """Give the lease back until then; False when there is nothing to wait for."""
        try:
            parked = await self.engine.park(running.handle, until=until, ends_of=ends_of)
        except (LeaseLost, ExecutionNotActive) as error:
            self.lost(running, error)
            return True
        except FlowFabricError as error:
            log.warning("execution %s could not be parked: %s", running.claimed.execution_id, error)
            await asyncio.sleep(0.5)
            return False
        if parked.parked:
            running.is_parked = True
            self.held.pop(running.handle.attempt_id, None)
            running.stop("it waits without a worker")
        return parked.parked

    def of_task(self, task: asyncio.Task[Any] | None) -> Running | None:
        """Whose handler an asyncio task belongs to."""
        if task is None:
            return None
        return next((one for one in list(self._running) if task in one.tasks), None)

    # Calls that many executions share

    async def _complete(self, items: Sequence[tuple[Running, Completion]]) -> Sequence[Completed | FlowFabricError]:
        return await self.engine.complete_many([completion for _, completion in items])

    def _completed(self, item: tuple[Running, Completion], verdict: Completed | FlowFabricError) -> None:
        running, _ = item
        if isinstance(verdict, InvalidInput):
            # The result cannot be stored: that is how this attempt ended.
            reason = f"the result cannot be stored: {verdict}"
            failure = Failure(authority=running.handle, reason=reason, failure_class="permanent", category="bad_result")
            self._failures.put((running, failure))
            return
        self.held.pop(running.handle.attempt_id, None)
        if isinstance(verdict, FlowFabricError):
            log.warning("execution %s: its result was refused: %s", running.claimed.execution_id, verdict)
        else:
            self.completed_count += 1
        if not self._completions.pending:
            self._slot_free.set()

    async def _fail(self, items: Sequence[tuple[Running, Failure]]) -> Sequence[Any]:
        return await self.engine.fail_many([failure for _, failure in items])

    def _failed(self, item: tuple[Running, Failure], verdict: Any) -> None:
        running, failure = item
        self.held.pop(running.handle.attempt_id, None)
        first_line = failure.reason.partition("\n")[0]
        if isinstance(verdict, FlowFabricError):
            log.warning("execution %s: its failure was refused: %s", running.claimed.execution_id, verdict)
            return
        self.failed_count += 1
        log.info(
            "execution %s (%s) failed: %s", running.claimed.execution_id, running.claimed.execution_kind, first_line
        )

    async def record(self, handle: Handle, step: NewStep) -> datetime | FlowFabricError | None:
        """Remember a step, together with those of other executions."""
        item = _Record(handle, step, self.loop.create_future())
        self._records.put(item)
        answer: datetime | FlowFabricError | None = await item.answer
        return answer

    async def _record_steps(self, items: Sequence[_Record]) -> Sequence[datetime | FlowFabricError | None]:
        return await self.engine.record_steps([(item.handle, item.step) for item in items])

    @staticmethod
    def _recorded(item: _Record, verdict: datetime | FlowFabricError | None) -> None:
        if not item.answer.done():
            item.answer.set_result(verdict)

    async def load_steps(self, execution_id: ExecutionId) -> list[Step]:
        """What is remembered of an execution."""
        item = _Read(execution_id, self.loop.create_future())
        self._reads.put(item)
        found: list[Step] | FlowFabricError = await item.answer
        if isinstance(found, FlowFabricError):
            raise found
        return found

    async def _read_steps(self, items: Sequence[_Read]) -> Sequence[list[Step] | FlowFabricError]:
        found: dict[ExecutionId, list[Step]] = {item.execution_id: [] for item in items}
        for step in await self.engine.read_steps(list(found)):
            found[step.execution_id].append(step)
        return [found[item.execution_id] for item in items]

    @staticmethod
    def _read(item: _Read, verdict: list[Step] | FlowFabricError) -> None:
        if not item.answer.done():
            item.answer.set_result(verdict)


class _Record:
    __slots__ = ("answer", "handle", "step")

    def __init__(self, handle: Handle, step: NewStep, answer: asyncio.Future[Any]) -> None:
        self.handle = handle
        self.step = step
        self.answer = answer


class _Read:
    __slots__ = ("answer", "execution_id")

    def __init__(self, execution_id: ExecutionId, answer: asyncio.Future[Any]) -> None:
        self.execution_id = execution_id
        self.answer = answer


def _weights(lanes: Sequence[str] | Mapping[str, int]) -> dict[str, int]:
    if isinstance(lanes, str):
        raise InvalidInput(f"got the text {lanes!r}", field="lanes", allowed="a list of names, or names with weights")
    weights = dict(lanes) if isinstance(lanes, Mapping) else dict.fromkeys(lanes, 1)
    if not weights:
        raise InvalidInput("no lane named", field="lanes", allowed="at least one lane")
    for lane, weight in weights.items():
        check_lane(lane, "lanes")
        if type(weight) is not int or not 1 <= weight <= 100:
            raise InvalidInput(f"{lane} has weight {weight!r}", field="lanes", allowed="1..100")
    return weights


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
