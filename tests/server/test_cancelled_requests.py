"""Requests that are cut off in the middle: by the time that a request may take, or by a server that stops."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from flowfabric.server import idempotency
from flowfabric.values.state import State
from tests.server.following import PATIENCE
from tests.server.keyed import Keyed
from tests.support import submit

_BLOCKED = "select count(*) from pg_locks where not granted and pg_backend_pid() = any (pg_blocking_pids(pid))"
_OPEN = """
    select count(*) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid() and state like 'idle in transaction%'
"""


async def reached(sql: asyncpg.Connection[Any], query: str, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while await sql.fetchval(query) != count:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("key", [None, "again"])
async def test_an_operation_that_is_cut_off_leaves_no_effect_no_row_and_no_transaction(
    keyed: Keyed, sql: asyncpg.Connection[Any], key: str | None
) -> None:
    client = await keyed.client("admin")
    await client.get("/v1/capabilities")  # the key is known, and its use noted
    target = await submit(keyed.engine)
    headers = {} if key is None else {"Idempotency-Key": key}
    path = f"/v1/executions/{target}/cancel"
    for _ in range(12):  # more often than there are connections
        async with sql.transaction():
            await sql.execute("select from flowfabric.execution where id = $1 for update", target)
            request = asyncio.create_task(client.post(path, headers=headers))
            await reached(sql, _BLOCKED, 1)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
        await reached(sql, _OPEN, 0)
    assert await keyed.engine.read_execution_state(target) is State.WAITING
    assert not (await keyed.engine.list_operator_audit()).items
    answer = await client.post(path, headers=headers)
    assert answer.status_code == 200, answer.text
    assert "idempotency-replayed" not in answer.headers
    assert [one.outcome for one in (await keyed.engine.list_operator_audit()).items] == ["ok"]


async def test_a_request_that_is_cut_off_before_it_began_does_not_keep_its_key_in_use(
    keyed: Keyed, sql: asyncpg.Connection[Any]
) -> None:
    client = await keyed.client("admin")
    await client.get("/v1/capabilities")
    target = await submit(keyed.engine)
    path, headers = f"/v1/executions/{target}/cancel", {"Idempotency-Key": "again"}
    async with sql.transaction():
        await sql.execute("lock table flowfabric.kept_answer in share mode")
        request = asyncio.create_task(client.post(path, headers=headers))
        await reached(sql, _BLOCKED, 1)
        request.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await request
    answer = await client.post(path, headers=headers)
    assert (answer.status_code, "idempotency-replayed" in answer.headers) == (200, False), answer.text


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_request_that_is_cut_off_ends_though_the_database_hangs(
    keyed: Keyed, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """Its client is told in time, and its key is free as soon as the database works again."""
    monkeypatch.setattr(idempotency, "_PATIENCE", 0.01)
    client = await keyed.client("admin")
    await client.get("/v1/capabilities")
    target = await submit(keyed.engine)
    path, headers = f"/v1/executions/{target}/cancel", {"Idempotency-Key": "again"}
    async with sql.transaction():
        await sql.execute(f"lock table flowfabric.{'execution' if has_begun else 'kept_answer'} in share mode")
        request = asyncio.create_task(client.post(path, headers=headers))
        await reached(sql, _BLOCKED, 1)
        await sql.execute("lock table flowfabric.kept_answer in share mode")
        request.cancel()
        await asyncio.wait([request], timeout=PATIENCE)
        assert request.cancelled()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*keyed.service.leaving)
    assert await sql.fetchval("select count(*) from flowfabric.kept_answer") == 0
    assert (await client.post(path, headers=headers)).status_code == 200
