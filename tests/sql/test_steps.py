"""Durable steps in the database: who may record them, which records stay, which are replaced, which are deleted."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import asyncpg
import msgspec
import pytest

import flowfabric as ff
from flowfabric.errors import StateError, ValidationFailed
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.lease import Fence, Handle, Operator
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.step import NewStep, Step, StepCursor
from tests.ids import home, id_in
from tests.sql.cases import NOT_HELD, Case, World, outcome, stranger
from tests.support import OTHER, RETRY, STATES, WORKER, claim_one, new_id, started, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")
BOOM = '{"type": "ValueError", "message": "boom"}'
CHILD = NewExecution(execution_kind="child", lane_id="children")


async def record(engine: ff.Engine, handle: Handle | Fence, name: str = "s", n: int = 0, **fields: Any) -> Any:
    (answer,) = await engine.record_steps([(handle, NewStep(name=name, n=n, **fields))])
    if isinstance(answer, ff.FlowFabricError):
        raise answer
    return answer


async def lapse(world: World, execution_id: ff.ExecutionId) -> None:
    """Let the lease run out, and have that noticed."""
    await world.clock.advance(seconds=31)
    await world.engine.mark_lease_expired_if_due(execution_id)


async def remembered(engine: ff.Engine, execution_id: ff.ExecutionId, **which: Any) -> list[tuple[Any, ...]]:
    """Name, number and what it holds, of everything remembered."""
    steps = await engine.read_steps([execution_id], **which)
    return [(step.name, step.n, step.error["message"] if step.error else step.result) for step in steps]


# ---- the lease


async def _record(case: Case) -> Any:
    return await record(case.engine, case.handle, result=b"1")


async def _submit(case: Case) -> Any:
    return await case.engine.submit_child(case.handle, "child", 0, CHILD)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("call", [_record, _submit])
async def test_only_the_holder_of_a_live_lease_writes(world: World, state: str, call: Any) -> None:
    case = Case(world, await world.reach(state))
    before = await world.picture(case.id)
    count = await world.sql.fetchval("select count(*) from flowfabric.execution")
    if state == "A":
        assert await outcome(call(case)) == ("none" if call is _record else "Created")
        assert len(await world.engine.read_steps([case.id])) == 1
        return
    refusal = NOT_HELD[max((p for p in NOT_HELD if state.startswith(p)), key=len)]
    assert await outcome(call(case)) == refusal
    assert await world.picture(case.id) == before
    assert await world.sql.fetchval("select count(*) from flowfabric.execution") == count


@pytest.mark.parametrize("part", ["lease_id", "attempt_id", "lease_epoch", "attempt_index"])
@pytest.mark.parametrize("call", [_record, _submit])
async def test_every_part_of_the_fence_counts(world: World, part: str, call: Any) -> None:
    case = Case(world, await world.reach("A"))
    real = getattr(case.handle, part)
    case.handle = msgspec.structs.replace(case.handle, **{part: real + 1 if isinstance(real, int) else new_id()})
    before = await world.picture(case.id)
    assert await outcome(call(case)) == "stale_lease"
    assert await world.picture(case.id) == before
    assert await world.sql.fetchval("select count(*) from flowfabric.execution") == 1


@pytest.mark.parametrize("call", [_record, _submit])
async def test_a_lease_that_lapsed_is_marked_and_nothing_is_written(world: World, call: Any) -> None:
    case = Case(world, await world.reach("A"))
    await world.clock.advance(seconds=31)
    assert await outcome(call(case)) == "lease_expired"
    assert await world.at(case.id) == "X"
    assert await world.engine.read_steps([case.id]) == []
    assert await world.sql.fetchval("select count(*) from flowfabric.execution") == 1


async def test_an_operator_has_no_way_to_write_a_step(world: World) -> None:
    at = await world.reach("A")
    for call in (
        lambda: record(world.engine, Operator(at.id)),  # type: ignore[arg-type]
        lambda: world.engine.submit_child(Operator(at.id), "s", 0, CHILD),  # type: ignore[arg-type]
        lambda: world.engine.park(Operator(at.id), ends_of=[id_in(1)]),  # type: ignore[arg-type]
    ):
        with pytest.raises(ff.InvalidInput, match="fence_required"):
            await call()
    assert await world.engine.read_steps([at.id]) == []


async def test_many_executions_in_one_call_each_get_their_own_verdict(world: World) -> None:
    held = [await started(world.engine) for _ in range(3)]
    gone = stranger(id_in(9))
    stale = msgspec.structs.replace(held[1].handle, lease_id=new_id())
    items: list[Any] = [
        (held[0].handle, NewStep(name="a", result=b"0")),
        (gone, NewStep(name="a")),
        (stale, NewStep(name="a")),
        (held[1].handle, NewStep(name="t", kind="now")),
        (held[2].handle, NewStep(name="bad\0name")),
        (held[2].handle, NewStep(name="z", kind="sleep", pause=timedelta(seconds=60))),
        (held[2].handle, NewStep(name="a", error=BOOM)),
        (held[0].handle, NewStep(name="b", result=b"")),
    ]
    answers = await world.engine.record_steps(items)
    now = await world.clock.now()
    assert [type(answer).__name__ for answer in answers] == [
        "NoneType", "NotFound", "LeaseLost", "datetime", "InvalidInput", "datetime", "NoneType", "NoneType",
    ]  # fmt: skip
    assert abs(answers[3] - now) < timedelta(seconds=10)
    assert answers[5] - answers[3] == timedelta(seconds=60)
    assert await remembered(world.engine, held[0].execution_id) == [("a", 0, b"0"), ("b", 0, b"")]
    assert await remembered(world.engine, held[1].execution_id) == [("t", 0, None)]
    assert await remembered(world.engine, held[2].execution_id) == [("z", 0, None), ("a", 0, "boom")]


# ---- what stays


async def test_a_repeated_call_changes_nothing_and_returns_the_same(world: World) -> None:
    held = await started(world.engine)
    items = [
        (held.handle, NewStep(name="a", result=b"1", encoding="e", seconds=0.5)),
        (held.handle, NewStep(name="t", kind="now")),
        (held.handle, NewStep(name="z", kind="sleep", pause=timedelta(hours=1))),
    ]
    first = await world.engine.record_steps(items)
    before = await world.picture(held.execution_id)
    await world.clock.advance(seconds=5)
    assert await world.engine.record_steps(items) == first
    assert await world.picture(held.execution_id) == before


@pytest.mark.parametrize("later", [{"result": b"2"}, {"error": BOOM}, {}])
async def test_a_finished_step_never_changes(world: World, later: dict[str, Any]) -> None:
    held = await started(world.engine)
    await record(world.engine, held.handle, result=b"1", seconds=1.0)
    before = await world.engine.read_steps([held.execution_id])
    await record(world.engine, held.handle, **later)
    assert await world.engine.read_steps([held.execution_id]) == before


@pytest.mark.parametrize(
    ("later", "holds"),
    [({"result": b"2"}, b"2"), ({"error": '{"message": "again"}'}, "again"), ({}, None)],
)
async def test_a_failure_is_replaced_by_the_next_record(world: World, later: dict[str, Any], holds: Any) -> None:
    held = await started(world.engine)
    await record(world.engine, held.handle, error=BOOM, seconds=1.0)
    await record(world.engine, held.handle, **later)
    assert await remembered(world.engine, held.execution_id) == [("s", 0, holds)]


async def test_each_kind_has_names_of_its_own(world: World) -> None:
    held = await started(world.engine)
    await record(world.engine, held.handle, "x", error=BOOM)
    until = await record(world.engine, held.handle, "x", kind="sleep", pause=timedelta(minutes=5))
    now = await record(world.engine, held.handle, "x", kind="now")
    await record(world.engine, held.handle, "x", kind="result", result=b"1")
    child = await world.engine.submit_child(held.handle, "x", 0, CHILD)
    found = {step.kind: step for step in await world.engine.read_steps([held.execution_id])}
    assert len(found) == 5
    assert (found["sleep"].at, found["now"].at, found["result"].result) == (until, now, b"1")
    assert found["submit"].child_id == child.execution_id
    assert found["step"].error == {"type": "ValueError", "message": "boom"}


@pytest.mark.parametrize(
    ("order", "holds"), [("ok ok", b"0"), ("ok fail", b"0"), ("fail ok", b"1"), ("fail fail", "boom")]
)
async def test_an_item_given_twice_in_one_call_is_one_step(world: World, order: str, holds: Any) -> None:
    held = await started(world.engine)
    items = [
        (held.handle, NewStep(name="s", result=str(n).encode()) if word == "ok" else NewStep(name="s", error=BOOM))
        for n, word in enumerate(order.split())
    ]
    assert await world.engine.record_steps(items) == [None, None]
    assert await remembered(world.engine, held.execution_id) == [("s", 0, holds)]


async def test_a_step_is_known_by_execution_name_and_number(world: World) -> None:
    one, two = await started(world.engine), await started(world.engine)
    keys = [(handle, name, n) for handle in (one.handle, two.handle) for name in ("a", "A", "a ", "é") for n in (0, 1)]
    values = [str(place).encode() for place in range(len(keys))]
    await world.engine.record_steps(
        [(h, NewStep(name=name, n=n, result=value)) for (h, name, n), value in zip(keys, values, strict=True)]
    )
    both = await world.engine.read_steps([two.execution_id, one.execution_id])
    assert {(step.execution_id, step.name, step.n): step.result for step in both} == {
        (handle.execution_id, name, n): value for (handle, name, n), value in zip(keys, values, strict=True)
    }


async def test_a_step_holds_all_that_was_given(world: World) -> None:
    held = await started(world.engine, policy=RETRY)
    await record(world.engine, held.handle, "a", 3, result=b"\0\xff", encoding="zip", seconds=0.25)
    now = await world.clock.now()
    (step,) = await world.engine.read_steps([held.execution_id])
    assert step == Step(
        execution_id=held.execution_id,
        generation=0,
        name="a",
        n=3,
        kind="step",
        run=0,
        attempt_index=0,
        result=b"\0\xff",
        encoding="zip",
        error=None,
        at=None,
        child_id=None,
        seconds=0.25,
        recorded_at=step.recorded_at,
    )
    assert now - timedelta(seconds=10) < step.recorded_at <= now


async def test_steps_outlive_a_retry_a_reclaim_a_release_and_a_parking(world: World) -> None:
    held = await started(world.engine, policy=RETRY)
    execution_id = held.execution_id
    await record(world.engine, held.handle, "first", result=b"1")
    await record(world.engine, held.handle, "broken", error=BOOM)
    await world.engine.fail(held.handle, "boom")
    await world.clock.advance(seconds=11)
    await world.engine.promote_delayed(execution_id)
    held = await claim_one(world.engine)
    await record(world.engine, held.handle, "retried", result=b"2")
    await lapse(world, execution_id)
    held = await claim_one(world.engine, **OTHER)
    assert held.attempt_type == "reclaim"
    await record(world.engine, held.handle, "reclaimed", result=b"3")
    await world.engine.release(held.handle)
    held = await claim_one(world.engine)
    await record(world.engine, held.handle, "released", result=b"4")
    await world.engine.park(held.handle, until=await world.clock.now() + timedelta(seconds=5))
    await world.clock.advance(seconds=6)
    await world.engine.promote_delayed(execution_id)
    held = await claim_one(world.engine)
    await record(world.engine, held.handle, "parked", result=b"5")
    steps = await world.engine.read_steps([execution_id])
    assert [(s.name, s.generation, s.run, s.attempt_index) for s in steps] == [
        ("first", 0, 0, 0), ("broken", 0, 0, 0), ("retried", 0, 1, 1), ("reclaimed", 0, 1, 2), ("released", 0, 1, 2),
        ("parked", 0, 1, 2),
    ]  # fmt: skip
    await record(world.engine, held.handle, "broken", result=b"6")
    assert ("broken", 0, b"6") in await remembered(world.engine, execution_id)


@pytest.mark.parametrize("end", ["fail", "cancel", "expire", "cap"])
async def test_replaying_anything_but_a_success_keeps_the_steps(world: World, end: str) -> None:
    policy = ExecutionPolicy(max_reclaim_count=0)
    held = await started(world.engine, execution_deadline_at=timedelta(minutes=1), policy=policy)
    await record(world.engine, held.handle, result=b"1")
    match end:
        case "fail":
            await world.engine.fail(held.handle, "boom")
        case "cancel":
            await world.engine.cancel(held.handle, "enough")
        case "expire":
            await world.clock.advance(minutes=2)
            await world.engine.expire_execution(held.execution_id, "execution_deadline")
        case "cap":
            await lapse(world, held.execution_id)
            assert await world.engine.claim(**WORKER) is None
    await world.engine.replay_execution(held.execution_id)
    again = await claim_one(world.engine)
    assert await remembered(world.engine, held.execution_id) == [("s", 0, b"1")]
    await record(world.engine, again.handle, "t", result=b"2")
    steps = await world.engine.read_steps([held.execution_id])
    assert [(s.name, s.generation, s.run) for s in steps] == [("s", 0, 0), ("t", 0, 1)]


async def test_replaying_a_success_begins_a_new_generation(world: World) -> None:
    held = await started(world.engine)
    for generation in range(3):
        assert await remembered(world.engine, held.execution_id) == []
        await record(world.engine, held.handle, result=str(generation).encode())
        assert await remembered(world.engine, held.execution_id) == [("s", 0, str(generation).encode())]
        await world.engine.complete(held.handle)
        await world.engine.replay_execution(held.execution_id)
        held = await claim_one(world.engine)
    every = await world.engine.read_steps([held.execution_id], all_generations=True)
    assert [(s.generation, s.run, s.result) for s in every] == [(0, 0, b"0"), (1, 1, b"1"), (2, 2, b"2")]


async def test_records_of_a_displaced_worker_stay_and_later_ones_are_refused(world: World) -> None:
    held = await started(world.engine)
    await record(world.engine, held.handle, "a", result=b"mine")
    await lapse(world, held.execution_id)
    other = await claim_one(world.engine, **OTHER)
    with pytest.raises(ff.LeaseLost):
        await record(world.engine, held.handle, "b", result=b"late")
    await record(world.engine, other.handle, "b", result=b"theirs")
    with pytest.raises(ff.LeaseLost):
        await record(world.engine, held.handle, "b", result=b"later")
    assert await remembered(world.engine, held.execution_id) == [("a", 0, b"mine"), ("b", 0, b"theirs")]


async def test_a_thousand_steps_in_one_call_and_no_more(world: World) -> None:
    world.engine.checking = False
    held = await started(world.engine)
    items = [(held.handle, NewStep(name="s", n=n, result=str(n).encode())) for n in range(1001)]
    with pytest.raises(ff.InvalidInput, match="at most 1000"):
        await world.engine.record_steps(items)
    assert await world.engine.record_steps(items[:1000]) == [None] * 1000
    assert await world.engine.record_steps([]) == []
    found = await world.engine.read_steps([held.execution_id])
    assert sorted((s.n, s.result) for s in found) == [(n, str(n).encode()) for n in range(1000)]


# ---- forgetting


async def test_steps_go_with_their_execution(world: World) -> None:
    gone, kept = await started(world.engine), await started(world.engine)
    for held in (gone, kept):
        await record(world.engine, held.handle, result=b"1")
    await world.engine.renew(kept.handle, lease_ttl=timedelta(days=99))
    await world.engine.complete(gone.handle)
    await world.clock.advance(days=8)
    assert await world.engine.trim_retention() == 1
    assert await world.engine.read_steps([gone.execution_id], all_generations=True) == []
    assert [row["id"] for row in await world.sql.fetch("select id from flowfabric.step")] == [kept.execution_id]


async def test_the_audit_finds_an_orphaned_step(world: World) -> None:
    held = await started(world.engine)
    await record(world.engine, held.handle)
    await world.sql.execute("update flowfabric.step set generation = 1")
    assert [v.rule for v in await world.engine.audit()] == ["step_orphan"]
    await world.sql.execute("update flowfabric.step set generation = 0, id = gen_random_uuid()")
    assert [v.rule for v in await world.engine.audit()] == ["step_orphan"]
    await world.sql.execute("delete from flowfabric.step")


# ---- submitting another


async def test_a_child_is_made_and_remembered_together(world: World) -> None:
    held = await started(world.engine)
    made = await world.engine.submit_child(held.handle, "child", 0, CHILD)
    assert isinstance(made, Created)
    assert await world.at(made.execution_id) == "W.1"
    (step,) = await world.engine.read_steps([held.execution_id])
    assert (step.kind, step.name, step.n, step.child_id) == ("submit", "child", 0, made.execution_id)


async def test_a_child_that_is_delayed_or_has_tags_is_remembered_by_its_own_id(world: World) -> None:
    held = await started(world.engine)
    items = [
        NewExecution(execution_kind="c", delay_until=timedelta(hours=1)),
        NewExecution(execution_kind="c", tags={"a.b": "c"}, policy=RETRY, priority=5, namespace="n"),
        NewExecution(execution_kind="c", execution_id=world.engine.mint_id(parent_id=held.execution_id)),
        NewExecution(execution_kind="c", idempotency_key="k", execution_deadline_at=timedelta(hours=1)),
    ]
    made = [(await world.engine.submit_child(held.handle, "c", n, item)) for n, item in enumerate(items)]
    steps = await world.engine.read_steps([held.execution_id])
    assert [step.child_id for step in steps] == [child.execution_id for child in made]
    assert [await world.at(child.execution_id) for child in made] == ["D.1", "W.1", "W.1", "W.1"]


async def test_the_same_name_and_number_again_gives_the_child_that_was_made(world: World) -> None:
    held = await started(world.engine)
    made = await world.engine.submit_child(held.handle, "child", 0, CHILD)
    again = await world.engine.submit_child(held.handle, "child", 0, CHILD)
    assert again == Duplicate(made.execution_id)
    assert await world.sql.fetchval("select count(*) from flowfabric.execution") == 2


async def test_a_known_key_returns_and_records_the_existing_execution(world: World) -> None:
    standing = await submit(world.engine, lane_id="other", idempotency_key="k")
    held = await started(world.engine)
    item = NewExecution(execution_kind="child", idempotency_key="k")
    assert await world.engine.submit_child(held.handle, "child", 0, item) == Duplicate(standing)
    (step,) = await world.engine.read_steps([held.execution_id])
    assert (step.child_id, step.encoding, step.outcome) == (standing, None, "known")
    assert await world.sql.fetchval("select count(*) from flowfabric.execution") == 2


@pytest.mark.parametrize("state", ["draining", "disabled"])
async def test_a_closed_lane_makes_nothing_and_remembers_nothing(world: World, state: str) -> None:
    held = await started(world.engine)
    await world.engine.set_lane_state("children", state)
    before = await world.picture(held.execution_id)
    with pytest.raises(StateError) as caught:
        await world.engine.submit_child(held.handle, "child", 0, CHILD)
    assert caught.value.kind == "lane_closed"
    assert await world.picture(held.execution_id) == before
    await world.engine.set_lane_state("children", "active")
    assert isinstance(await world.engine.submit_child(held.handle, "child", 0, CHILD), Created)


async def test_a_bad_policy_makes_nothing_and_remembers_nothing(world: World) -> None:
    held = await started(world.engine)
    with pytest.raises(ValidationFailed) as caught:
        await world.engine.submit_child(
            held.handle, "child", 0, NewExecution(execution_kind="c", policy={"max_replay_count": -1})
        )
    assert caught.value.kind == "invalid_policy_json"
    assert await world.engine.read_steps([held.execution_id]) == []


async def test_a_child_is_one_statement(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    held = await started(world.engine)
    statements: list[str] = []
    fetch = type(world.engine._database).fetch

    async def noted(self: Any, sql: str, args: Any, *, repeatable: bool = False) -> Any:
        statements.append(sql)
        return await fetch(self, sql, args, repeatable=repeatable)

    world.engine.checking = False
    monkeypatch.setattr(type(world.engine._database), "fetch", noted)
    await world.engine.submit_child(held.handle, "child", 0, CHILD)
    assert len(statements) == 1


async def test_a_lost_response_does_not_create_a_second_child(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statement is committed, its answer never arrives, and it is asked again on another connection."""
    held = await started(world.engine)
    fetch = asyncpg.Connection.fetch
    lost: list[str] = []

    async def losing(self: Any, query: str, *args: Any, **options: Any) -> Any:
        answer = await fetch(self, query, *args, **options)
        if "submit_child" in query and not lost:
            lost.append(query)
            raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")
        return answer

    monkeypatch.setattr(asyncpg.Connection, "fetch", losing)
    made = await world.engine.submit_child(held.handle, "child", 0, CHILD)
    assert lost
    (step,) = await world.engine.read_steps([held.execution_id])
    assert step.child_id == made.execution_id
    assert await world.sql.fetchval("select count(*) from flowfabric.execution") == 2


# ---- pages


@pytest.mark.both_servers
@pytest.mark.parametrize("size", [1, 2, 5, 100])
async def test_pages_of_steps_are_the_whole_list_cut(world: World, size: int) -> None:
    held = await started(world.engine)
    for call in range(3):  # the steps of one call have one time
        names = [NewStep(name=f"{name} {call}") for name in "cabd"]
        await world.engine.record_steps([(held.handle, one) for one in names])
    whole = await world.engine.read_steps([held.execution_id])
    assert [one.name[0] for one in whole] == list("cabd" * 3)
    seen: list[Step] = []
    after: StepCursor | None = None
    while page := await world.engine.read_steps([held.execution_id], after=after, limit=size):
        assert len(page) <= size
        seen += page
        after = StepCursor.decode(StepCursor.of(page, after).encode())
    assert seen == whole


# ---- plans


async def pages(sql: asyncpg.Connection[Any], statement: str) -> int:
    """How many pages of tables and indexes a statement looks at, with everything the functions in it do."""
    (plan,) = json.loads(await sql.fetchval(f"explain (analyze, buffers, format json) {statement}"))
    return int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])


@pytest.mark.both_servers
async def test_the_steps_of_others_cost_nothing(world: World) -> None:
    world.engine.checking = False
    held = await started(world.engine)
    at = f"array[{home(held.execution_id)}], array['{held.execution_id}'::uuid]"
    handle = held.handle
    read = f"select * from flowfabric.read_steps({at}, false, null, null, 0, null)"
    fence = f"array['{handle.lease_id}'::uuid], array[{handle.lease_epoch}::bigint], array['{handle.attempt_id}'::uuid]"
    nothing = ", ".join(["null"] * 10)
    write = f"select * from flowfabric.record_steps({at}, {fence}, array[0], array['%s'], array[0], {nothing})"
    await pages(world.sql, write % "warm up")
    await pages(world.sql, read)
    alone = await pages(world.sql, read), await pages(world.sql, write % "alone")
    await world.sql.execute(
        "insert into flowfabric.step (partition, id, generation, name, n, kind, run, attempt_index, recorded_at)"
        " select i % 256, gen_random_uuid(), 0, 's', 0, 'step', 0, 0, now() from generate_series(1, 20000) i"
    )
    crowded = await pages(world.sql, read), await pages(world.sql, write % "crowded")
    await world.sql.execute("delete from flowfabric.step where id <> $1", held.execution_id)
    assert crowded[0] <= alone[0] + 10 and crowded[1] <= alone[1] + 20, (alone, crowded)
