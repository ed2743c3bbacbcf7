"""How many bytes a job stores and writes to the WAL. Decision 23 has the figures of each part."""

from __future__ import annotations

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.values.execution import NewExecution
from tests.databases import fresh_database

# Names as a default worker has them.
_WORKER = {"worker_id": "app@worker-7f9c4d", "worker_instance_id": "app@worker-7f9c4d/12345/abcdef012345"}
_PAYLOAD = b"x" * 200
_BATCH = 50
_TRIES = 10  # a transaction of another test, in any database, keeps dead versions of rows for as long as it lasts


async def _pass_jobs(engine: ff.Engine, jobs: int) -> None:
    for _ in range(0, jobs, 500):
        await engine.create_many([NewExecution(execution_kind="noop", input_payload=_PAYLOAD)] * 500)
    while claimed := await engine.claim_many(limit=_BATCH, **_WORKER):
        for verdict in await engine.complete_many([one.handle for one in claimed]):
            assert not isinstance(verdict, Exception)


async def test_a_finished_job_has_narrow_rows(plain_engine: ff.Engine, sql: asyncpg.Connection) -> None:
    await _pass_jobs(plain_engine, 500)
    execution, event = await sql.fetchrow(
        "select (select max(pg_column_size(e.*)) from flowfabric.execution e),"
        " (select max(pg_column_size(e.*)) from flowfabric.event e)"
    )
    assert execution - len(_PAYLOAD) <= 212
    assert event <= 153


async def _written(engine: ff.Engine) -> int:
    """The bytes of WAL that the one connection of an engine has written."""
    if int((await engine._fetch("show server_version_num"))[0][0]) < 180000:
        pytest.skip("the server does not count the WAL of a connection")
    found = -1
    while True:  # until nothing is left to be counted
        before = found
        await engine._fetch("select pg_stat_force_next_flush()")
        row = await engine._fetch("select wal_bytes from pg_stat_get_backend_wal(pg_backend_pid())")
        found = int(row[0][0])
        if found == before:
            return found


async def test_a_job_writes_few_bytes_of_wal(server: str) -> None:
    jobs = 5_000
    async with fresh_database(server) as dsn, await ff.Engine.connect(dsn, min_size=1, max_size=1) as engine:
        await _pass_jobs(engine, 500)  # the route and the worker are known, the statements are planned
        for _ in range(_TRIES):
            before = await _written(engine)
            await _pass_jobs(engine, jobs)
            each = (await _written(engine) - before) / jobs
            if each <= 1_900:
                break
    assert each <= 1_900, each


async def test_a_renewal_writes_no_payload(server: str) -> None:
    each = {200: float("inf"), 1500: float("inf")}
    async with fresh_database(server) as dsn, await ff.Engine.connect(dsn, min_size=1, max_size=1) as engine:
        await engine._fetch("update flowfabric.deployment set event_heartbeats = false")
        for size in (200, 1500) * _TRIES:  # the first of each size plans the statements
            await engine.create_many([NewExecution(execution_kind="noop", input_payload=b"x" * size)] * _BATCH)
            held = [one.handle for one in await engine.claim_many(limit=_BATCH, **_WORKER)]
            before = await _written(engine)
            for _ in range(10):
                await engine.renew_many(held)
            each[size] = min(each[size], (await _written(engine) - before) / (10 * _BATCH))
            await engine.complete_many(held)
            if max(each.values()) <= 250:
                break
    assert max(each.values()) <= 250, each
