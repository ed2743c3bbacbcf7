"""Forks: a new execution that begins with the recorded steps of another, and leaves that one alone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric.errors import Conflict, InvalidInput, NotFound, StateError, TaskFailed, Unavailable
from flowfabric.values.lane import LaneState
from flowfabric.values.lease import Operator
from flowfabric.values.step import NewStep
from tests.each import each
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import Clock, started, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")
PATIENCE = 60.0


@pytest_asyncio.fixture(loop_scope="session")
async def app(database: str) -> AsyncIterator[ff.App]:
    made = ff.App(database, name="forks")
    yield made
    await made.close()


@contextlib.asynccontextmanager
async def working(app: ff.App) -> AsyncIterator[ff.Worker]:
    async with ff.Worker(app, poll=0.05) as worker, asyncio.timeout(PATIENCE):
        yield worker


class Did:
    """What steps really did."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, what: str) -> str:
        self.calls.append(what)
        return what


async def test_a_fork_keeps_the_steps_before_one_and_does_the_rest_anew(app: ff.App) -> None:
    did = Did()

    @app.task
    async def write(ctx: ff.Context, topic: str, tone: str = "dry") -> list[str]:
        found = await ctx.step("research", lambda: did(f"research {topic}"))
        first = await ctx.step("draft", lambda: did(f"draft {tone}"))
        again = await ctx.step("draft", lambda: did(f"again {tone}"))
        return [found, first, again]

    async with working(app):
        run = await write.submit("frogs", tags={"tenant": "x"}, priority=7, idempotency_key="k")
        assert await run.result() == ["research frogs", "draft dry", "again dry"]
        before = await run.get()
        steps = await run.steps()
        fork = await run.fork(before="draft", payload={"tone": "lively"})
        assert await fork.result() == ["research frogs", "draft lively", "again lively"]
        second = await run.fork(before=("draft", 1))
        assert await second.result() == ["research frogs", "draft dry", "again dry"]
        listed = await run.fork(before="draft #2")
        assert await listed.result() == ["research frogs", "draft dry", "again dry"]
        whole = await run.fork()
        assert await whole.result() == ["research frogs", "draft dry", "again dry"]
    assert did.calls == [
        "research frogs", "draft dry", "again dry",  # the first run
        "draft lively", "again lively",
        "again dry",
        "again dry",
    ]  # fmt: skip
    assert (await run.get()) == before
    assert (await run.steps()) == steps
    made = await fork.get()
    assert (made.forked_from, made.forked_before) == (run.execution_id, "draft")
    assert (made.tags, made.priority, made.lane_id) == (before.tags, 7, before.lane_id)
    assert made.creator_identity == before.creator_identity == ""
    assert (made.idempotency_key, made.parent_id, made.flow_id) == (None, None, None)
    assert [(await one.get()).forked_before for one in (second, listed)] == ["draft #2"] * 2
    assert (await whole.get()).forked_before is None
    client = await app.client()
    origins = {one.execution_id: one.forked_from for one in (await client.find(tag=("tenant", "x"))).items}
    assert origins == {
        run.execution_id: None,
        fork.execution_id: run.execution_id,
        second.execution_id: run.execution_id,
        listed.execution_id: run.execution_id,
        whole.execution_id: run.execution_id,
    }


async def test_a_fork_counts_only_what_it_uses_itself(app: ff.App) -> None:
    app.budget("team", hard={"tokens": 10_000})
    did = Did()

    @app.task(budgets=["team"])
    async def agent(ctx: ff.Context, prompt: str) -> int:
        for n in range(3):
            async with ctx.spend(tokens=400) as spend:
                await ctx.step("ask", lambda n=n: did(f"{prompt} {n}"))
                spend.settle(tokens=100)
            await ctx.usage(tokens=1)
        return len(did.calls)

    async with working(app):
        client = await app.client()
        run = await agent.options(budget=ff.Budget(tokens=1_000)).submit("first")
        assert await run.result() == 3
        fork = await run.fork(before=("ask", 2), payload={"prompt": "second"})
        assert await fork.result() == 4
        assert (await fork.usage()).by_budget == {"team": {"tokens": 101}}, "two of three calls were those of the first"
        assert await fork.budget() is None
        found = await client.budget("team")
        assert (found.usage, found.held.get("tokens", 0)) == ({"tokens": 404}, 0)
        assert await client.engine.audit() == []
    assert did.calls == ["first 0", "first 1", "first 2", "second 2"]


async def test_a_fork_of_a_run_that_has_only_its_own_budget_runs_without_one(app: ff.App) -> None:
    @app.task
    async def agent(ctx: ff.Context, prompt: str) -> str:
        async with ctx.spend(tokens=400) as spend:
            said = await ctx.step("ask", lambda: prompt)
            spend.settle(tokens=100)
        return said

    async with working(app):
        run = await agent.options(budget=ff.Budget(tokens=1_000)).submit("first")
        assert await run.result() == "first"
        fork = await run.fork(before="ask", payload={"prompt": "second"})
        assert await fork.result() == "second"
        assert (await fork.usage()).total == {}


async def test_concurrent_steps_before_the_fork_are_kept_in_the_order_they_were_recorded(app: ff.App) -> None:
    did = Did()
    order = asyncio.Event()

    @app.task
    async def gather(ctx: ff.Context) -> list[str]:
        async def slow() -> str:
            await order.wait()
            return did("slow")

        async def quick() -> str:
            return did("quick")

        async def last() -> str:
            found = await ctx.step("quick", quick)
            order.set()
            return found

        return [*await asyncio.gather(ctx.step("slow", slow), last()), await ctx.step("end", lambda: did("end"))]

    async with working(app):
        run = await gather.submit()
        assert await run.result() == ["slow", "quick", "end"]
        # `slow` was recorded after `quick`: a fork before it has only `quick`.
        fork = await run.fork(before="slow")
        assert await fork.result() == ["slow", "quick", "end"]
    assert did.calls == ["quick", "slow", "end", "slow", "end"]


async def test_results_of_children_are_remembered_and_open_children_are_submitted_again(app: ff.App) -> None:
    did = Did()

    @app.task
    async def child(name: str) -> str:
        return did(name)

    @app.task
    async def parent(ctx: ff.Context) -> list[str]:
        first = await (await child.submit("first")).result()
        other = await child.submit("second")
        await ctx.step("between", lambda: did("between"))
        return [first, await other.result()]

    async with working(app):
        run = await parent.submit()
        assert await run.result() == ["first", "second"]
        fork = await run.fork(before="between")
        assert await fork.result() == ["first", "second"]
        assert sorted(did.calls) == sorted(["first", "second", "between", "second", "between"])
        whole = await run.fork()
        assert await whole.result() == ["first", "second"]
    assert len(did.calls) == 5
    children = [one.name for one in await fork.children()]
    assert children == ["child"]


async def test_waits_are_asked_again(app: ff.App) -> None:
    did = Did()

    @app.task
    async def publish(ctx: ff.Context) -> list[Any]:
        draft = await ctx.step("draft", lambda: did("draft"))
        signal = await ctx.wait_for("approval")
        return [draft, signal.payload, await ctx.step("publish", lambda: did("publish"))]

    async def answered(run: ff.Run[Any], payload: str) -> list[Any]:
        while not await run.waits():
            await asyncio.sleep(0.01)
        await run.signal(payload=payload)
        return await run.result()  # type: ignore[no-any-return]

    async with working(app):
        run = await publish.submit()
        assert await answered(run, "yes") == ["draft", "yes", "publish"]
        fork = await run.fork(before="publish")
        assert await answered(fork, "maybe") == ["draft", "maybe", "publish"]
        whole = await run.fork()
        assert await answered(whole, "no") == ["draft", "no", "publish"]
    assert did.calls == ["draft", "publish", "publish"]


@each("how", ["wait_for", "waitpoint"])
async def test_a_wait_that_is_asked_again_has_its_whole_time_again(app: ff.App, clock: Clock, how: str) -> None:
    """Not what is left of the time of the old one, which may be over for days."""

    @app.task(name=how)
    async def publish(ctx: ff.Context) -> str:
        if how == "wait_for":
            found = await ctx.wait_for("approval", timeout="1 hour", default=None)
        else:
            point = await ctx.waitpoint("approval")
            await ctx.step("send", lambda: point.callback)
            found = await point.wait(timeout="1 hour", default=None)
        return await ctx.step("publish", lambda: "nobody" if found is None else str(found.payload))

    async def answered(run: ff.Run[str], payload: str) -> str:
        while not await run.waits() and not (await run.state()).is_terminal:
            await asyncio.sleep(0.01)
        if not (await run.state()).is_terminal:
            await run.signal(payload=payload)
        return await run.result()

    async with working(app):
        run = await publish.submit()
        assert await answered(run, "ada") == "ada"
        await clock.advance(days=2)
        assert await answered(await run.fork(before="publish"), "eve") == "eve"
        with pytest.raises(InvalidInput) as refused:
            await run.fork(before="nothing")
        # The names that `flowfabric show` lists.
        assert refused.value.allowed == ("approval, publish" if how == "wait_for" else "send, approval, publish")


@pytest.mark.parametrize("what", ["an execution", "a flow"])
async def test_an_end_that_is_waited_for_again_has_its_whole_time_again(app: ff.App, clock: Clock, what: str) -> None:
    """Whether the old one still waits or has timed out: both wait for the same id, which is not that of a child."""

    @app.task
    async def other(ctx: ff.Context) -> str:
        await ctx.wait_for("go")
        return "done"

    flow = app.flow("others")
    flow.add(other, name="other")

    @app.task
    async def publish(ctx: ff.Context, awaited: str) -> str:
        client = await app.client()
        run: Any = client.run(awaited) if what == "an execution" else client.flow(awaited)
        try:
            return str(await run.result(timeout="1 hour"))
        except ff.TimedOut:
            return "timed out"

    async def parked(run: ff.Run[str]) -> ff.Run[str]:
        while (state := await run.state()) is not ff.State.WAITING_CHILDREN:
            assert not state.is_terminal
            await asyncio.sleep(0.01)
        return run

    async with working(app):
        awaited: Any = await (other if what == "an execution" else flow).submit()
        node = awaited if what == "an execution" else awaited["other"]
        run = await parked(await publish.submit(awaited.id))
        await clock.advance(minutes=50)
        early = await parked(await run.fork())
        await clock.advance(minutes=20)
        assert await run.result() == "timed out"
        late = await parked(await run.fork())
        while not await node.waits():
            await asyncio.sleep(0.01)
        await node.signal(payload=None)
        expected = "done" if what == "an execution" else "{'other': 'done'}"
        assert [await early.result(), await late.result()] == [expected] * 2


async def test_a_sleep_of_the_old_one_ends_at_the_same_time_in_the_fork(app: ff.App, clock: Clock) -> None:
    did = Did()

    @app.task
    async def work(ctx: ff.Context) -> str:
        await ctx.sleep("1 hour")
        return await ctx.step("end", lambda: did("end"))

    async with working(app):
        run = await work.submit()
        while await run.state() is not ff.State.DELAYED:
            await asyncio.sleep(0.01)
        await clock.advance(minutes=50)
        fork = await run.fork()
        while await fork.state() is not ff.State.DELAYED:
            await asyncio.sleep(0.01)
        assert did.calls == []
        await clock.advance(minutes=11)
        assert [await run.result(), await fork.result()] == ["end", "end"]
        assert await (await run.fork(before="end")).result() == "end"


async def test_a_running_execution_can_be_forked_and_a_failed_one_too(app: ff.App) -> None:
    did = Did()
    goes_on, fails = asyncio.Event(), [True]

    @app.task
    async def work(ctx: ff.Context) -> str:
        await ctx.step("first", lambda: did("first"))
        if fails[0]:
            await goes_on.wait()
            await ctx.step("broken", lambda: 1 // 0)
        return await ctx.step("last", lambda: did("last"))

    async with working(app):
        run = await work.submit()
        while not await run.steps():
            await asyncio.sleep(0.01)
        fails[0] = False
        fork = await run.fork()
        assert await fork.result() == "last"
        goes_on.set()
        with pytest.raises(TaskFailed):
            await run.result()
        again = await run.fork(before="broken")
        assert await again.result() == "last"
        # A failed step is not a result: the fork tries it, and here the code no longer asks for it.
        third = await run.fork()
        assert await third.result() == "last"
    assert did.calls == ["first", "last", "last", "last"]


async def test_a_fork_that_is_retried_and_forked_keeps_its_steps(app: ff.App) -> None:
    did = Did()
    attempts: list[int] = []

    @app.task(retry=ff.RetryPolicy(max_retries=2, backoff=ff.Fixed(0.01)))
    async def work(ctx: ff.Context) -> str:
        await ctx.step("first", lambda: did("first"))
        attempts.append(1)
        if len(attempts) in (2, 3):
            raise LookupError("not yet")
        return await ctx.step("second", lambda: did("second"))

    async with working(app):
        run = await work.submit()
        await run.result()
        fork = await run.fork(before="second")
        assert await fork.result() == "second"
        assert (await fork.get()).retry_count == 2
        of_the_fork = await fork.fork(before="second")
        assert await of_the_fork.result() == "second"
    assert did.calls == ["first", "second", "second", "second"]
    assert (await of_the_fork.get()).forked_from == fork.execution_id


async def test_a_fork_with_other_arguments_may_take_another_branch(app: ff.App) -> None:
    did = Did()

    @app.task
    async def work(ctx: ff.Context, path: str) -> list[str]:
        return [await ctx.step(path, lambda: did(path)), await ctx.step("end", lambda: did("end"))]

    async with working(app):
        run = await work.submit("a")
        await run.result()
        fork = await run.fork(before="end", payload={"path": "b"})
        assert await fork.result() == ["b", "end"]
        assert (await fork.get()).total_attempt_count == 1
    assert did.calls == ["a", "end", "b", "end"]


async def test_a_node_of_a_flow_is_forked_with_its_arguments(app: ff.App) -> None:
    did = Did()

    @app.task
    async def first() -> str:
        return did("first")

    @app.task
    async def second(ctx: ff.Context, given: str) -> str:
        await ctx.step("one", lambda: did(f"one {given}"))
        return await ctx.step("two", lambda: did(f"two {given}"))

    flow = app.flow("f")
    flow.add(second, flow.add(first, name="first"), name="second")
    async with working(app):
        run = await flow.submit()
        await run.result()
        node = run["second"]
        with pytest.raises(InvalidInput) as refused:
            await node.fork(before="two")
        assert refused.value.field == "payload"
        fork = await node.fork(before="two", payload={"given": "other"})
        assert await fork.result() == "two other"
        assert (await fork.get()).flow_id is None
    assert did.calls == ["first", "one first", "two first", "two other"]


async def test_a_fork_runs_with_the_newest_version_and_the_code_of_then(database: str) -> None:
    """The old run belongs to version 1. Its fork begins in version 2, which has other steps after the first."""
    did = Did()

    def made(version: int) -> ff.App:
        app = ff.App(database, name="forks")

        @app.task(name="write", version=version)
        async def write(ctx: ff.Context) -> str:
            await ctx.step("research", lambda: did(f"research {version}"))
            if version == 1:
                await ctx.step("outline", lambda: did("outline"))
            else:
                await ctx.step("sketch", lambda: did("sketch"))
            return await ctx.step("draft", lambda: did(f"draft {version}"))

        return app

    async with made(1) as old, working(old):
        run = await old.tasks["write"].submit()
        assert await run.result() == "draft 1"
    async with made(2) as new, working(new):
        forks = [await new.tasks["write"].run(run.id).fork(before=step) for step in ("outline", "draft", None)]
        # What the new code does not ask for is left out: the fork is not stopped as changed code.
        assert [await one.result() for one in forks] == ["draft 2", "draft 2", "draft 1"]
        assert [(await one.get()).version for one in forks] == [2, 2, 2]
    assert did.calls[:3] == ["research 1", "outline", "draft 1"]
    assert sorted(did.calls[3:]) == ["draft 2"] * 2 + ["sketch"] * 3


async def test_a_fork_of_a_replayed_run_has_the_steps_of_its_last_generation(app: ff.App) -> None:
    did = Did()

    @app.task
    async def write(ctx: ff.Context) -> list[str]:
        return [await ctx.step(name, lambda name=name: did(f"{name} {len(did.calls)}")) for name in ("a", "b")]

    async with working(app):
        run = await write.submit()
        assert await run.result() == ["a 0", "b 1"]
        await run.replay()
        while (await run.result()) == ["a 0", "b 1"]:
            await asyncio.sleep(0.01)
        fork = await run.fork(before="b")
        assert await fork.result() == ["a 2", "b 4"]


async def test_a_fork_after_a_flow_of_the_task_keeps_its_results(app: ff.App) -> None:
    did = Did()

    @app.task
    async def part(n: int) -> str:
        return did(f"part {n}")

    flow = app.flow("parts")
    flow.add(part, 1, name="one")
    flow.add(part, 2, name="two")

    @app.task
    async def whole(ctx: ff.Context, end: str = "old") -> str:
        run = await flow.submit()
        found = await run.result()
        return await ctx.step("end", lambda: did(f"{end} {len(found)}"))

    async with working(app):
        first = await whole.submit()
        assert await first.result() == "old 2"
        fork = await first.fork(before="end", payload={"end": "new"})
        assert await fork.result() == "new 2"
    assert sorted(did.calls) == ["new 2", "old 2", "part 1", "part 2"]


async def test_a_fork_is_refused_with_a_reason_and_nothing_is_made(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    engine = plain_engine
    held = await started(engine)
    await engine.record_steps([(held.handle, NewStep(name=name, result=b"1")) for name in ("a", "b")])
    with pytest.raises(InvalidInput, match="has not recorded c") as refused:
        await engine.fork_execution(held.execution_id, before_step=("c", 0))
    assert (refused.value.field, refused.value.allowed) == ("before_step", "a, b")
    with pytest.raises(InvalidInput, match="has not recorded a #2"):
        await engine.fork_execution(held.execution_id, before_step=("a", 1))
    redacted = await submit(engine)
    await engine.cancel(Operator(redacted), "no")
    await engine.redact_execution(redacted)
    for gone in (engine.mint_id(), redacted):
        with pytest.raises(NotFound):
            await engine.fork_execution(gone, before_step=None)
    for taken in (held.execution_id, await submit(engine)):
        with pytest.raises(Conflict, match="duplicate_submission") as conflict:
            await engine.fork_execution(held.execution_id, before_step=("b", 0), new_id=taken)
        assert conflict.value.existing == str(taken)
    await engine.set_lane_state("default", LaneState.DRAINING)
    with pytest.raises(StateError, match="lane_closed"):
        await engine.fork_execution(held.execution_id, before_step=None)
    assert await sql.fetchval("select count(*) from flowfabric.execution") == 3
    assert await sql.fetchval("select count(*) from flowfabric.step") == 2


BAD: list[tuple[dict[str, Any], str]] = [
    ({"before_step": "a"}, "before_step"),
    ({"before_step": ("", 0)}, "before_step"),
    ({"before_step": ("a", -1)}, "before_step"),
    ({"before_step": ("a\x00", 0)}, "before_step"),
    ({"before_step": None, "payload": "text"}, "payload"),
    ({"before_step": None, "payload_encoding": "x"}, "payload_encoding"),
    ({"before_step": None, "creator_identity": "x" * 300}, "creator_identity"),
]


@each(("arguments", "field"), BAD)
async def test_bad_input_is_named(plain_engine: ff.Engine, arguments: dict[str, Any], field: str) -> None:
    made = await submit(plain_engine)
    with pytest.raises(InvalidInput) as refused:
        await plain_engine.fork_execution(made, **arguments)
    assert refused.value.field == field


async def test_a_payload_that_does_not_fit_the_task_is_refused(app: ff.App) -> None:
    @app.task
    async def work(count: int) -> int:
        return count

    async with working(app):
        run = await work.submit(1)
        await run.result()
        for payload, field in (({"count": "x"}, "count"), ({"other": 1}, "other"), ([1], "payload")):
            with pytest.raises(InvalidInput) as refused:
                await run.fork(payload=payload)  # type: ignore[arg-type]
            assert refused.value.field == field
        client = await app.client()
        with pytest.raises(NotFound):
            await client.fork(client.engine.mint_id(), payload={"count": 1})
        assert len((await client.find()).items) == 1


@dataclasses.dataclass
class Order:
    number: int
    due: datetime


async def test_arguments_of_any_type_stay_when_another_one_is_replaced(app: ff.App) -> None:
    @app.task
    async def work(order: Order, day: date, note: str = "") -> str:
        return f"{order.number} {order.due.year} {day} {note}"

    async with working(app):
        run = await work.submit(Order(7, datetime(2026, 1, 2, tzinfo=UTC)), date(2026, 3, 4))
        assert await run.result() == "7 2026 2026-03-04 "
        assert await (await run.fork(payload={"note": "again"})).result() == "7 2026 2026-03-04 again"
        fork = await run.fork(payload={"day": date(2026, 5, 6)})
        assert await fork.result() == "7 2026 2026-05-06 "


class Bound:
    """A codec that binds what it stores to its execution."""

    name = "bound"
    binds = True

    def encode(self, data: bytes, execution_id: Any, /) -> bytes:
        return data

    def decode(self, data: bytes, execution_id: Any, /) -> bytes:
        return data


async def test_codecs_that_bind_refuse_forks(database: str) -> None:
    app = ff.App(database, name="bound", codecs=[Bound()])
    client = await app.client()
    with pytest.raises(Unavailable):
        await client.fork(client.engine.mint_id())
    await app.close()


async def test_a_fork_has_the_named_limits_and_not_the_budget_of_the_run(app: ff.App) -> None:
    app.budget("team", hard={"tokens": 100})

    @app.task(budgets=["team"])
    async def agent(ctx: ff.Context) -> str:
        await ctx.usage(tokens=10)
        await ctx.step("a", lambda: None)
        await ctx.usage(tokens=3)
        return "done"

    @app.task
    async def own(ctx: ff.Context) -> str:
        await ctx.usage(tokens=10)
        return "done"

    async with working(app):
        shared = await agent.options(budget=ff.Budget(tokens=50)).submit()
        alone = await own.options(budget=ff.Budget(tokens=50)).submit()
        assert [await shared.result(), await alone.result()] == ["done", "done"]
        first, second = await shared.fork(before="a"), await alone.fork()
        assert [await first.result(), await second.result()] == ["done", "done"]
    engine = (await app.client()).engine
    [team] = set((await shared.get()).budget_ids) - {shared.execution_id}
    assert tuple((await first.get()).budget_ids) == (team,)
    assert tuple((await second.get()).budget_ids) == ()
    assert (await engine.get_budget_status(team)).usage == {"tokens": 16}  # a fork reports what it uses after that step
