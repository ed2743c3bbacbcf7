"""Budgets in the database: definition, reports, limits, keys, the ledger, resets, lists."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import Contention, InvalidInput, LeaseLost, NotFound
from flowfabric.values.attempt import Claimed
from flowfabric.values.budget import (
    MAX_AMOUNT,
    AlreadyApplied,
    BudgetCreated,
    BudgetExists,
    BudgetStatus,
    HardBreach,
    Report,
    SoftBreach,
    Usage,
    UsageOk,
    budget_id_of,
)
from flowfabric.values.ids import BudgetId, ExecutionId, mint_uuid
from flowfabric.values.policies import ExecutionPolicy
from tests.each import each
from tests.support import OTHER, Clock, claim_one, started, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")
DAY = timedelta(days=1)


def new_budget_id() -> BudgetId:
    return BudgetId(mint_uuid())


async def make(
    engine: ff.Engine, hard: dict[str, int] | None = None, soft: dict[str, int] | None = None, **fields: Any
) -> BudgetId:
    """A budget with these limits."""
    hard, soft = hard or {}, soft or {}
    dimensions = sorted({*hard, *soft})
    made = await engine.create_budget(
        fields.pop("budget_id", None) or new_budget_id(),
        dimensions=dimensions,
        hard_limits=[hard.get(one, 0) for one in dimensions],
        soft_limits=[soft.get(one, 0) for one in dimensions],
        **fields,
    )
    assert isinstance(made, BudgetCreated)
    return made.budget_id


async def admin(engine: ff.Engine, budget: BudgetId, key: str | None = None, **amounts: int) -> Any:
    return await engine.report_usage_admin(
        budget, dimensions=list(amounts), deltas=list(amounts.values()), dedup_key=key
    )


async def status(engine: ff.Engine, budget: BudgetId) -> BudgetStatus:
    return await engine.get_budget_status(budget)


async def reclaimed(engine: ff.Engine, held: Claimed) -> Claimed:
    """The same execution, claimed by another worker once its lease has expired."""
    await engine.mark_lease_expired_if_due(held.execution_id)
    return await claim_one(engine, **OTHER)


# ---- the definition


async def test_a_new_budget_has_its_definition_and_no_usage(engine: ff.Engine) -> None:
    made = await engine.create_budget(
        name="research",
        scope_type="tenant",
        scope_id="acme",
        enforcement_mode="advisory",
        on_hard_limit="fail",
        on_soft_limit="warn",
        reset_interval=DAY,
        dimensions=["tokens", "cost"],
        hard_limits=[100, 0],
        soft_limits=[80, 5],
    )
    assert made == BudgetCreated(budget_id_of("research"))
    found = await status(engine, made.budget_id)
    assert (found.name, found.scope_type, found.scope_id) == ("research", "tenant", "acme")
    assert (found.enforcement_mode, found.on_hard_limit, found.on_soft_limit) == ("warn", "fail", "warn")
    assert found.hard_limits == {"tokens": 100, "cost": 0}
    assert found.soft_limits == {"tokens": 80, "cost": 5}
    assert (found.usage, found.held, found.breach_count, found.soft_breach_count) == ({}, {}, 0, 0)
    assert (found.reset_interval, found.next_reset_at) == (DAY, found.created_at + DAY)
    assert found.exhausted_by is None


async def test_an_existing_id_or_name_changes_nothing(engine: ff.Engine) -> None:
    budget = await make(engine, {"tokens": 5}, name="one")
    again = await engine.create_budget(budget, name="other", dimensions=["x"], hard_limits=[1], soft_limits=[0])
    assert again == BudgetExists(budget)
    named = await engine.create_budget(new_budget_id(), name="one", enforcement_mode="warn")
    assert named == BudgetExists(budget)
    found = await status(engine, budget)
    assert (found.name, found.hard_limits, found.enforcement_mode) == ("one", {"tokens": 5}, "strict")
    assert (await engine.list_budgets()).items == (found,) or list((await engine.list_budgets()).items) == [found]


@each(
    ("given", "stored"),
    [("strict", "strict"), ("hard", "strict"), ("", "strict"), ("warn", "warn"), ("advisory", "warn")],
)
async def test_modes_have_aliases(engine: ff.Engine, given: str, stored: str) -> None:
    assert (await status(engine, await make(engine, enforcement_mode=given))).enforcement_mode == stored


async def test_usage_of_an_unknown_budget_counts_once_it_is_created(engine: ff.Engine) -> None:
    budget = new_budget_id()
    assert isinstance(await admin(engine, budget, tokens=150), UsageOk)
    with pytest.raises(NotFound):
        await status(engine, budget)
    numbers = await engine.read_budget_usage_and_limits(budget)
    assert (numbers.limits, numbers.usage) == ({}, {})
    await make(engine, {"tokens": 100}, budget_id=budget)
    found = await status(engine, budget)
    assert (found.usage, found.exhausted_by) == ({"tokens": 150}, "tokens")
    assert await admin(engine, budget, tokens=1) == HardBreach(
        budget_id=budget, dimension="tokens", current_usage=150, hard_limit=100, requested=1
    )


async def test_limits_and_usage_are_read_as_text_and_numbers(engine: ff.Engine) -> None:
    budget = await make(engine, {"tokens": 10}, {"tokens": 8, "cost": 2})
    await admin(engine, budget, tokens=3, other=1)
    numbers = await engine.read_budget_usage_and_limits(budget)
    assert numbers.limits == {"hard:tokens": "10", "soft:tokens": "8", "soft:cost": "2"}
    assert numbers.usage == {"tokens": 3, "other": 1}
    limitless = await make(engine)
    await admin(engine, limitless, tokens=3)
    numbers = await engine.read_budget_usage_and_limits(limitless)
    assert (numbers.limits, numbers.usage) == ({}, {})


# ---- reports


async def test_a13_a_report_that_does_not_fit_counts_nothing(engine: ff.Engine) -> None:
    budget = await make(engine, {"tokens": 100})
    assert await admin(engine, budget, tokens=90) == UsageOk(remaining={"tokens": 10})
    assert await admin(engine, budget, tokens=20) == HardBreach(
        budget_id=budget, dimension="tokens", current_usage=90, hard_limit=100, requested=20
    )
    found = await status(engine, budget)
    assert (found.usage, found.breach_count, found.last_breach_dim) == ({"tokens": 90}, 1, "tokens")
    assert found.last_breach_at is not None


async def test_a14_a_soft_limit_is_reported_above_it_and_counted(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10}, {"t": 8})
    answers = [await admin(engine, budget, t=amount) for amount in (5, 3, 1)]
    assert answers == [
        UsageOk(remaining={"t": 5}),
        UsageOk(remaining={"t": 2}),
        SoftBreach(budget_id=budget, dimension="t", current_usage=9, soft_limit=8, remaining={"t": 1}),
    ]
    assert (await status(engine, budget)).soft_breach_count == 1
    assert isinstance(await admin(engine, budget, t=0), SoftBreach)  # no latch
    assert (await status(engine, budget)).soft_breach_count == 2


async def test_each_budget_whose_soft_limit_a_call_passes_counts_it_once(engine: ff.Engine) -> None:
    budgets = sorted([await make(engine, {}, {"t": 1, "u": 1}) for _ in range(2)] + [await make(engine, {}, {"t": 9})])
    held = await started(engine)
    answer = await engine.report_usage(held.handle, {"t": 5, "u": 5}, budgets)
    assert isinstance(answer, SoftBreach)
    assert answer.dimension == "t"
    assert sorted([(await status(engine, one)).soft_breach_count for one in budgets]) == [0, 1, 1]


async def test_a15_one_dimension_that_does_not_fit_holds_all_back(engine: ff.Engine) -> None:
    budget = await make(engine, {"b": 5})
    assert isinstance(await admin(engine, budget, a=3, b=6), HardBreach)
    assert (await status(engine, budget)).usage == {}  # not even zeros


async def test_a16_a_key_counts_once_within_24_hours(engine: ff.Engine, clock: Clock) -> None:
    budget = await make(engine, {"t": 100})
    assert isinstance(await admin(engine, budget, "k", t=5), UsageOk)
    assert isinstance(await admin(engine, budget, "k", t=70), AlreadyApplied)
    await clock.advance(hours=23, minutes=59)
    assert isinstance(await admin(engine, budget, "k", t=5), AlreadyApplied)
    await clock.advance(minutes=2)
    assert isinstance(await admin(engine, budget, "k", t=5), UsageOk)
    assert (await status(engine, budget)).usage == {"t": 10}
    assert isinstance(await admin(engine, budget, "", t=5), UsageOk)
    assert isinstance(await admin(engine, budget, "", t=5), UsageOk)


async def test_a17_a_breach_does_not_use_the_key_up(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    await admin(engine, budget, t=10)
    assert isinstance(await admin(engine, budget, "k", t=5), HardBreach)
    await engine.reset_budget(budget)
    assert isinstance(await admin(engine, budget, "k", t=5), UsageOk)
    assert isinstance(await admin(engine, budget, "k", t=5), AlreadyApplied)
    await engine.reset_budget(budget)
    assert isinstance(await admin(engine, budget, "k", t=5), AlreadyApplied)  # keys survive a reset


async def test_a18_a_key_belongs_to_a_budget(engine: ff.Engine) -> None:
    one, two = await make(engine, {"t": 10}), await make(engine, {"t": 10})
    assert isinstance(await admin(engine, one, "k", t=5), UsageOk)
    assert isinstance(await admin(engine, two, "k", t=5), UsageOk)


async def test_a_key_is_shared_by_all_kinds_of_reports(engine: ff.Engine) -> None:
    budget = await make(engine)
    held = await started(engine)
    await admin(engine, budget, "k", t=5)
    assert isinstance(
        await engine.record_spend(budget, held.execution_id, {"t": 5}, idempotency_key="k"), AlreadyApplied
    )
    usage = Usage(custom={"t": 5}, dedup_key="k")
    assert isinstance(await engine.report_usage(held.handle, usage, budget), AlreadyApplied)


async def test_a19_a_worker_without_its_lease_cannot_spend(engine: ff.Engine, clock: Clock) -> None:
    budget = await make(engine, {"t": 100})
    held = await started(engine)
    keyed = Usage(custom={"t": 5}, dedup_key="k")
    assert isinstance(await engine.report_usage(held.handle, keyed, budget), UsageOk)
    await clock.advance(minutes=10)
    again = await reclaimed(engine, held)
    with pytest.raises(LeaseLost) as caught:
        await engine.report_usage(held.handle, {"t": 1}, budget)
    assert caught.value.kind == "stale_lease"
    assert isinstance(await engine.report_usage(held.handle, keyed, budget), AlreadyApplied)  # keys come first
    assert (await status(engine, budget)).usage == {"t": 5}
    assert isinstance(await engine.report_usage(again.handle, {"t": 1}, budget), UsageOk)


async def test_a20_a_release_takes_back_what_one_execution_spent(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 100})
    one, two = ExecutionId(mint_uuid()), ExecutionId(mint_uuid())
    for amount in (3, 7, 2):
        assert isinstance(await engine.record_spend(budget, one, {"t": amount}), UsageOk)
    await engine.record_spend(budget, two, {"t": 8})
    assert (await status(engine, budget)).usage == {"t": 20}
    entries = (await engine.list_spend(budget)).items
    assert {(entry.execution_id, entry.amount) for entry in entries} == {(one, 12), (two, 8)}
    for _ in range(2):
        await engine.release_budget(budget, one)
        assert (await status(engine, budget)).usage == {"t": 8}
    assert [entry.execution_id for entry in (await engine.list_spend(budget)).items] == [two]


async def test_a21_a_release_does_not_touch_a_later_period(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 100})
    one, two = ExecutionId(mint_uuid()), ExecutionId(mint_uuid())
    await engine.record_spend(budget, one, {"t": 40})
    await engine.reset_budget(budget)
    await engine.record_spend(budget, two, {"t": 10})
    await engine.release_budget(budget, one)
    assert (await status(engine, budget)).usage == {"t": 10}
    assert [entry.execution_id for entry in (await engine.list_spend(budget)).items] == [two]


async def test_a_spend_that_was_released_is_still_known_by_its_key(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 100})
    one = ExecutionId(mint_uuid())
    await engine.record_spend(budget, one, {"t": 40}, idempotency_key="k")
    await engine.release_budget(budget, one)
    again = await engine.record_spend(budget, one, {"t": 40}, idempotency_key="k")
    assert isinstance(again, AlreadyApplied)
    assert (await status(engine, budget)).usage == {"t": 0}


async def test_a22_a_dimension_listed_twice_counts_with_its_sum(engine: ff.Engine) -> None:
    budget = await make(engine, {"tokens": 100})
    answer = await engine.report_usage_admin(budget, dimensions=["tokens", "tokens"], deltas=[60, 60])
    assert isinstance(answer, HardBreach)
    assert answer.requested == 120
    assert (await status(engine, budget)).usage == {}
    await engine.report_usage_admin(budget, dimensions=["tokens", "tokens"], deltas=[40, 60])
    assert (await status(engine, budget)).usage == {"tokens": 100}


async def test_the_first_dimension_in_order_of_names_is_named(engine: ff.Engine) -> None:
    budget = await make(engine, {"b": 1, "a": 1, "Z": 1}, {"b": 1, "a": 1})
    assert (await admin(engine, budget, b=2, a=2)).dimension == "a"
    assert (await admin(engine, budget, b=2, Z=2)).dimension == "Z"


async def test_warnings_bind_nothing(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10}, enforcement_mode="warn")
    assert isinstance(await admin(engine, budget, t=10), UsageOk)
    assert await admin(engine, budget, t=5) == SoftBreach(
        budget_id=budget, dimension="t", current_usage=15, soft_limit=10
    )
    found = await status(engine, budget)
    assert (found.usage, found.exhausted_by, found.breach_count, found.soft_breach_count) == ({"t": 15}, None, 0, 1)


async def test_the_fixed_fields_of_a_report_are_dimensions(engine: ff.Engine) -> None:
    budget = await make(engine)
    held = await started(engine)
    usage = Usage(input_tokens=3, output_tokens=0, wall_ms=7, custom={"calls": 1})
    await engine.report_usage(held.handle, usage, budget)
    assert (await status(engine, budget)).usage == {"input_tokens": 3, "wall_ms": 7, "calls": 1}
    both = Usage(input_tokens=3, custom={"input_tokens": 1})
    with pytest.raises(InvalidInput) as caught:
        await engine.report_usage(held.handle, both, budget)
    assert caught.value.field == "usage.input_tokens"


async def test_a_sum_beyond_the_largest_amount_is_refused_by_name(engine: ff.Engine) -> None:
    budget = await make(engine)
    await admin(engine, budget, t=MAX_AMOUNT)
    with pytest.raises(InvalidInput) as caught:
        await admin(engine, budget, a=1, t=1)
    assert caught.value.field == "t"
    with pytest.raises(InvalidInput):
        await engine.report_usage_admin(budget, dimensions=["x", "x"], deltas=[MAX_AMOUNT, 1])
    assert (await status(engine, budget)).usage == {"t": MAX_AMOUNT}


async def test_several_budgets_count_all_or_none(engine: ff.Engine) -> None:
    wide, narrow = await make(engine, {"t": 100}), await make(engine, {"t": 10})
    held = await started(engine)
    assert await engine.report_usage(held.handle, {"t": 8}, [wide, narrow]) == UsageOk(remaining={"t": 2})
    answer = await engine.report_usage(held.handle, {"t": 3}, [narrow, wide])
    assert isinstance(answer, HardBreach)
    assert answer.budget_id == narrow
    assert [(await status(engine, one)).usage for one in (wide, narrow)] == [{"t": 8}, {"t": 8}]
    assert [(await status(engine, one)).breach_count for one in (wide, narrow)] == [0, 1]


async def test_a_report_without_budgets_means_those_of_the_execution(engine: ff.Engine) -> None:
    one, two = await make(engine), await make(engine)
    await submit(engine, policy=ExecutionPolicy(budget_ids=(one, two)))
    held = await claim_one(engine)
    await engine.report_usage(held.handle, {"t": 3})
    assert [(await status(engine, each_one)).usage for each_one in (one, two)] == [{"t": 3}] * 2
    await submit(engine)
    free = await claim_one(engine)
    assert await engine.report_usage(free.handle, {"t": 3}) == UsageOk()


async def test_many_reports_are_one_call_with_one_verdict_each(engine: ff.Engine, clock: Clock) -> None:
    budget, other = await make(engine, {"t": 10}), await make(engine)
    lost = await started(engine)
    await clock.advance(minutes=10)
    live = await reclaimed(engine, lost)
    answers = await engine.report_usage_many(
        [
            Report(authority=live.handle, usage=Usage(custom={"t": 6}, dedup_key="a"), budgets=(budget,)),
            Report(authority=live.handle, usage=Usage(custom={"t": 6}), budgets=(budget, other)),
            Report(authority=live.handle, usage=Usage(custom={"t": 6}, dedup_key="a"), budgets=(budget,)),
            Report(authority=lost.handle, usage=Usage(custom={"t": 1}), budgets=(budget,)),
            Report(authority=live.handle, usage=Usage(custom={"t": -1}), budgets=(budget,)),
            Report(authority=live.handle, usage=Usage(custom={"t": 4}), budgets=(budget, other)),
        ]
    )
    assert [type(answer).__name__ for answer in answers] == [
        "UsageOk", "HardBreach", "AlreadyApplied", "LeaseLost", "InvalidInput", "UsageOk",
    ]  # fmt: skip
    assert [(await status(engine, one)).usage for one in (budget, other)] == [{"t": 10}, {"t": 4}]


async def test_usage_outside_a_step_counts_once_per_generation(engine: ff.Engine, clock: Clock) -> None:
    budget = await make(engine, {"t": 10})
    held = await started(engine)
    first = await engine.report_usage(held.handle, {"t": 4}, budget, place=("usage", 0))
    assert first == UsageOk(remaining={"t": 6})
    again = await engine.report_usage(held.handle, {"t": 4}, budget, place=("usage", 0))
    assert again == AlreadyApplied(remaining={"t": 6})
    await engine.report_usage(held.handle, {"t": 1}, budget, place=("usage", 1))
    await clock.advance(days=30)
    later = await reclaimed(engine, held)
    assert isinstance(await engine.report_usage(later.handle, {"t": 4}, budget, place=("usage", 0)), AlreadyApplied)
    assert (await status(engine, budget)).usage == {"t": 5}
    steps = await engine.read_steps([held.execution_id])
    assert [(step.kind, step.name, step.n) for step in steps] == [("usage", "usage", 0), ("usage", "usage", 1)]


async def test_a_denied_report_outside_a_step_is_not_recorded(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 3})
    held = await started(engine)
    assert isinstance(await engine.report_usage(held.handle, {"t": 4}, budget, place=("u", 0)), HardBreach)
    await engine.update_budget(budget, raise_by={"t": 1})
    assert isinstance(await engine.report_usage(held.handle, {"t": 4}, budget, place=("u", 0)), UsageOk)


# ---- resets, changes, lists


async def test_a_reset_keeps_dimensions_and_counters(engine: ff.Engine, clock: Clock) -> None:
    budget = await make(engine, {"t": 10}, {"t": 5}, reset_interval=DAY)
    await admin(engine, budget, t=6, other=1)
    await admin(engine, budget, t=6)
    await clock.advance(hours=1)
    answer = await engine.reset_budget(budget)
    found = await status(engine, budget)
    assert found.usage == {"t": 0, "other": 0}
    assert (found.breach_count, found.soft_breach_count, found.reset_count, found.generation) == (1, 1, 1, 1)
    assert (found.last_breach_at, found.last_breach_dim) == (None, None)
    assert found.last_reset_at is not None
    assert answer.next_reset_at == found.next_reset_at == found.last_reset_at + DAY
    with pytest.raises(NotFound):
        await engine.reset_budget(new_budget_id())
    assert (await engine.reset_budget(await make(engine))).next_reset_at is None


async def test_a_raise_keeps_usage_and_a_limit_below_it_exhausts(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    await admin(engine, budget, t=10)
    assert (await status(engine, budget)).exhausted_by == "t"
    found = await engine.update_budget(budget, raise_by={"t": 5}, soft={"t": 12}, enforcement_mode="strict")
    assert (found.hard_limits, found.soft_limits, found.usage) == ({"t": 15}, {"t": 12}, {"t": 10})
    assert found.exhausted_by is None
    lowered = await engine.update_budget(budget, hard={"t": 4, "new": 1}, on_hard_limit="fail", reset_interval=DAY)
    assert (lowered.exhausted_by, lowered.usage) == ("t", {"t": 10})
    assert (lowered.hard_limits, lowered.on_hard_limit) == ({"new": 1, "t": 4}, "fail")
    assert lowered.next_reset_at is not None
    assert (await engine.update_budget(budget, enforcement_mode="warn")).exhausted_by is None


async def test_a_change_leaves_the_end_of_the_period_unless_it_changes_the_interval(
    engine: ff.Engine, clock: Clock
) -> None:
    budget = await make(engine, {"t": 10}, reset_interval=DAY)
    ends = (await status(engine, budget)).next_reset_at
    await clock.advance(hours=23)
    raised = await engine.update_budget(budget, raise_by={"t": 5}, reset_interval=DAY)
    assert (raised.reset_interval, raised.next_reset_at) == (DAY, ends)
    weekly = await engine.update_budget(budget, reset_interval=7 * DAY)
    assert weekly.next_reset_at == weekly.last_updated_at + 7 * DAY  # type: ignore[operator]  # it was changed
    assert (await engine.update_budget(budget, reset_interval=timedelta(0))).next_reset_at is None


@each("raise_by", [{"unlimited": 1}, {"t": -10}, {"t": MAX_AMOUNT}])
async def test_a_change_must_leave_a_limit(engine: ff.Engine, raise_by: dict[str, int]) -> None:
    budget = await make(engine, {"t": 10})
    before = await status(engine, budget)
    with pytest.raises(InvalidInput):
        await engine.update_budget(budget, raise_by=raise_by)
    assert await status(engine, budget) == before
    with pytest.raises(NotFound):
        await engine.update_budget(new_budget_id(), raise_by={"t": 1})


async def test_a_change_of_a_definition_that_was_changed_meanwhile_is_refused(engine: ff.Engine) -> None:
    budget = new_budget_id()
    await engine.create_budget(budget, dimensions=["t"], hard_limits=[10], soft_limits=[0])
    read = await engine.get_budget_status(budget)
    await engine.report_usage_admin(budget, dimensions=["t"], deltas=[1])
    await engine.reset_budget(budget)
    changed = await engine.update_budget(budget, raise_by={"t": 1}, defined_at=read.defined_at)  # only usage moved
    assert changed.defined_at > read.defined_at
    with pytest.raises(Contention, match="stale_definition"):
        await engine.update_budget(budget, raise_by={"t": 1}, defined_at=read.defined_at)
    assert (await engine.get_budget_status(budget)).hard_limits == {"t": 11}


async def test_lists_are_in_the_order_of_names(engine: ff.Engine) -> None:
    for name in ("team-b", "team-a", "other", "Team", "team-ä"):
        await make(engine, {"t": 1}, name=name, scope_type="x", scope_id=name[:4])
    await admin(engine, budget_id_of("nothing"), t=1)  # reported to, not created
    names = sorted(("team-b", "team-a", "other", "Team", "team-ä"))

    async def listed(**fields: Any) -> list[str]:
        found: list[str] = []
        cursor = None
        while True:
            page = await engine.list_budgets(cursor=cursor, limit=2, **fields)
            found += [one.name for one in page.items]
            cursor = page.next_cursor
            if cursor is None:
                return found

    assert await listed() == names
    assert await listed(prefix="team") == [name for name in names if name.startswith("team")]
    assert await listed(scope_type="x", scope_id="team") == [name for name in names if name.startswith("team")]
    assert await listed(scope_type="y") == []
    assert await listed(exhausted=True) == []
    budget = (await engine.find_budgets(["team-a", "unknown"]))["team-a"]
    await admin(engine, budget, t=1)
    assert await listed(exhausted=True) == ["team-a"]
    assert await listed(exhausted=False) == [name for name in names if name != "team-a"]


async def test_the_usage_of_an_execution_is_listed_by_budget(engine: ff.Engine) -> None:
    one, two = await make(engine, name="one"), await make(engine, name="two")
    held = await started(engine)
    await engine.report_usage(held.handle, {"t": 3, "c": 1}, [one, two])
    await engine.report_usage(held.handle, {"t": 2}, one)
    await engine.record_spend(two, held.execution_id, {"t": 10})
    await engine.reserve_usage(held.handle, {"t": 4}, one)
    usage = await engine.read_usage(held.execution_id)
    assert {each.budget_name: each.usage for each in usage} == {"one": {"t": 5, "c": 1}, "two": {"t": 13, "c": 1}}
    assert {each.budget_name: each.held for each in usage if each.held} == {"one": {"t": 4}}


# ---- the running numbers


async def test_old_numbers_are_removed(engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    budget = await make(engine)
    for _ in range(130):
        await engine.report_usage_admin(budget, dimensions=["t"], deltas=[1])
    assert (await status(engine, budget)).usage == {"t": 130}
    assert await sql.fetchval("select count(*) from flowfabric.budget_head") <= 64
