"""One transaction in place of the pool: what an engine does through it commits or rolls back as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from flowfabric._postgres.database import Database, failure
from flowfabric.errors import FlowFabricError


class BoundDatabase(Database):
    """A database whose calls run on one connection, in a transaction that its maker ends.

    Nothing is repeated here: after an error of the server the transaction can only be rolled back, and the caller
    begins again.
    """

    def __init__(self, database: Database, connection: asyncpg.Connection[Any]) -> None:
        self.target = database.target
        self.outage = database.outage
        self.flow_partitions = database.flow_partitions
        self.is_broken = False  # it cannot commit, or must not
        self._error: FlowFabricError | None = None  # the first one of the server: whatever follows fails because of it
        self._connection = connection
        self._one_at_a_time = asyncio.Lock()

    async def fetch(self, sql: str, args: Sequence[Any], *, repeatable: bool = False) -> list[asyncpg.Record]:
        """Run one statement in the transaction."""
        async with self._one_at_a_time:
            if self._error is not None:
                raise self._error
            try:
                return list(await self._connection.fetch(sql, *args))
            except Exception as error:
                # An argument that the driver cannot encode does not reach the server.
                told = failure(error, sql, self.target)
                if type(error) is not asyncpg.DataError:
                    self.is_broken, self._error = True, told
                raise told from error
            except BaseException:
                self.is_broken = True
                raise

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection[Any]]:
        """Yield the connection of the transaction."""
        yield self._connection

    async def close(self) -> None:
        """The pool closes the connection."""
