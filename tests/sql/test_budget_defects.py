"""What other engines got wrong with budgets, where no test of a rule shows it; and single reports beside batches."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.values.budget import AlreadyApplied, CancelReservation, HardBreach, Report, Usage, UsageOk
from flowfabric.values.ids import BudgetId, ReservationId, mint_uuid
from flowfabric.values.policies import ExecutionPolicy
from tests.each import each
from tests.interleave import PATIENCE, Stage, waiting
from tests.sql.test_budgets import admin, make, new_budget_id, status
from tests.support import OTHER, Clock, started, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_every_way_to_report_as_a_worker_needs_the_lease(engine: ff.Engine, clock: Clock) -> None:
    budget = await make(engine, {"t": 100})
    held = await started(engine, policy=ExecutionPolicy(budget_ids=(budget,)))
    await clock.advance(minutes=10)
    calls: dict[str, Any] = {
        "report": lambda: engine.report_usage(held.handle, {"t": 1}),
        "named": lambda: engine.report_usage(held.handle, {"t": 1}, budget),
        "placed": lambda: engine.report_usage(held.handle, {"t": 1}, place=("a", 0)),
        "reserve": lambda: engine.reserve_usage(held.handle, {"t": 1}),
    }
    for name, call in calls.items():
        with pytest.raises(ff.errors.LeaseLost):
            await call()
        assert (await status(engine, budget)).usage == {}, name
    verdicts = await engine.report_usage_many([Report(authority=held.handle, usage=Usage(custom={"t": 1}))] * 2)
    assert all(isinstance(one, ff.errors.LeaseLost) for one in verdicts)
    assert (await status(engine, budget)).usage == {}


async def test_reports_and_spends_repeat_with_the_same_word(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    held = await started(engine, policy=ExecutionPolicy(budget_ids=(budget,)))
    calls: dict[str, Any] = {
        "report": lambda key, n: engine.report_usage(held.handle, Usage(custom={"t": n}, dedup_key=key)),
        "admin": lambda key, n: admin(engine, budget, key, t=n),
        "spend": lambda key, n: engine.record_spend(budget, held.execution_id, {"t": n}, idempotency_key=key),
    }
    for name, call in calls.items():
        assert isinstance(await call(name, 11), HardBreach), name
        assert isinstance(await call(name, 11), HardBreach), f"{name}: a breach is not remembered"
        await engine.reset_budget(budget)
        assert isinstance(await call(name, 1), UsageOk), f"{name}: nothing was applied before"
        assert isinstance(await call(name, 1), AlreadyApplied), name
        assert (await status(engine, budget)).usage == {"t": 1}


async def test_keys_are_deleted_after_their_day(engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]) -> None:
    budget = await make(engine)
    await admin(engine, budget, "k", t=1)
    await clock.advance(hours=25)
    await engine.sweep()
    assert await sql.fetchval("select count(*) from flowfabric.budget_key") == 0


async def test_a_budget_is_used_up_to_its_limit_and_then_admits_nothing(engine: ff.Engine) -> None:
    budget = await make(engine, {"t": 10})
    policy = ExecutionPolicy(budget_ids=(budget,))
    held = await started(engine, policy=policy)
    assert isinstance(await engine.report_usage(held.handle, {"t": 9}), UsageOk)
    assert (await status(engine, budget)).exhausted_by is None
    await started(engine, policy=policy)
    assert await engine.report_usage(held.handle, {"t": 1}) == UsageOk(remaining={"t": 0})
    assert (await status(engine, budget)).exhausted_by == "t"
    await submit(engine, policy=policy)
    assert await engine.claim(**OTHER) is None
    before = await status(engine, budget)
    done = await engine.reconcile_budget_counters()
    assert (done.corrected, done.wrong) == (0, 0)
    assert await status(engine, budget) == before, "the reconciler marks nothing among the dimensions"


async def test_the_largest_amounts_stay_positive(engine: ff.Engine) -> None:
    budget = await make(engine)
    held = await started(engine, policy=ExecutionPolicy(budget_ids=(budget,)))
    await engine.report_usage(held.handle, {"t": 2**63 - 1})
    assert (await status(engine, budget)).usage == {"t": 2**63 - 1}
    with pytest.raises(InvalidInput):
        await engine.report_usage(held.handle, {"t": 1})
    with pytest.raises(InvalidInput):
        await engine.report_usage(held.handle, {"t": 2**63})
    assert (await status(engine, budget)).usage == {"t": 2**63 - 1}


async def test_a_reset_of_an_unknown_budget_makes_none(engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    with pytest.raises(NotFound):
        await engine.reset_budget(new_budget_id())
    assert await sql.fetchval("select count(*) from flowfabric.budget") == 0
    budget = await make(engine, {"t": 1})
    for _ in range(3):
        await engine.reset_budget(budget)
    assert (await status(engine, budget)).reset_count == 3


@each(
    ("field", "word"), [("enforcement_mode", "explode"), ("on_hard_limit", "suspend"), ("on_soft_limit", "close_scope")]
)
async def test_a_mode_that_nothing_knows_and_an_action_that_nothing_does_are_refused(
    engine: ff.Engine, field: str, word: str
) -> None:
    fields: dict[str, Any] = {field: word}
    with pytest.raises(InvalidInput) as refused:
        await engine.create_budget(name="b", **fields)
    assert refused.value.field == field
    assert not (await engine.list_budgets()).items


async def test_a_breach_leaves_no_rows(engine: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    budget = await make(engine, {"t": 1})
    held = await started(engine, policy=ExecutionPolicy(budget_ids=(budget,)))
    assert isinstance(await engine.report_usage(held.handle, {"t": 2, "other": 5}), HardBreach)
    assert isinstance(await engine.record_spend(budget, held.execution_id, {"t": 2, "other": 5}), HardBreach)
    assert (await status(engine, budget)).usage == {}
    for table in ("budget_usage", "budget_spend", "budget_key"):
        assert await sql.fetchval(f"select count(*) from flowfabric.{table}") == 0


@each("ending", ["commit", "rollback"])
async def test_a_spend_and_a_release_wait_for_each_other_and_both_finish(stage: Stage, ending: str) -> None:
    for is_spend_first in (True, False):
        await stage.empty()
        one, two = await stage.company(2)
        budget = await make(one, {"t": 100})
        held = await started(one)
        await one.record_spend(budget, held.execution_id, {"t": 5})
        spend, release = (
            lambda party, at=(budget, held.execution_id): party.record_spend(*at, {"t": 7}),
            lambda party, at=(budget, held.execution_id): party.release_budget(*at),
        )
        first, second = (spend, release) if is_spend_first else (release, spend)
        await one.begin()
        await first(one)
        task = await waiting(stage.watch, two, second(two), behind=one)
        await one.end(ending)
        await asyncio.wait_for(task, PATIENCE)
        left = {(True, "commit"): 0, (True, "rollback"): 0, (False, "commit"): 7, (False, "rollback"): 12}
        assert (await status(two, budget)).usage == {"t": left[is_spend_first, ending]}
        await stage.audit()


# ---- one report has a path of its own in the database

HISTORIES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "within the limits": ({"hard": {"a": 100, "b": 50}}, [{"a": 1}, {"b": 2, "a": 3}, {"a": 0}, {"b": 0, "a": 0}]),
    "no limits": ({}, [{"a": 1}, {"a": 2, "c": 3}, {"c": 4}]),
    "reaches a limit": ({"hard": {"a": 5, "b": 5}}, [{"a": 4}, {"a": 1}, {"a": 1}, {"b": 1}, {"a": 0}]),
    "jumps over a limit": ({"hard": {"a": 5}}, [{"a": 6}, {"a": 2}, {"a": 4, "b": 1}, {"b": 1}]),
    "a soft limit": ({"soft": {"a": 3}, "hard": {"a": 9}}, [{"a": 3}, {"a": 1}, {"a": 0}, {"b": 1}, {"a": 9}]),
    "warnings only": (
        {"hard": {"a": 3}, "soft": {"b": 1}, "enforcement_mode": "warn"},
        [{"a": 2}, {"a": 1}, {"a": 1}, {"b": 2}, {"a": 1, "b": 1}],
    ),
    "keys": (
        {"hard": {"a": 5}},
        [{"a": 1, "key": "k"}, {"a": 2, "key": "k"}, {"a": 9, "key": "l"}, {"a": 1, "key": "l"}],
    ),
    "places": (
        {"hard": {"a": 5}},
        [{"a": 1, "place": ("p", 0)}, {"a": 1, "place": ("p", 0)}, {"a": 9, "place": ("q", 0)}],
    ),
    "the largest amounts": ({}, [{"a": 2**63 - 2}, {"a": 1}, {"a": 1}, {"a": 0}]),
}


@each("history", HISTORIES)
async def test_a_single_report_does_what_the_same_report_in_a_batch_does(
    engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any], history: str
) -> None:
    definition, reports = HISTORIES[history]
    found = []
    for is_single in (True, False):
        budget = await make(engine, **definition)
        held = await started(engine, policy=ExecutionPolicy(budget_ids=(budget,)))
        nothing = CancelReservation(authority=held.handle, reservation_id=ReservationId(mint_uuid()))
        answers = []
        for given in reports:
            amounts = {name: amount for name, amount in given.items() if name not in ("key", "place")}
            item = Report(
                authority=held.handle,
                usage=Usage(custom=amounts, dedup_key=given.get("key")),
                place=given.get("place"),
            )
            items: list[Any] = [item] if is_single else [item, nothing]
            answers.append(_plain((await engine.use_budgets(items))[0], budget))
        events = await sql.fetch(
            "select operator_type, details ->> 'dimension' as dim, details ->> 'usage' as used from flowfabric.event"
            " where details ->> 'budget_id' = $1 order by occurred_at, operator_type, dim",
            str(budget),
        )
        head = await sql.fetchrow(
            "select seq, breaches, soft_breaches, is_strict, exhausted, dimensions, used, held, overrun, hard, soft,"
            " last_breach_dim from flowfabric.budget_head where budget_id = $1 order by seq desc limit 1",
            budget,
        )
        usage = await sql.fetch(
            "select dimension, amount from flowfabric.budget_usage where budget_id = $1 order by dimension", budget
        )
        steps = await sql.fetch(
            "select name, n, kind, run, attempt_index, convert_from(result, 'utf8') as result from flowfabric.step"
            " where id = $1 order by name, n",
            held.execution_id,
        )
        keys = await sql.fetch("select key from flowfabric.budget_key where budget_id = $1 order by key", budget)
        found.append((answers, *([tuple(row) for row in rows] for rows in (events, [head], usage, steps, keys))))
    assert found[0] == found[1]


def _plain(answer: Any, budget: BudgetId) -> str:
    return repr(answer).replace(repr(budget), "budget").replace(str(budget), "budget")
