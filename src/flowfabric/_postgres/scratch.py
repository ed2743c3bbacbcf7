"""Databases for one test each: copied from a migrated template, dropped afterwards; and their clock.

The caller starts the server and may create databases on it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from flowfabric._postgres.build import THIS
from flowfabric._postgres.database import check_server, connection_failed
from flowfabric._postgres.dsn import check_dsn, describe
from flowfabric._postgres.known_types import Connection
from flowfabric._postgres.migrate import SCHEMA_VERSION, migrate
from flowfabric.values.ids import mint_uuid
from flowfabric.values.lease import Handle

# Each build makes its own template, and several may be in use on one server.
# A copy of a database in use begins another epoch of its event log; a copy of a template begins the first one.
UNCLAIMED = "update flowfabric.log_epoch set database = null"
TEMPLATE = f"flowfabric_template_{SCHEMA_VERSION}_{THIS.digest[:12]}"
_LOCK = 708_301
Strategy = Literal["wal_log", "file_copy"]


def in_database(dsn: str, name: str) -> str:
    """Return the DSN of another database on the same server."""
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))


class Databases:
    """Creates and drops databases on one server, over one connection, one after another."""

    def __init__(self, connection: asyncpg.Connection[Any], dsn: str, strategy: Strategy) -> None:
        self._connection = connection
        self._dsn = dsn
        self._strategy = strategy
        self._count = 0
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, dsn: str, strategy: Strategy = "wal_log") -> Self:
        """Connect, and create the template if it is missing. Any number of processes may do so at the same time.

        `file_copy` copies faster if the server need not flush anything; otherwise it costs a checkpoint.
        """
        check_dsn(dsn)
        try:
            connection = await asyncpg.connect(dsn, connection_class=Connection)
        except Exception as error:
            raise connection_failed(error, describe(dsn)) from error
        try:
            check_server(connection, describe(dsn))
            await connection.execute("select pg_advisory_lock($1)", _LOCK)
            try:
                await _make_template(connection, dsn)
            finally:
                await connection.execute("select pg_advisory_unlock($1)", _LOCK)
        except asyncpg.InsufficientPrivilegeError as error:
            await connection.close()
            raise connection_failed(error, describe(dsn)) from error
        except BaseException:
            await connection.close()
            raise
        return cls(connection, dsn, strategy)

    async def create(self) -> str:
        """Create a fresh copy of the template; returns its DSN."""
        self._count += 1
        name = f"flowfabric_test_{os.getpid()}_{mint_uuid().hex[-8:]}_{self._count}"
        # We generate the names, so they need no quoting.
        async with self._turn:
            await self._connection.execute(f"create database {name} template {TEMPLATE} strategy {self._strategy}")
        return in_database(self._dsn, name)

    async def drop(self, dsn: str) -> None:
        """Drop a database that `create` made, even if it has connections."""
        name = urlsplit(dsn).path.lstrip("/")
        async with self._turn:
            await self._connection.execute(f"drop database if exists {name} with (force)")

    async def close(self) -> None:
        await self._connection.close()


async def _make_template(connection: asyncpg.Connection[Any], dsn: str) -> None:
    if await connection.fetchval("select exists (select from pg_database where datname = $1)", TEMPLATE):
        return
    # Under another name until it is complete: an unfinished one is never copied after a crash.
    making = f"{TEMPLATE}_making"
    await connection.execute(f"drop database if exists {making} with (force)")
    await connection.execute(f"create database {making}")
    inside = await asyncpg.connect(in_database(dsn, making))
    try:
        await migrate(inside)
        await inside.execute(UNCLAIMED)
    finally:
        await inside.close()
    await connection.execute(f"alter database {making} rename to {TEMPLATE}")


async def move_clock(connection: asyncpg.Connection[Any], by: timedelta, held: Sequence[Handle] = ()) -> None:
    """Move the clock of a database forward. Leases in `held` are extended: their holders are alive."""
    async with connection.transaction():
        await connection.execute("update flowfabric.clock set shift = shift + $1", by)
        if held:
            await connection.execute(
                "update flowfabric.execution e set lease_expires_at = e.lease_expires_at + $1"
                " from unnest($2::integer[], $3::uuid[], $4::uuid[]) as h (partition, id, lease)"
                " where e.partition = h.partition and e.id = h.id and e.lease_id = h.lease and e.state = 'active'"
                " and e.lease_lost is null",
                by,
                [handle.partition for handle in held],
                [handle.uuid for handle in held],
                [handle.lease_id for handle in held],
            )
        await connection.execute("select pg_notify('flowfabric', 'timer'), pg_notify('flowfabric', 'work')")


async def read_clock(
    connection: asyncpg.Connection[Any], kinds: Sequence[str] = ()
) -> tuple[datetime, datetime | None]:
    """Return the time of a database, and when the next timer of these kinds is due, or a limit may let something go."""
    row = await connection.fetchrow(
        "select flowfabric.now() as now, case when cardinality($1::text[]) > 0 then least(flowfabric.next_due($1),"
        " (select min(d.due_at) from flowfabric.limit_due d),"
        " (select min(b.next_reset_at) from flowfabric.budget b where exists ("
        "  select from flowfabric.blocked x where x.limit_id = b.id))) end as due",
        list(kinds),
    )
    assert row is not None
    return row["now"], row["due"]
