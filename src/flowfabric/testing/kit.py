"""The kit: runs apps on the database of one test, with a real worker in this process, crashes and a movable clock."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, overload

from msgspec import UNSET

from flowfabric.app.app import App
from flowfabric.app.task import Task
from flowfabric.client import current
from flowfabric.client.flow_run import FlowRun
from flowfabric.client.run import Run
from flowfabric.engine import Engine
from flowfabric.errors import InvalidInput, StepsChanged, TaskFailed
from flowfabric.testing.clock import Clock
from flowfabric.testing.duties import has_ended, keep_up, run_duties, until_idle
from flowfabric.testing.engines import Engines
from flowfabric.testing.errors import CrashChangedResult, NotFinished
from flowfabric.testing.faults import Crash, Crashed, CrashReport, Faults, Point
from flowfabric.testing.worker import KitWorker
from flowfabric.values.history import Fit, History
from flowfabric.worker.dry_run import DryRuns
from flowfabric.worker.schedules import declare

P = ParamSpec("P")
R = TypeVar("R")
_MAX_IDLE_ROUNDS = 5  # after this many, executions that wait are not for these workers
_MOST_JUMPS = 10_000


class Kit:
    """Runs the tasks of apps on one database. It can be created and closed without an event loop; its methods need one.

    Worker, steps, leases and retries are the real ones. Only the duties are run by the kit itself, immediately.
    """

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.capabilities: set[str] = set()
        self.clock = Clock(self.engine, lambda: list(self._workers))
        self._faults = Faults()
        self._workers: list[KitWorker] = []
        self._engines = Engines()
        self._is_at_work = False
        # An app of the kit's own, for its connections.
        self._own = App(dsn, name=f"flowfabric testing kit {id(self)}", notifications=False, connections=2)
        self._used: dict[App, tuple[str | None, Any]] = {}
        self._runner: asyncio.Runner | None = None

    # Life

    def use(self, *apps: App) -> None:
        """Point apps to this database and work for them until the kit is closed. Using one again changes nothing.

        `run_inline` and `crash_everywhere` use the app of their task by themselves.
        """
        for app in apps:
            if not isinstance(app, App):
                raise InvalidInput(f"got {type(app).__name__}", field="app", allowed="an App")
            if app not in self._used:
                self._used[app] = (app.dsn, app._clients)
                app.dsn, app._clients = self.dsn, weakref.WeakKeyDictionary()

    def close(self) -> None:
        """Restore the apps and close all connections. Inside a coroutine use `aclose`."""
        for loop, work in self._leave():
            _finish(loop, work)
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    async def aclose(self) -> None:
        """`close` for coroutines."""
        here = asyncio.get_running_loop()
        for loop, work in self._leave():
            await (work if loop is here else asyncio.to_thread(_finish, loop, work))
        if self._runner is not None:
            await asyncio.to_thread(self._runner.close)
            self._runner = None

    def _leave(self) -> list[tuple[asyncio.AbstractEventLoop, Coroutine[Any, Any, None]]]:
        """Restore the apps; returns the coroutines that close the connections, with their loops."""
        left = [item for app in (self._own, *self._used) for item in app._clients.items()]
        for app, (dsn, clients) in self._used.items():
            app.dsn, app._clients = dsn, clients
        self._used.clear()
        self._own._clients = weakref.WeakKeyDictionary()
        return [*self._engines.leave(), *((loop, shared.close()) for loop, shared in left)]

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
        """For synchronous tests: runs what an async test awaits, as in `kit.wait(kit.run_inline(task))`."""
        if self._runner is None:
            # With a factory of its own the runner leaves the thread's event loop alone.
            self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        return self._runner.run(_as_coroutine(work))

    async def engine(self) -> Engine:
        """An engine on this database, to inspect its contents. The kit closes it."""
        return (await self._own.client()).engine

    # Running

    async def run_inline(self, task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Submit a task, work until it ends, and return its result; raises `TaskFailed` as `run.result()` does.

        Whenever there is nothing to do, the kit moves the clock forward to the next timer: sleeps, retries and timeouts
        take no time. `NotFinished` if no timer is left and the task has not ended.
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
        """Work until a submitted task or flow ends, and return its result; like `run_inline`."""
        with self._alone():
            # A worker that crashes closes the connections of its app, so use those of the kit.
            await self._work((await self._own.client()).flow(run) if isinstance(run, FlowRun) else run)
            return await run.result()

    async def run_all(self) -> None:
        """Work until there is nothing to do now. Executions that wait for a time keep waiting."""
        if not self._used:
            raise InvalidInput("no app is in use", field="app", allowed="kit.use(app) first")
        with self._alone():
            await self._work(None)

    @contextlib.asynccontextmanager
    async def worker(self, app: App) -> AsyncIterator[KitWorker]:
        """Run a worker beside the test, for things that must happen while a handler runs. It also runs the duties."""
        with self._alone():
            self.use(app)
            engine = await self.engine()
            await declare(engine, app)
            async with self._hired(app, await self._lanes(engine)) as worker:
                duties = asyncio.create_task(keep_up(engine), name="flowfabric testing duties")
                try:
                    yield worker
                finally:
                    duties.cancel()
                    (ended,) = await asyncio.gather(duties, return_exceptions=True)
                if isinstance(ended, Exception):
                    raise ended
        self._raise_trouble()

    async def _work(self, run: Run[Any] | FlowRun | None) -> None:
        """Work until the run ends, or without a run until there is nothing to do. Replaces workers that crash."""
        engine = await self.engine()
        for app in self._used:
            await declare(engine, app)
        await run_duties(engine)
        while await self._shift(engine, run):
            pass
        self._raise_trouble()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._is_at_work or current.running.get() is not None:
            raise InvalidInput(
                "the kit is already running", field="kit", allowed="one call at a time, and none inside a handler"
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
        """Run one worker per app; returns whether new ones are needed, because one crashed or a lane is new."""
        lanes = await self._lanes(engine)
        jumps = idle_rounds = begun = 0
        async with contextlib.AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(self._hired(app, lanes)) for app in self._used]
            while True:
                await until_idle(engine, workers, run)
                before, begun = begun, sum(worker.begun for worker in workers)
                idle_rounds = idle_rounds + 1 if begun == before else 0
                if self._faults.trouble or (run is not None and await has_ended(engine, run)):
                    return False
                if any(worker.dead.is_set() for worker in workers) or await self._lanes(engine) != lanes:
                    return True
                if await run_duties(engine):
                    continue
                if idle_rounds < _MAX_IDLE_ROUNDS and any(
                    stats.depth or stats.running for stats in await engine.lane_stats()
                ):
                    continue  # a claim skips executions that another transaction, such as a duty, has locked
                if run is None:
                    return False
                jumps += 1
                if jumps > _MOST_JUMPS or await self.clock.advance_to_next() is None:
                    if await has_ended(engine, run):
                        return False  # its last execution ended after the check above
                    raise NotFinished(await self._why(engine, run))
                await run_duties(engine)

    @contextlib.asynccontextmanager
    async def _hired(self, app: App, lanes: frozenset[str]) -> AsyncIterator[KitWorker]:
        wanted = [task.defaults.capabilities for task in app.tasks.values()]
        capabilities = self.capabilities.union(*(each for each in wanted if each is not UNSET))
        worker = KitWorker(app, self._faults, self._engines, lanes=lanes, capabilities=capabilities)
        self._workers.append(worker)
        try:
            async with worker:
                yield worker
        finally:
            self._workers.remove(worker)
            await self._bury(worker)

    async def _bury(self, worker: KitWorker) -> None:
        """Let the leases of a crashed worker lapse now, so that the next worker need not wait for that."""
        engine = await self.engine()
        for at in range(0, len(worker.left_behind), 1000):
            await engine.renew_many(worker.left_behind[at : at + 1000], lease_ttl=timedelta(milliseconds=1))
        if worker.left_behind:
            await asyncio.sleep(0.002)
            await run_duties(engine)

    async def _lanes(self, engine: Engine) -> frozenset[str]:
        declared = [task.defaults.lane for app in self._used for task in app.tasks.values()]
        known = [stats.lane_id for stats in await engine.lane_stats()]
        return frozenset({"default", *known, *(lane for lane in declared if lane is not UNSET)})

    async def _why(self, engine: Engine, run: Run[Any] | FlowRun) -> str:
        if isinstance(run, FlowRun):
            states = await run.states()
            left = [f"{name} is {state.value}" for name, state in states.items() if not state.is_terminal]
            return f"no timer is left in flow {run.id}: {', '.join(left[:10])}"
        found = await engine.read_execution(run.execution_id)
        if found is None:
            return f"execution {run.execution_id} does not exist in this database"
        known = {name for app in self._used for name in app.tasks}
        reason = found.blocking_detail or found.blocking_reason
        if run.kind not in known:
            reason = f"no task of that name in the apps in use ({', '.join(sorted(known)) or 'none'})"
        return (
            f"{run.kind or 'execution'} {run.execution_id} is {found.public_state.value} and no timer is left: {reason}"
        )

    # Faults

    @contextlib.contextmanager
    def crash_after(
        self, step: str, *, n: int | None = None, task: Task[Any, Any] | None = None, times: int = 1
    ) -> Iterator[Crash]:
        """Kill the worker right after a step was recorded. The worker that takes over does not repeat the step.

        `n` selects one use of the name, counted from 0; by default any. `NotReached` at the end of the block unless it
        happened `times` times. Besides your own steps there are `sleep`, `now`, `result`, `submit <task name>` and
        `flow <flow name>`.
        """
        with self._faults.crash("after", step, n=n, task=None if task is None else task.name, times=times) as crash:
            yield crash

    @contextlib.contextmanager
    def crash_before(
        self, step: str, *, n: int | None = None, task: Task[Any, Any] | None = None, times: int = 1
    ) -> Iterator[Crash]:
        """Kill the worker after the function of a step has run, but before it is recorded: it runs again."""
        with self._faults.crash("before", step, n=n, task=None if task is None else task.name, times=times) as crash:
            yield crash

    @contextlib.contextmanager
    def replay_always(self) -> Iterator[None]:
        """Re-run handlers from the top after every step, and once more after they end.

        `Nondeterministic` if one then takes other steps or ends differently.
        """
        with self._faults.replaying():
            yield

    async def crash_everywhere(self, task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> CrashReport[R]:
        """Run a task to learn its steps, then once per step with a crash after it; all runs must have the same result.

        This includes the steps of tasks it submits. `CrashChangedResult` names the step after which a crash changed the
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

    # Changed code

    async def check_recorded(self, app: App, *histories: History | Path | str | bytes) -> list[Fit]:
        """Compare the app's code with executions that `flowfabric export` wrote: paths, their contents, or records.

        The handlers run up to the first thing that is not recorded. Raises `StepsChanged` for the first execution that
        this code would not continue; returns how each fits otherwise.
        """
        fits: list[Fit] = []
        async with DryRuns(app) as runs:
            for one in histories:
                data = one.read_bytes() if isinstance(one, Path) else one
                fit = await runs.check(data if isinstance(data, History) else History.decode(data))
                if not fit.is_good:
                    raise StepsChanged(
                        f"{fit.kind} {fit.execution_id} {fit.verdict}: {fit.why}", execution_id=fit.execution_id
                    )
                fits.append(fit)
        return fits

    async def _run_apart(self, task: Task[Any, R], args: Any, kwargs: Any) -> tuple[R, list[Point]]:
        """Run a task as a new execution; returns its result and the recorded steps."""
        self.use(task.app)
        run = await task.submit(*args, **kwargs)
        if not run.is_new:
            raise InvalidInput(
                "the idempotency key is in use",
                field="idempotency_key",
                allowed="none: every run must be a new execution",
            )
        seen = len(self._faults.recorded)
        await self._work(run)
        return await run.result(), [point for _, point in self._faults.recorded[seen:]]


def _finish(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on the loop it belongs to. If the loop is closed, there is nothing left to do."""
    if loop.is_closed():
        work.close()
    elif loop.is_running():
        asyncio.run_coroutine_threadsafe(work, loop).result(10)
    else:
        loop.run_until_complete(work)


async def _as_coroutine(work: Awaitable[R]) -> R:
    return await work
