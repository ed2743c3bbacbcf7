"""Versions: the first attempt fixes one, and from then on only workers that serve it claim the execution."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.values.attempt import Claimed
from flowfabric.values.conditions import on
from flowfabric.values.ids import mint_uuid
from flowfabric.values.lane import LaneState
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements
from flowfabric.values.wait import Fresh
from flowfabric.values.worker import LiveVersion, Serves, Serving, Unserved, why_unserved
from tests.interleave import Stage, settled, waiting
from tests.support import RETRY, WORKER, CheckedEngine, Clock, claim_one, submit

SQL: TypeAlias = "asyncpg.Connection[Any]"
ONE, TWO = {"test": [1]}, {"test": [2]}
BOTH = {"test": [2, 1]}  # version 2, compatible with 1
PLAIN = ["test"]
TTL = timedelta(hours=9)


async def version_of(engine: ff.Engine, execution_id: ff.ExecutionId) -> int | None:
    record = await engine.read_execution(execution_id)
    assert record is not None
    return record.version


async def claimed_by(engine: ff.Engine, *kinds: Any, **fields: Any) -> list[bool]:
    """Whether each of these workers would get the one execution that there is; it is given back in between."""
    found = []
    for each in kinds:
        claimed = await engine.claim(**WORKER, kinds=each, **fields)
        found.append(claimed is not None)
        if claimed is not None:
            await engine.release(claimed.handle)
    return found


async def begun(engine: ff.Engine, kinds: Any = ONE, **fields: Any) -> Claimed:
    """An execution that a worker with these kinds started."""
    await submit(engine, **fields)
    return await claim_one(engine, kinds=kinds)


@pytest.mark.both_servers
async def test_the_first_attempt_fixes_the_version_and_only_workers_that_serve_it_claim_it_again(
    engine: CheckedEngine,
) -> None:
    target = await submit(engine)
    assert await version_of(engine, target) is None
    claimed = await claim_one(engine, kinds=TWO)
    assert await version_of(engine, target) == 2
    await engine.release(claimed.handle)
    assert await claimed_by(engine, ONE, PLAIN, ["other"]) == [False, False, False]
    assert await claimed_by(engine, TWO, BOTH, None) == [True, True, True]
    assert await version_of(engine, target) == 2


async def test_work_that_has_not_started_belongs_to_every_worker_of_the_kind(engine: CheckedEngine) -> None:
    for kinds, version in ((ONE, 1), (TWO, 2), (BOTH, 2), (PLAIN, None), (None, None)):
        target = await submit(engine)
        claimed = await claim_one(engine, kinds=kinds)
        assert claimed.execution_id == target
        assert await version_of(engine, target) == version
        await engine.complete(claimed.handle)


async def test_an_execution_that_began_without_a_version_stays_without_one_and_everybody_serves_it(
    engine: CheckedEngine,
) -> None:
    claimed = await begun(engine, PLAIN)
    await engine.release(claimed.handle)
    assert await claimed_by(engine, ONE, TWO, BOTH, PLAIN, None) == [True] * 5
    assert await version_of(engine, claimed.execution_id) is None


@pytest.mark.parametrize("way", ["retry", "expiry", "revoked", "park", "suspend", "delay", "replay"])
async def test_the_version_is_kept_over_everything_but_a_replay_of_a_success(
    engine: CheckedEngine, clock: Clock, way: str
) -> None:
    claimed = await begun(engine, ONE, policy=RETRY)
    target = claimed.execution_id
    match way:
        case "retry":
            await engine.fail(claimed.handle, "boom")
            await clock.advance(seconds=11)
            assert await engine.promote_delayed(target) == "promoted"
        case "expiry":
            await clock.advance(seconds=31)
            await engine.mark_lease_expired_if_due(target)
        case "revoked":
            await engine.revoke_lease(target)
        case "park" | "delay":
            until = await clock.now() + timedelta(seconds=5)
            if way == "park":
                await engine.park(claimed.handle, until=until)
            else:
                await engine.delay(claimed.handle, until)
            await clock.advance(seconds=6)
            assert (await engine.run_timers("delay")).handled == 1
        case "suspend":
            await engine.suspend(claimed.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
            await engine.resume_execution(target)
        case "replay":
            await engine.fail(claimed.handle, "boom", failure_class="permanent")
            await engine.replay_execution(target)
    assert await engine.claim(**WORKER, kinds=TWO) is None
    assert await engine.claim(**WORKER, kinds=PLAIN) is None
    assert await version_of(engine, target) == 1
    again = await claim_one(engine, kinds=BOTH)
    assert (again.execution_id, await version_of(engine, target)) == (target, 1)


@pytest.mark.parametrize("then", [None, "cancelled"])
async def test_a_replay_of_a_success_begins_with_the_newest_version(engine: CheckedEngine, then: str | None) -> None:
    claimed = await begun(engine, ONE)
    target = claimed.execution_id
    await engine.complete(claimed.handle)
    await engine.replay_execution(target)
    assert await version_of(engine, target) is None
    if then == "cancelled":  # the new generation has not started
        await engine.cancel(Operator(target), "wait")
        await engine.replay_execution(target)
    claimed = await claim_one(engine, kinds=TWO)
    assert await version_of(engine, target) == 2
    await engine.fail(claimed.handle, "boom", failure_class="permanent")
    await engine.replay_execution(target)
    assert await claimed_by(engine, ONE) == [False]
    await claim_one(engine, kinds=TWO)


async def test_a_replay_of_one_that_was_cancelled_before_it_started_fixes_the_version_then(
    engine: CheckedEngine,
) -> None:
    target = await submit(engine)
    await engine.cancel(Operator(target), "not yet")
    await engine.replay_execution(target)
    await claim_one(engine, kinds=TWO)
    assert await version_of(engine, target) == 2


async def test_a_batch_over_kinds_and_versions_gives_every_worker_what_it_serves(engine: CheckedEngine) -> None:
    both = {"a": [1], "b": Serves(versions=(3,), digest="d"), "c": []}
    first = [await submit(engine, execution_kind=kind, priority=9) for kind in "abc"]
    claimed = await engine.claim_many(limit=10, **WORKER, kinds=both)
    assert {one.execution_id for one in claimed} == set(first)
    assert [await version_of(engine, one) for one in first] == [1, 3, None]
    for one in claimed:
        await engine.release(one.handle)
    second = [await submit(engine, execution_kind=kind) for kind in "abc"]
    new = {"a": [2], "b": [4, 3], "c": [1]}
    got = await engine.claim_many(limit=10, **WORKER, kinds=new)
    assert [one.execution_id for one in got] == [*first[1:], *second], "in claim order, without the a of version 1"
    assert [await version_of(engine, one) for one in first] == [1, 3, None]
    assert [await version_of(engine, one) for one in second] == [2, 4, 1]
    (rest,) = await engine.claim_lanes({"default": 1}, limit=10, **WORKER, kinds=both)
    assert rest.execution_id == first[0]


async def test_capabilities_and_lanes_hold_beside_versions(engine: CheckedEngine) -> None:
    policy = ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=("gpu",)))
    await submit(engine, policy=policy, lane_id="slow")
    assert await engine.claim("slow", **WORKER, kinds=ONE) is None
    claimed = await claim_one(engine, lane_id="slow", kinds=ONE, capabilities=["gpu"])
    await engine.release(claimed.handle)
    assert await engine.claim("slow", **WORKER, kinds=ONE) is None
    assert await engine.claim("slow", **WORKER, kinds=TWO, capabilities=["gpu"]) is None
    again = await claim_one(engine, lane_id="slow", kinds=BOTH, capabilities=["gpu"])
    assert await version_of(engine, again.execution_id) == 1


async def test_priorities_grants_and_cancels_reach_the_row_of_a_version(engine: CheckedEngine) -> None:
    claimed = await begun(engine)
    target = claimed.execution_id
    await engine.release(claimed.handle)
    await engine.change_priority(target, 7)
    grant = await engine.issue_claim_grant(target, **WORKER)
    assert await claimed_by(engine, ONE) == [False], "a grant hides it"
    again = await engine.claim_resumed_execution(target, **WORKER, lease_id=mint_uuid(), grant_key=grant.grant_key)
    assert await version_of(engine, target) == 1
    await engine.release(again.handle)
    assert (await claim_one(engine, kinds=ONE)).priority == 7
    await engine.cancel(Operator(target), "enough")


async def test_a_route_of_a_version_is_made_once_and_no_claim_without_versions_visits_it(
    engine: CheckedEngine, sql: SQL
) -> None:
    held = [await begun(engine) for _ in range(3)]
    for claimed in held:
        await engine.release(claimed.handle)
    assert await sql.fetchval("select count(*) from flowfabric.route where version = 1") == 1
    assert await sql.fetchval("select count(distinct route) from flowfabric.ready") == 1
    assert await engine.claim(**WORKER, kinds=PLAIN) is None


# Which workers there are


async def test_a_version_that_no_live_worker_serves_is_unserved(engine: CheckedEngine, clock: Clock) -> None:
    claimed = await begun(engine)
    await engine.release(claimed.handle)
    target = claimed.execution_id

    async def register(instance: str, kinds: Any) -> None:
        await engine.register_worker("w", instance, lanes=["default"], liveness_ttl=TTL, kinds=kinds)

    await register("two", TWO)
    await register("none", PLAIN)
    (found,) = await engine.find_unserved([target])
    assert found == Unserved(
        lane_id="default",
        lane_state=LaneState.ACTIVE,
        kind="test",
        capabilities=(),
        namespace="",
        live_workers=2,
        version=1,
    )
    assert "no live worker serves version 1 of test in lane default" in why_unserved(found)
    assert await engine.list_versions() == [
        LiveVersion(lane_id="default", kind="test", capabilities=(), version=1, executions=1, live_workers=0)
    ]
    await register("both", BOTH)
    assert await engine.find_unserved([target]) == []
    assert [one.live_workers for one in await engine.list_versions()] == [1]
    await register("all", None)
    assert [one.live_workers for one in await engine.list_versions()] == [2]


async def test_versions_with_executions_are_listed_wherever_those_wait(engine: CheckedEngine, clock: Clock) -> None:
    assert await engine.list_versions() == []
    one = await begun(engine, ONE)  # runs
    two = await begun(engine, TWO)
    await engine.release(two.handle)  # waits for a worker
    three = await begun(engine, {"test": [3]})
    await engine.delay(three.handle, timedelta(hours=1))
    four = await begun(engine, {"test": [4]})
    await engine.suspend(four.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
    five = await begun(engine, {"test": [5]})
    await engine.park(five.handle, ends_of=[one.execution_id])
    six = await begun(engine, {"test": [6]})
    await engine.complete(six.handle)
    seven = await begun(engine, {"test": [7]})
    await engine.release(seven.handle)
    await engine.block_execution_for_admission(seven.execution_id, "paused_by_operator")
    await begun(engine, PLAIN)
    await submit(engine, execution_kind="other")
    assert await engine.claim(**WORKER, kinds=["other"]) is not None  # of a task without versions
    await submit(engine)  # has not started
    assert [each.version for each in await engine.list_versions()] == [None, 1, 2, 3, 4, 5, 7]
    assert [each.executions for each in await engine.list_versions()] == [1] * 7


async def test_executions_without_a_version_are_counted_beside_a_worker_that_has_one(
    engine: CheckedEngine, clock: Clock
) -> None:
    runs, waits, stopped = [await begun(engine, PLAIN) for _ in range(3)]
    await engine.release(waits.handle)
    await engine.stop_changed(stopped.handle, detail="recorded: mail", digest="new")
    assert await engine.list_versions() == []  # no version anywhere
    for instance, kinds in (("two", TWO), ("none", PLAIN), ("other", {"other": [1]})):
        await engine.register_worker("w", instance, lanes=["default"], liveness_ttl=TTL, kinds=kinds)
    (found,) = await engine.list_versions()
    assert (found.kind, found.version, found.executions, found.live_workers) == ("test", None, 3, 2)
    await engine.complete(runs.handle)
    assert [each.executions for each in await engine.list_versions()] == [2]


async def test_a_submission_of_a_version_wakes_only_those_that_serve_it(
    plain_engine: ff.Engine, database: str, sql: SQL
) -> None:
    claimed = await begun(plain_engine)
    heard: list[str] = []
    await sql.add_listener(f"flowfabric_{plain_engine.instance}", lambda *given: heard.append(given[-1]))

    async def heard_after(kinds: Any) -> bool:
        nonlocal claimed
        await plain_engine.sleep_for_work(["default"], timedelta(seconds=60), kinds=kinds)
        heard.clear()
        await plain_engine.release(claimed.handle)
        await sql.fetchval("select 1")
        is_woken = bool(heard)
        await sql.execute("delete from flowfabric.sleeper")
        claimed = await claim_one(plain_engine, kinds=ONE)
        return is_woken

    assert [await heard_after(kinds) for kinds in (TWO, PLAIN, ["other"])] == [False] * 3
    assert [await heard_after(kinds) for kinds in (ONE, BOTH, None)] == [True] * 3


async def test_two_workers_that_start_the_first_of_a_version_together_make_one_route(stage: Stage) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    await submit(one)
    await submit(one)
    for party in (one, two):  # what they serve is registered before, as workers do
        await party.claim(**WORKER, kinds=Serving({"other": Serves(versions=(1,))}))
        await party.claim("elsewhere", **WORKER, kinds=ONE)
    await one.begin()
    first = await claim_one(one, kinds=ONE)
    second = await waiting(stage.watch, two, settled(two.claim(**WORKER, kinds=ONE)), behind=one)
    await one.commit()
    got = await second
    assert isinstance(got, Claimed) and got.execution_id != first.execution_id
    assert await stage.watch.fetchval("select count(*) from flowfabric.route where version = 1") == 1
    await stage.audit()


async def test_floors_of_versions_that_no_worker_serves_any_more_are_removed(
    engine: CheckedEngine, sql: SQL, clock: Clock
) -> None:
    claimed = await begun(engine)
    await engine.release(claimed.handle)
    claimed = await claim_one(engine, kinds=ONE)
    await engine.complete(claimed.handle)
    await clock.advance(seconds=10)
    floors = "select count(*) from flowfabric.ready_floor f join flowfabric.route r on r.id = f.route and r.version = 1"
    assert await sql.fetchval(floors) == 1
    await sql.fetch("select * from flowfabric.repair_floors(100)")
    assert await sql.fetchval(floors) == 0
