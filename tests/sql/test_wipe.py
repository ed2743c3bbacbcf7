"""A wiped database is as good as a fresh one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from flowfabric._postgres import scratch
from tests.databases import fresh_database
from tests.sql.suspending import SuspendingWorld, open_suspending

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _rows(dsn: str) -> dict[str, Any]:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(scratch.UNCLAIMED)  # each database has its own id
        tables = await connection.fetch(
            "select c.relname from pg_class c"
            " where c.relnamespace = 'flowfabric'::regnamespace and c.relkind in ('r', 'p')"
        )
        found = {
            name: await connection.fetchval(f"select jsonb_agg(t order by to_jsonb(t)) from flowfabric.{name} t")
            for (name,) in tables
        }
        return {name: rows for name, rows in found.items() if rows is not None}
    finally:
        await connection.close()


async def _use(world: SuspendingWorld) -> None:
    """Leave rows in many tables, and change those that every database has."""
    engine = world.engine
    engine.checking = False
    for state in ("A", "C.w", "S.w", "S", "T:failed", "D.i", "B.lane", "W.i"):
        await world.reach(state)
    await world.suspend()
    await engine.set_lane_state("slow", "paused")
    await engine.rotate_waitpoint_hmac_secret_all("k2", "ab" * 32, timedelta(minutes=1))
    await world.clock.advance(hours=3)
    await world.sql.execute("update flowfabric.deployment set auto_reclaim = false, failure_retention = '1 hour'")


@pytest.mark.both_servers
async def test_a_wiped_database_has_the_rows_of_a_fresh_one(server: str) -> None:
    async with fresh_database(server) as fresh, open_suspending(server) as world:
        expected = await _rows(fresh)
        for _ in range(60):  # both ways to wipe
            await world.sql.execute("insert into flowfabric.lane values ('x', 'paused', now(), '')")
            await world.wipe()
        await _use(world)
        used = await _rows(world.dsn)
        assert {"lane", "route", "execution", "suspension", "event", "keystore", "deployment", "clock"} <= {
            name for name, rows in used.items() if rows != expected.get(name)
        }
        await world.wipe()
        assert await _rows(world.dsn) == expected
