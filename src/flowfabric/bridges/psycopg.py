"""Submit through psycopg 3: a `Connection` or `Cursor`, or with `_async` an `AsyncConnection` or `AsyncCursor`.

A cursor only names its connection: its own result, row factory and placeholders do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, Unpack, cast

from flowfabric.bridges import _submission
from flowfabric.bridges._submission import (
    Driver,
    Fields,
    Rows,
    Verdict,
    at_once,
    blocking,
    missing,
    one,
    only,
    wrong,
)
from flowfabric.values.execution import Created, Duplicate, NewExecution

try:
    import psycopg
    from psycopg.rows import tuple_row
except ImportError as error:
    raise missing("psycopg 3", "psycopg") from error

Target: TypeAlias = "psycopg.Connection[Any] | psycopg.Cursor[Any]"
AsyncTarget: TypeAlias = "psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any]"


def create_execution(connection: Target, *, wake: bool = True, **fields: Unpack[Fields]) -> Created | Duplicate:
    """Submit one execution as part of the connection's transaction. The fields are those of `NewExecution`."""
    return only(create_many(connection, one(**fields), wake=wake))


def create_many(connection: Target, items: Sequence[NewExecution], *, wake: bool = True) -> list[Verdict]:
    """Submit up to 1,000 executions; one verdict per item, a refused one as the exception it would have raised."""
    found = driver(connection)
    if not found.blocks:
        raise wrong(connection, "a psycopg Connection or Cursor")
    return at_once(_submission.create_many(found, items, wake))


async def create_execution_async(
    connection: AsyncTarget, *, wake: bool = True, **fields: Unpack[Fields]
) -> Created | Duplicate:
    """`create_execution`, awaited."""
    return only(await create_many_async(connection, one(**fields), wake=wake))


async def create_many_async(
    connection: AsyncTarget, items: Sequence[NewExecution], *, wake: bool = True
) -> list[Verdict]:
    """`create_many`, awaited."""
    found = driver(connection)
    if found.blocks:
        raise wrong(connection, "a psycopg AsyncConnection or AsyncCursor")
    return await _submission.create_many(found, items, wake)


def driver(connection: Target | AsyncTarget) -> Driver:
    found = getattr(connection, "connection", connection)
    if isinstance(found, psycopg.AsyncConnection):
        awaited: psycopg.AsyncConnection[Any] = found

        async def execute(statement: str, args: list[Any]) -> Rows:
            async with psycopg.AsyncCursor(awaited, row_factory=tuple_row) as cursor:
                await cursor.execute(cast(Any, statement), args)
                return await cursor.fetchall()

        return Driver("%s", execute, blocks=False)
    if not isinstance(found, psycopg.Connection):
        raise wrong(connection, "a psycopg Connection or Cursor")
    blocked: psycopg.Connection[Any] = found

    def run(statement: str, args: list[Any]) -> Rows:
        with psycopg.Cursor(blocked, row_factory=tuple_row) as cursor:
            return cursor.execute(cast(Any, statement), args).fetchall()

    return blocking("%s", run)
