"""Flows of tasks: results passed on as typed arguments, joins and losers, failures, growth, sub-flows, handles.

What depends on time or crashes runs in the testing kit, whose worker, database and duties are the real ones; the rest
with workers as they are.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import pickle
import threading
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import msgspec
import pydantic
import pytest

import flowfabric as ff
from flowfabric.app.flow_builder import Flow
from flowfabric.client import Submission
from flowfabric.errors import StateError, TransportError
from flowfabric.middleware import Middleware
from flowfabric.testing import Kit, NotFinished
from flowfabric.values.execution import NewExecution
from flowfabric.values.flow import CancellationScheduled, FlowCancelled
from flowfabric.values.graph import NewEdge, NewNode
from tests.until import until

PATIENCE = 60.0
"""Seconds after which what should have happened counts as missing. Nothing waits this long when all is well."""
HOUR = timedelta(hours=1)
ONCE = ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(timedelta(0)))


def worker(app: ff.App, **options: Any) -> ff.Worker:
    return ff.Worker(app, **{"grace": 5, "poll": 0.5, **options})


async def result(run: ff.FlowRun) -> dict[str, Any]:
    return await run.result(PATIENCE)


async def failure(run: ff.FlowRun) -> ff.FlowFailed:
    with pytest.raises(ff.FlowFailed) as caught:
        await run.result(PATIENCE)
    return caught.value


async def words(run: ff.FlowRun) -> dict[str, str]:
    return {name: state.value for name, state in (await run.states()).items()}


class Basics:
    """Tasks that most flows are made of."""

    def __init__(self, app: ff.App) -> None:
        @app.task
        async def double(n: int) -> int:
            return 2 * n

        @app.task
        def total(ns: list[int], extra: int = 0) -> int:
            return sum(ns) + extra

        @app.task
        async def show(value: Any = None) -> Any:
            return value

        @app.task
        async def boom(words: str = "no good") -> int:
            raise ValueError(words)

        self.double, self.total, self.show, self.boom = double, total, show, boom


@pytest.fixture
def tasks(app: ff.App) -> Basics:
    return Basics(app)


@pytest.fixture
def kit_tasks(kit_app: ff.App) -> Basics:
    return Basics(kit_app)


# ---- results as arguments


@dataclasses.dataclass
class Line:
    article: str
    price: Decimal


class Place(NamedTuple):
    row: int
    seat: int


class Ticket(msgspec.Struct):
    place: Place
    at: datetime


class Customer(pydantic.BaseModel):
    name: str
    since: date
    tickets: list[int] = []


NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)
VALUES: dict[str, tuple[Any, Any]] = {
    "dataclass": (Line, Line("apple", Decimal("0.10"))),
    "struct": (Ticket, Ticket(Place(1, 2), NOON)),
    "pydantic": (Customer, Customer(name="ann", since=date(2020, 2, 29), tickets=[1])),
    "datetime": (datetime, NOON),
    "timedelta": (timedelta, timedelta(seconds=1.5)),
    "bytes": (bytes, b"\x00\xff"),
    "uuid": (uuid.UUID, uuid.UUID(int=5)),
    "path": (Path, Path("a/b")),
    "none": (int | None, None),
    "set": (set[int], {1, 2}),
    "big": (int, 2**63 - 1),
    "text": (str, "\0 \u2028 \U0001f600"),
}


@pytest.mark.parametrize("kind", VALUES)
async def test_results_arrive_as_the_types_of_the_parameters(app: ff.App, kind: str) -> None:
    wanted, value = VALUES[kind]
    got: list[Any] = []

    async def make() -> Any:
        return value

    async def take(one: Any, many: Any, named: Any) -> Any:
        got.extend((one, many, named))
        return one

    make.__annotations__["return"] = take.__annotations__["return"] = wanted
    take.__annotations__.update(one=wanted, many=list[wanted], named=dict[str, wanted])
    make_task, take_task = app.task(make), app.task(take)
    flow = app.flow("typed")
    first, second = flow.add(make_task), flow.add(make_task)
    flow.add(take_task, first, [first, value, second], named={"x": second, "y": value})
    async with worker(app):
        assert await result(await flow.submit()) == {"make": value, "make-2": value, "take": value}
    assert got == [value, [value, value, value], {"x": value, "y": value}]
    assert all(type(one) is type(value) for one in (got[0], *got[1], *got[2].values()))


class Mirror:
    """Not readable by chance, and easily seen."""

    name = "mirror"

    def encode(self, data: bytes) -> bytes:
        return b"sealed:" + data[::-1]

    def decode(self, data: bytes) -> bytes:
        assert data.startswith(b"sealed:")
        return data[7:][::-1]


async def test_arguments_and_results_pass_the_codecs(database: str) -> None:
    app = ff.App(database, codecs=[Mirror()])
    tasks = Basics(app)
    flow = app.flow("sealed")
    secret = flow.add(tasks.show, "secret")
    flow.add(tasks.show, [secret, "beside"], name="taken")
    async with worker(app):
        run = await flow.submit()
        assert await result(run) == {"show": "secret", "taken": ["secret", "beside"]}
    engine = (await app.client()).engine
    stored = await engine._fetch("select payload, result from flowfabric.execution")
    assert len(stored) == 2
    assert all(bytes(row[0]).startswith(b"sealed:") and bytes(row[1]).startswith(b"sealed:") for row in stored)
    await app.close()


async def test_a_worker_that_cannot_read_a_result_says_so(database: str) -> None:
    sealing, plain = ff.App(database, codecs=[Mirror()]), ff.App(database)

    @sealing.task
    async def make() -> str:
        return "secret"

    @plain.task
    async def take(text: str) -> str:
        return text

    flow = sealing.flow("two")
    flow.add(take, flow.add(make))
    async with worker(sealing), worker(plain):
        error = await failure(await flow.submit())
    assert list(error.failures) == ["take"]
    assert "mirror" in str(error)
    await sealing.close()
    await plain.close()


async def test_an_argument_that_does_not_fit_is_named(app: ff.App, tasks: Basics) -> None:
    flow = app.flow("misfit")
    wrong = flow.add(tasks.show, {"n": "one"})
    flow.add(tasks.double, wrong)
    flow.add(tasks.total, [1, wrong], name="sum")
    async with worker(app):
        error = await failure(await flow.submit())
    assert sorted(error.failures) == ["double", "sum"]
    assert "argument 'n'" in str(error.failures["double"])
    assert "argument 'ns'" in str(error.failures["sum"])
    assert error.results == {"show": {"n": "one"}}


async def test_tasks_of_other_apps_are_nodes_too(app: ff.App, database: str, tasks: Basics) -> None:
    other = ff.App(database, name="other")

    @other.task(lane="elsewhere")
    def halve(n: int) -> float:
        return n / 2

    flow = app.flow("both")
    first = flow.add(tasks.double, 3)
    flow.add(tasks.show, flow.add(halve, first))
    run = await flow.submit()
    async with worker(app):
        await until(lambda: run["double"].result())
        assert (await words(run))["halve"] == "waiting"
        async with worker(other, lanes=["elsewhere"]):
            assert await result(run) == {"double": 6, "halve": 3.0, "show": 3.0}
    await other.close()


def in_a_process(n: int) -> dict[str, int]:
    return {"n": n + 1}


async def test_process_pool_tasks_are_nodes(app: ff.App, tasks: Basics) -> None:
    task = app.task(pool="process")(in_a_process)
    flow = app.flow("processes")
    flow.add(tasks.show, flow.add(task, flow.add(tasks.double, 1)))
    async with worker(app, processes=1):
        assert (await result(await flow.submit()))["show"] == {"n": 3}


# ---- joins


class Race:
    """A task per name that runs until the test ends it, and the outcome of each."""

    def __init__(self, app: ff.App) -> None:
        self.gates: dict[str, asyncio.Event] = collections.defaultdict(asyncio.Event)
        self.begun: dict[str, asyncio.Event] = collections.defaultdict(asyncio.Event)
        self.ended: dict[str, str] = {}

        @app.task
        async def runner(name: str, fails: bool = False) -> str:
            self.begun[name].set()
            try:
                await self.gates[name].wait()
            except asyncio.CancelledError:
                self.ended[name] = "cancelled"
                raise
            self.ended[name] = "ran"
            if fails:
                raise ValueError(f"{name} fell")
            return name

        @app.task
        async def judge(names: list[str]) -> list[str]:
            return names

        @app.task
        async def winner(name: str) -> str:
            return name

        self.runner, self.judge, self.winner = runner, judge, winner

    async def started(self, *names: str) -> None:
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(self.begun[name].wait() for name in names))


async def test_losers_of_a_quorum_are_stopped(app: ff.App) -> None:
    race = Race(app)
    flow = app.flow("race")
    runners = [flow.add(race.runner, name, name=name) for name in "abcd"]
    flow.add(race.judge, ff.quorum(2, runners, cancel_rest=True))
    flow.add(race.runner, "late", after=runners[3], name="behind")
    async with worker(app):
        run = await flow.submit()
        await race.started(*"abcd")
        race.gates["b"].set()
        await run["b"].result(PATIENCE)
        assert await run["judge"].state() is ff.State.WAITING_CHILDREN
        race.gates["c"].set()
        assert await result(run) == {"b": "b", "c": "c", "judge": ["b", "c"]}
        await until(lambda: asyncio.sleep(0, len(race.ended) == 4))
    assert race.ended == {"a": "cancelled", "b": "ran", "c": "ran", "d": "cancelled"}
    assert await words(run) == {
        "a": "cancelled", "b": "completed", "c": "completed", "d": "cancelled", "judge": "completed",
        "behind": "skipped",
    }  # fmt: skip
    assert (await run.summary()).public_flow_state == "completed"


async def test_without_cancel_rest_the_others_run_on(app: ff.App) -> None:
    race = Race(app)
    flow = app.flow("race")
    runners = [flow.add(race.runner, name, name=name) for name in "ab"]
    flow.add(race.winner, ff.any_of(runners))
    async with worker(app):
        run = await flow.submit()
        await race.started(*"ab")
        race.gates["b"].set()
        assert await run["winner"].result(PATIENCE) == "b"
        assert (await words(run))["a"] == "active"
        race.gates["a"].set()
        assert await result(run) == {"a": "a", "b": "b", "winner": "b"}


async def test_a_success_after_the_decision_is_not_passed(kit: Kit, kit_app: ff.App, did: list[str]) -> None:
    """Every attempt at a node is given the same arguments, whatever ends meanwhile."""

    @kit_app.task
    async def after(ctx: ff.Context, hours: int) -> int:
        await ctx.sleep(hours * HOUR)
        return hours

    @kit_app.task(retry=ff.RetryPolicy(max_retries=2, backoff=ff.Fixed(5 * HOUR)))
    async def judge(ctx: ff.Context, some: list[int], first: int | None, one: int) -> list[int]:
        did.append(f"{some} {first} {one}")
        await ctx.sleep(5 * HOUR)
        if ctx.retry_count == 0:
            raise ValueError("once more")
        return some

    flow = kit_app.flow("race")
    nodes = [flow.add(after, hours) for hours in (3, 2, 1)]
    some = ff.any_of(nodes)
    flow.add(judge, nodes, nodes[0], some)
    assert (await kit.run_until_ended(await flow.submit()))["judge"] == [1]
    assert did == ["[1] None 1"] * 3


async def test_an_any_of_passes_the_results_known_at_the_decision(kit: Kit, kit_app: ff.App) -> None:
    tasks = Basics(kit_app)
    flow = kit_app.flow("shown")
    bad, good = flow.add(tasks.boom), flow.add(tasks.double, 1)
    flow.add(tasks.show, bad, after=ff.any_of(bad, good), name="null")
    flow.add(tasks.show, {"list": [bad, good], "dict": {"bad": bad, "good": good}}, after=ff.any_of(bad, good))
    flow.add(tasks.total, [bad], 5, after=ff.any_of(bad, good))
    flow.add(tasks.double, bad, after=ff.any_of(bad, good), name="misfit")
    with pytest.raises(ff.FlowFailed) as caught:
        await kit.run_until_ended(await flow.submit())
    error = caught.value
    assert error.results == {
        "double": 2, "null": None, "show": {"list": [2], "dict": {"good": 2}}, "total": 5,
    }  # fmt: skip
    assert sorted(error.failures) == ["boom", "misfit"]
    assert "argument 'n'" in str(error.failures["misfit"])


async def test_a_quorum_that_cannot_be_had_skips_and_stops_the_rest(app: ff.App) -> None:
    race = Race(app)
    flow = app.flow("race")
    runners = [flow.add(race.runner, name, fails=name != "c", name=name) for name in "abc"]
    flow.add(race.judge, ff.quorum(2, runners, cancel_rest=True))
    async with worker(app):
        run = await flow.submit()
        await race.started(*"abc")
        race.gates["a"].set()
        race.gates["b"].set()
        error = await failure(run)
        await until(lambda: asyncio.sleep(0, len(race.ended) == 3))
    assert race.ended["c"] == "cancelled"
    assert (list(error.failures), error.skipped, error.results) == (["a", "b"], ("judge",), {})


async def test_a_thousand_nodes_fan_out_and_in(app: ff.App, tasks: Basics) -> None:
    flow = app.flow("wide")
    first = flow.add(tasks.double, 0)
    parts = flow.map(tasks.double, range(1000), after=first)
    flow.add(tasks.total, parts, name="sum")
    async with worker(app, concurrency=50):
        run = await flow.submit()
        results = await result(run)
    assert results["sum"] == sum(2 * n for n in range(1000))
    assert list(results) == ["double", *(f"double-{n}" for n in range(2, 1002)), "sum"]
    assert list(results.values())[1:-1] == [2 * n for n in range(1000)]
    again = await (await app.client()).engine._fetch("select 1 from flowfabric.execution where attempt_index > 0")
    assert again == []


# ---- failures


async def test_a_failed_flow_says_which_node_and_why(app: ff.App, tasks: Basics) -> None:
    flow = app.flow("bad")
    good = flow.add(tasks.double, 1)
    bad = flow.add(tasks.boom, "the disk\nis full", name="save")
    flow.add(tasks.double, bad, name="next")
    flow.add(tasks.double, 1, after=ff.all_of(good, flow.add(tasks.double, bad, name="last")), name="end")
    async with worker(app):
        run = await flow.submit()
        error = await failure(run)
    assert isinstance(error, ff.TaskFailed)
    assert (error.kind, error.flow_id) == ("failed", run.id)
    assert str(error) == f"flow {run.id} failed: save failed: ValueError: the disk; 3 skipped"
    assert error.failures["save"].error_type == "ValueError"
    assert error.failures["save"].execution_id == run.nodes["save"]
    assert sorted(error.skipped) == ["end", "last", "next"]
    assert error.results == {"double": 2}
    with pytest.raises(ff.TaskFailed):
        await run["save"].result(PATIENCE)


async def test_many_failures_are_counted(app: ff.App, tasks: Basics) -> None:
    flow = app.flow("bad")
    flow.map(tasks.boom, [str(n) for n in range(30)])
    async with worker(app):
        error = await failure(await flow.submit())
    assert len(error.failures) == 30
    assert len(str(error)) < 1000
    assert "more" in str(error)


async def test_nodes_are_retried_and_have_deadlines(kit: Kit, kit_app: ff.App, did: list[str]) -> None:
    tasks = Basics(kit_app)

    @kit_app.task(retry=ff.RetryPolicy(max_retries=3, backoff=ff.Fixed(HOUR)))
    async def flaky(ctx: ff.Context, n: int) -> int:
        did.append(f"{n} {ctx.retry_count}")
        if ctx.retry_count < 2:
            raise ValueError("not yet")
        return n

    @kit_app.task
    async def slow(ctx: ff.Context) -> None:
        await ctx.sleep(24 * HOUR)

    flow = kit_app.flow("timed")
    first = flow.add(tasks.double, 2)
    second = flow.add(flaky, first)
    flow.add(tasks.double, second, name="end")
    late = flow.add(slow, deadline=12 * HOUR)
    never = flow.add(tasks.double, 1, after=late, name="never")
    flow.add(tasks.double, flow.add(tasks.double, never, name="neither"), name="nor")
    run = await flow.submit()
    with pytest.raises(ff.FlowFailed) as caught:
        await kit.run_until_ended(run)
    assert did == ["4 0", "4 1", "4 2"]
    assert caught.value.results == {"double": 4, "flaky": 4, "end": 8}
    assert (list(caught.value.failures), caught.value.skipped) == (["slow"], ("never", "neither", "nor"))
    assert await run["slow"].state() is ff.State.EXPIRED


async def test_the_kit_cancels_members_no_longer_needed(kit: Kit, kit_app: ff.App, kit_tasks: Basics) -> None:
    @kit_app.task
    async def slow(ctx: ff.Context) -> int:
        await ctx.sleep(24 * HOUR)
        return 0

    flow = kit_app.flow("race")
    flow.add(kit_tasks.double, ff.any_of(flow.add(slow), flow.add(kit_tasks.double, 1), cancel_rest=True), name="end")
    begun = await kit.clock.now()
    run = await flow.submit()
    assert await kit.run_until_ended(run) == {"double": 2, "end": 4}
    assert (await words(run))["slow"] == "cancelled"
    assert await kit.clock.now() - begun < HOUR
    run = await flow.submit()
    await run.cancel(wait=False)
    with pytest.raises(ff.FlowFailed, match="cancelled"):
        await kit.run_until_ended(run)


async def test_a_node_may_start_later(kit: Kit, kit_app: ff.App, kit_tasks: Basics) -> None:
    flow = kit_app.flow("later")
    first = flow.add(kit_tasks.double, 1, delay=HOUR)
    flow.add(kit_tasks.double, first, delay=2 * HOUR, name="second")
    run = await flow.submit()
    await kit.run_all()
    assert await words(run) == {"double": "delayed", "second": "waiting_children"}
    await kit.clock.advance(HOUR)
    await kit.run_all()
    assert await words(run) == {"double": "completed", "second": "delayed"}
    assert await kit.run_until_ended(run) == {"double": 2, "second": 4}


async def test_the_kit_says_what_a_flow_lacks(kit: Kit, kit_app: ff.App, kit_tasks: Basics) -> None:
    @kit_app.task
    async def asks(ctx: ff.Context) -> Any:
        return (await ctx.wait_for("approval")).payload

    flow = kit_app.flow("approval")
    flow.add(kit_tasks.double, flow.add(asks))
    run = await flow.submit()
    with pytest.raises(NotFinished, match="asks is suspended, double is waiting_children"):
        await kit.run_until_ended(run)
    await run["asks"].signal("approval", payload=21)
    assert await kit.run_until_ended(run) == {"asks": 21, "double": 42}


async def test_a_flow_that_failed_is_replayed_to_success(app: ff.App, tasks: Basics, did: list[str]) -> None:
    broken = [True]

    @app.task
    async def fragile(n: int) -> int:
        did.append(f"fragile {n}")
        if broken[0]:
            raise ValueError("broken")
        return n + 1

    @app.task
    async def sound(n: int) -> int:
        did.append(f"sound {n}")
        return n

    flow = app.flow("mended")
    first = flow.add(sound, 1)
    second = flow.add(fragile, first)
    third = flow.add(tasks.double, second)
    flow.add(tasks.total, [first, third])
    async with worker(app):
        run = await flow.submit()
        assert list((await failure(run)).failures) == ["fragile"]
        broken[0] = False
        assert sorted(await run.replay("mended")) == ["double", "fragile", "total"]
        assert await result(run) == {"sound": 1, "fragile": 2, "double": 4, "total": 5}
        assert await run.replay() == []
    assert did == ["sound 1", "fragile 1", "fragile 1"]


async def test_a_node_receives_the_result_that_released_it_while_the_upstream_is_replayed(
    app: ff.App, tasks: Basics
) -> None:
    flow = app.flow("replayed")
    flow.add(tasks.show, flow.add(tasks.double, 1))
    run = await flow.submit()
    engine = (await app.client()).engine
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    await engine.complete(claimed.handle, b"2")
    await run["double"].replay()
    again = await engine.claim(worker_id="w", worker_instance_id="w-1", kinds=["double"])
    assert again is not None
    async with worker(app):
        assert await run["show"].result(PATIENCE) == 2
        await engine.complete(again.handle, b"3")
        assert await result(run) == {"double": 3, "show": 2}


async def test_middleware_sees_nodes_and_what_they_take(database: str, did: list[str]) -> None:
    class Mine(Middleware):
        async def submit(self, submission: Submission, proceed: Callable[..., Awaitable[Any]]) -> Any:
            did.append(f"{submission.kind} {submission.args}")
            if submission.args == (7,):
                raise PermissionError("not seven")
            changed = submission.replace(args=(10,)) if submission.args == (1,) else submission
            return None if submission.args == (8,) else await proceed(changed)

    app = ff.App(database, middleware=[Mine()])
    tasks = Basics(app)
    flow = app.flow("seen")
    flow.add(tasks.show, [flow.add(tasks.double, 1), 5])
    async with worker(app):
        assert await result(await flow.submit()) == {"double": 20, "show": [20, 5]}
    assert did == ["double (1,)", "show ([<node double of seen>, 5],)"]
    for n, error in ((7, PermissionError), (8, ff.InvalidInput)):
        flow = app.flow("refused")
        flow.map(tasks.double, [2, n])
        with pytest.raises(error):
            await flow.submit()
    assert (await (await app.client()).flows(name="refused")).items == []
    await app.close()


async def test_a_wide_flow_is_waited_for_without_running_the_handler_for_each_node(
    app: ff.App, tasks: Basics, did: list[str]
) -> None:
    @app.task
    async def outer(ctx: ff.Context) -> int:
        did.append("outer")
        flow = app.flow("wide")
        flow.map(tasks.double, range(200))
        return len(await (await flow.submit()).result())

    async with worker(app, concurrency=10):
        assert await (await outer.submit()).result(PATIENCE) == 200
    assert len(did) < 20


async def test_cancelling_a_flow(app: ff.App) -> None:
    race = Race(app)
    flow = app.flow("cancelled")
    a = flow.add(race.runner, "a", name="a")
    flow.add(race.winner, a)
    async with worker(app):
        run = await flow.submit()
        await race.started("a")
        done = await run.cancel("changed my mind")
        assert isinstance(done, FlowCancelled)
        assert len(done.member_execution_ids) == 2
        error = await failure(run)
        await until(lambda: asyncio.sleep(0, bool(race.ended)))
    assert race.ended == {"a": "cancelled"}
    assert error.kind == "cancelled"
    assert str(error).startswith(f"flow {run.id} cancelled: changed my mind: a cancelled: ")
    assert await words(run) == {"a": "cancelled", "winner": "cancelled"}
    assert (await run.get()).public_flow_state == "cancelled"


async def test_cancelling_only_members_that_do_not_run_yet(app: ff.App) -> None:
    race = Race(app)
    flow = app.flow("pending")
    a = flow.add(race.runner, "a", name="a")
    flow.add(race.winner, a)
    async with worker(app):
        run = await flow.submit()
        await race.started("a")
        await run.cancel(policy="cancel_pending")
        assert await words(run) == {"a": "active", "winner": "cancelled"}
        race.gates["a"].set()
        error = await failure(run)
    assert (error.kind, error.results, list(error.failures)) == ("cancelled", {"a": "a"}, ["winner"])


async def test_closing_a_flow_lets_its_nodes_run(app: ff.App) -> None:
    race = Race(app)
    flow = app.flow("closed")
    a = flow.add(race.runner, "a", name="a")
    flow.add(race.winner, a)
    async with worker(app):
        run = await flow.submit()
        await race.started("a")
        await run.cancel("closed", policy="flow_only")
        race.gates["a"].set()
        assert await result(run) == {"a": "a", "winner": "a"}
    assert (await run.get()).cancel_reason == "closed"
    with pytest.raises(StateError):
        await (await app.client()).engine.extend_flow(run.flow_id, [NewNode(name="x", execution=_execution())])


def _execution() -> NewExecution:
    return NewExecution(execution_kind="double", input_payload=b'{"n":1}')


async def test_a_cancellation_may_be_left_to_the_workers(app: ff.App, tasks: Basics) -> None:
    flow = app.flow("cancelled")
    flow.add(tasks.double, flow.add(tasks.double, 1))
    run = await flow.submit()
    assert isinstance(await run.cancel(wait=False), CancellationScheduled)
    async with worker(app):
        assert (await failure(run)).kind == "cancelled"
    assert set((await words(run)).values()) == {"cancelled"}


# ---- growth


def grower(app: ff.App, tasks: Basics, did: list[str]) -> ff.Task[[int], int]:
    @app.task(retry=ONCE)
    async def grow(ctx: ff.Context, n: int, fails: bool = False) -> int:
        did.append("grow")
        flow = ctx.flow()
        parts = flow.map(tasks.double, range(n), name="part")
        flow.add(tasks.total, parts, flow.here, name="sum")
        run = await flow.submit()
        assert list(run.nodes)[: n + 1] == [node.name for node in (*parts, flow.nodes["sum"])]
        assert run.is_new
        await ctx.step("after", lambda: None)
        if fails and ctx.retry_count == 0:
            raise ValueError("once more")
        return n

    return grow


@pytest.mark.parametrize("fails", [False, True], ids=["at once", "after a retry"])
async def test_a_task_adds_nodes_to_its_flow(app: ff.App, tasks: Basics, did: list[str], fails: bool) -> None:
    grow = grower(app, tasks, did)
    flow = app.flow("grown")
    flow.add(tasks.show, flow.add(grow, 3, fails=fails))
    async with worker(app):
        run = await flow.submit()
        assert await result(run) == {"grow": 3, "show": 3, "part": 0, "part-2": 2, "part-3": 4, "sum": 9}
    assert did == ["grow"] * (2 if fails else 1)
    assert (await run.get()).node_count == 6
    assert sorted(run.nodes) == ["grow", "part", "part-2", "part-3", "show", "sum"]


@pytest.mark.each_value
@pytest.mark.parametrize("step", ["flow grow", "after"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_nodes_are_added_once_over_crashes(
    kit: Kit, kit_app: ff.App, kit_tasks: Basics, did: list[str], step: str, when: str
) -> None:
    grow = grower(kit_app, kit_tasks, did)
    flow = kit_app.flow("grown")
    flow.add(grow, 2)
    run = await flow.submit()
    with kit.crash_after(step) if when == "after" else kit.crash_before(step):
        assert await kit.run_until_ended(run) == {"grow": 2, "part": 0, "part-2": 2, "sum": 4}
    assert did == ["grow", "grow"]
    assert (await run.get()).node_count == 4


async def test_handlers_that_grow_can_be_run_again_anywhere(kit: Kit, kit_app: ff.App, kit_tasks: Basics) -> None:
    grow = grower(kit_app, kit_tasks, [])
    flow = kit_app.flow("grown")
    flow.add(grow, 2)
    with kit.replay_always():
        assert await kit.run_until_ended(await flow.submit()) == {"grow": 2, "part": 0, "part-2": 2, "sum": 4}


async def test_several_tasks_add_nodes_of_the_same_name(app: ff.App, tasks: Basics) -> None:
    grow = grower(app, tasks, [])
    flow = app.flow("grown")
    flow.map(grow, [1, 2])
    async with worker(app):
        run = await flow.submit()
        results = await result(run)
    assert sorted(results) == ["grow", "grow-2", "part", "part-2", "part-2-2", "sum", "sum-2"] or sorted(results) == [
        "grow", "grow-2", "part", "part-2", "part-3", "sum", "sum-2",
    ]  # fmt: skip
    assert sorted([results["sum"], results["sum-2"]]) == [1, 4]
    assert len(set(run.nodes.values())) == 7
    assert await result(await (await app.client()).flow(run.id).refresh()) == await result(run)


async def test_new_nodes_come_after_members(app: ff.App, tasks: Basics) -> None:
    @app.task
    async def late(ctx: ff.Context, n: int) -> list[str]:
        assert ctx.flow_id is not None
        known = await (await app.client()).flow(ctx.flow_id).refresh()
        flow = ctx.flow()
        flow.add(tasks.show, [flow.member(known.nodes["double"]), flow.here, n], name="taken")
        flow.add(tasks.show, after=[flow.member(str(known.nodes["boom"]))], name="never")
        await flow.submit()
        return ["late"]

    flow = app.flow("grown")
    done = flow.add(tasks.double, 1)
    flow.add(tasks.boom)
    flow.add(late, done)
    async with worker(app):
        error = await failure(await flow.submit())
    assert (list(error.failures), error.skipped) == (["boom"], ("never",))
    assert error.results["taken"] == [2, ["late"], 2]


async def test_nodes_that_are_refused(app: ff.App, tasks: Basics, did: list[str]) -> None:
    @app.task
    async def grow(ctx: ff.Context, stranger: str) -> None:
        assert await ctx.flow().submit() == (await app.client()).flow(str(ctx.flow_id)), "nothing to add is no mistake"
        flow = ctx.flow()
        flow.add(tasks.double, 1)
        await flow.submit()
        try:
            await flow.submit()
        except ff.InvalidInput as error:
            did.append(str(error))
        flow = ctx.flow()
        flow.add(tasks.double, 1, after=flow.member(stranger))
        try:
            await flow.submit()
        except ff.FlowFabricError as error:
            did.append(str(error))

    stranger = await tasks.double.submit(1)
    flow = app.flow("grown")
    flow.add(grow, stranger.id)
    async with worker(app):
        assert await result(await flow.submit()) == {"grow": None, "double": 2}
    assert "its nodes were already added" in did[0]
    assert stranger.id in did[1]


async def test_a_plain_handler_adds_nodes(app: ff.App, tasks: Basics) -> None:
    @app.task
    def grow(ctx: ff.SyncContext, n: int) -> int:
        flow = ctx.flow()
        flow.add(tasks.total, flow.map(tasks.double, range(n)), flow.here)
        ctx.submit_flow(flow)
        return n

    @app.task
    def alone(ctx: ff.SyncContext) -> None:
        ctx.flow()

    flow = app.flow("grown")
    flow.add(grow, 3)
    async with worker(app):
        assert (await result(await flow.submit()))["total"] == 9
        with pytest.raises(ff.TaskFailed, match="alone was not submitted in a flow"):
            await (await alone.submit()).result(PATIENCE)


# ---- sub-flows


def inner_flow(app: ff.App, tasks: Basics) -> Flow:
    flow = app.flow("inner")
    flow.add(tasks.total, flow.map(tasks.double, [1, 2, 3]), 5)
    return flow


def outer_tasks(app: ff.App, tasks: Basics, did: list[str]) -> dict[str, ff.Task[[], int]]:
    @app.task
    async def outer(ctx: ff.Context) -> int:
        did.append("outer")
        run = await inner_flow(app, tasks).submit()
        found = await run.result()
        assert list(found) == ["double", "double-2", "double-3", "total"]
        return int(await ctx.step("after", lambda: found["total"]))

    @app.task
    def plain(ctx: ff.SyncContext) -> int:
        did.append("plain")
        found = ctx.submit_flow(inner_flow(app, tasks)).result()
        return int(ctx.step("after", lambda: found["total"]))

    return {"async": outer, "plain": plain}


BOTH = pytest.mark.parametrize("kind", ["async", "plain"])


@BOTH
async def test_a_task_waits_for_a_flow_without_a_worker(app: ff.App, tasks: Basics, did: list[str], kind: str) -> None:
    outer = outer_tasks(app, tasks, did)[kind]
    async with worker(app, concurrency=1):
        run = await outer.submit()
        assert await run.result(PATIENCE) == 17
    assert len(did) > 1, "it was parked and run again"
    assert len((await (await app.client()).flows(name="inner")).items) == 1


@BOTH
async def test_a_flow_is_submitted_once_over_crashes(kit: Kit, kit_app: ff.App, kit_tasks: Basics, kind: str) -> None:
    outer = outer_tasks(kit_app, kit_tasks, [])[kind]
    report = await kit.crash_everywhere(outer)
    assert report.result == 17
    assert {"flow inner", "after"} <= {crash.point.step for crash in report.crashes}
    assert len((await (await kit.engine()).find_flows()).items) == report.runs
    with kit.replay_always():
        assert await kit.run_inline(outer) == 17


async def test_a_worker_dies_while_a_flow_is_waited_for(kit: Kit, kit_app: ff.App, did: list[str]) -> None:
    @kit_app.task
    async def slow(ctx: ff.Context, n: int) -> int:
        await ctx.step(f"work {n}", lambda: did.append(f"slow {n}"))
        await ctx.sleep(n * HOUR)
        return n

    @kit_app.task
    async def outer(ctx: ff.Context) -> dict[str, int]:
        flow = kit_app.flow("inner")
        flow.map(slow, [3, 1, 2])
        run = await flow.submit()
        return await run.result(4 * HOUR)

    with kit.crash_after("work 2", task=slow):
        assert await kit.run_inline(outer) == {"slow": 3, "slow-2": 1, "slow-3": 2}
    assert set(did) == {"slow 1", "slow 2", "slow 3"}
    assert did.count("slow 2") == 1  # the other two may have run without being recorded when the worker died


async def test_flows_are_waited_for_beside_each_other(kit: Kit, kit_app: ff.App, did: list[str]) -> None:
    @kit_app.task
    async def slow(ctx: ff.Context, hours: int) -> int:
        await ctx.sleep(hours * HOUR)
        return hours

    @kit_app.task
    async def outer(ctx: ff.Context) -> list[Any]:
        async def one(hours: int) -> Any:
            flow = kit_app.flow("inner")
            flow.add(slow, hours)
            return await (await flow.submit()).result(5 * HOUR)

        found: list[Any] = await asyncio.gather(one(1), one(3), one(9), ctx.sleep(2 * HOUR), return_exceptions=True)
        await ctx.step("after", lambda: did.append("after"))
        return [*found[:2], type(found[2]).__name__, found[3]]

    meant = [{"slow": 1}, {"slow": 3}, "TimedOut", None]
    assert await kit.run_inline(outer) == meant
    report = await kit.crash_everywhere(outer)
    assert report.result == meant
    assert len((await (await kit.engine()).find_flows()).items) == 3 * (report.runs + 1)
    assert len(did) == report.runs + 1


async def test_a_flow_that_takes_too_long(kit: Kit, kit_app: ff.App, did: list[str]) -> None:
    """The time counts for the whole flow, and that it was over stays so when the handler is run again."""

    @kit_app.task
    async def slow(ctx: ff.Context, n: int) -> int:
        await ctx.sleep(n * HOUR)
        return n

    @kit_app.task
    async def outer(ctx: ff.Context) -> str:
        flow = kit_app.flow("inner")
        for n in (1, 2, 3, 4):
            flow.add(slow, n)
        run = await flow.submit()
        try:
            await run.result(2.5 * HOUR)
        except ff.TimedOut:
            await ctx.step("late", lambda: did.append("late"))
        else:
            return "in time"
        await ctx.sleep(10 * HOUR)
        return f"late, then {sorted((await run.result()).values())}"

    assert await kit.run_inline(outer) == "late, then [1, 2, 3, 4]"
    assert len(did) == 1


@BOTH
async def test_a_node_cannot_wait_for_its_own_flow(app: ff.App, tasks: Basics, kind: str) -> None:
    @app.task
    async def outer(ctx: ff.Context) -> None:
        flow = ctx.flow()
        flow.add(tasks.double, 1)
        await (await flow.submit()).result()

    @app.task
    def plain(ctx: ff.SyncContext) -> None:
        flow = ctx.flow()
        flow.add(tasks.double, 1)
        ctx.submit_flow(flow).result()

    flow = app.flow("snake")
    flow.add(outer if kind == "async" else plain, name="snake")
    async with worker(app):
        error = await failure(await flow.submit())
    assert "a node cannot wait for the end of its own flow" in str(error.failures["snake"])


@BOTH
async def test_a_failed_flow_fails_in_the_task_that_waits(app: ff.App, tasks: Basics, kind: str) -> None:
    @app.task
    async def outer(ctx: ff.Context) -> str:
        flow = app.flow("inner")
        flow.add(tasks.boom, name="bad")
        try:
            await (await flow.submit()).result()
        except ff.FlowFailed as error:
            return ", ".join(error.failures)
        return "no"

    @app.task
    def plain(ctx: ff.SyncContext) -> str:
        flow = app.flow("inner")
        flow.add(tasks.boom, name="bad")
        try:
            ctx.submit_flow(flow).result()
        except ff.FlowFailed as error:
            return ", ".join(error.failures)
        return "no"

    async with worker(app):
        run = await (outer if kind == "async" else plain).submit()
        assert await run.result(PATIENCE) == "bad"


async def test_flows_in_steps_are_part_of_the_step(app: ff.App, tasks: Basics) -> None:
    @app.task
    async def outer(ctx: ff.Context) -> Any:
        async def work() -> int:
            return int((await (await inner_flow(app, tasks).submit()).result())["total"])

        return await ctx.step("work", work)

    @app.task
    def plain(ctx: ff.SyncContext) -> Any:
        return ctx.step("work", lambda: ctx.submit_flow(inner_flow(app, tasks)).result()["total"])

    async with worker(app):
        for task in (outer, plain):
            run = await task.submit()
            assert await run.result(PATIENCE) == 17
            assert [step.name for step in await run.steps()] == ["work"]


async def test_a_replayed_success_submits_its_flow_again_and_a_replayed_failure_does_not(
    app: ff.App, tasks: Basics
) -> None:
    fails = [True]

    @app.task
    async def outer(ctx: ff.Context) -> int:
        found = await (await inner_flow(app, tasks).submit()).result()
        if fails[0]:
            raise ValueError("not yet")
        return int(found["total"])

    async def flows() -> int:
        return len((await (await app.client()).flows(name="inner")).items)

    async with worker(app):
        run = await outer.submit()
        with pytest.raises(ff.TaskFailed):
            await run.result(PATIENCE)
        fails[0] = False
        await run.replay()
        assert await run.result(PATIENCE) == 17
        assert await flows() == 1
        await run.replay()
        assert await run.result(PATIENCE) == 17
        assert await flows() == 2


async def test_waits_for_signals_in_nodes(app: ff.App, tasks: Basics) -> None:
    @app.task
    async def approval(ctx: ff.Context, amount: int) -> bool:
        keys: Any = ff.all_of("first", ff.on("second", "approved"))
        return all(signal.payload for signal in await ctx.wait_for(keys)) and amount > 0

    @app.task
    def either(ctx: ff.SyncContext, ok: bool) -> Any:
        return [signal.key for signal in ctx.wait_for(ff.any_of("x", "y"))] if ok else None

    flow = app.flow("approval")
    flow.add(either, flow.add(approval, flow.add(tasks.double, 1)))
    async with worker(app, concurrency=1):
        run = await flow.submit()
        await until(lambda: _is(run["approval"], ff.State.SUSPENDED))
        await run["approval"].signal("first", payload=True)
        await run["approval"].signal("second", "approved", payload=True)
        await until(lambda: _is(run["either"], ff.State.SUSPENDED))
        await run["either"].signal("y")
        assert await result(run) == {"double": 2, "approval": True, "either": ["y"]}


async def _is(run: ff.Run[Any], state: ff.State) -> bool:
    return await run.state() is state


# ---- handles


async def test_handles_survive_pickling(app: ff.App, tasks: Basics) -> None:
    flow = app.flow("pickled")
    node = flow.add(tasks.double, 1)
    run = await flow.submit()
    again = pickle.loads(pickle.dumps(run))
    assert (again, again.nodes, again.is_new, hash(again)) == (run, run.nodes, True, hash(run))
    assert again != run.id
    async with worker(app):
        assert await result(again) == {"double": 2}
    assert await again[node].result(PATIENCE) == 2
    client = await app.client()
    assert await client.flow(pickle.loads(pickle.dumps(run))).result(PATIENCE) == {"double": 2}


async def test_a_handle_from_an_id(app: ff.App, tasks: Basics) -> None:
    flow = app.flow("known")
    flow.add(tasks.double, 1)
    run = await flow.submit()
    found = (await app.client()).flow(run.id)
    assert (found.nodes, found.is_new) == ({}, False)
    with pytest.raises(ff.NotFound, match="double"):
        found["double"]
    assert (await found.refresh())["double"] == run["double"]
    with pytest.raises(ff.NotFound, match=r"'?other.*flow .* has double"):
        found["other"]
    async with worker(app):
        assert await result(found) == {"double": 2}
    assert (await app.client()).flow(run.flow_id) == run
    for wrong in ("no id", "", str(run.nodes["double"])[:-1]):
        with pytest.raises(ff.InvalidInput, match="flow_id"):
            (await app.client()).flow(wrong)
    nobody = (await app.client()).flow(str(uuid.UUID(int=1)))
    for call in (nobody.result, nobody.states, nobody.get, nobody.graph, nobody.summary, nobody.refresh, nobody.replay):
        with pytest.raises(ff.NotFound, match="flow"):
            await call()


async def test_what_a_handle_shows(app: ff.App, tasks: Basics) -> None:
    flow = app.flow("shown", namespace="shop", tags={"team.owner": "a"})
    flow.add(tasks.total, flow.map(tasks.double, [1, 2]))
    run = await flow.submit()
    header = await run.get()
    assert (header.flow_kind, header.namespace, header.tags) == ("shown", "shop", {"team.owner": "a"})
    assert (header.node_count, header.edge_count) == (3, 2)
    graph = await run.graph()
    assert [node.name for node in graph.nodes] == ["double", "double-2", "total"]
    assert await words(run) == {"double": "waiting", "double-2": "waiting", "total": "waiting_children"}
    assert (await run.summary()).total_members == 3
    assert len(await run.live()) == 3
    assert repr(run) == f"FlowRun({run.id!r}, 3 nodes)"
    client = await app.client()
    assert [one.flow_id for one in (await client.flows(name="shown", namespace="shop")).items] == [run.flow_id]
    assert (await client.flows(name="hidden")).items == []
    async with worker(app):
        await result(run)
    assert (await run.summary()).public_flow_state == "completed"
    assert await run.live() == []


async def test_waiting_for_some_time_only(app: ff.App, tasks: Basics) -> None:
    flow = app.flow("slow")
    flow.add(tasks.double, 1)
    run = await flow.submit()
    for timeout in (0, 0.05, timedelta(milliseconds=1)):
        with pytest.raises(ff.TimedOut):
            await run.result(timeout)
    with pytest.raises(ff.InvalidInput, match="timeout"):
        await run.wait(-1)
    async with worker(app):
        await run.wait(PATIENCE)
    assert await run.result(0) == {"double": 2}
    await run.wait(0)


async def test_a_key_makes_one_flow(app: ff.App, tasks: Basics) -> None:
    def flow(n: int) -> Flow:
        made = app.flow("keyed")
        made.add(tasks.double, made.add(tasks.double, n))
        return made

    runs = await asyncio.gather(*(flow(n).submit(idempotency_key="k") for n in range(5)))
    assert len({run.id for run in runs}) == 1
    assert [run.is_new for run in runs].count(True) == 1
    assert len({tuple(run.nodes.items()) for run in runs}) == 1
    assert (await flow(1).submit()).id != runs[0].id
    assert (await flow(1).submit(idempotency_key="")).is_new
    async with worker(app):
        first, *rest = [await result(run) for run in runs]
    assert all(one == first for one in rest)
    again = await flow(9).submit(idempotency_key="k")
    assert (again.is_new, await result(again)) == (False, first)


async def test_a_lost_response_for_a_key_that_another_call_used_first(
    app: ff.App, tasks: Basics, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = (await app.client()).engine
    real = engine._row
    others: list[ff.FlowRun] = []

    def flow() -> Flow:
        made = app.flow("keyed")
        made.add(tasks.double, made.add(tasks.double, 1))
        return made

    async def lossy(sql: str, *args: Any, **options: Any) -> Any:
        if not others:
            monkeypatch.setattr(engine, "_row", real)
            others.append(await flow().submit(idempotency_key="k"))
            raise TransportError("transport", "the answer was lost")
        return await real(sql, *args, **options)

    monkeypatch.setattr(engine, "_row", lossy)
    run = await flow().submit(idempotency_key="k")
    assert (run, run.nodes) == (others[0], others[0].nodes)
    async with worker(app):
        assert await run["double-2"].result(PATIENCE) == 4
        await result(run)


async def test_an_empty_flow_is_refused(app: ff.App) -> None:
    with pytest.raises(ff.InvalidInput, match="nodes: 0 nodes"):
        await app.flow("empty").submit()


async def test_a_flow_in_a_transaction_of_the_callers(app: ff.App, database: str, tasks: Basics) -> None:
    engine = (await app.client()).engine
    nodes = [
        NewNode(name="a", execution=_execution()),
        NewNode(name="b", execution=_execution(), after=[NewEdge(upstream="a")]),
    ]
    connection = await asyncpg.connect(database)
    try:
        transaction = connection.transaction()
        await transaction.start()
        gone = await engine.submit_flow(nodes, flow_kind="mine", connection=connection)
        assert await engine.describe_flow(gone.flow_id) is None
        await transaction.rollback()
        async with connection.transaction():
            kept = await engine.submit_flow(nodes, flow_kind="mine", connection=connection)
        async with connection.transaction():
            after = [NewEdge(upstream=kept.nodes["b"])]
            await engine.extend_flow(
                kept.flow_id, [NewNode(name="c", execution=_execution(), after=after)], connection=connection
            )
    finally:
        await connection.close()
    assert await engine.describe_flow(gone.flow_id) is None
    async with worker(app):
        assert await result((await app.client()).flow(kept.flow_id)) == {"a": 2, "b": 2, "c": 2}


def test_the_sync_client_submits_and_waits(server: str, database: str) -> None:
    app = ff.App(database)
    tasks = Basics(app)
    flow = app.flow("sync")
    node = flow.add(tasks.double, 1)
    flow.add(tasks.total, [node], name="sum")
    stop = threading.Event()

    def work() -> None:
        async def main() -> None:
            async with worker(app):
                await asyncio.to_thread(stop.wait)
            await app.close()

        asyncio.run(main())

    with ff.Client(app) as client:
        run = client.submit_flow(flow, idempotency_key="k")
        assert run.is_new
        with pytest.raises(ff.TimedOut):
            run.result(0.01)
        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert run.result(PATIENCE) == {"double": 2, "sum": 2}
            assert run[node].result(PATIENCE) == run["sum"].result(PATIENCE) == 2
            found = client.flow(run.id)
            assert (found, found.refresh().nodes, found.flow_id) == (run, run.nodes, run.flow_id)
            assert repr(run) == f"SyncFlowRun({run.id!r}, 2 nodes)"
            assert set(run.states().values()) == {ff.State.COMPLETED}
            assert client.flow(pickle.loads(pickle.dumps(run))) == run
            assert not client.submit_flow(flow, idempotency_key="k").is_new
            assert [one.flow_id for one in client.flows(name="sync").items] == [run.flow_id]
            assert run.summary().public_flow_state == "completed"
            assert len(run.graph().nodes) == 2
            assert run.replay() == []
            assert isinstance(run.cancel(), FlowCancelled)
            assert run.get().public_flow_state == "cancelled"
        finally:
            stop.set()
            thread.join()
