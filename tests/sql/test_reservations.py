"""Reservations: amounts that are held before they are used, and what becomes of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import InvalidInput, LeaseLost, NotFound
from flowfabric.values.attempt import Claimed
from flowfabric.values.budget import (
    MAX_AMOUNT,
    AlreadyApplied,
    CancelReservation,
    HardBreach,
    OnLost,
    Report,
    ReservationCancelled,
    Reserve,
    Reserved,
    Settle,
    Usage,
    UsageOk,
)
from flowfabric.values.conditions import on
from flowfabric.values.ids import BudgetId, ReservationId, mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, TimeoutPolicy
from flowfabric.values.wait import Fresh
from tests.each import each
from tests.sql.test_budgets import admin, make, reclaimed, status
from tests.support import RETRY, Clock, claim_one, started

pytestmark = pytest.mark.asyncio(loop_scope="session")
PLACE = ("spend", 0)


async def hold(engine: ff.Engine, held: Claimed, budget: Any, **fields: Any) -> Reserved:
    answer = await engine.reserve_usage(held.handle, fields.pop("amounts", {"t": 6}), budget, **fields)
    assert isinstance(answer, Reserved)
    return answer


async def numbers(engine: ff.Engine, budget: BudgetId) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    found = await status(engine, budget)
    return found.usage, found.held, found.overrun


async def test_what_is_held_counts_against_the_limit_and_exhausts_nothing(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    held = await started(engine)
    reserved = await hold(engine, held, budget, amounts={"t": 10, "calls": 1})
    assert (reserved.state, reserved.amounts, reserved.remaining) == ("held", {"t": 10, "calls": 1}, {"t": 0})
    found = await status(engine, budget)
    assert (found.usage, found.held, found.exhausted_by) == ({}, {"t": 10, "calls": 1}, None)
    assert await engine.reserve_usage(held.handle, {"t": 1}, budget) == HardBreach(
        budget_id=budget, dimension="t", current_usage=0, hard_limit=10, held=10, requested=1
    )
    assert isinstance(await admin(engine, budget, t=1), HardBreach)
    assert await engine.settle_usage(held.handle, reserved.reservation_id, {"t": 4}) == UsageOk(remaining={"t": 6})
    assert await numbers(engine, budget) == ({"t": 4}, {}, {})
    again = await engine.settle_usage(held.handle, reserved.reservation_id, {"t": 4})
    assert isinstance(again, AlreadyApplied)


async def test_more_than_fits_is_overrun(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    held = await started(engine)
    await admin(engine, budget, t=2)
    other = await hold(engine, held, budget, amounts={"t": 3})
    reserved = await hold(engine, held, budget, amounts={"t": 4})
    answer = await engine.settle_usage(held.handle, reserved.reservation_id, {"t": 9})
    assert answer == HardBreach(
        budget_id=budget, dimension="t", current_usage=7, hard_limit=10, held=3, requested=9, overrun=4
    )
    assert await numbers(engine, budget) == ({"t": 7}, {"t": 3}, {"t": 4})
    await engine.settle_usage(held.handle, other.reservation_id, {"t": 3})
    assert await numbers(engine, budget) == ({"t": 10}, {}, {"t": 4})
    assert (await status(engine, budget)).breach_count == 1
    await engine.reset_budget(budget)
    assert await numbers(engine, budget) == ({"t": 0}, {}, {})


async def test_more_than_was_held_fits_where_nothing_limits_it(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    held = await started(engine)
    reserved = await hold(engine, held, budget, amounts={"calls": 1})
    answer = await engine.settle_usage(held.handle, reserved.reservation_id, {"calls": 5})
    assert isinstance(answer, UsageOk)
    assert await numbers(engine, budget) == ({"calls": 5}, {}, {})


async def test_a_lowered_limit_does_not_take_back_what_was_held(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    held = await started(engine)
    reserved = await hold(engine, held, budget, amounts={"t": 8})
    await engine.update_budget(budget, hard={"t": 5})
    await engine.settle_usage(held.handle, reserved.reservation_id, {"t": 8})
    assert await numbers(engine, budget) == ({"t": 8}, {}, {})


async def test_several_budgets_hold_all_or_none(engine: ff.Engine) -> None:
    wide, narrow = await make(engine, {"t": 100}), await make(engine, {"t": 5})
    held = await started(engine)
    assert isinstance(await engine.reserve_usage(held.handle, {"t": 6}, [wide, narrow]), HardBreach)
    assert [(await status(engine, one)).held for one in (wide, narrow)] == [{}, {}]
    reserved = await hold(engine, held, [wide, narrow], amounts={"t": 4})
    answer = await engine.settle_usage(held.handle, reserved.reservation_id, {"t": 6})
    assert isinstance(answer, HardBreach)
    assert (answer.budget_id, answer.overrun) == (narrow, 1)
    assert [await numbers(engine, one) for one in (wide, narrow)] == [({"t": 6}, {}, {}), ({"t": 5}, {}, {"t": 1})]


async def test_a_cancelled_reservation_gives_back(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    held = await started(engine)
    reserved = await hold(engine, held, budget)
    answer = await engine.cancel_reservation(held.handle, reserved.reservation_id)
    assert answer == ReservationCancelled(reservation_id=reserved.reservation_id, released={"t": 6})
    assert await numbers(engine, budget) == ({}, {}, {})
    again = await engine.cancel_reservation(held.handle, reserved.reservation_id)
    assert again == ReservationCancelled(reservation_id=reserved.reservation_id, released={})
    with pytest.raises(NotFound):
        await engine.settle_usage(held.handle, reserved.reservation_id, {"t": 1})


async def test_only_the_execution_that_holds_settles(engine: ff.Engine, clock: Clock) -> None:
    budget = await make(engine, {"t": 10})
    held, stranger = await started(engine), await started(engine)
    reserved = await hold(engine, held, budget)
    with pytest.raises(NotFound) as caught:
        await engine.settle_usage(stranger.handle, reserved.reservation_id, {"t": 1})
    assert caught.value.entity == "reservation"
    cancelled = await engine.cancel_reservation(stranger.handle, reserved.reservation_id)
    assert cancelled == ReservationCancelled(reservation_id=reserved.reservation_id, released={})
    with pytest.raises(NotFound):
        await engine.settle_usage(held.handle, ReservationId(mint_uuid()), {"t": 1})
    await clock.advance(minutes=10)
    with pytest.raises(LeaseLost):
        await engine.settle_usage(held.handle, reserved.reservation_id, {"t": 1})


async def test_a_reset_keeps_what_is_held(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    held = await started(engine)
    await admin(engine, budget, t=3)
    reserved = await hold(engine, held, budget)
    await engine.reset_budget(budget)
    assert await numbers(engine, budget) == ({"t": 0}, {"t": 6}, {})
    assert isinstance(await admin(engine, budget, t=5), HardBreach)
    await engine.settle_usage(held.handle, reserved.reservation_id, {"t": 5})
    assert await numbers(engine, budget) == ({"t": 5}, {}, {})


# ---- the end of the lease


@contextlib.asynccontextmanager
async def locked(dsn: str) -> AsyncIterator[None]:
    """Another transaction has locked all budgets."""
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            await connection.execute("select from flowfabric.budget for no key update")
            yield
    finally:
        await connection.close()


Ending = Callable[[ff.Engine, Clock, Claimed], Awaitable[Any]]


async def _expire(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await clock.advance(minutes=10)
    await engine.mark_lease_expired_if_due(held.execution_id)


async def _time_out(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await clock.advance(seconds=21)
    await engine.run_timers("attempt")  # type: ignore[arg-type]


CLEAN: dict[str, Ending] = {
    "complete": lambda engine, clock, held: engine.complete(held.handle, b"done"),
    "fail": lambda engine, clock, held: engine.fail(held.handle, "boom", failure_class="permanent"),
    "retry": lambda engine, clock, held: engine.fail(held.handle, "boom"),
    "delay": lambda engine, clock, held: engine.delay(held.handle, timedelta(minutes=1)),
    "release": lambda engine, clock, held: engine.release(held.handle),
    "wait_children": lambda engine, clock, held: engine.wait_children(held.handle),
    "stop_changed": lambda engine, clock, held: engine.stop_changed(held.handle, detail="x", digest="d"),
    "suspend": lambda engine, clock, held: engine.suspend(
        held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k")
    ),
}
LOST: dict[str, Ending] = {
    "expire": _expire,
    "revoke": lambda engine, clock, held: engine.revoke_lease(held.execution_id),
    "cancel": lambda engine, clock, held: engine.cancel(Operator(held.execution_id), "no"),
    "time out": _time_out,
}
POLICY = ExecutionPolicy(
    retry_policy=RETRY.retry_policy, timeout_policy=TimeoutPolicy(attempt_timeout=timedelta(seconds=20))
)


@pytest.mark.parametrize("ending", CLEAN)
async def test_a_clean_end_gives_back_what_was_not_settled(engine: ff.Engine, clock: Clock, ending: str) -> None:
    budget = await make(engine, {"t": 20})
    held = await started(engine, policy=POLICY)
    settled = await hold(engine, held, budget)
    await engine.settle_usage(held.handle, settled.reservation_id, {"t": 5})
    await hold(engine, held, budget)
    await CLEAN[ending](engine, clock, held)
    assert await numbers(engine, budget) == ({"t": 5}, {}, {})


@pytest.mark.parametrize("on_lost", ["charge", "release"])
@pytest.mark.parametrize("ending", LOST)
async def test_a_lost_lease_charges_what_was_held_unless_told_otherwise(
    engine: ff.Engine, clock: Clock, ending: str, on_lost: OnLost
) -> None:
    budget = await make(engine, {"t": 20})
    held = await started(engine, policy=POLICY)
    await hold(engine, held, budget, on_lost=on_lost)
    await LOST[ending](engine, clock, held)
    expected = {"t": 6} if on_lost == "charge" else {}
    assert await numbers(engine, budget) == (expected, {}, {})
    usage = await engine.read_usage(held.execution_id)
    assert [one.usage for one in usage] == ([{"t": 6}] if on_lost == "charge" else [])


@pytest.mark.parametrize("ending", [*CLEAN, *LOST])
async def test_an_end_does_not_wait_for_a_locked_budget(
    engine: ff.Engine, clock: Clock, database: str, ending: str
) -> None:
    budget = await make(engine, {"t": 20})
    held = await started(engine, policy=POLICY)
    await hold(engine, held, budget)
    async with locked(database):
        await {**CLEAN, **LOST}[ending](engine, clock, held)
        assert (await status(engine, budget)).held == {"t": 6}
        assert (await engine.collect_reservations(marked=True)).handled == 0
    assert (await engine.collect_reservations(marked=True)).handled == 1
    assert await numbers(engine, budget) == ({} if ending in CLEAN else {"t": 6}, {}, {})


async def test_a_call_that_needs_the_room_takes_it_from_leases_that_have_ended(
    engine: ff.Engine, clock: Clock, database: str
) -> None:
    budget = await make(engine, {"t": 10})
    first = await started(engine)
    await hold(engine, first, budget)
    async with locked(database):
        await engine.complete(first.handle, b"done")
    assert (await status(engine, budget)).held == {"t": 6}
    second = await started(engine)
    assert isinstance(await engine.reserve_usage(second.handle, {"t": 10}, budget), Reserved)
    third = await started(engine)
    await clock.advance(minutes=10)  # the lease of the second has expired, and nothing has marked it
    fourth = await started(engine)
    assert isinstance(await engine.reserve_usage(fourth.handle, {"t": 1}, budget), HardBreach)
    assert await numbers(engine, budget) == ({"t": 10}, {}, {})
    with pytest.raises(LeaseLost):
        await engine.report_usage(third.handle, {"t": 1}, budget)


# ---- handlers that are run again


async def test_a_handler_run_again_holds_again_what_was_given_back(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    held = await started(engine)
    first = await hold(engine, held, budget, place=PLACE)
    assert await hold(engine, held, budget, place=PLACE) == first
    await engine.release(held.handle)
    again = await claim_one(engine)
    second = await hold(engine, again, budget, place=PLACE)
    assert (second.state, second.reservation_id != first.reservation_id) == ("held", True)
    assert await numbers(engine, budget) == ({}, {"t": 6}, {})


@each(("settled", "used"), [(2, 2), (6, 6), (9, 9)])
async def test_a_settlement_takes_the_place_of_the_charge(
    engine: ff.Engine, clock: Clock, settled: int, used: int
) -> None:
    budget = await make(engine, {"t": 10})
    held = await started(engine)
    first = await hold(engine, held, budget, place=PLACE)
    await clock.advance(minutes=10)
    again = await reclaimed(engine, held)
    assert await numbers(engine, budget) == ({"t": 6}, {}, {})
    found = await hold(engine, again, budget, place=PLACE)
    assert (found.reservation_id, found.state, found.amounts) == (first.reservation_id, "charged", {"t": 6})
    assert isinstance(await engine.settle_usage(again.handle, found.reservation_id, {"t": settled}), UsageOk)
    assert await numbers(engine, budget) == ({"t": used}, {}, {})
    assert [one.usage for one in await engine.read_usage(held.execution_id)] == [{"t": used}]
    await engine.complete(again.handle, b"")


async def test_a_charge_of_an_earlier_period_stays_there(engine: ff.Engine, clock: Clock) -> None:
    budget = await make(engine, {"t": 10})
    held = await started(engine)
    reserved = await hold(engine, held, budget, place=PLACE)
    await clock.advance(minutes=10)
    again = await reclaimed(engine, held)
    await engine.reset_budget(budget)
    await engine.settle_usage(again.handle, reserved.reservation_id, {"t": 8})
    assert await numbers(engine, budget) == ({"t": 2}, {}, {})


async def test_less_than_the_charge_of_an_earlier_period_takes_nothing_off_this_one(
    engine: ff.Engine, clock: Clock
) -> None:
    budget = await make(engine, {"t": 10})
    held = await started(engine)
    reserved = await hold(engine, held, budget, place=PLACE)
    await clock.advance(minutes=10)
    again = await reclaimed(engine, held)
    await engine.reset_budget(budget)
    await admin(engine, budget, t=5)
    await engine.settle_usage(again.handle, reserved.reservation_id, {"t": 2})
    assert await numbers(engine, budget) == ({"t": 5}, {}, {})


async def test_a_settled_reservation_is_found_settled(engine: ff.Engine, clock: Clock) -> None:
    budget = await make(engine, {"t": 10})
    held = await started(engine)
    reserved = await hold(engine, held, budget, place=PLACE)
    await engine.settle_usage(held.handle, reserved.reservation_id, {"t": 4})
    steps = await engine.read_steps([held.execution_id])
    assert [(step.kind, step.name, step.n) for step in steps] == [("usage", *PLACE)]
    await clock.advance(hours=25)
    await engine.sweep(limit=100)
    again = await reclaimed(engine, held)
    found = await hold(engine, again, budget, place=PLACE)
    assert found.state == "settled"
    assert await numbers(engine, budget) == ({"t": 4}, {}, {})


async def test_all_kinds_of_calls_share_one(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 20})
    held = await started(engine)
    one, two = await hold(engine, held, budget), await hold(engine, held, budget)
    answers = await engine.use_budgets(
        [
            Settle(authority=held.handle, reservation_id=one.reservation_id, usage=Usage(custom={"t": 1})),
            Report(authority=held.handle, usage=Usage(custom={"t": 2}), budgets=(budget,)),
            CancelReservation(authority=held.handle, reservation_id=two.reservation_id),
            Reserve(authority=held.handle, usage=Usage(custom={"t": 17}), budgets=(budget,)),
            Settle(authority=held.handle, reservation_id=one.reservation_id, usage=Usage(custom={"t": 1})),
            Reserve(authority=held.handle, usage=Usage(custom={"t": 1}), budgets=(budget,)),
        ]
    )
    assert [type(answer).__name__ for answer in answers] == [
        "UsageOk", "UsageOk", "ReservationCancelled", "Reserved", "AlreadyApplied", "HardBreach",
    ]  # fmt: skip
    assert await numbers(engine, budget) == ({"t": 3}, {"t": 17}, {})


async def test_a_reservation_has_no_key(engine: ff.Engine) -> None:
    held = await started(engine)
    with pytest.raises(InvalidInput) as caught:
        await engine.reserve_usage(held.handle, Usage(custom={"t": 1}, dedup_key="k"), await make(engine))
    assert caught.value.field == "dedup_key"


async def test_a_reservation_of_nothing_holds_nothing(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 20})
    held = await started(engine)
    reserved = await engine.reserve_usage(held.handle, {}, budget)
    assert isinstance(reserved, Reserved)
    assert await numbers(engine, budget) == ({}, {}, {})
    await engine.settle_usage(held.handle, reserved.reservation_id, {"t": 3})
    assert await numbers(engine, budget) == ({"t": 3}, {}, {})
    await engine.complete(held.handle, b"")


async def test_a_purge_leaves_what_was_used(engine: ff.Engine, clock: Clock) -> None:
    budget = await make(engine, {"t": 20})
    held = await started(engine)
    await hold(engine, held, budget, place=PLACE)
    await engine.record_spend(budget, held.execution_id, {"t": 3})
    await clock.advance(minutes=10)
    again = await reclaimed(engine, held)
    await engine.complete(again.handle, b"")
    await clock.advance(days=30)
    await engine.run_timers("retention")  # type: ignore[arg-type]
    assert await engine.read_usage(held.execution_id) == []
    assert (await engine.list_spend(budget)).items in ((), [])
    assert await numbers(engine, budget) == ({"t": 9}, {}, {})


async def test_a_lost_lease_stays_lost_when_a_later_one_ends_cleanly(
    engine: ff.Engine, clock: Clock, database: str
) -> None:
    budget = await make(engine, {"t": 20})
    first = await started(engine)
    await hold(engine, first, budget)
    await clock.advance(minutes=10)
    async with locked(database):  # the end of the first lease can only mark what it held
        second = await reclaimed(engine, first)
    assert await numbers(engine, budget) == ({}, {"t": 6}, {})
    await engine.complete(second.handle, b"done")
    assert await numbers(engine, budget) == ({"t": 6}, {}, {})


async def test_a_lost_lease_stays_lost_when_a_later_one_ends_at_a_locked_budget(
    engine: ff.Engine, clock: Clock, database: str
) -> None:
    budget = await make(engine, {"t": 20})
    first = await started(engine)
    await hold(engine, first, budget)
    await clock.advance(minutes=10)
    async with locked(database):
        second = await reclaimed(engine, first)
        await engine.complete(second.handle, b"done")
    await engine.collect_reservations(marked=True)
    assert await numbers(engine, budget) == ({"t": 6}, {}, {})


async def test_a_key_counts_in_a_call_that_takes_room_from_an_ended_lease(
    engine: ff.Engine, clock: Clock, database: str
) -> None:
    budget = await make(engine, {"t": 10})
    first = await started(engine)
    await hold(engine, first, budget)
    async with locked(database):
        await engine.complete(first.handle, b"done")
    second = await started(engine)
    answers = await engine.report_usage_many(
        [
            Report(authority=second.handle, usage=Usage(custom={"t": 1}, dedup_key="k"), budgets=(budget,)),
            Report(authority=second.handle, usage=Usage(custom={"t": 8}), budgets=(budget,)),
        ]
    )
    assert [type(answer).__name__ for answer in answers] == ["UsageOk", "UsageOk"]
    assert await numbers(engine, budget) == ({"t": 9}, {}, {})
    again = await engine.report_usage(second.handle, Usage(custom={"t": 1}, dedup_key="k"), budget)
    assert isinstance(again, AlreadyApplied)


async def test_a_call_takes_room_in_all_of_its_budgets_from_leases_that_have_ended(
    engine: ff.Engine, database: str
) -> None:
    budgets = [await make(engine, {"t": 10}) for _ in range(2)]
    first = await started(engine)
    for budget in budgets:
        await hold(engine, first, budget)
    async with locked(database):
        await engine.complete(first.handle, b"done")
    second = await started(engine)
    assert isinstance(await engine.report_usage(second.handle, {"t": 10}, budgets), UsageOk)
    assert [await numbers(engine, budget) for budget in budgets] == [({"t": 10}, {}, {})] * 2


async def test_what_was_held_can_be_settled_however_much_it_is(engine: ff.Engine) -> None:
    budget = await make(engine)
    held = await started(engine)
    await admin(engine, budget, t=2**62)
    reserved = await hold(engine, held, budget, amounts={"t": 2**62 - 1})
    assert isinstance(await engine.settle_usage(held.handle, reserved.reservation_id, {"t": 2**62 - 1}), UsageOk)
    assert await numbers(engine, budget) == ({"t": MAX_AMOUNT}, {}, {})
    small = await hold(engine, held, budget, amounts={"t": 0})
    with pytest.raises(InvalidInput):
        await engine.settle_usage(held.handle, small.reservation_id, {"t": 1})
    assert await numbers(engine, budget) == ({"t": MAX_AMOUNT}, {}, {})
