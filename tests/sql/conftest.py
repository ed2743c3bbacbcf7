"""What the SQL tests share: one event loop, and databases that are wiped before every test while connections stay open.

Most of what a test on a fresh database costs is not its statements but new connections and what each of them plans
for the first time. `engine`, `plain_engine`, `sql`, `clock` and `database` therefore lead into one database for the
whole run, and `world` into another one. A test that wants connections without a past takes `fresh_database`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from tests.conftest import fresh_database
from tests.sql.suspending import SuspendingWorld, open_suspending
from tests.support import CheckedEngine, Clock, Wipe

# What a test may change beside rows. A database that has changed is not used again.
_CATALOG = """
select md5(string_agg(x.line, '|' order by x.line collate "C")) from (
    select concat_ws(' ', p.oid, p.proname, p.prosrc, p.proacl, p.proconfig)
        from pg_proc p where p.oid >= 16384 and p.pronamespace::regnamespace::text !~ '^pg_'
    union all select concat_ws(' ', c.oid, c.relname, c.relkind, c.relacl, c.reloptions, c.relrowsecurity)
        from pg_class c where c.oid >= 16384 and c.relnamespace::regnamespace::text !~ '^pg_'
    union all select concat_ws(' ', a.attrelid, a.attname, a.atttypid, a.attnotnull, a.attisdropped, a.attacl)
        from pg_attribute a join pg_class c on c.oid = a.attrelid
        where c.oid >= 16384 and c.relnamespace::regnamespace::text !~ '^pg_'
    union all select concat_ws(' ', t.oid, t.tgname, t.tgenabled) from pg_trigger t where not t.tgisinternal
    union all select concat_ws(' ', c.oid, c.conname, c.convalidated) from pg_constraint c where c.oid >= 16384
    union all select concat_ws(' ', n.oid, n.nspname, n.nspacl) from pg_namespace n where n.nspname !~ '^pg_'
    union all select s.setconfig::text from pg_db_role_setting s
        where s.setdatabase = (select d.oid from pg_database d where d.datname = current_database())
) x (line)
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All asynchronous tests of this folder run in one event loop."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("asyncio"):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


class Kept:
    """A database and the connections to it, opened when a test first asks for them."""

    def __init__(self, dsn: str, stack: contextlib.AsyncExitStack, keeper: asyncpg.Connection[Any]) -> None:
        self.dsn = dsn
        self._stack = stack
        self._keeper = keeper
        self._wipe: Wipe
        self._catalog = ""
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
        made._catalog = await keeper.fetchval(_CATALOG)
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
            return bool(await self._keeper.fetchval(_CATALOG) == self._catalog)
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
    return bool(one._database._pool.is_closing if isinstance(one, ff.Engine) else one.is_closed())


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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def keeper(server: str) -> AsyncIterator[Keeper]:
    keeper = Keeper(server)
    yield keeper
    await keeper.close()


@pytest_asyncio.fixture(loop_scope="session")
async def kept(keeper: Keeper) -> Kept:
    """A database with the rows of a fresh one."""
    return await keeper.take()


@pytest.fixture
def database(kept: Kept) -> str:
    """Its DSN."""
    return kept.dsn


@pytest_asyncio.fixture(loop_scope="session")
async def engine(kept: Kept) -> AsyncIterator[CheckedEngine]:
    """An engine that audits the database after every operation and once more at the end."""
    engine = await kept.checked()
    yield engine
    await engine.check()


@pytest_asyncio.fixture(loop_scope="session")
async def plain_engine(kept: Kept) -> AsyncIterator[ff.Engine]:
    """An engine without the audit after each operation, for volume; audited once at the end."""
    engine = await kept.plain()
    yield engine
    assert await engine.audit(events=True) == []


@pytest_asyncio.fixture(loop_scope="session")
async def sql(kept: Kept) -> asyncpg.Connection[Any]:
    """A plain connection of the owner, for looking behind the functions."""
    return await kept.sql()


@pytest_asyncio.fixture(loop_scope="session")
async def clock(sql: asyncpg.Connection[Any]) -> Clock:
    """Moves the database's clock."""
    return Clock(sql)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(server: str) -> AsyncIterator[SuspendingWorld]:
    """The database of all worlds."""
    async with open_suspending(server) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="session")
async def world(shared: SuspendingWorld) -> SuspendingWorld:
    """The same without the rows of the test before."""
    await shared.wipe()
    return shared
