"""How suspensions end other than by signals: they time out, the execution ends, or its attempt does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.errors import StateError
from flowfabric.values.conditions import Condition, all_of, count_signals, on
from flowfabric.values.ids import ExecutionId
from flowfabric.values.lease import Operator
from flowfabric.values.page import ScannerFilter
from flowfabric.values.policies import ExecutionPolicy, SuspensionPolicy, TimeoutPolicy
from flowfabric.values.signal import DuplicateSignal
from flowfabric.values.wait import AlreadySatisfied, ExpiredSuspension, Suspended
from tests.ids import home, id_in
from tests.interleave import Party, waiting
from tests.sql.cases import outcome
from tests.sql.suspending import (
    APPENDED,
    BUFFERED,
    ENDS,
    HOUR,
    LONG,
    RESUMED,
    SATISFIED,
    SECOND,
    Point,
    SuspendingWorld,
    Then,
    Waiting,
    cancel,
    complete,
    delay,
    ended,
    fail_for_good,
    nothing,
    numbered,
    pass_deadline,
    release,
    short,
)
from tests.support import WORKER, claim_one, new_id

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.both_servers]

RETRY = ff.RetryPolicy(max_retries=3, backoff=ff.Fixed(10))


# ---- when it times out


@dataclass(frozen=True)
class End:
    """What a timeout leads to: the vector, the attempt's end, how everything was closed, and the events."""

    vector: dict[str, str]
    lifecycle: str
    closed: str | None
    events: list[str]


ESCALATED = {
    "lifecycle_phase": "suspended", "ownership_state": "unowned", "eligibility_state": "not_applicable",
    "blocking_reason": "paused_by_operator", "terminal_outcome": "none", "attempt_state": "attempt_interrupted",
    "public_state": "suspended",
}  # fmt: skip
BEHAVIORS = {
    "fail": End(ended("failed"), "ended_failure", "timed_out_fail", ["K:failed"]),
    "cancel": End(ended("cancelled"), "ended_cancelled", "timed_out_cancel", ["K:cancelled"]),
    "expire": End(ended("expired"), "ended_failure", "timed_out_expire", ["K:expired"]),
    "auto_resume_with_timeout_signal": End(RESUMED, "suspended", "timed_out_auto_resume", []),
    "escalate": End(ESCALATED, "suspended", None, ["O:suspension_escalated"]),
}


async def due(world: SuspendingWorld, behavior: str, condition: Condition | None = None, **args: Any) -> Waiting:
    """A suspension over two waitpoints that has timed out."""
    wait = await world.suspend(
        all_of("a", "b") if condition is None else condition,
        timeout_at=await world.in_an_hour(),
        timeout_behavior=behavior,
        reason_code="waiting_for_approval",
        **args,
    )
    await world.clock.advance(hours=1, seconds=1)
    return wait


@pytest.mark.parametrize("behavior", BEHAVIORS)
@pytest.mark.parametrize("by", ["the duty", "one call"])
async def test_a_suspension_that_times_out_does_as_its_behavior_says(
    world: SuspendingWorld, behavior: str, by: str
) -> None:
    policy = ExecutionPolicy(retry_policy=RETRY)
    wait = await due(world, behavior, creating={"policy": policy})
    end, events = BEHAVIORS[behavior], short(await world.events(wait))
    await world.accept(wait, "a")
    if by == "the duty":
        assert (await world.engine.run_timers("suspension")).handled == 1
    else:
        assert await world.engine.expire_suspension(wait.id) == ExpiredSuspension(wait.id, behavior)
    assert await world.vector(wait) == end.vector
    assert short(await world.events(wait)) == [*events, f"S:{APPENDED}", *end.events]
    record, suspension = await world.record(wait.id), await world.suspension(wait)
    (attempt,) = await world.engine.list_attempts(wait.id)
    assert (attempt.attempt_lifecycle, attempt.attempt_id) == (end.lifecycle, wait.handle.attempt_id)
    assert record.suspension_timeout_at is None
    assert record.retry_count == 0, "no retry"
    assert suspension.close_reason == end.closed
    states = {("active", None)} if end.closed is None else {("closed", end.closed)}
    assert set((await world.closed(wait)).values()) == states
    if end.vector["lifecycle_phase"] == "terminal":
        assert record.failure_reason == f"suspension_timeout:{behavior}"
        assert record.completed_at == suspension.closed_at == attempt.ended_at
        assert await outcome(world.send(wait, "b")) == "target_not_signalable"
    # Nothing is left to be done, now or later.
    await world.clock.advance(days=1)
    assert (await world.engine.run_timers("suspension")).handled == 0
    assert await world.vector(wait) == end.vector


async def test_a_timeout_that_resumes_leaves_one_signal_of_the_engines_own(world: SuspendingWorld) -> None:
    wait = await due(world, "auto_resume_with_timeout_signal")
    await world.accept(wait, "a", signal_name="timeout", source_identity="suspension_timeout")
    assert (await world.engine.run_timers("suspension")).handled == 1
    wait.claimed = await world.reclaim_resumed(wait)
    (seen,) = await world.engine.observe_signals(wait.handle)
    assert (seen.signal_name, seen.signal_category) == ("timeout", "system")
    assert (seen.source_type, seen.source_identity) == ("system", "suspension_timeout")
    assert (seen.payload, seen.waitpoint_key) == (None, "a")
    suspension = await world.suspension(wait)
    assert suspension.closer_signal_id == seen.signal_id and suspension.satisfier_signal_ids == (seen.signal_id,)
    assert seen.accepted_at == suspension.closed_at
    assert numbered((await world.engine.read_signals(wait.id)).items) == [1, 2]
    assert await outcome(world.send(wait, "b")) == "waitpoint_closed"
    assert await world.send(wait, "b", signal_id=seen.signal_id) == DuplicateSignal(seen.signal_id)


async def test_an_escalated_suspension_stays_open_and_can_be_signalled(world: SuspendingWorld) -> None:
    wait = await due(world, "escalate")
    missed = (await world.record(wait.id)).suspension_timeout_at
    assert (await world.engine.run_timers("suspension")).handled == 1
    record, suspension = await world.record(wait.id), await world.suspension(wait)
    assert missed is not None and missed.strftime("%Y-%m-%dT%H:%M:%S") in (record.blocking_detail or "")
    assert suspension.reason_code == "waiting_for_operator_review"
    assert (suspension.timeout_at, suspension.timeout_behavior) == (None, None)
    assert [(await world.waitpoint(wait, key))["expires_at"] for key in "ab"] == [None, None]
    (listed,) = (await world.engine.list_suspended(home(wait.id))).items
    assert (listed.reason, listed.timeout_at) == ("waiting_for_operator_review", None)
    assert await outcome(world.engine.expire_suspension(wait.id)) == "not_yet_due"
    (event,) = [e for e in await world.events(wait) if e.operator_type == "suspension_escalated"]
    assert event.details is not None
    assert set(event.details) == {"reason_code", "suspension_id", "timeout_at"}
    assert event.details["reason_code"] == "waiting_for_approval"
    assert (await world.accept(wait, "a")).effect == APPENDED
    assert (await world.accept(wait, "b")).effect == SATISFIED


async def test_an_operator_resumes_what_was_escalated(world: SuspendingWorld) -> None:
    wait = await due(world, "escalate")
    await world.engine.run_timers("suspension")
    await world.engine.resume_execution(wait.id, "operator")
    assert await world.vector(wait) == RESUMED
    assert set((await world.closed(wait)).values()) == {("closed", "operator_resumed")}


@pytest.mark.parametrize(
    ("stored", "applied", "state"),
    [
        ("explode", "fail", "failed"),
        ("", "fail", "failed"),
        (None, "fail", "failed"),
        ("auto_resume", "auto_resume_with_timeout_signal", "resumable"),
    ],
)
async def test_a_stored_behaviour_that_is_unknown_is_a_failure(
    world: SuspendingWorld, callers: list[Party], stored: str | None, applied: str, state: str
) -> None:
    wait = await due(world, "escalate")
    heard: list[str] = []
    callers[0].connection.add_log_listener(lambda _, message: heard.append(str(message)))
    await world.sql.execute("update flowfabric.suspension set timeout_behavior = $1", stored)
    assert await callers[0].expire_suspension(wait.id) == ExpiredSuspension(wait.id, applied)
    record = await world.record(wait.id)
    assert record.public_state == state
    assert record.failure_reason == ("suspension_timeout:fail" if state == "failed" else None)
    await asyncio.sleep(0)
    assert len(heard) == (1 if stored in ("explode", "") else 0)


@pytest.mark.parametrize("alias", ["auto_resume"])
async def test_the_short_name_of_the_resuming_timeout_is_understood(world: SuspendingWorld, alias: Any) -> None:
    wait = await due(world, alias)
    assert (await world.suspension(wait)).timeout_behavior == "auto_resume_with_timeout_signal"


async def _not_found(world: SuspendingWorld) -> ExecutionId:
    return id_in(3)


async def _never_suspended(world: SuspendingWorld) -> ExecutionId:
    return (await world.pend()).id


async def _resumed_in_time(world: SuspendingWorld) -> ExecutionId:
    wait = await due(world, "fail")
    await world.engine.resume_execution(wait.id)
    return wait.id


async def _ended_in_time(world: SuspendingWorld) -> ExecutionId:
    wait = await due(world, "fail")
    await world.engine.cancel(Operator(wait.id), "enough")
    return wait.id


async def _without_a_timeout(world: SuspendingWorld) -> ExecutionId:
    return (await world.suspend()).id


async def _before_its_time(world: SuspendingWorld) -> ExecutionId:
    wait = await world.suspend(timeout_at=await world.in_an_hour())
    await world.clock.advance(minutes=59)
    return wait.id


@pytest.mark.parametrize(
    ("reach", "reason"),
    [
        (_not_found, "not_found"),
        (_never_suspended, "not_suspended"),
        (_resumed_in_time, "not_suspended"),
        (_ended_in_time, "not_suspended"),
        (_without_a_timeout, "not_yet_due"),
        (_before_its_time, "not_yet_due"),
    ],
)
async def test_why_a_suspension_did_not_expire(world: SuspendingWorld, reach: Any, reason: str) -> None:
    execution_id = await reach(world)
    before = await world.stored()
    assert await world.engine.expire_suspension(execution_id) == AlreadySatisfied(reason)
    assert await world.stored() == before


async def test_a_suspended_execution_without_a_suspension_is_not_expired(world: SuspendingWorld) -> None:
    wait = await due(world, "fail")
    world.engine.checking = False
    await world.sql.execute("delete from flowfabric.suspension")
    assert await world.engine.expire_suspension(wait.id) == AlreadySatisfied("no_active_suspension")
    assert (await world.record(wait.id)).public_state == "suspended"


@pytest.mark.parametrize("then", [name for name in ENDS if name not in ("still open", "timed out")])
async def test_a_closed_suspension_never_times_out(world: SuspendingWorld, then: str) -> None:
    wait = await world.suspend(on("k", "done"), timeout_at=await world.clock.now() + 300 * SECOND)
    await ENDS[then](world, wait)
    before = await world.vector(wait)
    await world.clock.advance(days=2)
    assert (await world.engine.run_timers("suspension")).handled == 0
    assert await world.engine.expire_suspension(wait.id) == AlreadySatisfied("not_suspended")
    assert await world.vector(wait) == before


async def test_the_timeout_of_an_earlier_suspension_does_not_end_a_later_one(world: SuspendingWorld) -> None:
    wait = await world.suspend(timeout_at=await world.clock.now() + 300 * SECOND)
    await world.accept(wait)
    wait.claimed = await claim_one(world.engine, lease_ttl=LONG)
    await world.suspend(of=wait, timeout_at=await world.in_an_hour(), timeout_behavior="expire")
    await world.clock.advance(minutes=30)
    assert (await world.engine.run_timers("suspension")).handled == 0
    assert (await world.record(wait.id)).public_state == "suspended"
    await world.clock.advance(minutes=31)
    assert (await world.engine.run_timers("suspension")).handled == 1
    assert (await world.record(wait.id)).failure_reason == "suspension_timeout:expire"


async def test_the_duty_takes_the_oldest_first_and_only_what_its_filter_says(world: SuspendingWorld) -> None:
    waits = [
        await world.suspend(
            timeout_at=await world.clock.now() + (3 - number) * SECOND, creating={"namespace": f"n{number % 2}"}
        )
        for number in range(3)
    ]
    await world.clock.advance(seconds=10)
    assert (await world.engine.run_timers("suspension", filter=ScannerFilter(namespace="n1"))).handled == 1
    states = [(await world.record(wait.id)).public_state for wait in waits]
    assert states == ["suspended", "failed", "suspended"]
    assert (await world.engine.run_timers("suspension", limit=1)).more
    assert [(await world.record(wait.id)).public_state for wait in waits] == ["suspended", "failed", "failed"]
    assert (await world.engine.run_timers("suspension", limit=1)).handled == 1


async def test_one_suspension_that_cannot_be_expired_does_not_stop_the_others(world: SuspendingWorld) -> None:
    waits = [await world.suspend(timeout_at=await world.clock.now() + SECOND) for _ in range(3)]
    await world.clock.advance(seconds=10)
    world.engine.checking = False
    await world.sql.execute(
        f"""create function pg_temp.refuse() returns trigger language plpgsql as
            $$ begin if old.id = '{waits[1].id}' then raise exception 'broken'; end if; return new; end $$;
            create trigger broken before update on flowfabric.suspension
            for each row execute function pg_temp.refuse()"""
    )
    try:
        answer = await world.engine.run_timers("suspension")
    finally:
        await world.sql.execute("drop trigger broken on flowfabric.suspension")
    assert (answer.handled, answer.failed, answer.message) == (2, 1, "broken")
    assert [(await world.record(wait.id)).public_state for wait in waits] == ["failed", "suspended", "failed"]
    await world.clock.advance(minutes=1)
    assert (await world.engine.run_timers("suspension")).handled == 1


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_of_a_signal_and_a_timeout_one_ends_the_suspension(
    world: SuspendingWorld, callers: list[Party], ending: str
) -> None:
    one, two = callers
    wait = await due(world, "fail", on("k"))
    await one.begin()
    assert isinstance(await one.expire_suspension(wait.id), ExpiredSuspension)
    task = await waiting(world.sql, two, world.send(wait, by=two), behind=one)
    await one.end(ending)
    answer = await task
    if ending == "commit":
        assert isinstance(answer, StateError) and answer.kind == "target_not_signalable"
    else:
        assert answer.effect == SATISFIED
        assert await world.engine.expire_suspension(wait.id) == AlreadySatisfied("not_suspended")


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_timeout_that_meets_a_signal_passes_it_by(
    world: SuspendingWorld, callers: list[Party], ending: str
) -> None:
    one, two = callers
    wait = await due(world, "fail", on("k"))
    await one.begin()
    await world.send(wait, by=one)
    assert (await two.run_timers("suspension")).handled == 0, "it is locked"
    task = await waiting(world.sql, two, two.expire_suspension(wait.id), behind=one)
    await one.end(ending)
    if ending == "commit":
        assert await task == AlreadySatisfied("not_suspended")
        assert await world.vector(wait) == RESUMED
    else:
        assert await task == ExpiredSuspension(wait.id, "fail")


async def test_the_policy_of_the_execution_gives_a_timeout_where_the_call_has_none(world: SuspendingWorld) -> None:
    policy = ExecutionPolicy(suspension_policy=SuspensionPolicy(default_timeout=HOUR, timeout_behavior="cancel"))
    wait = await world.suspend(creating={"policy": policy})
    suspension = await world.suspension(wait)
    assert suspension.timeout_at == suspension.suspended_at + HOUR
    await world.clock.advance(hours=1, seconds=1)
    assert await world.engine.expire_suspension(wait.id) == ExpiredSuspension(wait.id, "cancel")


# ---- what else ends a suspension, or an attempt with waitpoints


async def _cancel_as(world: SuspendingWorld, wait: Waiting, source: str) -> None:
    await world.engine.cancel(Operator(wait.id, source), "enough")


@pytest.mark.parametrize("source", ["operator_override", "flow_cascade", "system_timeout", "billing", "many"])
async def test_cancelling_closes_the_suspension_and_all_its_waitpoints(world: SuspendingWorld, source: str) -> None:
    wait = await world.pend("spare")
    spare = wait.point
    await world.suspend(all_of("a", "b"), of=wait, timeout_at=await world.in_an_hour())
    wait.points["spare"] = spare
    events = short(await world.events(wait))
    if source == "many":
        await world.engine.cancel_many([wait.id], "enough")
    else:
        await _cancel_as(world, wait, source)
    assert await world.vector(wait) == ended("cancelled")
    assert (await world.suspension(wait)).close_reason == "cancelled"
    assert await world.closed(wait) == {
        "a": ("closed", "cancelled"),
        "b": ("closed", "cancelled"),
        "spare": ("closed", "attempt_ended"),
    }
    (attempt,) = await world.engine.list_attempts(wait.id)
    assert attempt.attempt_lifecycle == "ended_cancelled"
    assert short(await world.events(wait)) == [*events, "K:cancelled"]
    assert await world.engine.observe_signals(wait.handle) == []


@pytest.mark.parametrize("by", ["the duty", "one call"])
async def test_the_deadline_of_the_execution_runs_on_while_it_is_suspended(world: SuspendingWorld, by: str) -> None:
    wait = await world.suspend(
        all_of("a", "b"), timeout_at=await world.in_an_hour(), creating={"execution_deadline_at": 60 * SECOND}
    )
    events = short(await world.events(wait))
    await world.clock.advance(seconds=61)
    if by == "the duty":
        assert (await world.engine.run_timers("deadline")).handled == 1
    else:
        assert await world.engine.expire_execution(wait.id, "execution_deadline") == "expired"
    assert await world.vector(wait) == ended("expired")
    assert (await world.suspension(wait)).close_reason == "expired:execution_deadline"
    assert set((await world.closed(wait)).values()) == {("closed", "expired:execution_deadline")}
    (attempt,) = await world.engine.list_attempts(wait.id)
    assert attempt.attempt_lifecycle == "ended_failure"
    assert short(await world.events(wait)) == [*events, "K:expired"]
    await world.clock.advance(hours=2)
    assert (await world.engine.run_timers("suspension")).handled == 0


async def _retry(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.fail(wait.handle, "boom")


async def _attempt_timeout(world: SuspendingWorld, wait: Waiting) -> None:
    await world.clock.advance(minutes=11)
    assert await world.engine.expire_execution(wait.id, "attempt_timeout") == "retry_scheduled"


async def _next_attempt(world: SuspendingWorld, wait: Waiting) -> None:
    await world.clock.advance(seconds=11)
    assert (await world.engine.run_timers("delay")).handled == 1
    wait.claimed = await claim_one(world.engine, lease_ttl=LONG)


async def _reclaim(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.revoke_lease(wait.id)
    assert set((await world.closed(wait)).values()) == {("pending", None)}, "the attempt is not yet replaced"
    wait.claimed = await claim_one(world.engine, lease_ttl=LONG)


async def _reclaim_by_grant(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.revoke_lease(wait.id)
    await world.engine.issue_reclaim_grant(wait.id, **WORKER)
    answer = await world.engine.reclaim_execution(
        wait.id, **WORKER, lease_id=new_id(), attempt_id=new_id(), lease_ttl=LONG
    )
    assert isinstance(answer, type(wait.claimed))
    wait.claimed = answer


async def _cancel_running(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.cancel(wait.handle, "enough")


# What happens to an attempt with pending waitpoints, what makes the next one, if any, and whether they stay.
ATTEMPTS: list[tuple[str, Then, Then | None]] = [
    ("complete", complete, None),
    ("fail", fail_for_good, None),
    ("cancel", _cancel_running, None),
    ("cancel by an operator", cancel, None),
    ("deadline", pass_deadline, None),
    ("retry", _retry, _next_attempt),
    ("attempt timeout", _attempt_timeout, _next_attempt),
    ("reclaim", _reclaim, nothing),
    ("reclaim by a grant", _reclaim_by_grant, nothing),
]
POLICY = ExecutionPolicy(retry_policy=RETRY, timeout_policy=TimeoutPolicy(attempt_timeout=timedelta(minutes=10)))


@pytest.mark.parametrize(("then", "goes_on"), [row[1:] for row in ATTEMPTS], ids=[row[0] for row in ATTEMPTS])
async def test_pending_waitpoints_end_with_their_attempt(
    world: SuspendingWorld, then: Then, goes_on: Then | None
) -> None:
    wait = await world.pend("own", policy=POLICY, execution_deadline_at=timedelta(days=1), expires_in=LONG)
    kept = await world.engine.create_waitpoint(wait.handle, "kept", LONG, outlives_attempt=True)
    wait.points["kept"] = Point(kept.waitpoint_id, kept.token)
    await world.accept(wait, "kept", payload=b"early")
    await then(world, wait)
    assert (await world.closed(wait))["own"] == ("closed", "attempt_ended")
    if goes_on is None:
        assert (await world.closed(wait))["kept"] == ("closed", "attempt_ended")
        assert await outcome(world.send(wait, "kept")) == "target_not_signalable"
        return
    # One that outlives its attempt can be signalled in between, and the next attempt suspends on it.
    assert (await world.closed(wait))["kept"] == ("pending", None)
    assert (await world.accept(wait, "kept", payload=b"between")).effect == BUFFERED
    await goes_on(world, wait)
    assert (await world.waitpoint(wait, "kept"))["attempt_index"] == wait.handle.attempt_index == 1
    assert await outcome(world.send(wait, "own")) == "waitpoint_closed"
    wait.points = {"kept": wait.points["kept"]}
    assert isinstance(await world.suspend_on_pending(wait, count_signals(2, "kept")), AlreadySatisfied)
    assert [one.payload for one in await world.engine.observe_signals(wait.handle)] == [b"early", b"between"]


async def test_waitpoints_stay_pending_while_the_attempt_is_only_interrupted(world: SuspendingWorld) -> None:
    wait = await world.pend(expires_in=LONG)
    for interrupt in (release, delay):
        await interrupt(world, wait)
        assert await world.closed(wait) == {"k": ("pending", None)}
        await world.clock.advance(seconds=11)
        await world.engine.run_timers("delay")
        wait.claimed = await claim_one(world.engine, lease_ttl=LONG)
    assert isinstance(await world.suspend_on_pending(wait), Suspended)


async def test_a_suspended_execution_has_no_lease_to_lose(world: SuspendingWorld) -> None:
    wait = await world.suspend(creating={"lease_ttl": 30 * SECOND})
    await world.clock.advance(hours=1)
    assert (await world.engine.run_timers("lease")).handled == 0
    assert await outcome(world.engine.mark_lease_expired_if_due(wait.id)) == "not_active"
    assert await outcome(world.engine.revoke_lease(wait.id)) == "no_active_lease"
    assert (await world.record(wait.id)).public_state == "suspended"


async def test_rotation_does_not_touch_suspensions(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    before = await world.stored()
    await world.engine.rotate_waitpoint_hmac_secret_all("k2", "ab" * 32, HOUR)
    assert await world.stored() == before
    assert (await world.accept(wait)).effect == SATISFIED


async def test_a_forgotten_record_leaves_nothing_behind(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    await world.accept(wait, idempotency_key="key")
    wait.claimed = await claim_one(world.engine, lease_ttl=LONG)
    await world.engine.complete(wait.handle)
    await world.clock.advance(days=8)
    assert await world.engine.trim_retention() == 1
    for table in ("waitpoint", "suspension", "signal", "execution"):
        assert await world.sql.fetchval(f"select count(*) from flowfabric.{table}") == 0
    assert await outcome(world.send(wait, idempotency_key="key")) == "invalid_token"
