"""The duties of budgets and quotas: a damaged one stops none of the others, and what is known is not repeated."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any, TypeAlias, cast
from uuid import UUID

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._duties import (
    BudgetReconciler,
    BudgetReset,
    Duties,
    EdgeRepair,
    LimitOpening,
    QuotaReconciler,
    ReservationEnd,
    Unblock,
)
from flowfabric._duties.paged import PagedDuty
from flowfabric._duties.runner import TimerRunner
from flowfabric.errors import InvalidInput, Unavailable
from flowfabric.values.budget import Reserved
from flowfabric.values.ids import BudgetId, QuotaPolicyId
from flowfabric.values.lease import Operator
from flowfabric.values.page import ScannerFilter
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements
from tests.sql.plans import CountingEngine
from tests.sql.test_budgets import admin, make
from tests.sql.test_quotas import claim, many, quota, state
from tests.support import WORKER, CheckedEngine, Clock, started, submit

SQL: TypeAlias = "asyncpg.Connection[Any]"
DAY = timedelta(days=1)
ONE = {"max_requests_per_window": 1}
FIRST, SECOND, THIRD = (BudgetId(UUID(int=n)) for n in (1, 2, 3))


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in log.records if one.levelno >= logging.WARNING]


async def resets(engine: ff.Engine) -> list[int]:
    return [(await engine.get_budget_status(one)).reset_count for one in (FIRST, SECOND, THIRD)]


async def test_a_budget_that_cannot_be_reset_is_put_off_and_reported(
    plain_engine: ff.Engine, sql: SQL, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for one in (FIRST, SECOND, THIRD):
        await make(plain_engine, {"t": 1}, budget_id=one, reset_interval=DAY)
    await sql.execute("update flowfabric.budget set reset_interval = '300000 years' where id = $1", FIRST)
    await clock.advance(days=1)
    duty = BudgetReset(plain_engine)
    assert await duty.run_once() == 2
    assert await resets(plain_engine) == [0, 1, 1]
    (warning,) = warnings(caplog)
    assert warning.startswith(f"budget_reset: 1 postponed, the last because: budget {FIRST}: ")
    assert await duty.run_once() == 0
    assert len(warnings(caplog)) == 1, "it does not come back at once"
    await sql.execute("update flowfabric.budget set reset_interval = '1 day' where id = $1", FIRST)
    await clock.advance(seconds=31)
    assert await duty.run_once() == 1
    assert await resets(plain_engine) == [1, 1, 1]


@pytest.mark.parametrize("duty_of", [LimitOpening, Unblock])
async def test_a_damaged_quota_policy_holds_no_other_back(
    plain_engine: ff.Engine,
    sql: SQL,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    duty_of: type[LimitOpening | Unblock],
) -> None:
    made = []
    for n in (1, 2, 3):
        policy = await quota(
            plain_engine, f"p{n}", quota_policy_id=QuotaPolicyId(UUID(int=n)), max_requests_per_window=1
        )
        made += await many(plain_engine, 2, policy)
    assert len(await claim(plain_engine)) == 3
    await sql.execute("update flowfabric.quota_policy set max_concurrent = -1 where id = $1", UUID(int=1))
    await clock.advance(seconds=61)
    duty = duty_of(plain_engine)
    assert await duty.run_once() == 2
    assert [(await state(plain_engine, one))[0] for one in made[1::2]] == ["rate_limited", "waiting", "waiting"]
    (warning,) = warnings(caplog)
    assert f"limit {UUID(int=1)}: " in warning
    await sql.execute("update flowfabric.quota_policy set max_concurrent = 0")
    await clock.advance(seconds=31)
    assert await duty.run_once() == 1


async def test_limits_that_are_due_more_than_once_are_all_looked_at(plain_engine: ff.Engine, sql: SQL) -> None:
    """A full page is followed by the next, however often it names one limit."""
    await sql.execute(
        "insert into flowfabric.limit_due (due_at, limit_id, key) select flowfabric.now(), $1, 'k'"
        " from generate_series(1, 250)",
        UUID(int=1),
    )
    await LimitOpening(plain_engine).run_once()
    assert await sql.fetchval("select count(*) from flowfabric.limit_due") == 0


async def test_a_damaged_budget_holds_no_reservation_of_another_back(
    plain_engine: ff.Engine, sql: SQL, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for one in (FIRST, SECOND):
        await make(plain_engine, {"t": 10}, budget_id=one)
        held = await started(plain_engine, policy=ExecutionPolicy(budget_ids=(one,)))
        assert isinstance(await plain_engine.reserve_usage(held.handle, {"t": 4}), Reserved)
    rename = "update flowfabric.budget_head set dimensions = array[$2] where budget_id = $1"
    await sql.execute(rename, FIRST, "other")
    await clock.advance(minutes=10)
    duty = BudgetReconciler(plain_engine)
    assert await duty.run_once() == 1
    assert (await plain_engine.get_budget_status(SECOND)).usage == {"t": 4}
    (warning,) = warnings(caplog)
    assert warning.startswith(f"budget_reconciler: 1 postponed, the last because: budget {FIRST}: ")
    await sql.execute(rename, FIRST, "t")
    assert await duty.run_once() == 1
    assert (await plain_engine.get_budget_status(FIRST)).usage == {"t": 4}


async def test_a_damaged_budget_keeps_no_execution_from_its_end(
    plain_engine: ff.Engine, sql: SQL, clock: Clock
) -> None:
    """What it holds is given back once the budget is repaired."""
    await make(plain_engine, {"t": 10}, budget_id=FIRST)
    running = [await started(plain_engine, policy=ExecutionPolicy(budget_ids=(FIRST,))) for _ in range(3)]
    for one in running:
        assert isinstance(await plain_engine.reserve_usage(one.handle, {"t": 2}), Reserved)
    await sql.execute("create table public.saved as table flowfabric.budget_head; delete from flowfabric.budget_head")
    completed, cancelled, lapsed = running
    await plain_engine.complete(completed.handle, b"")
    await plain_engine.cancel(Operator(cancelled.execution_id), "enough")
    await clock.advance(minutes=10)
    await plain_engine.mark_lease_expired_if_due(lapsed.execution_id)
    assert [(await state(plain_engine, one.execution_id))[0] for one in running] == ["completed", "cancelled", "active"]
    assert (await plain_engine.collect_reservations()).failed == 1
    await sql.execute("insert into flowfabric.budget_head select * from public.saved; drop table public.saved")
    done = await plain_engine.collect_reservations()
    assert (done.handled, done.failed) == (3, 0)
    found = await plain_engine.get_budget_status(FIRST)
    assert (found.usage, found.held) == ({"t": 4}, {}), "a cancel and a lost lease are charged"


async def test_reservations_of_damaged_budgets_wake_no_process(
    plain_engine: ff.Engine, sql: SQL, caplog: pytest.LogCaptureFixture
) -> None:
    """They wait for the reconciler of budgets, which reports them once per interval; those of others end at once."""
    running = []
    for one in (FIRST, SECOND, THIRD):
        await make(plain_engine, {"t": 10}, budget_id=one)
        running.append(await started(plain_engine, policy=ExecutionPolicy(budget_ids=(one,))))
        assert isinstance(await plain_engine.reserve_usage(running[-1].handle, {"t": 2}), Reserved)
    await sql.execute("delete from flowfabric.budget_head where budget_id <> $1", THIRD)
    for one in running[:2]:
        await plain_engine.complete(one.handle, b"")
    runner = TimerRunner(plain_engine, [ReservationEnd(plain_engine)])
    for _ in range(3):
        assert await runner.run_once() == 0
    assert warnings(caplog) == []
    async with sql.transaction():
        await sql.execute("select from flowfabric.budget where id = $1 for update", THIRD)
        await plain_engine.complete(running[2].handle, b"")
    assert await runner.run_once() == 1
    assert warnings(caplog) == []
    await BudgetReconciler(plain_engine).run_once()
    assert [one.split(", ")[0] for one in warnings(caplog)][:1] == ["budget_reconciler: 2 postponed"]
    for budget_id in (FIRST, SECOND):
        await plain_engine.reset_budget(budget_id)
    assert await runner.run_once() == 2


async def test_a_filtered_pass_makes_only_matching_executions_claimable(plain_engine: ff.Engine, sql: SQL) -> None:
    policy = await quota(plain_engine, max_concurrent=1)
    (first,) = await many(plain_engine, 1, policy)
    theirs = await many(plain_engine, 2, policy, namespace="theirs", priority=5)
    tagged = await many(plain_engine, 1, policy, namespace="ours", tags={"app.name": "a"})
    ours = await many(plain_engine, 1, policy, namespace="ours")
    (held,) = await claim(plain_engine, kinds=["k"], limit=1)
    assert held.execution_id in theirs
    assert await claim(plain_engine) == []
    await make(plain_engine, {"t": 1}, budget_id=FIRST)
    await admin(plain_engine, FIRST, t=1)
    spent = [
        await submit(plain_engine, namespace=name, policy=ExecutionPolicy(budget_ids=(FIRST,)))
        for name in ("ours", "theirs")
    ]
    assert await claim(plain_engine) == []
    # Both limits open behind the back of the calls that would promote.
    await sql.execute("update flowfabric.quota_policy set max_concurrent = 2")
    await sql.execute("update flowfabric.budget_head set used = '{0}', exhausted = null")
    before = await sql.fetchval("select count(*) from flowfabric.limit_due")
    tag = ScannerFilter(namespace="ours", instance_tag=("app.name", "a"))
    assert await Unblock(plain_engine, filter=tag).run_once() == 1
    assert await Unblock(plain_engine, filter=ScannerFilter(namespace="nobody")).run_once() == 0
    assert (await state(plain_engine, tagged[0]))[0] == ff.State.WAITING
    (taken,) = await claim(plain_engine)
    assert taken.execution_id == tagged[0]
    await sql.execute("update flowfabric.quota_policy set max_concurrent = 3")
    assert await Unblock(plain_engine, filter=ScannerFilter(namespace="ours")).run_once() == 2
    assert {(await state(plain_engine, one))[0] for one in (ours[0], spent[0])} == {ff.State.WAITING}
    assert {(await state(plain_engine, one))[0] for one in (first, theirs[1], spent[1])} == {ff.State.RATE_LIMITED}
    assert await sql.fetchval("select count(*) from flowfabric.limit_due") == before
    with pytest.raises(InvalidInput, match="filter"):
        await plain_engine.unblock_limited(filter=tag)


async def test_duties_with_a_filter_leave_what_is_due_for_all_to_others(plain_engine: ff.Engine) -> None:
    names = {type(duty).__name__ for duty, _ in Duties(plain_engine, [LimitOpening, Unblock])._loops}
    assert names == {"TimerRunner", "Unblock"}
    names = {
        type(duty).__name__
        for duty, _ in Duties(plain_engine, [LimitOpening, Unblock], filter=ScannerFilter(namespace="a"))._loops
    }
    assert names == {"Unblock"}


async def test_a_limit_below_what_is_used_is_reported_once(
    plain_engine: ff.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    for one in (FIRST, SECOND):
        await make(plain_engine, {"t": 10}, budget_id=one)
        await admin(plain_engine, one, t=10)
    duty = BudgetReconciler(plain_engine)
    await duty.run_once()
    assert warnings(caplog) == []
    await plain_engine.update_budget(FIRST, hard={"t": 5})
    await duty.run_once()
    await duty.run_once()
    assert len(warnings(caplog)) == 1
    await plain_engine.update_budget(SECOND, hard={"t": 5})
    await duty.run_once()
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize("mark", ["t", None])
async def test_the_reconciler_corrects_the_mark_of_exhausted_budgets(
    plain_engine: ff.Engine, sql: SQL, mark: str | None
) -> None:
    await make(plain_engine, {"t": 10}, budget_id=FIRST)
    await admin(plain_engine, FIRST, t=10)
    await submit(plain_engine, policy=ExecutionPolicy(budget_ids=(FIRST,)))
    if mark is not None:  # it has room, and holds an execution
        assert await claim(plain_engine) == []
        await sql.execute("update flowfabric.budget_head set used = '{1}' where exhausted is not null")
    else:
        await sql.execute("update flowfabric.budget_head set exhausted = null")
    done = await plain_engine.reconcile_budget_counters()
    assert (done.corrected, done.wrong) == (1, 0)
    assert (await plain_engine.get_budget_status(FIRST)).exhausted_by == (None if mark else "t")
    assert len(await claim(plain_engine)) == (1 if mark else 0)
    assert (await plain_engine.reconcile_budget_counters()).corrected == 0


async def test_the_reconciler_removes_the_ledger_of_purged_executions_and_leaves_the_usage(
    plain_engine: ff.Engine, sql: SQL
) -> None:
    await make(plain_engine, {"t": 10}, budget_id=FIRST)
    elsewhere = plain_engine.mint_id()
    for one in (await submit(plain_engine), plain_engine.mint_id(), elsewhere):
        await plain_engine.record_spend(FIRST, one, {"t": 1})
    # Only of the second is it known that it existed.
    await sql.execute("update flowfabric.budget_spend set is_known = true where execution_id <> $1", elsewhere)
    assert (await plain_engine.reconcile_budget_counters()).corrected == 1
    assert elsewhere in {one.execution_id for one in (await plain_engine.list_spend(FIRST)).items}
    assert len((await plain_engine.list_spend(FIRST)).items) == 2
    assert (await plain_engine.get_budget_status(FIRST)).usage == {"t": 3}


async def test_the_quota_reconciler_removes_slots_without_a_run_and_hands_them_on(
    plain_engine: ff.Engine, sql: SQL
) -> None:
    policy = await quota(plain_engine, max_concurrent=1)
    _, second = await many(plain_engine, 2, policy)
    (first,) = await claim(plain_engine)
    await plain_engine.complete(first.handle)  # the second is promoted, and then blocked by the leaked slot
    await sql.execute(
        "insert into flowfabric.quota_slot (id, partition, policy_id, key, admitted_at, until, origin)"
        " select e.id, e.partition, $1, 'default', flowfabric.now(), null, 'scheduler'"
        " from flowfabric.execution e where e.id = $2",
        policy,
        first.execution_id,
    )
    assert await claim(plain_engine) == []
    done = await plain_engine.reconcile_quotas()
    assert (done.slots, done.heads) == (1, 0)
    assert (await plain_engine.unblock_limited()).promoted == 1
    (last,) = await claim(plain_engine)
    assert last.execution_id == second
    assert (await plain_engine.reconcile_quotas()).slots == 0
    await plain_engine.complete(last.handle)
    done = await plain_engine.reconcile_quotas()
    assert (done.slots, done.heads) == (0, 1), "nothing is left to lock"


async def test_the_reconciler_of_budgets_checks_a_page_in_each_round(plain_engine: ff.Engine, sql: SQL) -> None:
    for n in range(1, 6):
        await make(plain_engine, {"t": 10}, budget_id=BudgetId(UUID(int=n)))
    for n in (2, 4):
        await sql.execute("update flowfabric.budget_head set exhausted = 't' where budget_id = $1", UUID(int=n))
    for n in range(1, 6):
        await plain_engine.record_spend(FIRST, ff.ExecutionId(UUID(int=n)), {"t": 1})
    await sql.execute("update flowfabric.budget_spend set is_known = true where execution_id = $1", UUID(int=5))
    duty = BudgetReconciler(plain_engine)
    duty.batch, duty.allowance, duty.place = 1, 0, None
    # One page of budgets and one of the ledger. A round continues while it finds something.
    assert [await duty.run_once() for _ in range(6)] == [0, 1, 2, 0, 0, 0]


async def test_the_reconciler_of_budgets_removes_a_long_ledger_in_one_round(plain_engine: ff.Engine, sql: SQL) -> None:
    await make(plain_engine, {"t": 10}, budget_id=FIRST)
    for n in range(5):
        await plain_engine.record_spend(FIRST, ff.ExecutionId(UUID(int=n + 1)), {"t": 1})
    await sql.execute("update flowfabric.budget_spend set is_known = true")
    duty = BudgetReconciler(plain_engine)
    duty.batch, duty.allowance = 1, 0
    assert sum([await duty.run_once() for _ in range(2)]) == 5


@pytest.mark.parametrize("kind", [BudgetReconciler, EdgeRepair, QuotaReconciler])
async def test_a_page_that_fails_each_time_does_not_hide_those_behind_it(kind: type[PagedDuty[Any]]) -> None:
    class Failing(kind):  # type: ignore[misc, valid-type]
        async def page(self, after: object) -> tuple[int, object]:
            seen.append(after)
            raise Unavailable("read_events", "damaged")

        run_once = PagedDuty.run_once

    seen: list[object] = []
    duty = Failing(cast("Any", None))
    for _ in range(20):
        with pytest.raises(Unavailable):
            await duty.run_once()
    assert len(set(seen)) > 1


@pytest.mark.parametrize("kind", [BudgetReconciler, EdgeRepair, QuotaReconciler, Unblock])
async def test_a_round_goes_around_once_from_wherever_it_begins(kind: type[PagedDuty[Any]]) -> None:
    """It ends earlier once its allowance is used up, and the next one continues from there."""

    class Counting(kind):  # type: ignore[misc, valid-type]
        async def page(self, after: int | None) -> tuple[int, int | None]:
            seen.append(after or 0)
            return 0, seen[-1] + 1 if seen[-1] < 4 else None

        run_once = PagedDuty.run_once

    seen: list[int] = []
    duty = Counting(cast("Any", None))
    duty.allowance, duty.place = 60.0, 3
    await duty.run_once()
    assert seen == [3, 4, 0, 1, 2, 3, 4]
    await duty.run_once()
    assert seen[7:] == [0, 1, 2, 3, 4]
    duty.allowance = 0.0
    for _ in range(3):
        await duty.run_once()
    assert seen[12:] == [0, 1, 2]
    duty.place = 4
    await duty.run_once()
    assert seen[15:] == [4, 0], "a last page that finds nothing ends no round: what there is may be before it"
    first, *others = [Counting(cast("Any", None)).place for _ in range(20)]
    assert any(one != first for one in others) or kind is Unblock, "a process begins anywhere"


async def test_a_filtered_pass_comes_to_its_end_within_a_round(plain_engine: ff.Engine, sql: SQL) -> None:
    policies = [await quota(plain_engine, f"p{n}", max_concurrent=1) for n in range(6)]
    for policy in policies:
        await many(plain_engine, 2, policy, namespace="ours" if policy == max(policies) else "theirs")
    assert len(await claim(plain_engine)) == 6
    assert await claim(plain_engine) == []
    await sql.execute("update flowfabric.quota_policy set max_concurrent = 2")
    duty = Unblock(plain_engine, filter=ScannerFilter(namespace="ours"))
    duty.batch = 1
    assert await duty.run_once() == 1


async def test_dead_slots_and_entries_are_removed_however_many_a_key_has(plain_engine: ff.Engine, sql: SQL) -> None:
    """In one round: also of the last key, and behind more live slots than a page looks at."""
    policy = await quota(plain_engine, max_concurrent=5000, max_requests_per_window=5000)
    await sql.execute(
        "insert into flowfabric.quota_head (policy_id, key) select $1, k from unnest('{k,l}'::text[]) k", policy
    )
    slots = (
        "insert into flowfabric.quota_slot (id, partition, policy_id, key, admitted_at, until, origin)"
        " select gen_random_uuid(), 0, $1, k, flowfabric.now(), flowfabric.now() + $2, 'direct'"
        " from unnest('{k,l}'::text[]) k, generate_series(1, $3)"
    )
    for days, count in ((-1, 2100), (1, 1200), (-1, 200), (None, 50)):
        await sql.execute(slots, policy, None if days is None else timedelta(days=days), count)
    await sql.execute(
        "insert into flowfabric.quota_entry (policy_id, key, id, partition, admitted_at)"
        " select $1, 'l', gen_random_uuid(), 0, flowfabric.now() - interval '1 day' from generate_series(1, 20500)",
        policy,
    )
    duty = QuotaReconciler(plain_engine)
    duty.allowance, duty.place = 30.0, None
    assert await duty.run_once() == 2 * 2350 + 20500
    assert await sql.fetchval("select count(*) from flowfabric.quota_slot") == 2 * 1200
    assert await sql.fetchval("select count(*) from flowfabric.quota_entry") == 0
    await sql.execute("delete from flowfabric.quota_slot")


async def test_the_reconciler_of_quotas_checks_a_page_of_keys_in_each_round(plain_engine: ff.Engine, sql: SQL) -> None:
    policy = await quota(plain_engine, key="t", max_concurrent=1)
    await sql.execute(
        "insert into flowfabric.quota_head (policy_id, key) select $1, 'k' || n from generate_series(1, 5) n", policy
    )
    await sql.execute(
        "insert into flowfabric.quota_slot (id, partition, policy_id, key, admitted_at, until, origin)"
        " select gen_random_uuid(), 0, $1, 'k' || n, flowfabric.now(), flowfabric.now() + d.days * interval '1 day',"
        " 'direct' from generate_series(1, 5) n, unnest(case when n in (2, 5) then '{-1, 1}' else '{1}'::int[] end)"
        " d (days)",
        policy,
    )
    duty = QuotaReconciler(plain_engine)
    duty.batch, duty.allowance, duty.place = 1, 0, None
    assert [await duty.run_once() for _ in range(6)] == [0, 1, 0, 1, 0, 0]
    assert await sql.fetchval("select count(*) from flowfabric.quota_slot") == 5
    await sql.execute("delete from flowfabric.quota_slot")


async def test_a_reclaim_whose_slot_is_missing_gets_one_unchecked(plain_engine: ff.Engine, sql: SQL) -> None:
    policy = await quota(plain_engine, max_concurrent=1)
    (first,) = await many(plain_engine, 1, policy)
    await claim(plain_engine)
    await sql.execute("delete from flowfabric.quota_slot")
    (second,) = await many(plain_engine, 1, policy)
    assert [one.execution_id for one in await claim(plain_engine)] == [second]
    await plain_engine.revoke_lease(first)
    assert [(one.execution_id, one.attempt_type) for one in await claim(plain_engine)] == [(first, "reclaim")]
    found = await plain_engine.get_quota_policy(policy)
    assert found is not None
    assert found.active == 2, "the cap is for admissions"


@pytest.mark.parametrize("why", ["paused", "uncovered", "unserved"])
async def test_executions_that_no_claim_takes_do_not_keep_the_room_from_others(engine: CheckedEngine, why: str) -> None:
    """A slot is handed to the first that a worker can take; those before it do not wait for it either."""
    policy = await quota(engine, max_concurrent=1)
    (running,) = await many(engine, 1, policy, priority=9)
    routing = RoutingRequirements(required_capabilities=frozenset({"gpu"}) if why == "uncovered" else frozenset())
    aside = ExecutionPolicy(quota_policy_ids=(policy,), routing_requirements=routing)
    first = await many(engine, 130, policy=aside, priority=5, lane_id="side")
    behind = await many(engine, 2, policy)
    held = await claim(engine)
    assert [one.execution_id for one in held] == [running]
    assert await claim(engine, lane_id="side", capabilities=["gpu"]) == []
    assert {(await state(engine, one))[0] for one in (first[0], first[-1], *behind)} == {"rate_limited"}
    if why == "paused":
        await engine.set_lane_state("side", "paused")
    elif why == "unserved":
        await engine.register_worker(**WORKER, lanes=["default"], liveness_ttl=DAY)
    else:
        await many(engine, 1, policy=aside, lane_id="side")  # a verdict is made on a route with work
        await engine.judge_routes()
    await engine.complete(held[0].handle, b"")
    await (Unblock if why == "unserved" else LimitOpening)(engine).run_once()
    await LimitOpening(engine).run_once()
    (taken,) = await claim(engine)
    assert taken.execution_id == behind[0]
    assert (await state(engine, behind[1]))[0] == "rate_limited"
    await engine.set_lane_state("side", "active")
    await engine.complete(taken.handle, b"")
    await LimitOpening(engine).run_once()
    found = await claim(engine, lane_id="side", capabilities=["gpu"]) or await claim(engine)
    assert len(found) == 1


async def test_an_end_beside_a_paused_lane_reads_what_it_promotes_and_no_more(
    plain_engine: ff.Engine, database: str
) -> None:
    """A hundred executions wait behind the one that gets the slot, none of them in the paused lane."""
    policy = await quota(plain_engine, max_concurrent=1)
    await many(plain_engine, 120, policy)
    (held,) = await claim(plain_engine)
    read = []
    async with CountingEngine.open(database) as counting:
        for _ in range(2):
            async with counting.undone():
                await counting.count()
                await counting.complete(held.handle, b"")
                read.append(counting.handled)
            await plain_engine.set_lane_state("elsewhere", "paused")
    assert read[1] <= read[0] + 80, read
