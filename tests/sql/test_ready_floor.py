"""The floor of a route never passes a ready row, whatever snapshot the one who raises it has."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from tests.support import WORKER, submit

pytestmark = pytest.mark.both_servers


@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read", "serializable"])
async def test_work_submitted_after_the_snapshot_of_a_claim_is_not_lost_below_the_floor(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], isolation: str
) -> None:
    ordinary = await submit(plain_engine)
    route = await sql.fetchval("select route from flowfabric.ready")

    async with sql.transaction(isolation=isolation):
        await sql.fetchval("select count(*) from flowfabric.ready")  # a fixed snapshot is fixed here
        urgent = await submit(plain_engine, priority=9000)
        await sql.execute(
            "select flowfabric.raise_floors(r.lane, array[r.id]) from flowfabric.route r where r.id = $1", route
        )

    assert await plain_engine.audit() == []
    claimed = [await plain_engine.claim(**WORKER) for _ in range(2)]
    assert [c and c.execution_id for c in claimed] == [urgent, ordinary]
