"""Submit through SQLAlchemy 2: a `Connection` or `Session`, or with `_async` an `AsyncConnection` or `AsyncSession`.

For the dialects `postgresql+psycopg` and `postgresql+asyncpg`. A session is not flushed: its pending changes are
written at their usual time, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

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
from flowfabric.errors import InvalidInput
from flowfabric.values.execution import Created, Duplicate, NewExecution

try:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, scoped_session
except ImportError as error:
    raise missing("SQLAlchemy 2", "sqlalchemy") from error

if TYPE_CHECKING:  # needs greenlet, which synchronous programs do without
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

Target: TypeAlias = "Connection | Session | scoped_session[Any]"
AsyncTarget: TypeAlias = "AsyncConnection | AsyncSession | async_scoped_session[Any]"

_PLACEHOLDERS = {"psycopg": "%s", "psycopg_async": "%s", "asyncpg": "${}"}


def create_execution(connection: Target, *, wake: bool = True, **fields: Unpack[Fields]) -> Created | Duplicate:
    """Submit one execution as part of the connection's transaction. The fields are those of `NewExecution`."""
    return only(create_many(connection, one(**fields), wake=wake))


def create_many(connection: Target, items: Sequence[NewExecution], *, wake: bool = True) -> list[Verdict]:
    """Submit up to 1,000 executions; one verdict per item, a refused one as the exception it would have raised."""
    found = driver(connection)
    if not found.blocks:
        raise wrong(connection, "a Connection or Session")
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
        raise wrong(connection, "an AsyncConnection or AsyncSession")
    return await _submission.create_many(found, items, wake)


def driver(connection: Target | AsyncTarget) -> Driver:
    if isinstance(connection, scoped_session):
        connection = connection()
    if not isinstance(connection, Session | Connection):
        return _awaited(connection)
    found: Session | Connection = connection

    def run(statement: str, args: list[Any]) -> Rows:
        live = found.connection() if isinstance(found, Session) else found
        return live.exec_driver_sql(statement, tuple(args)).fetchall()

    return blocking(_placeholder(found.get_bind() if isinstance(found, Session) else found), run)


def _awaited(connection: Any) -> Driver:
    allowed = "a Connection, Session, AsyncConnection or AsyncSession"
    try:
        from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session  # noqa: PLC0415
    except ImportError:
        raise wrong(connection, f"{allowed}, of which the last two need greenlet") from None
    if isinstance(connection, async_scoped_session):
        connection = connection()
    if not isinstance(connection, AsyncSession | AsyncConnection):
        raise wrong(connection, allowed)
    found: AsyncSession | AsyncConnection = connection

    async def execute(statement: str, args: list[Any]) -> Rows:
        live = await found.connection() if isinstance(found, AsyncSession) else found
        return (await live.exec_driver_sql(statement, tuple(args))).fetchall()

    return Driver(_placeholder(found.get_bind() if isinstance(found, AsyncSession) else found), execute, blocks=False)


def _placeholder(bound: Any) -> str:
    dialect = bound.dialect
    name = f"{dialect.name}+{dialect.driver}"
    if dialect.name != "postgresql" or dialect.driver not in _PLACEHOLDERS:
        raise InvalidInput(f"got {name}", field="connection", allowed="postgresql+psycopg or postgresql+asyncpg")
    return _PLACEHOLDERS[dialect.driver]
