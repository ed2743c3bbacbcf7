"""The kit: an app on the database of one test, run in this process by a real worker, with crashes and time at hand."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Awaitable, Collection, Coroutine, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from msgspec import UNSET, Struct

from flowfabric.app.app import App
from flowfabric.app.task import Task
from flowfabric.client import current
from flowfabric.client.flow_run import FlowRun
from flowfabric.client.run import Run
from flowfabric.engine import Engine
from flowfabric.engine.hooks import TimerKind
from flowfabric.errors import InvalidInput, TaskFailed
from flowfabric.testing.clock import Clock
from flowfabric.testing.errors import CrashChangedResult, NotFinished
from flowfabric.testing.faults import Crash, Faults, Point
from flowfabric.testing.worker import KitWorker
from flowfabric.worker.schedules import declare, fire

P = ParamSpec("P")
R = TypeVar("R")
# What the duties do for running work. Retention is left out: a test may look at what ended long ago.
_DUTIES = tuple(kind for kind in TimerKind if kind is not TimerKind.RETENTION)
_PUMP = 0.05  # seconds between two rounds of the duties while handlers run
_LOOKS = 5  # after so many in vain, what is there to be claimed is not for these workers
_MOST_JUMPS = 10_000


class Crashed(Struct, Generic[R], frozen=True):
    """One run with a crash in it: after which step, and what came of it."""

    point: Point
    result: R


class CrashReport(Struct, Generic[R], frozen=True):
    """What `crash_everywhere` found: the result without a crash, and a run per step with one."""

    result: R
    crashes: Sequence[Crashed[R]]

    @property
    def runs(self) -> int:
        """How often the task was run altogether."""
        return 1 + len(self.crashes)


class Kit:
    """Runs the tasks of apps on one database. Needs no event loop to be made or closed; its methods run in yours.

    Worker and steps, leases and retries are the real ones; only the duties are run by the kit itself, at once.
    """

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.capabilities: set[str] = set()
        self.clock = Clock(dsn, lambda: list(self._workers))
        self._faults = Faults()
        self._workers: list[KitWorker] = []
        self._is_at_work = False
        # Its client is the kit's own way to the database.
        self._own = App(dsn, name=f"flowfabric testing kit {id(self)}", notifications=False, connections=2)
        self._used: dict[App, tuple[str | None, Any]] = {}
        self._runner: asyncio.Runner | None = None

    # Life

    def use(self, *apps: App) -> None:
        """Let apps submit to this database and be worked for, until the kit is closed. Using one again changes nothing.

        `run_inline` and `crash_everywhere` use the app of their task by themselves.
        """
        for app in apps:
            if not isinstance(app, App):
                raise InvalidInput(f"got {type(app).__name__}", field="app", allowed="an App")
            if app not in self._used:
                self._used[app] = (app.dsn, app._clients)
                app.dsn, app._clients = self.dsn, weakref.WeakKeyDictionary()

    def close(self) -> None:
        """Give the apps back as they were and close what was opened. `aclose` does it inside a coroutine."""
        for loop, work in self._leave():
            _finish(loop, work)
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    async def aclose(self) -> None:
        """What `close` does, for coroutines."""
        here = asyncio.get_running_loop()
        for loop, work in self._leave():
            await (work if loop is here else asyncio.to_thread(_finish, loop, work))
        if self._runner is not None:
            await asyncio.to_thread(self._runner.close)
            self._runner = None

    def _leave(self) -> list[tuple[asyncio.AbstractEventLoop, Coroutine[Any, Any, None]]]:
        """Give the apps back; what is left to do, and on which loops."""
        left = [item for app in (self._own, *self._used) for item in app._clients.items()]
        for app, (dsn, clients) in self._used.items():
            app.dsn, app._clients = dsn, clients
        self._used.clear()
        self._own._clients = weakref.WeakKeyDictionary()
        return [(loop, shared.close()) for loop, shared in left]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def wait(self, work: Awaitable[R]) -> R:
        """For tests that are plain functions: what `await` would give, as in `kit.wait(kit.run_inline(task))`."""
        if self._runner is None:
            # With a factory of its own the runner leaves the thread's event loop alone.
            self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        return self._runner.run(_as_coroutine(work))

    async def engine(self) -> Engine:
        """An engine on this database, for looking behind the tasks. The kit closes it."""
        return (await self._own.client()).engine

    # Running

    async def run_inline(self, task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Submit a task, work until it has ended, and give its result; `TaskFailed` as `run.result()` would raise it.

        Whenever there is nothing to do, the clock is set forward to what is due next: sleeps, retries and timeouts take
        no time. `NotFinished` when nothing is due and it has not ended.
        """
        with self._alone():
            self.use(task.app)
            run = await task.submit(*args, **kwargs)
            await self._work(run)
            return await run.result()

    @overload
    async def run_until_ended(self, run: Run[R]) -> R: ...
    @overload
    async def run_until_ended(self, run: FlowRun) -> dict[str, Any]: ...
    async def run_until_ended(self, run: Run[Any] | FlowRun) -> Any:
        """Work until what was submitted before, a task or a flow, has ended, and give its result, as `run_inline`."""
        with self._alone():
            # A worker that dies takes the connections of its app with it: the kit looks through its own.
            await self._work((await self._own.client()).flow(run) if isinstance(run, FlowRun) else run)
            return await run.result()

    async def run_all(self) -> None:
        """Work until there is nothing to do now. What waits for a time to come stays as it is."""
        if not self._used:
            raise InvalidInput("no app is in use", field="app", allowed="kit.use(app) first")
        with self._alone():
            await self._work(None)

    @contextlib.asynccontextmanager
    async def worker(self, app: App) -> AsyncIterator[KitWorker]:
        """A worker beside the test, for what has to happen while a handler runs. Duties are run as time passes."""
        with self._alone():
            self.use(app)
            engine = await self.engine()
            await declare(engine, app)
            async with self._hired(app, await self._lanes(engine)) as worker:
                duties = asyncio.create_task(_keep_up(engine), name="flowfabric testing duties")
                try:
                    yield worker
                finally:
                    duties.cancel()
                    (ended,) = await asyncio.gather(duties, return_exceptions=True)
                if isinstance(ended, Exception):
                    raise ended
        self._raise_trouble()

    async def _work(self, run: Run[Any] | FlowRun | None) -> None:
        """Work until the run has ended, or without one until there is nothing to do; with new workers if some die."""
        engine = await self.engine()
        for app in self._used:
            await declare(engine, app)
        await _run_duties(engine)
        while await self._shift(engine, run):
            pass
        self._raise_trouble()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._is_at_work or current.running.get() is not None:
            raise InvalidInput(
                "the kit is at work already", field="kit", allowed="one call at a time, and none inside a handler"
            )
        self._is_at_work = True
        try:
            yield
        finally:
            self._is_at_work = False

    def _raise_trouble(self) -> None:
        trouble, self._faults.trouble = self._faults.trouble, []
        if trouble:
            raise trouble[0]

    async def _shift(self, engine: Engine, run: Run[Any] | FlowRun | None) -> bool:
        """One life of a worker per app; whether others have to go on, because one died or a lane is new."""
        lanes = await self._lanes(engine)
        jumps = looks = begun = 0
        async with contextlib.AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(self._hired(app, lanes)) for app in self._used]
            while True:
                await _until_idle(engine, workers, run)
                before, begun = begun, sum(worker.begun for worker in workers)
                looks = looks + 1 if begun == before else 0
                if self._faults.trouble or (run is not None and await _has_ended(engine, run)):
                    return False
                if any(worker.dead.is_set() for worker in workers) or await self._lanes(engine) != lanes:
                    return True
                if await _run_duties(engine):
                    continue
                if looks < _LOOKS and any(stats.depth or stats.running for stats in await engine.lane_stats()):
                    continue  # a claim passes over what somebody else, a duty say, has locked at that moment
                if run is None:
                    return False
                jumps += 1
                if jumps > _MOST_JUMPS or await self.clock.advance_to_next() is None:
                    raise NotFinished(await self._why(engine, run))
                await _run_duties(engine)

    @contextlib.asynccontextmanager
    async def _hired(self, app: App, lanes: frozenset[str]) -> AsyncIterator[KitWorker]:
        wanted = [task.defaults.capabilities for task in app.tasks.values()]
        capabilities = self.capabilities.union(*(each for each in wanted if each is not UNSET))
        worker = KitWorker(app, self._faults, lanes=lanes, capabilities=capabilities)
        self._workers.append(worker)
        try:
            async with worker:
                yield worker
        finally:
            self._workers.remove(worker)
            await self._bury(worker)

    async def _bury(self, worker: KitWorker) -> None:
        """Let the leases of a worker that died lapse now, so that nobody has to wait until they do."""
        engine = await self.engine()
        for at in range(0, len(worker.left_behind), 1000):
            await engine.renew_many(worker.left_behind[at : at + 1000], lease_ttl=timedelta(milliseconds=1))
        if worker.left_behind:
            await asyncio.sleep(0.002)
            await _run_duties(engine)

    async def _lanes(self, engine: Engine) -> frozenset[str]:
        declared = [task.defaults.lane for app in self._used for task in app.tasks.values()]
        known = [stats.lane_id for stats in await engine.lane_stats()]
        return frozenset({"default", *known, *(lane for lane in declared if lane is not UNSET)})

    async def _why(self, engine: Engine, run: Run[Any] | FlowRun) -> str:
        if isinstance(run, FlowRun):
            states = await run.states()
            left = [f"{name} is {state.value}" for name, state in states.items() if not state.is_terminal]
            return f"nothing more is due in flow {run.id}: {', '.join(left[:10])}"
        found = await engine.read_execution(run.execution_id)
        if found is None:
            return f"execution {run.execution_id} is not stored in this database"
        known = {name for app in self._used for name in app.tasks}
        reason = found.blocking_detail or found.blocking_reason
        if run.kind not in known:
            reason = f"no task of that name in the apps in use ({', '.join(sorted(known)) or 'none'})"
        return (
            f"{run.kind or 'execution'} {run.execution_id} is {found.public_state.value} and nothing more is due:"
            f" {reason}"
        )

    # Faults

    @contextlib.contextmanager
    def crash_after(
        self, step: str, *, n: int | None = None, task: Task[Any, Any] | None = None, times: int = 1
    ) -> Iterator[Crash]:
        """Kill the worker right after a step was recorded. It is not done again by the worker that takes over.

        `n` is which use of the name, from 0; without it any. `NotReached` at the end of the block unless it happened
        `times` times. Beside your own steps there are `sleep`, `now`, `result`, `submit <task name>` and
        `flow <flow name>`, before it is submitted.
        """
        with self._faults.crash("after", step, n=n, task=None if task is None else task.name, times=times) as crash:
            yield crash

    @contextlib.contextmanager
    def crash_before(
        self, step: str, *, n: int | None = None, task: Task[Any, Any] | None = None, times: int = 1
    ) -> Iterator[Crash]:
        """Kill the worker when the function of a step has run and is not recorded yet: it is run again."""
        with self._faults.crash("before", step, n=n, task=None if task is None else task.name, times=times) as crash:
            yield crash

    @contextlib.contextmanager
    def replay_always(self) -> Iterator[None]:
        """Run handlers again from the top after every step, and once more after their end.

        `Nondeterministic` when one of them then does other steps or ends otherwise than before.
        """
        with self._faults.replaying():
            yield

    async def crash_everywhere(self, task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> CrashReport[R]:
        """Run a task to learn its steps, then once per step with a crash after it; all must give the same result.

        Steps of the tasks it submits are among them. `CrashChangedResult` says after which step a crash changed the
        result or made the task fail.
        """
        with self._alone():
            expected, points = await self._run_apart(task, args, kwargs)
            crashes: list[Crashed[R]] = []
            for point in dict.fromkeys(points):
                crash = self._faults.crash("after", point.step, n=point.n, task=point.task, times=1)
                try:
                    with crash:
                        result, _ = await self._run_apart(task, args, kwargs)
                except TaskFailed as error:
                    raise CrashChangedResult(f"after a crash after {point} the task failed: {error}") from error
                if result != expected:
                    raise CrashChangedResult(
                        f"after a crash after {point} the result was {result!r}, without it {expected!r}"
                    )
                crashes.append(Crashed(point, result))
            return CrashReport(expected, crashes)

    async def _run_apart(self, task: Task[Any, R], args: Any, kwargs: Any) -> tuple[R, list[Point]]:
        """Run a task as a new execution; also what steps were done meanwhile."""
        self.use(task.app)
        run = await task.submit(*args, **kwargs)
        if not run.is_new:
            raise InvalidInput(
                "the idempotency key is known", field="idempotency_key", allowed="none: every run must be a new one"
            )
        seen = len(self._faults.recorded)
        await self._work(run)
        return await run.result(), [point for _, point in self._faults.recorded[seen:]]


async def _run_duties(engine: Engine) -> int:
    """What is due now; answers how much that was."""
    handled = 0
    for kind in _DUTIES:
        while True:
            done = await engine.run_timers(kind)
            handled += done.handled
            if not done.more or not done.handled:
                break
    for due in await engine.due_schedules():
        handled += await fire(engine, due)
    return handled + await _run_flow_duties(engine)


async def _run_flow_duties(engine: Engine) -> int:
    """What ends have left to do in flows."""
    handled = 0
    while True:
        cascade = await engine.dispatch_cascades()
        siblings = await engine.cancel_siblings()
        members = await engine.reconcile_cancellations()
        done = cascade.reconciled + cascade.resolved + siblings.cancelled + siblings.already_terminal + members.handled
        handled += done
        if not done:
            return handled


async def _keep_up(engine: Engine) -> None:
    while True:
        await _run_duties(engine)
        await asyncio.sleep(_PUMP)


async def _until_idle(engine: Engine, workers: Collection[KitWorker], run: Run[Any] | FlowRun | None) -> None:
    """Wait until no worker has anything to do, one is dead, or the run has ended; what comes due meanwhile is done."""
    idle = asyncio.ensure_future(_idle(workers))
    waits: set[asyncio.Future[Any]] = {idle}
    if run is not None:
        waits.add(asyncio.ensure_future(run.wait() if isinstance(run, FlowRun) else run.outcome()))
    try:
        while not (await asyncio.wait(waits, timeout=_PUMP, return_when=asyncio.FIRST_COMPLETED))[0]:
            await _run_duties(engine)
        for wait in waits:
            if wait.done() and not any(worker.dead.is_set() for worker in workers):
                wait.result()
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _idle(workers: Collection[KitWorker]) -> None:
    while True:
        before = sum(worker.begun for worker in workers)
        for worker in workers:
            await worker.settled()
            if worker.dead.is_set():
                return
        if before == sum(worker.begun for worker in workers):
            return


async def _has_ended(engine: Engine, run: Run[Any] | FlowRun) -> bool:
    if isinstance(run, FlowRun):
        return not await run.live()
    return bool(await engine.read_outcomes([run.execution_id]))


def _finish(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end on the loop it belongs to; one that is over has nothing left to close."""
    if loop.is_closed():
        work.close()
    elif loop.is_running():
        asyncio.run_coroutine_threadsafe(work, loop).result(10)
    else:
        loop.run_until_complete(work)


async def _as_coroutine(work: Awaitable[R]) -> R:
    return await work
