"""The audit finds damage to limit sets, slots, budgets and executions that limits hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.values.budget import Reserved
from tests.support import WORKER, submit

ONE = UUID(int=1)


async def _limited(engine: ff.Engine) -> None:
    await submit(engine, policy={"budget_ids": [str(ONE)]})


async def _held(engine: ff.Engine) -> None:
    """One execution runs, one is held back by a cap, and the window of a rate is full."""
    cap = await engine.create_quota_policy(name="cap", max_concurrent=1)
    rate = await engine.create_quota_policy(name="rate", max_requests_per_window=1)
    await submit(engine, policy={"quota_policy_ids": [str(cap.quota_policy_id), str(rate.quota_policy_id)]})
    await submit(engine, policy={"quota_policy_ids": [str(cap.quota_policy_id)]})
    assert len(await engine.claim_many(**WORKER, limit=10)) == 1


async def _spending(engine: ff.Engine) -> None:
    """A budget is used by a report and a spend, and some of it is held."""
    budget = (
        await engine.create_budget(name="research", dimensions=["tokens"], hard_limits=[100], soft_limits=[0])
    ).budget_id
    await submit(engine, policy={"budget_ids": [str(budget)]})
    [one] = await engine.claim_many(**WORKER, limit=1)
    assert isinstance(await engine.reserve_usage(one.handle, {"tokens": 10}), Reserved)
    await engine.report_usage_admin(budget, dimensions=["tokens"], deltas=[5])
    await engine.record_spend(budget, one.execution_id, {"tokens": 20}, idempotency_key="k")


async def _paused(engine: ff.Engine) -> None:
    """An execution waits for more than its budget has."""
    budget = (
        await engine.create_budget(name="research", dimensions=["tokens"], hard_limits=[100], soft_limits=[0])
    ).budget_id
    await submit(engine, policy={"budget_ids": [str(budget)]})
    [one] = await engine.claim_many(**WORKER, limit=1)
    assert (await engine.pause_for_budget(one.handle, {"tokens": 101})).paused


_NEWEST = "(select max(seq) from flowfabric.budget_head)"
_ANOTHER = (
    "(id, partition, policy_id, key, admitted_at, until, origin)"
    " select gen_random_uuid(), 0, policy_id, key, flowfabric.now(), null, 'scheduler' from flowfabric.quota_slot"
)
_LEADS = "insert into flowfabric.lead values ('duties', gen_random_uuid(), clock_timestamp() + interval '1 minute');"
DAMAGES: dict[str, tuple[Callable[[ff.Engine], Awaitable[None]], list[str]]] = {
    "limit_set": (
        _limited,
        [
            "delete from flowfabric.limit_set",
            "update flowfabric.route set limited = false",
            "update flowfabric.execution set limits = null",
        ],
    ),
    "quota_slot": (
        _held,
        [
            "update flowfabric.quota_head set floor = 1000000",
            "update flowfabric.execution set state = 'waiting' where state = 'active'",
        ],
    ),
    "quota_slot_missing": (
        _held,
        ["delete from flowfabric.quota_slot", "update flowfabric.quota_slot set until = flowfabric.now()"],
    ),
    "quota_cap": (
        _held,
        [f"insert into flowfabric.quota_slot {_ANOTHER}"],
    ),
    "quota_rate": (
        _held,
        ["insert into flowfabric.quota_entry select policy_id, key, gen_random_uuid(), 0, flowfabric.now()"
         " from flowfabric.quota_entry"],
    ),
    "blocked_limit": (
        _held,
        [
            "update flowfabric.blocked set limit_id = null",
            "update flowfabric.blocked set limit_id = gen_random_uuid()",
            "update flowfabric.blocked set limit_key = 'other'",
            "update flowfabric.blocked set rank = 1",
        ],
    ),
    "limit_open": (
        _held,
        [
            f"{_LEADS} update flowfabric.blocked set blocked_at = blocked_at - interval '1 hour';"
            " update flowfabric.quota_policy set max_concurrent = 2"
        ],
    ),
    "limit_open for a paused execution": (
        _paused,
        [
            f"{_LEADS} update flowfabric.blocked set blocked_at = blocked_at - interval '1 hour';"
            " update flowfabric.budget_head set hard = '{101}'"
        ],
    ),
    "budget_rows": (
        _spending,
        [
            "delete from flowfabric.budget",
            "delete from flowfabric.budget_head",
            "update flowfabric.budget set hard = '{99}'",
            "update flowfabric.budget set mode = 'warn'",
            "update flowfabric.budget set generation = 7",
        ],
    ),
    "budget_held": (
        _spending,
        [
            f"update flowfabric.budget_head set held = '{{11}}' where seq = {_NEWEST}",
            "update flowfabric.reservation set amounts = '{9}'",
            "delete from flowfabric.reservation",
        ],
    ),
    "budget_limits": (
        _spending,
        [
            f"update flowfabric.budget_head set used = '{{91}}' where seq = {_NEWEST}",
            "alter table flowfabric.budget_head drop constraint budget_head_positive;"
            f" update flowfabric.budget_head set used = '{{-1}}' where seq = {_NEWEST}",
        ],
    ),
    "budget_counters": (
        _spending,
        [
            f"update flowfabric.budget_head set breaches = 1 where seq < {_NEWEST}",
            f"update flowfabric.budget_head set soft_breaches = 1 where seq < {_NEWEST}",
            f"update flowfabric.budget_head set generation = 1 where seq < {_NEWEST}",
        ],
    ),
    "budget_mark": (
        _spending,
        [
            f"update flowfabric.budget_head set exhausted = 'tokens' where seq = {_NEWEST}",
            f"update flowfabric.budget_head set used = '{{100}}', held = '{{0}}' where seq = {_NEWEST}",
        ],
    ),
    "budget_ledger": (_spending, ["update flowfabric.budget_spend set amount = 26"]),
}  # fmt: skip


@pytest.mark.parametrize("rule", DAMAGES)
async def test_damage_is_found(plain_engine: ff.Engine, sql: asyncpg.Connection[Any], rule: str) -> None:
    prepare, damages = DAMAGES[rule]
    await prepare(plain_engine)
    assert await plain_engine.audit(events=True) == []
    for damage in damages:
        transaction = sql.transaction()
        await transaction.start()
        await sql.execute(damage)
        found = {row["rule"] for row in await sql.fetch("select rule from flowfabric.audit(null, true)")}
        await transaction.rollback()
        assert rule.split()[0] in found, damage
