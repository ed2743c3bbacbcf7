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


async def test_a_job_writes_few_bytes_of_wal(server: str) -> None:
    async def written(engine: ff.Engine) -> int:
        found = -1
        while True:  # until nothing is left to be counted
            before = found
            await engine._fetch("select pg_stat_force_next_flush()")
            row = await engine._fetch("select wal_bytes from pg_stat_get_backend_wal(pg_backend_pid())")
            found = int(row[0][0])
            if found == before:
                return found

    jobs = 5_000
    async with fresh_database(server) as dsn, await ff.Engine.connect(dsn, min_size=1, max_size=1) as engine:
        if int((await engine._fetch("show server_version_num"))[0][0]) < 180000:
            pytest.skip("the server does not count the WAL of a connection")
        await _pass_jobs(engine, 500)  # the route and the worker are known, the statements are planned
        before = await written(engine)
        await _pass_jobs(engine, jobs)
        each = (await written(engine) - before) / jobs
    assert each <= 1_900, each
