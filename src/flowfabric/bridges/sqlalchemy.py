"""Submit through SQLAlchemy 2: a `Connection` or `Session`, or with `_async` an `AsyncConnection` or `AsyncSession`.

For the dialects `postgresql+psycopg` and `postgresql+asyncpg`. A session is not flushed: its pending changes are
written at their usual time, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, Unpack

from flowfabric.bridges._submission import Fields, Rows, Verdict, missing, one, only, run, run_async, submission
from flowfabric.errors import InvalidInput
from flowfabric.values.execution import Created, Duplicate, NewExecution

try:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session
except ImportError as error:
    raise missing("SQLAlchemy 2", "sqlalchemy") from error

Target: TypeAlias = "Connection | Session"
AsyncTarget: TypeAlias = "AsyncConnection | AsyncSession"

_PLACEHOLDERS = {"psycopg": "%s", "psycopg_async": "%s", "asyncpg": "${}"}


def create_execution(connection: Target, *, wake: bool = True, **fields: Unpack[Fields]) -> Created | Duplicate:
    """Submit one execution as part of the connection's transaction. The fields are those of `NewExecution`."""
    return only(create_many(connection, one(**fields), wake=wake))


def create_many(connection: Target, items: Sequence[NewExecution], *, wake: bool = True) -> list[Verdict]:
    """Submit up to 1,000 executions; one verdict per item, a refused one as the exception it would have raised."""
    found = connection.connection() if isinstance(connection, Session) else connection
    if not isinstance(found, Connection):
        raise _wrong(connection, "a Connection or Session")

    def execute(statement: str, args: list[Any]) -> Rows:
        return found.exec_driver_sql(statement, tuple(args)).fetchall()

    return run(submission(items, _placeholder(found.dialect), wake=wake), execute)


async def create_execution_async(
    connection: AsyncTarget, *, wake: bool = True, **fields: Unpack[Fields]
) -> Created | Duplicate:
    """`create_execution`, awaited."""
    return only(await create_many_async(connection, one(**fields), wake=wake))


async def create_many_async(
    connection: AsyncTarget, items: Sequence[NewExecution], *, wake: bool = True
) -> list[Verdict]:
    """`create_many`, awaited."""
    found = await connection.connection() if isinstance(connection, AsyncSession) else connection
    if not isinstance(found, AsyncConnection):
        raise _wrong(connection, "an AsyncConnection or AsyncSession")

    async def execute(statement: str, args: list[Any]) -> Rows:
        return (await found.exec_driver_sql(statement, tuple(args))).fetchall()

    return await run_async(submission(items, _placeholder(found.dialect), wake=wake), execute)


def _placeholder(dialect: Any) -> str:
    name = f"{dialect.name}+{dialect.driver}"
    if dialect.name != "postgresql" or dialect.driver not in _PLACEHOLDERS:
        raise InvalidInput(f"got {name}", field="connection", allowed="postgresql+psycopg or postgresql+asyncpg")
    return _PLACEHOLDERS[dialect.driver]


def _wrong(connection: object, allowed: str) -> InvalidInput:
    return InvalidInput(f"got {type(connection).__qualname__}", field="connection", allowed=allowed)
