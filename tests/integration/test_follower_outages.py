"""Twenty followers wait while their server restarts, is replaced, loses its connections, or is behind a pooler."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.embedded import server as embedded
from flowfabric.engine import followers as loop
from flowfabric.engine.followers import Subscription
from flowfabric.engine.service import migrate_database
from flowfabric.errors import CursorRefused
from flowfabric.values.event import EventCursor, EventFilter
from tests.integration.test_restore import crash, place, start, write  # noqa: F401 - a fixture among them
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
            new = [await begin(writer) for _ in range(10)]
            if not lost:
                assert {one.epoch > 0 for one in await get(followers, new)} == {True}
                return
            for one in followers:
                with pytest.raises(CursorRefused, match="cursor_ahead") as refused:
                    async with asyncio.timeout(PATIENCE):
                        await anext(one)
                assert refused.value.position == kept.position
                shared = EventCursor(refused.value.position, refused.value.epoch)
            async with await writer.subscribe_lease_history(after=shared) as again:
                await get([again], new)


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
