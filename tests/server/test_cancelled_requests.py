"""Requests that are cut off in the middle: by the time that a request may take, or by a server that stops."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

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
