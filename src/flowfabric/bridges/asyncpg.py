"""Submit through an asyncpg connection, or one borrowed from an asyncpg pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import asyncpg

from flowfabric.bridges import _submission
from flowfabric.bridges._submission import Driver, Fields, Rows, Verdict, one, only, wrong
from flowfabric.values.execution import Created, Duplicate, NewExecution


async def create_execution(connection: Any, *, wake: bool = True, **fields: Unpack[Fields]) -> Created | Duplicate:
    """Submit one execution as part of the connection's transaction. The fields are those of `NewExecution`."""
    return only(await create_many(connection, one(**fields), wake=wake))


async def create_many(connection: Any, items: Sequence[NewExecution], *, wake: bool = True) -> list[Verdict]:
    """Submit up to 1,000 executions; one verdict per item, a refused one as the exception it would have raised."""
    return await _submission.create_many(driver(connection), items, wake)


def driver(connection: Any) -> Driver:
    if isinstance(connection, asyncpg.Pool) or not hasattr(connection, "fetch"):
        raise wrong(connection, "a connection; pool.acquire() gives one")

    async def execute(statement: str, args: list[Any]) -> Rows:
        return [tuple(row) for row in await connection.fetch(statement, *args)]

    return Driver("${}", execute, blocks=False)
