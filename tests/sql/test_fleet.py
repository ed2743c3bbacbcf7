"""The fleet as a whole: routes that no live worker covers, as claims, registrations and the duty see them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import Contention
from flowfabric.values.conditions import on
from flowfabric.values.execution import Blocked, Rejected
from flowfabric.values.grant import Granted, NoWork
from flowfabric.values.ids import ExecutionId, mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements
from flowfabric.values.wait import Fresh
from tests.ids import home
from tests.support import WORKER, CheckedEngine, Clock, claim_one, started, submit

SQL: TypeAlias = "asyncpg.Connection[Any]"
TTL = timedelta(seconds=30)


async def needing(engine: ff.Engine, *capabilities: str, **fields: Any) -> ExecutionId:
    """Submit one that requires capabilities."""
    policy = ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=capabilities))
    return await submit(engine, policy=policy, **fields)


async def register(engine: ff.Engine, instance: str = "w-1", **fields: Any) -> None:
    given = {"worker_id": "w", "lanes": ["default"], "liveness_ttl": TTL} | fields
    await engine.register_worker(worker_instance_id=instance, **given)


async def seen(engine: ff.Engine, execution_id: ExecutionId) -> tuple[str, str, str]:
    """Its eligibility, blocking reason and public state, the same in records and in lists."""
    found = await engine.read_execution(execution_id)
    assert found is not None
    page = await engine.find_executions(states=[found.public_state])
    (listed,) = [one for one in page.items if one.execution_id == execution_id]
    assert listed.state_vector == found.state_vector
    assert listed.blocking_detail == (found.blocking_detail or "")
    vector = found.state_vector
    return vector.eligibility_state, vector.blocking_reason, vector.public_state


ELIGIBLE = ("eligible_now", "waiting_for_worker", "waiting")
BY_ROUTE = ("blocked_by_route", "waiting_for_capable_worker", "waiting")
BY_LANE = ("blocked_by_lane_state", "paused_by_policy", "waiting")


@pytest.mark.both_servers
async def test_a2_an_execution_that_another_live_worker_can_run_does_not_hide_later_ones_and_is_not_touched(
    engine: CheckedEngine,
) -> None:
    await register(engine, capabilities=["gpu"])
    head = await needing(engine, "gpu", priority=9)
    second = await submit(engine)
    assert (await claim_one(engine)).execution_id == second
    assert await engine.claim(**WORKER) is None, "and a claim that finds nothing"
    assert await seen(engine, head) == ELIGIBLE


@pytest.mark.both_servers
async def test_a3_an_execution_that_no_live_worker_can_run_is_blocked_by_its_route_and_still_waiting(
    engine: CheckedEngine,
) -> None:
    made = await needing(engine, "asr")
    assert await seen(engine, made) == ELIGIBLE
    assert await engine.claim_for_worker(**WORKER, capabilities=["llm"]) == NoWork()
    assert await seen(engine, made) == BY_ROUTE


@pytest.mark.both_servers
async def test_a4_a_worker_that_is_not_registered_gets_it_at_once(engine: CheckedEngine) -> None:
    made = await needing(engine, "asr")
    await engine.claim(**WORKER)
    assert await seen(engine, made) == BY_ROUTE
    granted = await engine.claim_for_worker(**WORKER, capabilities=["asr"])
    assert isinstance(granted, Granted)
    assert granted.grant.execution_id == made
    assert await seen(engine, made) == ELIGIBLE, "one that is granted is as good as claimed"


@pytest.mark.both_servers
async def test_a5_one_worker_must_have_all_that_is_required(engine: CheckedEngine) -> None:
    await register(engine, "g", capabilities=["gpu"])
    await register(engine, "c", capabilities=["cuda"])
    made = await needing(engine, "gpu", "cuda")
    assert await engine.judge_routes() == 1
    assert await engine.judge_routes() == 0
    assert await seen(engine, made) == BY_ROUTE
    await register(engine, "f", capabilities=["gpu", "cuda", "fp16"])
    assert await seen(engine, made) == ELIGIBLE


# Who makes the verdict


async def test_every_kind_of_claim_that_finds_nothing_makes_it(engine: CheckedEngine) -> None:
    claims: dict[str, Any] = {
        "claim": lambda: engine.claim(**WORKER),
        "claim_many": lambda: engine.claim_many(limit=3, **WORKER, kinds=["other"]),
        "claim_lanes": lambda: engine.claim_lanes({"default": 1, "side": 1}, limit=2, **WORKER),
        "claim_for_worker": lambda: engine.claim_for_worker(**WORKER, max_grants=3),
        "of a namespace": lambda: engine.claim(**WORKER, namespace="x"),
        "with versions": lambda: engine.claim(**WORKER, kinds={"test": [1]}, capabilities=["cuda"]),
    }
    for name, claim in claims.items():
        made = await needing(engine, "gpu")
        assert await seen(engine, made) == ELIGIBLE, name
        assert not await claim(), name
        assert await seen(engine, made) == BY_ROUTE, name
        await engine.unblock_execution(made, expected_blocking_reason="waiting_for_capable_worker")
        await engine.cancel(Operator(made), "done")


async def test_a_claim_that_finds_work_makes_no_verdict(engine: CheckedEngine) -> None:
    made = await needing(engine, "gpu", lane_id="side", priority=9)
    beside = await needing(engine, "gpu", priority=9)
    await submit(engine)
    (claimed,) = await engine.claim_lanes({"default": 5, "side": 5}, limit=10, **WORKER)
    assert claimed.execution_id not in (made, beside)
    assert [await seen(engine, one) for one in (made, beside)] == [ELIGIBLE, ELIGIBLE]


async def test_the_polls_of_a_process_that_sleeps_leave_the_verdict_to_the_duty(plain_engine: ff.Engine) -> None:
    asleep = await plain_engine.sleep_for_work(["default", "side"], timedelta(minutes=1))
    made = await needing(plain_engine, "gpu")
    assert await plain_engine.claim_many(limit=1, **WORKER, asleep=asleep) == []
    assert await plain_engine.claim_lanes({"default": 1, "side": 1}, limit=1, **WORKER, asleep=asleep) == []
    assert await seen(plain_engine, made) == ELIGIBLE
    assert await plain_engine.judge_routes() == 1
    assert await seen(plain_engine, made) == BY_ROUTE


async def test_a_claim_judges_the_ten_best_routes_it_cannot_serve_and_the_duty_all(engine: CheckedEngine) -> None:
    made = [await needing(engine, "gpu", execution_kind=f"k{n}", priority=n) for n in range(12)]
    await engine.claim(**WORKER)
    assert [await seen(engine, one) == BY_ROUTE for one in made] == [False] * 2 + [True] * 10
    await engine.claim(**WORKER)
    assert [await seen(engine, one) == BY_ROUTE for one in made] == [True] * 12
    await register(engine, capabilities=["gpu"])
    await engine.mark_worker_dead("w-1", reason="gone")
    await engine.unblock_execution(made[3])
    assert await engine.judge_routes() == 1


async def test_an_execution_without_a_requirement_is_never_judged(engine: CheckedEngine) -> None:
    made = await submit(engine, execution_kind="nobody has it")
    assert await engine.claim(**WORKER, kinds=["test"]) is None
    assert await engine.judge_routes() == 0
    assert await seen(engine, made) == ELIGIBLE


COVERS: dict[str, tuple[dict[str, Any], bool]] = {
    "all of it": ({"capabilities": ["gpu"]}, True),
    "more": ({"capabilities": ["gpu", "cuda"], "kinds": ["test", "other"], "lanes": ["side", "default"]}, True),
    "its namespace": ({"capabilities": ["gpu"], "namespace": "space"}, True),
    "another namespace": ({"capabilities": ["gpu"], "namespace": "other"}, False),
    "another lane": ({"capabilities": ["gpu"], "lanes": ["side"]}, False),
    "another task": ({"capabilities": ["gpu"], "kinds": ["other"]}, False),
    "no capability": ({}, False),
    "another capability": ({"capabilities": ["GPU"]}, False),
}


@pytest.mark.parametrize("case", COVERS)
async def test_a_live_worker_covers_lane_task_capabilities_and_namespace_or_nothing(
    engine: CheckedEngine, case: str
) -> None:
    fields, covers = COVERS[case]
    await register(engine, **fields)
    made = await needing(engine, "gpu", namespace="space")
    foreign = await needing(engine, "gpu", namespace="third")
    await engine.claim(**WORKER)
    assert await seen(engine, made) == (ELIGIBLE if covers else BY_ROUTE)
    covers_all = covers and "namespace" not in fields
    assert await seen(engine, foreign) == (ELIGIBLE if covers_all else BY_ROUTE)
    # The other order: the verdict exists when the worker registers.
    await engine.mark_worker_dead("w-1", namespace=fields.get("namespace", ""), reason="gone")
    assert await seen(engine, made) == await seen(engine, foreign) == BY_ROUTE
    await register(engine, **fields)
    assert await seen(engine, made) == (ELIGIBLE if covers else BY_ROUTE)
    assert await seen(engine, foreign) == (ELIGIBLE if covers_all else BY_ROUTE)


GONE: dict[str, Any] = {
    "marked dead": lambda engine, clock: engine.mark_worker_dead("w-1", reason="gone"),
    "left": lambda engine, clock: engine.leave_registry("w-1", reason="stopped"),
    "registered with less": lambda engine, clock: register(engine, capabilities=["cuda"]),
    "registered for another lane": lambda engine, clock: register(engine, capabilities=["gpu"], lanes=["side"]),
}


@pytest.mark.parametrize("how", GONE)
async def test_a_worker_that_goes_leaves_the_verdict_at_once(engine: CheckedEngine, clock: Clock, how: str) -> None:
    await register(engine, capabilities=["gpu"])
    made = await needing(engine, "gpu")
    await GONE[how](engine, clock)
    assert await seen(engine, made) == BY_ROUTE


@pytest.mark.parametrize("how", ["sweep", "duty", "claim"])
async def test_a_worker_that_lapsed_covers_nothing(engine: CheckedEngine, clock: Clock, how: str) -> None:
    await register(engine, capabilities=["gpu"])
    made = await needing(engine, "gpu")
    await engine.claim(**WORKER)
    assert await seen(engine, made) == ELIGIBLE
    await clock.advance(seconds=30)
    if how == "sweep":
        await engine.sweep_workers()
    elif how == "duty":
        await engine.judge_routes()
    else:
        await engine.claim(**WORKER)
    assert await seen(engine, made) == BY_ROUTE
    await register(engine, capabilities=["gpu"])
    assert await seen(engine, made) == ELIGIBLE


async def test_a_version_that_no_live_worker_serves_is_a_verdict_too(engine: CheckedEngine) -> None:
    made = await submit(engine)
    claimed = await claim_one(engine, kinds={"test": [1]})
    await engine.release(claimed.handle)
    await register(engine, kinds={"test": [2]})
    await engine.judge_routes()
    assert await seen(engine, made) == BY_ROUTE
    record = await engine.read_execution(made)
    assert record is not None
    assert record.blocking_detail == "no live worker serves version 1 of test in lane default"
    await register(engine, "w-2", kinds={"test": [2, 1]})
    assert await seen(engine, made) == ELIGIBLE


async def test_an_execution_that_changed_code_stopped_keeps_its_own_reason(engine: CheckedEngine) -> None:
    made = await needing(engine, "gpu")
    claimed = await claim_one(engine, capabilities=["gpu"])
    await engine.stop_changed(claimed.handle, detail="recorded: a", digest="new")
    await engine.judge_routes()
    record = await engine.read_execution(made)
    assert record is not None
    assert (record.blocking_detail, record.stops) == ("recorded: a", 1)
    assert await engine.list_uncovered() == []


async def test_the_duty_forgets_routes_without_waiting_executions(engine: CheckedEngine, sql: SQL) -> None:
    await needing(engine, "gpu")
    await engine.judge_routes()
    claimed = await claim_one(engine, capabilities=["gpu"])
    assert await engine.list_uncovered() == []
    assert await engine.judge_routes() == 1
    assert await sql.fetchval("select count(*) from flowfabric.uncovered") == 0
    await engine.release(claimed.handle)
    assert await engine.judge_routes() == 1


# What readers see


async def test_readers_see_what_is_missing_and_since_when(engine: CheckedEngine, clock: Clock) -> None:
    made = await needing(engine, "gpu", "cuda", execution_kind="render", lane_id="video")
    await clock.advance(seconds=7)
    before = await clock.now()
    await engine.judge_routes()
    record = await engine.read_execution(made)
    assert record is not None
    assert record.blocking_detail == "no live worker serves render in lane video with cuda,gpu"
    assert record.last_capability_mismatch_at is not None
    assert before <= record.last_capability_mismatch_at <= await clock.now()
    assert record.last_transition_at < before, "nothing happened to the execution itself"
    (route,) = await engine.list_uncovered()
    assert (route.lane_id, route.kind, route.capabilities, route.version) == ("video", "render", ("cuda", "gpu"), None)
    assert (route.served, route.waiting) == ((), 1)
    assert await engine.list_uncovered(limit=0) == []
    fields = await engine.read_exec_core_fields(home(made), made, ["eligibility_state", "blocking_reason"])
    assert fields == {"eligibility_state": "blocked_by_route", "blocking_reason": "waiting_for_capable_worker"}


async def test_one_that_was_suspended_is_shown_as_waiting_and_continues(engine: CheckedEngine) -> None:
    made = await needing(engine, "gpu")
    claimed = await claim_one(engine, capabilities=["gpu"])
    await engine.suspend(claimed.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
    await engine.resume_execution(made, "operator")
    assert await seen(engine, made) == (*ELIGIBLE[:2], "resumable")
    await engine.judge_routes()
    assert await seen(engine, made) == BY_ROUTE
    assert (await engine.find_executions(states=["resumable"])).items == []
    assert await engine.read_execution_state(made) == "waiting"
    resumed = await claim_one(engine, capabilities=["gpu"])
    assert resumed.handle.kind == "resumed"


async def test_the_calls_of_operators_see_what_readers_see(engine: CheckedEngine) -> None:
    made = await needing(engine, "gpu")
    await engine.judge_routes()
    assert await engine.block_execution_for_admission(made, "paused_by_operator") == Rejected("execution_not_eligible")
    for call in (
        lambda: engine.issue_claim_grant(made, **WORKER, worker_capabilities=["gpu"]),
        lambda: engine.change_priority(made, 5),
        lambda: engine.unblock_execution(made, expected_blocking_reason="waiting_for_quota"),
    ):
        with pytest.raises(Contention, match="execution_not_eligible"):
            await call()
    assert await engine.scan_eligible_executions("default") == []
    await engine.unblock_execution(made, expected_blocking_reason="waiting_for_capable_worker")
    assert await seen(engine, made) == ELIGIBLE
    assert await engine.scan_eligible_executions("default") == [made]
    assert await engine.block_execution_for_admission(made, "paused_by_operator") == Blocked(made, "paused_by_operator")
    await engine.judge_routes()
    assert (await seen(engine, made))[1] == "paused_by_operator", "a verdict replaces no other reason"


async def test_an_operator_claims_it_all_the_same(engine: CheckedEngine) -> None:
    made = await needing(engine, "gpu")
    await engine.judge_routes()
    assert (await engine.issue_grant_and_claim(made)).execution_id == made


async def test_a_deadline_and_a_cancel_end_it(engine: CheckedEngine, clock: Clock) -> None:
    late = await needing(engine, "gpu", execution_deadline_at=timedelta(seconds=5))
    gone = await needing(engine, "gpu")
    await engine.judge_routes()
    await engine.cancel(Operator(gone), "no longer wanted")
    await clock.advance(seconds=6)
    await engine.run_timers("deadline")
    assert [await engine.read_execution_state(one) for one in (late, gone)] == ["expired", "cancelled"]


@pytest.mark.parametrize("unreadable", ["alter table flowfabric.registration rename to gone"])
async def test_a_registry_that_cannot_be_read_holds_nothing_back(
    plain_engine: ff.Engine, sql: SQL, unreadable: str
) -> None:
    held, made = await needing(plain_engine, "gpu"), await needing(plain_engine, "asr")
    await plain_engine.claim(**WORKER, capabilities=["asr", "gpu"], kinds=["other"])
    await plain_engine.unblock_execution(made)
    assert [await seen(plain_engine, one) for one in (held, made)] == [BY_ROUTE, ELIGIBLE]
    await sql.execute(unreadable)
    try:
        assert await plain_engine.claim(**WORKER) is None
        assert [await seen(plain_engine, one) for one in (held, made)] == [BY_ROUTE, ELIGIBLE]
        assert await plain_engine.judge_routes() == 1
        assert [await seen(plain_engine, one) for one in (held, made)] == [ELIGIBLE, ELIGIBLE]
    finally:
        await sql.execute("alter table flowfabric.gone rename to registration")


# Lanes that hand out no work


@pytest.mark.parametrize("state", ["paused", "disabled"])
async def test_waiting_executions_of_a_lane_that_hands_out_no_work_are_shown_as_paused(
    engine: CheckedEngine, clock: Clock, state: str
) -> None:
    waiting = await submit(engine, lane_id="side")
    needs = await needing(engine, "gpu", lane_id="side")
    delayed = await submit(engine, lane_id="side", delay_until=timedelta(hours=1))
    running = (await started(engine, lane_id="default")).execution_id
    elsewhere = await submit(engine)
    await engine.judge_routes()
    stored = await engine.read_execution(waiting)
    await engine.set_lane_state("side", state)
    assert [await seen(engine, one) for one in (waiting, needs)] == [BY_LANE, BY_LANE]
    record = await engine.read_execution(waiting)
    assert record is not None
    assert record.blocking_detail == f"lane side is {state}"
    assert (await seen(engine, delayed))[1] == "waiting_for_delay"
    assert (await seen(engine, elsewhere)) == ELIGIBLE
    assert await engine.read_execution_state(running) == "active"
    listed = await engine.find_executions(lane_ids=["side"], states=["waiting"])
    assert {one.state_vector.eligibility_state for one in listed.items} == {"blocked_by_lane_state"}
    (page,) = [p for p in [await engine.list_executions(home(waiting))] if p.items]
    assert {one.state_vector.blocking_reason for one in page.items if one.execution_id == waiting} == {
        "paused_by_policy"
    }
    assert isinstance(await engine.claim_for_worker("side", **WORKER), NoWork)
    await engine.set_lane_state("side", "active")
    assert await engine.read_execution(waiting) == stored, "no row was rewritten"
    assert await seen(engine, needs) == BY_ROUTE


async def test_a_draining_lane_hands_out_what_it_has(engine: CheckedEngine) -> None:
    made = await submit(engine, lane_id="side")
    await engine.set_lane_state("side", "draining")
    assert await seen(engine, made) == ELIGIBLE


# What the audit finds

DAMAGES: dict[str, list[str]] = {
    "verdict_facts": [
        "insert into flowfabric.uncovered select id, '{}', now() from flowfabric.route where kind = 'plain'",
        "insert into flowfabric.uncovered select id, '{}', now() from flowfabric.route where kind = 'covered'",
        "update flowfabric.uncovered set served = '{b,a}'",
        "update flowfabric.uncovered set route = -1",
    ]
}


@pytest.mark.parametrize("rule", DAMAGES)
async def test_the_audit_finds_a_verdict_that_is_not_true(plain_engine: ff.Engine, sql: SQL, rule: str) -> None:
    await register(plain_engine, capabilities=["gpu"])
    await submit(plain_engine, execution_kind="plain")
    await needing(plain_engine, "gpu", execution_kind="covered")
    await needing(plain_engine, "asr", execution_kind="uncovered")
    await plain_engine.judge_routes()
    assert await plain_engine.audit() == []
    for damage in DAMAGES[rule]:
        transaction = sql.transaction()
        await transaction.start()
        await sql.execute(damage)
        found = {row["rule"] for row in await sql.fetch("select rule from flowfabric.audit(null, false)")}
        await transaction.rollback()
        assert rule in found, damage
