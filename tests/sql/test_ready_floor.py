"""The floor of a route never passes a ready row, whatever snapshot the one who raises it has."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from tests.support import WORKER, Clock, submit, until_blocked

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


@pytest.mark.parametrize("before", [0, 1], ids=["empty", "with a row"])
async def test_a_row_committed_in_the_middle_of_a_raise_keeps_its_floor(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any], clock: Clock, before: int
) -> None:
    """A raise is stopped after it has looked for ready rows; what is submitted then is not seen by that look."""
    await submit(plain_engine)
    assert await plain_engine.claim(**WORKER) is not None
    await clock.advance(seconds=60)
    for _ in range(before):
        await submit(plain_engine)
    source = await sql.fetchval("select pg_get_functiondef('flowfabric.raise_floors'::regproc)")
    looked = "        v_new := v_low;\n        if found then\n"
    stopped = "        v_at := v_at + 0 * length(pg_advisory_xact_lock(4242)::text);\n"  # FOUND stays what it was
    assert source.count(looked) == 1
    await sql.execute(source.replace(looked, stopped + looked))
    raising = await asyncpg.connect(database)
    try:
        await sql.execute("select pg_advisory_lock(4242)")
        task = asyncio.ensure_future(
            raising.execute("select flowfabric.raise_floors(r.lane, array[r.id]) from flowfabric.route r")
        )
        await until_blocked(sql)
        await submit(plain_engine, priority=5)
        await sql.execute("select pg_advisory_unlock(4242)")
        await task
    finally:
        await raising.close()
        await sql.execute(source)
    assert await plain_engine.audit() == []
    assert len(await plain_engine.claim_many(**WORKER, limit=10)) == before + 1
