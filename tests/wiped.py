"""Databases that are wiped for the next test instead of made anew, of the testing kit and of tests with own loops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.client.portal import Portal
from flowfabric.testing import Server
from tests.databases import fresh_database
from tests.support import Wipe

# What a test may change beside rows. A database that has changed is not used again.
_CONTENTS = """
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
    union all select concat_ws(' ', s.number, s.name) from flowfabric.schema_step s
    union all select b::text from flowfabric.build b
) x (line)
"""
# How many of these rows there are and when the last was written: read without their contents, which are long.
_ROWS = (
    "pg_proc where oid >= 16384",
    "pg_class where oid >= 16384",
    "pg_attribute where attrelid >= 16384",
    "pg_trigger where oid >= 16384",
    "pg_constraint where oid >= 16384",
    "pg_namespace",
    "pg_db_role_setting where setdatabase = (select oid from pg_database where datname = current_database())",
    "flowfabric.schema_step",
    "flowfabric.build",
)
_WRITTEN = " union all ".join(f"select concat(count(*), '/', max(xmin::text::bigint)) from {rows}" for rows in _ROWS)
_WRITTEN = f"select string_agg(w.line, ' ') from ({_WRITTEN}) w (line)"


class Catalog:
    """Tells whether anything but rows differs from what it was at first."""

    def __init__(self, connection: asyncpg.Connection[Any], written: str, contents: str) -> None:
        self._connection = connection
        self._written = written
        self._contents = contents

    @classmethod
    async def of(cls, connection: asyncpg.Connection[Any]) -> Catalog:
        return cls(connection, await connection.fetchval(_WRITTEN), await connection.fetchval(_CONTENTS))

    async def is_unchanged(self) -> bool:
        written = await self._connection.fetchval(_WRITTEN)
        if written != self._written:
            if await self._connection.fetchval(_CONTENTS) != self._contents:
                return False
            self._written = written
        return True


class WipedServer(Server):
    """Gives one database to one test after another: a new one after a test that left more than rows."""

    def __init__(self, place: Path, dsn: str | None = None) -> None:
        super().__init__(place, dsn)
        self._kept: _Kept | None = None
        self._is_given = False

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        if self._is_given:
            with self.fresh() as dsn:
                yield dsn
            return
        self._is_given = True
        try:
            yield self._portal.call(self._renewed())
        finally:
            self._is_given = False

    def fresh(self) -> contextlib.AbstractContextManager[str]:
        """A database without connections."""
        return super().database()

    async def _renewed(self) -> str:
        if self._kept is not None and not await self._kept.renew():
            await self._forget()
        if self._kept is None:
            self._kept = await _Kept.of(await self._databases.create())
        return self._kept.dsn

    async def _forget(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()
            await self._databases.drop(kept.dsn)

    async def _finish(self) -> None:
        await self._forget()
        await super()._finish()

    def audit(self, dsn: str) -> list[asyncpg.Record]:
        """What is wrong in the database of the test, told over a connection that knows how to look."""
        assert self._kept is not None and self._kept.dsn == dsn
        return self._portal.call(self._kept.audit())


class Wiped:
    """As `WipedServer`, with copies of the template of the run: for tests with event loops of their own."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._portal = Portal()
        self._kept: _Kept | None = None
        self._copy = contextlib.AsyncExitStack()

    def take(self) -> str:
        """The DSN of a database with the rows of a fresh one, to which nothing else is connected."""
        return self._portal.call(self._renewed())

    async def _renewed(self) -> str:
        if self._kept is not None and not await self._kept.renew():
            await self._forget()
        if self._kept is None:
            self._kept = await _Kept.of(await self._copy.enter_async_context(fresh_database(self._server)))
        return self._kept.dsn

    async def _forget(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()
            await self._copy.aclose()

    def audit(self, dsn: str) -> list[asyncpg.Record]:
        """What is wrong in the database of the test, told over a connection that knows how to look."""
        assert self._kept is not None and self._kept.dsn == dsn
        return self._portal.call(self._kept.audit())

    def rows(self, dsn: str, table: str) -> int:
        """How many rows a table of the test's database has."""
        assert self._kept is not None and self._kept.dsn == dsn
        return self._portal.call(self._kept.rows(table))

    def close(self) -> None:
        self._portal.call(self._forget())
        self._portal.close()


# How many other connections there are, which are told to end.
_END_OTHERS = """
select count(pg_terminate_backend(a.pid)) from pg_stat_activity a
where a.datname = current_database() and a.pid <> pg_backend_pid()
"""


class _Kept:
    """A database, and the connection that empties and audits it."""

    def __init__(self, dsn: str, connection: asyncpg.Connection[Any], wipe: Wipe, catalog: Catalog) -> None:
        self.dsn = dsn
        self._connection = connection
        self._wipe = wipe
        self._catalog = catalog

    @classmethod
    async def of(cls, dsn: str) -> _Kept:
        connection = await asyncpg.connect(dsn)
        await connection.execute("set lock_timeout = '2s'")
        return cls(dsn, connection, await Wipe.of(connection), await Catalog.of(connection))

    async def renew(self) -> bool:
        """Make it what a fresh one is; False if that is not possible."""
        try:
            async with asyncio.timeout(5):
                while await self._connection.fetchval(_END_OTHERS):
                    await asyncio.sleep(0.002)
            await self._wipe()
            return await self._catalog.is_unchanged()
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            return False

    async def audit(self) -> list[asyncpg.Record]:
        return await self._connection.fetch("select rule, id, detail from flowfabric.audit(null, true)")

    async def rows(self, table: str) -> int:
        return int(await self._connection.fetchval(f"select count(*) from flowfabric.{table}"))

    def close(self) -> None:
        self._connection.terminate()


@pytest.fixture(name="wiped", scope="session")
def the_wiped(server: str) -> Iterator[Wiped]:
    wiped = Wiped(server)
    yield wiped
    wiped.close()


@pytest.fixture(name="database")
def wiped_database(wiped: Wiped) -> str:
    """The DSN of a migrated database with the rows of a fresh one."""
    return wiped.take()


@pytest.fixture(name="plain_engine")
async def wiped_plain_engine(database: str, wiped: Wiped) -> AsyncIterator[ff.Engine]:
    """An engine without the audit after each operation; its database is audited once at the end."""
    async with await ff.Engine.connect(database) as engine:
        yield engine
        assert wiped.audit(database) == []
