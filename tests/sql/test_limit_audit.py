"""The audit finds damage to limit sets, slots and executions that limits hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest

import flowfabric as ff
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
        assert rule in found, damage
