"""Twenty followers wait while their server restarts, is replaced, loses its connections, or is behind a pooler."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.embedded import server as embedded
from flowfabric.engine import followers as loop
from flowfabric.engine.followers import Subscription
from flowfabric.engine.service import migrate_database
from flowfabric.errors import CursorRefused
from flowfabric.values.event import EventCursor, EventFilter
from tests.conftest import new_database  # noqa: F401 - a fixture
from tests.integration.test_restore import SETTINGS, crash, place, start, write  # noqa: F401 - a fixture among them
from tests.pooler import pooled
from tests.support import started

PATIENCE = 60.0
Events = Subscription[Any]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_FIRST_PAUSE", 0.02)
    monkeypatch.setattr(loop, "_LAST_PAUSE", 0.2)
    monkeypatch.setattr(loop, "_POLL", 0.5)


@contextlib.asynccontextmanager
async def twenty(dsn: str, **options: Any) -> AsyncIterator[list[Events]]:
    """Followers of leases in two engines, with and without filters, that wait at the end of the log."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(await ff.Engine.connect(dsn, **options)) for _ in range(2)]
        filters = (None, EventFilter(kind="test"), EventFilter(namespace="n"), EventFilter(instance_tag=("a", "b")))
        yield [await engines[n % 2].subscribe_lease_history(filter=filters[n % 4 if n < 12 else 0]) for n in range(20)]


async def begin(engine: ff.Engine) -> ff.ExecutionId:
    """One event that all of them take."""
    return (await started(engine, namespace="n", tags={"a": "b"})).execution_id


async def get(followers: Sequence[Events], expected: Sequence[ff.ExecutionId]) -> list[EventCursor]:
    """Each of them gets these events and no others; returns where they are."""

    async def some(one: Events) -> list[Any]:
        return [await anext(one) for _ in expected]

    async with asyncio.timeout(PATIENCE):
        found = await asyncio.gather(*(some(one) for one in followers))
    assert [[event.execution_id for event in events] for events in found] == [list(expected)] * len(followers)
    assert len({tuple(event.cursor for event in events) for events in found}) == 1
    assert [one.waiting for one in followers] == [0] * len(followers)
    return [event.cursor for event in found[0]]


@pytest.mark.parametrize("how", ["stop", "crash"])
async def test_followers_wait_for_a_server_that_restarts(place: Path, how: str) -> None:  # noqa: F811
    dsn = start(place)
    await migrate_database(dsn)
    async with twenty(dsn) as followers:
        async with await ff.Engine.connect(dsn) as writer:
            await get(followers, [await begin(writer)])
        waiting = [asyncio.ensure_future(anext(one)) for one in followers[:10]]
        await asyncio.sleep(0)
        if how == "stop":
            embedded.stop(place)
        else:
            crash(place)
        assert start(place) == dsn
        async with await ff.Engine.connect(dsn) as writer:
            first, second = await begin(writer), await begin(writer)
        async with asyncio.timeout(PATIENCE):
            assert {one.execution_id for one in await asyncio.gather(*waiting)} == {first}
        await get(followers[:10], [second])
        await get(followers[10:], [first, second])


@pytest.mark.parametrize("lost", [0, 5])
async def test_followers_learn_of_a_server_that_took_over(place: Path, lost: int) -> None:  # noqa: F811
    """One that lost nothing they have read continues; otherwise each is told where both logs were the same."""
    dsn = start(place)
    await migrate_database(dsn)
    kept = await write(dsn, 3)
    crash(place)
    shutil.copytree(place / "pgdata", place / "copy")
    assert start(place) == dsn
    async with twenty(dsn) as followers:
        async with await ff.Engine.connect(dsn) as writer:
            await get(followers, [await begin(writer) for _ in range(lost)])
        waiting = [asyncio.ensure_future(anext(one)) for one in followers[:10]]
        await asyncio.sleep(0)
        embedded.stop(place)
        shutil.rmtree(place / "pgdata")
        os.rename(place / "copy", place / "pgdata")
        (place / "pgdata" / "recovery.signal").touch()
        assert start(place) == dsn
        sql = await asyncpg.connect(dsn)
        while await sql.fetchval("select pg_is_in_recovery()"):
            await asyncio.sleep(0.01)
        await sql.close()
        async with await ff.Engine.connect(dsn) as writer:
            await continued(followers, waiting, None if lost == 0 else kept, writer)


class Standby:
    """A server that follows the one in a place, and can take over."""

    def __init__(self, place: Path) -> None:  # noqa: F811
        primary = place / "pgdata" / "postmaster.pid"
        pid, _, _, _, directory, *_ = primary.read_text().splitlines()
        with (place / "pgdata" / "pg_hba.conf").open("a") as access:
            access.write("local replication all trust\n")
        os.kill(int(pid), signal.SIGHUP)
        running = Path(f"/proc/{pid}/exe")  # the account of the server can run these programs
        self._programs = running.resolve().parent if running.exists() else embedded.program("pg_basebackup").parent
        self.place = Path(tempfile.mkdtemp(prefix="ff-standby-", dir="/tmp"))
        owner = primary.stat()
        os.chown(self.place, owner.st_uid, owner.st_gid)
        self._account = {"user": owner.st_uid, "group": owner.st_gid} if os.geteuid() == 0 else {}
        backup = ["pg_basebackup", "-D", str(self.place / "data"), "-h", directory, "-U", "postgres"]
        copied = self._run(*backup, "--wal-method=stream", "--write-recovery-conf", "--checkpoint=fast", "--no-sync")
        assert copied.wait() == 0, copied.args
        settings = {**SETTINGS, "listen_addresses": "", "unix_socket_directories": str(self.place), "port": "5432"}
        options = [f"--{name}={value}" for name, value in settings.items()]
        self._server = self._run("postgres", "-D", str(self.place / "data"), *options)
        self.dsn = f"postgresql://postgres@/flowfabric?host={self.place}&port=5432"
        # For followers: whichever of the two can be written.
        hosts = f"host={directory},{self.place}&port=5432,5432"
        self.either = f"postgresql://postgres@/flowfabric?{hosts}&target_session_attrs=read-write"

    def _run(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self._programs / program, *options],
            cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            **self._account,  # type: ignore[arg-type]
        )  # fmt: skip

    async def connect(self) -> asyncpg.Connection[Any]:
        async with asyncio.timeout(PATIENCE):
            while True:
                assert self._server.poll() is None, "the standby ended"
                with contextlib.suppress(OSError, asyncpg.CannotConnectNowError):
                    return await asyncpg.connect(self.dsn)
                await asyncio.sleep(0.02)

    def stop(self) -> None:
        self._server.send_signal(signal.SIGQUIT)
        self._server.wait()
        shutil.rmtree(self.place)


@pytest.mark.parametrize("lost", [0, 5])
async def test_followers_continue_on_the_standby_that_takes_over(place: Path, lost: int) -> None:  # noqa: F811
    """It replays the log of the server until that one is killed, or until its replication stopped before."""
    dsn = start(place)
    await migrate_database(dsn)
    standby = Standby(place)
    try:
        primary, sql = await asyncpg.connect(dsn), await standby.connect()
        async with twenty(standby.either) as followers:
            async with await ff.Engine.connect(standby.either) as writer:
                (kept,) = await get(followers, [await begin(writer)])
                written = await primary.fetchval("select pg_current_wal_flush_lsn()::text")
                async with asyncio.timeout(PATIENCE):
                    while not await sql.fetchval("select pg_last_wal_replay_lsn() >= $1::text::pg_lsn", written):
                        await asyncio.sleep(0.01)
                if lost:
                    await sql.execute("alter system set primary_conninfo = ''")
                    await sql.execute("select pg_reload_conf()")
                    async with asyncio.timeout(PATIENCE):
                        while await sql.fetchval("select count(*) from pg_stat_wal_receiver"):
                            await asyncio.sleep(0.01)
                    await get(followers, [await begin(writer) for _ in range(lost)])
            await primary.close()
            waiting = [asyncio.ensure_future(anext(one)) for one in followers[:10]]
            await asyncio.sleep(0)
            crash(place)
            assert await sql.fetchval("select pg_promote(true)")
            await sql.close()
            async with await ff.Engine.connect(standby.either) as writer:
                await continued(followers, waiting, None if lost == 0 else kept, writer)
    finally:
        standby.stop()


async def continued(
    followers: Sequence[Events], waiting: Sequence[asyncio.Future[Any]], kept: EventCursor | None, writer: ff.Engine
) -> None:
    """All of them get what the new server writes, or (`kept`) learn what both logs have, and continue there.

    `waiting` are iterations of the first followers, which began before.
    """
    new = [await begin(writer) for _ in range(10)]
    if kept is None:
        async with asyncio.timeout(PATIENCE):
            assert {one.execution_id for one in await asyncio.gather(*waiting)} == {new[0]}
        await get(followers[: len(waiting)], new[1:])
        cursors = await get(followers[len(waiting) :], new)
        assert {one.epoch > 0 for one in cursors} == {True}
        return
    later = [asyncio.ensure_future(anext(one)) for one in followers[len(waiting) :]]
    for one in (*waiting, *later):
        with pytest.raises(CursorRefused, match="cursor_ahead") as refused:
            async with asyncio.timeout(PATIENCE):
                await one
        assert refused.value.position == kept.position
        shared = EventCursor(refused.value.position, refused.value.epoch)
    async with await writer.subscribe_lease_history(after=shared) as again:
        await get([again], new)


@pytest.mark.parametrize("lost", [0, 5])
async def test_followers_learn_of_a_backup_that_was_restored(server: str, database: str, lost: int) -> None:
    """While they wait, the database is dropped, made again and filled from a dump."""
    name = urlsplit(database).path[1:]
    admin = await asyncpg.connect(server)
    async with twenty(database) as followers:
        async with await ff.Engine.connect(database) as writer:
            (kept,) = await get(followers, [await begin(writer)])
            programs = embedded.program("pg_dump").parent
            dump = subprocess.run([programs / "pg_dump", database], check=True, capture_output=True).stdout
            await get(followers, [await begin(writer) for _ in range(lost)])
        waiting = [asyncio.ensure_future(anext(one)) for one in followers[:10]]
        await asyncio.sleep(0)
        await admin.execute(f"drop database {name} with (force)")
        await admin.execute(f"create database {name}")
        subprocess.run([programs / "psql", "-q", "-v", "ON_ERROR_STOP=1", database], input=dump, check=True)
        async with await ff.Engine.connect(database) as writer:
            await continued(followers, waiting, None if lost == 0 else kept, writer)
    await admin.close()


async def test_followers_lose_nothing_when_every_connection_is_cut_again_and_again(
    database: str,
) -> None:
    sql = await asyncpg.connect(database)
    async with twenty(database) as followers:
        expected = []
        for n in range(6):
            await sql.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
                " and pid <> pg_backend_pid() and ($1 or query ilike 'listen%')",
                n % 2 == 0,
            )
            async with await ff.Engine.connect(database) as writer:
                expected.append(await begin(writer))
        await get(followers, expected)
    await sql.close()


@pytest.mark.parametrize("notifications", [False, True])
async def test_followers_and_consumers_work_behind_a_transaction_pooling_proxy(
    database: str, monkeypatch: pytest.MonkeyPatch, notifications: bool
) -> None:
    """Notifications are lost there, whether they are switched off or not: polling is enough."""
    monkeypatch.setattr(loop, "_POLL", 0.05)
    sql = await asyncpg.connect(database)
    await sql.execute("create table ledger (id uuid)")
    options: dict[str, Any] = {"notifications": notifications, "prepared_statements": False}

    async def act(connection: Any, events: Sequence[Any]) -> None:
        await connection.executemany("insert into ledger values ($1)", [(one.execution_id,) for one in events])

    with pooled(database) as proxy:
        async with twenty(proxy, **options) as followers, await ff.Engine.connect(proxy, **options) as engine:
            stop = asyncio.Event()
            consumers = [
                asyncio.ensure_future(ff.Consumer("c", family="lease").run(one, act, stop=stop))
                for one in (engine, engine)
            ]
            async with asyncio.timeout(PATIENCE):
                while not await engine.list_consumers():
                    await asyncio.sleep(0.01)
            expected = [await begin(engine) for _ in range(5)]
            await get(followers, expected)
            async with asyncio.timeout(PATIENCE):
                while await sql.fetchval("select count(*) from ledger") < 5:
                    await asyncio.sleep(0.01)
            stop.set()
            await asyncio.gather(*consumers)
    assert [row["id"] for row in await sql.fetch("select id from ledger")] == expected
    await sql.close()
