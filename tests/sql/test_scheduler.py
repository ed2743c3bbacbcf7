"""claim_for_worker: a scheduler asks for a worker and passes grants on; and claims of one namespace."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import Contention, StateError, Unavailable
from flowfabric.values.attempt import Claimed
from flowfabric.values.checks import capability_hash
from flowfabric.values.conditions import on
from flowfabric.values.execution import NewExecution
from flowfabric.values.grant import (
    Granted,
    GrantNotFound,
    NotReclaimable,
    NoWork,
    ReclaimCapExceeded,
    ReclaimGranted,
    ResumeGrant,
)
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import ExecutionId, QuotaPolicyId, mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.page import Page
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements
from flowfabric.values.wait import Fresh
from flowfabric.values.worker import Marked, NotRegistered, Refreshed, Registered
from tests.ids import id_in
from tests.interleave import Stage, settled
from tests.support import OTHER, RETRY, WORKER, CheckedEngine, Clock, claim_one, started, submit

SQL: TypeAlias = "asyncpg.Connection[Any]"
GPU = ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=("gpu",)))
SECOND = timedelta(seconds=1)
B = {"worker_id": "pool-b", "worker_instance_id": "b-1"}


async def granted(engine: ff.Engine, **fields: Any) -> list[ExecutionId]:
    """The executions of all grants there are, in order."""
    found = await engine.claim_for_worker(**{**WORKER, "max_grants": 64, **fields})
    assert isinstance(found, list)
    return [one.grant.execution_id for one in found]


async def consumed(engine: ff.Engine, outcome: object, **who: str) -> Claimed:
    """What a worker gets for an outcome of claim_for_worker."""
    worker = {**WORKER, **who, "lease_id": mint_uuid()}
    if isinstance(outcome, ReclaimGranted):
        key = outcome.grant.grant_key
        taken = await engine.reclaim_execution(
            outcome.grant.execution_id, **worker, attempt_id=mint_uuid(), grant_key=key
        )
        assert isinstance(taken, Claimed)
        return taken
    assert isinstance(outcome, Granted)
    target, key = outcome.grant.execution_id, outcome.grant.grant_key
    if isinstance(outcome.grant, ResumeGrant):
        return await engine.claim_resumed_execution(target, **worker, grant_key=key)
    return await engine.claim_execution(target, **worker, attempt_id=mint_uuid(), grant_key=key)


# The scenarios of the contract


async def test_a1_the_best_priority_comes_first_whatever_its_partition(engine: CheckedEngine) -> None:
    made = {n: await submit(engine, execution_id=id_in(p), priority=n) for n, p in ((1, 3), (10, 200), (5, 77))}
    assert await granted(engine) == [made[10], made[5], made[1]]


async def test_a6_two_workers_at_the_same_instant_get_two_grants(stage: Stage) -> None:
    first, second = await stage.company(2)
    await stage.empty()
    made = {await submit(first), await submit(first)}
    await first.begin()
    one = await first.claim_for_worker(**WORKER)
    other = await settled(second.claim_for_worker(**OTHER))
    await first.commit()
    assert isinstance(one, Granted)
    assert isinstance(other, Granted)
    assert {one.grant.execution_id, other.grant.execution_id} == made
    await stage.audit()


async def test_a7_a_grant_that_lapsed_is_gone_without_a_repair(engine: CheckedEngine, clock: Clock) -> None:
    made = await submit(engine)
    first = await engine.claim_for_worker(**WORKER, grant_ttl=timedelta(milliseconds=1))
    assert isinstance(first, Granted)
    await clock.advance(milliseconds=50)
    assert await engine.verify_grant(made, first.grant.grant_key) == "expired"
    again = await engine.claim_for_worker(**B)
    assert isinstance(again, Granted)
    assert again.grant.execution_id == made
    with pytest.raises(Contention, match="invalid_claim_grant"):
        await consumed(engine, first)
    assert (await consumed(engine, again, **B)).execution_id == made


async def test_a7_a_grant_that_lapsed_says_so_to_its_worker_once(engine: CheckedEngine, clock: Clock) -> None:
    await submit(engine)
    first = await engine.claim_for_worker(**WORKER, grant_ttl=timedelta(milliseconds=1))
    await clock.advance(milliseconds=50)
    for kind in ("claim_grant_expired", "invalid_claim_grant"):
        with pytest.raises(Contention, match=kind):
            await consumed(engine, first)


async def test_a8_a_grant_is_for_its_pool_whatever_the_instance(engine: CheckedEngine) -> None:
    made = await submit(engine)
    grant = await engine.claim_for_worker(**WORKER)
    with pytest.raises(Contention, match="invalid_claim_grant"):
        await consumed(engine, grant, **B)
    assert (await consumed(engine, grant, **OTHER)).execution_id == made


async def test_a12_without_a_signing_key_there_are_no_grants_and_leases_all_the_same(
    engine: CheckedEngine, sql: SQL
) -> None:
    made = await submit(engine)
    await sql.execute("update flowfabric.keystore set state = 'retired', inner_key = null, outer_key = null")
    with pytest.raises(Unavailable, match="claim_for_worker"):
        await engine.claim_for_worker(**WORKER)
    assert (await claim_one(engine)).execution_id == made


async def test_a25_a_live_grant_hides_its_execution_and_nothing_behind_it(engine: CheckedEngine) -> None:
    """Nor does a claim that meets it give its slot back."""
    quota, policy = await capped(engine, 2)
    first, second, third = [await submit(engine, policy=policy, priority=9 - n) for n in range(3)]
    grant = await engine.claim_for_worker(**WORKER)
    assert isinstance(grant, Granted)
    assert grant.grant.execution_id == first
    assert await granted(engine, **B) == [second]
    assert await slots(engine, quota) == (2, 1)
    assert await engine.claim_for_worker(**B) == NoWork()
    assert await engine.claim(**B) is None
    assert await slots(engine, quota) == (2, 1)
    assert await engine.read_execution_state(third) == "rate_limited"
    assert (await consumed(engine, grant)).execution_id == first
    assert await slots(engine, quota) == (2, 1)


async def test_a27_a_lost_lease_is_granted_as_a_reclaim(engine: CheckedEngine, clock: Clock) -> None:
    lost = await started(engine)
    await clock.advance(seconds=31)
    await engine.run_timers("lease")
    record = await engine.read_execution(lost.execution_id)
    assert record is not None
    assert record.state_vector.ownership_state == "lease_expired_reclaimable"
    outcome = await engine.claim_for_worker(**B)
    assert isinstance(outcome, ReclaimGranted)
    assert (outcome.grant.execution_id, outcome.grant.lane_id) == (lost.execution_id, "default")
    taken = await consumed(engine, outcome, **B)
    assert (taken.attempt_type, taken.reclaim_count) == ("reclaim", 1)
    assert taken.handle.lease_epoch == lost.handle.lease_epoch + 1
    record = await engine.read_execution(lost.execution_id)
    assert record is not None
    assert record.lease_reclaim_count == 1


async def test_a28_with_a_cap_of_two_the_third_reclaim_fails_the_execution(engine: CheckedEngine) -> None:
    await submit(engine, policy=ExecutionPolicy(max_reclaim_count=2))
    held = await claim_one(engine)
    for _ in range(2):
        await engine.revoke_lease(held.execution_id)
        held = await consumed(engine, await engine.claim_for_worker(**WORKER))
    await engine.revoke_lease(held.execution_id)
    beside = await submit(engine)
    outcome = await engine.claim_for_worker(**WORKER)
    assert isinstance(outcome, Granted)
    assert outcome.grant.execution_id == beside, "the claim continues after the one it ended"
    record = await engine.read_execution(held.execution_id)
    assert record is not None
    assert (record.public_state, record.failure_reason) == ("failed", "max_reclaims_exceeded")
    ends = [one.outcome or one.lease_type for one in (await engine.list_events(held.execution_id)).items]
    assert "failed" in ends
    assert "revoked" in ends


async def test_a28_the_explicit_request_says_that_the_cap_is_reached(engine: CheckedEngine) -> None:
    await submit(engine, policy=ExecutionPolicy(max_reclaim_count=0))
    held = await claim_one(engine)
    await engine.revoke_lease(held.execution_id)
    assert await engine.issue_reclaim_grant(held.execution_id, **WORKER) == ReclaimCapExceeded(held.execution_id, 0)


async def test_a29_one_reclaim_grant_at_a_time_and_the_live_lease_is_safe(engine: CheckedEngine) -> None:
    held = await started(engine)
    await engine.revoke_lease(held.execution_id)
    outcome = await engine.claim_for_worker(**WORKER)
    assert isinstance(outcome, ReclaimGranted)
    with pytest.raises(StateError, match="grant_already_exists"):
        await engine.issue_reclaim_grant(held.execution_id, **B)
    taken = await consumed(engine, outcome)
    stale = await engine.reclaim_execution(
        held.execution_id, **WORKER, lease_id=mint_uuid(), attempt_id=mint_uuid(), grant_key=outcome.grant.grant_key
    )
    assert stale == GrantNotFound(held.execution_id)
    await engine.complete(taken.handle)


async def test_a30_a_live_lease_is_not_reclaimable(engine: CheckedEngine) -> None:
    held = await started(engine)
    assert await engine.claim_for_worker(**WORKER) == NoWork()
    answer = await engine.issue_reclaim_grant(held.execution_id, **B)
    assert isinstance(answer, NotReclaimable)


async def test_a31_a32_a33_registering_again_another_pool_and_a_mark(engine: CheckedEngine, clock: Clock) -> None:
    ttl: dict[str, Any] = {"lanes": ["default"], "liveness_ttl": 5 * SECOND}
    assert isinstance(await engine.register_worker("a", "i", **ttl), Registered)
    (first,) = (await engine.list_workers("")).items
    assert isinstance(await engine.register_worker("a", "i", **ttl, capabilities=["gpu"]), Refreshed)
    (second,) = (await engine.list_workers("")).items
    assert (second.registered_at, second.capabilities) == (first.registered_at, ("gpu",))
    with pytest.raises(ff.InvalidInput, match="instance_id reassigned"):
        await engine.register_worker("b", "i", **ttl)
    await clock.advance(seconds=5)
    assert isinstance(await engine.register_worker("b", "i", **ttl), Registered)
    held = await started(engine)
    assert await engine.mark_worker_dead("i", reason="gone") == Marked()
    assert await engine.heartbeat_worker("i") == NotRegistered()
    assert await engine.mark_worker_dead("i", reason="gone") == NotRegistered()
    await engine.renew(held.handle)


async def test_a34_leases_with_one_deadline_are_paged_without_gap_or_repetition(
    engine: CheckedEngine, clock: Clock
) -> None:
    await engine.create_many([NewExecution(execution_kind="test") for _ in range(3)])
    held = {one.execution_id for one in await engine.claim_many(limit=3, **WORKER)}
    await clock.advance(seconds=31)
    first = await engine.list_expired_leases(limit=2)
    second: Page[Any, Any] = await engine.list_expired_leases(after=first.next_cursor, limit=2)
    assert (len(first.items), len(second.items), second.next_cursor) == (2, 1, None)
    assert {one.execution_id for one in (*first.items, *second.items)} == held


async def test_a35_a_delay_on_an_unknown_lane_is_promoted_and_claimable(engine: CheckedEngine, clock: Clock) -> None:
    made = await submit(engine, lane_id="nowhere else", delay_until=SECOND)
    assert await granted(engine, lane_id="nowhere else") == []
    await clock.advance(seconds=2)
    await engine.run_timers("delay")
    assert await granted(engine, lane_id="nowhere else") == [made]


async def test_a37_a_delay_keeps_the_deadline(engine: CheckedEngine, clock: Clock) -> None:
    held = await started(engine, execution_deadline_at=timedelta(minutes=1))
    await engine.delay(held.handle, timedelta(hours=1))
    await clock.advance(seconds=61)
    await engine.run_timers("deadline")
    assert await engine.read_execution_state(held.execution_id) == "expired"


# What a grant is


async def test_a_grant_changes_no_state_and_stores_what_the_worker_can_do(engine: CheckedEngine, sql: SQL) -> None:
    made = await submit(engine, policy=GPU)
    before = await engine.read_execution(made)
    outcome = await engine.claim_for_worker(**WORKER, capabilities=["gpu", "cuda"], grant_ttl=timedelta(minutes=1))
    assert isinstance(outcome, Granted)
    assert await engine.read_execution(made) == before
    assert await engine.verify_grant(made, outcome.grant.grant_key) == "ok"
    assert outcome.grant.grant_key not in repr(outcome)
    row = await sql.fetchrow("select * from flowfabric.claim_grant")
    assert row is not None
    assert (row["kind"], row["lane"], row["worker_id"], row["worker_instance_id"]) == (
        "claim", "default", "pool", "pool-1",
    )  # fmt: skip
    assert row["worker_capabilities"] == ["cuda", "gpu"]
    assert row["capability_hash"] == capability_hash(["cuda", "gpu"]) == "c952a6c4"
    assert (row["ttl_ms"], row["expires_at"]) == (60_000, outcome.grant.expires_at)


async def test_grants_come_in_claim_order_fresh_resumed_and_lost_alike(engine: CheckedEngine, clock: Clock) -> None:
    async def held(kind: str, **fields: Any) -> Claimed:
        await submit(engine, execution_kind=kind, **fields)
        return await claim_one(engine, kinds=[kind])

    lost = await held("lost", priority=4)
    await engine.revoke_lease(lost.execution_id)
    given_back = await held("given back", priority=8)
    await engine.release(given_back.handle)
    suspended = await held("suspended", priority=6)
    await engine.suspend(suspended.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
    await engine.resume_execution(suspended.execution_id, "operator")
    failed = await held("failed", priority=2, policy=RETRY)
    await engine.fail(failed.handle, "no")
    await clock.advance(seconds=11)
    await engine.run_timers("delay")
    fresh = await submit(engine, priority=0)
    found = await engine.claim_for_worker(**WORKER, max_grants=10)
    kinds = [(type(one), type(one.grant).__name__, one.grant.execution_id) for one in found]
    assert kinds == [
        (Granted, "ResumeGrant", given_back.execution_id),
        (Granted, "ResumeGrant", suspended.execution_id),
        (ReclaimGranted, "ReclaimGrant", lost.execution_id),
        (Granted, "ClaimGrant", failed.execution_id),
        (Granted, "ClaimGrant", fresh),
    ]
    taken = [await consumed(engine, one) for one in found]
    assert [one.attempt_type for one in taken] == ["initial", "initial", "reclaim", "retry", "initial"]
    assert [one.handle.kind for one in taken] == ["resumed", "resumed", "reclaimed", "fresh", "fresh"]


async def test_a_batch_gives_at_most_what_is_asked_and_what_there_is(engine: CheckedEngine) -> None:
    made = [await submit(engine) for _ in range(5)]
    assert await granted(engine, max_grants=2) == made[:2]
    assert await granted(engine, max_grants=64) == made[2:]
    assert await granted(engine, max_grants=64) == []


async def test_an_execution_that_was_blocked_for_its_route_is_unblocked_by_its_grant(engine: CheckedEngine) -> None:
    made = await submit(engine, policy=GPU)
    await engine.block_route(made)
    assert await granted(engine, capabilities=["gpu"]) == [made]
    record = await engine.read_execution(made)
    assert record is not None
    assert record.state_vector.eligibility_state == "eligible_now"


async def test_a_grant_keeps_to_capabilities_tasks_versions_lanes_and_their_states(engine: CheckedEngine) -> None:
    gpu = await submit(engine, policy=GPU)
    other = await submit(engine, execution_kind="other")
    side = await submit(engine, lane_id="side")
    old = await submit(engine, execution_kind="versioned")
    claimed = await claim_one(engine, kinds={"versioned": [1]})
    await engine.release(claimed.handle)
    assert await granted(engine, kinds=["test", "versioned"]) == []
    assert await granted(engine, kinds={"versioned": [2]}) == []
    assert await granted(engine, kinds={"versioned": [2, 1]}) == [old]
    assert await granted(engine, kinds=["other"]) == [other]
    assert await granted(engine, capabilities=["gpu"]) == [gpu]
    await engine.set_lane_state("side", "paused")
    assert await granted(engine, lane_id="side") == []
    await engine.set_lane_state("side", "draining")
    assert await granted(engine, lane_id="side") == [side]
    assert await granted(engine, lane_id="unknown") == []


async def test_an_execution_that_changed_code_stopped_is_not_granted(engine: CheckedEngine) -> None:
    held = await started(engine)
    await engine.stop_changed(held.handle, detail="recorded: a", digest="new")
    assert await granted(engine) == []
    assert await granted(engine, kinds={"test": [1]}) == []


async def test_automatic_reclaim_that_is_switched_off_grants_no_lost_lease(engine: CheckedEngine, sql: SQL) -> None:
    held = await started(engine)
    await engine.revoke_lease(held.execution_id)
    await sql.execute("update flowfabric.deployment set auto_reclaim = false")
    assert await granted(engine) == []
    await sql.execute("update flowfabric.deployment set auto_reclaim = true")
    assert await granted(engine) == [held.execution_id]


@pytest.mark.parametrize(("ttl", "most"), [(0, 1), (60_001, 1), (None, 1), (5000, 0), (5000, 65), (5000, None)])
async def test_the_functions_check_bounds_themselves(sql: SQL, ttl: int | None, most: int | None) -> None:
    call = "select * from flowfabric.claim_for_worker('default', null, '{}', 'w', 'w-1', $1, $2, null, null, '')"
    with pytest.raises(asyncpg.InvalidParameterValueError, match="out of bounds"):
        await sql.fetch(call, ttl, most)


async def test_grants_skip_executions_that_other_calls_have_locked(stage: Stage) -> None:
    first, second = await stage.company(2)
    await stage.empty()
    made = [await submit(first, priority=9 - n) for n in range(6)]
    await first.begin()
    assert await granted(first, max_grants=3) == made[:3]
    assert await settled(granted(second, max_grants=2)) == made[3:5]
    assert (await settled(second.claim(**WORKER))).execution_id == made[5]
    await first.rollback()
    assert await granted(second) == made[:3]
    await stage.audit()


# One namespace


async def fill(engine: ff.Engine) -> dict[str, list[ExecutionId]]:
    """Three executions of each of three namespaces, the best ones in the default namespace."""
    return {
        name: [await submit(engine, namespace=name, priority=n + 3 * (name == "")) for n in range(3)]
        for name in ("", "x", "y")
    }


@pytest.mark.both_servers
async def test_a_claim_of_one_namespace_takes_only_its_own_best_first(engine: CheckedEngine) -> None:
    made = await fill(engine)
    assert (await claim_one(engine, namespace="x")).execution_id == made["x"][2]
    found = await engine.claim_many(limit=10, **WORKER, namespace="x")
    assert [one.execution_id for one in found] == [made["x"][1], made["x"][0]]
    assert await engine.claim(**WORKER, namespace="x") is None
    assert await engine.claim(**WORKER, namespace="never heard of") is None
    found = await engine.claim_lanes({"default": 1, "side": 1}, limit=10, **WORKER, namespace="y")
    assert {one.namespace for one in found} == {"y"}
    assert len(found) == 3
    assert [one.namespace for one in await engine.claim_many(limit=10, **WORKER)] == [""] * 3


async def test_grants_of_one_namespace_are_its_own(engine: CheckedEngine) -> None:
    made = await fill(engine)
    assert await granted(engine, namespace="y") == made["y"][::-1]
    assert await granted(engine, namespace="y") == []
    assert len(await granted(engine)) == 6


async def test_a_claim_of_all_namespaces_ignores_them(engine: CheckedEngine) -> None:
    made = await fill(engine)
    assert len(await granted(engine, namespace=None)) == sum(map(len, made.values()))


async def test_an_execution_stays_in_its_namespace_whatever_happens_to_it(engine: CheckedEngine, clock: Clock) -> None:
    async def again(held: Claimed) -> Claimed:
        taken = await claim_one(engine, namespace="x")
        assert taken.execution_id == held.execution_id
        return taken

    await submit(engine, namespace="x", policy=RETRY)
    held = await claim_one(engine, namespace="x")
    await engine.release(held.handle)
    held = await again(held)
    await engine.fail(held.handle, "no")
    await clock.advance(seconds=11)
    await engine.run_timers("delay")
    held = await again(held)
    await engine.revoke_lease(held.execution_id)
    held = await again(held)
    await engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
    await engine.resume_execution(held.execution_id, "operator")
    await engine.change_priority(held.execution_id, 7)
    held = await again(held)
    await engine.complete(held.handle)
    await engine.replay_execution(held.execution_id)
    held = await again(held)
    await engine.complete(held.handle)


async def test_members_of_flows_are_claimed_by_namespace_once_released(engine: CheckedEngine) -> None:
    item = NewExecution(execution_kind="node", namespace="x")
    made = await engine.submit_flow(
        [NewNode(name="a", execution=item), NewNode(name="b", execution=item, after=[NewEdge(upstream="a")])],
        namespace="x",
    )
    held = await claim_one(engine, namespace="x")
    assert held.execution_id == made.nodes["a"]
    assert await engine.claim(**WORKER, namespace="x") is None
    await engine.complete(held.handle)
    assert (await claim_one(engine, namespace="x")).execution_id == made.nodes["b"]


async def test_a_claim_of_one_namespace_skips_what_others_have_locked(stage: Stage) -> None:
    first, second = await stage.company(2)
    await stage.empty()
    made = [await submit(first, namespace="x", priority=9 - n, execution_kind=f"k{n % 2}") for n in range(6)]
    await submit(first, priority=20)
    await first.begin()
    locked = await first.claim_many(limit=3, **WORKER, namespace="x")
    assert [one.execution_id for one in locked] == made[:3]
    found = await settled(second.claim_many(limit=2, **WORKER, namespace="x"))
    assert [one.execution_id for one in found] == made[3:5]
    await first.rollback()
    found = await second.claim_many(limit=10, **WORKER, namespace="x")
    assert [one.execution_id for one in found] == [*made[:3], made[5]]
    await stage.audit()


async def test_rows_of_the_default_namespace_are_not_in_the_index_of_namespaces(
    engine: CheckedEngine, sql: SQL
) -> None:
    await fill(engine)
    assert await sql.fetchval("select count(*) from flowfabric.ready where namespace is not null") == 6
    assert await sql.fetchval(
        "select indpred is not null from pg_index where indexrelid = 'flowfabric.ready_of_namespace'::regclass"
    )


async def test_a_waiting_claim_of_one_namespace_is_woken_by_its_work_and_not_ended_by_other_work(
    plain_engine: ff.Engine,
) -> None:
    waiting = asyncio.create_task(plain_engine.claim(**WORKER, namespace="x", max_wait=timedelta(seconds=60)))
    foreign = await submit(plain_engine, namespace="y")
    made = await submit(plain_engine, namespace="x")
    claimed = await waiting
    assert claimed is not None
    assert claimed.execution_id == made
    assert (await claim_one(plain_engine)).execution_id == foreign


async def test_a_worker_of_one_namespace_is_not_woken_in_place_of_one_that_serves_all(stage: Stage) -> None:
    first, *others = await stage.company(4)
    await stage.empty()
    heard: list[str] = []
    ear = await asyncpg.connect(stage.dsn)
    for party, name, namespace in zip(others, ("open 1", "open 2", "of x"), (None, None, "x"), strict=True):
        await ear.add_listener(f"flowfabric_{party._instance}", lambda *_, name=name: heard.append(name))
        # It would be chosen first: it has the most free slots.
        await party.sleep_for_work(["default"], timedelta(minutes=1), namespace=namespace, slots=99 if namespace else 1)
    await submit(first)
    await ear.execute("select 1")  # messages that were sent before arrive with this
    assert sorted(name.split()[0] for name in heard) == ["of", "open"]
    await ear.close()


# Warnings


@pytest.mark.parametrize("way", ["claim", "grant"])
async def test_the_hundredth_time_an_execution_is_taken_over_is_a_warning(
    plain_engine: ff.Engine, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    held = await started(plain_engine)
    caplog.set_level(logging.WARNING, "flowfabric.engine")
    for count in range(1, 102):
        await plain_engine.revoke_lease(held.execution_id)
        caplog.clear()
        if way == "claim" or count < 99:
            await claim_one(plain_engine)
        else:
            await consumed(plain_engine, await plain_engine.claim_for_worker(**WORKER))
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == (count == 100)
        if told:
            assert str(held.execution_id) in told[0]
            assert "100th" in told[0]


# Limits


async def capped(engine: ff.Engine, cap: int, **fields: Any) -> tuple[QuotaPolicyId, ExecutionPolicy]:
    """A quota policy, and the policy of executions under it."""
    made = (await engine.create_quota_policy(name="api", max_concurrent=cap, **fields)).quota_policy_id
    return made, ExecutionPolicy(quota_policy_ids=(made,))


async def slots(engine: ff.Engine, policy: QuotaPolicyId) -> tuple[int, int]:
    """Those held, and the executions that wait for one."""
    found = await engine.get_quota_policy(policy)
    assert found is not None
    return found.active, found.waiting


async def test_a_batch_of_grants_takes_as_many_slots_as_there_are_and_names_their_policies(
    engine: CheckedEngine, sql: SQL
) -> None:
    quota, policy = await capped(engine, 3)
    made = [await submit(engine, policy=policy) for _ in range(10)]
    free = await submit(engine)
    assert await granted(engine) == [*made[:3], free]
    assert await slots(engine, quota) == (3, 7)
    rows = await sql.fetch("select id, quota_policy_ids from flowfabric.claim_grant order by id")
    assert {row["id"]: row["quota_policy_ids"] for row in rows} == {one: [quota] for one in made[:3]} | {free: None}


async def test_the_slot_of_a_grant_follows_the_execution_and_is_handed_on_at_its_end(engine: CheckedEngine) -> None:
    quota, policy = await capped(engine, 1)
    first, second = [await submit(engine, policy=policy) for _ in range(2)]
    grant = await engine.claim_for_worker(**WORKER)
    assert await engine.claim_for_worker(**B) == NoWork(), "and the slot of the live grant is intact"
    assert await slots(engine, quota) == (1, 1)
    held = await consumed(engine, grant)
    assert (held.execution_id, await slots(engine, quota)) == (first, (1, 1))
    await engine.complete(held.handle)
    assert await slots(engine, quota) == (0, 0)
    assert await granted(engine) == [second]


@pytest.mark.parametrize("is_swept", [False, True])
async def test_a7_a_grant_that_lapsed_gives_its_slot_back_at_once(
    engine: CheckedEngine, clock: Clock, is_swept: bool
) -> None:
    quota, policy = await capped(engine, 1)
    first = await submit(engine, policy=policy)
    await engine.claim_for_worker(**WORKER)
    assert await slots(engine, quota) == (1, 0)
    await clock.advance(seconds=5)
    if is_swept:
        await engine.sweep()
    assert await slots(engine, quota) == (0, 0)
    assert await granted(engine, **B) == [first]
    assert await slots(engine, quota) == (1, 0)


async def test_executions_behind_a_grant_that_lapsed_are_promoted_at_its_time(
    engine: CheckedEngine, clock: Clock
) -> None:
    quota, policy = await capped(engine, 1)
    for _ in range(2):
        await submit(engine, policy=policy)
    await engine.claim_for_worker(**WORKER)
    assert await engine.claim_for_worker(**B) == NoWork()
    assert await slots(engine, quota) == (1, 1)
    await clock.advance(seconds=1)
    assert (await engine.unblock_limited()).promoted == 0
    await clock.advance(seconds=5)
    assert (await engine.unblock_limited()).promoted == 1
    assert await slots(engine, quota) == (0, 0)


async def test_a27_a_reclaim_grant_keeps_the_slot_whether_it_is_used_or_not(
    engine: CheckedEngine, clock: Clock, sql: SQL
) -> None:
    quota, policy = await capped(engine, 1)
    await submit(engine, policy=policy)
    lost = await claim_one(engine)
    await clock.advance(seconds=31)
    await engine.run_timers("lease")
    outcome = await engine.claim_for_worker(**B)
    assert isinstance(outcome, ReclaimGranted)
    assert await sql.fetchval("select quota_policy_ids from flowfabric.claim_grant") is None
    await clock.advance(seconds=6)
    await engine.sweep()
    assert await slots(engine, quota) == (1, 0), "the grant lapsed unused, and the execution is active all the same"
    taken = await consumed(engine, await engine.claim_for_worker(**B), **B)
    assert (taken.execution_id, await slots(engine, quota)) == (lost.execution_id, (1, 0))
    await engine.complete(taken.handle)
    assert await slots(engine, quota) == (0, 0)


async def test_a_cancelled_execution_takes_its_grant_and_its_slot_with_it(engine: CheckedEngine) -> None:
    quota, policy = await capped(engine, 1)
    first, second = [await submit(engine, policy=policy) for _ in range(2)]
    await granted(engine)
    await engine.cancel(Operator(first), "no longer wanted")
    assert await slots(engine, quota) == (0, 0)
    assert await granted(engine) == [second]


async def test_a_claim_of_one_namespace_asks_the_limits_of_its_own(engine: CheckedEngine) -> None:
    quota, policy = await capped(engine, 2)
    foreign = [await submit(engine, policy=policy, namespace="y", priority=9) for _ in range(2)]
    made = [await submit(engine, policy=policy, namespace="x") for _ in range(3)]
    plain = await submit(engine, namespace="x")
    held = await engine.claim_many(limit=10, **WORKER, namespace="x")
    assert [one.execution_id for one in held] == [*made[:2], plain]
    assert await slots(engine, quota) == (2, 1), "what another namespace waits with is left alone"
    assert await granted(engine, namespace="x") == []
    for one in held[:2]:
        await engine.complete(one.handle)
    assert await granted(engine, namespace="y", max_grants=1) == foreign[:1]
    assert await granted(engine, namespace="x") == [made[2]]
    assert await granted(engine, namespace="y") == []


async def test_limited_executions_that_no_live_worker_covers_are_one_route_to_readers(engine: CheckedEngine) -> None:
    _, policy = await capped(engine, 1)
    needs = RoutingRequirements(required_capabilities=("gpu",))
    limited = await submit(engine, policy=ExecutionPolicy(
        quota_policy_ids=policy.quota_policy_ids, routing_requirements=needs))  # fmt: skip
    plain = await submit(engine, policy=GPU)
    assert await engine.claim(**WORKER) is None
    for one in (limited, plain):
        record = await engine.read_execution(one)
        assert record is not None
        assert record.state_vector.eligibility_state == "blocked_by_route"
    (route,) = await engine.list_uncovered()
    assert route.waiting == 2
