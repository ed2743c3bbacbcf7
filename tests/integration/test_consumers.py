"""Durable consumers: effects in the same database happen once for each event, also after a process dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric.client import consumer as module
from flowfabric.errors import CursorRefused, InvalidInput, NotFound, StreamDisconnected, TransportError
from flowfabric.values.event import CompletionEvent, EventCursor, EventFilter
from tests import sampling
from tests.each import each
from tests.kept import *  # noqa: F403 - its fixtures
from tests.sql.test_subscriptions import held_writer, write
from tests.support import started
from tests.until import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
PATIENCE = 60.0
START = EventCursor()


async def end_some(engine: ff.Engine, count: int, **fields: Any) -> list[ff.ExecutionId]:
    ended = []
    for _ in range(count):
        held = await started(engine, **fields)
        await engine.complete(held.handle)
        ended.append(held.execution_id)
    return ended


@contextlib.asynccontextmanager
async def running(consumer: ff.Consumer, engine: ff.Engine, handle: Any) -> Any:
    stop = asyncio.Event()
    task = asyncio.ensure_future(consumer.run(engine, handle, stop=stop))
    try:
        yield task
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE):
            await task


class Ledger:
    """The effect: one row for each event."""

    def __init__(self, sql: asyncpg.Connection[Any]) -> None:
        self.sql = sql

    async def add(self, connection: Any, events: Sequence[Any]) -> None:
        await connection.executemany(
            "insert into ledger values ($1, $2)", [(one.execution_id, one.cursor.position) for one in events]
        )

    async def ids(self) -> list[Any]:
        return [ff.ExecutionId(row["id"]) for row in await self.sql.fetch("select id from ledger order by position")]


@pytest_asyncio.fixture(loop_scope="session")
async def ledger(sql: asyncpg.Connection[Any]) -> AsyncIterator[Ledger]:
    await sql.execute("create table ledger (id uuid, position bigint)")
    yield Ledger(sql)
    await sql.execute("drop table ledger")


async def test_a_consumer_acts_on_every_event_once_over_runs(database: str, ledger: Ledger) -> None:
    async with await ff.Engine.connect(database) as engine:
        before = await end_some(engine, 2)
        late = ff.Consumer("late", family="completion")
        assert await late.run_once(engine, ledger.add) == 0  # begins now
        whole = ff.Consumer("whole", family="completion", start=START, batch=2)
        assert await whole.run_once(engine, ledger.add) == 2
        ended = await end_some(engine, 5)
        assert await whole.run_once(engine, ledger.add) == 5
        assert await whole.run_once(engine, ledger.add) == 0
        assert await ledger.ids() == before + ended
        assert await late.run_once(engine, ledger.add) == 5


async def test_a_running_consumer_gets_events_as_they_come_and_holds_no_connection_meanwhile(database: str) -> None:
    got: list[Any] = []

    async def handle(connection: Any, events: Sequence[CompletionEvent]) -> None:
        assert connection.is_in_transaction()
        got.extend(one.execution_id for one in events)

    async with await ff.Engine.connect(database, max_size=1) as engine:
        async with running(ff.Consumer("c", family="completion"), engine, handle):
            await until(lambda: _works(engine, "c"))
            for _ in range(3):
                ended = await end_some(engine, 2)

                async def arrived(expected: list[Any] = ended) -> bool:
                    return got[-2:] == expected

                await until(arrived)
        assert len(got) == 6
        (record,) = await engine.list_consumers()
        assert (record.instance, record.handled, record.failures) == (None, 6, 0)


@each("how", ["a new one", "moved to the end of the log"])
async def test_a_consumer_that_begins_now_gets_what_an_open_writer_commits_later(
    database: str, ledger: Ledger, sql: asyncpg.Connection[Any], how: str
) -> None:
    """Its number is smaller than one that was committed before: the consumer gets both."""
    await sql.execute("truncate ledger")
    async with await ff.Engine.connect(database) as engine:
        consumer = ff.Consumer(how, family="completion", start=None if how == "a new one" else START)
        if how != "a new one":
            await consumer.register(engine)
        begin = (await engine.count_events()).cursor
        other, transaction = await held_writer(database)
        try:
            await write(sql)
            if how == "a new one":
                await consumer.register(engine)
            else:
                await engine.set_consumer(how, None)
        finally:
            await transaction.commit()
            await other.close()
        expected = [one.execution_id for one in (await engine.read_events(after=begin)).items]
        assert len(expected) == 2
        assert await consumer.run_once(engine, ledger.add) == 2
        assert await ledger.ids() == expected


async def _works(engine: ff.Engine, name: str) -> bool:
    return any(one.name == name and one.instance is not None for one in await engine.list_consumers())


async def test_a_function_that_fails_leaves_nothing_and_gets_the_events_again(
    database: str, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    async with await ff.Engine.connect(database) as engine:
        ended = await end_some(engine, 4)
        calls: list[int] = []
        noted: list[tuple[int, str | None]] = []

        async def handle(connection: Any, events: Sequence[Any]) -> None:
            calls.append(len(events))
            await ledger.add(connection, events)
            if len(calls) == 1:
                raise LookupError("no such invoice; dsn postgres://u:secret@h/d")
            if len(calls) == 2:
                noted.extend((one.failures, one.failure) for one in await engine.list_consumers())
                await connection.execute("select 1/0")

        async with running(ff.Consumer("c", family="completion", start=START), engine, handle):

            async def all_there() -> bool:
                return len(await ledger.ids()) >= 4

            await until(all_there)
        assert await ledger.ids() == ended
        assert calls == [4, 1, 1, 3]  # one at a time after a failure, until it is past
        ((failures, failure),) = noted
        assert failures == 1
        assert str(failure).startswith("LookupError: no such invoice")
        assert "secret" not in str(failure)
        (record,) = await engine.list_consumers()
        assert (record.failures, record.failure) == (0, None)


async def test_one_process_works_at_a_time_and_another_takes_over(
    database: str, ledger: Ledger, sql: asyncpg.Connection[Any]
) -> None:
    async with await ff.Engine.connect(database) as one, await ff.Engine.connect(database) as other:
        consumer = ff.Consumer("c", family="completion", start=START)
        inside, leave = asyncio.Event(), asyncio.Event()

        async def slow(connection: Any, events: Sequence[Any]) -> None:
            await ledger.add(connection, events)
            inside.set()
            await leave.wait()

        await end_some(one, 1)
        await consumer.register(one)
        first = asyncio.ensure_future(one.consume("c", slow))
        await inside.wait()
        assert (await other.consume("c", ledger.add)).code == "busy"  # its transaction is open
        leave.set()
        assert (await first).handled == 1
        await end_some(one, 1)
        held = await other.consume("c", ledger.add)
        assert held.code == "held"
        assert held.left.total_seconds() > 5
        await one.leave_consumer("c")
        assert (await other.consume("c", ledger.add)).handled == 1
        # One that died without a word is waited for as long as it said.
        await sql.execute("update flowfabric.consumer set until = clock_timestamp() - interval '1 ms'")
        assert (await one.consume("c", ledger.add)).code == "taken"
        assert len(await ledger.ids()) == 2


async def test_effects_of_a_transaction_that_is_cut_off_do_not_exist(
    database: str, ledger: Ledger, sql: asyncpg.Connection[Any]
) -> None:
    async with await ff.Engine.connect(database) as engine:
        ended = await end_some(engine, 3)
        consumer = ff.Consumer("c", family="completion", start=START)

        async def cut(connection: Any, events: Sequence[Any]) -> None:
            await ledger.add(connection, events)
            await sql.execute("select pg_terminate_backend($1)", connection.get_server_pid())

        with pytest.raises(Exception):  # noqa: B017 - whichever the driver raises
            await consumer.run_once(engine, cut)
        assert await ledger.ids() == []
        assert await consumer.run_once(engine, ledger.add) == 3
        assert await ledger.ids() == ended


async def test_a_task_is_submitted_once_for_each_event(database: str) -> None:
    app = ff.App(database)

    @app.task
    async def invoice(execution_id: str) -> str:
        return execution_id

    async def handle(connection: Any, events: Sequence[CompletionEvent]) -> None:
        for event in events:
            await invoice.submit_in(connection, str(event.execution_id))
        if not failed:
            failed.append(1)
            raise RuntimeError("after the submissions")

    failed: list[int] = []
    async with await ff.Engine.connect(database) as engine:
        await end_some(engine, 3, execution_kind="order")
        chosen = EventFilter(kind="order")
        consumer = ff.Consumer("invoices", family="completion", filter=chosen, start=START)
        with pytest.raises(RuntimeError):
            await consumer.run_once(app, handle)
        assert len((await engine.find_executions(kinds=["invoice"])).items) == 0
        assert await consumer.run_once(app, handle) == 3
        assert len((await engine.find_executions(kinds=["invoice"])).items) == 3
    await app.close()


async def test_another_definition_is_refused_unless_it_is_meant(database: str) -> None:
    async with await ff.Engine.connect(database) as engine:
        cursor = await ff.Consumer("c", family="completion").register(engine)
        await end_some(engine, 1)
        assert await ff.Consumer("c", family="completion").register(engine) == cursor
        with pytest.raises(InvalidInput, match="takes other events: completion") as refused:
            await ff.Consumer("c", family="lease").register(engine)
        assert refused.value.field == "families"
        with pytest.raises(InvalidInput) as refused:
            await ff.Consumer("c", family="completion", filter=EventFilter(kind="x")).register(engine)
        assert refused.value.field == "filter"
        other = ff.Consumer("c", family="completion", filter=EventFilter(kind="x"), redefine=True)
        assert await other.register(engine) == cursor
        (record,) = await engine.list_consumers()
        assert (record.families, record.filter, record.cursor) == (("completion",), {"kind": "x"}, cursor)
        assert record.lag == 2


async def test_an_operator_moves_and_deletes_it(database: str) -> None:
    async with await ff.Engine.connect(database) as engine:
        got: list[Any] = []

        async def handle(connection: Any, events: Sequence[Any]) -> None:
            got.extend(events)

        await end_some(engine, 3)
        consumer = ff.Consumer("c", family="completion")
        await consumer.register(engine)
        await engine.set_consumer("c", START)
        assert await consumer.run_once(engine, handle) == 3
        await engine.set_consumer("c", got[0].cursor)
        assert await consumer.run_once(engine, handle) == 2
        await engine.set_consumer("c", START)
        await engine.set_consumer("c", None)
        assert await consumer.run_once(engine, handle) == 0
        with pytest.raises(CursorRefused, match="cursor_ahead"):
            await engine.set_consumer("c", EventCursor(10**9))
        with pytest.raises(NotFound):
            await engine.set_consumer("other", None)
        assert await engine.delete_consumer("c")
        assert not await engine.delete_consumer("c")
        with pytest.raises(NotFound):
            await engine.consume("c", handle)


async def test_a_consumer_whose_events_were_removed_stops_and_says_so(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    async with await ff.Engine.connect(database) as engine:
        await end_some(engine, 1)
        consumer = ff.Consumer("c", family="completion", start=EventCursor(2))
        await consumer.register(engine)
        await sql.execute(
            "update flowfabric.deployment set event_floor = (select max(seq) from flowfabric.event);"
            " truncate flowfabric.event"
        )

        async def handle(connection: Any, events: Sequence[Any]) -> None:
            raise AssertionError("there is nothing to act on")

        with pytest.raises(CursorRefused, match="cursor_expired"):
            await consumer.run(engine, handle)
        (record,) = await engine.list_consumers()
        assert record.is_expired


async def test_the_start_of_a_consumer_that_exists_may_have_been_removed(
    database: str, sql: asyncpg.Connection[Any], ledger: Ledger
) -> None:
    """Its program begins again with the same code, days later: where it began first no longer matters."""
    async with await ff.Engine.connect(database) as engine:
        await end_some(engine, 1)
        consumer = ff.Consumer("c", family="completion", start=EventCursor(1))
        assert await consumer.run_once(engine, ledger.add) == 1
        await sql.execute(
            "update flowfabric.deployment set event_floor = (select max(seq) from flowfabric.event);"
            " truncate flowfabric.event"
        )
        ended = await end_some(engine, 1)
        assert await consumer.run_once(engine, ledger.add) == 1
        assert (await ledger.ids())[1:] == ended
        with pytest.raises(CursorRefused, match="cursor_expired"):
            await ff.Consumer("another", family="completion", start=EventCursor(1)).register(engine)
        assert [one.name for one in await engine.list_consumers()] == ["c"]


async def test_a_consumer_from_the_beginning_that_comes_too_late_is_told(
    database: str, sql: asyncpg.Connection[Any], ledger: Ledger
) -> None:
    """It begins at the oldest event there was when it was registered, not at the oldest there is when it first runs."""
    async with await ff.Engine.connect(database) as engine:
        first = ff.Consumer("first", family="completion", start=START)
        await first.register(engine)
        await end_some(engine, 2)
        await sql.execute(
            "update flowfabric.deployment set event_floor = (select max(seq) from flowfabric.event);"
            " truncate flowfabric.event"
        )
        with pytest.raises(CursorRefused, match="cursor_expired") as refused:
            await first.run_once(engine, ledger.add)
        assert [one.is_expired for one in await engine.list_consumers()] == [True]
        # The cursor that the error names is where it can continue, and the beginning is now that one.
        await engine.set_consumer("first", EventCursor(refused.value.position, refused.value.epoch))
        await ff.Consumer("second", family="completion", start=START).register(engine)
        ended = await end_some(engine, 1)
        assert await first.run_once(engine, ledger.add) == 1
        assert await ff.Consumer("second", family="completion").run_once(engine, ledger.add) == 1
        await engine.set_consumer("second", START)
        assert await ff.Consumer("second", family="completion").run_once(engine, ledger.add) == 1
        assert await ledger.ids() == ended * 3


@each("ending", ["rollback", "commit", "rollback; begin", "commit; begin"])
async def test_a_function_that_ends_the_transaction_moves_nothing(database: str, ledger: Ledger, ending: str) -> None:
    async with await ff.Engine.connect(database) as engine:
        await end_some(engine, 1)
        name = f"c-{ending}"
        consumer = ff.Consumer(name, family="completion", start=START)
        before = await consumer.register(engine)

        async def handle(connection: Any, events: Sequence[Any]) -> None:
            await connection.execute(ending)

        with pytest.raises(RuntimeError, match="ended the transaction"):
            await consumer.run_once(engine, handle)
        assert [one.cursor for one in await engine.list_consumers() if one.name == name] == [before]
        assert await consumer.run_once(engine, ledger.add) >= 1


async def test_a_function_that_hides_an_error_of_the_database_has_failed(
    database: str, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    """Its transaction cannot commit any more: lists show the failure, and what to do; a savepoint is the way."""
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    async with await ff.Engine.connect(database) as engine:
        ended = await end_some(engine, 2)
        noted: list[str | None] = []

        async def handle(connection: Any, events: Sequence[Any]) -> None:
            noted.extend(one.failure for one in await engine.list_consumers())
            await ledger.add(connection, events)
            with contextlib.suppress(asyncpg.PostgresError):
                if len(noted) == 1:
                    await connection.execute("select 1/0")
                async with connection.transaction():
                    await connection.execute("select 1/0")

        async with running(ff.Consumer("c", family="completion", start=START), engine, handle):

            async def all_there() -> bool:
                return len(await ledger.ids()) >= 2

            await until(all_there)
        assert await ledger.ids() == ended
        assert noted[0] is None
        assert "savepoint" in str(noted[1])
        await engine.set_consumer("c", START)

        async def fails(connection: Any, events: Sequence[Any]) -> None:
            with contextlib.suppress(asyncpg.PostgresError):
                await connection.execute("select 1/0")

        with pytest.raises(RuntimeError, match="savepoint"):
            await ff.Consumer("c", family="completion").run_once(engine, fails)


async def test_a_consumer_that_is_cancelled_ends_wherever_it_is(
    database: str, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    """Also between two waits, while it takes back the one before."""
    monkeypatch.setattr(module, "_POLL", 0.01)
    between, goes_on = asyncio.Event(), asyncio.Event()

    class Slow:
        async def __aenter__(self) -> Slow:
            return self

        async def __aexit__(self, *_: object) -> None:
            """Nothing to close."""

        async def __anext__(self) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                between.set()
                await goes_on.wait()
                raise

    async def follow(*_: Any, **__: Any) -> Slow:
        return Slow()

    async with await ff.Engine.connect(database) as engine:
        monkeypatch.setattr(engine, "follow", follow)
        task = asyncio.ensure_future(ff.Consumer("c", family="completion").run(engine, ledger.add))
        await between.wait()
        task.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        await asyncio.wait([task], timeout=PATIENCE)
        assert task.cancelled()


async def test_an_outage_is_no_failure_of_the_function(
    database: str, monkeypatch: pytest.MonkeyPatch, ledger: Ledger, sql: asyncpg.Connection[Any]
) -> None:
    """Without a connection, in the wait for events, and while the function runs."""
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    async with await ff.Engine.connect(database) as engine:
        await end_some(engine, 1)
        real, lost = engine._database.connection, [1, 2]

        def connection() -> Any:
            if lost:
                lost.pop()
                raise ConnectionRefusedError("gone")
            return real()

        monkeypatch.setattr(engine._database, "connection", connection)
        follow, failed = engine.follow, [1]

        async def unsteady(*args: Any, **fields: Any) -> Any:
            if failed:
                failed.pop()
                raise TransportError("transport", "gone")
            return await follow(*args, **fields)

        monkeypatch.setattr(engine, "follow", unsteady)
        noted: list[str] = []
        fail_consumer = engine.fail_consumer

        async def note(name: str, failure: str) -> None:
            noted.append(failure)
            await fail_consumer(name, failure)

        monkeypatch.setattr(engine, "fail_consumer", note)
        cut = [1]

        async def handle(connection: Any, events: Sequence[Any]) -> None:
            if cut:
                cut.pop()
                connection.terminate()
            await ledger.add(connection, events)

        async with running(ff.Consumer("c", family="completion", start=START), engine, handle):

            async def all_there() -> bool:
                return len(await ledger.ids()) == 2 and not failed

            await until(_once(ledger.ids))
            await end_some(engine, 1)
            await until(all_there)
        assert noted == []
        assert (lost, failed, cut) == ([], [], [])


def _once(rows: Callable[[], Awaitable[list[Any]]]) -> Callable[[], Awaitable[bool]]:
    async def there() -> bool:
        return bool(await rows())

    return there


@each("how", ["close", "shutdown_prepare"])
async def test_an_engine_that_shuts_down_ends_a_consumer(database: str, ledger: Ledger, how: str) -> None:
    """It neither waits for another one nor reads again and again."""
    async with await ff.Engine.connect(database) as engine:
        ended = await end_some(engine, 1)
        task = asyncio.ensure_future(ff.Consumer(how, family="completion", start=START).run(engine, ledger.add))

        async def did() -> bool:
            return (await ledger.ids())[-1:] == ended and await _works(engine, how)

        await until(did)
        cursor = next(one.cursor for one in await engine.list_consumers() if one.name == how)
        await getattr(engine, how)()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(StreamDisconnected, match="shuts down") as disconnected:
                await task
        assert disconnected.value.cursor == cursor


async def test_an_error_of_ours_that_the_function_raises_is_its_failure(
    database: str, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    """For example of another consumer, or another cursor, that it uses."""
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    errors: list[Exception] = [
        CursorRefused("cursor_ahead", "another log", position=1, epoch=0),
        NotFound("consumer", "another"),
    ]
    async with await ff.Engine.connect(database) as engine:
        await end_some(engine, 1)

        async def handle(connection: Any, events: Sequence[Any]) -> None:
            if errors:
                raise errors.pop()
            await ledger.add(connection, events)

        async with running(ff.Consumer("c", family="completion", start=START), engine, handle):
            await until(_once(ledger.ids))


async def test_a_function_that_is_cut_off_from_another_service_has_failed(
    database: str, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    """Its own connection is there: lists show the failure, and it gets one event at a time."""
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    calls: list[int] = []
    noted: list[str | None] = []
    async with await ff.Engine.connect(database) as engine:
        ended = await end_some(engine, 3)

        async def handle(connection: Any, events: Sequence[Any]) -> None:
            calls.append(len(events))
            noted.extend(one.failure for one in await engine.list_consumers())
            if len(calls) == 1:
                raise TransportError("transport", "the search index is away")
            await ledger.add(connection, events)

        async with running(ff.Consumer("c", family="completion", start=START), engine, handle):
            await until(lambda: _has(ledger, 3))
        assert calls == [3, 1, 2]
        assert noted[0] is None
        assert "the search index is away" in str(noted[1])
        assert await ledger.ids() == ended


async def _has(ledger: Ledger, count: int) -> bool:
    return len(await ledger.ids()) >= count


async def test_a_cancellation_that_only_the_function_raises_is_its_failure(
    database: str, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    """For example of a task that it waits for and that another one cancelled: the consumer continues."""
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    noted: list[str | None] = []
    async with await ff.Engine.connect(database) as engine:
        ended = await end_some(engine, 1)

        async def handle(connection: Any, events: Sequence[Any]) -> None:
            noted.extend(one.failure for one in await engine.list_consumers())
            await ledger.add(connection, events)
            if len(noted) == 1:
                raise asyncio.CancelledError

        consumer = ff.Consumer("c", family="completion", start=START)
        async with running(consumer, engine, handle):
            await until(lambda: _has(ledger, 1))
        assert "CancelledError" in str(noted[1])
        assert await ledger.ids() == ended

        # One of the whole consumer ends it, also while its function runs.
        inside = asyncio.Event()

        async def waits(connection: Any, events: Sequence[Any]) -> None:
            inside.set()
            await asyncio.Event().wait()

        await engine.set_consumer("c", START)
        task = asyncio.ensure_future(consumer.run(engine, waits))
        await inside.wait()
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE)
        assert task.cancelled()


async def test_the_server_notices_soon_when_the_host_of_a_function_vanishes(database: str) -> None:
    """It asks whether the connection is alive, but only while the function runs."""
    seen: list[set[tuple[str, str]]] = []

    async def look(connection: Any) -> None:
        found = await connection.fetch("select name, source from pg_settings where name like 'tcp_keepalives_%'")
        seen.append({(row["name"], row["source"]) for row in found})

    async def handle(connection: Any, events: Sequence[Any]) -> None:
        await look(connection)

    async with await ff.Engine.connect(database, max_size=1) as engine:
        await end_some(engine, 1)
        assert await ff.Consumer("c", family="completion", start=START).run_once(engine, handle) == 1
        async with engine._database.connection() as connection:
            await look(connection)
    names = [f"tcp_keepalives_{name}" for name in ("count", "idle", "interval")]
    assert seen[0] == {(name, "session") for name in names}
    assert seen[1] & seen[0] == set()


async def test_a_process_that_comes_while_a_function_runs_waits_its_turn(
    database: str, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    """Neither its start nor its turn waits for the transaction of the other, which may be long."""
    monkeypatch.setattr(module, "_BUSY", 0.01)
    async with await ff.Engine.connect(database) as one, await ff.Engine.connect(database, max_size=1) as other:
        inside, leave = asyncio.Event(), asyncio.Event()

        async def slow(connection: Any, events: Sequence[Any]) -> None:
            await ledger.add(connection, events)
            inside.set()
            await leave.wait()

        await end_some(one, 1)
        consumer = ff.Consumer("c", family="completion", start=START)
        cursor = await consumer.register(one)
        first = asyncio.ensure_future(one.consume("c", slow))
        await inside.wait()
        async with asyncio.timeout(PATIENCE):
            assert await consumer.register(other) == cursor
            with pytest.raises(InvalidInput):
                await ff.Consumer("c", family="lease").register(other)
        tries: list[str] = []
        consume = other.consume

        async def counted(*args: Any, **fields: Any) -> Any:
            done = await consume(*args, **fields)
            tries.append(done.code)
            return done

        monkeypatch.setattr(other, "consume", counted)
        async with running(consumer, other, ledger.add):
            await until(lambda: tries[:2] == ["busy", "busy"])
            leave.set()
            await first
            await one.leave_consumer("c")
            await until(lambda: tries[-1] == "taken")
        assert len(await ledger.ids()) == 1


async def test_a_process_with_the_old_definition_stops(database: str, ledger: Ledger) -> None:
    """It would get events of another type than its function expects."""
    async with await ff.Engine.connect(database) as old, await ff.Engine.connect(database) as new:
        task = asyncio.ensure_future(ff.Consumer("c", family="completion").run(old, ledger.add))
        await until(lambda: _works(old, "c"))
        await ff.Consumer("c", family="lease", redefine=True).register(new)
        await end_some(new, 1)
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(InvalidInput, match="takes other events: lease"):
                await task
        assert await ledger.ids() == []
        assert await ff.Consumer("c", family="lease").run_once(new, ledger.add) == 2


BAD: list[tuple[dict[str, Any], str]] = [
    ({"heartbeats": "yes"}, "heartbeats"),
    ({"name": ""}, "name"),
    ({"name": "x\x00"}, "name"),
    ({"name": 5}, "name"),
    ({"family": "leases"}, "families"),
    ({"family": ["lease"]}, "families"),
    ({"redefine": "yes"}, "redefine"),
    ({"family": "lease", "families": ["lease"]}, "family"),
    ({"batch": 0}, "batch"),
    ({"batch": 10_001}, "batch"),
    ({"start": "x"}, "cursor"),
    ({"start": ""}, "cursor"),
    ({"start": b""}, "cursor"),
    ({"filter": EventFilter(instance_tag=("", "x"))}, "filter.instance_tag"),
    ({"filter": EventFilter(instance_tag=("x", "é" * 2100))}, "filter"),
]


@each(("arguments", "field"), BAD)
async def test_bad_input_is_named(
    plain_engine: ff.Engine, arguments: dict[str, Any], field: str, ledger: Ledger
) -> None:
    with pytest.raises(InvalidInput) as refused:
        await ff.Consumer(**{"name": "c", **arguments}).register(plain_engine)
    assert refused.value.field == field
    assert await plain_engine.list_consumers() == []


PROGRAM = textwrap.dedent(
    """
    import asyncio, sys
    import flowfabric as ff
    from flowfabric.values.event import EventCursor

    async def handle(connection, events):
        await connection.executemany(
            "insert into ledger values ($1, $2)", [(one.execution_id, one.cursor.position) for one in events]
        )

    async def main():
        async with await ff.Engine.connect(sys.argv[1]) as engine:
            await ff.Consumer("c", family="completion", start=EventCursor(), batch=3).run(engine, handle)

    asyncio.run(main())
    """
)


async def test_processes_that_are_killed_act_on_every_completion_exactly_once(
    database: str, tmp_path: Path, ledger: Ledger, sql: asyncpg.Connection[Any]
) -> None:
    program = tmp_path / "consumer.py"
    program.write_text(PROGRAM)
    count = sampling.examples(50, 3)
    chance = random.Random(1)
    ended: list[Any] = []
    async with await ff.Engine.connect(database) as engine:
        for _ in range(count):
            processes = [await asyncio.create_subprocess_exec(sys.executable, str(program), database) for _ in range(2)]
            ended += await end_some(engine, 10)
            seen = len(await ledger.ids())

            async def moves(seen: int = seen) -> bool:
                return len(await ledger.ids()) > seen

            await until(moves)
            await end_some_into(engine, ended, chance.randint(1, 5))
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                await process.wait()
            # Nobody waits for processes that are gone.
            await sql.execute("update flowfabric.consumer set until = null, instance = null")

        async def nothing(connection: Any, events: Sequence[Any]) -> None:
            await ledger.add(connection, events)

        await ff.Consumer("c", family="completion", start=START).run_once(engine, nothing)
    assert await ledger.ids() == ended


async def end_some_into(engine: ff.Engine, ended: list[Any], count: int) -> None:
    ended += await end_some(engine, count)


FOLLOWING = textwrap.dedent(
    """
    import asyncio, os, pathlib, sys
    import flowfabric as ff
    from flowfabric.values.event import EventCursor

    async def main():
        acted, cursor = pathlib.Path("acted"), pathlib.Path("cursor")
        after = cursor.read_text() if cursor.exists() else EventCursor()
        async with await ff.Engine.connect(sys.argv[1]) as engine:
            async with await engine.subscribe_completion(after=after) as events:
                async for event in events:
                    with acted.open("a") as file:
                        file.write(f"{event.execution_id}\\n")
                    pathlib.Path("next").write_text(str(event.cursor))
                    os.replace("next", cursor)

    asyncio.run(main())
    """
)


async def test_a_follower_that_is_killed_acts_on_every_completion_at_least_once(database: str, tmp_path: Path) -> None:
    """A plain subscription, whose program stores the cursor after acting."""
    (tmp_path / "follower.py").write_text(FOLLOWING)
    acted = tmp_path / "acted"
    chance = random.Random(2)
    ended: list[Any] = []

    def seen() -> list[str]:
        return acted.read_text().split() if acted.exists() else []

    async def acts(least: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(set(seen())) < least:
                await asyncio.sleep(0.01)

    async with await ff.Engine.connect(database) as engine:
        for last in [False] * sampling.examples(50, 3) + [True]:
            process = await asyncio.create_subprocess_exec(sys.executable, "follower.py", database, cwd=tmp_path)
            try:
                before = len(set(seen()))
                ended += await end_some(engine, 10)
                if last:
                    await acts(len(ended))
                else:
                    await acts(before + 1)
                    await end_some_into(engine, ended, chance.randint(1, 5))
            finally:
                process.kill()
                await process.wait()
    found = seen()
    assert set(found) == {str(one) for one in ended}
    # In the order of the log: only the event that it acted on when it was killed comes again, at once.
    assert list(dict.fromkeys(found)) == [one for at, one in enumerate(found) if at == 0 or found[at - 1] != one]
