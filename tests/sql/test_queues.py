"""The queues of duties beside an old snapshot: what has passed through them is not read again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._duties import ALL, TimerRunner, Unblock
from flowfabric._duties.child_cancel import ChildCancel
from flowfabric._duties.timer import TimerDuty, WokenDuty
from flowfabric.values.execution import NewExecution
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.lease import Operator
from tests.databases import fresh_database
from tests.sql.plans import PAGES, STATISTICS, CountingEngine
from tests.support import WORKER, Clock, claim_one, started

SECOND = timedelta(seconds=1)
_OLD = "flowfabric.now() - interval '5 s' + n * interval '1 ms'"
_IDS = "0, gen_random_uuid()"


class Queue(NamedTuple):
    """How rows come into a queue and leave it."""

    fill: str  # for n of `numbers`
    empty: str


def _rows(table: str, values: str) -> tuple[str, str]:
    return f"insert into flowfabric.{table} select {values} from numbers", f"delete from flowfabric.{table}"


QUEUES = {
    "cascade": Queue(
        *_rows("pending_cascade", f"-n, {_IDS}, gen_random_uuid(), 0, 'passed', null, {_OLD}"),
    ),
    "sibling_cancel": Queue(
        *_rows("sibling_cancel", f"{_IDS}, gen_random_uuid(), '{{}}', {_OLD}, {_OLD}"),
    ),
    "child_cancel": Queue(*_rows("child_cancel", f"{_IDS}, {_OLD}, {_OLD}")),
    "flow_cancel": Queue(
        *_rows("cancel_backlog", f"{_IDS}, {_OLD}, 'r', 'r', 'cancel_all', {_OLD}"),
    ),
    "hook_submission": Queue(
        f"insert into flowfabric.hook (spec, facts, due_at) select '{{}}', '{{}}', {_OLD} from numbers",
        "delete from flowfabric.hook",
    ),
    "reservation_end": Queue(
        *_rows(
            "reservation",
            f"{_IDS}, gen_random_uuid(), gen_random_uuid(), 1, 0, 0, null, null, 'release', 'held', '{{t}}', '{{1}}',"
            f" {_OLD}, null, true, {_OLD}",
        ),
    ),
    "budget_reset": Queue(
        "insert into flowfabric.budget (id, name, next_reset_at, created_at, updated_at)"
        f" select gen_random_uuid(), gen_random_uuid()::text, {_OLD}, {_OLD}, {_OLD} from numbers",
        "update flowfabric.budget set next_reset_at = null where next_reset_at is not null",
    ),
    "limit_opening": Queue(*_rows("limit_due", f"{_OLD}, gen_random_uuid(), ''")),
}


DUTIES = {duty.name: duty for duty in ALL if issubclass(duty, WokenDuty) and not issubclass(duty, TimerDuty)}


def test_each_queue_of_a_duty_is_known() -> None:
    assert DUTIES.keys() == QUEUES.keys()


@asynccontextmanager
async def old_snapshot(dsn: str) -> AsyncIterator[None]:
    """A transaction with a transaction id and a snapshot, which stays open and writes nothing."""
    held = await asyncpg.connect(dsn)
    try:
        async with held.transaction(isolation="repeatable_read"):
            await held.execute("select pg_current_xact_id(), count(*) from flowfabric.execution")
            yield
    finally:
        await held.close()


async def _entries(engine: CountingEngine) -> int:
    """The entries of indexes and the rows of tables that the open transaction has read, dead ones as well."""
    found = await engine.connection.fetchval(
        "select sum(pg_stat_get_xact_tuples_returned(c.oid)) from pg_class c"
        " where c.relnamespace = 'flowfabric'::regnamespace"
    )
    return int(found)


async def _look_and_round(engine: CountingEngine, name: str, low_water: Any) -> tuple[list[int], Any]:
    """What a poll reads, and what a round does; and the new mark."""
    read = []
    async with engine.connection.transaction():
        before = await _entries(engine)
        found = await engine.look_for_due({name: low_water}, at_most=SECOND)
        read.append(await _entries(engine) - before)
        assert not found.due
        duty = DUTIES[name](engine)
        duty.low_water = found.low_water[name]
        assert (await duty.round()).handled == 0
        read.append(await _entries(engine) - before - read[0])
    return read, found.low_water[name]


async def _fill(connection: asyncpg.Connection[Any], name: str, count: int) -> None:
    await connection.execute("create temp table if not exists numbers (n integer)")
    await connection.execute("insert into numbers select generate_series(1, $1::int)", count)
    await connection.execute(QUEUES[name].fill)
    await connection.execute("drop table numbers")


@pytest.mark.parametrize("name", QUEUES)
async def test_what_has_passed_through_a_queue_is_not_read_again(server: str, name: str) -> None:
    count = 3000
    async with fresh_database(server) as dsn, CountingEngine.open(dsn) as engine, old_snapshot(dsn):
        await _fill(engine.connection, name, count)
        found = await engine.look_for_due({name: None}, at_most=SECOND)
        assert found.due == {name}
        await engine.connection.execute(QUEUES[name].empty)
        await Clock(engine.connection).advance(minutes=2)
        read, mark = await _look_and_round(engine, name, None)
        assert min(read) >= 0
        assert read[0] >= count, "the first poll passes over what is left in the index"
        await engine.connection.execute("analyze")
        for statistics in (None, *STATISTICS.values()):
            if statistics is not None:
                await engine.connection.execute(statistics)
            read, mark = await _look_and_round(engine, name, mark)
            assert max(read) < 50, (statistics, read)


async def test_timers_of_leases_and_retention_are_read_again_for_five_seconds_only(server: str) -> None:
    fill = (
        "insert into flowfabric.timer (kind, due_at, partitions, ids)"
        f" select $1, {_OLD}, '{{0}}', array[gen_random_uuid()] from generate_series(1, 3000) n"
    )
    async with fresh_database(server) as dsn, CountingEngine.open(dsn) as engine, old_snapshot(dsn):
        sql, read = engine.connection, {}
        for kind in ("lease", "retention", "delay"):
            await sql.execute(fill, kind)
            await sql.execute("delete from flowfabric.timer where kind = $1", kind)
            await Clock(sql).advance(seconds=20)
            mark = (await engine.look_for_due({kind: None}, at_most=SECOND)).low_water[kind]
            async with sql.transaction():
                before = await _entries(engine)
                assert not (await engine.look_for_due({kind: mark}, at_most=SECOND)).due
                read[kind] = await _entries(engine) - before
        assert max(read["lease"], read["retention"]) < 50, read
        assert read["delay"] >= 3000, "a transaction that delays an execution may stay open"


async def test_a_claim_does_not_read_the_index_of_what_passed_while_the_queue_was_empty(server: str) -> None:
    passed = (
        "insert into flowfabric.ready (partition, id, route, rank, created_at)"
        " select 0, gen_random_uuid(), r.id, 9000, flowfabric.now() - interval '1 hour'"
        " from flowfabric.route r, generate_series(1, 30000)"
    )
    async with fresh_database(server) as dsn, CountingEngine.open(dsn) as engine, old_snapshot(dsn):
        sql, read = engine.connection, []
        await engine.create_execution(execution_kind="k")
        await claim_one(engine)
        for is_passed in (False, True):
            if is_passed:
                await sql.execute(passed)
                await sql.execute("delete from flowfabric.ready")
            await sql.execute("analyze flowfabric.ready")
            await engine.create_many([NewExecution(execution_kind="k")] * 20)
            async with sql.transaction():
                before = await sql.fetchval(PAGES, engine.tables)
                assert len(await engine.claim_many(limit=100, **WORKER)) == 20
                read.append(await sql.fetchval(PAGES, engine.tables) - before)
        assert read[1] < read[0] + 50, read


async def test_denials_that_were_counted_are_not_read_again(server: str) -> None:
    denied = (
        "insert into flowfabric.denial select flowfabric.now(), 'l', 'rate', '', 1 from generate_series(1, $1::int)"
    )
    async with fresh_database(server) as dsn, CountingEngine.open(dsn) as engine, old_snapshot(dsn):
        sql, duty = engine.connection, Unblock(engine)
        read = []
        for count in (3000, 1, 1, 1):
            await sql.execute(denied, count)
            await Clock(sql).advance(minutes=2)
            async with sql.transaction():
                before = await _entries(engine)
                await duty._count_denials()
                read.append(await _entries(engine) - before)
        assert read[0] > 3000
        assert max(read[2:]) < 50, "a denial sets the mark for those after it"
        assert (await engine.read_denials()).rate == 3003


async def test_repairs_and_purges_do_not_read_cascades_that_have_passed(server: str) -> None:
    new, after = NewExecution(execution_kind="k"), [NewEdge(upstream="first")]
    members = [NewNode(name=f"n{n}", execution=new, after=after) for n in range(600)]
    read: dict[str, list[int]] = {"repair": [], "purge": []}
    async with fresh_database(server) as dsn, CountingEngine.open(dsn) as engine, old_snapshot(dsn):
        sql = engine.connection
        # More edges than the end of an execution resolves: its cascade is left to the duty.
        await engine.submit_flow([NewNode(name="first", execution=new), *members])
        await engine.complete((await claim_one(engine)).handle)
        assert await sql.fetchval("select count(*) from flowfabric.pending_cascade") == 1
        done = await engine.submit_flow([NewNode(name="only", execution=new)])
        await sql.execute("update flowfabric.deployment set retention = '1 second'")
        while (claimed := await claim_one(engine)).execution_id != done.nodes["only"]:
            pass
        await engine.complete(claimed.handle)
        await Clock(sql).advance(days=1)
        for count in (10, 20_000):
            await _fill(sql, "cascade", count)
            await sql.execute("delete from flowfabric.pending_cascade where outcome = 'passed'")
            await sql.execute("analyze")
            for statistics in STATISTICS.values():
                await sql.execute(statistics)
                for name in read:
                    transaction = sql.transaction()
                    await transaction.start()
                    before = await sql.fetchval(PAGES, engine.tables)
                    if name == "repair":
                        assert (await engine.reconcile_edges(None, limit=1000))[0].scanned == 600
                    else:
                        assert (await engine.run_timers("retention")).handled == 1
                    read[name].append(await sql.fetchval(PAGES, engine.tables) - before)
                    await transaction.rollback()
    for pages in read.values():
        # A planner that looks for the ends of an index reads 100 pages at most.
        assert max(pages[3:]) < max(pages[:3]) * 1.05 + 110, read


@pytest.mark.parametrize("name", QUEUES)
async def test_a_row_of_a_transaction_that_ended_late_is_found_from_the_beginning(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any], clock: Clock, name: str
) -> None:
    """At once if it ends within a minute; later by the poll that begins without a mark."""

    async def is_due(after: Any) -> tuple[bool, Any]:
        found = await plain_engine.look_for_due({name: after}, at_most=SECOND)
        return name in found.due, found.low_water[name]

    for seconds, is_seen in ((30, True), (120, False)):
        late = await asyncpg.connect(database)
        try:
            async with late.transaction():
                await _fill(late, name, 1)
                await clock.advance(seconds=seconds)
                found, mark = await is_due(None)
                assert not found
        finally:
            await late.close()
        assert (await is_due(mark))[0] is is_seen
        found, mark = await is_due(None)
        assert found
        assert (await is_due(mark))[0], "a mark is never above a row that is left"
        await sql.execute(QUEUES[name].empty)
    await sql.execute("delete from flowfabric.budget")


async def test_the_children_of_a_parent_cancelled_by_a_long_transaction_are_cancelled(
    plain_engine: ff.Engine, database: str, clock: Clock
) -> None:
    parent = await started(plain_engine)
    child = await plain_engine.submit_child(parent.handle, "child", 1, NewExecution(execution_kind="child"))
    runner = TimerRunner(plain_engine, [ChildCancel(plain_engine)])
    async with CountingEngine.open(database) as late, late.connection.transaction():
        await late.cancel(Operator(parent.execution_id), "not needed")
        assert await runner.run_once() == 0
        await clock.advance(minutes=2)
        assert await runner.run_once() == 0
    assert await runner.run_once() == 0
    runner._read_all_at = 0.0
    assert await runner.run_once() == 1
    assert (await plain_engine.read_execution(child.execution_id)).public_state == "cancelled"  # type: ignore[union-attr]
