"""Submit through psycopg 3: a `Connection` or `Cursor`, or with `_async` an `AsyncConnection` or `AsyncCursor`.

A cursor only names its connection: its own result, row factory and placeholders do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, Unpack, cast

from flowfabric.bridges._submission import Fields, Rows, Verdict, missing, one, only, run, run_async, submission
from flowfabric.errors import InvalidInput
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
    found = getattr(connection, "connection", connection)
    if not isinstance(found, psycopg.Connection):
        raise _wrong(connection, "a psycopg Connection or Cursor")

    def execute(statement: str, args: list[Any]) -> Rows:
        with psycopg.Cursor(found, row_factory=tuple_row) as cursor:
            return cursor.execute(cast(Any, statement), args).fetchall()

    return run(submission(items, "%s", wake=wake), execute)


async def create_execution_async(
    connection: AsyncTarget, *, wake: bool = True, **fields: Unpack[Fields]
) -> Created | Duplicate:
    """`create_execution`, awaited."""
    return only(await create_many_async(connection, one(**fields), wake=wake))


async def create_many_async(
    connection: AsyncTarget, items: Sequence[NewExecution], *, wake: bool = True
) -> list[Verdict]:
    """`create_many`, awaited."""
    found = getattr(connection, "connection", connection)
    if not isinstance(found, psycopg.AsyncConnection):
        raise _wrong(connection, "a psycopg AsyncConnection or AsyncCursor")

    async def execute(statement: str, args: list[Any]) -> Rows:
        async with psycopg.AsyncCursor(found, row_factory=tuple_row) as cursor:
            await cursor.execute(cast(Any, statement), args)
            return await cursor.fetchall()

    return await run_async(submission(items, "%s", wake=wake), execute)


def _wrong(connection: object, allowed: str) -> InvalidInput:
    return InvalidInput(f"got {type(connection).__qualname__}", field="connection", allowed=allowed)
