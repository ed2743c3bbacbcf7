"""Quotas: rates, caps, slots and their life, and the executions that wait for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._duties import Unblock
from flowfabric.errors import Contention, FlowFabricError, InvalidInput, NotFound
from flowfabric.values.attempt import Claimed
from flowfabric.values.conditions import on
from flowfabric.values.execution import NewExecution
from flowfabric.values.grant import ReclaimGranted
from flowfabric.values.ids import QuotaPolicyId, mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements
from flowfabric.values.quota import (
    Admitted,
    AlreadyAdmitted,
    ConcurrencyExceeded,
    QuotaPolicyCreated,
    QuotaPolicyExists,
    RateExceeded,
    Released,
    quota_policy_id_of,
)
from flowfabric.values.wait import Fresh
from tests.support import OTHER, WORKER, CheckedEngine, Clock, claim_one, submit

pytestmark = pytest.mark.both_servers

SECOND = timedelta(seconds=1)
LONG = timedelta(days=1)


async def quota(engine: ff.Engine, name: str = "q", **numbers: Any) -> QuotaPolicyId:
    made = await engine.create_quota_policy(name=name, **numbers)
    return made.quota_policy_id


def under(*policies: UUID) -> ExecutionPolicy:
    return ExecutionPolicy(quota_policy_ids=policies)  # type: ignore[arg-type]


async def many(engine: ff.Engine, number: int, *policies: UUID, **fields: Any) -> list[ff.ExecutionId]:
    items = [NewExecution(**{"execution_kind": "k", "policy": under(*policies), **fields}) for _ in range(number)]
    return [made.execution_id for made in await engine.create_many(items)]


async def claim(engine: ff.Engine, limit: int = 100, **fields: Any) -> list[Claimed]:
    return await engine.claim_many(**{**WORKER, "limit": limit, "lease_ttl": LONG, **fields})


async def occupancy(engine: ff.Engine, policy: QuotaPolicyId) -> tuple[int, int]:
    """Slots held, executions held back."""
    found = await engine.get_quota_policy(policy)
    assert found is not None
    return found.active, found.waiting


async def unblock(engine: ff.Engine) -> int:
    """A pass of the duty over all limits."""
    return await Unblock(engine).run_once()


async def state(engine: ff.Engine, one: ff.ExecutionId) -> tuple[str, str | None, str | None]:
    record = await engine.read_execution(one)
    assert record is not None
    return record.public_state, record.stored_blocking_reason, record.blocking_detail


# Policies


async def test_a_policy_is_created_once_and_keeps_its_numbers(engine: CheckedEngine) -> None:
    target = QuotaPolicyId(mint_uuid())
    first = await engine.create_quota_policy(
        target, name="model-api", key="tenant", window=30 * SECOND, max_requests_per_window=600, max_concurrent=20,
        jitter=2 * SECOND,
    )  # fmt: skip
    assert first == QuotaPolicyCreated(target)
    assert await engine.create_quota_policy(target, max_concurrent=5) == QuotaPolicyExists(target)
    limits = await engine.read_quota_policy_limits(target)
    assert limits is not None
    assert (limits.max_requests_per_window, limits.requests_per_window_seconds) == (600, 30)
    assert (limits.active_concurrency_cap, limits.jitter_ms) == (20, 2000)
    assert await engine.read_quota_policy_limits(QuotaPolicyId(mint_uuid())) is None
    with pytest.raises(InvalidInput, match="name"):
        await engine.create_quota_policy(QuotaPolicyId(mint_uuid()), name="model-api")


async def test_a_name_decides_the_id(engine: CheckedEngine) -> None:
    assert await quota(engine, "a") == quota_policy_id_of("a")
    found = await engine.get_quota_policy(name="a")
    assert found is not None
    assert (found.name, found.key, found.active, found.waiting) == ("a", None, 0, 0)
    assert await engine.get_quota_policy(name="b") is None


async def test_policies_are_listed_in_pages(engine: CheckedEngine) -> None:
    made = sorted([await quota(engine, f"p{n}") for n in range(5)])
    seen: list[QuotaPolicyId] = []
    cursor = None
    while True:
        page = await engine.list_quota_policies(limit=2, cursor=cursor)
        seen += [one.quota_policy_id for one in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == made
    assert [one.name for one in (await engine.list_quota_policies(name_prefix="p3")).items] == ["p3"]


async def test_a_negative_number_in_the_table_admits_nothing(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    policy = await quota(plain_engine, max_concurrent=1)
    (one,) = await many(plain_engine, 1, policy)
    await sql.execute("update flowfabric.quota_policy set max_concurrent = -1")
    with pytest.raises(FlowFabricError) as claimed:
        await claim(plain_engine)
    assert claimed.value.kind == "corruption"
    with pytest.raises(FlowFabricError) as read:
        await plain_engine.read_quota_policy_limits(policy)
    assert read.value.kind == "corruption"
    assert (await state(plain_engine, one))[0] == ff.State.WAITING
    assert await sql.fetchval("select count(*) from flowfabric.quota_slot") == 0


# Caps


async def test_a_batch_takes_as_many_as_the_cap_leaves_room_for(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=3)
    made = await many(engine, 10, policy)
    claimed = await claim(engine, 10)
    assert [one.execution_id for one in claimed] == made[:3]
    assert await occupancy(engine, policy) == (3, 7)
    detail = f"quota {policy}: concurrency cap 3"
    assert await state(engine, made[3]) == (ff.State.RATE_LIMITED, "waiting_for_quota", detail)
    assert await claim(engine) == []


async def test_an_end_hands_its_slot_to_the_next_in_claim_order(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=2)
    made = await many(engine, 4, policy)
    (urgent,) = await many(engine, 1, policy, priority=5)
    first, second = await claim(engine)
    assert [first.execution_id, second.execution_id] == [urgent, made[0]]
    await engine.complete(second.handle)
    assert await occupancy(engine, policy) == (1, 2)
    (third,) = await claim(engine)
    assert third.execution_id == made[1]
    await engine.complete_many([first.handle, third.handle])
    assert [one.execution_id for one in await claim(engine)] == made[2:]
    assert await occupancy(engine, policy) == (2, 0)


async def test_a_long_run_keeps_its_slot_over_many_windows(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, max_concurrent=2, window=SECOND)
    made = await many(engine, 3, policy)
    first, _ = await claim(engine)
    await clock.advance(seconds=3600)
    await engine.reconcile_quotas()
    assert await claim(engine) == []
    assert await occupancy(engine, policy) == (2, 1)
    await engine.complete(first.handle)
    assert [one.execution_id for one in await claim(engine)] == made[2:]


async def _complete(engine: ff.Engine, one: Claimed, clock: Clock) -> None:
    await engine.complete(one.handle)


async def _fail(engine: ff.Engine, one: Claimed, clock: Clock) -> None:
    await engine.fail(one.handle, "boom", failure_class="permanent")


async def _retry(engine: ff.Engine, one: Claimed, clock: Clock) -> None:
    await engine.fail(one.handle, "boom", retry_policy=ff.RetryPolicy(backoff=ff.Fixed(timedelta(hours=1))))


async def _cancel(engine: ff.Engine, one: Claimed, clock: Clock) -> None:
    await engine.cancel(Operator(one.execution_id), "enough")


async def _suspend(engine: ff.Engine, one: Claimed, clock: Clock) -> None:
    await engine.suspend(one.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))


async def _delay(engine: ff.Engine, one: Claimed, clock: Clock) -> None:
    await engine.delay(one.handle, timedelta(hours=1))


async def _park(engine: ff.Engine, one: Claimed, clock: Clock) -> None:
    await engine.park(one.handle, until=await clock.now() + timedelta(hours=1))


async def _wait_for_child(engine: ff.Engine, one: Claimed, clock: Clock) -> None:
    child = await engine.submit_child(one.handle, "c", 0, NewExecution(execution_kind="c", lane_id="children"))
    await engine.park(one.handle, ends_of=[child.execution_id])


async def _abandon(engine: ff.Engine, one: Claimed, clock: Clock) -> None:
    """An operator ends it after its worker lost the lease."""
    await engine.revoke_lease(one.execution_id)
    await engine.cancel(Operator(one.execution_id), "enough")


async def _stop_changed(engine: ff.Engine, one: Claimed, clock: Clock) -> None:
    await engine.stop_changed(one.handle, detail="another step", digest="d")


async def _expire(engine: ff.Engine, one: Claimed, clock: Clock) -> None:
    await clock.advance(hours=2)
    await engine.expire_execution(one.execution_id, "execution_deadline")


WAYS_OUT: dict[str, Callable[[ff.Engine, Claimed, Clock], Awaitable[None]]] = {
    "complete": _complete,
    "fail": _fail,
    "retry": _retry,
    "cancel": _cancel,
    "suspend": _suspend,
    "delay": _delay,
    "park": _park,
    "wait for a child": _wait_for_child,
    "abandon": _abandon,
    "stop_changed": _stop_changed,
    "expire": _expire,
}


@pytest.mark.parametrize("way", WAYS_OUT)
async def test_every_way_out_of_active_gives_the_slot_to_the_next(
    engine: CheckedEngine, clock: Clock, way: str
) -> None:
    policy = await quota(engine, max_concurrent=1)
    (first,) = await many(engine, 1, policy, execution_deadline_at=timedelta(hours=1))
    (second,) = await many(engine, 1, policy)
    (held,) = await claim(engine)
    assert held.execution_id == first
    assert await occupancy(engine, policy) == (1, 1)
    await WAYS_OUT[way](engine, held, clock)
    assert await occupancy(engine, policy) == (0, 0)
    assert (await claim_one(engine, lease_ttl=LONG)).execution_id == second
    assert await occupancy(engine, policy) == (1, 0)


async def test_a_released_execution_needs_a_slot_again(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=1)
    first, second = await many(engine, 2, policy)
    held = await claim_one(engine)
    await engine.release(held.handle)
    assert await occupancy(engine, policy) == (0, 0)  # both may be claimed; the first is before the other
    again = await claim_one(engine)
    assert again.execution_id == first
    assert await claim(engine) == []
    assert (await state(engine, second))[0] == ff.State.RATE_LIMITED


async def test_a_reclaim_keeps_the_slot_and_passes_a_full_cap(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, max_concurrent=1)
    first, _ = await many(engine, 2, policy)
    await claim(engine, lease_ttl=SECOND)
    await clock.advance(seconds=2)
    await engine.mark_lease_expired_if_due(first)
    assert await occupancy(engine, policy) == (1, 1)
    again = await claim_one(engine)
    assert (again.execution_id, again.attempt_type) == (first, "reclaim")
    assert await occupancy(engine, policy) == (1, 1)


async def test_a_grant_that_a_scheduler_issued_is_counted_when_it_is_consumed(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=1)
    first, second = await many(engine, 2, policy)
    await engine.issue_claim_grant(first, **WORKER)
    await engine.claim_execution(first, **WORKER, lease_id=mint_uuid(), attempt_id=mint_uuid())
    assert await occupancy(engine, policy) == (1, 0)
    assert await claim(engine) == []
    assert (await state(engine, second))[0] == ff.State.RATE_LIMITED


# Rates


async def test_a_rate_admits_its_number_and_the_rest_waits_for_the_window(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, window=60 * SECOND, max_requests_per_window=3)
    made = await many(engine, 5, policy)
    assert [one.execution_id for one in await claim(engine)] == made[:3]
    detail = f"quota {policy}: rate limit 3 per 60s window"
    assert await state(engine, made[3]) == (ff.State.RATE_LIMITED, "waiting_for_quota", detail)
    found = await engine.get_quota_policy(policy)
    assert found is not None
    assert found.next_free_at is not None
    assert (found.active, found.admitted, found.waiting) == (3, 3, 2)
    assert (await engine.unblock_limited()).promoted == 0
    await clock.advance(seconds=61)
    assert (await engine.unblock_limited()).promoted == 2
    assert [one.execution_id for one in await claim(engine)] == made[3:]


async def test_a_window_that_a_claim_fills_tells_those_behind_when_it_has_room(
    engine: CheckedEngine, clock: Clock
) -> None:
    policy = await quota(engine, window=60 * SECOND, max_requests_per_window=3)
    await many(engine, 1, policy)
    assert len(await claim(engine)) == 1
    await clock.advance(seconds=20)
    made = await many(engine, 4, policy)
    assert [one.execution_id for one in await claim(engine)] == made[:2]
    found = await engine.get_quota_policy(policy)
    assert found is not None
    assert found.next_free_at is not None
    held = (await engine.list_held(policy)).items
    assert [(one.execution_id, one.retry_at) for one in held] == [(one, found.next_free_at) for one in made[2:]]
    await clock.advance(seconds=40)
    assert (await engine.unblock_limited()).promoted == 1, "the duty comes at that time, not before"


async def test_under_a_lowered_rate_the_window_has_room_when_enough_have_left_it(
    engine: CheckedEngine, clock: Clock
) -> None:
    policy = await quota(engine, window=60 * SECOND, max_requests_per_window=3)
    for _ in range(3):
        await many(engine, 1, policy)
        assert len(await claim(engine)) == 1
        await clock.advance(seconds=10)
    await engine.update_quota_policy(policy, max_requests_per_window=2)
    await many(engine, 1, policy)
    assert await claim(engine) == []
    (held,) = (await engine.list_held(policy)).items
    assert held.retry_at is not None
    # Of admissions 30, 20 and 10 seconds ago, less what the calls took.
    assert 30 < (held.retry_at - held.blocked_at).total_seconds() <= 40, "the second of them leaves the window then"


async def test_a_full_window_has_room_when_its_own_key_has(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, key="tenant", window=60 * SECOND, max_requests_per_window=1)
    await many(engine, 1, policy, tags={"tenant": "a"})
    assert len(await claim(engine)) == 1
    await clock.advance(seconds=30)
    await many(engine, 1, policy, tags={"tenant": "b"})
    assert len(await claim(engine)) == 1
    await clock.advance(seconds=10)
    await many(engine, 1, policy, tags={"tenant": "b"})
    assert await claim(engine) == []
    (held,) = (await engine.list_held(policy)).items
    assert held.retry_at is not None
    assert 40 < (held.retry_at - held.blocked_at).total_seconds() <= 50, "not when that of another key has"
    await clock.advance(seconds=25)
    assert await unblock(engine) == 0, "nor does the duty look at that of another key"
    assert (await engine.reconcile_quotas()).entries == 1, "and only that has left"
    await clock.advance(seconds=26)
    assert await unblock(engine) == 1


async def test_a_limit_that_holds_nothing_more_is_not_due_again(
    engine: CheckedEngine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    policy = await quota(engine, max_concurrent=1)
    await many(engine, 2, policy)
    assert len(await claim(engine)) == 1
    await clock.advance(seconds=1)
    assert (await engine.unblock_limited()).promoted == 0, "the round that follows every denial"
    await engine.update_quota_policy(policy, max_concurrent=5)
    assert len(await claim(engine)) == 1
    assert await sql.fetchval("select count(*) from flowfabric.limit_due") == 0


async def test_the_rate_is_asked_before_the_cap(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_requests_per_window=1, max_concurrent=1)
    made = await many(engine, 2, policy)
    await claim(engine)
    assert "rate limit" in str((await state(engine, made[1]))[2])


async def test_a_retry_within_the_window_needs_no_second_token(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, window=60 * SECOND, max_requests_per_window=1)
    (first,) = await many(engine, 1, policy)
    held = await claim_one(engine)
    await engine.fail(held.handle, "again", retry_policy=ff.RetryPolicy(backoff=ff.Fixed(SECOND)))
    await clock.advance(seconds=2)
    await engine.promote_delayed(first)
    (again,) = await claim(engine)
    assert again.execution_id == first
    # The entry moved: the window of another begins with the second admission.
    (other,) = await many(engine, 1, policy)
    assert await claim(engine) == []
    await clock.advance(seconds=59)
    await unblock(engine)
    assert (await state(engine, other))[0] == ff.State.RATE_LIMITED
    await clock.advance(seconds=2)
    await unblock(engine)
    assert (await claim_one(engine)).execution_id == other


async def test_a_rate_without_a_policy_is_one_for_each_dimension(engine: CheckedEngine) -> None:
    policy = QuotaPolicyId(mint_uuid())
    numbers: dict[str, Any] = {"window": 60 * SECOND, "rate_limit": 3, "jitter": SECOND}
    for _ in range(3):
        assert await engine.check_admission(policy, engine.mint_id(), **numbers) == Admitted()
    refused = await engine.check_admission(policy, engine.mint_id(), **numbers)
    assert isinstance(refused, RateExceeded)
    assert timedelta(0) <= refused.retry_after <= 61 * SECOND
    # Another value of the key has a window of its own.
    assert await engine.check_admission(policy, engine.mint_id(), dimension="other", **numbers) == Admitted()
    assert await engine.read_quota_policy_limits(policy) is None


async def test_a_window_of_zero_is_a_minute(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, window=timedelta(0), max_requests_per_window=1)
    made = await many(engine, 2, policy)
    await claim(engine)
    await clock.advance(seconds=59)
    await unblock(engine)
    assert (await state(engine, made[1]))[0] == ff.State.RATE_LIMITED
    await clock.advance(seconds=2)
    await unblock(engine)
    assert (await claim_one(engine)).execution_id == made[1]


# Keys, several policies, no policy


async def test_a_key_gives_each_value_of_the_tag_its_own_numbers(engine: CheckedEngine) -> None:
    policy = await quota(engine, key="tenant", max_concurrent=1)
    made = {
        tenant: await many(engine, 2, policy, tags=tags)
        for tenant, tags in (("a", {"tenant": "a"}), ("b", {"tenant": "b"}), ("default", {}))
    }
    claimed = {one.execution_id for one in await claim(engine)}
    assert claimed == {ids[0] for ids in made.values()}
    keys = (await engine.list_quota_keys(policy)).items
    assert [(one.key, one.active, one.waiting) for one in keys] == [("a", 1, 1), ("b", 1, 1), ("default", 1, 1)]
    assert await occupancy(engine, policy) == (3, 3)
    assert [one.key for one in (await engine.list_quota_keys(policy, cursor="a", limit=1)).items] == ["b"]


async def test_all_policies_of_an_execution_must_pass(engine: CheckedEngine) -> None:
    wide, narrow = await quota(engine, "wide", max_concurrent=5), await quota(engine, "narrow", max_concurrent=1)
    both = await many(engine, 2, wide, narrow)
    alone = await many(engine, 2, wide)
    claimed = {one.execution_id for one in await claim(engine)}
    assert claimed == {both[0], *alone}
    assert await occupancy(engine, wide) == (3, 0)
    assert await occupancy(engine, narrow) == (1, 1)


@pytest.mark.parametrize("exists", [False, True])
async def test_a_policy_that_is_absent_or_without_limits_limits_nothing(engine: CheckedEngine, exists: bool) -> None:
    policy = await quota(engine) if exists else QuotaPolicyId(mint_uuid())
    made = await many(engine, 3, policy)
    assert [one.execution_id for one in await claim(engine)] == made
    if exists:
        assert await occupancy(engine, policy) == (0, 0)


async def test_limited_and_other_work_are_claimed_in_one_order(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=2)
    order = []
    for n in range(6):
        order += await many(engine, 1, *([policy] if n % 2 else []))
    claimed = [one.execution_id for one in await claim(engine)]
    assert claimed == [order[0], order[1], order[2], order[3], order[4]]
    assert (await state(engine, order[5]))[0] == ff.State.RATE_LIMITED


async def test_one_exhausted_policy_does_not_hide_what_is_behind_it(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=1)
    await many(engine, 50, policy)
    (last,) = await many(engine, 1)
    await claim(engine, 1)
    assert (await claim_one(engine)).execution_id == last
    assert await occupancy(engine, policy) == (1, 49)


async def test_a_claim_over_several_lanes_asks_the_limits_too(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=3)
    for lane in ("a", "b"):
        await many(engine, 4, policy, lane_id=lane)
    claimed = await engine.claim_lanes({"a": 5, "b": 5}, **WORKER, limit=10)
    assert len(claimed) == 3
    assert await occupancy(engine, policy) == (3, 5)


# Changes


async def test_a_raised_cap_lets_as_many_continue(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=1)
    made = await many(engine, 5, policy)
    await claim(engine)
    await engine.update_quota_policy(policy, max_concurrent=3)
    assert await occupancy(engine, policy) == (1, 2)
    assert [one.execution_id for one in await claim(engine)] == made[1:3]
    await engine.update_quota_policy(policy, max_concurrent=0)
    assert [one.execution_id for one in await claim(engine)] == made[3:]
    with pytest.raises(NotFound):
        await engine.update_quota_policy(QuotaPolicyId(mint_uuid()), max_concurrent=1)


async def test_a_change_of_numbers_that_were_changed_meanwhile_is_refused(engine: ff.Engine) -> None:
    policy = await quota(engine, max_concurrent=1)
    read = await engine.get_quota_policy(policy)
    assert read is not None
    await engine.update_quota_policy(policy, max_concurrent=2, updated_at=read.updated_at)
    with pytest.raises(Contention, match="stale_definition"):
        await engine.update_quota_policy(policy, max_concurrent=3, updated_at=read.updated_at)
    found = await engine.get_quota_policy(policy)
    assert found is not None
    assert found.limits.active_concurrency_cap == 2


async def test_a_lowered_cap_stops_nothing_that_runs(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=3)
    await many(engine, 4, policy)
    held = await claim(engine)
    await engine.update_quota_policy(policy, max_concurrent=1)
    for one in held[:2]:
        await engine.complete(one.handle)
        assert await claim(engine) == []
    await engine.complete(held[2].handle)
    assert len(await claim(engine)) == 1


async def test_a_cancelled_waiter_takes_nothing_with_it(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=1)
    made = await many(engine, 3, policy)
    (held,) = await claim(engine)
    await engine.cancel(Operator(made[1]), "enough")
    await engine.complete(held.handle)
    assert (await claim_one(engine)).execution_id == made[2]


# Outside callers


async def test_a_direct_slot_ends_with_its_window_or_its_release(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, max_concurrent=2)
    one, two, three = (engine.mint_id() for _ in range(3))
    numbers: dict[str, Any] = {"concurrency_cap": 2}
    assert await engine.check_admission(policy, one, **numbers) == Admitted()
    assert await engine.check_admission(policy, one, **numbers) == AlreadyAdmitted()
    assert await engine.check_admission(policy, two, **numbers) == Admitted()
    assert await engine.check_admission(policy, three, **numbers) == ConcurrencyExceeded()
    for _ in range(2):
        assert await engine.release_admission(policy, one) == Released()
        assert await occupancy(engine, policy) == (1, 0)
    assert await engine.check_admission(policy, three, **numbers) == Admitted()
    await clock.advance(seconds=61)
    assert await occupancy(engine, policy) == (0, 0)
    done = await engine.reconcile_quotas()
    assert (done.slots, done.entries, done.last) == (2, 3, None)


async def test_a_direct_slot_of_an_active_execution_stays(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, max_concurrent=1)
    running = await submit(engine)
    held = await claim_one(engine, lease_ttl=LONG)
    await engine.check_admission(policy, running, concurrency_cap=1)
    await clock.advance(seconds=3600)
    await engine.reconcile_quotas()
    assert await occupancy(engine, policy) == (1, 0)
    await engine.complete(held.handle)
    assert await occupancy(engine, policy) == (0, 0)


async def test_a_directly_admitted_execution_is_claimed_at_a_full_cap(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=1)
    first, second = await many(engine, 2, policy)
    await engine.check_admission(policy, second, concurrency_cap=1)
    (held,) = await claim(engine)
    assert held.execution_id == second
    assert (await state(engine, first))[0] == ff.State.RATE_LIMITED
    await engine.complete(held.handle)
    assert (await claim_one(engine)).execution_id == first


async def test_a_slot_that_a_release_frees_is_handed_on(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=1)
    outside = engine.mint_id()
    await engine.check_admission(policy, outside, concurrency_cap=1)
    (waiting,) = await many(engine, 1, policy)
    assert await claim(engine) == []
    await engine.release_admission(policy, outside)
    assert (await claim_one(engine)).execution_id == waiting


async def test_the_duty_promotes_no_more_than_there_is_room_for(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, max_concurrent=2)
    outside = [engine.mint_id() for _ in range(2)]
    for one in outside:
        await engine.check_admission(policy, one, concurrency_cap=2)
    await many(engine, 10, policy)
    assert await claim(engine) == []
    await clock.advance(seconds=61)
    assert await unblock(engine) == 2
    assert await occupancy(engine, policy) == (0, 8)


async def test_the_next_claim_decides_about_an_execution_that_a_scheduler_blocked(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=1)
    first, second = await many(engine, 2, policy)
    await engine.block_execution_for_admission(first, "waiting_for_quota", reason_detail="mine")
    assert (await claim_one(engine)).execution_id == second
    assert await unblock(engine) == 1
    assert await claim(engine) == []
    assert await state(engine, first) == (
        ff.State.RATE_LIMITED, "waiting_for_quota", f"quota {policy}: concurrency cap 1",
    )  # fmt: skip


# Grants of a scheduler


async def test_a39_a_batch_of_grants_takes_what_the_cap_leaves_room_for(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=3)
    made = await many(engine, 10, policy)
    granted = await engine.claim_for_worker(**WORKER, max_grants=10)
    assert [one.grant.execution_id for one in granted] == made[:3]
    assert await occupancy(engine, policy) == (3, 7)
    # Another worker meets live grants: it gets nothing, and takes nothing from anybody.
    assert await engine.claim_for_worker(**OTHER, max_grants=10) == []
    assert await claim(engine) == []
    assert await occupancy(engine, policy) == (3, 7)


async def test_a_consumed_grant_keeps_its_slot_with_the_run(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, max_concurrent=1)
    first, second = await many(engine, 2, policy)
    await engine.claim_for_worker(**WORKER, max_grants=1)
    held = await engine.claim_execution(first, **WORKER, lease_ttl=LONG, lease_id=mint_uuid(), attempt_id=mint_uuid())
    await clock.advance(seconds=3600)
    await engine.sweep()
    await engine.reconcile_quotas()
    assert await claim(engine) == []
    assert await occupancy(engine, policy) == (1, 1)
    await engine.complete(held.handle)
    assert (await claim_one(engine)).execution_id == second


@pytest.mark.parametrize("swept", [False, True])
async def test_a_grant_that_ends_unused_gives_its_slot_back(engine: CheckedEngine, clock: Clock, swept: bool) -> None:
    policy = await quota(engine, max_concurrent=1)
    first, second = await many(engine, 2, policy)
    await engine.claim_for_worker(**WORKER, grant_ttl=5 * SECOND, max_grants=1)
    assert await claim(engine) == []
    assert (await state(engine, second))[0] == ff.State.RATE_LIMITED
    await clock.advance(seconds=6)
    assert await occupancy(engine, policy) == (0, 1)
    if swept:
        await engine.sweep()
    (again,) = await claim(engine, 1)
    assert again.execution_id == first
    await engine.complete(again.handle)
    assert (await claim_one(engine)).execution_id == second


async def test_the_end_of_a_grant_promotes_what_waits(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, max_concurrent=1)
    first, second = await many(engine, 2, policy)
    await engine.claim_for_worker(**WORKER, max_grants=1)
    assert await claim(engine) == []
    await clock.advance(seconds=6)
    assert (await engine.unblock_limited()).promoted == 1
    assert (await state(engine, second))[0] == ff.State.WAITING
    assert (await claim_one(engine)).execution_id == first


async def test_a_granted_execution_that_is_cancelled_gives_its_slot_back(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=1)
    first, second = await many(engine, 2, policy)
    await engine.claim_for_worker(**WORKER, max_grants=1)
    assert await claim(engine) == []
    await engine.cancel(Operator(first), "enough")
    assert (await claim_one(engine)).execution_id == second


async def test_a_reclaim_by_grant_keeps_the_slot(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, max_concurrent=1)
    first, _ = await many(engine, 2, policy)
    await claim(engine, lease_ttl=SECOND)
    await clock.advance(seconds=2)
    await engine.mark_lease_expired_if_due(first)
    (granted,) = await engine.claim_for_worker(**OTHER, max_grants=5)
    assert isinstance(granted, ReclaimGranted)
    assert granted.grant.execution_id == first
    assert await occupancy(engine, policy) == (1, 1)
    again = await engine.reclaim_execution(first, **OTHER, lease_id=mint_uuid(), attempt_id=mint_uuid())
    assert isinstance(again, Claimed)
    assert (again.attempt_type, again.reclaim_count) == ("reclaim", 1)
    assert await occupancy(engine, policy) == (1, 1)


# ---- scenarios of the chapter


async def test_a23_a_fourth_admission_within_the_window_is_told_when_to_try_again(
    engine: CheckedEngine, clock: Clock
) -> None:
    window, jitter = timedelta(seconds=60), timedelta(milliseconds=500)
    asked: dict[str, Any] = {"rate_limit": 3, "window": window, "jitter": jitter}
    policy = quota_policy_id_of("a23")
    for _ in range(3):
        assert await engine.check_admission(policy, await submit(engine), **asked) == Admitted()
        await clock.advance(seconds=10)
    denied = await engine.check_admission(policy, await submit(engine), **asked)
    assert isinstance(denied, RateExceeded)
    assert timedelta(0) <= denied.retry_after <= window + jitter
    await clock.advance(seconds=denied.retry_after.total_seconds())
    assert await engine.check_admission(policy, await submit(engine), **asked) == Admitted()


async def test_an_admission_creates_no_policy_and_counts_each_dimension(engine: CheckedEngine) -> None:
    policy = quota_policy_id_of("d49")
    asked: dict[str, Any] = {"rate_limit": 1, "concurrency_cap": 1}
    first, second = engine.mint_id(), engine.mint_id()
    assert await engine.check_admission(policy, first, dimension="", **asked) == Admitted()
    assert await engine.check_admission(policy, first, dimension="default", **asked) == AlreadyAdmitted()
    assert isinstance(await engine.check_admission(policy, second, **asked), RateExceeded), "none is the default one"
    assert await engine.check_admission(policy, second, dimension="other", **asked) == Admitted()
    assert await engine.get_quota_policy(policy) is None
    assert isinstance(await engine.create_quota_policy(policy, max_concurrent=7), QuotaPolicyCreated)
    assert (await engine.read_quota_policy_limits(policy)).active_concurrency_cap == 7  # type: ignore[union-attr]


async def test_one_that_is_admitted_again_moves_its_entry_and_needs_no_second_token(
    engine: CheckedEngine, clock: Clock
) -> None:
    asked: dict[str, Any] = {"rate_limit": 1, "window": 60 * SECOND}
    policy = quota_policy_id_of("again")
    first, second = engine.mint_id(), engine.mint_id()
    assert await engine.check_admission(policy, first, **asked) == Admitted()
    await engine.release_admission(policy, first)
    await clock.advance(seconds=40)
    assert await engine.check_admission(policy, first, **asked) == Admitted()
    await clock.advance(seconds=40)
    answer = await engine.check_admission(policy, second, **asked)
    assert isinstance(answer, RateExceeded)
    assert answer.retry_after > 15 * SECOND, "a window after the second admission"
    # Nor does another dimension, with a shorter window, drop what this one counts.
    assert await engine.check_admission(policy, second, dimension="o", rate_limit=1, window=SECOND) == Admitted()
    await engine.release_admission(policy, second)
    assert isinstance(await engine.check_admission(policy, second, **asked), RateExceeded)


async def test_the_jitter_is_a_random_part_of_what_the_caller_allows(engine: CheckedEngine) -> None:
    asked: dict[str, Any] = {"rate_limit": 1, "window": SECOND, "jitter": timedelta(days=1)}
    policy = quota_policy_id_of("d48")
    await engine.check_admission(policy, engine.mint_id(), **asked)
    answers = [await engine.check_admission(policy, engine.mint_id(), **asked) for _ in range(10)]
    waits = [one.retry_after for one in answers if isinstance(one, RateExceeded)]
    assert len(waits) == 10
    assert max(waits) - min(waits) > timedelta(minutes=1), "all of a day would come back together"


async def test_a24_a_cap_is_a_cap_however_long_its_executions_run(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, max_concurrent=2)
    await many(engine, 2, policy)
    first, _ = await claim(engine, lease_ttl=timedelta(hours=1))
    await clock.advance(seconds=600)
    other = await submit(engine)
    cap = {"concurrency_cap": 2}
    assert await engine.check_admission(policy, other, **cap) == ConcurrencyExceeded()
    await engine.complete(first.handle)
    assert await engine.check_admission(policy, other, **cap) == Admitted()


async def test_a26_a_second_release_frees_no_other_slot(engine: CheckedEngine) -> None:
    policy = await quota(engine, max_concurrent=5)
    ids = [await submit(engine) for _ in range(2)]
    for each in ids:
        await engine.check_admission(policy, each, concurrency_cap=5)
    for expected in (2, 1, 1):
        assert (await occupancy(engine, policy))[0] == expected
        await engine.release_admission(policy, ids[0])
    assert (await occupancy(engine, policy))[0] == 1


async def test_a38_an_operator_claims_despite_capabilities_and_cap_and_is_counted(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    policy = await quota(engine, max_concurrent=1)
    await many(engine, 1, policy)
    assert len(await claim(engine)) == 1
    needs = RoutingRequirements(required_capabilities=("gpu",))
    target = await submit(engine, policy=ExecutionPolicy(quota_policy_id=policy, routing_requirements=needs))
    assert (await engine.issue_grant_and_claim(target)).execution_id == target
    assert await occupancy(engine, policy) == (2, 0)
    assert await sql.fetchval("select count(*) from flowfabric.claim_grant") == 0
    with pytest.raises(ff.FlowFabricError) as refused:
        await engine.issue_grant_and_claim(target)
    assert refused.value.kind == "execution_not_eligible"  # the word of this call for all that is not runnable
    assert await occupancy(engine, policy) == (2, 0)


async def test_a_batch_is_filled_behind_what_is_denied(engine: CheckedEngine) -> None:
    """As so many single claims would fill it."""
    one, two = await quota(engine, "one", max_concurrent=1), await quota(engine, "two", max_concurrent=1)
    first, *_ = await many(engine, 3, one)
    (last,) = await many(engine, 1, two)
    found = await claim(engine, limit=2)
    assert [each.execution_id for each in found] == [first, last]


async def test_a_direct_slot_that_changes_its_key_is_counted_there(
    engine: CheckedEngine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    policy = await quota(engine, key="tenant", max_concurrent=1)
    outside = engine.mint_id()
    await engine.check_admission(policy, outside, dimension="a", concurrency_cap=1)
    await clock.advance(seconds=61)  # its slot has ended, and the row is still there
    tags = {"tenant": "b"}
    await many(engine, 1, policy, tags=tags)
    (held,) = await claim(engine)
    await sql.execute(
        "update flowfabric.quota_head h set floor = s.number from flowfabric.quota_slot s"
        " where h.policy_id = s.policy_id and h.key = s.key and s.key = 'b'"
    )  # as claims do now and then
    await engine.complete(held.handle)
    assert await engine.check_admission(policy, outside, dimension="b", concurrency_cap=1) == Admitted()
    await many(engine, 1, policy, tags=tags)
    assert await claim(engine) == [], "the cap is one"


async def test_a_grant_that_ends_leaves_a_direct_slot_to_its_caller(engine: CheckedEngine, clock: Clock) -> None:
    policy = await quota(engine, max_concurrent=1)
    (one,) = await many(engine, 1, policy)
    assert await engine.check_admission(policy, one, concurrency_cap=1) == Admitted()
    await engine.claim_for_worker(**WORKER, grant_ttl=SECOND, max_grants=1)
    await clock.advance(seconds=2)
    assert await occupancy(engine, policy) == (1, 0)
    assert await engine.check_admission(policy, engine.mint_id(), concurrency_cap=1) == ConcurrencyExceeded()
    await clock.advance(seconds=60)
    assert await occupancy(engine, policy) == (0, 0)
