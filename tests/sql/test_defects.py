"""Mistakes that engines of this kind have made, each as the behaviour that rules it out."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import RFC_4122, UUID

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import Contention, Corruption, ExecutionNotActive, ValidationFailed
from flowfabric.values.attempt import Claimed, Completion, RetryScheduled
from flowfabric.values.event import Event
from flowfabric.values.execution import Created, Duplicate
from flowfabric.values.grant import ClaimGrant, ReclaimGrant
from flowfabric.values.ids import FlowId
from flowfabric.values.lease import Fence, Handle, Operator, Renewed
from flowfabric.values.page import ScannerFilter
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements, StreamPolicy, TimeoutPolicy
from flowfabric.values.state import TerminalOutcome
from flowfabric.values.vector import AttemptState, BlockingReason, LifecyclePhase
from tests.each import each
from tests.ids import home, id_in
from tests.sql.cases import CaseEngine, World, outcome, shorthand
from tests.support import OTHER, STATES, WORKER, claim_one, new_id, started, submit, submit_member

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


def retrying(**fields: Any) -> ExecutionPolicy:
    return ExecutionPolicy(retry_policy=ff.RetryPolicy(**{"backoff": ff.Fixed(10 * SECOND), **fields}))


def minted() -> dict[str, Any]:
    return {"lease_id": new_id(), "attempt_id": new_id()}


async def by_claim(world: World) -> Claimed:
    await submit(world.engine)
    return await claim_one(world.engine)


async def by_grant(world: World) -> Claimed:
    execution_id = await submit(world.engine)
    await world.engine.issue_claim_grant(execution_id, **WORKER)
    return await world.engine.claim_execution(execution_id, **WORKER, **minted())


async def by_operator(world: World) -> Claimed:
    return await world.engine.issue_grant_and_claim(await submit(world.engine))


async def by_resume_grant(world: World) -> Claimed:
    at = await world.reach("W.i")
    grant = await world.engine.issue_claim_grant(at.id, **WORKER)
    claimed = await world.engine.claim_from_resume_grant(grant, **WORKER)
    assert claimed is not None
    return claimed


async def by_reclaim(world: World) -> Claimed:
    at = await world.reach("V")
    await world.engine.issue_reclaim_grant(at.id, **WORKER)
    claimed = await world.engine.reclaim_execution(at.id, **WORKER, **minted())
    assert isinstance(claimed, Claimed)
    return claimed


async def by_automatic_reclaim(world: World) -> Claimed:
    await world.reach("X")
    return await claim_one(world.engine)


CLAIMS = [by_claim, by_grant, by_operator, by_resume_grant, by_reclaim, by_automatic_reclaim]


# State and its words.


async def test_a_created_execution_is_claimable_immediately(world: World) -> None:
    execution_id = await submit(world.engine)
    assert await world.at(execution_id) == "W.1"
    assert (await claim_one(world.engine)).execution_id == execution_id


@pytest.mark.parametrize("state", STATES)
async def test_every_state_can_be_described_listed_and_read_field_by_field(world: World, state: str) -> None:
    at = await world.reach(state)
    key = home(at.id)
    described = await world.engine.describe_execution(at.id)
    info = await world.engine.read_execution_info(at.id)
    assert described is not None and info is not None
    assert described.public_state == info.public_state == await world.engine.read_execution_state(at.id)
    fields = await world.engine.read_exec_core_fields(
        key, at.id, ["public_state", "lifecycle_phase", "attempt_state", "blocking_reason", "terminal_outcome"]
    )
    vector = info.state_vector
    assert fields == {
        "public_state": vector.public_state,
        "lifecycle_phase": LifecyclePhase(vector.lifecycle_phase),
        "attempt_state": AttemptState(vector.attempt_state),
        "blocking_reason": BlockingReason(vector.blocking_reason),
        "terminal_outcome": TerminalOutcome(vector.terminal_outcome),
    }
    assert [found.state_vector for found in (await world.engine.list_executions(key)).items] == [vector]


async def test_a_word_the_engine_does_not_know_is_corruption_not_a_guess(world: World) -> None:
    world.engine.checking = False
    at = await world.reach("W.1")
    await world.sql.execute("update flowfabric.execution set blocking_reason = 'pending_claim'")
    with pytest.raises(Corruption):
        await world.engine.read_execution_info(at.id)


@pytest.mark.parametrize("claim", CLAIMS)
async def test_every_way_of_claiming_shows_active(world: World, claim: Any) -> None:
    claimed = await claim(world)
    assert await world.engine.read_execution_state(claimed.execution_id) == ff.State.ACTIVE
    assert await world.at(claimed.execution_id) == "A"


async def test_the_public_state_follows_every_transition(world: World) -> None:
    expected = {
        "W.1": "waiting", "W.r": "waiting", "W.p": "waiting", "W.i": "waiting", "W.s": "resumable",
        "D.1": "delayed", "D.r": "delayed", "D.s": "delayed", "S": "suspended",
        "D.i": "delayed", "C.w": "waiting_children", "S.w": "suspended", "B.budget": "rate_limited",
        "B.quota": "rate_limited", "B.route": "waiting", "B.changed": "waiting",
        "B.operator": "waiting", "B.lane": "waiting", "A": "active", "X": "active", "V": "active",
        "T:completed": "completed", "T:failed": "failed", "T:cancelled": "cancelled", "T:expired": "expired",
    }  # fmt: skip
    assert set(expected) == set(STATES)
    for state, word in expected.items():
        await world.wipe()
        assert await world.engine.read_execution_state((await world.reach(state)).id) == word


@pytest.mark.parametrize(
    ("state", "outcome_"),
    [("T:completed", "success"), ("T:failed", "failed"), ("T:cancelled", "cancelled"), ("T:expired", "expired")],
)
async def test_the_outcome_is_stored_and_not_guessed_from_the_attempt(world: World, state: str, outcome_: str) -> None:
    at = await world.reach(state)
    info = await world.engine.read_execution_info(at.id)
    assert info is not None
    assert info.state_vector.terminal_outcome == outcome_
    # Nor does the attempt that came before an end say anything: a failed one, then a cancelled execution.
    retry = await world.reach("D.r")
    await world.engine.cancel(Operator(retry.id), "x")
    assert await world.at(retry.id) == "T:cancelled"


@pytest.mark.parametrize("by", ["worker", "operator"])
async def test_a_cancelled_execution_can_be_replayed_and_purged_for_every_source(world: World, by: str) -> None:
    at = await world.reach("A")
    await world.engine.cancel(at.handle if by == "worker" else Operator(at.id), "x")
    assert await world.at(at.id) == "T:cancelled"
    await world.engine.replay_execution(at.id)
    assert await world.at(at.id) == "W.p"
    await world.engine.cancel(Operator(at.id), "x")
    await world.clock.advance(days=8)
    assert await world.engine.trim_retention() == 1
    assert await world.at(at.id) == "-"


@pytest.mark.parametrize("pause", ["delay", "wait_children", "release"])
async def test_every_pause_can_be_resumed(world: World, pause: str) -> None:
    at = await world.reach("A")
    await getattr(world.engine, pause)(at.handle, *([timedelta(0)] if pause == "delay" else []))
    await world.engine.promote_delayed(at.id)
    assert await world.at(at.id) == "W.i"
    await world.engine.issue_claim_grant(at.id, **WORKER)
    resumed = await world.engine.claim_resumed_execution(at.id, **WORKER, lease_id=new_id())
    assert resumed.handle.attempt_id == at.handle.attempt_id


# Attempts, leases, fences.


@pytest.mark.parametrize("claim", CLAIMS)
async def test_the_attempt_pointer_names_the_attempt_that_runs(world: World, claim: Any) -> None:
    claimed = await claim(world)
    record = await world.record(claimed.execution_id)
    attempts = await world.engine.list_attempts(claimed.execution_id)
    assert record.current_attempt is not None
    assert record.current_attempt.attempt_index == len(attempts) - 1 == record.total_attempt_count - 1
    assert record.current_attempt.attempt_id == attempts[-1].attempt_id == claimed.handle.attempt_id
    assert await world.engine.read_current_attempt_index(claimed.execution_id) == len(attempts) - 1
    assert await world.engine.read_total_attempt_count(claimed.execution_id) == len(attempts)


async def test_no_retry_overwrites_an_earlier_attempt(world: World) -> None:
    execution_id = await submit(world.engine, policy=retrying(backoff=ff.Fixed(0)))
    for index in range(3):
        claimed = await claim_one(world.engine)
        assert claimed.handle.attempt_index == index
        await world.engine.fail(claimed.handle, f"failure {index}")
        await world.engine.promote_delayed(execution_id)
    attempts = await world.engine.list_attempts(execution_id)
    assert [a.attempt_index for a in attempts] == [0, 1, 2]
    assert [a.failure_reason for a in attempts] == ["failure 0", "failure 1", "failure 2"]


async def test_a_new_attempt_does_not_start_the_epochs_again(world: World) -> None:
    at = await world.reach("W.r")
    second = await claim_one(world.engine)
    assert (at.handle.lease_epoch, second.handle.lease_epoch) == (1, 2)
    assert await outcome(world.engine.renew(at.handle)) == "stale_lease"


async def test_a_lease_has_one_identity_wherever_it_is_reported(world: World) -> None:
    at = await world.reach("A")
    lease_id = at.handle.lease_id
    await world.clock.advance(seconds=31)
    listed = (await world.engine.list_expired_leases()).items
    assert [(found.execution_id, found.lease_id) for found in listed] == [(at.id, lease_id)]
    revoked = await world.engine.revoke_lease(at.id, expected_lease_id=lease_id)
    assert revoked.lease_id == lease_id  # type: ignore[union-attr]
    attempts = await world.engine.list_attempts(at.id)
    assert attempts[0].lease_id == lease_id
    events = (await world.picture(at.id)).stored["event"]
    assert {e["lease_id"] for e in events} == {str(lease_id)}
    assert {e["attempt_id"] for e in events} == {str(at.handle.attempt_id)}
    assert {(e["worker_id"], e["worker_instance_id"]) for e in events} == {("pool", "pool-1")}


async def test_a_finished_execution_cannot_be_renewed_completed_again_or_failed_back_to_life(world: World) -> None:
    at = await world.reach("T:completed")
    before = await world.picture(at.id)
    assert await outcome(world.engine.renew(at.handle)) == "execution_not_active"
    assert await outcome(world.engine.fail(at.handle, "boom")) == "execution_not_active"
    assert await outcome(world.engine.complete(Operator(at.id), b"other")) == "execution_not_active"
    await world.engine.complete(at.handle, b"other")
    assert await world.picture(at.id) == before
    assert shorthand(before.stored["event"]).count("K:success") == 1


async def test_a_resume_grant_never_wakes_the_dead(world: World) -> None:
    at = await world.reach("T:completed")
    grant = ClaimGrant(
        execution_id=at.id, grant_key="any", expires_at=at.claimed.created_at  # type: ignore[union-attr]
    )  # fmt: skip
    assert await world.engine.claim_from_resume_grant(grant, **WORKER) is None
    assert await world.at(at.id) == "T:success"


async def test_a_worker_needs_its_lease_to_cancel_and_leaves_none_behind(world: World) -> None:
    at = await world.reach("A")
    await world.engine.release(at.handle)
    current = await claim_one(world.engine, **OTHER)
    assert await outcome(world.engine.cancel(at.handle, "mine")) == "stale_lease"
    await world.engine.cancel(current.handle, "mine")
    record = await world.record(at.id)
    assert (record.current_lease, record.lost_lease, record.cancelled_by) == (None, None, "lease_holder")
    events = shorthand((await world.picture(at.id)).stored["event"])
    assert events[-2:] == ["L:revoked", "K:cancelled"]


async def test_internal_cancels_need_no_fence_and_all_others_do(world: World) -> None:
    for source, answer in {
        "flow_cascade": "Cancelled",
        "system_timeout": "Cancelled",
        "operator_override": "Cancelled",
        "lease_holder": "invalid_input",
        "cleanup": "invalid_input",
    }.items():
        at = await world.reach("A")
        assert await outcome(world.engine.cancel(Operator(at.id, source), "x")) == answer


async def test_a_wrong_fence_is_a_stale_lease_in_every_call(world: World) -> None:
    at = await world.reach("A")
    fence = Fence(
        execution_id=at.id, lease_id=new_id(), lease_epoch=1, attempt_id=at.handle.attempt_id  # type: ignore[arg-type]
    )  # fmt: skip
    for call in (
        world.engine.renew(fence),
        world.engine.progress(fence, percent=1),
        world.engine.complete(fence),
        world.engine.fail(fence, "boom"),
        world.engine.delay(fence, HOUR),
        world.engine.wait_children(fence),
        world.engine.release(fence),
        world.engine.cancel(fence, "x"),
    ):
        with pytest.raises(ff.LeaseLost) as caught:
            await call
        assert caught.value.kind == "stale_lease"


@pytest.mark.parametrize("claim", CLAIMS)
async def test_every_way_of_claiming_gives_a_handle_that_works(world: World, claim: Any) -> None:
    claimed = await claim(world)
    handle = Handle.decode(claimed.handle.encode())
    assert handle == claimed.handle
    await world.engine.renew(handle)
    await world.engine.progress(handle, percent=50)
    await world.engine.complete(handle, b"done")
    assert await world.engine.get_execution_result(claimed.execution_id) == b"done"


async def test_attempts_are_counted_from_zero(world: World) -> None:
    claimed = await by_claim(world)
    record = await world.record(claimed.execution_id)
    assert record.current_lease is not None
    assert claimed.handle.attempt_index == record.current_lease.attempt_index == 0


async def test_a_repeated_fail_never_returns_a_time_that_was_not_scheduled(world: World) -> None:
    at = await world.reach("A")
    first = await world.engine.fail(at.handle, "boom")
    again = await world.engine.fail(at.handle, "boom")
    assert isinstance(first, RetryScheduled) and isinstance(again, RetryScheduled)
    assert again.delay_until == first.delay_until
    assert (await world.record(at.id)).retry_count == 1


@pytest.mark.parametrize("state", STATES)
async def test_a_lease_is_shown_only_while_it_is_held(world: World, state: str) -> None:
    described = await world.engine.describe_execution((await world.reach(state)).id)
    assert described is not None
    assert (described.current_lease is not None) == (state == "A")


# Claiming, grants, reclaim.


async def test_claims_follow_priority_then_age_across_all_partitions_and_pass_over_what_they_cannot_run(
    world: World,
) -> None:
    gpu = ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=("gpu",)))
    places = [(255, 1, None), (0, 1, None), (128, 7, None), (3, 9, gpu), (254, 7, None), (1, 0, None)]
    ids = {}
    for partition, priority, policy in places:
        ids[partition] = await submit(world.engine, execution_id=id_in(partition), priority=priority, policy=policy)
    order = []
    while (claimed := await world.engine.claim(**WORKER)) is not None:
        order.append(claimed.handle.partition)
    assert order == [128, 254, 255, 0, 1]
    assert (await claim_one(world.engine, capabilities=["gpu"])).handle.partition == 3


async def test_an_unused_grant_loses_nothing(world: World) -> None:
    execution_id = await submit(world.engine)
    await world.engine.issue_claim_grant(execution_id, **WORKER, grant_ttl=SECOND)
    assert await world.at(execution_id) == "W.1"
    await world.clock.advance(seconds=2)
    assert (await claim_one(world.engine, **OTHER)).execution_id == execution_id


async def test_the_policy_is_stored_at_creation(world: World) -> None:
    budgets = tuple(sorted([new_id(), new_id()]))
    quota = new_id()
    later = await world.clock.now() + HOUR
    policy = ExecutionPolicy(
        routing_requirements=RoutingRequirements(required_capabilities=("z", "a")),
        budget_ids=budgets,  # type: ignore[arg-type]
        quota_policy_id=quota,  # type: ignore[arg-type]
        delay_until=later,
    )
    record = await world.record(await submit(world.engine, policy=policy))
    assert record.required_capabilities == ("a", "z")
    assert record.budget_ids == budgets
    assert record.quota_policy_id == quota
    assert record.delay_until is not None
    assert abs(record.delay_until - later) < timedelta(milliseconds=1)
    assert record.public_state == ff.State.DELAYED


async def test_work_of_a_crashed_worker_runs_again_without_an_operator(world: World) -> None:
    claimed = await started(world.engine)
    await world.clock.advance(seconds=31)
    assert (await world.engine.run_timers("lease")).handled == 1
    again = await claim_one(world.engine, **OTHER)
    assert again.execution_id == claimed.execution_id
    assert (again.handle.kind, again.attempt_type, again.handle.attempt_index) == ("reclaimed", "reclaim", 1)
    assert await outcome(world.engine.complete(claimed.handle)) == "stale_lease"
    await world.engine.complete(again.handle)


@pytest.mark.parametrize("state", ["W.1", "W.i", "D.r", "A", "T:failed"])
async def test_only_a_lost_lease_can_be_reclaimed(world: World, state: str) -> None:
    at = await world.reach(state)
    before = await world.picture(at.id)
    assert await outcome(world.engine.issue_reclaim_grant(at.id, **WORKER)) == "NotReclaimable"
    assert await outcome(world.engine.reclaim_execution(at.id, **WORKER, **minted())) == "GrantNotFound"
    assert await world.picture(at.id) == before


async def test_without_a_grant_no_call_ends_an_execution_at_its_cap(world: World) -> None:
    at = await world.reach("X", policy=ExecutionPolicy(max_reclaim_count=0))
    assert await outcome(world.engine.reclaim_execution(at.id, **WORKER, **minted())) == "GrantNotFound"
    assert await world.at(at.id) == "X"


async def test_at_the_cap_the_attempt_is_closed_and_the_end_is_announced(world: World) -> None:
    at = await world.reach("X", policy=ExecutionPolicy(max_reclaim_count=0))
    assert await outcome(world.engine.issue_reclaim_grant(at.id, **WORKER)) == "ReclaimCapExceeded"
    after = await world.picture(at.id)
    assert after.attempts[-1].attempt_lifecycle == "ended_failure"
    assert shorthand(after.stored["event"])[-2:] == ["L:revoked", "K:failed"]


@pytest.mark.parametrize("state", ["D.i", "B.operator", "A", "A resumed", "X", "V"])
async def test_an_operator_does_not_start_what_is_not_eligible(world: World, state: str) -> None:
    """Nor what a worker owns, or lost: that is reclaimed."""
    at = await world.reach({"B.operator": "W.i", "A resumed": "W.i"}.get(state, state))
    if state == "B.operator":
        await world.engine.block_execution_for_admission(at.id, "paused_by_operator")
    resumed = await claim_one(world.engine) if state == "A resumed" else None
    before = await world.picture(at.id)
    assert await outcome(world.engine.issue_grant_and_claim(at.id)) == "execution_not_eligible"
    assert await world.picture(at.id) == before
    if resumed is not None:
        await world.engine.complete(resumed.handle)


async def test_a_resumed_claim_needs_a_grant_and_keeps_the_attempt(world: World) -> None:
    at = await world.reach("W.i")
    call = world.engine.claim_resumed_execution
    assert await outcome(call(at.id, **WORKER, lease_id=new_id())) == "invalid_claim_grant"
    await world.engine.issue_claim_grant(at.id, **WORKER)
    resumed = await call(at.id, **WORKER, lease_id=new_id())
    assert (resumed.handle.attempt_id, resumed.handle.attempt_index) == (at.handle.attempt_id, 0)
    assert (await world.record(at.id)).total_attempt_count == 1


# Retry, delay, deadline, timeouts.


async def test_a_transient_failure_is_retried_neither_forever_nor_immediately(world: World) -> None:
    claimed = await started(world.engine, policy=retrying(max_retries=1))
    await world.engine.fail(claimed.handle, "boom")
    assert await world.engine.claim(**WORKER) is None
    await world.clock.advance(seconds=11)
    assert (await world.engine.run_timers("delay")).handled == 1
    assert await outcome(world.engine.fail((await claim_one(world.engine)).handle, "boom")) == "TerminalFailed"


async def test_a_delay_does_not_destroy_the_deadline_nor_a_promotion_clear_it(world: World) -> None:
    at = await world.reach("A", execution_deadline_at=HOUR)
    deadline = (await world.record(at.id)).deadline_at
    await world.engine.delay(at.handle, 10 * SECOND)
    assert (await world.record(at.id)).deadline_at == deadline
    await world.clock.advance(seconds=11)
    assert (await world.record(at.id)).stored_blocking_reason == "waiting_for_delay"
    assert (await world.engine.run_timers("delay")).handled == 1
    promoted = await world.record(at.id)
    assert (promoted.deadline_at, promoted.delay_until) == (deadline, None)
    assert (promoted.public_state, promoted.stored_blocking_reason, promoted.blocking_detail) == (
        ff.State.WAITING, "waiting_for_worker", None,
    )  # fmt: skip
    await world.clock.advance(hours=1)
    assert (await world.engine.run_timers("deadline")).handled == 1
    assert await world.at(at.id) == "T:expired"


async def test_a_lapsed_lease_and_a_slow_attempt_are_two_different_things(world: World) -> None:
    policy = ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=HOUR))
    at = await world.reach("A", policy=policy)
    await world.clock.advance(seconds=31)
    assert (await world.engine.run_timers("attempt")).handled == 0
    assert (await world.engine.run_timers("lease")).handled == 1
    assert await world.at(at.id) == "X"
    renewed = await started(world.engine, policy=policy, lease_ttl=3 * HOUR)
    await world.clock.advance(hours=1)
    assert (await world.engine.run_timers("lease")).handled == 0
    await world.engine.run_timers("attempt")
    assert await world.at(renewed.execution_id) == "T:expired"


async def test_a_timed_out_attempt_is_retried_when_its_policy_says_so(world: World) -> None:
    policy = ExecutionPolicy(retry_policy=ff.RetryPolicy(), timeout_policy=TimeoutPolicy(attempt_timeout=10 * SECOND))
    at = await world.reach("A", policy=policy)
    await world.clock.advance(seconds=10)
    assert await world.engine.expire_execution(at.id, "attempt_timeout") == "retry_scheduled"
    assert (await world.record(at.id)).retry_count == 1


async def test_the_timer_of_an_earlier_attempt_does_not_end_a_fresh_one(world: World) -> None:
    policy = ExecutionPolicy(
        retry_policy=ff.RetryPolicy(backoff=ff.Fixed(0)), timeout_policy=TimeoutPolicy(attempt_timeout=20 * SECOND)
    )
    at = await world.reach("A", policy=policy)
    await world.clock.advance(seconds=15)
    await world.engine.fail(at.handle, "boom")
    await world.engine.promote_delayed(at.id)
    await claim_one(world.engine)
    await world.clock.advance(seconds=10)
    assert (await world.engine.run_timers("attempt")).handled == 0
    assert await world.at(at.id) == "A"
    # And the timer was not lost with it.
    await world.clock.advance(seconds=10)
    assert (await world.engine.run_timers("attempt")).handled == 1
    assert await world.at(at.id) == "D.r"


@pytest.mark.parametrize("window", [timedelta(0), 10 * SECOND, None])
async def test_the_window_of_an_idempotency_key_is_the_policys(world: World, window: timedelta | None) -> None:
    policy = ExecutionPolicy(dedup_window=window)

    async def create() -> Created | Duplicate:
        return await world.engine.create_execution(execution_kind="test", idempotency_key="k", policy=policy)

    first = await create()
    await world.clock.advance(seconds=9)
    again = await create()
    assert isinstance(again, Created if window == timedelta(0) else Duplicate)
    assert (again.execution_id == first.execution_id) == (window != timedelta(0))
    await world.clock.advance(seconds=2 if window else 86_400)
    assert isinstance(await create(), Created)


async def test_duties_serve_unconfigured_lanes(world: World) -> None:
    delayed = await submit(world.engine, lane_id="never heard of", delay_until=SECOND)
    late = await submit(world.engine, lane_id="nor this", execution_deadline_at=SECOND)
    await world.clock.advance(seconds=2)
    assert (await world.engine.run_timers("delay")).handled == 1
    assert (await world.engine.run_timers("deadline")).handled == 1
    assert (await world.at(delayed), await world.at(late)) == ("W.1", "T:expired")
    await world.clock.advance(days=14)
    assert await world.engine.trim_retention() == 1


async def test_a_replay_is_limited_keeps_all_history_and_serves_every_outcome(world: World) -> None:
    for state in ("T:completed", "T:failed", "T:cancelled", "T:expired"):
        await world.wipe()
        at = await world.reach(state, policy=ExecutionPolicy(max_replay_count=1))
        earlier = await world.engine.list_attempts(at.id)
        await world.engine.replay_execution(at.id)
        claimed = await claim_one(world.engine)
        assert (claimed.handle.attempt_index, claimed.attempt_type) == (1, "replay")
        assert (await world.engine.list_attempts(at.id))[:1] == earlier
        await world.engine.complete(claimed.handle)
        assert await outcome(world.engine.replay_execution(at.id)) == "max_replays_exhausted"


async def test_a_replay_forgets_the_outcome_and_keeps_the_counters(world: World) -> None:
    at = await world.reach("T:failed")
    before = await world.record(at.id)
    await world.engine.replay_execution(at.id)
    after = await world.record(at.id)
    assert (after.completed_at, after.failure_reason, after.failure_category, after.deadline_at) == (None,) * 4
    kept = ("retry_count", "lease_reclaim_count", "total_attempt_count", "current_lease_epoch", "started_at", "policy")
    assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]
    done = await world.reach("T:completed")
    await world.engine.replay_execution(done.id)
    assert await world.engine.get_execution_result(done.id) is None


# Events, reads, errors.


async def read_all(world: World, count: int) -> list[Event]:
    """Events appear once every older transaction of the server has ended."""
    events: list[Event] = []
    for _ in range(500):
        events = list((await world.engine.read_events()).items)
        if len(events) >= count:
            break
        await asyncio.sleep(0.01)
    return events


async def test_every_event_carries_namespace_and_tags_for_any_filter(world: World) -> None:
    await submit(world.engine)
    execution_id = await submit(world.engine, namespace="blue", tags={"team.name": "a", "plain": "b"}, priority=1)
    await world.engine.change_priority(execution_id, 2)
    claimed = await claim_one(world.engine)
    await world.engine.renew(claimed.handle)
    await world.engine.revoke_lease(execution_id)
    await world.engine.complete((await claim_one(world.engine)).handle)
    await world.engine.replay_execution(execution_id)
    await world.engine.cancel(Operator(execution_id), "x")
    assert await world.engine.claim(**WORKER) is not None
    events = await read_all(world, 9)
    ours = [e for e in events if e.execution_id == execution_id]
    assert len(ours) == 8
    assert {(e.namespace, tuple(sorted(e.tags.items()))) for e in ours} == {
        ("blue", (("plain", "b"), ("team.name", "a")))
    }
    for chosen in (
        ScannerFilter(namespace="blue"),
        ScannerFilter(instance_tag=("team.name", "a")),
        ScannerFilter(namespace="blue", instance_tag=("plain", "b")),
    ):
        assert list((await world.engine.read_events(filter=chosen)).items) == ours
    assert (await world.engine.read_events(filter=ScannerFilter(instance_tag=("team.name", "b")))).items == []


@pytest.mark.parametrize("source", ["operator_override", "flow_cascade", "system_timeout", "cleanup"])
@pytest.mark.parametrize("state", ["W.1", "D.r", "B.quota"])
async def test_every_cancel_writes_one_completion_event(world: World, source: str, state: str) -> None:
    at = await world.reach(state)
    for _ in range(2):
        await world.engine.cancel(Operator(at.id, source), "x")
    events = shorthand((await world.picture(at.id)).stored["event"])
    assert [word for word in events if word[0] == "K"] == ["K:cancelled"]


async def test_a_reader_gets_the_events_of_all_partitions_and_continues_where_it_stopped(world: World) -> None:
    ids = [await submit(world.engine, execution_id=id_in(p)) for p in (255, 0, 17)]
    for _ in ids:
        await world.engine.complete((await claim_one(world.engine)).handle)
    assert len(await read_all(world, 6)) == 6
    seen: list[Event] = []
    cursor = None
    while (page := await world.engine.read_events(family="completion", after=cursor, limit=1)).items:
        seen += page.items
        cursor = page.next_cursor
    assert [e.execution_id for e in seen] == ids
    assert [e.outcome for e in seen] == ["success"] * 3
    # What comes later is found from there.
    await world.engine.replay_execution(ids[0])
    await world.engine.cancel(Operator(ids[0]), "x")
    await read_all(world, 8)
    assert [e.outcome for e in (await world.engine.read_events(family="completion", after=cursor)).items] == [
        "cancelled"
    ]


async def test_an_event_whose_transaction_began_early_and_ended_late_is_not_skipped(world: World) -> None:
    slow, fast = await submit(world.engine), await submit(world.engine)
    transaction = world.sql.transaction()
    await transaction.start()
    await world.sql.fetch(
        "select * from flowfabric.cancel_as_operator(array[$1::int], array[$2::uuid], array[null::uuid],"
        " array[null::bigint], array[null::uuid], array[null::int], 'operator_override', 'x', false)",
        home(slow),
        slow,
    )
    await world.engine.cancel(Operator(fast), "x")
    page = await world.engine.read_events()
    assert page.items == []
    await transaction.commit()
    await read_all(world, 2)
    rest = await world.engine.read_events(after=page.next_cursor)
    assert [e.execution_id for e in rest.items] == [slow, fast]


async def test_a_failed_end_is_written_as_failed_and_the_old_spelling_is_understood(world: World) -> None:
    at = await world.reach("T:failed")
    assert (await world.picture(at.id)).stored["event"][-1]["outcome"] == "failed"
    world.engine.checking = False
    await world.sql.execute("update flowfabric.event set outcome = 'failure' where outcome = 'failed'")
    assert (await read_all(world, 2))[-1].outcome == "failed"


REASONS = {
    "complete": (lambda w, h: w.engine.complete(h), "completed", "backend"),
    "retry": (lambda w, h: w.engine.fail(h, "boom"), "failed_retry_scheduled", "backend"),
    "fail": (lambda w, h: w.engine.fail(h, "boom", failure_class="permanent"), "failed_terminal", "backend"),
    "cancel": (lambda w, h: w.engine.cancel(h, "x"), "cancelled", "backend"),
    "delay": (lambda w, h: w.engine.delay(h, HOUR), "worker_delay", "backend"),
    "wait_children": (lambda w, h: w.engine.wait_children(h), "waiting_children", "backend"),
    "release": (lambda w, h: w.engine.release(h), "worker_release", "backend"),
    "stop": (lambda w, h: w.engine.stop_changed(h, detail="a", digest="d"), "steps_changed", "backend"),
    "revoke": (lambda w, h: w.engine.revoke_lease(h.execution_id, reason="because"), "because", "operator"),
    "deadline": (
        lambda w, h: w.engine.expire_execution(h.execution_id, "execution_deadline"),
        "expired:execution_deadline",
        "reconciler",
    ),
    "timeout": (
        lambda w, h: w.engine.expire_execution(h.execution_id, "attempt_timeout"),
        "expired:attempt_timeout",
        "reconciler",
    ),
}


@pytest.mark.parametrize("way", REASONS)
async def test_the_end_of_a_lease_says_why_and_by_whom(world: World, way: str) -> None:
    call, reason, revoked_by = REASONS[way]
    policy = ExecutionPolicy(retry_policy=ff.RetryPolicy(), timeout_policy=TimeoutPolicy(attempt_timeout=5 * SECOND))
    at = await world.reach("A", policy=policy, execution_deadline_at=5 * SECOND)
    if way in ("deadline", "timeout"):
        await world.clock.advance(seconds=6)
    await call(world, at.handle)
    last = (await world.picture(at.id)).stored["event"][-1]
    assert (last["lease_type"], last["reason"], last["revoked_by"]) == ("revoked", reason, revoked_by)
    assert (last["lease_id"], last["lease_epoch"], last["attempt_index"]) == (str(at.handle.lease_id), 1, 0)


async def test_a_member_of_a_flow_is_described_with_the_bare_id_of_its_flow(world: World) -> None:
    flow = FlowId(new_id())
    execution_id = await submit_member(world.engine, flow)
    described = await world.engine.describe_execution(execution_id)
    assert described is not None
    assert described.flow_id == flow
    assert isinstance(await world.engine.resolve_execution_flow_id(execution_id), UUID)


async def test_lapsed_leases_are_listed_whether_marked_or_not_and_revoked_ones_are_not(world: World) -> None:
    unmarked, marked, revoked = [(await started(world.engine)).execution_id for _ in range(3)]
    await world.engine.revoke_lease(revoked)
    assert (await world.engine.list_expired_leases()).items == []
    await world.clock.advance(seconds=31)
    await world.engine.mark_lease_expired_if_due(marked)
    listed = (await world.engine.list_expired_leases()).items
    assert [found.execution_id for found in listed] == [unmarked, marked]


async def test_the_same_id_again_is_a_duplicate_and_no_other_conflict(world: World) -> None:
    execution_id = await submit(world.engine, priority=1)
    again = await world.engine.create_execution(execution_kind="other", execution_id=execution_id, priority=2)
    assert again == Duplicate(execution_id)
    assert (await world.record(execution_id)).priority == 1


async def test_refusals_of_operators_are_typed_and_never_transport_errors(world: World) -> None:
    at = await world.reach("T:completed")
    unknown = id_in(3)
    for call, error, status in (
        (world.engine.cancel(Operator(at.id), "x"), ExecutionNotActive, 409),
        (world.engine.change_priority(at.id, 3), Contention, 409),
        (world.engine.cancel(Operator(unknown), "x"), ff.NotFound, 404),
        (world.engine.change_priority(unknown, 3), ff.NotFound, 404),
        (world.engine.replay_execution(unknown), ff.NotFound, 404),
        (world.engine.revoke_lease(unknown), ff.NotFound, 404),
        (world.engine.complete(Operator(unknown)), ff.NotFound, 404),
        (world.engine.create_execution(execution_kind="test", policy="{"), ValidationFailed, 400),
    ):
        with pytest.raises(error) as caught:
            await call
        assert caught.value.http_status == status


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xff\xfe\x00\x80", bytes(range(256)) * 300], ids=len)
async def test_payload_and_result_are_the_bytes_that_were_given(world: World, data: bytes) -> None:
    claimed = await started(world.engine, input_payload=data)
    assert claimed.input_payload == data
    assert (await world.engine.read_execution_context(claimed.execution_id)).input_payload == data
    await world.engine.complete(claimed.handle, data)
    assert await world.engine.get_execution_result(claimed.execution_id) == data


async def test_no_result_is_not_an_empty_result(world: World) -> None:
    claimed = await started(world.engine)
    await world.engine.complete(claimed.handle)
    assert await world.engine.get_execution_result(claimed.execution_id) is None


async def test_every_time_is_the_databases(world: World) -> None:
    await world.clock.advance(days=400)
    now = await world.clock.now()
    claimed = await started(world.engine, policy=retrying())
    assert abs(claimed.created_at - now) < HOUR
    assert abs(claimed.lease_expires_at - now) < HOUR
    answer = await world.engine.fail(claimed.handle, "boom")
    assert isinstance(answer, RetryScheduled)
    assert abs(answer.delay_until - now) < HOUR
    assert all(abs(event.occurred_at - now) < HOUR for event in await read_all(world, 2))


async def test_partitions_above_32767_work_like_any_other(world: World) -> None:
    await world.sql.execute("update flowfabric.deployment set flow_partitions = 65535")
    try:
        async with await CaseEngine.connect(world.dsn, notifications=False) as engine:
            execution_id = await submit(engine, execution_id=id_in(65534, count=65535))
            claimed = await claim_one(engine)
            assert claimed.execution_id == execution_id
            await engine.complete(claimed.handle, b"x")
            found = await engine.list_executions(65534)
            assert [info.execution_id for info in found.items] == [execution_id]
    finally:
        await world.sql.execute("update flowfabric.deployment set flow_partitions = 256")


async def test_retention_honours_the_policy_of_the_execution_and_every_outcome(world: World) -> None:
    kept = ExecutionPolicy(stream_policy=StreamPolicy(retention_ttl=timedelta(days=9)))
    brief = ExecutionPolicy(stream_policy=StreamPolicy(retention_ttl=HOUR))
    long_kept = (await world.reach("T:completed", policy=kept)).id
    brief_ids = [(await world.reach(s, policy=brief)).id for s in ("T:failed", "T:cancelled", "T:expired")]
    usual = (await world.reach("T:cancelled")).id
    running = (await world.reach("A", policy=brief)).id
    await world.clock.advance(hours=2)
    assert await world.engine.trim_retention() == 3
    await world.clock.advance(days=7)
    assert await world.engine.trim_retention() == 1
    assert [await world.at(i) for i in (*brief_ids, usual)] == ["-"] * 4
    assert [await world.at(i) for i in (long_kept, running)] == ["T:success", "A"]


async def test_a_revoke_returns_the_revoked_epoch_and_a_wrong_lease_is_no_error(world: World) -> None:
    at = await world.reach("W.i")
    claimed = await claim_one(world.engine)
    assert await outcome(world.engine.revoke_lease(at.id, expected_lease_id=at.handle.lease_id)) == "lease_id_mismatch"
    revoked = await world.engine.revoke_lease(at.id)
    assert revoked.lease_epoch == claimed.handle.lease_epoch == 2  # type: ignore[union-attr]
    assert (await world.record(at.id)).current_lease_epoch == 2
    assert isinstance(await world.engine.issue_reclaim_grant(at.id, **WORKER), ReclaimGrant)


# Times


NEVER = (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC))


@each("at", NEVER)
async def test_the_first_and_the_last_moment_are_refused_by_name(world: World, at: datetime) -> None:
    """The driver would store them as infinities: delayed forever, never expired, read back without a time zone."""
    held = await by_claim(world)
    for field, call in {
        "delay_until": lambda: submit(world.engine, delay_until=at),
        "execution_deadline_at": lambda: submit(world.engine, execution_deadline_at=at),
        "delay_until ": lambda: world.engine.delay(held.handle, at),
    }.items():
        with pytest.raises(ff.InvalidInput, match=r"year 9999") as refused:
            await call()
        assert refused.value.field == field.strip()
    near = (at + SECOND if at.year == 1 else at - SECOND).replace(microsecond=0)
    record = await world.record(await submit(world.engine, execution_deadline_at=near))
    assert record.deadline_at == near


@each("time", ["infinity", "-infinity", "20000-01-01 00:00+00", "4000-01-01 00:00+00 BC"])
async def test_no_call_of_the_functions_stores_a_time_that_cannot_be_read(world: World, time: str) -> None:
    held = await by_claim(world)
    fence = (home(held.execution_id), *(getattr(held.handle, name) for name in
             ("execution_id", "lease_id", "lease_epoch", "attempt_id", "attempt_index")))  # fmt: skip
    made = await world.engine.create_waitpoint(held.handle, "k", HOUR)
    token, target = made.token.reveal(), fence[:2]
    none = ", ".join(["'{}'"] * 5)
    calls = {
        "delay($1, $2, $3, $4, $5, $6, $7::text::timestamptz, null)": fence,
        f"park($1, $2, $3, $4, $5, $6, $7::text::timestamptz, {none}, null, null, null, null)": fence,
        f"park($1, $2, $3, $4, $5, $6, null, {none}, $7::text::timestamptz, 'fail', null, null)": fence,
        "claim_granted(false, $1, $2, null, 'w', 'w', null, null, 9, null, null, null, $3::text::timestamptz)": target,
        "advance_schedule('s', now(), $1::text::timestamptz, null)": (),
        "advance_schedule('s', now(), null, $1::text::timestamptz)": (),
        "deliver_signal($1, $2, $3, $4, gen_random_uuid(), 'n', 'c', 't', 'i', null, null, null, null, 'waitpoint',"
        " $5::text::timestamptz, null, null, null, null)": (*target, made.waitpoint_id, token),
    }
    for call, args in calls.items():
        with pytest.raises(asyncpg.InvalidParameterValueError, match="years 1 to 9999"):
            await world.sql.fetch(f"select * from flowfabric.{call}", *args, time)


async def test_no_duration_leads_to_a_time_that_cannot_be_read(world: World) -> None:
    for ms in (2**63 - 1, 10**17, -(2**63)):
        at = await world.sql.fetchval("select flowfabric.now() + flowfabric.ms($1::bigint::double precision)", ms)
        assert 1600 < at.year < 2500
    held = await by_claim(world)
    fence = (home(held.execution_id), *(getattr(held.handle, name) for name in
             ("execution_id", "lease_id", "lease_epoch", "attempt_id", "attempt_index")))  # fmt: skip
    columns = ", ".join(
        f"array[${n}::{kind}]" for n, kind in enumerate(("int", "uuid", "uuid", "bigint", "uuid", "int"), 1)
    )
    await world.sql.fetch(f"select * from flowfabric.renew({columns}, array[{2**62}], true)", *fence)
    assert (await world.record(held.execution_id)).current_lease is not None


@each("past", [timedelta(-1), -SECOND, timedelta(0)])
async def test_a_time_that_has_passed_is_due_at_once_as_a_time_and_as_a_duration(world: World, past: timedelta) -> None:
    at = await world.clock.now() + past
    states = []
    for given in (past, at):
        states.append((await world.record(await submit(world.engine, delay_until=given))).public_state)
        overdue = await submit(world.engine, execution_deadline_at=given)
        assert await world.engine.expire_execution(overdue, "execution_deadline") == "expired"
        held = await claim_one(world.engine)
        await world.engine.delay(held.handle, given)
        assert await world.engine.promote_delayed(held.execution_id) == "promoted"
        while (held := await world.engine.claim(**WORKER)) is not None:
            await world.engine.complete(held.handle)
    assert states[0] == states[1]


# Identities and histories


async def test_the_ids_of_leases_and_attempts_are_uuids(world: World) -> None:
    first = await by_claim(world)
    await world.engine.release(first.handle)
    second = await claim_one(world.engine)
    await world.engine.fail(second.handle, "x")
    for held in (first, second):
        for one in (held.handle.lease_id, held.handle.attempt_id):
            assert (one.version, one.variant) == (4, RFC_4122), one


async def test_a_handle_built_by_hand_fails_no_other_of_its_call(world: World) -> None:
    good = await by_claim(world)
    fields = {name: getattr(good.handle, name) for name in Handle.__struct_fields__}
    forged = {
        "partition": [-1, 2**40, "1", None], "uuid": ["x", 5, None], "lease_id": ["x", 5, None],
        "attempt_id": ["x", None], "lease_epoch": [-1, 2**63, "1", 1.0, None], "attempt_index": [2**31, -1, "0", None],
    }  # fmt: skip
    for name, values in forged.items():
        for value in values:
            bad = Handle(**fields | {name: value})
            found = await world.engine.renew_many([good.handle, bad, good.handle])
            assert [type(one) for one in found] == [Renewed, ff.InvalidInput, Renewed], (name, value)
            assert name in ("uuid", found[1].field)  # type: ignore[union-attr]
            refused, done = await world.engine.complete_many([Completion(bad), Completion(bad)])
            assert isinstance(refused, ff.InvalidInput) and isinstance(done, ff.InvalidInput)


async def test_a_success_shows_no_failure_of_an_earlier_attempt(world: World) -> None:
    held = await started(world.engine, policy=retrying(max_retries=1))
    await world.engine.fail(held.handle, "boom", category="E")
    await world.clock.advance(seconds=11)
    await world.engine.promote_delayed(held.execution_id)
    await world.engine.complete((await claim_one(world.engine)).handle)
    record = await world.record(held.execution_id)
    assert (record.public_state, record.failure_reason, record.failure_category) == ("completed", None, None)
    outcomes = await world.engine.read_outcomes([held.execution_id])
    assert outcomes[held.execution_id].failure_reason is None
    assert [one.failure_reason for one in await world.engine.list_attempts(held.execution_id)] == ["boom", None]


async def test_the_events_of_a_deleted_execution_are_not_those_of_the_next_with_its_id(world: World) -> None:
    target = new_id()
    for _ in range(2):
        await world.engine.create_execution(execution_kind="test", execution_id=target)
        await world.engine.complete((await claim_one(world.engine)).handle)
        seen = (await world.engine.list_events(target)).items
        assert [(one.lease_type, one.outcome) for one in seen] == [("acquired", None), ("revoked", "success")]
        assert await world.engine.audit(events=True) == []
        await world.engine.delete_execution(target)
        await world.clock.advance(seconds=1)


async def test_a_row_that_cannot_be_read_is_named_with_its_column(world: World) -> None:
    await submit(world.engine)
    bad = await submit(world.engine)
    await world.sql.execute("update flowfabric.execution set state = 'odd', blocking_detail = null where id = $1", bad)
    for call in (
        lambda: world.engine.find_executions(),
        lambda: world.engine.read_execution(bad),
    ):
        with pytest.raises(Corruption, match=f"{bad}: state"):
            await call()
    await world.sql.execute(
        "update flowfabric.execution set state = 'waiting', deadline_at = '20000-01-01' where id = $1", bad
    )
    with pytest.raises(Corruption, match="times_finite"):
        await world.engine.read_execution(bad)
