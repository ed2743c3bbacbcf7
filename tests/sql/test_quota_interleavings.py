"""Two callers under one policy at the same time: no cap is passed, nothing is left behind, nothing deadlocks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

import flowfabric as ff
from flowfabric.values.attempt import Claimed
from flowfabric.values.execution import NewExecution
from flowfabric.values.grant import GrantNotFound
from flowfabric.values.ids import QuotaPolicyId, mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.quota import Admitted, ConcurrencyExceeded, RateExceeded, quota_policy_id_of
from tests.interleave import PATIENCE, Party, Stage, settled, waiting
from tests.sql.test_quotas import claim, occupancy
from tests.support import WORKER

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.both_servers]

LONG = timedelta(days=1)


async def quota(engine: ff.Engine, name: str = "q", **numbers: Any) -> QuotaPolicyId:
    return (await engine.create_quota_policy(name=name, **numbers)).quota_policy_id


async def many(engine: ff.Engine, number: int, *policies: UUID, **fields: Any) -> list[ff.ExecutionId]:
    policy = ExecutionPolicy(quota_policy_ids=policies)  # type: ignore[arg-type]
    items = [NewExecution(execution_kind="k", policy=policy, **fields) for _ in range(number)]
    return [made.execution_id for made in await engine.create_many(items)]


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_the_second_claim_waits_for_the_first_and_sees_its_slots(
    stage: Stage, parties: list[Party], ending: str
) -> None:
    one, two, _ = parties
    policy = await quota(one, max_concurrent=1)
    made = await many(one, 2, policy)
    await claim(one, 1)  # the head exists
    await one.complete(Operator(made[0]))
    (third,) = await many(one, 1, policy)
    await one.begin()
    first = await claim(one, 1)
    assert [each.execution_id for each in first] == [made[1]]
    task = await waiting(stage.watch, two, claim(two, 1), behind=one)
    await one.end(ending)
    second = await asyncio.wait_for(task, PATIENCE)
    if ending == "commit":
        assert second == []
        assert await occupancy(one, policy) == (1, 1)
        assert (await one.read_execution(third)).public_state == ff.State.RATE_LIMITED  # type: ignore[union-attr]
    else:
        assert [each.execution_id for each in second] == [made[1]]
    await stage.audit()


async def test_the_first_claims_of_a_policy_create_its_head_once(stage: Stage, parties: list[Party]) -> None:
    one, two, _ = parties
    policy = await quota(one, max_concurrent=2)
    await many(one, 4, policy)
    await one.begin()
    assert len(await claim(one, 1)) == 1
    task = await waiting(stage.watch, two, claim(two, 4), behind=one)
    await one.commit()
    assert len(await asyncio.wait_for(task, PATIENCE)) == 1
    assert await occupancy(one, policy) == (2, 2)
    await stage.audit()


async def test_an_end_does_not_wait_for_a_claim_and_the_duty_hands_its_slot_on(
    stage: Stage, parties: list[Party]
) -> None:
    one, two, _ = parties
    policy = await quota(one, max_concurrent=1)
    first, second = await many(one, 2, policy)
    (running,) = await claim(one, 1)
    assert running.execution_id == first
    # The claim denies the second, and has not committed.
    await one.begin()
    assert await claim(one) == []
    await asyncio.wait_for(two.complete(running.handle), PATIENCE)
    await one.commit()
    await stage.audit()
    assert (await two.read_execution(second)).public_state == ff.State.RATE_LIMITED  # type: ignore[union-attr]
    await stage.clock.advance(seconds=1)
    assert (await two.unblock_limited()).promoted == 1
    assert [each.execution_id for each in await claim(two)] == [second]
    await stage.audit()


async def test_a_claim_after_an_open_end_denies_and_the_end_promotes_nothing_twice(
    stage: Stage, parties: list[Party]
) -> None:
    one, two, _ = parties
    policy = await quota(one, max_concurrent=1)
    first, second = await many(one, 2, policy)
    (running,) = await claim(one, 1)
    await one.begin()
    await one.complete(running.handle)  # none waits yet
    assert await claim(two) == []  # the slot is free when the end commits
    await one.commit()
    await stage.clock.advance(seconds=1)
    assert (await two.unblock_limited()).promoted == 1
    assert [each.execution_id for each in await claim(two)] == [second]
    assert (await two.read_execution(first)).public_state == ff.State.COMPLETED  # type: ignore[union-attr]
    await stage.audit()


async def test_an_end_that_finds_the_policy_locked_leaves_it_to_the_duty(stage: Stage, parties: list[Party]) -> None:
    one, two, three = parties
    policy = await quota(one, max_concurrent=2)
    await many(one, 4, policy)
    running = await claim(one, 4)
    assert await occupancy(one, policy) == (2, 2)
    await two.begin()
    assert isinstance(await two.check_admission(policy, two.mint_id(), concurrency_cap=2), ConcurrencyExceeded)
    await asyncio.wait_for(one.complete(running[0].handle), PATIENCE)  # does not wait
    assert await occupancy(one, policy) == (1, 2)
    await two.commit()
    assert (await three.unblock_limited()).promoted == 1
    assert len(await claim(three)) == 1
    await stage.audit()


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_raise_waits_for_the_claim_that_denies(stage: Stage, parties: list[Party], ending: str) -> None:
    one, two, _ = parties
    policy = await quota(one, max_concurrent=1)
    await many(one, 3, policy)
    await claim(one, 1)
    await one.begin()
    assert await claim(one) == []  # moves two aside
    task = await waiting(stage.watch, two, two.update_quota_policy(policy, max_concurrent=3), behind=one)
    await one.end(ending)
    await asyncio.wait_for(task, PATIENCE)
    assert len(await claim(one)) == 2
    await stage.audit()


async def test_a_claim_waits_for_the_raise_and_passes(stage: Stage, parties: list[Party]) -> None:
    one, two, _ = parties
    policy = await quota(one, max_concurrent=1)
    await many(one, 3, policy)
    await claim(one, 1)
    await one.begin()
    await one.update_quota_policy(policy, max_concurrent=3)
    task = await waiting(stage.watch, two, claim(two), behind=one)
    await one.commit()
    assert len(await asyncio.wait_for(task, PATIENCE)) == 2
    await stage.audit()


async def _cancel(party: Party, policy: QuotaPolicyId, running: Claimed) -> None:
    await party.cancel(Operator(running.execution_id), "enough")


# Each gives the last slot back. The slot of the grant has expired by then, and the sweep deletes it.
FREES: dict[str, Callable[[Party, QuotaPolicyId, Any], Awaitable[Any]]] = {
    "complete": lambda party, policy, holder: party.complete(holder.handle),
    "cancel": _cancel,
    "suspend": lambda party, policy, holder: party.delay(holder.handle, timedelta(days=9)),
    "lost for good": lambda party, policy, holder: party.issue_reclaim_grant(
        holder.execution_id, **{**WORKER, "lane_id": "first"}
    ),
    "grant": lambda party, policy, holder: party.sweep(),
    "direct": lambda party, policy, holder: party.release_admission(policy, holder),
}


async def _holder(one: Party, stage: Stage, policy: QuotaPolicyId, way: str) -> Any:
    """The holder of the only slot of the policy, about to give it back."""
    if way == "direct":
        outside = one.mint_id()
        assert await one.check_admission(policy, outside, concurrency_cap=1) == Admitted()
        return outside
    await one.create_many(
        [
            NewExecution(
                execution_kind="k",
                lane_id="first",
                policy=ExecutionPolicy(
                    quota_policy_ids=(policy,), max_reclaim_count=1 if way == "lost for good" else 100
                ),
            )
        ]
    )
    if way == "grant":
        return await one.claim_for_worker(**{**WORKER, "lane_id": "first"})
    (running,) = await claim(one, 1, lane_id="first")
    if way == "lost for good":
        await one.revoke_lease(running.execution_id)
        (running,) = await claim(one, 1, lane_id="first")
        await one.revoke_lease(running.execution_id)
    return running


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("way", FREES)
async def test_a_claim_that_denies_and_then_the_last_slot_is_given_back(
    stage: Stage, parties: list[Party], way: str, ending: str
) -> None:
    one, two, three = parties
    policy = await quota(one, max_concurrent=1)
    holder = await _holder(one, stage, policy, way)
    (next_one,) = await many(one, 1, policy)
    await one.begin()
    assert await claim(one) == []
    if way == "grant":
        await stage.clock.advance(seconds=6)
    # An end does not wait for the claim. A direct admission is no execution: its caller waits.
    task = asyncio.ensure_future(settled(FREES[way](two, policy, holder)))
    if way != "direct":
        assert not isinstance(await asyncio.wait_for(task, PATIENCE), Exception)
    await one.end(ending)
    assert not isinstance(await asyncio.wait_for(task, PATIENCE), Exception)
    await stage.clock.advance(seconds=2)
    await three.unblock_limited()
    assert [each.execution_id for each in await claim(three)] == [next_one]
    await stage.audit()


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("way", FREES)
async def test_the_last_slot_is_given_back_and_a_claim_comes_before_that_is_committed(
    stage: Stage, parties: list[Party], way: str, ending: str
) -> None:
    one, two, three = parties
    policy = await quota(one, max_concurrent=1)
    holder = await _holder(one, stage, policy, way)
    (next_one,) = await many(one, 1, policy)
    if way == "grant":
        await stage.clock.advance(seconds=6)
    await one.begin()
    assert not isinstance(await settled(FREES[way](one, policy, holder)), Exception)
    if way == "direct":
        task = await waiting(stage.watch, two, claim(two), behind=one)
    else:
        task = asyncio.ensure_future(claim(two))
        found = await asyncio.wait_for(asyncio.shield(task), PATIENCE)
        # A slot whose grant expired is free whether it was swept or not.
        assert [each.execution_id for each in found] == ([next_one] if way == "grant" else [])
    await one.end(ending)
    found = await asyncio.wait_for(task, PATIENCE)
    await stage.clock.advance(seconds=2)
    await three.unblock_limited()
    found += await claim(three)
    assert [each.execution_id for each in found] == ([next_one] if ending == "commit" or way == "grant" else [])
    await stage.audit()


async def test_the_last_slot_and_a_cancel(stage: Stage, parties: list[Party]) -> None:
    one, two, _ = parties
    policy = await quota(one, max_concurrent=1)
    first, second = await many(one, 2, policy)
    await claim(one)
    await one.begin()
    await one.cancel(Operator(first), "enough")  # promotes the second
    assert await claim(two) == []
    await one.commit()
    assert [each.execution_id for each in await claim(two)] == [second]
    await stage.audit()


async def test_the_last_slot_and_a_reclaim(stage: Stage, parties: list[Party]) -> None:
    one, two, _ = parties
    policy = await quota(one, max_concurrent=1)
    first, _ = await many(one, 2, policy)
    await claim(one)
    await one.revoke_lease(first)
    await one.begin()
    (again,) = await claim(one)
    assert (again.execution_id, again.attempt_type) == (first, "reclaim")
    task = await waiting(stage.watch, two, two.check_admission(policy, two.mint_id(), concurrency_cap=1), behind=one)
    await one.commit()
    assert isinstance(await asyncio.wait_for(task, PATIENCE), ConcurrencyExceeded)
    assert await occupancy(two, policy) == (1, 1)
    await stage.audit()


@pytest.mark.parametrize(("seconds", "ttl"), [(40, 60), (40, 30)])
async def test_a_reclaim_by_grant_that_waits_for_the_policy_has_its_whole_lease_or_none(
    stage: Stage, parties: list[Party], seconds: int, ttl: int
) -> None:
    one, two, _ = parties
    policy = await quota(one, max_concurrent=1)
    await many(one, 2, policy)
    (running,) = await claim(one, 1)
    await one.revoke_lease(running.execution_id)
    await two.issue_reclaim_grant(running.execution_id, **WORKER, grant_ttl=timedelta(seconds=ttl))
    await one.begin()
    assert isinstance(await one.check_admission(policy, one.mint_id(), concurrency_cap=1), ConcurrencyExceeded)
    late = await waiting(
        stage.watch,
        two,
        two.reclaim_execution(running.execution_id, **WORKER, lease_id=mint_uuid(), attempt_id=mint_uuid()),
        behind=one,
    )
    await stage.clock.advance(seconds=seconds)
    await one.commit()
    again = await asyncio.wait_for(late, PATIENCE)
    if seconds < ttl:
        assert isinstance(again, Claimed)
        await two.complete(again.handle)
    else:
        assert isinstance(again, GrantNotFound)
        assert (await occupancy(two, policy))[0] == 1
    await stage.audit()


async def test_two_admissions_take_the_last_slot_once(stage: Stage, parties: list[Party]) -> None:
    one, two, _ = parties
    policy = await quota(one, max_concurrent=1)
    await one.begin()
    assert await one.check_admission(policy, one.mint_id(), concurrency_cap=1) == Admitted()
    task = await waiting(stage.watch, two, two.check_admission(policy, two.mint_id(), concurrency_cap=1), behind=one)
    await one.commit()
    assert await asyncio.wait_for(task, PATIENCE) == ConcurrencyExceeded()
    await stage.audit()


async def test_an_entry_that_is_exactly_one_window_old_has_left(stage: Stage, parties: list[Party]) -> None:
    """Time stands still in the transaction that asks."""
    one, *_ = parties
    policy = quota_policy_id_of("exact")
    await one.begin()
    await one.connection.execute("""
        create or replace function flowfabric.now() returns timestamptz language sql volatile as $$
        select current_setting('test.now')::timestamptz $$""")

    async def ask(at: str) -> object:
        await one.connection.execute(f"set local test.now = '2026-01-01 {at}'")
        return await one.check_admission(policy, one.mint_id(), rate_limit=2, window=timedelta(minutes=1))

    assert await ask("12:00:00") == Admitted()
    assert await ask("12:00:30") == Admitted()
    assert await ask("12:00:59.9") == RateExceeded(timedelta(milliseconds=100))
    assert isinstance(await ask("12:00:59.999999"), RateExceeded)
    assert await ask("12:01:00") == Admitted(), "an entry one window old does not count"
    assert isinstance(await ask("12:01:29.999999"), RateExceeded)
    await one.rollback()


async def test_a_promoted_execution_that_another_locked_is_not_forgotten(stage: Stage, parties: list[Party]) -> None:
    one, two, three = parties
    policy = await quota(one, max_concurrent=1)
    first, second = await many(one, 2, policy)
    await claim(one)
    await stage.clock.advance(seconds=1)
    assert (await three.unblock_limited()).promoted == 0  # nothing is due any more
    await one.begin()
    await one.connection.execute("select from flowfabric.execution where id = $1 for no key update", second)
    await two.cancel(Operator(first), "enough")
    await one.commit()
    await stage.clock.advance(seconds=2)
    assert (await three.unblock_limited()).promoted == 1
    assert [each.execution_id for each in await claim(three)] == [second]
    await stage.audit()


async def test_batches_over_many_policies_in_opposite_order_do_not_deadlock(stage: Stage, parties: list[Party]) -> None:
    one, two, _ = parties
    policies = [await quota(one, f"p{n}", max_concurrent=50) for n in range(8)]
    for n in range(8):
        await many(one, 4, policies[n], policies[(n + 3) % 8], lane_id="up")
        await many(one, 4, policies[7 - n], policies[(12 - n) % 8], lane_id="down")
    for _ in range(4):
        running = await asyncio.gather(
            claim(one, 10, lane_id="up"), claim(two, 10, lane_id="down"),
        )  # fmt: skip
        ends = await asyncio.gather(
            settled(one.complete_many([each.handle for each in reversed(running[1])])),
            settled(two.complete_many([each.handle for each in running[0]])),
        )
        assert not [end for done in ends for end in done if isinstance(end, Exception)]
    assert [await occupancy(one, policy) for policy in policies] == [(0, 0)] * 8
    await stage.audit()


@pytest.mark.parametrize("first", ["claim", "complete"])
async def test_a_batch_of_ends_and_a_batch_of_claims_over_many_policies_do_not_wait_for_each_other(
    stage: Stage, parties: list[Party], first: str
) -> None:
    """The claim meets the policies in one order, the ends in the other; both hold them until they commit."""
    one, two, three = parties
    policies = [await quota(one, f"p{n}", max_concurrent=2) for n in range(6)]
    for policy in policies:
        await many(one, 1, policy, lane_id="ends")
    running = await claim(one, 10, lane_id="ends")
    for policy in reversed(policies):
        await many(one, 4, policy)
    assert len(await claim(one, 100)) == 6  # the others are moved aside
    for policy in reversed(policies):
        await many(one, 1, policy, priority=9)
    ends = [each.handle for each in reversed(running)]
    await one.begin()
    if first == "claim":
        assert await claim(one, 100) == []
        await two.begin()
        await asyncio.wait_for(two.complete_many(ends[:3]), PATIENCE)
        late = await waiting(stage.watch, two, claim(two, 100), behind=one)
        await asyncio.wait_for(one.complete_many(ends[3:]), PATIENCE)
    else:
        await one.complete_many(ends[:3])  # promotes three
        await two.begin()
        late = await waiting(stage.watch, two, claim(two, 100), behind=one)
        await asyncio.wait_for(one.complete_many(ends[3:]), PATIENCE)
        await one.commit()
        assert await asyncio.wait_for(late, PATIENCE)
        await one.begin()
    await one.commit()
    await asyncio.wait_for(late, PATIENCE)
    await two.commit()
    for _ in range(3):
        await stage.clock.advance(seconds=2)
        await three.unblock_limited()
        await claim(three, 100)
    assert [(await occupancy(one, policy))[0] for policy in policies] == [2] * 6
    await stage.audit()


async def test_claims_over_lanes_in_opposite_order_do_not_deadlock(stage: Stage, parties: list[Party]) -> None:
    one, two, _ = parties
    low, high = sorted([await quota(one, "a", max_concurrent=9), await quota(one, "b", max_concurrent=9)])
    await many(one, 4, low, lane_id="low")
    await many(one, 4, high, lane_id="high")
    await claim(one, 1, lane_id="low")
    await claim(one, 1, lane_id="high")
    await one.begin()
    assert len(await claim(one, 1, lane_id="low")) == 1
    await two.begin()
    assert len(await claim(two, 1, lane_id="high")) == 1
    # Each holds a policy, and passes over what the other holds.
    assert await asyncio.wait_for(claim(one, 1, lane_id="high"), PATIENCE) == []
    assert await asyncio.wait_for(claim(two, 1, lane_id="low"), PATIENCE) == []
    await one.commit()
    await two.commit()
    assert len(await one.claim_lanes({"low": 4, "high": 4}, **WORKER, limit=8)) == 4
    await stage.audit()
