"""Two calls on one budget at the same time: the outcome is that of one of the two orders, and no limit is passed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.errors import LeaseLost
from flowfabric.values.attempt import Claimed
from flowfabric.values.budget import AlreadyApplied, HardBreach, Reserved, Usage, UsageOk
from flowfabric.values.ids import BudgetId, ReservationId
from flowfabric.values.policies import ExecutionPolicy
from tests import sampling
from tests.interleave import PATIENCE, Party, Stage, waiting
from tests.sql.test_budgets import admin, make, status
from tests.support import WORKER, claim_one, started, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")
Call = Callable[[Party, Claimed, BudgetId], Awaitable[Any]]
ENDINGS = pytest.mark.parametrize("ending", ["commit", "rollback"])

# Each takes 6 of 10, or gives room; the budget has 10 and nothing is used.
CALLS: dict[str, Call] = {
    "report": lambda party, held, budget: party.report_usage(held.handle, {"t": 6}, budget),
    "admin": lambda party, held, budget: admin(party, budget, t=6),
    "spend": lambda party, held, budget: party.record_spend(budget, held.execution_id, {"t": 6}),
    "reserve": lambda party, held, budget: party.reserve_usage(held.handle, {"t": 6}, budget),
    "raise": lambda party, held, budget: party.update_budget(budget, raise_by={"t": 10}),
    "lower": lambda party, held, budget: party.update_budget(budget, hard={"t": 5}),
    "reset": lambda party, held, budget: party.reset_budget(budget),
}
TAKES = ("report", "admin", "spend", "reserve")
PAIRS = [(first, second) for first in CALLS for second in TAKES]


@ENDINGS
@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_the_second_call_waits_and_sees_what_the_first_did(
    stage: Stage, first: str, second: str, ending: str
) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    budget = await make(one, {"t": 10})
    mine, other = await started(one), await started(one)
    await one.begin()
    await CALLS[first](one, mine, budget)
    task = await waiting(stage.watch, two, CALLS[second](two, other, budget), behind=one)
    await one.end(ending)
    answer = await asyncio.wait_for(task, PATIENCE)
    denied = ending == "commit" and first in (*TAKES, "lower")
    assert isinstance(answer, HardBreach) is denied, answer
    found = await status(two, budget)
    taken = found.usage.get("t", 0) + found.held.get("t", 0)
    assert taken == (0 if denied and first == "lower" else 6)
    await stage.audit()


@pytest.mark.parametrize("call", CALLS)
async def test_two_budgets_never_wait_for_each_other(stage: Stage, call: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    budgets = [await make(one, {"t": 10}) for _ in range(2)]
    mine, other = await started(one), await started(one)
    await one.begin()
    await CALLS[call](one, mine, budgets[0])
    for each in CALLS:
        assert not isinstance(await asyncio.wait_for(CALLS[each](two, other, budgets[1]), PATIENCE), Exception)
        await two.reset_budget(budgets[1])
    await one.commit()
    await stage.audit()


@ENDINGS
@pytest.mark.parametrize("second", ["raise", "lower", "reset"])
@pytest.mark.parametrize("first", TAKES)
async def test_a_change_of_the_budget_waits_for_what_uses_it(
    stage: Stage, first: str, second: str, ending: str
) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    budget = await make(one, {"t": 10})
    mine, other = await started(one), await started(one)
    await one.begin()
    await CALLS[first](one, mine, budget)
    task = await waiting(stage.watch, two, CALLS[second](two, other, budget), behind=one)
    await one.end(ending)
    answer = await asyncio.wait_for(task, PATIENCE)
    assert not isinstance(answer, Exception), answer
    found = await status(two, budget)
    taken = 6 if ending == "commit" else 0
    held = taken if first == "reserve" else 0
    used = 0 if second == "reset" else taken - held
    assert (found.usage.get("t", 0), found.held.get("t", 0)) == (used, held)
    assert found.hard_limits == {"t": {"raise": 20, "lower": 5, "reset": 10}[second]}
    assert found.is_exhausted is (used == 6 and second == "lower")
    await stage.audit()


KEYED: dict[str, Call] = {
    "report": lambda party, held, budget: party.report_usage(
        held.handle, Usage(custom={"t": 6}, dedup_key="k"), budget
    ),
    "admin": lambda party, held, budget: party.report_usage_admin(
        budget, dimensions=["t"], deltas=[6], dedup_key="k"
    ),
    "spend": lambda party, held, budget: party.record_spend(
        budget, held.execution_id, {"t": 6}, idempotency_key="k"
    ),
}  # fmt: skip


@ENDINGS
@pytest.mark.parametrize("second", KEYED)
@pytest.mark.parametrize("first", KEYED)
async def test_of_two_calls_with_one_key_one_counts(stage: Stage, first: str, second: str, ending: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    budget = await make(one, {"t": 100})
    mine, other = await started(one), await started(one)
    await one.begin()
    assert isinstance(await KEYED[first](one, mine, budget), UsageOk)
    task = await waiting(stage.watch, two, KEYED[second](two, other, budget), behind=one)
    await one.end(ending)
    answer = await asyncio.wait_for(task, PATIENCE)
    assert isinstance(answer, AlreadyApplied if ending == "commit" else UsageOk)
    assert (await status(two, budget)).usage == {"t": 6}
    await stage.audit()


LATE: dict[str, Call] = {
    "report": lambda party, held, budget: party.report_usage(held.handle, {"t": 6}, budget),
    "place": lambda party, held, budget: party.report_usage(held.handle, {"t": 6}, budget, place=("a", 0)),
    "new dimension": lambda party, held, budget: party.report_usage(held.handle, {"new": 6}, budget),
    "reserve": lambda party, held, budget: party.reserve_usage(held.handle, {"t": 6}, budget),
    "pause": lambda party, held, budget: party.pause_for_budget(held.handle, {"t": 60}, budget),
}


@pytest.mark.parametrize("late", LATE)
async def test_a_lease_that_lapses_while_its_holder_waits_for_the_budget_uses_nothing(stage: Stage, late: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    budget = await make(one, {"t": 10})
    held = await started(two)
    await one.begin()
    await admin(one, budget, t=1)
    task = await waiting(stage.watch, two, LATE[late](two, held, budget), behind=one)
    await stage.clock.advance(minutes=10)
    await one.commit()
    assert isinstance(await asyncio.wait_for(task, PATIENCE), LeaseLost)
    found = await status(two, budget)
    assert (found.usage, found.held) == ({"t": 1}, {})
    await stage.audit()


@ENDINGS
async def test_a_report_and_the_expiry_of_its_lease(stage: Stage, ending: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    budget = await make(one, {"t": 10})
    held = await started(one, lease_ttl=timedelta(minutes=5))
    await one.reserve_usage(held.handle, {"t": 3}, budget)
    await one.begin()
    await one.revoke_lease(held.execution_id)
    task = await waiting(stage.watch, two, two.report_usage(held.handle, {"t": 6}, budget), behind=one)
    await one.end(ending)
    answer = await asyncio.wait_for(task, PATIENCE)
    found = await status(two, budget)
    if ending == "commit":
        assert isinstance(answer, LeaseLost)
        assert (found.usage, found.held) == ({"t": 3}, {})  # charged
    else:
        assert isinstance(answer, UsageOk)
        assert (found.usage, found.held) == ({"t": 6}, {"t": 3})
    await stage.audit()


@ENDINGS
async def test_the_lease_of_a_report_is_lost_after_it(stage: Stage, ending: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    budget = await make(one, {"t": 10})
    held = await started(one)
    await one.begin()
    await one.reserve_usage(held.handle, {"t": 6}, budget)
    task = await waiting(stage.watch, two, two.revoke_lease(held.execution_id), behind=one)
    await one.end(ending)
    await asyncio.wait_for(task, PATIENCE)
    found = await status(two, budget)
    assert (found.usage, found.held) == (({"t": 6}, {}) if ending == "commit" else ({}, {}))
    await stage.audit()


@ENDINGS
async def test_a_call_that_takes_room_waits_for_a_reservation_that_its_end_marks_and_charges_it_once(
    stage: Stage, ending: str
) -> None:
    await stage.empty()
    one, two, three = await stage.company(3)
    budget = await make(one, {"t": 10})
    ended, mine = await started(two), await started(three, lease_ttl=timedelta(hours=1))
    await two.reserve_usage(ended.handle, {"t": 6}, budget)
    await one.begin()
    await admin(one, budget, t=1)
    await stage.clock.advance(minutes=10)
    await two.begin()
    await two.mark_lease_expired_if_due(ended.execution_id)  # finds the budget locked: it moves the row
    await one.commit()
    report = three.report_usage(mine.handle, {"t": 4}, budget)
    task = await waiting(stage.watch, three, report, behind=two)
    await two.end(ending)
    assert isinstance(await asyncio.wait_for(task, PATIENCE), HardBreach)
    found = await status(one, budget)
    assert (found.usage, found.held) == ({"t": 7}, {})
    assert (await one.collect_reservations(marked=True)).handled == 0
    await stage.audit()


OPENINGS: dict[str, Callable[[Party, BudgetId], Awaitable[Any]]] = {
    "reset": lambda party, budget: party.reset_budget(budget),
    "raise": lambda party, budget: party.update_budget(budget, raise_by={"t": 1}),
}


@ENDINGS
@pytest.mark.parametrize("opening", OPENINGS)
async def test_a_claim_that_denies_before_the_budget_opens(stage: Stage, opening: str, ending: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    budget = await make(one, {"t": 1})
    await admin(one, budget, t=1)
    ids = [await submit(one, policy=ExecutionPolicy(budget_ids=(budget,))) for _ in range(3)]
    await one.begin()
    assert await one.claim(**WORKER) is None
    task = await waiting(stage.watch, two, OPENINGS[opening](two, budget), behind=one)
    await one.end(ending)
    await asyncio.wait_for(task, PATIENCE)
    assert [(await claim_one(two)).execution_id for _ in ids] == ids
    await stage.audit()


@ENDINGS
@pytest.mark.parametrize("opening", OPENINGS)
async def test_a_budget_that_opens_before_a_claim_denies(stage: Stage, opening: str, ending: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    budget = await make(one, {"t": 1})
    await admin(one, budget, t=1)
    first = await submit(one, policy=ExecutionPolicy(budget_ids=(budget,)))
    await one.begin()
    await OPENINGS[opening](one, budget)
    task = await waiting(stage.watch, two, two.claim(**WORKER), behind=one)
    await one.end(ending)
    answer = await asyncio.wait_for(task, PATIENCE)
    if ending == "commit":
        answer = answer or await two.claim(**WORKER)
        assert answer is not None
        assert answer.execution_id == first
    else:
        assert answer is None
        await two.reset_budget(budget)
        assert (await claim_one(two)).execution_id == first
    await stage.audit()


@ENDINGS
@pytest.mark.parametrize("opening", OPENINGS)
async def test_a_pause_before_the_budget_opens(stage: Stage, opening: str, ending: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    budget = await make(one, {"t": 1})
    await submit(one, policy=ExecutionPolicy(budget_ids=(budget,)))
    held = await claim_one(one)
    await one.report_usage(held.handle, {"t": 1})
    await one.begin()
    assert (await one.pause_for_budget(held.handle, {"t": 1})).paused
    task = await waiting(stage.watch, two, OPENINGS[opening](two, budget), behind=one)
    await one.end(ending)
    await asyncio.wait_for(task, PATIENCE)
    again = await two.claim(**WORKER)
    assert (again is not None) is (ending == "commit")
    await stage.audit()


@ENDINGS
async def test_a_pause_after_the_budget_opens(stage: Stage, ending: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    budget = await make(one, {"t": 1})
    await submit(one, policy=ExecutionPolicy(budget_ids=(budget,)))
    held = await claim_one(one)
    await one.report_usage(held.handle, {"t": 1})
    await one.begin()
    await one.reset_budget(budget)
    task = await waiting(stage.watch, two, two.pause_for_budget(held.handle, {"t": 1}), behind=one)
    await one.end(ending)
    answer = await asyncio.wait_for(task, PATIENCE)
    assert answer.paused is (ending == "rollback")
    await stage.audit()


async def test_budgets_in_opposite_order_do_not_lock_each_other_out(stage: Stage) -> None:
    await stage.empty()
    parties = await stage.company(4)
    budgets = [await make(parties[0], {"t": 10**9}) for _ in range(6)]
    unknown = [BudgetId(ff.values.ids.mint_uuid()) for _ in range(2)]
    held = [await started(parties[0]) for _ in parties]
    dice = random.Random(4)

    async def act(party: Party, mine: Claimed) -> None:
        for _ in range(sampling.examples(300, 40)):
            chosen = dice.sample([*budgets, *unknown], 4)
            assert isinstance(await party.report_usage(mine.handle, {"t": 1}, chosen), UsageOk)

    await asyncio.wait_for(
        asyncio.gather(*(act(party, mine) for party, mine in zip(parties, held, strict=True))), PATIENCE
    )
    await stage.audit()


async def test_sixteen_connections_never_pass_the_limit_by_one_token(stage: Stage) -> None:
    await stage.empty()
    parties = await stage.company(17)
    watch, *actors = parties
    budget = await make(watch, {"t": 600})
    held = [await started(watch, lease_ttl=timedelta(hours=1)) for _ in actors]
    counted = 0
    denied = 0
    done = False

    async def act(number: int, party: Party, mine: Claimed) -> None:
        nonlocal counted, denied
        dice = random.Random(number)
        open_ones: list[tuple[ReservationId, int]] = []
        for _ in range(sampling.examples(400, 40)):
            amount = dice.randint(1, 9)
            what = dice.choice(["report", "reserve", "settle", "cancel", "admin"])
            if what == "report":
                answer: Any = await party.report_usage(mine.handle, {"t": amount}, budget)
            elif what == "admin":
                answer = await admin(party, budget, t=amount)
            elif what == "reserve" or not open_ones:
                answer = await party.reserve_usage(mine.handle, {"t": amount}, budget)
                if isinstance(answer, Reserved):
                    open_ones.append((answer.reservation_id, amount))
                denied += isinstance(answer, HardBreach)
                continue
            else:
                reservation, amount = open_ones.pop()
                if what == "cancel":
                    await party.cancel_reservation(mine.handle, reservation)
                    continue
                spent = dice.randint(0, amount + 2)
                answer = await party.settle_usage(mine.handle, reservation, {"t": spent})
                counted += spent - (answer.overrun if isinstance(answer, HardBreach) else 0)
                continue
            denied += isinstance(answer, HardBreach)
            counted += amount if isinstance(answer, UsageOk) else 0
        for reservation, _ in open_ones:
            await party.cancel_reservation(mine.handle, reservation)

    async def look() -> int:
        looks = 0
        while not done:
            found = await status(watch, budget)
            assert found.usage.get("t", 0) + found.held.get("t", 0) <= 600
            looks += 1
        return looks

    looking = asyncio.ensure_future(look())
    await asyncio.gather(*(act(number, *pair) for number, pair in enumerate(zip(actors, held, strict=True))))
    done = True
    assert await looking > 10
    found = await status(watch, budget)
    assert (found.usage, found.held) == ({"t": counted}, {})
    assert found.breach_count >= denied > 0
    await stage.audit()
