"""An app and its tasks on a real Postgres: declaring, options, arguments, results, shared data, middleware."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pydantic
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import flowfabric as ff
from flowfabric import middleware as mw
from flowfabric.client import bulk
from flowfabric.client.submission import Submission
from flowfabric.errors import ConnectionFailed, Purged, TransportError
from flowfabric.middleware.base import outcome_of
from flowfabric.testing import Kit
from flowfabric.values.execution import Execution
from tests.support import Clock
from tests.until import until

PATIENCE = 60.0
NOON = datetime(2040, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
async def app(database: str) -> AsyncIterator[ff.App]:
    app = ff.App(database)
    yield app
    await app.close()


@pytest.fixture
def kit(database: str) -> Iterator[Kit]:
    with Kit(database) as kit:
        yield kit


async def count(sql: asyncpg.Connection[Any]) -> int:
    return int(await sql.fetchval("select count(*) from flowfabric.execution"))


# Declaring


async def test_async_and_plain_functions_are_tasks_with_and_without_options(app: ff.App, kit: Kit) -> None:
    @app.task
    async def one(x: int) -> int:
        return x + 1

    @app.task(priority=5)
    async def two(ctx: ff.Context, x: int) -> int:
        return x + ctx.priority

    @app.task
    def three(x: int) -> int:
        return x + 3

    @app.task(name="fourth", tags={"a.b": "c"})
    def four(x: int, ctx: ff.SyncContext) -> str:
        return f"{ctx.kind} {ctx.tags['a.b']} {x}"

    assert [await kit.run_inline(each, 1) for each in (one, two, three, four)] == [2, 6, 4, "fourth c 1"]
    assert list(app.tasks) == ["one", "two", "three", "fourth"]


async def test_a_task_is_still_the_function_it_was(app: ff.App) -> None:
    @app.task(priority=5)
    def double(x: int) -> int:
        """Twice as much."""
        return 2 * x

    @app.task
    async def later(x: int) -> int:
        return 2 * x

    assert double(4) == 8
    assert await later(4) == 8
    assert (double.__name__, double.__doc__) == ("double", "Twice as much.")
    assert repr(double) == "<task double>"


class Jobs:
    """Functions in a class, some of which expect an object."""

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    def method(self, x: int) -> int:
        return self.factor * x

    @classmethod
    def of_class(cls, x: int) -> int:
        return x

    @staticmethod
    async def static(x: int) -> int:
        return 10 * x


class Called:
    async def __call__(self, x: int) -> int:
        return 100 * x


async def _times(x: int, factor: int) -> int:
    return x * factor


async def test_static_methods_bound_methods_partials_and_callable_objects_are_tasks_too(app: ff.App, kit: Kit) -> None:
    tasks = [
        app.task(Jobs(7).method),
        app.task(Jobs.__dict__["static"]),
        app.task(name="called")(Called()),
        app.task(name="partial")(functools.partial(_times, factor=3)),
        app.task(name="short")(lambda: "lambda"),
    ]
    assert [await kit.run_inline(each, 2) for each in tasks[:-1]] == [14, 20, 200, 6]
    assert await kit.run_inline(tasks[-1]) == "lambda"


def _plain_with_context(ctx: ff.Context, x: int) -> None: ...


async def _async_with_sync_context(x: int, ctx: ff.SyncContext) -> None: ...


def _module_function(x: int) -> int:
    return x


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"connections": 0}, "connections"), ({"connections": "5"}, "connections"), ({"dsn": 5}, "dsn"),
     ({"name": None}, "name"), ({"middleware": [5]}, "middleware"), ({"codecs": [5]}, "codecs")],
)  # fmt: skip
def test_an_app_refuses_bad_settings(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ff.InvalidInput) as refused:
        ff.App(**settings)
    assert refused.value.field == field


# What is decorated, the options beside it, the field that is named, a word of why.
UNDECLARABLE: dict[str, tuple[Callable[[ff.App], Any], dict[str, Any], str, str]] = {
    "a lambda": (lambda app: lambda x: x, {}, "name", "a lambda has no name"),
    "a partial": (lambda app: functools.partial(_times, factor=2), {}, "name", "a partial has no name"),
    "an object": (lambda app: Called(), {}, "name", "a Called has no name"),
    "a method": (lambda app: Jobs.method, {}, "fn", "Jobs.method is a method"),
    "a class method": (lambda app: Jobs.__dict__["of_class"], {}, "fn", "is a method"),
    "a task": (lambda app: app.task(_module_function), {"name": "again"}, "fn", "already"),
    "a text": (lambda app: "publish", {}, "fn", "got str"),
    "a class": (lambda app: Jobs, {}, "fn", "not a function"),
    "an empty name": (lambda app: _module_function, {"name": ""}, "name", "empty"),
    "a name too long": (lambda app: _module_function, {"name": "x" * 257}, "name", "257 bytes"),
    "a name that is none": (lambda app: _module_function, {"name": 5}, "name", "not text"),
    "the other context": (lambda app: _plain_with_context, {}, "ctx", "is synchronous"),
    "the other context again": (lambda app: _async_with_sync_context, {}, "ctx", "is async"),
    "another pool": (lambda app: _module_function, {"pool": "fork"}, "pool", "'fork'"),
    "async in a process": (lambda app: _times, {"pool": "process"}, "pool", "is async"),
    "a lambda in a process": (lambda app: lambda: 5, {"pool": "process", "name": "x"}, "pool", "cannot be found"),
    "one exception": (lambda app: _module_function, {"permanent": ValueError}, "permanent", "ValueError"),
    "no exceptions": (lambda app: _module_function, {"permanent": [5]}, "permanent", "got 5"),
    "another rule": (lambda app: _module_function, {"steps": "free"}, "steps", "'free'"),
}


@pytest.mark.parametrize("case", UNDECLARABLE)
def test_an_invalid_task_is_refused_when_it_is_declared(case: str) -> None:
    make, options, field, words = UNDECLARABLE[case]
    app = ff.App()
    what = make(app)
    before = dict(app.tasks)
    with pytest.raises(ff.InvalidInput) as refused:
        app.task(**options)(what)
    assert refused.value.field == field
    assert words in refused.value.problem
    assert app.tasks == before


def test_two_functions_cannot_share_a_name() -> None:
    app = ff.App()
    app.task(name="send")(_module_function)
    with pytest.raises(ff.InvalidInput, match=r"test_app\._module_function"):
        app.task(name="send")(_times)

    def _module_function_of_another_module() -> None: ...

    _module_function_of_another_module.__qualname__ = "_module_function"
    _module_function_of_another_module.__module__ = "elsewhere"
    with pytest.raises(ff.InvalidInput, match="one task per name"):
        app.task(name="send")(_module_function_of_another_module)
    assert app.tasks["send"].function is _module_function


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """Writes a module and imports it, again if it was."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made: set[str] = set()

    def write(name: str, text: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        made.add(name)
        return importlib.reload(sys.modules[name]) if name in sys.modules else importlib.import_module(name)

    yield write
    for name in made:
        sys.modules.pop(name, None)


async def test_a_reloaded_module_declares_its_tasks_and_schedules_again(
    modules: Callable[[str, str], ModuleType], database: str
) -> None:
    base = modules("reloaded_base", "import flowfabric as ff\napp = ff.App()\n")
    text = """\
from reloaded_base import app

@app.task
async def report(day: int) -> int:
    return day * {factor}

app.schedule(report, 1, every={every})
"""
    modules("reloaded_tasks", text.format(factor=2, every=60))
    again = modules("reloaded_tasks", text.format(factor=3, every=90))
    app: ff.App = base.app
    assert app.tasks == {"report": again.report}
    assert await app.tasks["report"](2) == 6
    assert app.declared["report"].timing.to_builtins()["every_ms"] == 90_000  # type: ignore[attr-defined]
    with pytest.raises(ff.InvalidInput, match="declared twice"):
        app.schedule(again.report, 1, every=60)


# What a schedule cannot have.
UNSCHEDULABLE: list[tuple[dict[str, Any], str]] = [
    ({"delay": 5}, "delay"),
    ({"at": NOON}, "at"),
    ({"idempotency_key": "x"}, "idempotency_key"),
    ({"deadline": NOON}, "deadline"),
    ({"day": "monday"}, "day"),
    ({"catch_up": "some"}, "catch_up"),
    ({"name": ""}, "name"),
    ({"every": -5}, "every"),
    ({"prioritty": 5}, "prioritty"),
]


@pytest.mark.parametrize(("keywords", "field"), UNSCHEDULABLE)
def test_a_schedule_that_cannot_be_is_refused_when_it_is_declared(keywords: dict[str, Any], field: str) -> None:
    app = ff.App()

    @app.task
    async def report(day: int = 1) -> None: ...

    with pytest.raises(ff.InvalidInput) as refused:
        app.schedule(report, **{"every": 60, **keywords})
    assert refused.value.field == field
    assert app.declared == {}


@pytest.mark.parametrize("what", ["report", lambda: None, None, 5])
async def test_only_a_task_can_be_scheduled_or_submitted(what: Any, app: ff.App) -> None:
    client = await app.client()
    with pytest.raises(ff.InvalidInput) as refused:
        app.schedule(what, every=5)
    assert refused.value.field == "task"
    assert app.declared == {}
    if what == "report":
        return
    for submit in (lambda: client.submit(what), lambda: client.submit_many(what, [1])):
        with pytest.raises(ff.InvalidInput) as refused:
            await submit()
        assert refused.value.field == "task"


async def test_an_argument_may_be_called_task(app: ff.App, plain_engine: ff.Engine) -> None:
    @app.task
    async def assign(task: int) -> None: ...

    client = await app.client()
    run = await client.submit(assign, task=1)
    context = await plain_engine.read_execution_context(run.execution_id)
    assert msgspec.json.decode(context.input_payload) == {"task": 1}
    assert app.schedule(assign, every=60, task=1).submission.kwargs == {"task": 1}


# Options

FIXED = ff.RetryPolicy(max_retries=2, backoff=ff.Fixed("1 minute"))

# What is written, how it is read from the stored execution, and what must be there.
STORED: dict[str, tuple[dict[str, Any], Callable[[Execution], Any], Any]] = {
    "nothing": ({}, lambda e: (e.lane_id, e.namespace, e.priority, e.tags), ("default", "", 0, {})),
    "no key": ({}, lambda e: e.idempotency_key, None),
    "reclaims unset": ({}, lambda e: e.policy, {"max_reclaim_count": 5}),
    "lane": ({"lane": "slow"}, lambda e: e.lane_id, "slow"),
    "namespace": ({"namespace": "tenant"}, lambda e: e.namespace, "tenant"),
    "priority": ({"priority": 7}, lambda e: e.priority, 7),
    "the highest priority": ({"priority": 9000}, lambda e: e.priority, 9000),
    "retry": (
        {"retry": FIXED},
        lambda e: (e.policy or {}).get("retry_policy"),
        {"max_retries": 2, "backoff": {"type": "fixed", "delay_ms": 60_000}, "retryable_categories": []},
    ),
    "attempt timeout": (
        {"attempt_timeout": "90s"},
        lambda e: (e.policy or {}).get("timeout_policy"),
        {"attempt_timeout_ms": 90_000},
    ),
    "deadline": ({"deadline": "2 days"}, lambda e: (e.deadline_at or NOON) - e.created_at, timedelta(days=2)),
    "deadline at a time": ({"deadline": NOON}, lambda e: e.deadline_at, NOON),
    "delay": (
        {"delay": "1h 30m"},
        lambda e: ((e.delay_until or NOON) - e.created_at, e.public_state),
        (timedelta(minutes=90), ff.State.DELAYED),
    ),
    "delay of none": ({"delay": 0}, lambda e: e.public_state, ff.State.WAITING),
    "at": ({"at": NOON}, lambda e: (e.delay_until, e.public_state), (NOON, ff.State.DELAYED)),
    "capabilities": ({"capabilities": {"gpu", "big"}}, lambda e: e.required_capabilities, ("big", "gpu")),
    "tags": ({"tags": {"team.owner": "a", "x": "y"}}, lambda e: e.tags, {"team.owner": "a", "x": "y"}),
    "idempotency key": ({"idempotency_key": "k"}, lambda e: e.idempotency_key, "k"),
    "retention": (
        {"retention": "3 weeks"},
        lambda e: (e.policy or {}).get("stream_policy"),
        {"retention_ttl_ms": 21 * 86_400_000},
    ),
    "max reclaims": ({"max_reclaims": 2}, lambda e: (e.policy or {}).get("max_reclaim_count"), 2),
    "max replays": ({"max_replays": 0}, lambda e: (e.policy or {}).get("max_replay_count"), 0),
    "dedup window": ({"dedup_window": 60}, lambda e: (e.policy or {}).get("dedup_window_ms"), 60_000),
}  # fmt: skip


def _for_ways(database: str, options: dict[str, Any]) -> dict[str, Callable[[], Awaitable[ff.Run[Any]]]]:
    """Every way to say an option, each in an app of its own."""

    async def publish(draft_id: int) -> None: ...

    async def many(task: ff.Task[Any, Any], **options: Any) -> ff.Run[Any]:
        return (await (await task.app.client()).submit_many(task, [42], **options))[0]

    async def each(task: ff.Task[Any, Any], **options: Any) -> ff.Run[Any]:
        return (await task.submit_many([task.submission(42, **options)]))[0]

    def plain() -> ff.Task[Any, Any]:
        return ff.App(database).task(publish)

    return {
        "app": lambda: ff.App(database, **options).task(publish).submit(42),
        "task": lambda: ff.App(database).task(**options)(publish).submit(42),
        "options": lambda: plain().options(**options).submit(42),
        "submit": lambda: plain().submit(42, **options),
        "submit_many": lambda: many(plain(), **options),
        "submission": lambda: each(plain(), **options),
    }


@pytest.mark.parametrize("case", STORED)
async def test_every_option_reaches_the_stored_execution(case: str, database: str, plain_engine: ff.Engine) -> None:
    options, read, wanted = STORED[case]
    found = {}
    for way, submit in _for_ways(database, options).items():
        run = await submit()
        execution = await plain_engine.read_execution(run.execution_id)
        assert execution is not None
        found[way] = read(execution)
        assert execution.execution_kind == "publish"
    assert found == dict.fromkeys(found, wanted)


async def test_an_attempt_timeout_and_a_retention_are_kept(app: ff.App, plain_engine: ff.Engine, clock: Clock) -> None:
    @app.task(attempt_timeout="90s", retention="3 days")
    async def publish() -> None: ...

    run = await publish.submit()
    claimed = await plain_engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    assert claimed.attempt_timeout_at is not None
    assert claimed.attempt_timeout_at - claimed.lease_expires_at == timedelta(seconds=60)
    await plain_engine.complete(claimed.handle)
    await clock.advance(days=2)
    assert await plain_engine.trim_retention() == 0
    await clock.advance(days=2)
    assert await plain_engine.trim_retention() == 1
    with pytest.raises(Purged):
        await run.result()


async def test_a_refused_option_stores_nothing(app: ff.App, sql: asyncpg.Connection[Any]) -> None:
    @app.task
    async def publish(draft_id: int) -> None: ...

    client = await app.client()
    for bad in ({"priority": "high"}, {"prioritty": 1}, {"delay": 1, "at": NOON}, {"tags": {"a": 1}}):
        with pytest.raises(ff.InvalidInput):
            await publish.submit(42, **bad)
        with pytest.raises(ff.InvalidInput):
            await client.submit_many(publish, [1, 2], **bad)
    assert await count(sql) == 0


# Arguments and results


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5


class Order(pydantic.BaseModel):
    number: int
    lines: list[str] = []


class Cell(msgspec.Struct):
    at: Point
    note: str | None = None


@pytest.fixture
def publish(app: ff.App) -> ff.Task[..., str]:
    @app.task
    async def publish(draft_id: int, title: str = "none", *, at: Point | None = None) -> str:
        return f"{draft_id} {title} {at}"

    return publish


# Arguments that do not fit, the argument that must be named.
BAD_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "the wrong type": (("42",), {}, "draft_id"),
    "a bool for an int": ((True,), {}, "draft_id"),
    "none at all": ((), {}, "draft_id"),
    "too many": ((1, "a", "b"), {}, "arguments"),
    "twice": ((1,), {"draft_id": 2}, "draft_id"),
    "an unknown one": ((1,), {"titel": "x"}, "titel"),
    "the second": ((1, 2), {}, "title"),
    "a dict for a class": ((1,), {"at": {"x": 1}}, "at"),
    "a class with a wrong field": ((1,), {"at": Point(x="1")}, "at"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", BAD_CALLS)
async def test_a_wrong_argument_is_named_before_anything_is_stored(
    case: str, app: ff.App, publish: ff.Task[..., str], sql: asyncpg.Connection[Any]
) -> None:
    args, kwargs, named = BAD_CALLS[case]
    client = await app.client()
    good = publish.submission(1)
    for submit in (
        lambda: publish.submit(*args, **kwargs),
        lambda: client.submit("publish", *args, **kwargs),
        lambda: publish.submit_many([1, good, Submission(task=publish, args=args, kwargs=kwargs)]),
    ):
        with pytest.raises(ff.InvalidInput) as refused:
            await submit()
        assert refused.value.field == named
    assert await count(sql) == 0


async def test_one_wrong_item_of_very_many_stores_nothing_with_middleware_too(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    for middleware in ([], [mw.Metrics()]):
        app = ff.App(database, middleware=middleware)

        @app.task
        async def publish(draft_id: int) -> None: ...

        with pytest.raises(ff.InvalidInput) as refused:
            await publish.submit_many([*range(2500), "x"])
        assert refused.value.field == "draft_id"
    assert await count(sql) == 0


@pytest.mark.parametrize(("options", "call"), [({"tags": {"a": "b"}}, "create_many"), ({}, "create_alike")])
async def test_ten_thousand_are_submitted_in_ten_calls(
    database: str, sql: asyncpg.Connection[Any], options: dict[str, Any], call: str
) -> None:
    calls: list[str] = []

    class Calls(mw.Middleware):
        async def call(self, method: str, proceed: Callable[[], Awaitable[Any]]) -> Any:
            calls.append(method)
            return await proceed()

    app = ff.App(database, middleware=[Calls()], **options)

    @app.task
    async def add(x: int, y: int) -> None: ...

    runs = await add.submit_many((x, x + 1) for x in range(10_000))
    assert len({run.id for run in runs}) == 10_000 == await count(sql)
    assert all(run.is_new and run.kind == "add" for run in runs)
    assert calls == [call] * 10
    payload = await sql.fetchval("select payload from flowfabric.execution where id = $1", runs[4321].execution_id)
    assert msgspec.json.decode(payload) == {"x": 4321, "y": 4322}
    assert await add.submit_many([]) == []


async def test_large_arguments_are_submitted_in_more_calls(
    app: ff.App, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "_MOST_BYTES", 1000)

    @app.task
    async def store(text: str) -> None: ...

    client = await app.client()
    sizes: list[int] = []
    inner = client.engine.create_alike

    async def create_alike(item: Any, payloads: Any) -> Any:
        sizes.append(len(payloads))
        return await inner(item, payloads)

    monkeypatch.setattr(client.engine, "create_alike", create_alike)
    runs = await store.submit_many(["x" * length for length in (400, 400, 400, 5000, 10, 10)])
    assert sizes == [2, 1, 1, 2]
    length_of = "select length(payload) from flowfabric.execution where id = $1"
    stored = [await sql.fetchval(length_of, run.execution_id) for run in runs]
    assert stored == [length + len('{"text":""}') for length in (400, 400, 400, 5000, 10, 10)]


async def test_submissions_of_many_have_options_of_their_own(app: ff.App, plain_engine: ff.Engine) -> None:
    @app.task(priority=1)
    async def publish(draft_id: int) -> None: ...

    keys = ["a", "b", "a"]
    runs = await publish.submit_many(
        [publish.submission(n, idempotency_key=key, priority=n) for n, key in enumerate(keys)]
    )
    assert [run.is_new for run in runs] == [True, True, False]
    assert runs[0] == runs[2]
    stored = [await plain_engine.read_execution(run.execution_id) for run in runs[:2]]
    assert [one and (one.idempotency_key, one.priority) for one in stored] == [("a", 0), ("b", 1)]


async def test_stored_arguments_are_checked_again_by_the_worker(
    app: ff.App, publish: ff.Task[..., str], sql: asyncpg.Connection[Any]
) -> None:
    run = await publish.submit(42)
    await sql.execute("update flowfabric.execution set payload = $1", b'{"draft_id": "secret words"}')
    async with ff.Worker(app):
        with pytest.raises(ff.TaskFailed, match="draft_id") as failed:
            await run.result(PATIENCE)
    assert failed.value.category == "bad_arguments"
    assert "secret words" not in str(failed.value)
    assert len(await run.attempts()) == 1


RESULTS: list[tuple[Any, Any]] = [
    (int, 5),
    (float, 1.5),
    (str, "é\n"),
    (bool, True),
    (bytes, b"\x00\xff"),
    (None, None),
    (date, date(2024, 2, 29)),
    (datetime, datetime(2024, 2, 29, 12, 30, tzinfo=UTC)),
    (timedelta, timedelta(days=1, milliseconds=1)),
    (UUID, UUID(int=7)),
    (Decimal, Decimal("1.10")),
    (Point, Point(1, 2.5)),
    (Order, Order(number=7, lines=["a"])),
    (Cell, Cell(at=Point(1))),
    (list[Point], [Point(1), Point(2)]),
    (dict[str, Order], {"a": Order(number=1)}),
    (tuple[int, str], (1, "a")),
    (Point | None, None),
    (set[int], {1, 2}),
]


async def test_arguments_and_results_keep_their_types(app: ff.App, database: str) -> None:
    def declare(number: int, annotation: Any) -> ff.Task[..., Any]:
        async def same(value: Any) -> Any:
            return value

        same.__annotations__ = {"value": annotation, "return": annotation}
        return app.task(name=f"same{number}")(same)

    tasks = [declare(number, annotation) for number, (annotation, _) in enumerate(RESULTS)]
    stranger = ff.App(database, name="stranger")
    async with ff.Worker(app):
        runs = [await task.submit(value) for task, (_, value) in zip(tasks, RESULTS, strict=True)]
        results = [await run.result(PATIENCE) for run in runs]
    assert results == [value for _, value in RESULTS]
    assert [type(result) for result in results] == [type(value) for _, value in RESULTS]
    # An app that does not know the tasks gets plain JSON, one that does gets the types from an id alone.
    elsewhere = await stranger.client()
    assert await elsewhere.run(runs[11]).result() == {"x": 1, "y": 2.5}
    assert await elsewhere.run(runs[9].id).result() == str(UUID(int=7))
    assert await (await app.client()).run(runs[11].id).result() == Point(1, 2.5)
    assert await tasks[11].run(runs[11].id).result() == Point(1, 2.5)
    await stranger.close()


async def test_a_result_that_does_not_fit_its_annotation_fails_the_task(app: ff.App, kit: Kit) -> None:
    @app.task
    async def lie() -> int:
        return "secret words"  # type: ignore[return-value]

    with pytest.raises(ff.TaskFailed, match="result") as failed:
        await kit.run_inline(lie)
    assert "secret words" not in str(failed.value)


# Shared data


class Store:
    """What handlers share, and what becomes of it."""

    def __init__(self, name: str = "store") -> None:
        self.name = name
        self.is_open = False

    def open(self) -> Store:
        self.is_open = True
        return self


class Entered(Store):
    """A store that is its own context manager."""

    async def __aenter__(self) -> Entered:
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_open = False


def _makers() -> dict[str, tuple[Callable[[list[Store]], Any], bool]]:
    """How a store is provided, and whether the worker closes it."""

    def noted(made: list[Store], store: Store) -> Store:
        made.append(store)
        return store

    def value(made: list[Store]) -> Any:
        return noted(made, Store().open())

    def function(made: list[Store]) -> Any:
        return lambda: noted(made, Store().open())

    def async_function(made: list[Store]) -> Any:
        async def make() -> Store:
            await asyncio.sleep(0)
            return noted(made, Store().open())

        return make

    def manager(made: list[Store]) -> Any:
        @contextlib.contextmanager
        def make() -> Iterator[Store]:
            store = noted(made, Store().open())
            try:
                yield store
            finally:
                store.is_open = False

        return make

    def async_manager(made: list[Store]) -> Any:
        @contextlib.asynccontextmanager
        async def make() -> AsyncIterator[Store]:
            store = noted(made, Store().open())
            try:
                yield store
            finally:
                store.is_open = False

        return make

    def own_manager(made: list[Store]) -> Any:
        return lambda: noted(made, Entered())

    def given_manager(made: list[Store]) -> Any:
        return noted(made, Entered().open())

    return {
        "a value": (value, False),
        "a function": (function, False),
        "an async function": (async_function, False),
        "a context manager": (manager, True),
        "an async context manager": (async_manager, True),
        "an object that is a context manager, made": (own_manager, True),
        "an object that is a context manager, given": (given_manager, False),
    }


@pytest.mark.parametrize("way", _makers())
async def test_shared_data_is_made_once_per_worker_and_closed_with_it(app: ff.App, way: str) -> None:
    maker, closes = _makers()[way]
    made: list[Store] = []
    app.provide(Store, maker(made))

    @app.task
    async def use(name: str, store: ff.Data[Store]) -> str:
        assert store.is_open
        return f"{name} {store.name} {id(store)}"

    @app.task
    def use_in_thread(store: ff.Data[Store], name: str = "x") -> str:
        assert store.is_open
        return f"{name} {store.name} {id(store)}"

    async with ff.Worker(app):
        runs = [await use.submit("a"), await use.submit(name="b"), await use_in_thread.submit("c")]
        (store,) = made
        assert [await run.result(PATIENCE) for run in runs] == [f"{name} store {id(store)}" for name in "abc"]
    assert store.is_open is not closes


async def test_missing_shared_data_is_reported_before_the_first_claim(
    app: ff.App, sql: asyncpg.Connection[Any]
) -> None:
    @app.task
    async def use(draft_id: int, store: ff.Data[Store]) -> None: ...

    run = await use.submit(42)
    with pytest.raises(ff.InvalidInput, match="task use asks for Store in 'store'"):
        await ff.Worker(app).run(until_idle=True)
    assert await run.state() is ff.State.WAITING
    assert await sql.fetchval("select count(*) from flowfabric.attempt") == 0


async def test_shared_data_that_cannot_be_made_stops_the_start_and_closes_what_was_made(app: ff.App) -> None:
    made: list[Store] = []
    maker, _ = _makers()["an async context manager"]
    app.provide(Store, maker(made))

    def fail() -> Decimal:
        raise OSError("no such thing")

    app.provide(Decimal, fail)

    @app.task
    async def use(store: ff.Data[Store], number: ff.Data[Decimal]) -> None: ...

    with pytest.raises(OSError, match="no such thing"):
        await ff.Worker(app).start()
    assert [store.is_open for store in made] == [False]
    app.provide(Decimal, Decimal(5))
    async with ff.Worker(app):  # nothing of the first try is in the way
        assert await (await use.submit()).result(PATIENCE) is None


def _generator() -> Iterator[Store]:
    yield Store()


@pytest.mark.parametrize(
    ("maker", "words"), [(_generator, "generator"), (lambda: 5, "is a int"), (lambda: None, "is a NoneType")]
)
async def test_a_provided_object_must_have_the_requested_class(app: ff.App, maker: Any, words: str) -> None:
    app.provide(Store, maker)

    @app.task
    async def use(store: ff.Data[Store]) -> None: ...

    with pytest.raises(ff.InvalidInput, match=words):
        await ff.Worker(app).start()


def test_only_a_class_can_be_provided_by_something_of_it() -> None:
    app = ff.App()
    with pytest.raises(ff.InvalidInput, match="a class"):
        app.provide("Store", Store())  # type: ignore[arg-type]
    with pytest.raises(ff.InvalidInput, match="a Store, or a function"):
        app.provide(Store, 5)  # type: ignore[arg-type]


async def test_shared_data_is_no_argument(app: ff.App, sql: asyncpg.Connection[Any]) -> None:
    @app.task
    async def use(draft_id: int, store: ff.Data[Store]) -> None: ...

    with pytest.raises(ff.InvalidInput, match="the worker provides it"):
        await use.submit(42, store=Store())
    with pytest.raises(ff.InvalidInput, match="2 positional"):
        await use.submit(42, Store())
    assert await count(sql) == 0


# Middleware


class Noting(mw.Middleware):
    """Notes what passes, and under which name."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self.notes = notes

    async def submit(self, submission: mw.Submission, proceed: Any) -> mw.Run:
        self.notes.append(f"{self.name} submits {submission.kind}{submission.args}")
        run: mw.Run = await proceed(submission)
        self.notes.append(f"{self.name} submitted, {'new' if run.is_new else 'known'}")
        return run

    async def execute(self, task: mw.Running, proceed: Any) -> Any:
        self.notes.append(f"{self.name} executes {task.kind}")
        try:
            value = await proceed()
        except BaseException as error:
            self.notes.append(f"{self.name} saw {outcome_of(error, task)}")
            raise
        self.notes.append(f"{self.name} saw {value}")
        return value


async def test_hooks_are_around_submitting_and_running_the_first_outermost(database: str) -> None:
    notes: list[str] = []
    app = ff.App(database, middleware=[Noting("a", notes), Noting("b", notes)])
    app.provide(Store, Store())

    @app.task
    async def publish(draft_id: int, store: ff.Data[Store]) -> str:
        notes.append(f"runs with {store.name}")
        return "done"

    @app.task
    def broken() -> None:
        raise ValueError("words")

    async with ff.Worker(app):
        run = await publish.submit(42, idempotency_key="x")
        assert await run.result(PATIENCE) == "done"
        # The worker may begin before the submitter has its answer.
        assert [note for note in notes if "submit" in note] == [
            "a submits publish(42,)", "b submits publish(42,)", "b submitted, new", "a submitted, new",
        ]  # fmt: skip
        assert [note for note in notes if "submit" not in note] == [
            "a executes publish", "b executes publish", "runs with store", "b saw done", "a saw done",
        ]  # fmt: skip
        notes.clear()
        assert not (await publish.submit(42, idempotency_key="x")).is_new
        assert notes[2:] == ["b submitted, known", "a submitted, known"]
        notes.clear()
        with pytest.raises(ff.TaskFailed, match="words"):
            await (await broken.submit()).result(PATIENCE)
        assert [note for note in notes if "submit" not in note] == [
            "a executes broken", "b executes broken", "b saw error", "a saw error",
        ]  # fmt: skip


class Changing(mw.Middleware):
    async def submit(self, submission: mw.Submission, proceed: Any) -> mw.Run:
        if submission.args == (0,):
            raise ff.InvalidInput("zero", field="draft_id", allowed="more")
        changed = submission.replace(args=(submission.args[0] * 2,), options=submission.options.replace(priority=9))
        run: mw.Run = await proceed(changed)
        return run

    async def execute(self, task: mw.Running, proceed: Any) -> Any:
        return f"<{await proceed()}>"


async def test_hooks_may_change_refuse_and_replace_results(database: str, sql: asyncpg.Connection[Any]) -> None:
    app = ff.App(database, middleware=[Changing()])

    @app.task
    async def publish(draft_id: int) -> str:
        return f"draft {draft_id}"

    with pytest.raises(ff.InvalidInput, match="zero"):
        await publish.submit(0)
    assert await count(sql) == 0
    async with ff.Worker(app):
        run = await publish.submit(4)
        assert await run.result(PATIENCE) == "<draft 8>"
        assert (await run.get()).priority == 9


async def test_the_trace_of_a_submission_continues_in_its_handler_and_children(database: str) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = ff.App(database, middleware=[mw.Tracing(tracer_provider=provider, calls=False)], tags={"own": "1"})

    @app.task
    async def child() -> str:
        return "child"

    @app.task
    async def parent(ctx: ff.Context) -> str:
        assert ctx.tags["own"] == "1"
        return await (await child.submit()).result()

    async with ff.Worker(app, concurrency=1):
        with provider.get_tracer("test").start_as_current_span("request") as request:
            run = await parent.submit()
        assert await run.result(PATIENCE) == "child"
        await until(lambda: len(exporter.get_finished_spans()) >= 6)
    tags = (await run.get()).tags
    assert tags["own"] == "1"
    assert f"{request.get_span_context().trace_id:032x}" in tags["trace.parent"]
    spans = exporter.get_finished_spans()
    assert {span.context.trace_id for span in spans if span.context} == {request.get_span_context().trace_id}
    # The parent is run twice, because it waits without a worker; the child is submitted and run once.
    assert sorted(span.name for span in spans) == sorted(
        ["request", "flowfabric.submit parent", "flowfabric.execute parent", "flowfabric.execute parent",
         "flowfabric.submit child", "flowfabric.execute child"]
    )  # fmt: skip
    await app.close()


async def test_metrics_count_parked_runs_and_new_executions_alone(database: str) -> None:
    meter = mw.Metrics()
    app = ff.App(database, middleware=[meter])

    @app.task
    async def child(n: int) -> int:
        return n

    @app.task
    async def parent() -> int:
        runs = [await child.submit(n, idempotency_key=f"k{n % 2}") for n in range(3)]
        return sum([await run.result() for run in runs])

    async with ff.Worker(app, concurrency=1):
        assert await (await parent.submit()).result(PATIENCE) == 1
        assert not (await child.submit(0, idempotency_key="k0")).is_new
    assert isinstance(meter.sink, mw.MemorySink)
    snapshot = meter.sink.snapshot()
    counts = snapshot.counts
    assert counts['flowfabric_submitted_total{kind="parent"}'] == 1
    assert counts['flowfabric_submitted_total{kind="child"}'] == 2
    assert counts['flowfabric_executions_total{kind="parent",outcome="ok"}'] == 1
    assert counts['flowfabric_executions_total{kind="parent",outcome="parked"}'] >= 1
    assert counts['flowfabric_executions_total{kind="child",outcome="ok"}'] == 2
    assert not [series for series in counts if "cancelled" in series or "error" in series]
    # An execution that resumes did not wait in the queue for it.
    assert snapshot.timings['flowfabric_queue_seconds{kind="parent"}'].count == 1
    await app.close()


async def test_a_limit_on_submissions_holds_them_back_and_not_what_was_submitted_before(database: str) -> None:
    now = 0.0
    limit = mw.RateLimit({"child": 2, "parent": 1}, on="submit", clock=lambda: now)
    app = ff.App(database, middleware=[limit])

    @app.task
    async def child(n: int) -> int:
        return n

    @app.task
    async def parent() -> int:
        # Remembered ones pass without a token: the second run of this handler could not get any.
        runs = [await child.submit(n) for n in range(2)]
        return sum([await run.result() for run in runs])

    async with ff.Worker(app, concurrency=1):
        run = await parent.submit()
        with pytest.raises(mw.RateLimited):
            await parent.submit()
        assert await run.result(PATIENCE) == 1
        with pytest.raises(mw.RateLimited):
            await child.submit(5)
    await app.close()


@pytest.mark.parametrize("rates", [{"complete_many": 1}, {"record_steps": 1, "fail_many": 1, "progress": 1}, 1])
async def test_a_limit_on_engine_calls_loses_nothing_of_what_a_worker_holds(
    database: str, rates: Any, plain_engine: ff.Engine
) -> None:
    # Time is quicker here: a second of the limit takes a fiftieth.
    limit = mw.RateLimit(rates, clock=lambda: time.monotonic() * 50, sleep=lambda seconds: asyncio.sleep(seconds / 50))
    app = ff.App(database)
    limited = ff.App(database, middleware=[limit])

    async def publish(ctx: ff.Context, draft_id: int) -> int:
        await ctx.progress(50)
        await ctx.heartbeat()
        if draft_id == 5:
            raise ff.Reject("not this one")
        return await ctx.step("double", lambda: draft_id * 2)

    limited.task(publish)
    runs = await app.task(publish).submit_many(range(8))
    async with ff.Worker(limited, concurrency=8, poll=0.05):
        outcomes = [await run.outcome(PATIENCE) for run in runs]
    words = [one.result.decode() if one.result else one.failure_reason for one in outcomes]
    assert words == ["0", "2", "4", "6", "8", "not this one", "12", "14"]
    for run in runs:
        assert len(await plain_engine.list_attempts(run.execution_id)) == 1
    await limited.close()
    await app.close()


async def test_a_refusal_of_a_result_that_names_a_time_is_waited_for(database: str) -> None:
    refused: list[float] = []

    class Picky(mw.Middleware):
        async def call(self, method: str, proceed: Callable[[], Awaitable[Any]]) -> Any:
            if method in ("complete_many", "fail_many", "record_steps", "read_outcomes", "park") and len(refused) < 20:
                refused.append(time.monotonic())
                if len(refused) % 3:
                    raise mw.RateLimited(method, 50, 0.02)
            return await proceed()

    app = ff.App(database)
    picky = ff.App(database, middleware=[Picky()])

    async def parent(n: int) -> int:
        return n

    async def publish(ctx: ff.Context, n: int) -> int:
        await ctx.sleep(0.01)
        return await (await ctx.submit(inner, n)).result() + await ctx.step("one", lambda: 1)

    inner = picky.task(parent)
    picky.task(publish)
    runs = await app.task(publish).submit_many(range(4))
    async with ff.Worker(picky, poll=0.05):
        assert [await run.result(PATIENCE) for run in runs] == [1, 2, 3, 4]
    assert len(refused) == 20
    await picky.close()
    await app.close()


async def test_engine_calls_of_clients_and_workers_pass_the_middleware(database: str) -> None:
    seen: set[str] = set()

    class Seen(mw.Middleware):
        async def call(self, method: str, proceed: Callable[[], Awaitable[Any]]) -> Any:
            seen.add(method)
            return await proceed()

    app = ff.App(database, middleware=[Seen()])

    @app.task
    async def publish() -> None: ...

    await (await publish.submit()).state()
    assert seen == {"create_many", "read_execution"}
    async with ff.Worker(app):
        await (await publish.submit()).result(PATIENCE)
    assert {"claim_many", "complete_many", "read_outcomes"} <= seen
    await app.close()


async def test_a_worker_inside_a_circuit_breaker_waits_for_the_database_and_continues(
    database: str, switch: Callable[[bool], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    breaker = mw.CircuitBreaker(failures=3, open_for=timedelta(milliseconds=200))
    app = ff.App(database, middleware=[breaker])

    @app.task
    async def publish(draft_id: int) -> int:
        return draft_id

    with caplog.at_level(logging.WARNING):
        async with ff.Worker(app, poll=0.1):
            assert await (await publish.submit(1)).result(PATIENCE) == 1
            await switch(False)
            await until(lambda: breaker.state == "open")
            with pytest.raises(mw.CircuitOpen):
                while True:  # a trial call in between meets the dead database itself
                    try:
                        await publish.submit(2)
                    except mw.CircuitOpen:
                        raise
                    except (ConnectionFailed, TransportError):
                        await asyncio.sleep(0)
            await switch(True)
            await until(lambda: breaker.state == "closed")
            assert await (await publish.submit(3)).result(PATIENCE) == 3
    await app.close()
