"""Whether and when a failed attempt is repeated; how long one attempt and a whole execution may take."""

from __future__ import annotations

import itertools
import json
import math
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.values.attempt import RetryScheduled, TerminalFailed
from flowfabric.values.policies import ExecutionPolicy, TimeoutPolicy
from tests.sql.cases import World, outcome, shorthand
from tests.support import WORKER, claim_one, new_id, started, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
CLASSES = ("transient", "infra_crash", "timeout", "permanent", "cancelled")


async def delay_ms(world: World, policy: Any, retries: int, failure: str = "transient", category: str = "x") -> Any:
    return await world.sql.fetchval(
        "select flowfabric.retry_delay_ms($1::jsonb, $2, $3, $4)",
        None if policy is None else json.dumps(policy),
        retries,
        failure,
        category,
    )


def policy(**fields: Any) -> ExecutionPolicy:
    return ExecutionPolicy(retry_policy=ff.RetryPolicy(**fields))


def timed(**fields: Any) -> ExecutionPolicy:
    return ExecutionPolicy(
        retry_policy=ff.RetryPolicy(backoff=ff.Fixed(10 * SECOND)), timeout_policy=TimeoutPolicy(**fields)
    )


# The decision.


@pytest.mark.parametrize("failure", CLASSES)
@pytest.mark.parametrize("retries", [0, 2, 3, 4])
async def test_the_decision_follows_class_policy_category_and_budget(world: World, failure: str, retries: int) -> None:
    policies: list[tuple[Any, int | None, tuple[str, ...]]] = [
        (None, None, ()),
        ({}, 3, ()),
        ({"max_retries": 0}, 0, ()),
        ({"max_retries": 3}, 3, ()),
        ({"retryable_categories": []}, 3, ()),
        ({"retryable_categories": ["network", "disk"]}, 3, ("network", "disk")),
    ]
    for (given, most, categories), category in itertools.product(policies, ("network", "other", failure)):
        retried = (
            failure not in ("permanent", "cancelled")
            and most is not None
            and (not categories or category in categories)
            and retries < most
        )
        assert (await delay_ms(world, given, retries, failure, category) is not None) == retried, (given, category)


@pytest.mark.parametrize("failure", [None, *CLASSES])
@pytest.mark.parametrize("category", [None, "network", *CLASSES])
async def test_class_and_category_fill_each_other_in(world: World, failure: str | None, category: str | None) -> None:
    claimed = await started(world.engine, policy=policy())
    answer = await world.engine.fail(claimed.handle, "boom", failure_class=failure, category=category)
    effective = failure or (category if category in CLASSES else "transient")
    final = effective in ("permanent", "cancelled")
    assert isinstance(answer, TerminalFailed if final else RetryScheduled)
    record = await world.record(claimed.execution_id)
    assert (record.failure_reason, record.failure_category) == ("boom", category or effective)
    # Even a failure of class cancelled ends as failed.
    assert await world.at(claimed.execution_id) == ("T:failed" if final else "D.r")


async def test_without_a_policy_a_failure_is_final(world: World) -> None:
    for given in (None, ExecutionPolicy()):
        claimed = await started(world.engine, policy=given)
        assert await outcome(world.engine.fail(claimed.handle, "boom")) == "TerminalFailed"


async def test_a_policy_given_with_the_failure_replaces_the_frozen_one_for_this_failure(world: World) -> None:
    claimed = await started(world.engine, policy=policy(max_retries=0))
    answer = await world.engine.fail(
        claimed.handle, "boom", retry_policy=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(2 * SECOND))
    )
    assert isinstance(answer, RetryScheduled)
    await world.clock.advance(seconds=3)
    await world.engine.promote_delayed(claimed.execution_id)
    assert await outcome(world.engine.fail((await claim_one(world.engine)).handle, "boom")) == "TerminalFailed"


@pytest.mark.parametrize("most", [0, 1, 3])
async def test_an_always_failing_execution_gets_one_attempt_more_than_its_retries(world: World, most: int) -> None:
    execution_id = await submit(world.engine, policy=policy(max_retries=most, backoff=ff.Fixed(0)))
    answers = []
    while (claimed := await world.engine.claim(**WORKER)) is not None:
        answers.append(await outcome(world.engine.fail(claimed.handle, "boom")))
        await world.engine.promote_delayed(execution_id)
    assert answers == ["RetryScheduled"] * most + ["TerminalFailed"]
    record = await world.record(execution_id)
    assert (record.total_attempt_count, record.retry_count) == (most + 1, most)


async def test_reclaims_and_replays_do_not_touch_the_retry_budget(world: World) -> None:
    claimed = await started(world.engine, policy=policy(max_retries=1, backoff=ff.Fixed(0)))
    await world.engine.revoke_lease(claimed.execution_id)
    claimed = await claim_one(world.engine)
    assert await outcome(world.engine.fail(claimed.handle, "boom")) == "RetryScheduled"
    await world.engine.promote_delayed(claimed.execution_id)
    await world.engine.complete((await claim_one(world.engine)).handle)
    await world.engine.replay_execution(claimed.execution_id)
    # The one retry is spent, replay or not.
    assert await outcome(world.engine.fail((await claim_one(world.engine)).handle, "boom")) == "TerminalFailed"


# The backoff.

BACKOFFS: list[tuple[Any, list[int]]] = [
    ({}, [1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000]),
    ({"backoff": {"type": "exponential"}}, [1000, 2000, 4000]),
    ({"backoff": {"type": "exponential", "initial_delay_ms": 100, "multiplier": 1.5}}, [100, 150, 225, 337, 506]),
    ({"backoff": {"type": "exponential", "initial_delay_ms": 100, "max_delay_ms": 250}}, [100, 200, 250, 250]),
    ({"backoff": {"type": "exponential", "initial_delay_ms": 500, "max_delay_ms": 10}}, [10, 10]),
    ({"backoff": {"type": "exponential", "multiplier": 1}}, [1000, 1000, 1000]),
    ({"backoff": {"type": "exponential", "multiplier": 0.5}}, [1000, 500, 250, 125, 62]),
    ({"backoff": {"type": "exponential", "multiplier": 0}}, [1000, 0, 0]),
    ({"backoff": {"type": "exponential", "initial_delay_ms": 0}}, [0, 0]),
    ({"backoff": {"type": "fixed"}}, [1000, 1000]),
    ({"backoff": {"type": "fixed", "delay_ms": 70}}, [70, 70]),
    ({"backoff": {"type": "fixed", "delay_ms": 0}}, [0, 0]),
    ({"backoff": {"type": "fibonacci", "delay_ms": 70}}, [1000, 1000]),
    ({"backoff": {"delay_ms": 70}}, [1000, 1000]),
]


@pytest.mark.parametrize(("given", "delays"), BACKOFFS, ids=lambda v: json.dumps(v))
async def test_the_backoff_is_what_the_policy_says(world: World, given: Any, delays: list[int]) -> None:
    unlimited = {**given, "max_retries": 100}
    assert [await delay_ms(world, unlimited, r) for r in range(len(delays))] == delays


@pytest.mark.parametrize("retries", [1023, 1024, 5000, 2**31 - 1])
@pytest.mark.parametrize(("multiplier", "delay"), [(2.0, 60_000), (1000.0, 60_000), (1.0, 1000), (0.5, 0), (0.0, 0)])
async def test_a_backoff_beyond_all_numbers_is_the_maximum_or_nothing(
    world: World, retries: int, multiplier: float, delay: int
) -> None:
    given = {"max_retries": 2**32 - 1, "backoff": {"type": "exponential", "multiplier": multiplier}}
    assert await delay_ms(world, given, retries) == delay


@pytest.mark.parametrize("full", [0, 1, 2, 3, 7, 1000])
async def test_jitter_draws_evenly_between_half_and_all_of_the_delay(world: World, full: int) -> None:
    given = {"backoff": {"type": "exponential", "initial_delay_ms": full, "jitter": True}}
    drawn = await world.sql.fetch(
        "select flowfabric.retry_delay_ms($1::jsonb, 0, 'transient', 'x') as ms, count(*) as n"
        " from generate_series(1, 2000) group by 1 order by 1",
        json.dumps(given),
    )
    least = math.ceil(full / 2)
    values = [row["ms"] for row in drawn]
    assert least <= values[0] and values[-1] <= full
    if full < 10:
        # Each possible value is drawn: missing one in 2,000 draws happens once in 10^193.
        assert values == list(range(least, full + 1))
        even = 2000 / len(values)
        assert all(even / 2 < row["n"] < even * 2 for row in drawn)
    else:
        assert values[0] < least + 50 and values[-1] > full - 50


async def test_a_retry_is_not_claimable_before_its_time_and_is_after_it(world: World) -> None:
    claimed = await started(world.engine, policy=policy(backoff=ff.Fixed(10 * SECOND)))
    answer = await world.engine.fail(claimed.handle, "boom")
    assert isinstance(answer, RetryScheduled)
    record = await world.record(claimed.execution_id)
    assert record.delay_until == answer.delay_until
    assert record.blocking_detail is not None
    assert answer.delay_until.strftime("%Y-%m-%dT%H:%M:%S") in record.blocking_detail
    assert "boom" in record.blocking_detail
    await world.clock.advance(seconds=9)
    assert (await world.engine.run_timers("delay")).handled == 0
    assert await world.engine.claim(**WORKER) is None
    await world.clock.advance(seconds=1)
    assert (await world.engine.run_timers("delay")).handled == 1
    again = await claim_one(world.engine)
    assert (again.attempt_type, again.handle.attempt_index, again.retry_count) == ("retry", 1, 1)


async def test_no_backoff_at_all_still_goes_through_the_delay(world: World) -> None:
    claimed = await started(world.engine, policy=policy(backoff=ff.Fixed(0)))
    await world.engine.fail(claimed.handle, "boom")
    assert await world.at(claimed.execution_id) == "D.r"
    assert await world.engine.claim(**WORKER) is None
    assert (await world.engine.run_timers("delay")).handled == 1
    assert await world.at(claimed.execution_id) == "W.r"


# The attempt timer.


async def test_the_timer_is_armed_by_the_policy_or_the_claim_or_not_at_all(world: World) -> None:
    cases: list[tuple[Any, timedelta | None, timedelta | None]] = [
        (None, None, None),
        (ExecutionPolicy(), None, None),
        (timed(attempt_timeout=HOUR), None, HOUR),
        (timed(attempt_timeout=HOUR), 5 * SECOND, 5 * SECOND),
        (timed(attempt_timeout=HOUR), timedelta(0), HOUR),
        (None, 5 * SECOND, 5 * SECOND),
    ]
    for given, argument, armed in cases:
        execution_id = await submit(world.engine, policy=given)
        await world.engine.issue_claim_grant(execution_id, **WORKER)
        claimed = await world.engine.claim_execution(
            execution_id, **WORKER, lease_id=new_id(), attempt_id=new_id(), attempt_timeout=argument
        )
        lease = (await world.record(execution_id)).current_lease
        assert lease is not None
        found = claimed.attempt_timeout_at
        assert (None if found is None else found - lease.acquired_at) == armed
        await world.engine.complete(claimed.handle)


async def test_renewing_the_lease_does_not_move_the_timer(world: World) -> None:
    claimed = await started(world.engine, policy=timed(attempt_timeout=HOUR))
    await world.clock.advance(seconds=20)
    await world.engine.renew(claimed.handle)
    assert (await world.record(claimed.execution_id)).attempt_timeout_at == claimed.attempt_timeout_at


@pytest.mark.parametrize("pause", ["delay", "wait_children", "release"])
async def test_a_pause_stops_the_timer_and_a_resume_continues_it(world: World, pause: str) -> None:
    claimed = await started(world.engine, policy=timed(attempt_timeout=HOUR), lease_ttl=2 * HOUR)
    await world.clock.advance(minutes=20)
    await getattr(world.engine, pause)(claimed.handle, *([timedelta(0)] if pause == "delay" else []))
    record = await world.record(claimed.execution_id)
    assert record.attempt_timeout_at is None
    left = record.attempt_timeout_remaining
    assert left is not None
    assert timedelta(minutes=39) < left <= timedelta(minutes=40)

    await world.clock.advance(hours=5)
    assert await world.engine.expire_execution(claimed.execution_id, "attempt_timeout") == "not_yet_due"
    await world.engine.promote_delayed(claimed.execution_id)
    resumed = await claim_one(world.engine)
    record = await world.record(claimed.execution_id)
    assert record.current_lease is not None and resumed.attempt_timeout_at is not None
    assert resumed.attempt_timeout_at - record.current_lease.acquired_at == left
    assert record.attempt_timeout_remaining is None


async def test_a_resume_may_bring_its_own_remaining_time(world: World) -> None:
    claimed = await started(world.engine, policy=timed(attempt_timeout=HOUR))
    await world.engine.release(claimed.handle)
    await world.engine.issue_claim_grant(claimed.execution_id, **WORKER)
    resumed = await world.engine.claim_resumed_execution(
        claimed.execution_id, **WORKER, lease_id=new_id(), remaining_attempt_timeout=7 * SECOND
    )
    record = await world.record(claimed.execution_id)
    assert record.current_lease is not None and resumed.attempt_timeout_at is not None
    assert resumed.attempt_timeout_at - record.current_lease.acquired_at == 7 * SECOND


async def test_a_timer_that_ran_out_while_paused_keeps_one_millisecond(world: World) -> None:
    claimed = await started(world.engine, policy=timed(attempt_timeout=10 * SECOND))
    await world.clock.advance(seconds=20)
    await world.engine.release(claimed.handle)
    left = (await world.record(claimed.execution_id)).attempt_timeout_remaining
    assert left == timedelta(milliseconds=1)


@pytest.mark.parametrize("state", ["X", "V"])
async def test_the_timer_runs_on_while_the_lease_is_lost_and_a_reclaim_arms_a_new_one(world: World, state: str) -> None:
    at = await world.reach(state, policy=timed(attempt_timeout=HOUR))
    assert at.claimed is not None
    assert (await world.record(at.id)).attempt_timeout_at == at.claimed.attempt_timeout_at
    await world.clock.advance(minutes=50)
    reclaimed = await claim_one(world.engine, lease_ttl=HOUR)
    record = await world.record(at.id)
    assert record.current_lease is not None and reclaimed.attempt_timeout_at is not None
    assert reclaimed.attempt_timeout_at - record.current_lease.acquired_at == HOUR
    # The timer of the attempt before does not end this one.
    await world.clock.advance(minutes=15)
    assert (await world.engine.run_timers("attempt")).handled == 0
    assert await world.engine.expire_execution(at.id, "attempt_timeout") == "not_yet_due"
    assert await world.at(at.id) == "A"


@pytest.mark.parametrize("end", ["complete", "fail", "cancel", "retry"])
async def test_an_end_and_a_scheduled_retry_stop_the_timer(world: World, end: str) -> None:
    claimed = await started(world.engine, policy=timed(attempt_timeout=HOUR))
    match end:
        case "complete":
            await world.engine.complete(claimed.handle)
        case "fail":
            await world.engine.fail(claimed.handle, "boom", failure_class="permanent")
        case "cancel":
            await world.engine.cancel(claimed.handle, "x")
        case "retry":
            await world.engine.fail(claimed.handle, "boom")
    record = await world.record(claimed.execution_id)
    assert (record.attempt_timeout_at, record.attempt_timeout_remaining) == (None, None)
    await world.clock.advance(hours=2)
    assert (await world.engine.run_timers("attempt")).handled == 0


@pytest.mark.parametrize("state", ["A", "X", "V"])
@pytest.mark.parametrize("retried", [True, False])
async def test_an_attempt_that_ran_too_long_is_a_failure_of_class_timeout(
    world: World, state: str, retried: bool
) -> None:
    once = ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=HOUR))
    at = "D.r" if retried else "T:expired"
    reached = await world.reach(state, policy=timed(attempt_timeout=HOUR) if retried else once)
    await world.clock.advance(hours=1)
    before = await world.picture(reached.id)
    assert (await world.engine.run_timers("attempt")).handled == 1
    after = await world.picture(reached.id)
    assert after.record is not None
    assert after.at == at
    assert (after.record.failure_reason, after.record.failure_category) == ("attempt_timeout", "timeout")
    last = after.attempts[-1]
    assert (last.attempt_lifecycle, last.failure_reason, last.failure_category) == (
        "ended_failure",
        "attempt_timeout",
        "timeout",
    )
    assert last.end_disposition == ("retry_scheduled" if retried else "expired")
    if state == "A":
        event = after.since(before)[0]
        assert (event["lease_type"], event["reason"], event["revoked_by"]) == (
            "revoked",
            "expired:attempt_timeout",
            "reconciler",
        )
    else:
        assert "L:revoked" not in shorthand(after.since(before))


async def test_timeouts_share_the_retry_budget_with_failures(world: World) -> None:
    given = ExecutionPolicy(
        retry_policy=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(0)),
        timeout_policy=TimeoutPolicy(attempt_timeout=SECOND),
    )
    claimed = await started(world.engine, policy=given)
    await world.clock.advance(seconds=2)
    assert await world.engine.expire_execution(claimed.execution_id, "attempt_timeout") == "retry_scheduled"
    await world.engine.promote_delayed(claimed.execution_id)
    assert await outcome(world.engine.fail((await claim_one(world.engine)).handle, "boom")) == "TerminalFailed"


# The deadline.


async def test_the_deadline_comes_from_the_argument_or_the_policy_or_not_at_all(world: World) -> None:
    by_policy = timed(execution_deadline=HOUR)
    cases: list[tuple[Any, Any, timedelta | None]] = [
        (None, None, None),
        (by_policy, None, HOUR),
        (by_policy, 5 * SECOND, 5 * SECOND),
        (None, 5 * SECOND, 5 * SECOND),
        (None, -HOUR, -HOUR),
    ]
    for given, argument, length in cases:
        if argument is not None and argument < timedelta(0):
            argument = await world.clock.now() + argument
        execution_id = await submit(world.engine, policy=given, execution_deadline_at=argument)
        record = await world.record(execution_id)
        if length is None:
            assert record.deadline_at is None
        else:
            assert record.deadline_at is not None
            assert abs(record.deadline_at - record.created_at - length) < SECOND
    # One that is past already is accepted, cannot be claimed, and expires.
    claimed = []
    while (found := await world.engine.claim(**WORKER)) is not None:
        claimed.append(found.execution_id)
    assert execution_id not in claimed
    assert (await world.engine.run_timers("deadline")).handled == 1
    assert await world.at(execution_id) == "T:expired"


async def test_a_claim_may_set_another_deadline(world: World) -> None:
    execution_id = await submit(world.engine, execution_deadline_at=HOUR)
    deadline = await world.clock.now() + 3 * HOUR
    await world.engine.issue_claim_grant(execution_id, **WORKER)
    claimed = await world.engine.claim_execution(
        execution_id, **WORKER, lease_id=new_id(), attempt_id=new_id(), execution_deadline_at=deadline
    )
    assert claimed.deadline_at == deadline
    await world.clock.advance(hours=2)
    assert (await world.engine.run_timers("deadline")).handled == 0
    await world.clock.advance(hours=2)
    assert (await world.engine.run_timers("deadline")).handled == 1
    assert await world.at(execution_id) == "T:expired"


DEADLINE_STATES = ["W.1", "W.r", "W.i", "D.1", "D.r", "D.i", "B.budget", "B.route", "B.operator", "A", "X", "V"]


@pytest.mark.parametrize("state", DEADLINE_STATES)
async def test_the_deadline_fires_in_every_state_at_its_own_time(world: World, state: str) -> None:
    at = await world.reach(state, execution_deadline_at=3 * HOUR)
    deadline = (await world.record(at.id)).deadline_at
    assert deadline is not None
    assert abs(deadline - (await world.record(at.id)).created_at - 3 * HOUR) < SECOND
    await world.clock.advance(hours=2)
    assert (await world.engine.run_timers("deadline")).handled == 0
    await world.clock.advance(hours=1)
    assert (await world.engine.run_timers("deadline")).handled == 1
    record = await world.record(at.id)
    assert await world.at(at.id) == "T:expired"
    assert (record.failure_reason, record.failure_category) == ("execution_deadline", "timeout")
    assert await world.engine.claim(**WORKER) is None


async def test_delays_and_retries_leave_the_deadline_alone_and_it_leaves_them(world: World) -> None:
    claimed = await started(world.engine, policy=policy(backoff=ff.Fixed(10 * SECOND)), execution_deadline_at=HOUR)
    execution_id = claimed.execution_id
    deadline = claimed.deadline_at
    assert deadline is not None

    async def times() -> tuple[Any, Any]:
        record = await world.record(execution_id)
        return record.delay_until, record.deadline_at

    now = await world.clock.now()
    await world.engine.delay(claimed.handle, now + 10 * SECOND)
    assert await times() == (now + 10 * SECOND, deadline)
    await world.clock.advance(seconds=11)
    await world.engine.promote_delayed(execution_id)
    assert await times() == (None, deadline)
    answer = await world.engine.fail((await claim_one(world.engine)).handle, "boom")
    assert isinstance(answer, RetryScheduled)
    assert await times() == (answer.delay_until, deadline)
    await world.clock.advance(seconds=11)
    await world.engine.promote_delayed(execution_id)
    assert await times() == (None, deadline)


async def test_an_execution_past_its_deadline_is_not_claimed_though_nothing_has_ended_it_yet(world: World) -> None:
    for state in ("W.1", "W.i", "X", "V"):
        await world.wipe()
        await world.reach(state, execution_deadline_at=HOUR)
        await world.clock.advance(hours=2)
        assert await world.engine.claim(**WORKER) is None


async def test_a_replay_has_no_deadline(world: World) -> None:
    at = await world.reach("T:expired")
    await world.engine.replay_execution(at.id)
    assert (await world.record(at.id)).deadline_at is None
    assert (await world.engine.run_timers("deadline")).handled == 0
    assert (await claim_one(world.engine)).attempt_type == "replay"


async def test_a_delay_until_a_past_moment_is_due_immediately(world: World) -> None:
    claimed = await started(world.engine)
    await world.engine.delay(claimed.handle, await world.clock.now() - HOUR)
    assert await world.at(claimed.execution_id) == "D.i"
    assert (await world.engine.run_timers("delay")).handled == 1
    assert (await claim_one(world.engine)).handle.kind == "resumed"


@pytest.mark.parametrize("order", list(itertools.permutations(("lease", "attempt", "deadline"))), ids="-".join)
async def test_when_several_times_are_due_any_order_is_sound(world: World, order: tuple[str, ...]) -> None:
    at = await world.reach("A", policy=timed(attempt_timeout=40 * SECOND), execution_deadline_at=50 * SECOND)
    await world.clock.advance(minutes=1)
    for kind in order:
        await world.engine.run_timers(kind)
    # Whatever came first, the deadline ends it.
    assert await world.at(at.id) == "T:expired"
    events = shorthand((await world.picture(at.id)).stored["event"])
    assert events.count("K:expired") == 1
    assert events.count("L:expired") + events.count("L:revoked") == 1
