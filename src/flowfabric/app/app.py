"""The app: tasks, schedules and the database they run on.

    app = ff.App()

    @app.task(retry=ff.RetryPolicy(max_retries=5))
    async def publish(ctx: ff.Context, draft_id: int) -> str: ...

    run = await publish.submit(42)
    print(await run.result())

A worker runs the tasks; this module only declares them.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from msgspec import UNSET, Struct, UnsetType

from flowfabric.app.code import checked_versions
from flowfabric.app.context import Context
from flowfabric.app.declaring import store_limits
from flowfabric.app.flow_builder import Flow
from flowfabric.app.sync_context import SyncContext
from flowfabric.app.task import (
    Pool,
    StepsRule,
    Task,
    checked_exceptions,
    checked_function,
    checked_name,
    origin_of,
    task_name,
)
from flowfabric.client.client import AsyncClient
from flowfabric.client.hooks import HOOKS, check_hook
from flowfabric.client.limits import LimitNames
from flowfabric.client.run import connectors
from flowfabric.client.submission import Submission, TypedTask, check_task, new_submission
from flowfabric.contracts.codecs import AnyCodec, Codecs
from flowfabric.engine import Engine
from flowfabric.errors import InvalidInput
from flowfabric.middleware import Middleware, check_middlewares, layer
from flowfabric.values.binding import Bind, check_binds
from flowfabric.values.checks import check_tags, check_text
from flowfabric.values.cron import Cron
from flowfabric.values.durations import MAX_DURATION_MS, Duration, duration
from flowfabric.values.ids import mint_uuid
from flowfabric.values.options import OptionNames, Options, meant
from flowfabric.values.quota import MAX_JITTER, MAX_QUOTA, MAX_WINDOW
from flowfabric.values.spending import (
    Budget,
    BudgetSpec,
    Mode,
    OnBudget,
    QuotaSpec,
    check_amount,
    check_limit_name,
    check_mode,
    limits_of,
)
from flowfabric.values.timing import Every, parse_timing

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T = TypeVar("T")
S = TypeVar("S", BudgetSpec, QuotaSpec)
_LONGEST = timedelta(milliseconds=MAX_DURATION_MS)
CatchUp = Literal["skip", "one", "all"]
Overlap = Literal["skip", "queue", "cancel"]


class ScheduleSpec(Struct, frozen=True, kw_only=True):
    """A schedule as the code declares it; a worker of the app stores it when it starts."""

    name: str
    task: Task[Any, Any]
    timing: Cron | Every
    catch_up: CatchUp
    submission: Submission
    overlap: Overlap | None = None


class App:
    """Tasks, schedules and the database they run on.

    Without `dsn` the environment's `FLOWFABRIC_DSN` is used, and without that the embedded Postgres. `codecs` are
    applied to everything the app stores (arguments, results, steps, signals, failures); `also_read` are retired codecs
    that only read. `accept_plain=False` refuses data that no codec that binds (`BindingCodec`) has written.
    `namespace`, `lane` and other options given here are the defaults of all its tasks; `on_failure` and `on_escalate`,
    the names of tasks, apply to what is submitted from outside, and with `everywhere=True` to members of flows and
    what handlers submit too. `notifications=False, prepared_statements=False` suits a transaction-pooling proxy. Close
    it when it is no longer needed: `await app.close()`, or `async with app:`.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        name: str = "app",
        data_dir: Path | str | None = None,
        codecs: Sequence[AnyCodec] = (),
        also_read: Sequence[AnyCodec] = (),
        accept_plain: bool = True,
        middleware: Sequence[Middleware] = (),
        notifications: bool = True,
        prepared_statements: bool = True,
        connections: int = 10,
        everywhere: bool = False,
        **options: Unpack[OptionNames],
    ) -> None:
        self.dsn = None if dsn is None else check_text(dsn, "dsn", None)
        self.name = check_text(name, "name")
        self.data_dir = data_dir
        self.codecs = Codecs(codecs, also_read=also_read, accept_plain=accept_plain)
        self.middleware = check_middlewares(middleware)
        self.notifications = notifications
        self.prepared_statements = prepared_statements
        if type(connections) is not int or connections < 1:
            raise InvalidInput(f"got {connections!r}", field="connections", allowed="an integer from 1")
        self.connections = connections
        given = Options.of(options, inspect.signature(App).parameters.keys() - {"options"})
        # Hooks of the app are no defaults of its tasks: they do not apply to members of flows and children.
        self.defaults = given.replace(on_failure=UNSET, on_escalate=UNSET)
        self.on_failure, self.on_escalate = given.on_failure, given.on_escalate
        if type(everywhere) is not bool:
            raise InvalidInput(f"got {everywhere!r}", field="everywhere", allowed="True or False")
        self.everywhere = everywhere
        self._hooks: dict[tuple[str, str], Task[Any, Any]] = {}
        self.tasks: dict[str, Task[Any, Any]] = {}
        self.declared: dict[str, ScheduleSpec] = {}
        self.limit_names = LimitNames()
        self.provided: dict[type, Any] = {}
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = weakref.WeakKeyDictionary()
        self._adopted: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[AsyncClient]]
        self._adopted = weakref.WeakKeyDictionary()
        self.key = mint_uuid().hex  # which app of which process
        connectors[self.key] = self

    def __repr__(self) -> str:
        return f"<App {self.name}: {len(self.tasks)} tasks>"

    @property
    def address(self) -> tuple[str | None, str | None]:
        """Which database it is: apps with the same address share one. Contains the password, if there is one."""
        return self.dsn, None if self.data_dir is None else str(self.data_dir)

    # Tasks

    @overload
    def task(self, function: Callable[Concatenate[Context, P], Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[SyncContext, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        *,
        name: str | None = None,
        pool: Pool = "thread",
        permanent: Sequence[type[Exception]] = (),
        steps: StepsRule = "strict",
        version: int | None = None,
        compatible_with: Collection[int] = (),
        on_budget: OnBudget = "pause",
        **options: Unpack[OptionNames],
    ) -> _Decorator: ...

    def task(
        self,
        function: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        pool: Pool = "thread",
        permanent: Sequence[type[Exception]] = (),
        steps: StepsRule = "strict",
        version: int | None = None,
        compatible_with: Collection[int] = (),
        on_budget: OnBudget = "pause",
        **options: Unpack[OptionNames],
    ) -> Any:
        """Make a function a task, with or without options: `@app.task` or `@app.task(retry=...)`.

        `name` is stored with every execution (default: the function's name); keep it when the function moves.
        `pool="process"` runs a synchronous function in a child process. `permanent` are exceptions that are never
        retried. `steps="lenient"` allows an execution to end without the steps that an earlier run of it recorded.
        An execution keeps the `version` of the worker that starts it: only workers of this version run it from then on,
        or of one that says that it is `compatible_with` it. `on_budget` says what happens to a run that would use more
        than its budget: it pauses until there is room, `BudgetExceeded` is raised, or it fails. The other keywords are
        in `Options`.
        """
        chosen = self.defaults.merged(
            Options.of(options, ("name", "pool", "permanent", "steps", "version", "compatible_with", "on_budget"))
        )
        for field in HOOKS:
            if not isinstance(getattr(chosen, field), str | UnsetType | None):
                self.hook(getattr(chosen, field), field)
        never = checked_exceptions(permanent)
        versions = checked_versions(version, compatible_with)

        def decorate(fn: Callable[..., Any]) -> Task[Any, Any]:
            fn = checked_function(fn)
            title = task_name(fn, name)
            made: Task[Any, Any] = Task(
                self,
                fn,
                name=title,
                options=chosen,
                pool=pool,
                permanent=never,
                steps=steps,
                versions=versions,
                on_budget=on_budget,
            )
            before = self.tasks.get(title)
            # The same function again means that its module was loaded again.
            if before is not None and origin_of(before.function) != origin_of(fn):
                raise InvalidInput(
                    f"{title!r} is already the task {'.'.join(origin_of(before.function))}",
                    field="name",
                    allowed="one task per name",
                )
            self.tasks[title] = made
            return made

        return decorate if function is None else decorate(function)

    @property
    def lanes(self) -> list[str]:
        """The lanes that its tasks and schedules use."""
        used = [
            *(task.defaults for task in self.tasks.values()),
            *(one.submission.options for one in self.declared.values()),
        ]
        return sorted({str(options.lane) if options.lane else "default" for options in used}) or ["default"]

    def find_task(self, name: str) -> Task[Any, Any] | None:
        """Return the task with this name."""
        return self.tasks.get(name)

    def hook(self, given: Any, field: str) -> Task[Any, Any]:
        """Return the task that an option `on_failure` or `on_escalate` names, if it can run as that hook."""
        task = given if isinstance(given, Task) else self.tasks.get(getattr(given, "name", given))
        if task is None:
            near = meant(str(given), self.tasks)
            problem = f"there is no task {given!r}" + (f"; {near}" if near else "")
            raise InvalidInput(problem, field=field, allowed="a task of the app, or its name")
        if self._hooks.get((field, task.name)) is not task:
            check_hook(task, field)
            self._hooks[field, task.name] = task
        return task

    def provide(self, cls: type[T], maker: T | Callable[[], Any]) -> None:
        """Register the object injected into parameters annotated `ff.Data[cls]`, or a function that makes it.

        Each worker calls the function once when it starts. It may be async or return a context manager, which the
        worker exits when it stops.
        """
        if not isinstance(cls, type):
            raise InvalidInput(f"got {cls!r}", field="cls", allowed="a class")
        if not isinstance(maker, cls) and not callable(maker):
            raise InvalidInput(
                f"got {type(maker).__name__}", field="maker", allowed=f"a {cls.__qualname__}, or a function"
            )
        self.provided[cls] = maker

    # Limits

    def budget(
        self,
        name: str,
        *,
        hard: Mapping[str, int] | None = None,
        soft: Mapping[str, int] | None = None,
        every: Duration | None = None,
        mode: Mode = "strict",
        bind: Bind | Sequence[Bind] | None = None,
    ) -> BudgetSpec:
        """Declare a budget: what the executions that name it in the option `budgets` may use together.

        `hard` and `soft` are limits by dimension, which is any name. A call that does not fit under a hard limit is
        refused; a soft limit is reported and stops nothing; with `mode="warn"` hard limits stop nothing either. With
        `every` the usage begins again at 0 after each such period. Workers store it when they start, and `prepare`
        does; a changed declaration changes the limits, an unchanged one leaves them as operators set them since.
        With `bind` everything that is submitted with such a scope gets it too, without naming it.
        """
        limits = limits_of(hard, {}, "hard"), limits_of(soft, {}, "soft")
        span = None if every is None else duration(every, "every")
        if span is not None and not timedelta(seconds=1) <= span <= _LONGEST:
            raise InvalidInput(f"got {every!r}", field="every", allowed="from one second to a century")
        spec = BudgetSpec(
            name=check_limit_name(name),
            hard=limits[0],
            soft=limits[1],
            every=span,
            mode=check_mode(mode),
            bind=check_binds(bind),
        )
        return _declared(self.limit_names.budgets, spec, "budget")

    def quota(
        self,
        name: str,
        *,
        concurrent: int | None = None,
        per_window: int | None = None,
        window: Duration = 60,
        key: str | None = None,
        jitter: Duration = 0,
        bind: Bind | Sequence[Bind] | None = None,
    ) -> QuotaSpec:
        """Declare a quota: how many of the executions that name it in the option `quotas` may run.

        At most `concurrent` run at the same time, and at most `per_window` start within each `window`, which slides.
        Executions beyond that wait without a worker. With `key`, the name of a tag, the numbers hold for each value of
        that tag, and submissions that name it without the tag are refused. `jitter` spreads the time at which they are
        tried again. It is stored and bound as budgets are; bound submissions without the tag share the value `default`.
        """
        for field, value in (("concurrent", concurrent), ("per_window", per_window)):
            if value is not None:
                check_amount(value, field, least=1, most=MAX_QUOTA)
        if concurrent is None and per_window is None:
            raise InvalidInput("neither is given", field="concurrent", allowed="concurrent, per_window, or both")
        span, spread = duration(window, "window"), duration(jitter, "jitter")
        if span % timedelta(seconds=1) or not timedelta(seconds=1) <= span <= MAX_WINDOW:
            raise InvalidInput(f"got {window!r}", field="window", allowed="whole seconds, from 1 to those of a year")
        if not timedelta(0) <= spread <= MAX_JITTER:
            raise InvalidInput(f"got {jitter!r}", field="jitter", allowed="from zero to a day")
        if key is not None:
            check_tags({key: ""})
        spec = QuotaSpec(
            name=check_limit_name(name),
            concurrent=concurrent or 0,
            per_window=per_window or 0,
            window=span,
            key=key,
            jitter=spread,
            bind=check_binds(bind),
        )
        return _declared(self.limit_names.quotas, spec, "quota")

    async def prepare(self) -> list[str]:
        """Store the budgets and quotas that the app declares. Returns what is new or changed, in words.

        Workers do it when they start. Call it in a deployment whose submitters start before its workers.
        """
        return await store_limits((await self.client()).engine, self.limit_names)

    # Flows

    def flow(
        self,
        name: str,
        *,
        namespace: str | None = None,
        tags: Mapping[str, str] | None = None,
        budget: Budget | None = None,
    ) -> Flow:
        """Return a new flow: add tasks to it, then submit it as a whole. `name` says what kind of flow it is.

        `budget` is what all its nodes, those added later, and what they submit may use together.
        """
        chosen = namespace if namespace is not None else self.defaults.namespace or ""
        return Flow(self, name, namespace=chosen, tags=tags, budget=budget)

    # Schedules

    @overload
    def schedule(
        self,
        task: Task[..., Any],
        /,
        *,
        name: str | None = None,
        cron: str | None = None,
        every: Duration | None = None,
        timezone: str = "UTC",
        catch_up: CatchUp = "skip",
        overlap: Overlap | None = None,
        **kwargs: Any,
    ) -> ScheduleSpec: ...
    @overload
    def schedule(
        self,
        task: TypedTask[Concatenate[A, Q], Any],
        a: A,
        /,
        *,
        name: str | None = None,
        cron: str | None = None,
        every: Duration | None = None,
        timezone: str = "UTC",
        catch_up: CatchUp = "skip",
        overlap: Overlap | None = None,
        **kwargs: Any,
    ) -> ScheduleSpec: ...
    @overload
    def schedule(
        self,
        task: TypedTask[Concatenate[A, B, Q], Any],
        a: A,
        b: B,
        /,
        *,
        name: str | None = None,
        cron: str | None = None,
        every: Duration | None = None,
        timezone: str = "UTC",
        catch_up: CatchUp = "skip",
        overlap: Overlap | None = None,
        **kwargs: Any,
    ) -> ScheduleSpec: ...
    @overload
    def schedule(
        self,
        task: TypedTask[Concatenate[A, B, C, Q], Any],
        a: A,
        b: B,
        c: C,
        /,
        *more: Any,
        name: str | None = None,
        cron: str | None = None,
        every: Duration | None = None,
        timezone: str = "UTC",
        catch_up: CatchUp = "skip",
        overlap: Overlap | None = None,
        **kwargs: Any,
    ) -> ScheduleSpec: ...
    def schedule(
        self,
        task: Any,
        /,
        *args: Any,
        name: str | None = None,
        cron: str | None = None,
        every: Duration | None = None,
        timezone: str = "UTC",
        catch_up: CatchUp = "skip",
        overlap: Overlap | None = None,
        **kwargs: Any,
    ) -> ScheduleSpec:
        """Submit a task repeatedly: by a cron expression in a time zone, or at an interval.

        A worker stores the schedule when it starts. `catch_up` says what happens to times that passed while no worker
        ran: skip them, submit once for all of them, or submit once for each. `overlap` says what happens to a time at
        which the last execution has not ended: skip it, submit it when that has ended (`queue`), or cancel that;
        without it both run. `name` defaults to the task's name.
        Further keywords are arguments and options as in `submit`, except those that fix a time or a key.
        """
        check_task(task)
        chosen = checked_name(task.name if name is None else name)
        if catch_up not in ("skip", "one", "all"):
            raise InvalidInput(f"got {catch_up!r}", field="catch_up", allowed="skip, one, all")
        if overlap is not None and overlap not in ("skip", "queue", "cancel"):
            raise InvalidInput(f"got {overlap!r}", field="overlap", allowed="skip, queue, cancel")
        before = self.declared.get(chosen)
        # A task declared again means that its module was loaded again.
        if before is not None and before.task.function is task.function:
            raise InvalidInput(f"{chosen!r} is declared twice", field="name", allowed="one schedule per name")
        submission = new_submission(task, args, kwargs)
        for option in ("delay", "at", "idempotency_key"):
            if getattr(submission.options, option) not in (UNSET, None):
                raise InvalidInput("a schedule sets it for each submission", field=option, allowed="None")
        if isinstance(submission.options.deadline, datetime):
            raise InvalidInput("a fixed time would apply to every submission", field="deadline", allowed="a duration")
        # A wrong argument fails here, not when it fires. Limits that are not declared are found when it is stored.
        submission.replace(options=submission.options.replace(budgets=UNSET, quotas=UNSET)).item(bound=False)
        spec = ScheduleSpec(
            name=chosen,
            task=task,
            timing=parse_timing(cron, None if every is None else duration(every, "every"), timezone),
            catch_up=catch_up,
            overlap=overlap,
            submission=submission,
        )
        self.declared[chosen] = spec
        return spec

    # The database

    async def open_engine(self, **settings: Any) -> Engine:
        """Return a new engine on this app's database, with the middleware around engine calls."""
        engine = await Engine.connect(
            self.dsn,
            data_dir=self.data_dir,
            **{
                "max_size": self.connections,
                "notifications": self.notifications,
                "prepared_statements": self.prepared_statements,
                **settings,
            },
        )
        return layer(engine, self.middleware)

    async def client(self) -> AsyncClient:
        """Return the client of this event loop. It connects on first use and closes when the loop ends."""
        loop = asyncio.get_running_loop()
        if adopted := self._adopted.get(loop):
            return adopted[-1]
        shared = self._clients.get(loop)
        if shared is None:
            shared = self._clients[loop] = _Shared(self)
        return shared.client or await shared.connect()

    def adopt(self, client: AsyncClient) -> None:
        """Use this client in this event loop; its opener also closes it."""
        self._adopted.setdefault(asyncio.get_running_loop(), []).append(client)

    def forget(self, client: AsyncClient) -> None:
        """Undo `adopt`."""
        self._adopted[asyncio.get_running_loop()].remove(client)

    async def close(self) -> None:
        """Close the client of this event loop."""
        shared = self._clients.pop(asyncio.get_running_loop(), None)
        if shared is not None:
            await shared.close()

    async def __aenter__(self) -> Self:
        await self.client()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _declared(known: dict[str, S], spec: S, what: str) -> S:
    """Keep a declaration; a different one of the same name is refused."""
    before = known.setdefault(spec.name, spec)
    if before != spec:
        raise InvalidInput(
            f"{spec.name!r} is declared twice, with different limits", field="name", allowed=f"one {what} per name"
        )
    return spec


class _Shared:
    """The one client of an event loop."""

    # Kept until the loop ends, even if the app was collected: the garbage collector cannot close connections.
    alive: ClassVar[set[_Shared]] = set()

    def __init__(self, app: App) -> None:
        self._app = app
        self.client: AsyncClient | None = None
        self._loop = asyncio.get_running_loop()
        self._connecting = asyncio.Lock()
        self._lifetime: AsyncGenerator[AsyncClient, None] | None = None

    async def connect(self) -> AsyncClient:
        async with self._connecting:
            if self.client is None:
                # A loop closes its async generators when it ends.
                self._lifetime = self._live()
                self.client = await anext(self._lifetime)
        return self.client

    async def _live(self) -> AsyncGenerator[AsyncClient, None]:
        client = AsyncClient(await self._app.open_engine(), self._app)
        self.alive.difference_update([one for one in list(self.alive) if one._loop.is_closed()])
        self.alive.add(self)
        try:
            yield client
        finally:
            self.client = None
            self.alive.discard(self)
            clients = self._app._clients
            if clients.get(self._loop) is self:
                del clients[self._loop]
            await client.close()

    async def close(self) -> None:
        async with self._connecting:
            if self._lifetime is not None:
                await self._lifetime.aclose()


class _Decorator(Protocol):
    """The decorator that `@app.task(...)` returns; it keeps the function's types."""

    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[SyncContext, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...
