"""The floor of a route never passes a ready row, whatever snapshot the one who raises it has."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.values.lease import Operator
from tests import sampling
from tests.support import OTHER, WORKER, Clock, submit, until_blocked

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


async def _release(engine: ff.Engine) -> None:
    claimed = await engine.claim(**OTHER)
    assert claimed is not None
    await engine.release(claimed.handle)


MEANWHILE: dict[str, tuple[Callable[[ff.Engine, ff.ExecutionId], Awaitable[Any]], int]] = {
    "claimed": (lambda engine, _: engine.claim(**OTHER), 1),
    "claimed and given back": (lambda engine, _: _release(engine), 0),
    "cancelled": (lambda engine, first: engine.cancel(Operator(first), "no"), 1),
    "at another priority": (lambda engine, first: engine.change_priority(first, 5), 1),
    "granted": (lambda engine, first: engine.issue_claim_grant(first, **OTHER), 1),
}


@pytest.mark.parametrize("what", MEANWHILE)
async def test_a_claim_takes_no_row_that_changes_between_its_look_and_its_lock(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any], what: str
) -> None:
    """A claim is stopped when it has read a row and not locked its execution yet; it finds what is left afterwards."""
    call, expected = MEANWHILE[what]
    ids = [await submit(plain_engine) for _ in range(2)]
    lane = await sql.fetchval("select name from flowfabric.lane")
    source = await sql.fetchval("select pg_get_functiondef('flowfabric.take_ready'::regproc)")
    looked = "                order by r.rank, r.created_at, r.id\n"
    stopped = "and (current_setting('application_name') <> 'late' or length(pg_advisory_xact_lock(4242)::text) = 0)\n"
    assert source.count(looked) == 1
    await sql.execute(source.replace(looked, stopped + looked))
    late = await asyncpg.connect(database, server_settings={"application_name": "late"})
    try:
        await sql.execute("select pg_advisory_lock(4242)")
        task = asyncio.ensure_future(
            late.fetch(
                "select id from flowfabric.claim($1, null, '{}', 'l', 'l-1', 30000, 1, null, null, null, false)", lane
            )
        )
        await until_blocked(sql)
        await call(plain_engine, ids[0])
        await sql.execute("select pg_advisory_unlock(4242)")
        assert [row["id"] for row in await task] == [ids[expected]]
    finally:
        await late.close()
        await sql.execute(source)


async def test_no_row_is_below_a_floor_at_any_moment_while_every_claim_raises_it(
    database: str, plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    """Every claim raises, and routes empty at once; submissions stay open for a while, fail, or have old snapshots."""
    source = await sql.fetchval("select pg_get_functiondef('flowfabric.claim'::regproc)")
    for often in (
        "random() < cardinality(v_ids) / 500.0",
        "v_created[v_first] < v_now - interval '5 seconds' and random() < 0.2",
    ):
        assert source.count(often) == 1
        source = source.replace(often, "true")
    await sql.execute(source)
    raising = await sql.fetchval("select pg_get_functiondef('flowfabric.raise_floors'::regproc)")
    assert raising.count("interval '5 seconds'") == 1
    await sql.execute(raising.replace("interval '5 seconds'", "interval '0'"))
    for kind in "abc":  # two transactions that register the same kind meet, and an old snapshot cannot
        await submit(plain_engine, execution_kind=kind)
    assert len(await plain_engine.claim_many(**WORKER, limit=3)) == 3
    chance = random.Random(11)
    left = sampling.examples(6_000, of_a_sample=500)
    submitters = 6
    submitted: set[ff.ExecutionId] = set()
    claimed: list[ff.ExecutionId] = []
    pauses = (0.0, 0.0, 0.0, 0.001, 0.02)

    async def submits() -> None:
        nonlocal left, submitters
        async with await ff.Engine.connect(database, notifications=False) as engine:
            connection = await asyncpg.connect(database)
            while left > 0:
                count = chance.choice((1, 1, 1, 5))
                left -= count
                isolation = chance.choice(("read_committed", "read_committed", "repeatable_read"))
                transaction = connection.transaction(isolation=isolation)
                await transaction.start()
                ids = []
                for _ in range(count):
                    kind, priority = chance.choice("abc"), chance.choice((0, 0, 0, 5, 2000, -2000))
                    ids.append(await submit(engine, execution_kind=kind, priority=priority, connection=connection))
                    await asyncio.sleep(chance.choice(pauses))
                if chance.random() < 0.1:
                    await transaction.rollback()
                else:
                    submitted.update(ids)
                    await transaction.commit()
                await asyncio.sleep(chance.choice(pauses))
            await connection.close()
        submitters -= 1

    async def claims(number: int) -> None:
        worker = {"worker_id": "w", "worker_instance_id": f"w-{number}"}
        async with await ff.Engine.connect(database, notifications=False) as engine:
            while submitters or len(claimed) < len(submitted):
                kinds = chance.choice((["a"], ["b", "c"], ["a", "b", "c"]))
                taken = await engine.claim_many(**worker, kinds=kinds, limit=chance.choice((1, 3, 20)))
                claimed.extend(one.execution_id for one in taken)
                if taken and chance.random() < 0.2:  # back in its old position, below everything
                    claimed.remove(taken[0].execution_id)
                    await engine.release(taken[0].handle)
                await asyncio.sleep(chance.choice(pauses))

    async def watches() -> None:
        while submitters or len(claimed) < len(submitted):
            assert await sql.fetch("select * from flowfabric.audit_ready_below_floor(0, 255, null, null)") == []
            await asyncio.sleep(0)

    async with asyncio.timeout(120):
        await asyncio.gather(*(submits() for _ in range(submitters)), *(claims(n) for n in range(3)), watches())
    assert sorted(claimed) == sorted(submitted)


async def test_an_announced_position_is_just_below_its_row_and_that_of_an_old_row_below_all(
    sql: asyncpg.Connection[Any],
) -> None:
    """A position above its row would let the floor rise over it before it is committed: no claim would find it."""
    rows = await sql.fetch(
        """
        select r.rank, a.age, n.now - a.age as created, flowfabric.place_rank(p.place) as place_rank,
               flowfabric.place_time(p.place, n.now) as place_time
        from (select flowfabric.now()) as n (now),
             unnest(array[0, 1, 599, 600, 8999, 9000]) as r (rank),
             unnest(array[interval '0', '0.05 s', '1 h', '30 days', '99 days', '101 days', '160 days', '999 days'])
             as a (age)
        cross join lateral (select flowfabric.ready_place(r.rank, n.now - a.age, n.now)::bigint) as p (place)
        """
    )
    assert len(rows) == 48
    for row in rows:
        assert row["rank"] - 600 < row["place_rank"] <= row["rank"], row
        if row["age"] > timedelta(days=100):
            assert row["place_time"] == datetime.min, row
        else:
            assert timedelta() <= row["created"] - row["place_time"] <= timedelta(seconds=0.1), row
