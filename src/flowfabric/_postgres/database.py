"""The database: every call goes through here, and only here driver errors become our own.

A call is one statement and one round trip. Serialization failures and deadlocks are repeated here, up to three times;
after a lost connection only repeatable calls are repeated, for as long as `reconnect_for` says.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from flowfabric._postgres import statements
from flowfabric._postgres.build import THIS, Build, build_of, check_build
from flowfabric._postgres.connections import Connections
from flowfabric._postgres.dsn import check_dsn, describe, next_host_first
from flowfabric._postgres.known_types import Connection
from flowfabric._postgres.migrate import SCHEMA_VERSION, check_steps
from flowfabric._postgres.outage import Outage, outage_of
from flowfabric._postgres.roles import not_allowed
from flowfabric.errors import (
    ConnectionFailed,
    Corruption,
    CursorRefused,
    FlowFabricError,
    InvalidInput,
    RetriesExhausted,
    TransportError,
    Unavailable,
)

MINIMUM_SERVER = 150_000
_log = logging.getLogger("flowfabric.database")
LOST = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # raised if the backend ended while its connection was idle
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.ReadOnlySQLTransactionError,  # the server became a standby: the next connection reaches the new primary
)
# The connection was made and lost.
_CUT = (
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.AdminShutdownError,
)
_CONNECT_TRIES = 3
# Settings that a server reports without being asked; either says that it is a standby, or as good as one.
_READ_ONLY = ("in_hot_standby", "default_transaction_read_only")
# Transient SQLSTATE classes: a retry may succeed.
_BUSY = ("53", "55", "57", "58")
_SERIALIZATION_TRIES = 3
_CONNECT_TIMEOUT = 10.0


class Database:
    """A pool of connections to one database with our schema in it."""

    def __init__(self, pool: Connections, target: str, reconnect_for: float, outage: Outage) -> None:
        self._pool = pool
        self.outage = outage
        self._reconnect_for = reconnect_for
        self.target = target
        self.flow_partitions = 0
        self._is_pooled = False

    @classmethod
    async def connect(
        cls,
        dsn: str,
        *,
        min_size: int = 1,
        max_size: int = 10,
        command_timeout: float = 60.0,
        reconnect_for: float = 15.0,
        prepared_statements: bool = True,
        check_schema: bool = True,
    ) -> Database:
        """Open the pool and check server and schema. `ConnectionFailed` names the problem."""
        check_dsn(dsn)
        tries = _CONNECT_TRIES
        while True:
            tries -= 1
            try:
                return await cls._open(
                    dsn, min_size, max_size, command_timeout, reconnect_for, prepared_statements, check_schema
                )
            except ConnectionFailed as error:
                if tries == 0 or not isinstance(error.__cause__, _CUT):
                    raise

    @classmethod
    async def _open(
        cls,
        dsn: str,
        min_size: int,
        max_size: int,
        command_timeout: float,
        reconnect_for: float,
        prepared_statements: bool,
        check_schema: bool,
    ) -> Database:
        target = describe(dsn)
        address = dsn
        outage = outage_of(dsn, target)
        is_connected = False
        setup = []
        if prepared_statements:
            # A call waits for locked rows and then reads them as they are; a stricter default would refuse them.
            # Behind a transaction-pooling proxy the setting would stay on another client's connection.
            setup.append("set default_transaction_isolation = 'read committed'")

        async def open_one() -> asyncpg.Connection[Any]:
            nonlocal address
            try:
                connection = await asyncpg.connect(
                    address,
                    timeout=min(_CONNECT_TIMEOUT, command_timeout),
                    command_timeout=command_timeout,
                    statement_cache_size=100 if prepared_statements else 0,
                    connection_class=Connection,
                    server_settings={"application_name": "flowfabric"},
                )
            except Exception as error:
                if isinstance(error, TimeoutError):
                    address = next_host_first(address)
                # The caller of `connect` reports its own failure; a full server refuses connections and is not away.
                if is_connected and not isinstance(error, asyncpg.TooManyConnectionsError):
                    outage.lost(error)
                raise
            reported = connection.get_settings()
            if any(getattr(reported, name, "off") == "on" for name in _READ_ONLY):
                if is_connected:
                    outage.lost(asyncpg.ReadOnlySQLTransactionError("it is read-only"))
            else:
                outage.found()
            if setup:
                try:
                    await connection.execute("; ".join(setup))
                except BaseException:
                    connection.terminate()
                    raise
            return connection

        pool = Connections(open_one, max_size)
        try:
            await pool.fill(min_size)
        except FlowFabricError:
            raise
        except Exception as error:
            raise connection_failed(error, target) from error
        database = cls(pool, target, reconnect_for, outage)
        database._is_pooled = not prepared_statements
        try:
            if check_schema:
                await database._check()
                # A connection lost in a failover is replaced by one to another server.
                setup.append(statements.BEGIN_EPOCH)
        except FlowFabricError:
            pool.terminate()
            raise
        except BaseException as error:
            pool.terminate()
            if isinstance(error, Exception):
                raise connection_failed(error, target) from error
            raise
        is_connected = True
        return database

    async def _check(self) -> None:
        async with self.connection() as connection:
            check_server(connection, self.target)
            try:
                row = await connection.fetchrow(statements.DEPLOYMENT_INFO)
            except asyncpg.UndefinedColumnError as error:
                raise ConnectionFailed(
                    "schema_older", "its functions belong to another build", target=self.target
                ) from error
            except (asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError) as error:
                raise ConnectionFailed("schema_missing", target=self.target) from error
            except asyncpg.InsufficientPrivilegeError as error:
                raise ConnectionFailed("missing_privileges", str(error), target=self.target) from error
        build = check_deployment(row, self.target)
        if build.version == THIS.version and build.digest != THIS.digest:
            _log.warning("the functions in %s differ from this package's; run `flowfabric migrate`", self.target)
        async with self.connection() as connection:
            await connection.execute(statements.BEGIN_EPOCH)
        self.flow_partitions = row["flow_partitions"]
        # Where a session's setting cannot be kept, a stricter default of the database is overridden call by call.
        self._pool.asks_for_isolation = self._is_pooled and row["isolation"] != "read committed"

    async def close(self) -> None:
        await self._pool.close()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection[Any]]:
        """Yield one connection of the pool, for more than one call."""
        async with self._pool.acquire() as connection:
            yield connection

    async def fetch(self, sql: str, args: Sequence[Any], *, repeatable: bool = False) -> list[asyncpg.Record]:
        """Run one statement. `repeatable`: doing it twice has the effect of doing it once."""
        conflicts = 0
        lost_since: float | None = None
        pause = 0.05
        while True:
            try:
                return await self._pool.fetch(sql, args)
            except (asyncpg.SerializationError, asyncpg.DeadlockDetectedError) as error:
                conflicts += 1
                if conflicts >= _SERIALIZATION_TRIES:
                    raise RetriesExhausted(str(error)) from error
                await asyncio.sleep(0.005 * conflicts)
            except (TimeoutError, asyncpg.DataError, OverflowError, asyncpg.InsufficientPrivilegeError) as error:
                # Not a lost connection, despite its class: a retry would take as long, or fail again.
                raise failure(error, sql, self.target) from error
            except LOST as error:
                now = time.monotonic()
                lost_since = lost_since or now
                if not repeatable or now - lost_since >= self._reconnect_for or self._pool.is_closing:
                    raise translate(error, self.target) from error
                await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - spreads reconnects
                pause = min(pause * 2, 1.0)
            except asyncpg.PostgresError as error:
                raise translate(error, self.target) from error


def failure(error: Exception, sql: str, target: str) -> FlowFabricError:
    """Return our error for one of the driver that a statement raised."""
    match error:
        case asyncpg.SerializationError() | asyncpg.DeadlockDetectedError():
            return RetriesExhausted(str(error))
        case OverflowError():
            # The driver does not say where. The functions store no such time; the audit names the row.
            return Corruption("a stored time is outside the years 1 to 9999; `times_finite` of the audit names it")
        case asyncpg.InsufficientPrivilegeError():
            return not_allowed(str(error), sql) or translate(error, target)
        case _:
            return translate(error, target)


def check_deployment(row: Any, target: str) -> Build:
    """Return the build of the functions in a row of `deployment_info`; refuse what this process cannot work with."""
    check_steps(row["steps"] if row is not None else ())
    version = (row["schema_version"] if row is not None else None) or 0
    if version < SCHEMA_VERSION:
        raise ConnectionFailed(
            "schema_older", f"the schema is version {version}, this package needs {SCHEMA_VERSION}", target=target
        )
    build = build_of(row)
    check_build(build, target)
    return build


def check_server(connection: asyncpg.Connection[Any], target: str) -> None:
    """Refuse a server that lacks features that the functions use."""
    server = connection.get_server_version()
    if (server.major, server.minor) < (MINIMUM_SERVER // 10_000, 0):
        raise ConnectionFailed(
            "server_too_old", f"PostgreSQL {server.major} is too old, 15 or newer is needed", target=target
        )


def connection_failed(error: Exception, target: str) -> ConnectionFailed:
    """Return why the connection failed, in one sentence that says what to do."""
    match error:
        case asyncpg.InvalidPasswordError() | asyncpg.InvalidAuthorizationSpecificationError():
            kind = "wrong_password"
        case asyncpg.InvalidCatalogNameError():
            kind = "database_missing"
        case asyncpg.InsufficientPrivilegeError():
            kind = "missing_privileges"
        case _:
            kind = "unreachable"
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        detail = "the address cannot be read; check the port and the options after the ?"
    else:
        detail = "" if isinstance(error, asyncpg.InvalidPasswordError) else str(error) or type(error).__name__
    return ConnectionFailed(kind, detail, target=target)


def translate(error: BaseException, target: str) -> FlowFabricError:
    """Convert a driver's error to one of ours."""
    match error:
        case FlowFabricError():
            return error
        case asyncpg.InsufficientPrivilegeError():
            return ConnectionFailed("missing_privileges", str(error), target=target)
        case asyncpg.UndefinedFunctionError():
            # Not a failure of whatever called: a process of another version can do it.
            return TransportError(
                "server_busy", f"the functions in the database are not those of this package: {_words(error)}"
            )
        case asyncpg.DataError() if type(error) is asyncpg.DataError:
            # The driver could not encode an argument: a fallback after the checks of the operations.
            return InvalidInput(str(error))
        case asyncio.TimeoutError() | asyncpg.QueryCanceledError():
            return TransportError("timeout", str(error) or "no response in time")
        case asyncpg.PostgresError(sqlstate="FF002"):
            return Unavailable("read_events", str(error))
        case asyncpg.PostgresError(sqlstate="FF003"):
            return Unavailable("read_committed", str(error))
        case asyncpg.PostgresError(sqlstate="FF004"):
            return Corruption(str(error))
        case asyncpg.PostgresError(sqlstate="FF005" | "FF006"):
            kind = "cursor_ahead" if error.sqlstate == "FF005" else "cursor_expired"
            position, epoch = str(error.detail).split()
            return CursorRefused(kind, _words(error), position=int(position), epoch=int(epoch))
        case asyncpg.TooManyConnectionsError():
            return TransportError("server_busy", _words(error))
        case _ if isinstance(error, LOST):
            return TransportError("transport", str(error) or type(error).__name__)
        case asyncpg.PostgresError(sqlstate="53200") if "max_locks_per_transaction" in str(getattr(error, "hint", "")):
            return TransportError(
                "server_busy",
                "one transaction touches more lanes and kinds than the server has locks for; use several transactions"
                " or raise max_locks_per_transaction",
            )
        case asyncpg.PostgresError(sqlstate="42704" | "58P01") if "plpgsql" in _words(error):
            return ConnectionFailed(
                "server_unfit", f"it cannot run the language plpgsql: {_words(error)}", target=target
            )
        case asyncpg.PostgresError() if (error.sqlstate or "")[:2] in _BUSY:
            return TransportError("server_busy", _words(error))
        case asyncpg.PostgresError():
            return TransportError("other", f"{type(error).__name__}: {_words(error)}")
        case _:
            return TransportError("other", f"{type(error).__name__}: {error}")


def _words(error: asyncpg.PostgresError) -> str:
    """Return the server's message without its details, which may contain a whole row."""
    return str(error.args[0]) if error.args else type(error).__name__
