"""Executions that changed code stopped: who may claim them and when, what they keep, and how else they end."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.values.attempt import Claimed
from flowfabric.values.execution import Execution
from flowfabric.values.ids import FlowId, mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, TimeoutPolicy
from flowfabric.values.step import NewStep
from flowfabric.values.worker import Serves, why_unserved
from tests import sampling
from tests.interleave import Party, Stage, settled, waiting
from tests.support import RETRY, WORKER, CheckedEngine, Clock, claim_one, submit, submit_member

SQL: TypeAlias = "asyncpg.Connection[Any]"
DETAIL = "recorded: mail; asked for: send mail"
OLD, NEW, THIRD = ({"test": Serves(digest=digest)} for digest in ("old", "new", "third"))
MINUTE = timedelta(minutes=1)


async def begun(engine: ff.Engine, kinds: Any = None, **fields: Any) -> Claimed:
    await submit(engine, **fields)
    return await claim_one(engine, kinds=kinds)


async def stop(engine: ff.Engine, claimed: Claimed, digest: str = "new") -> Any:
    return await engine.stop_changed(claimed.handle, detail=DETAIL, digest=digest)


async def record_of(engine: ff.Engine, execution_id: ff.ExecutionId) -> Execution:
    record = await engine.read_execution(execution_id)
    assert record is not None
    return record


async def stopped_by(engine: ff.Engine, *digests: str, kinds: Any = None) -> ff.ExecutionId:
    """An execution that each of these codes has stopped, one after the other."""
    claimed = await begun(engine, kinds)
    for place, digest in enumerate(digests):
        if place:
            claimed = await claim_one(engine, kinds={"test": Serves(digest=digest)})
        await stop(engine, claimed, digest)
    return claimed.execution_id


async def may_claim(engine: ff.Engine, *kinds: Any) -> list[bool]:
    """Which of them would get the only execution; it is given back in between."""
    found = []
    for each in kinds:
        claimed = await engine.claim(**WORKER, kinds=each)
        found.append(claimed is not None)
        if claimed is not None:
            await engine.release(claimed.handle)
    return found


@pytest.mark.both_servers
async def test_a_stopped_execution_keeps_its_attempt_and_says_what_changed(engine: CheckedEngine, clock: Clock) -> None:
    claimed = await begun(engine, policy=RETRY)
    before = await record_of(engine, claimed.execution_id)
    answer = await stop(engine, claimed)
    assert (answer.public_state, answer.execution_id) == (ff.State.WAITING, claimed.execution_id)
    after = await record_of(engine, claimed.execution_id)
    assert answer.opens_at == after.delay_until == after.last_transition_at + MINUTE
    assert (after.blocking_reason, after.blocking_detail) == ("waiting_for_capable_worker", DETAIL)
    assert after.stops == 1
    for name in ("total_attempt_count", "retry_count", "lease_reclaim_count", "current_attempt", "current_lease_epoch"):
        assert getattr(after, name) == getattr(before, name), name
    events = [
        (one.reason, one.revoked_by) for one in (await engine.list_events(claimed.execution_id)).items if one.reason
    ]
    assert events[-1] == ("steps_changed", "backend")
    with pytest.raises(ff.FlowFabricError) as refused:
        await stop(engine, claimed)
    assert refused.value.kind == "execution_not_active"
    again = await claim_one(engine, kinds=OLD)
    assert (again.handle.kind, again.handle.attempt_id) == ("resumed", claimed.handle.attempt_id)
    running = await record_of(engine, claimed.execution_id)
    assert (running.stops, running.blocking_detail, running.delay_until) == (None, None, None)
    assert running.total_attempt_count == before.total_attempt_count


async def test_other_code_claims_it_at_once_and_the_code_that_stopped_it_from_a_time_on(
    engine: CheckedEngine, clock: Clock
) -> None:
    target = await stopped_by(engine, "new")
    assert await may_claim(engine, NEW, ["test"], None, {"test": [1]}) == [False] * 4, "without a digest: not told"
    await clock.advance(seconds=59)
    assert (await engine.run_timers("delay")).handled == 0
    assert await may_claim(engine, NEW) == [False]
    await clock.advance(seconds=1.1)
    assert (await engine.run_timers("delay")).handled == 1
    record = await record_of(engine, target)
    assert (record.blocking_detail, record.delay_until, record.stops) == (DETAIL, None, 1), "it still says why it waits"
    assert await may_claim(engine, ["test"], NEW, OLD) == [True] * 3


async def test_the_time_doubles_with_every_stop_in_a_row_up_to_an_hour(engine: CheckedEngine, clock: Clock) -> None:
    claimed = await begun(engine)
    for stops, minutes in enumerate([1, 2, 4, 8, 16, 32, 60, 60, 60], 1):
        answer = await stop(engine, claimed)
        record = await record_of(engine, claimed.execution_id)
        assert (record.stops, answer.opens_at - record.last_transition_at) == (stops, minutes * MINUTE)
        await clock.advance(seconds=60 * minutes + 1)
        assert (await engine.run_timers("delay")).handled == 1
        claimed = await claim_one(engine, kinds=NEW)
    # It gets on, and is stopped by a later change.
    await engine.delay(claimed.handle, MINUTE)
    await clock.advance(seconds=61)
    await engine.run_timers("delay")
    answer = await stop(engine, await claim_one(engine, kinds=NEW))
    record = await record_of(engine, claimed.execution_id)
    assert (record.stops, answer.opens_at - record.last_transition_at) == (1, MINUTE)


async def test_codes_that_stopped_it_one_after_the_other_do_not_hand_it_to_each_other(
    engine: CheckedEngine, clock: Clock
) -> None:
    await stopped_by(engine, "new", "old", "older")
    assert await may_claim(engine, NEW, OLD, {"test": Serves(digest="older")}) == [False] * 3
    await clock.advance(seconds=241)
    assert (await engine.run_timers("delay")).handled == 1
    await stop(engine, await claim_one(engine, kinds=NEW), "new")
    assert await may_claim(engine, NEW, OLD) == [False] * 2
    assert await may_claim(engine, THIRD) == [True]


async def test_no_more_than_sixteen_codes_are_remembered(engine: CheckedEngine, sql: SQL) -> None:
    await stopped_by(engine, *(f"code {n}" for n in range(18)))
    kept = await sql.fetchval("select stop_digests from flowfabric.execution")
    assert kept == [f"code {n}" for n in range(2, 18)]


async def test_claims_of_the_code_that_stopped_many_do_not_read_them(engine: CheckedEngine, sql: SQL) -> None:
    """Each set of codes has a route of its own: a claim visits it only if it may take what is there."""
    await stopped_by(engine, "new")
    await stopped_by(engine, "new")
    route = await sql.fetchval("select distinct route from flowfabric.ready")
    assert await sql.fetchval("select not_for from flowfabric.route where id = $1", route) == ["new"]
    target = await submit(engine)
    assert (await claim_one(engine, kinds=NEW)).execution_id == target


async def test_a_version_is_kept_and_other_code_must_serve_it(engine: CheckedEngine, clock: Clock) -> None:
    new = {"test": Serves(versions=(2, 1), digest="new")}
    old = {"test": Serves(versions=(1,), digest="old")}
    target = await stopped_by(engine, "new", kinds=old)
    assert (await record_of(engine, target)).version == 1
    assert await may_claim(engine, new, {"test": Serves(versions=(3,), digest="third")}, OLD) == [False] * 3
    assert await may_claim(engine, old) == [True]
    await stop(engine, await claim_one(engine, kinds=old), "new")
    await clock.advance(seconds=61)
    assert (await engine.run_timers("delay")).handled == 1
    assert await may_claim(engine, NEW) == [False], "the version still counts"
    assert await may_claim(engine, new) == [True]


async def test_the_remaining_time_of_an_attempt_is_kept(engine: CheckedEngine, clock: Clock) -> None:
    policy = ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=timedelta(seconds=20)))
    claimed = await begun(engine, policy=policy)
    assert claimed.attempt_timeout_at is not None
    await clock.advance(seconds=5)
    before = await clock.now()
    await stop(engine, claimed)
    left = claimed.attempt_timeout_at - before, claimed.attempt_timeout_at - await clock.now()
    record = await record_of(engine, claimed.execution_id)
    assert record.attempt_timeout_at is None and record.attempt_timeout_remaining is not None
    assert left[0] >= record.attempt_timeout_remaining >= left[1]
    await clock.advance(seconds=30)
    assert (await engine.run_timers("attempt")).handled == 0
    before = await clock.now()
    again = await claim_one(engine, kinds=OLD)
    assert again.attempt_timeout_at is not None
    found = again.attempt_timeout_at - record.attempt_timeout_remaining
    assert before <= found <= await clock.now()


# How else it ends, or continues


async def test_an_operator_may_fail_it_and_replay_it(engine: CheckedEngine, sql: SQL) -> None:
    old = {"test": Serves(versions=(1,), digest="old")}
    target = await stopped_by(engine, "new", kinds=old)
    await engine.fail(Operator(target), "does not fit", category="steps_changed")
    record = await record_of(engine, target)
    assert (record.public_state, record.failure_category, record.stops) == (ff.State.FAILED, "steps_changed", None)
    (attempt,) = await engine.list_attempts(target)
    assert (attempt.attempt_lifecycle, attempt.failure_reason) == ("ended_failure", "does not fit")
    assert await sql.fetchval("select count(*) from flowfabric.ready") == 0
    assert await sql.fetchval("select count(*) from flowfabric.blocked") == 0
    await engine.replay_execution(target)
    assert (await record_of(engine, target)).version == 1
    assert await may_claim(engine, OLD) == [False]
    assert await may_claim(engine, {"test": Serves(versions=(1,), digest="new")}) == [True], "a replay runs on any code"


async def test_an_operator_fails_only_what_was_stopped_and_not_claimed_since(
    engine: CheckedEngine, clock: Clock
) -> None:
    target = await submit(engine)
    await engine.block_execution_for_admission(target, "waiting_for_capable_worker")
    with pytest.raises(ff.FlowFabricError) as refused:
        await engine.fail(Operator(target), "no")
    assert refused.value.kind == "execution_not_active"
    await engine.cancel(Operator(target), "no")
    other = await stopped_by(engine, "new")
    claimed = await claim_one(engine, kinds=OLD)
    await engine.release(claimed.handle)
    await engine.block_execution_for_admission(other, "waiting_for_capable_worker")
    with pytest.raises(ff.FlowFabricError) as refused:
        await engine.fail(Operator(other), "no")
    assert refused.value.kind == "execution_not_active"


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("way", ["cancel", "fail", "unblock", "deadline", "delete"])
async def test_every_way_out_removes_what_the_stop_left(
    engine: CheckedEngine, sql: SQL, clock: Clock, way: str, opened: bool
) -> None:
    claimed = await begun(engine, execution_deadline_at=timedelta(hours=1))
    target = claimed.execution_id
    await stop(engine, claimed)
    if opened:
        await clock.advance(seconds=61)
        assert (await engine.run_timers("delay")).handled == 1
    match way:
        case "unblock":
            await engine.unblock_execution(target, expected_blocking_reason="waiting_for_capable_worker")
            assert await may_claim(engine, NEW, ["test"]) == [True, True]
            assert await sql.fetchval("select count(*) from flowfabric.blocked") == 0
            await clock.advance(seconds=61)
            assert (await engine.run_timers("delay")).handled == 0
            return
        case "cancel" | "delete":
            await engine.cancel(Operator(target), "enough")
            if way == "delete":
                await engine.delete_execution(target)
        case "fail":
            await engine.fail(Operator(target), "enough")
        case "deadline":
            await clock.advance(hours=2)
            assert (await engine.run_timers("deadline")).handled == 1
    for table in ("ready", "blocked"):
        assert await sql.fetchval(f"select count(*) from flowfabric.{table}") == 0, table
    assert await may_claim(engine, OLD, NEW, None) == [False] * 3


async def test_a_member_of_a_flow_that_gets_a_dependency_waits_for_it_and_is_then_for_everybody(
    engine: CheckedEngine, clock: Clock
) -> None:
    flow = FlowId(mint_uuid())
    target = await submit_member(engine, flow)
    upstream = await submit_member(engine, flow, execution_kind="first")
    await stop(engine, await claim_one(engine, kinds=["test"]))
    edge = mint_uuid()
    await engine.stage_dependency_edge(
        flow, edge_id=edge, upstream_execution_id=upstream, downstream_execution_id=target, expected_graph_revision=2
    )
    await engine.apply_dependency_to_child(
        flow, edge_id=edge, upstream_execution_id=upstream, downstream_execution_id=target
    )
    record = await record_of(engine, target)
    assert (record.public_state, record.delay_until, record.stops) == (ff.State.WAITING_CHILDREN, None, None)
    await engine.complete((await claim_one(engine, kinds=["first"])).handle)
    await engine.dispatch_cascades()
    assert await may_claim(engine, NEW) == [True]


async def test_a_member_of_a_cancelled_flow_is_cancelled_and_not_claimed(engine: CheckedEngine, clock: Clock) -> None:
    flow = FlowId(mint_uuid())
    target = await submit_member(engine, flow)
    await stop(engine, await claim_one(engine))
    await engine.cancel_flow_header(flow)
    record = await record_of(engine, target)
    assert (record.blocking_reason, record.stops, record.delay_until) == ("paused_by_flow_cancel", None, None)
    assert await may_claim(engine, OLD, NEW) == [False, False]
    await clock.advance(minutes=5)
    assert (await engine.run_timers("delay")).handled == 0
    assert (await engine.reconcile_cancellations()).handled == 1
    assert (await record_of(engine, target)).public_state is ff.State.CANCELLED


async def test_a_member_of_a_flow_that_is_being_cancelled_is_stopped_and_not_claimed_any_more(
    engine: CheckedEngine, clock: Clock
) -> None:
    flow = FlowId(mint_uuid())
    target = await submit_member(engine, flow)
    claimed = await claim_one(engine)
    await engine.cancel_flow_header(flow)
    await stop(engine, claimed)
    record = await record_of(engine, target)
    assert (record.blocking_reason, record.delay_until) == ("paused_by_flow_cancel", None)
    assert await may_claim(engine, OLD, NEW) == [False, False]


# Finding them


async def test_stopped_executions_are_found_and_said_to_be_unserved(engine: CheckedEngine, clock: Clock) -> None:
    target = await stopped_by(engine, "new")
    other = await submit(engine)
    await engine.block_execution_for_admission(other, "waiting_for_capable_worker")
    assert [one.execution_id for one in (await engine.find_executions(stopped=True)).items] == [target]
    assert [one.blocking_detail for one in (await engine.find_executions(stopped=True)).items] == [DETAIL]
    assert (await engine.find_executions(stopped=True, kinds=["other"])).items == []
    assert (await engine.find_executions(stopped=True, states=["failed"])).items == []
    listed = {one.execution_id for one in (await engine.find_executions(states=["waiting"])).items}
    assert listed == {target, other}

    async def register(instance: str, digest: str) -> None:
        await engine.register_worker(
            "w", instance, lanes=["default"], liveness_ttl=timedelta(days=1), kinds={"test": Serves(digest=digest)}
        )

    await register("a", "new")
    (found,) = await engine.find_unserved([target])
    assert (found.is_stopped, found.live_workers) == (True, 1)
    assert "changed code stopped test in lane default" in why_unserved(found)
    await register("b", "old")
    assert await engine.find_unserved([target]) == []


async def test_a_stop_wakes_those_with_other_code_only(plain_engine: ff.Engine, sql: SQL) -> None:
    heard: list[str] = []
    await sql.add_listener(f"flowfabric_{plain_engine.instance}", lambda *given: heard.append(str(given[-1])))
    claimed = await begun(plain_engine)

    async def is_woken(kinds: Any) -> bool:
        nonlocal claimed
        await plain_engine.sleep_for_work(["default"], MINUTE, kinds=kinds)
        heard.clear()
        await stop(plain_engine, claimed)
        await sql.fetchval("select 1")
        is_it = bool(heard)
        await sql.execute("delete from flowfabric.sleeper")
        claimed = await claim_one(plain_engine, kinds=THIRD)
        await plain_engine.release(claimed.handle)
        claimed = await claim_one(plain_engine)
        return is_it

    assert [await is_woken(kinds) for kinds in (NEW, ["test"], None)] == [False] * 3
    assert await is_woken(OLD)


# Steps that changed code recorded


async def _record(engine: ff.Engine, claimed: Claimed, *names: str) -> None:
    answers = await engine.record_steps([(claimed.handle, NewStep(name=name, result=b"1")) for name in names])
    assert not any(isinstance(one, ff.FlowFabricError) for one in answers)


async def _strays(engine: ff.Engine, target: ff.ExecutionId) -> dict[str, bool]:
    found = await engine.read_steps([target])
    return {one.name: one.is_stray for one in found}


@pytest.mark.parametrize("way", ["stop", "fail", "retry"])
async def test_steps_of_the_run_that_diverged_are_marked_and_earlier_ones_are_not(
    engine: CheckedEngine, clock: Clock, way: str
) -> None:
    claimed = await begun(engine, policy=RETRY)
    target = claimed.execution_id
    await _record(engine, claimed, "a", "b")
    await engine.release(claimed.handle)
    claimed = await claim_one(engine)
    await _record(engine, claimed, "x")
    if way == "stop":
        await stop(engine, claimed)
    else:
        failure_class = "permanent" if way == "fail" else None
        await engine.fail(claimed.handle, "boom", category="steps_changed", failure_class=failure_class)
    assert await _strays(engine, target) == {"a": False, "b": False, "x": True}
    if way == "fail":
        await engine.replay_execution(target)
    elif way == "retry":
        await clock.advance(seconds=11)
        await engine.run_timers("delay")
    claimed = await claim_one(engine, kinds=OLD)
    await _record(engine, claimed, "c", "x")
    assert await _strays(engine, target) == {"a": False, "b": False, "x": True, "c": False}, "what is recorded stays"


async def test_other_failures_mark_no_step(engine: CheckedEngine) -> None:
    claimed = await begun(engine)
    await _record(engine, claimed, "a")
    await engine.fail(claimed.handle, "boom", category="application", failure_class="permanent")
    assert await _strays(engine, claimed.execution_id) == {"a": False}


# At the same time


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_worker_that_claims_while_it_is_stopped_finds_it_afterwards(stage: Stage, ending: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    claimed = await begun(one)
    await two.claim("elsewhere", **WORKER, kinds=OLD)  # what it serves is known before, as of a worker that registered
    await one.begin()
    await stop(one, claimed)
    assert await two.claim(**WORKER, kinds=OLD) is None
    await one.end(ending)
    found = await two.claim(**WORKER, kinds=OLD)
    assert (found is not None) == (ending == "commit")
    await stage.audit()


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("second", ["cancel", "fail", "stop", "unblock", "revoke"])
async def test_a_call_that_meets_a_stop_waits_for_it(stage: Stage, second: str, ending: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    claimed = await begun(one)
    calls: dict[str, Any] = {
        "cancel": lambda: two.cancel(Operator(claimed.execution_id), "no"),
        "fail": lambda: two.fail(Operator(claimed.execution_id), "no"),
        "stop": lambda: stop(two, claimed, "other"),
        "unblock": lambda: two.unblock_execution(claimed.execution_id),
        "revoke": lambda: two.revoke_lease(claimed.execution_id),
    }
    await one.begin()
    await stop(one, claimed)
    task = await waiting(stage.watch, two, settled(calls[second]()), behind=one)
    await one.end(ending)
    answer = await task
    kinds = {
        ("stop", "commit"): "execution_not_active",
        ("unblock", "rollback"): "execution_not_eligible",
    }
    if expected := kinds.get((second, ending)):
        assert answer.kind == expected
    else:
        assert not isinstance(answer, ff.FlowFabricError), answer
    await stage.audit()


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("first", ["claim", "open", "cancel", "unblock"])
@pytest.mark.parametrize("second", ["claim", "open", "cancel", "unblock"])
async def test_concurrent_calls_on_a_stopped_execution_leave_one_row_or_none(
    stage: Stage, first: str, second: str, ending: str
) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    target = await stopped_by(one, "new")
    await two.claim("elsewhere", **WORKER, kinds=OLD)
    await stage.clock.advance(seconds=61)

    def call(party: Party, name: str) -> Any:
        return {
            "claim": lambda: party.claim(**WORKER, kinds=OLD),
            "open": lambda: party.run_timers("delay"),
            "cancel": lambda: party.cancel(Operator(target), "no"),
            "unblock": lambda: party.unblock_execution(target),
        }[name]()

    await one.begin()
    await settled(call(one, first))
    if second in ("claim", "open"):  # they skip what is locked
        await settled(call(two, second))
        await one.end(ending)
    else:
        task = await waiting(stage.watch, two, settled(call(two, second)), behind=one)
        await one.end(ending)
        await task
    await stage.audit()
    # Nothing is lost: it has ended, runs, or is claimed now or after its timer.
    record = await two.read_execution(target)
    assert record is not None
    if record.public_state is ff.State.WAITING:
        found = await two.claim(**WORKER, kinds=OLD)
        assert found is not None and found.execution_id == target
    else:
        assert record.public_state in (ff.State.ACTIVE, ff.State.CANCELLED)
    await stage.audit()


async def test_two_that_are_stopped_first_by_a_code_make_one_route(stage: Stage) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    first, second = await begun(one), await begun(two)
    await one.begin()
    await stop(one, first)
    task = await waiting(stage.watch, two, settled(stop(two, second)), behind=one)
    await one.commit()
    assert (await task).public_state is ff.State.WAITING
    assert await stage.watch.fetchval("select count(*) from flowfabric.route where not_for is not null") == 1
    await stage.audit()


async def test_workers_of_many_codes_finish_everything_however_often_they_stop_and_die(
    database: str, plain_engine: ff.Engine, clock: Clock
) -> None:
    """An execution fits the code that started it, others stop it; workers die, wait, give back; the last fits all."""
    count = sampling.examples(200, 40)
    chance = random.Random(7)
    targets = [await submit(plain_engine, policy=RETRY) for _ in range(count)]
    fits: dict[ff.ExecutionId, str] = {}
    barred: dict[ff.ExecutionId, tuple[set[str], datetime]] = {}  # who may not have it, and until when
    ended: set[ff.ExecutionId] = set()

    async def work(engine: ff.Engine, now: datetime, code: str, versions: tuple[int, ...]) -> None:
        kinds = {"test": Serves(versions=versions, digest=code)}
        for one in await engine.claim_many(limit=chance.choice([1, 3, 8]), **WORKER, kinds=kinds):
            target = one.execution_id
            assert target not in ended
            codes, opens = barred.get(target, (set(), None))
            assert code not in codes or (opens is not None and opens <= now), "it was to be left to others"
            own = fits.setdefault(target, code)
            if code not in (own, "last"):
                answer = await engine.stop_changed(
                    one.handle, detail=f"recorded: {own}; asked for: {code}", digest=code
                )
                barred[target] = ({*codes, code}, answer.opens_at)
                continue
            barred.pop(target, None)
            match chance.choice(["die", "release", "delay", "fail", "end", "end"]):
                case "release":
                    await engine.release(one.handle)
                case "delay":
                    await engine.delay(one.handle, timedelta(seconds=5))
                case "fail" if code != "last":
                    await engine.fail(one.handle, "boom")
                case "end":
                    await engine.complete(one.handle)
                    ended.add(target)

    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(await ff.Engine.connect(database, max_size=1)) for _ in range(4)]
        for turn in range(200):
            codes = [("old", (1,)), ("new", (2, 1)), ("newer", (3, 2, 1))] if turn < 25 else [("last", (9, 3, 2, 1))]
            now = await clock.now()
            await asyncio.gather(*(work(engine, now, *chance.choice(codes)) for engine in engines))
            await clock.advance(seconds=chance.choice([1, 20, 70, 400]))
            for kind in ("lease", "delay"):
                while (await plain_engine.run_timers(kind)).more:
                    pass
            if not turn % 20:
                assert await plain_engine.audit(events=True) == []
            if len(ended) == count:
                break
    states = {(await record_of(plain_engine, one)).public_state for one in targets}
    assert states <= {ff.State.COMPLETED, ff.State.FAILED}, states
