"""Cursors after a restore or failover: the epochs of the event log, and which cursors they refuse."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.cli import top
from flowfabric.errors import CursorRefused
from flowfabric.values.event import EventCursor
from flowfabric.values.page import ScannerFilter
from tests import sampling
from tests.integration.test_connection import a_role, as_user
from tests.support import Clock, started

pytestmark = pytest.mark.both_servers
SQL: TypeAlias = "asyncpg.Connection[Any]"
RICH = 3  # the seed of a history in which cursors are refused for each reason


async def write(engine: ff.Engine, events: int) -> EventCursor:
    """Write events; returns the cursor after the last one."""
    for _ in range(events):
        await started(engine)
    return await end(engine)


async def end(engine: ff.Engine) -> EventCursor:
    return (await engine.count_events()).cursor


async def fail_over(sql: SQL, *, losing_after: int | None = None) -> int:
    """Make the server another one, which does not have the events after a position; returns the new epoch."""
    if losing_after is not None:
        await sql.execute("delete from flowfabric.event where seq > $1", losing_after)
        await sql.execute("select setval('flowfabric.event_number', greatest($1, 1))", losing_after)
    await sql.execute("update flowfabric.log_epoch set timeline = timeline + 1 where last_position is null")
    await sql.execute("select flowfabric.begin_epoch()")
    return int(await sql.fetchval("select epoch from flowfabric.log_epoch where last_position is null"))


async def epochs(sql: SQL) -> list[tuple[int, int | None]]:
    return [
        tuple(row) for row in await sql.fetch("select epoch, last_position from flowfabric.log_epoch order by epoch")
    ]


async def refused(engine: ff.Engine, after: EventCursor) -> EventCursor:
    with pytest.raises(CursorRefused) as error:
        await engine.read_events(after=after)
    assert error.value.kind == "cursor_ahead"
    with pytest.raises(CursorRefused):
        await engine.count_events(after)
    return EventCursor(error.value.position, error.value.epoch)


async def test_a_new_deployment_is_in_the_first_epoch(engine: ff.Engine, sql: SQL) -> None:
    assert await epochs(sql) == [(0, None)]
    assert (await write(engine, 2)).epoch == 0
    assert {event.cursor.epoch for event in (await engine.read_events()).items} == {0}


async def test_the_server_is_known_and_stays_the_same(engine: ff.Engine, sql: SQL) -> None:
    row = await sql.fetchrow("select system, timeline, log, database from flowfabric.log_epoch")
    assert row is not None
    assert row["system"] == await sql.fetchval("select system_identifier from pg_control_system()")
    assert row["timeline"] == await sql.fetchval("select timeline_id from pg_control_checkpoint()")
    assert row["database"] == await sql.fetchval("select oid from pg_database where datname = current_database()")
    assert row["log"] == await sql.fetchval("select 'flowfabric.event'::regclass::oid")
    await sql.execute("select flowfabric.begin_epoch()")
    assert await epochs(sql) == [(0, None)]


@pytest.mark.parametrize("column", ["system", "timeline", "log", "database"])
async def test_another_server_begins_an_epoch_where_the_log_ends(engine: ff.Engine, sql: SQL, column: str) -> None:
    last = await write(engine, 3)
    before = int(await sql.fetchval("select extract(epoch from clock_timestamp())::bigint - 1"))
    await sql.execute(f"update flowfabric.log_epoch set {column} = 1")
    if column == "timeline":
        await sql.execute("update flowfabric.log_epoch set timeline = 77")
    await sql.execute("select flowfabric.begin_epoch()")
    (first, second) = await epochs(sql)
    assert first == (0, last.position)
    assert before <= second[0] < 2**32 and second[1] is None


async def test_an_unknown_server_becomes_known_without_a_new_epoch(engine: ff.Engine, sql: SQL) -> None:
    await sql.execute("update flowfabric.log_epoch set system = null, timeline = null, log = null, database = null")
    await sql.execute("select flowfabric.begin_epoch()")
    assert await epochs(sql) == [(0, None)]
    assert (
        await sql.fetchval(
            "select count(system) + count(timeline) + count(log) + count(database) from flowfabric.log_epoch"
        )
        == 4
    )


async def test_a_server_that_may_not_be_read_is_taken_to_be_the_same(engine: ff.Engine, sql: SQL) -> None:
    known = await sql.fetchrow("select system, timeline from flowfabric.log_epoch")
    source = await sql.fetchval("select pg_get_functiondef('flowfabric.server_identity'::regproc)")
    try:
        await sql.execute(source.replace("pg_control_system()", "flowfabric.no_such_function()"))
        await sql.execute("select flowfabric.begin_epoch()")
        assert await sql.fetchrow("select system, timeline from flowfabric.log_epoch") == known
    finally:
        await sql.execute(source)


async def test_behind_a_pooler_the_first_event_of_a_session_begins_the_epoch(
    database: str, sql: SQL, engine: ff.Engine
) -> None:
    """The connection of the process outlives the failover; the session behind it does not."""
    old = await write(engine, 5)
    async with await ff.Engine.connect(database, max_size=1, prepared_statements=False) as pooled:
        shared = (await engine.read_events()).items[1].cursor.position
        await sql.execute("delete from flowfabric.event where seq > $1", shared)
        await sql.execute("update flowfabric.log_epoch set timeline = timeline + 1 where last_position is null")
        async with pooled._database.connection() as connection:
            await connection.execute("reset flowfabric.epoch")  # another session
        await write(pooled, 1)
        assert (await epochs(sql))[0] == (0, shared)
        assert (await refused(pooled, old)).position == shared
    await sql.execute("delete from flowfabric.execution; delete from flowfabric.timer")


async def test_a_cursor_continues_after_a_failover_that_lost_nothing(engine: ff.Engine, sql: SQL) -> None:
    cursor = await write(engine, 3)
    epoch = await fail_over(sql)
    page = await engine.read_events(after=cursor)
    assert (page.items, page.next_cursor) == ([], EventCursor(cursor.position, epoch))
    await write(engine, 2)
    found = (await engine.read_events(after=cursor)).items
    assert [event.cursor.epoch for event in found] == [epoch, epoch]
    assert (await engine.count_events(cursor)).lease == {"acquired": 2}


async def test_a_cursor_of_lost_events_is_refused_with_the_last_position_both_share(
    plain_engine: ff.Engine, sql: SQL
) -> None:
    kept = await write(plain_engine, 3)
    lost = await write(plain_engine, 3)
    epoch = await fail_over(sql, losing_after=kept.position)
    assert await refused(plain_engine, lost) == EventCursor(kept.position, epoch)
    assert await refused(plain_engine, EventCursor(kept.position + 1)) == EventCursor(kept.position, epoch)
    new = await write(plain_engine, 5)
    assert new.position > lost.position, "the numbers were given out again"
    shared = await refused(plain_engine, lost)
    assert shared == EventCursor(kept.position, epoch)
    assert len((await plain_engine.read_events(after=shared)).items) == 5
    assert len((await plain_engine.read_events(after=kept)).items) == 5, "the old cursor of the same position is good"
    await sql.execute("delete from flowfabric.execution; delete from flowfabric.timer")


async def test_a_cursor_is_checked_by_the_epoch_it_is_of(plain_engine: ff.Engine, sql: SQL) -> None:
    first = await write(plain_engine, 3)
    second = await fail_over(sql)
    at_second = await write(plain_engine, 3)
    third = await fail_over(sql, losing_after=at_second.position - 1)
    at_third = await write(plain_engine, 3)
    assert await epochs(sql) == [(0, first.position), (second, at_second.position - 1), (third, None)]

    assert await refused(plain_engine, EventCursor(at_second.position)) == EventCursor(first.position, third)
    assert await refused(plain_engine, at_second) == EventCursor(at_second.position - 1, third)
    assert await refused(plain_engine, EventCursor(at_third.position + 1, third)) == at_third
    for good in (EventCursor(), EventCursor(0, 5), first, EventCursor(at_second.position - 1, second), at_third):
        await plain_engine.read_events(after=good)
    await sql.execute("delete from flowfabric.execution; delete from flowfabric.timer")


async def test_a_cursor_of_an_epoch_lost_in_a_restore_is_good_up_to_where_the_restore_began(
    plain_engine: ff.Engine, sql: SQL
) -> None:
    backup = await write(plain_engine, 3)
    restored = await fail_over(sql)
    later = await write(plain_engine, 3)
    # A failover between the backup and the restore began an epoch that this log does not know.
    assert await refused(plain_engine, EventCursor(later.position, restored - 5)) == EventCursor(
        backup.position, restored
    )
    await plain_engine.read_events(after=EventCursor(backup.position, restored - 5))
    # Or the clock of the server before was ahead.
    assert await refused(plain_engine, EventCursor(later.position, restored + 5)) == EventCursor(
        backup.position, restored
    )
    await plain_engine.read_events(after=EventCursor(backup.position, restored + 5))


async def test_a_cursor_is_never_beyond_the_last_event(plain_engine: ff.Engine, sql: SQL) -> None:
    """Numbers of transactions that were rolled back have no event: after a failover they would look lost."""
    last = (await write(plain_engine, 3)).position
    async with sql.transaction():
        await sql.execute("select nextval('flowfabric.event_number') from generate_series(1, 10)")
    for page in (
        await plain_engine.read_events(),
        await plain_engine.read_events(filter=ScannerFilter(namespace="other")),
        await plain_engine.read_events(family="signal"),
        await plain_engine.read_events(after=EventCursor(last)),
    ):
        assert page.next_cursor == EventCursor(last)
    assert await end(plain_engine) == EventCursor(last)
    assert (await plain_engine.count_events(EventCursor(last))).cursor == EventCursor(last)
    epoch = await fail_over(sql)
    assert (await plain_engine.read_events(after=EventCursor(last))).items == []
    await write(plain_engine, 1)
    # The server before may have used numbers that this one only drew.
    assert await refused(plain_engine, EventCursor(last + 5)) == EventCursor(last, epoch)


async def test_removed_events_belong_to_the_log(plain_engine: ff.Engine, sql: SQL, clock: Clock) -> None:
    last = await write(plain_engine, 3)
    await clock.advance(hours=75)
    await plain_engine.sweep()
    assert await sql.fetchval("select count(*) from flowfabric.event") == 0
    epoch = await fail_over(sql)
    assert (await plain_engine.read_events(after=last)).next_cursor == EventCursor(last.position, epoch)
    await sql.execute("delete from flowfabric.execution; delete from flowfabric.timer")


async def test_the_events_of_one_execution_have_the_epoch_too(plain_engine: ff.Engine, sql: SQL) -> None:
    claimed = await started(plain_engine)
    await plain_engine.renew(claimed.handle)
    page = await plain_engine.list_events(claimed.execution_id, limit=1)
    cursor = page.next_cursor
    assert cursor is not None and cursor == page.items[0].cursor
    epoch = await fail_over(sql)
    rest = await plain_engine.list_events(claimed.execution_id, after=cursor)
    assert [event.cursor.epoch for event in rest.items] == [epoch]
    with pytest.raises(CursorRefused) as error:
        await plain_engine.list_events(claimed.execution_id, after=EventCursor(cursor.position + 100))
    assert error.value.kind == "cursor_ahead"


async def test_the_live_view_continues_after_a_failover(plain_engine: ff.Engine, sql: SQL) -> None:
    kept = await write(plain_engine, 3)
    await write(plain_engine, 3)
    watch = top._Watch(plain_engine)
    await watch.begin()
    await fail_over(sql, losing_after=kept.position)
    assert (await watch.frame()).claimed_rate == 0
    await write(plain_engine, 1)
    assert (await watch.frame()).claimed_rate > 0
    await sql.execute("delete from flowfabric.execution; delete from flowfabric.timer")


async def test_the_leader_of_the_duties_begins_an_epoch(engine: ff.Engine, sql: SQL) -> None:
    await write(engine, 1)
    await engine.take_lead(["duties"], timedelta(seconds=3))
    assert len(await epochs(sql)) == 1
    await sql.execute("update flowfabric.log_epoch set timeline = timeline + 1")
    await engine.take_lead(["duties"], timedelta(seconds=3))
    assert len(await epochs(sql)) == 2


async def test_every_new_connection_begins_an_epoch_before_its_first_call(
    plain_engine: ff.Engine, sql: SQL, database: str
) -> None:
    last = await write(plain_engine, 2)
    async with await ff.Engine.connect(database, notifications=False, max_size=1) as other:
        assert len(await epochs(sql)) == 1
        await sql.execute("update flowfabric.log_epoch set timeline = timeline + 1")
        await sql.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'flowfabric' and datname = current_database()"
        )
        while True:
            try:
                await started(other)
            except ff.TransportError:
                continue
            break
        assert (await epochs(sql))[0] == (0, last.position)
    await sql.execute("update flowfabric.log_epoch set timeline = timeline + 1 where last_position is null")
    async with await ff.Engine.connect(database, notifications=False):
        assert len(await epochs(sql)) == 3


async def test_connections_that_come_at_once_begin_one_epoch(plain_engine: ff.Engine, sql: SQL, database: str) -> None:
    await write(plain_engine, 2)
    await sql.execute("update flowfabric.log_epoch set timeline = timeline + 1")
    engines = await asyncio.gather(*(ff.Engine.connect(database, notifications=False) for _ in range(8)))
    for one in engines:
        await one.close()
    assert len(await epochs(sql)) == 2


async def test_an_ordinary_role_may_read_which_server_it_is(sql: SQL, database: str) -> None:
    """The functions run with the rights of the schema's owner, who need not be a superuser."""
    async with a_role(sql) as role:
        await sql.execute(f"grant usage on schema flowfabric to {role}")
        await sql.execute(f"grant execute on function flowfabric.server_identity to {role}")
        session = await asyncpg.connect(as_user(database, role))
        row = await session.fetchrow("select * from flowfabric.server_identity()")
        await session.close()
    assert row is not None and None not in tuple(row)


class History:
    """A log, what was read of it, and what failovers and restores from backups left of it."""

    def __init__(self, engine: ff.Engine, sql: SQL, clock: Clock, rng: random.Random) -> None:
        self.engine = engine
        self.sql = sql
        self.clock = clock
        self.rng = rng
        self.log: list[tuple[int, object]] = []  # positions, and which events they are, also of removed ones
        self.seen: set[str] = set()
        self.floor = 0  # the position of the last that was removed
        self.readers: list[tuple[EventCursor, list[tuple[int, object]]]] = []
        self.backups: list[tuple[int, list[asyncpg.Record]]] = []

    async def write(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            await started(self.engine)
        page = await self.engine.read_events(limit=1000)
        removed = [(position, which) for position, which in self.log if position <= self.floor]
        self.log = [*removed, *((event.cursor.position, event.execution_id) for event in page.items)]
        chosen = self.rng.randint(1, len(page.items))
        self.readers.append((page.items[chosen - 1].cursor, self.log[: len(removed) + chosen]))
        assert page.next_cursor is not None
        self.readers.append((page.next_cursor, list(self.log)))

    async def retire(self) -> None:
        """Remove the events that are older than their retention: cursors after the last of them stay good."""
        await self.clock.advance(hours=75)
        await self.engine.sweep()
        self.floor = self._end()
        self.backups = []  # a test cannot bring the removed events back

    async def back_up(self) -> None:
        self.backups.append((self._end(), await self.sql.fetch("select * from flowfabric.log_epoch")))

    async def fail_over(self) -> None:
        # A server that has the row of an epoch has all events before it.
        begun = await self.sql.fetchval(
            "select greatest(max(last_position), max(event_floor)) from flowfabric.log_epoch, flowfabric.deployment"
        )
        await self._continue_at(self.rng.choice([self._end(), *(at for at, _ in self.log[-3:] if at >= begun)]))

    async def restore(self) -> None:
        """Continue with a backup that has neither the events nor the epochs since."""
        if not self.backups:
            return
        kept, rows = self.rng.choice(self.backups)
        await self.sql.execute("delete from flowfabric.log_epoch")
        await self.sql.executemany("insert into flowfabric.log_epoch values ($1, $2, $3, $4, $5, $6)", rows)
        await self._continue_at(kept)

    async def _continue_at(self, kept: int) -> None:
        self.log = [(position, which) for position, which in self.log if position <= kept]
        # What a backup does not have is not backed up for the server that continues from it.
        self.backups = [one for one in self.backups if one[0] <= kept]
        await self.clock.advance(seconds=self.rng.randint(1, 100))
        await fail_over(self.sql, losing_after=kept)

    async def check(self) -> None:
        """A cursor is good if all events before it are in the log, otherwise refused with the last that is."""
        for cursor, read in self.readers:
            both = [a for a, b in zip(read, self.log, strict=False) if a == b]
            if len(both) == len(read) and cursor.position < self.floor:
                with pytest.raises(CursorRefused) as expired:
                    await self.engine.read_events(after=cursor)
                self.seen.add("expired")
                assert (expired.value.kind, expired.value.position) == ("cursor_expired", self.floor)
            elif len(both) == len(read):
                rest = (await self.engine.read_events(after=cursor, limit=1000)).items
                assert [event.execution_id for event in rest] == [which for _, which in self.log[len(both) :]]
            else:
                shared = both[-1][0] if both else 0
                self.seen.add("ahead after a removal" if self.floor else "ahead")
                assert (await refused(self.engine, cursor)).position == shared
        assert [one for one in await self.engine.audit(events=True) if one.rule == "log_epochs"] == []

    def _end(self) -> int:
        return self.log[-1][0] if self.log else 0


@pytest.mark.parametrize("seed", sampling.seeds(RICH, *range(RICH), *range(RICH + 1, 30)))
async def test_cursors_know_their_log_in_any_history(
    plain_engine: ff.Engine, sql: SQL, clock: Clock, seed: int
) -> None:
    rng = random.Random(seed)
    history = History(plain_engine, sql, clock, rng)
    await history.write()
    for _ in range(12):
        acts = [*[history.write] * 4, *[history.back_up] * 2, *[history.fail_over] * 2, *[history.restore] * 2]
        await rng.choice([*acts, history.retire])()
        await history.check()
    assert seed != RICH or history.seen == {"ahead", "ahead after a removal", "expired"}, history.seen
    await sql.execute("delete from flowfabric.execution; delete from flowfabric.timer")
