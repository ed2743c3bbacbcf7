"""Followers in trouble: closed, disconnected, ahead of the others, trimmed, on a standby, beside a damaged row."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric.engine import followers as loop
from flowfabric.errors import Corruption, CursorRefused, StreamDisconnected, TransportError
from flowfabric.values.event import Checkpoint, EventCursor, EventFilter
from flowfabric.values.ids import mint_uuid
from tests.sql.test_log_epochs import fail_over
from tests.sql.test_subscriptions import (
    PATIENCE,
    START,
    drain,
    end_of_log,
    is_asleep,
    plain,  # noqa: F401 - a fixture
    take,
    until,
)
from tests.support import Clock, end_one, started

NEVER = EventFilter(namespace="never")


class Gate:
    """Holds the reads of an engine back: a process that is stopped, or a database that does not answer."""

    def __init__(self, engine: ff.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = asyncio.Event()
        self.waiting = 0
        self.fails = False
        self._real = engine._read_log
        self.holds: Callable[[int], bool] = lambda limit: True
        monkeypatch.setattr(engine, "_read_log", self._read)

    async def _read(self, choices: Any, after: Any, limit: int, *rest: Any) -> Any:
        if not self.is_open.is_set() and self.holds(limit):
            self.waiting += 1
            if self.fails:
                raise TransportError("transport", "gone")
            await self.is_open.wait()
            self.waiting -= 1
        return await self._real(choices, after, limit, *rest)


def running(name: str = "flowfabric events") -> int:
    return sum(task.get_name() == name for task in asyncio.all_tasks())


async def to_the_end(events: Any) -> tuple[list[EventCursor], EventCursor]:
    """The cursors of what it still yields, and that of its end."""
    found: list[EventCursor] = []
    with pytest.raises(StreamDisconnected) as ended:
        async with asyncio.timeout(PATIENCE):
            while True:
                found.append((await anext(events)).cursor)
    return found, ended.value.cursor


async def test_a_read_that_ends_after_the_disconnection_is_not_repeated(
    plain: ff.Engine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cursor of `StreamDisconnected` is after the last event that was yielded, not after the last one before it."""
    monkeypatch.setattr(loop, "PAGE", 2)
    for _ in range(4):
        await end_one(plain)
    events = await plain.subscribe_completion(after=START)
    await take(events, 2)
    gate = Gate(plain, monkeypatch)
    ending = asyncio.ensure_future(to_the_end(events))
    await until(lambda: gate.waiting == 1)
    events.disconnect("the engine shuts down")
    gate.is_open.set()
    found, cursor = await ending
    assert found
    assert cursor == found[-1]


async def test_two_tasks_that_iterate_one_subscription_get_each_event_once(
    plain: ff.Engine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "PAGE", 2)
    for _ in range(4):
        await end_one(plain)
    events = await plain.subscribe_completion(after=START)
    first = await take(events, 2)
    gate = Gate(plain, monkeypatch)
    both = [asyncio.ensure_future(take(events, 1)) for _ in range(2)]
    await until(lambda: gate.waiting == 2)
    gate.is_open.set()
    found = [one.cursor for one in first] + [(await one)[0].cursor for one in both]
    await end_one(plain)
    found += [one.cursor for one in await take(events, 1)]
    assert sorted(found, key=lambda one: one.position) == [
        one.cursor for one in (await plain.read_events(family="completion")).items
    ]
    await events.aclose()


async def test_a_subscription_that_is_closed_during_its_read_yields_nothing_more(
    plain: ff.Engine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "PAGE", 1)
    await end_one(plain)
    await end_one(plain)
    events = await plain.subscribe_completion(after=START)
    await take(events, 1)
    gate = Gate(plain, monkeypatch)
    waiting = asyncio.ensure_future(anext(events))
    await until(lambda: gate.waiting == 1)
    await events.aclose()
    gate.is_open.set()
    with pytest.raises(StopAsyncIteration):
        await waiting
    assert plain.followers.count == 0


async def test_closing_in_an_outage_leaves_nothing_behind(
    plain: ff.Engine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the loop nor an iteration sleeps on until its next try."""
    monkeypatch.setattr(loop, "_FIRST_PAUSE", 1000.0)
    monkeypatch.setattr(loop, "_GIVE_UP", 10_000.0)
    await end_one(plain)
    attached = await plain.subscribe_completion()
    monkeypatch.setattr(loop, "PAGE", 1)
    behind = await plain.subscribe_completion(after=START)
    await take(behind, 1)
    failed: list[int] = []

    async def fails(choices: Any, after: Any, limit: int, *_: Any) -> Any:
        failed.append(limit)
        raise TransportError("transport", "gone")

    monkeypatch.setattr(plain, "_read_log", fails)
    waiting = asyncio.ensure_future(anext(behind))
    await until(lambda: 1 in failed and loop._SHARED_PAGE in failed)
    await behind.aclose()
    with pytest.raises(StopAsyncIteration):
        async with asyncio.timeout(PATIENCE):
            await waiting
    await attached.aclose()
    await until(lambda: running() == 0)


async def test_the_end_of_the_engine_ends_an_iteration_that_waits_for_the_database(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_FIRST_PAUSE", 1000.0)
    monkeypatch.setattr(loop, "_GIVE_UP", 10_000.0)
    monkeypatch.setattr(loop, "PAGE", 1)
    engine = await ff.Engine.connect(database)
    await end_one(engine)
    await end_one(engine)
    events = await engine.subscribe_completion(after=START)
    (first,) = await take(events, 1)
    tried = asyncio.Event()

    async def fails(*_: Any) -> Any:
        tried.set()
        raise TransportError("transport", "gone")

    monkeypatch.setattr(engine, "_read_log", fails)
    waiting = asyncio.ensure_future(to_the_end(events))
    await tried.wait()
    await engine.close()
    async with asyncio.timeout(PATIENCE):
        assert await waiting == ([], first.cursor)


@pytest.mark.parametrize("attached", [True, False])
async def test_a_read_that_hangs_is_given_up(
    plain: ff.Engine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    attached: bool,
) -> None:
    """The network was cut without a word: the next read has another connection."""
    monkeypatch.setattr(loop, "_ANSWER", 0.1)
    monkeypatch.setattr(loop, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(loop, "PAGE", 1)
    await end_one(plain)
    await end_one(plain)
    events = await plain.subscribe_completion(after=None if attached else START)
    gate = Gate(plain, monkeypatch)
    gate.holds = lambda limit: gate.waiting == 0
    ended = await end_one(plain)
    found = await take(events, 1 if attached else 3)
    assert found[-1].execution_id == ended
    assert gate.waiting == 1, "the read that hung"
    await events.aclose()


async def test_a_follower_that_may_not_announce_itself_polls(
    plain: ff.Engine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not read again and again without a pause."""
    monkeypatch.setattr(loop, "_LINGER", 0.0)
    monkeypatch.setattr(loop, "_AWAKE", 1000.0)

    async def refused(*_: Any) -> None:
        return None

    monkeypatch.setattr(plain, "sleep_for_events", refused)
    events = await plain.subscribe_completion()
    await until(lambda: plain.followers.reads >= 2)
    for _ in range(20):
        await plain.count_events()
    assert plain.followers.reads <= 3
    await events.aclose()


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("came", ["before the read", "during the read"])
async def test_a_follower_that_is_ahead_of_the_loop_learns_what_a_failover_lost(
    plain: ff.Engine,  # noqa: F811
    sql: asyncpg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    came: str,
    new: int,
) -> None:
    """The loop's own position is before the loss, and continues; that of the follower is after it."""
    monkeypatch.setattr(loop, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(loop, "_LAST_PAUSE", 0.02)
    await end_one(plain)
    kept = await end_of_log(plain)
    slow = await plain.subscribe_completion()  # the loop reads for it
    gate = Gate(plain, monkeypatch)
    gate.holds = lambda limit: limit == loop._SHARED_PAGE
    gate.fails = came == "before the read"
    await until(lambda: gate.waiting > 0)
    for _ in range(3):
        await end_one(plain)
    ahead = await plain.subscribe_completion(after=kept)
    await take(ahead, 3)
    assert ahead.is_attached
    await fail_over(sql, losing_after=kept.position)
    for _ in range(new):
        await end_one(plain)
    gate.is_open.set()
    with pytest.raises(CursorRefused, match="cursor_ahead") as lost:
        await take(ahead, 1)
    assert lost.value.position == kept.position
    assert len(await take(slow, new)) == new
    await slow.aclose()
    await sql.execute("delete from flowfabric.execution; delete from flowfabric.timer")


async def test_a_follower_that_sleeps_over_a_trim_is_told(
    plain: ff.Engine,  # noqa: F811
    sql: asyncpg.Connection[Any],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process was stopped for three days, at the end of the log."""
    await end_one(plain)
    events = await plain.subscribe_completion()
    before = events.cursor
    await until(lambda: is_asleep(sql, plain.instance))
    gate = Gate(plain, monkeypatch)
    await end_one(plain)
    end = await end_of_log(plain)
    await clock.advance(hours=75)
    await plain.sweep()
    gate.is_open.set()
    with pytest.raises(CursorRefused, match="cursor_expired") as refused:
        await take(events, 1)
    assert events.cursor == before
    oldest = EventCursor(refused.value.position, refused.value.epoch)
    assert oldest == end
    async with await plain.subscribe_completion(after=oldest) as again:
        ended = await end_one(plain)
        assert [one.execution_id for one in await take(again, 1)] == [ended]
    await sql.execute("delete from flowfabric.execution; delete from flowfabric.timer")


@pytest_asyncio.fixture(loop_scope="session")
async def standby(sql: asyncpg.Connection[Any]) -> AsyncIterator[Callable[[bool], Any]]:
    """Make the server say that it is a standby; a function in front of the server's own answers."""
    await sql.execute("create function flowfabric.pg_is_in_recovery() returns boolean language sql as 'select true'")
    source = await sql.fetchval("select pg_get_functiondef('flowfabric.log_state'::regproc)")

    async def make(is_standby: bool) -> None:
        name = "flowfabric.pg_is_in_recovery()" if is_standby else "pg_is_in_recovery()"
        await sql.execute(source.replace("pg_is_in_recovery()", name))

    yield make
    await make(False)
    await sql.execute("drop function flowfabric.pg_is_in_recovery()")


async def test_followers_wait_for_the_server_that_takes_over(
    plain: ff.Engine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    standby: Callable[[bool], Any],
) -> None:
    """Connections may reach the old server for a while, which is a standby now."""
    monkeypatch.setattr(loop, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(loop, "_LAST_PAUSE", 0.02)
    events = await plain.subscribe_completion()
    await standby(True)
    waiting = asyncio.ensure_future(take(events, 1))
    reads = plain.followers.reads
    plain.followers._changed.set()
    await until(lambda: plain.followers.reads > reads + 2)
    await standby(False)
    ended = await end_one(plain)
    assert [one.execution_id for one in await waiting] == [ended]
    await events.aclose()


DAMAGE = {"tags": "'[1]'", "details": "'3'"}


@pytest.mark.parametrize("column", DAMAGE)
@pytest.mark.parametrize("attached", [True, False])
async def test_a_damaged_event_is_named_and_the_others_follow_on(
    plain: ff.Engine,  # noqa: F811
    sql: asyncpg.Connection[Any],
    column: str,
    attached: bool,
) -> None:
    begin = await end_of_log(plain)
    early = [await plain.follow(), await plain.follow(filter=EventFilter(namespace="n"))] if attached else []
    await end_one(plain, namespace="n")
    position = await sql.fetchval(
        "with log as materialized (select flowfabric.open_log(flowfabric.now()) as slot)"
        f" insert into flowfabric.event (slot, occurred_at, partition, id, signal_effect, {column})"
        f" select slot, flowfabric.now(), 0, $1::uuid, 'appended', {DAMAGE[column]} from log returning seq",
        mint_uuid(),
    )
    await end_one(plain, namespace="n")
    with pytest.raises(Corruption, match=f"event {position}: {column}"):
        await take(early[0] if attached else await plain.follow(after=begin), 5)
    others = early[1] if attached else await plain.follow(after=begin, filter=EventFilter(namespace="n"))
    assert len(await take(others, 4)) == 4
    await others.aclose()
    await sql.execute("delete from flowfabric.event where seq = $1", position)


async def test_a_thousand_followers_cost_one_read_and_get_what_is_theirs(
    plain: ff.Engine,  # noqa: F811
    sql: asyncpg.Connection[Any],
) -> None:
    """Each with a filter of its own: an execution, a namespace, a tag, a flow."""
    held = [await started(plain, namespace=f"n{n}", tags={"tenant": f"t{n}"}) for n in range(10)]
    filters = [
        *(EventFilter(execution_id=one.execution_id) for one in held),
        *(EventFilter(namespace=f"n{n}") for n in range(10)),
        *(EventFilter(instance_tag=("tenant", f"t{n}")) for n in range(10)),
        *(EventFilter(execution_id=ff.ExecutionId(mint_uuid())) for n in range(1000 - 30)),
    ]
    subscriptions = [await plain.subscribe_completion(filter=one) for one in filters]
    await until(lambda: plain.followers.count == 1000)
    reads = plain.followers.reads
    connections = await sql.fetchval("select count(*) from pg_stat_activity where datname = current_database()")
    for one in held:
        await plain.complete(one.handle)
    for group in range(3):
        for n, one in enumerate(held):
            (event,) = await take(subscriptions[group * 10 + n], 1)
            assert event.execution_id == one.execution_id
    assert [one.waiting for one in subscriptions] == [0] * 1000
    assert plain.followers.reads - reads <= 100
    now = await sql.fetchval("select count(*) from pg_stat_activity where datname = current_database()")
    assert now <= connections + 1
    for one in subscriptions:
        await one.aclose()


async def test_a_quiet_follower_with_checkpoints_is_woken_only_when_one_is_due(
    plain: ff.Engine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_EVENTS", 6)
    await end_one(plain)
    events = await plain.subscribe_completion(filter=NEVER, checkpoints=True)
    waiting = asyncio.ensure_future(take(events, 1))
    for _ in range(2):
        await until(lambda: events.is_attached and not events._news.is_set())
        await end_one(plain)
        end = await end_of_log(plain)
        await until(lambda end=end: events.position == end)  # type: ignore[misc]
        assert not events._news.is_set()
    await end_one(plain)
    (told,) = await waiting
    assert isinstance(told, Checkpoint)
    await events.aclose()


async def test_an_abandoned_iteration_is_forgotten_and_a_cancelled_one_continues(plain: ff.Engine) -> None:  # noqa: F811
    """A cancelled `anext` takes no event with it, wherever it was cancelled."""
    begin = await end_of_log(plain)
    events = await plain.subscribe_completion(after=begin)
    seen: list[EventCursor] = []
    for n in range(12):
        await end_one(plain)
        for pause in range(n % 4):
            waiting = asyncio.ensure_future(anext(events))
            for _ in range(pause + 1):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            if not waiting.cancelled():
                seen.append(waiting.result().cursor)
    seen += [one.cursor for one in await drain(events, await end_of_log(plain))]
    assert seen == [one.cursor for one in (await plain.read_events(family="completion", after=begin)).items]
    del events, waiting
    gc.collect()
    await until(lambda: plain.followers.count == 0)


async def test_a_closed_subscription_continues_after_the_last_event_that_it_yielded(
    plain: ff.Engine,  # noqa: F811
) -> None:
    """Events that were read and not yielded are not behind its cursor."""
    for _ in range(3):
        await end_one(plain)
    async with await plain.subscribe_completion(after=START) as events:
        (first,) = await take(events, 1)
        assert events.waiting == 2
    assert events.cursor == first.cursor
    async with await plain.subscribe_completion(after=events.cursor) as rest:
        assert len(await take(rest, 2)) == 2
    # One that has read only what it does not take is further.
    async with await plain.subscribe_completion(after=START, filter=NEVER) as none:
        pass
    assert none.cursor == await end_of_log(plain)


@pytest.mark.parametrize("how", ["aclose", "close"])
@pytest.mark.parametrize("attached", [True, False])
async def test_a_read_that_hangs_does_not_outlive_its_subscription(
    database: str, monkeypatch: pytest.MonkeyPatch, attached: bool, how: str
) -> None:
    """The database does not answer: neither the loop nor an iteration waits for it."""
    monkeypatch.setattr(loop, "_ANSWER", 10_000.0)
    monkeypatch.setattr(loop, "_LEAVE", 0.01)
    monkeypatch.setattr(loop, "PAGE", 1)
    engine = await ff.Engine.connect(database)
    await end_one(engine)
    await end_one(engine)
    events = await engine.subscribe_completion(after=None if attached else START)
    if not attached:
        await take(events, 1)
    gate = Gate(engine, monkeypatch)
    waiting = asyncio.ensure_future(anext(events))
    await until(lambda: gate.waiting == 1)
    await (events.aclose() if how == "aclose" else engine.close())
    with pytest.raises(StopAsyncIteration if how == "aclose" else StreamDisconnected):
        async with asyncio.timeout(PATIENCE):
            await waiting
    await until(lambda: running() == 0)
    await engine.close()
