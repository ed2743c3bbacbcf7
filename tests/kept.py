"""A database for many tests, wiped before each of them while the connections to it stay open.

Most of what a test on a fresh database costs is not its statements but new connections and what each of them plans
for the first time. A module that imports the fixtures (`from tests.kept import *`) gets `engine`, `plain_engine`,
`sql`, `clock` and `database` on such a database, in the event loop of the run. A test that wants connections without a
past takes `fresh_database`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from tests.databases import fresh_database
from tests.support import CheckedEngine, Clock, Wipe
from tests.wiped import Catalog

__all__ = ["kept_clock", "kept_database", "kept_engine", "kept_plain_engine", "kept_sql", "kept_state"]


class Kept:
    """A database and the connections to it, opened when a test first asks for them."""

    def __init__(self, dsn: str, stack: contextlib.AsyncExitStack, keeper: asyncpg.Connection[Any]) -> None:
        self.dsn = dsn
        self._stack = stack
        self._keeper = keeper
        self._wipe: Wipe
        self._catalog: Catalog
        self._open: dict[str, Any] = {}

    @classmethod
    async def make(cls, server: str) -> Kept:
        async with contextlib.AsyncExitStack() as stack:
            dsn = await stack.enter_async_context(fresh_database(server))
            keeper = await asyncpg.connect(dsn)
            stack.push_async_callback(keeper.close)
            await keeper.execute("set lock_timeout = '2s'")
            made = cls(dsn, stack.pop_all(), keeper)
        made._wipe = await Wipe.of(keeper)
        made._catalog = await Catalog.of(keeper)
        return made

    async def renew(self) -> bool:
        """Make it what a fresh one is; False if that is not possible."""
        if any(_is_closed(one) for one in self._open.values()):
            return False
        try:
            if (sql := self._open.get("sql")) is not None:
                if sql.is_in_transaction():
                    return False
                await sql.execute("reset session authorization")
                await sql.reset()
            await self._wipe()
            return await self._catalog.is_unchanged()
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            return False

    async def checked(self) -> CheckedEngine:
        if "checked" not in self._open:
            self._open["checked"] = await self._stack.enter_async_context(await CheckedEngine.connect(self.dsn))
        engine: CheckedEngine = self._open["checked"]
        return engine

    async def plain(self) -> ff.Engine:
        if "plain" not in self._open:
            self._open["plain"] = await self._stack.enter_async_context(await ff.Engine.connect(self.dsn))
        engine: ff.Engine = self._open["plain"]
        return engine

    async def sql(self) -> asyncpg.Connection[Any]:
        if "sql" not in self._open:
            self._open["sql"] = await asyncpg.connect(self.dsn)
            self._stack.callback(self._open["sql"].terminate)
        connection: asyncpg.Connection[Any] = self._open["sql"]
        return connection

    async def close(self) -> None:
        await self._stack.aclose()


def _is_closed(one: Any) -> bool:
    if isinstance(one, ff.Engine):
        return one._database._pool.is_closing or one._stream_ops.is_closing
    return bool(one.is_closed())


class Keeper:
    """The database that the tests of a run use one after another, replaced after one that left more than rows."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._kept: Kept | None = None

    async def take(self) -> Kept:
        if self._kept is not None and not await self._kept.renew():
            await self.close()
        if self._kept is None:
            self._kept = await Kept.make(self._server)
        return self._kept

    async def close(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            await kept.close()


@pytest_asyncio.fixture(name="keeper", scope="session", loop_scope="session")
async def the_keeper(server: str) -> AsyncIterator[Keeper]:
    keeper = Keeper(server)
    yield keeper
    await keeper.close()


@pytest_asyncio.fixture(name="kept", loop_scope="session")
async def kept_state(keeper: Keeper) -> Kept:
    """A database with the rows of a fresh one."""
    return await keeper.take()


@pytest.fixture(name="database")
def kept_database(kept: Kept) -> str:
    """Its DSN."""
    return kept.dsn


@pytest_asyncio.fixture(name="engine", loop_scope="session")
async def kept_engine(kept: Kept) -> AsyncIterator[CheckedEngine]:
    """An engine that audits the database after every operation and once more at the end."""
    engine = await kept.checked()
    yield engine
    await engine.check()


@pytest_asyncio.fixture(name="plain_engine", loop_scope="session")
async def kept_plain_engine(kept: Kept) -> AsyncIterator[ff.Engine]:
    """An engine without the audit after each operation, for volume; audited once at the end."""
    engine = await kept.plain()
    yield engine
    assert await engine.audit(events=True) == []


@pytest_asyncio.fixture(name="sql", loop_scope="session")
async def kept_sql(kept: Kept) -> asyncpg.Connection[Any]:
    """A plain connection of the owner, for looking behind the functions."""
    return await kept.sql()


@pytest_asyncio.fixture(name="clock", loop_scope="session")
async def kept_clock(sql: asyncpg.Connection[Any]) -> Clock:
    """Moves the database's clock."""
    return Clock(sql)
