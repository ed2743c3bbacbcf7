"""The connection pool of one process to one database.

A call is one statement and changes no session state, so returning a connection needs no round trip and no bookkeeping.
The driver's own pool does more, even with a no-op reset: decision 20 has the figures. A connection is reused only if
its last call ended with a response of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg

if TYPE_CHECKING:
    Connection: TypeAlias = asyncpg.Connection[Any]


_UNUSED = 60.0  # seconds after which a connection that is not needed is closed


class Connections:
    """Up to `max_size` connections, opened when needed and given back after a minute; the last used is taken first."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]], max_size: int) -> None:
        self._connect = connect
        self.asks_for_isolation = False  # each call asks for READ COMMITTED: the default is another
        self._max_size = max_size
        self._free = asyncio.Semaphore(max_size)
        self._idle: list[tuple[float, Connection]] = []  # since when, oldest first
        self._open: set[Connection] = set()
        self._closing = False
        self._is_closed = False

    async def fill(self, size: int) -> None:
        """Open this many connections now, so that the first calls do not wait for them."""
        opened = await asyncio.gather(*(self._connect() for _ in range(size)), return_exceptions=True)
        for one in opened:
            if not isinstance(one, BaseException):
                self._open.add(one)
                self._idle.append((time.monotonic(), one))
        for one in opened:
            if isinstance(one, BaseException):
                self.terminate()
                raise one

    @property
    def is_closing(self) -> bool:
        return self._closing

    async def take(self) -> Connection:
        """Return a connection for exclusive use until `give`."""
        if self._closing:
            raise asyncpg.InterfaceError("the engine is closed")
        await self._free.acquire()
        try:
            while self._idle:
                _, connection = self._idle.pop()
                if not connection.is_closed():
                    return connection
                self._open.discard(connection)
            if self._closing:
                raise asyncpg.InterfaceError("the engine is closed")
            connection = await self._connect()
        except BaseException:
            self._free.release()
            raise
        self._open.add(connection)
        return connection

    def give(self, connection: Connection, *, usable: bool = True) -> None:
        """Return a connection to the pool. `usable`: the server answered its last call."""
        if not usable or self._closing or connection.is_closed():
            self._open.discard(connection)
            connection.terminate()
        else:
            self._idle.append((time.monotonic(), connection))
            self._give_back_one()
        self._free.release()

    def _give_back_one(self) -> None:
        """Close the connection that was not needed for longest, if that is long enough; one stays."""
        since, oldest = self._idle[0]
        if len(self._idle) > 1 and time.monotonic() - since >= _UNUSED:
            del self._idle[0]
            self._open.discard(oldest)
            oldest.terminate()

    async def fetch(self, sql: str, args: Sequence[Any]) -> list[asyncpg.Record]:
        """Run one statement on one connection."""
        connection = await self.take()
        usable = False
        try:
            if self.asks_for_isolation:
                async with connection.transaction(isolation="read_committed"):
                    found = await connection.fetch(sql, *args)
            else:
                found = await connection.fetch(sql, *args)
            usable = True
        except (asyncpg.PostgresError, asyncpg.DataError) as error:
            usable = not isinstance(error, asyncpg.ReadOnlySQLTransactionError)
            raise
        finally:
            self.give(connection, usable=usable)
        return list(found)

    @contextlib.asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """Yield a connection for a block, which must not change its session state."""
        connection = await self.take()
        try:
            yield connection
        except asyncpg.PostgresError:
            self.give(connection)
            raise
        except BaseException:
            self.give(connection, usable=False)
            raise
        self.give(connection, usable=not connection.is_closed() and not connection.is_in_transaction())

    async def close(self, patience: float = 10.0) -> None:
        """Let open calls end, for a while, then close everything."""
        if self._is_closed:
            return
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                for _ in range(self._max_size):
                    await self._free.acquire()
                for _, connection in list(self._idle):
                    await connection.close()
        self.terminate()

    def terminate(self) -> None:
        """Close everything immediately."""
        self._closing = self._is_closed = True
        for connection in self._open:
            connection.terminate()
        self._open.clear()
        self._idle.clear()
