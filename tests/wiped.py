"""The server of the testing kit, whose database is wiped for the next test instead of made anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg

import flowfabric as ff
from flowfabric.engine.audit import Violation
from flowfabric.testing import Server
from tests.support import Wipe

# What a test may change beside rows. A database that has changed is not used again.
CATALOG = """
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
    union all select b.functions from flowfabric.build b
) x (line)
"""


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
            kept.connection.terminate()
            await kept.engine.close()
            await self._databases.drop(kept.dsn)

    async def _finish(self) -> None:
        await self._forget()
        await super()._finish()

    def audit(self, dsn: str) -> list[Violation]:
        """What is wrong in the database of the test, told over a connection that knows how to look."""
        assert self._kept is not None and self._kept.dsn == dsn
        return self._portal.call(self._kept.engine.audit(events=True))


class _Kept:
    def __init__(
        self, dsn: str, connection: asyncpg.Connection[Any], engine: ff.Engine, wipe: Wipe, catalog: str
    ) -> None:
        self.dsn = dsn
        self.connection = connection
        self.engine = engine
        self._wipe = wipe
        self._catalog = catalog

    @classmethod
    async def of(cls, dsn: str) -> _Kept:
        connection = await asyncpg.connect(dsn)
        await connection.execute("set lock_timeout = '2s'")
        engine = await ff.Engine.connect(dsn, max_size=1, notifications=False)
        return cls(dsn, connection, engine, await Wipe.of(connection), await connection.fetchval(CATALOG))

    async def renew(self) -> bool:
        """Make it what a fresh one is; False if that is not possible."""
        own = await self.engine._database.fetch("select pg_backend_pid() as pid", [], repeatable=True)
        try:
            await self.connection.execute(
                "select pg_terminate_backend(a.pid) from pg_stat_activity a where a.datname = current_database()"
                f" and a.pid <> pg_backend_pid() and a.pid <> {own[0]['pid']}"
            )
            await self._wipe()
            return bool(await self.connection.fetchval(CATALOG) == self._catalog)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            return False
