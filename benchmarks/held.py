"""A forgotten transaction: vacuum cannot remove a row that dies while it is open."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import asyncpg


@contextlib.asynccontextmanager
async def held_transaction(dsn: str, wanted: bool = True) -> AsyncIterator[None]:
    """Repeatable read, with a transaction id, after one SELECT; idle until the block ends."""
    if not wanted:
        yield
        return
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("begin isolation level repeatable read")
        await connection.fetchval("select pg_current_xact_id()::text || count(*) from pg_class")
        yield
        if (await connection.fetchval("select count(*) from pg_class")) is None:
            raise RuntimeError("the held transaction has ended")
    finally:
        await connection.close()
