"""Subscriptions: every event once, in one order, from any cursor on, in whichever order transactions commit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric.engine import followers as loop
from flowfabric.engine.followers import Subscription
from flowfabric.errors import CursorRefused, InvalidInput, StreamDisconnected, TransportError
from flowfabric.values.event import (
    FAMILIES,
    Checkpoint,
    CompletionEvent,
    Event,
    EventCursor,
    EventFilter,
    LeaseEvent,
    OperatorEvent,
    RegistryEvent,
)
from flowfabric.values.ids import FlowId, mint_uuid
from flowfabric.values.page import ScannerFilter
from tests import sampling
from tests.each import each
from tests.support import claim_one, end_one, submit, submit_member
from tests.until import PATIENCE, until

START = EventCursor()
TTL = timedelta(seconds=10)


@pytest_asyncio.fixture(loop_scope="session")
async def plain(database: str) -> AsyncIterator[ff.Engine]:
    """An engine of its own, so that its loop ends with the test."""
    async with await ff.Engine.connect(database) as engine:
        yield engine


async def take(subscription: Subscription[Any], count: int) -> list[Any]:
    """The next items of a subscription."""
    async with asyncio.timeout(PATIENCE):
        return [await anext(subscription) for _ in range(count)]


async def drain(subscription: Subscription[Any], upto: EventCursor) -> list[Any]:
    """All items up to a position."""
    found: list[Any] = []
    async with asyncio.timeout(PATIENCE):
        while subscription.cursor.position < upto.position:
            item = asyncio.ensure_future(anext(subscription))
            while not item.done():
                await asyncio.wait([item], timeout=0.02)
                if not item.done() and subscription.cursor.position >= upto.position:
                    item.cancel()
                    await asyncio.wait([item])
                    break
            if item.done() and not item.cancelled():
                found.append(item.result())
    return found


async def end_of_log(engine: ff.Engine) -> EventCursor:
    return (await engine.count_events()).cursor


async def mixed(engine: ff.Engine) -> dict[str, Any]:
    """Events of all families, with and without everything that filters compare."""
    flow = FlowId(mint_uuid())
    member = await submit_member(engine, flow, namespace="a", tags={"tenant": "x"}, execution_kind="first")
    held = await claim_one(engine)
    await engine.complete(held.handle)
    await end_one(engine, namespace="b", tags={"tenant": "x", "other": "y"}, execution_kind="second")
    await end_one(engine, tags={"tenant": "X"}, execution_kind="first")
    waiting = await submit(engine, namespace="a", execution_kind="second")
    await engine.change_priority(waiting, 5)
    await engine.cancel_flow(flow)
    await engine.register_worker("w", "w-1", lanes=["default"], liveness_ttl=TTL, namespace="a")
    await engine.mark_worker_dead("w-1", reason="broken", namespace="a")
    return {"flow": flow, "member": member}


FILTERS: dict[str, Callable[[dict[str, Any]], ScannerFilter | None]] = {
    "none": lambda made: None,
    "namespace": lambda made: ScannerFilter(namespace="a"),
    "tag": lambda made: EventFilter(instance_tag=("tenant", "x")),
    "a tag of another case": lambda made: EventFilter(instance_tag=("tenant", "X")),
    "namespace and tag": lambda made: EventFilter(namespace="b", instance_tag=("tenant", "x")),
    "flow": lambda made: EventFilter(flow_id=made["flow"]),
    "execution": lambda made: EventFilter(execution_id=made["member"]),
    "kind": lambda made: EventFilter(kind="second"),
    "kind and namespace": lambda made: EventFilter(kind="second", namespace="a"),
    "a kind that never was": lambda made: EventFilter(kind="never"),
    "everything else": lambda made: EventFilter(namespace="never"),
}


def matches(event: Event, chosen: ScannerFilter | None, families: tuple[str, ...]) -> bool:
    """The rule, once more and slowly."""
    if not set(event.families) & set(families):
        return False
    if chosen is None:
        return True
    wanted = {
        name: getattr(chosen, name, None) for name in ("namespace", "instance_tag", "flow_id", "execution_id", "kind")
    }
    return all(
        wanted[name] is None or found == wanted[name]
        for name, found in {
            "namespace": event.namespace,
            "flow_id": event.flow_id,
            "execution_id": event.execution_id,
            "kind": event.execution_kind,
            "instance_tag": None
            if wanted["instance_tag"] is None
            else (wanted["instance_tag"][0], event.tags.get(wanted["instance_tag"][0])),
        }.items()
    )


async def test_from_now_on_means_what_is_committed_after_the_call(plain: ff.Engine) -> None:
    await end_one(plain)
    async with await plain.subscribe_completion() as events:
        ended = await end_one(plain, tags={"tenant": "x"}, namespace="n")
        (event,) = await take(events, 1)
    assert isinstance(event, CompletionEvent)
    assert (event.execution_id, event.outcome, event.attempt_index) == (ended, "success", 0)
    assert (event.namespace, event.tags, event.execution_kind, event.lane_id) == (
        "n",
        {"tenant": "x"},
        "test",
        "default",
    )
    assert events.cursor == event.cursor


async def test_each_family_has_its_own_type(plain: ff.Engine) -> None:
    await mixed(plain)
    calls = {
        "completion": plain.subscribe_completion,
        "lease": plain.subscribe_lease_history,
        "operator": plain.subscribe_operator_events,
        "worker": plain.subscribe_worker_events,
    }
    types = {"completion": CompletionEvent, "lease": LeaseEvent, "operator": OperatorEvent, "worker": RegistryEvent}
    end = await end_of_log(plain)
    for family, call in calls.items():
        async with await call(after=START) as events:
            found = await drain(events, end)
        expected = (await plain.read_events(family=family)).items
        assert [one.cursor for one in found] == [one.cursor for one in expected]
        assert found
        assert {type(one) for one in found} == {types[family]}


async def test_a_worker_comes_and_goes_in_the_log(plain: ff.Engine) -> None:
    await plain.register_worker("pool", "w-1", lanes=["default"], liveness_ttl=TTL, namespace="n")
    await plain.heartbeat_worker("w-1", namespace="n")
    await plain.mark_worker_dead("w-1", reason="broken", namespace="n")
    for heartbeats in (False, True):
        async with await plain.subscribe_worker_events(after=START, heartbeats=heartbeats) as events:
            found = await drain(events, await end_of_log(plain))
        assert [
            (one.event_type, one.worker_id, one.worker_instance_id, one.namespace, one.reason) for one in found
        ] == [
            ("registered", "pool", "w-1", "n", None),
            *([("heartbeat", "pool", "w-1", "n", None)] if heartbeats else []),
            ("marked_dead", "pool", "w-1", "n", "broken"),
        ]


async def test_a_swept_worker_is_an_event(plain: ff.Engine, clock: Any) -> None:
    await plain.register_worker("pool", "w-1", lanes=["default"], liveness_ttl=TTL)
    await clock.advance(seconds=11)
    assert await plain.sweep_workers() == 1
    async with await plain.subscribe_worker_events(after=START) as events:
        assert [one.event_type for one in await take(events, 2)] == ["registered", "ttl_swept"]


@pytest.mark.both_servers
async def test_every_cursor_in_every_form_continues_with_the_rest(plain: ff.Engine) -> None:
    await mixed(plain)
    everything = list((await plain.read_events()).items)
    end = everything[-1].cursor
    for at, event in enumerate(everything):
        form = (event.cursor, event.cursor.encode(), str(event.cursor))[at % 3]
        async with await plain.follow(after=form) as events:
            found = await drain(events, end)
        assert [one.cursor for one in found] == [one.cursor for one in everything[at + 1 :]]


@pytest.mark.both_servers
async def test_a_filter_yields_its_part_of_the_log_to_every_reader(plain: ff.Engine) -> None:
    """Stored events are read by the database's filter, new ones by the loop's; both are the written rule."""
    early = await end_of_log(plain)
    made = await mixed(plain)
    chosen = {name: make(made) for name, make in FILTERS.items()}
    by_name = {}
    for families in (FAMILIES, ("completion",), ("lease", "operator"), ("worker",)):
        for name, one in chosen.items():
            by_name[name, families] = await plain.follow(families, after=early, filter=one)
    middle = await end_of_log(plain)
    stored = {key: await drain(events, middle) for key, events in by_name.items()}
    await mixed(plain)  # with other ids: the filters of ids take none of it
    end = await end_of_log(plain)
    everything = list((await plain.read_events(limit=1000)).items)
    for (name, families), events in by_name.items():
        found = stored[name, families] + await drain(events, end)
        expected = [one for one in everything if matches(one, chosen[name], families)]
        assert [one.cursor for one in found] == [one.cursor for one in expected], (name, families)
        await events.aclose()
    # Some of them match something, so that this says something.
    assert sum(bool(found) for found in stored.values()) > 12


@pytest.mark.parametrize("choices", [1, 8])
async def test_the_loop_hands_out_the_same_with_few_filters_and_with_many(
    plain: ff.Engine, monkeypatch: pytest.MonkeyPatch, choices: int
) -> None:
    monkeypatch.setattr(loop, "_CHOICES", choices)
    filters = [EventFilter(namespace="a"), EventFilter(kind="second"), EventFilter(instance_tag=("tenant", "X")), None]
    subscriptions = [await plain.follow(filter=one) for one in filters]
    begin = await end_of_log(plain)
    await mixed(plain)
    end = await end_of_log(plain)
    everything = list((await plain.read_events(after=begin, limit=1000)).items)
    for one, events in zip(filters, subscriptions, strict=True):
        found = await drain(events, end)
        expected = [event for event in everything if matches(event, one, FAMILIES) and event.worker_type != "heartbeat"]
        assert [event.cursor for event in found] == [event.cursor for event in expected]
        await events.aclose()


async def test_subscriptions_at_the_end_share_one_read(plain: ff.Engine) -> None:
    subscriptions = [await plain.follow(("completion",), filter=EventFilter(namespace=str(n % 3))) for n in range(30)]
    await until(lambda: plain.followers.count == 30)
    before = plain.followers.reads
    await end_one(plain, namespace="1")
    found = [await take(subscriptions[n], 1) for n in range(1, 30, 3)]
    assert len({tuple(event.cursor for event in one) for one in found}) == 1
    assert plain.followers.reads - before < 30
    for one in subscriptions:
        await one.aclose()


async def test_a_slow_follower_delays_only_itself_and_loses_nothing(
    plain: ff.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "QUEUE", 8)
    slow = await plain.subscribe_completion()
    quick = await plain.subscribe_completion()
    ended = []
    for _ in range(30):
        ended.append(await end_one(plain))
        (event,) = await take(quick, 1)
        assert event.execution_id == ended[-1]
    assert not slow.is_attached
    assert len(slow._buffer) == 8
    assert [event.execution_id for event in await take(slow, 30)] == ended
    late = await end_one(plain)
    assert [event.execution_id for event in await take(slow, 1)] == [late]
    await slow.aclose()
    await quick.aclose()


COLUMNS = {
    "lease": "lease_type",
    "completion": "outcome",
    "operator": "operator_type",
    "signal": "signal_effect",
    "worker": "worker_type",
}


async def write(connection: asyncpg.Connection[Any], family: str = "completion") -> None:
    """Write an event of a family, as every call of the engine does: it announces itself, then draws the number."""
    await connection.execute(
        "with log as materialized (select flowfabric.open_log(flowfabric.now()) as slot)"
        f" insert into flowfabric.event (slot, occurred_at, partition, id, {COLUMNS[family]})"
        " select slot, flowfabric.now(), 0, $1::uuid, 'word' from log",
        mint_uuid(),
    )


async def held_writer(database: str, family: str = "completion") -> tuple[asyncpg.Connection[Any], Any]:
    """A transaction that has drawn the number of an event, and is open."""
    other = await asyncpg.connect(database)
    transaction = other.transaction()
    await transaction.start()
    await write(other, family)
    return other, transaction


@each("family", list(COLUMNS))
async def test_an_event_whose_number_was_drawn_earlier_and_committed_later_is_not_lost(
    database: str, sql: asyncpg.Connection[Any], plain: ff.Engine, family: str
) -> None:
    """The commit-order trap: a reader must not pass a number that may still appear."""
    begin = await end_of_log(plain)
    follower = await plain.follow((family,), after=begin)  # type: ignore[arg-type]
    other, transaction = await held_writer(database, family)
    try:
        await write(sql, family)
        assert (await plain.read_events(family=family, after=begin)).items == []
    finally:
        await transaction.commit()
        await other.close()
    expected = [one.cursor for one in (await plain.read_events(family=family, after=begin)).items]
    assert len(expected) == 2
    assert [one.cursor for one in await take(follower, 2)] == expected
    await follower.aclose()


@each("family", list(COLUMNS))
async def test_from_now_on_includes_what_an_open_writer_commits_after_the_call(
    database: str, sql: asyncpg.Connection[Any], plain: ff.Engine, family: str
) -> None:
    """Its number is smaller than one that was committed before the call: that one is delivered as well."""
    begin = await end_of_log(plain)
    other, transaction = await held_writer(database, family)
    try:
        await write(sql, family)
        follower = await plain.follow((family,))  # type: ignore[arg-type]
    finally:
        await transaction.commit()
        await other.close()
    expected = [one.cursor for one in (await plain.read_events(family=family, after=begin)).items]
    assert len(expected) == 2
    assert [one.cursor for one in await take(follower, 2)] == expected
    await follower.aclose()


@pytest.mark.parametrize("seed", sampling.seeds(1, 2, 3, 4, 5, 6, 7, 8))
async def test_writers_that_end_in_any_order_lose_no_reader_an_event(
    database: str, sql: asyncpg.Connection[Any], plain: ff.Engine, seed: int
) -> None:
    """Six writers of any isolation open, announce themselves, draw numbers, write, and commit or roll back at random.

    One reader pages, two follow, and one follows, stops and continues with the cursor that it stored.
    """
    chance = random.Random(seed)
    begin = cursor = await end_of_log(plain)
    followers = [
        await plain.follow(after=begin),
        await plain.follow(("completion", "signal"), after=begin),
    ]
    writers = [await asyncpg.connect(database) for _ in range(6)]
    open_ones: dict[int, Any] = {}
    paged: list[EventCursor] = []
    resumed: list[EventCursor] = [begin]

    async def resume(count: int) -> None:
        async with await plain.follow(after=resumed[-1]) as events:
            resumed.extend([(await anext(events)).cursor for _ in range(min(count, events.waiting))])

    for _ in range(120):
        number = chance.randrange(6)
        match chance.choice(("write", "write", "pause", "end", "read", "resume")):
            case "write" | "pause" as what:
                if number not in open_ones:
                    isolation = chance.choice(("read_committed", "repeatable_read", "serializable"))
                    open_ones[number] = writers[number].transaction(isolation=isolation)
                    await open_ones[number].start()
                if what == "pause":  # before it draws a number, or after one that no event gets
                    draws = chance.choice(("null", "nextval('flowfabric.event_number')"))
                    await writers[number].execute(f"select flowfabric.open_log(flowfabric.now()), {draws}")
                else:
                    await write(writers[number], chance.choice(list(COLUMNS)))
            case "end" if number in open_ones:
                transaction = open_ones.pop(number)
                await (transaction.rollback() if chance.random() < 0.2 else transaction.commit())
            case "resume":
                await resume(chance.randint(1, 4))
            case _:
                page = await plain.read_events(after=cursor, limit=chance.randint(1, 4))
                assert page.next_cursor is not None
                paged += [one.cursor for one in page.items]
                cursor = page.next_cursor
    for transaction in open_ones.values():
        await transaction.commit()
    for writer in writers:
        await writer.close()
    paged += [one.cursor for one in (await plain.read_events(after=cursor, limit=1000)).items]
    stored = [
        EventCursor(row["seq"], begin.epoch)
        for row in await sql.fetch("select seq from flowfabric.event where seq > $1 order by seq", begin.position)
    ]
    assert paged == stored
    await resume(1000)
    assert resumed[1:] == stored
    end = await end_of_log(plain)
    assert [one.cursor for one in await drain(followers[0], end)] == stored
    part = (await plain.read_events(family=("completion", "signal"), after=begin, limit=1000)).items
    assert [one.cursor for one in await drain(followers[1], end)] == [one.cursor for one in part]
    for one in followers:
        await one.aclose()


async def test_a_writer_that_began_before_the_follower_slept_still_reaches_it(
    database: str, plain: ff.Engine, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked for sleepers before there was one: the follower sees that it writes, and polls."""
    monkeypatch.setattr(loop, "_POLL", 10_000.0)
    real = plain.sleep_for_events
    opened: list[Any] = []

    async def announce(*args: Any) -> Any:
        if not opened:
            opened.append(await held_writer(database))
        return await real(*args)

    monkeypatch.setattr(plain, "sleep_for_events", announce)
    events = await plain.subscribe_completion()
    await until(lambda: is_asleep(sql, plain.instance))
    ((other, transaction),) = opened
    try:
        waiting = asyncio.ensure_future(take(events, 1))
        await asyncio.sleep(0)
        await transaction.commit()
        assert len(await waiting) == 1
    finally:
        await other.close()
    await events.aclose()


async def is_asleep(sql: asyncpg.Connection[Any], instance: Any) -> bool:
    found: bool = await sql.fetchval(
        "select exists (select from flowfabric.follower f where f.instance = $1)", instance
    )
    return found


@pytest.mark.both_servers
async def test_an_idle_follower_sleeps_and_is_notified(
    plain: ff.Engine, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_POLL", 10_000.0)
    events = await plain.subscribe_completion()
    for _ in range(3):
        await until(lambda: is_asleep(sql, plain.instance))
        reads = plain.followers.reads
        ended = await end_one(plain)
        assert [event.execution_id for event in await take(events, 1)] == [ended]
        assert plain.followers.reads > reads
    await events.aclose()


async def test_nothing_is_notified_while_the_follower_is_awake(
    plain: ff.Engine, sql: asyncpg.Connection[Any], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = await plain.subscribe_completion()
    await until(lambda: is_asleep(sql, plain.instance))  # it slept before
    monkeypatch.setattr(loop, "_LINGER", 10_000.0)
    await end_one(plain)
    await take(events, 1)

    async def is_awake() -> bool:
        return not await is_asleep(sql, plain.instance)

    await until(is_awake)
    told: list[str] = []
    listening = await asyncpg.connect(database)
    await listening.add_listener(f"flowfabric_{plain.instance}", lambda *args: told.append(str(args[-1])))
    for _ in range(20):
        await end_one(plain)
    await take(events, 20)
    await listening.execute("select 1")
    assert told == []
    assert not await is_asleep(sql, plain.instance)
    await listening.close()
    await events.aclose()


async def test_without_notifications_everything_arrives(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_POLL", 0.05)
    async with await ff.Engine.connect(database, notifications=False, prepared_statements=False) as engine:
        events = await engine.subscribe_completion()
        for _ in range(3):
            ended = await end_one(engine)
            assert [event.execution_id for event in await take(events, 1)] == [ended]
        await events.aclose()


async def test_a_lost_listening_connection_costs_nothing_but_time(
    plain: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    events = await plain.subscribe_completion()
    for _ in range(5):
        await sql.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and query ilike 'listen%'"
        )
        ended = await end_one(plain)
        assert [event.execution_id for event in await take(events, 1)] == [ended]
    await events.aclose()


async def test_a_cursor_that_is_refused_is_the_callers_error(plain: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    await end_one(plain)
    end = await end_of_log(plain)
    with pytest.raises(CursorRefused, match="cursor_ahead"):
        await plain.subscribe_completion(after=EventCursor(end.position + 1, end.epoch))
    with pytest.raises(CursorRefused, match="cursor_ahead"):
        await plain.subscribe_completion(after=EventCursor(end.position, end.epoch + 7))
    await sql.execute("update flowfabric.deployment set event_floor = $1", end.position)
    with pytest.raises(CursorRefused, match="cursor_expired") as refused:
        await plain.subscribe_completion(after=EventCursor(1, end.epoch))
    assert (refused.value.position, refused.value.epoch) == (end.position, end.epoch)
    async with await plain.subscribe_completion(after=EventCursor(refused.value.position, refused.value.epoch)):
        pass
    assert plain.followers.count == 0
    assert len(plain.followers.open) == 0


async def test_a_database_that_cannot_be_read_is_the_callers_error(
    plain: ff.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the first item."""

    async def fails(*_: Any) -> None:
        raise TransportError("transport", "gone")

    monkeypatch.setattr(plain, "_read_log", fails)
    monkeypatch.setattr(plain, "count_events", fails)
    for after in (None, START):
        with pytest.raises(TransportError, match="gone"):
            await plain.subscribe_completion(after=after)
    assert len(plain.followers.open) == 0


async def test_events_are_kept_for_a_day_at_least(sql: asyncpg.Connection[Any]) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match="event_retention_long_enough"):
        await sql.execute("update flowfabric.deployment set event_retention = '23 hours'")
    await sql.execute("update flowfabric.deployment set event_retention = '24 hours'")
    await sql.execute("update flowfabric.deployment set event_retention = default")


async def test_a_follower_that_is_slow_over_a_trim_is_told(
    plain: ff.Engine, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PAGE", 1)
    for _ in range(3):
        await end_one(plain)
    events = await plain.subscribe_completion(after=START)
    (first,) = await take(events, 1)
    await sql.execute("update flowfabric.deployment set event_floor = $1", (await end_of_log(plain)).position)
    with pytest.raises(CursorRefused, match="cursor_expired"):
        await take(events, 3)
    assert events.cursor == first.cursor
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_the_end_of_the_engine_ends_subscriptions_with_their_cursor(database: str) -> None:
    engine = await ff.Engine.connect(database)
    events = await engine.subscribe_completion()
    quiet = await engine.subscribe_completion(filter=EventFilter(namespace="never"))
    await end_one(engine)
    end = (await end_of_log(engine)).position
    await until(lambda: quiet.cursor.position == end)
    waiting = asyncio.ensure_future(anext(quiet))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(StreamDisconnected) as ended:
        await waiting
    assert ended.value.cursor.position == end
    # What was read before is yielded first.
    assert (await anext(events)).cursor.position <= end
    with pytest.raises(StreamDisconnected) as ended:
        await anext(events)
    async with await ff.Engine.connect(database) as again:
        assert not await drain(await again.subscribe_completion(after=ended.value.cursor), ended.value.cursor)
    with pytest.raises(StopAsyncIteration):
        await anext(events)


@pytest.mark.parametrize("at_the_end", [True, False])
async def test_a_database_that_stays_away_disconnects(
    plain: ff.Engine, monkeypatch: pytest.MonkeyPatch, at_the_end: bool
) -> None:
    monkeypatch.setattr(loop, "_GIVE_UP", 0.05)
    monkeypatch.setattr(loop, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(loop, "PAGE", 1)
    await end_one(plain)
    await end_one(plain)
    events = await plain.subscribe_completion(after=None if at_the_end else START)
    before = events.cursor if at_the_end else (await take(events, 1))[0].cursor

    async def fails(*_: Any) -> None:
        raise TransportError("transport", "gone")

    monkeypatch.setattr(plain, "_read_log", fails)
    with pytest.raises(StreamDisconnected, match="gone") as ended:
        await take(events, 1)
    assert ended.value.cursor == before
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_an_outage_that_ends_in_time_is_not_seen(plain: ff.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_FIRST_PAUSE", 0.001)
    events = await plain.subscribe_completion()
    real, failed = plain._read_log, []

    async def fails_often(*args: Any) -> Any:
        failed.append(1)
        if len(failed) % 3:
            raise TransportError("transport", "gone")
        return await real(*args)

    monkeypatch.setattr(plain, "_read_log", fails_often)
    for _ in range(5):
        ended = await end_one(plain)
        assert [event.execution_id for event in await take(events, 1)] == [ended]
    await events.aclose()


async def test_checkpoints_say_how_far_a_quiet_follower_has_read(
    plain: ff.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_EVENTS", 4)
    begin = await end_of_log(plain)
    stored = await plain.subscribe_completion(after=begin, filter=EventFilter(namespace="never"), checkpoints=True)
    for _ in range(3):
        await end_one(plain)
    (told,) = await take(stored, 1)
    assert isinstance(told, Checkpoint)
    assert told.cursor.position - begin.position >= 4
    assert stored.cursor == told.cursor
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    await end_one(plain)
    (later,) = await take(stored, 1)
    assert isinstance(later, Checkpoint)
    assert later.cursor.position > told.cursor.position
    await stored.aclose()


async def test_a_thousand_subscriptions_leave_nothing_behind(plain: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    await end_one(plain)
    tasks = asyncio.all_tasks()
    for batch in range(10):
        opened = await asyncio.gather(*(plain.subscribe_completion(after=START if n % 2 else None) for n in range(100)))
        if batch % 2:
            for one in opened:
                await one.aclose()
        del opened  # the others are dropped
    await until(lambda: plain.followers.count == 0 and len(plain.followers.open) == 0)
    plain.followers._changed.set()
    try:
        # The listener stays for a minute, with the wait inside it.
        await until(lambda: len(asyncio.all_tasks() - tasks) <= 2)
    except TimeoutError:
        pytest.fail(f"still there: {asyncio.all_tasks() - tasks}")
    assert "flowfabric events" not in {task.get_name() for task in asyncio.all_tasks()}
    assert not any(plain.listener._waiters["events"] if plain.listener else ())
    pool = plain._database._pool
    await until(lambda: {connection for _, connection in pool._idle} == pool._open)

    async def is_awake() -> bool:
        return not await is_asleep(sql, plain.instance)

    await until(is_awake)


async def test_a_subscription_that_comes_while_the_loop_ends_gets_another_one(
    plain: ff.Engine, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one has left, and the loop takes its announcement back."""
    real, taken_back, goes_on = plain.sleep_for_events, asyncio.Event(), asyncio.Event()

    async def slowly(seconds: float | None, before: Any) -> Any:
        if seconds is None:
            taken_back.set()
            await goes_on.wait()
        return await real(seconds, before)

    monkeypatch.setattr(plain, "sleep_for_events", slowly)
    first = await plain.subscribe_completion()
    await until(lambda: is_asleep(sql, plain.instance))
    await first.aclose()
    await taken_back.wait()
    second = await plain.subscribe_completion()
    ended = await end_one(plain)
    try:
        assert [event.execution_id for event in await take(second, 1)] == [ended]
    finally:
        goes_on.set()
    await second.aclose()


async def test_closing_ends_a_waiting_iteration(plain: ff.Engine) -> None:
    events = await plain.subscribe_completion()
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    await events.aclose()
    with pytest.raises(StopAsyncIteration):
        await waiting


def _any(value: Any) -> Any:
    return value


# Arguments, the field that the error names, and what it says.
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"after": ""}, "cursor", "not a cursor"),
    ({"after": b""}, "cursor", "not a cursor"),
    ({"after": bytearray()}, "cursor", "not a cursor"),
    ({"after": b"\x03" + bytes(12)}, "cursor", "not a cursor"),
    ({"after": b"\x02" + bytes(9)}, "cursor", "not a cursor"),
    ({"after": "1700000000000-0"}, "cursor", "not a cursor"),
    ({"after": EventCursor(-1)}, "after", "-1"),
    ({"after": f"{2**63}.0"}, "cursor", "not a cursor"),
    ({"after": 7}, "after", "int"),
    ({"families": ["leases"]}, "families", "leases"),
    ({"families": "lease"}, "families", "lease"),
    ({"families": []}, "families", "got"),
    ({"filter": EventFilter(instance_tag=("", "x"))}, "filter.instance_tag", "empty"),
    ({"filter": EventFilter(instance_tag=_any(("x",)))}, "filter.instance_tag", "tuple"),
    ({"filter": {"namespace": "x"}}, "filter", "dict"),
    ({"filter": EventFilter(execution_id=_any("x"))}, "filter.execution_id", "x"),
    ({"filter": EventFilter(kind=_any(5))}, "filter.kind", "not text"),
    ({"filter": EventFilter(kind="")}, "filter.kind", "empty"),
    ({"filter": EventFilter(flow_id=_any("x"))}, "filter.flow_id", "not a UUID"),
    ({"after": "٣.0"}, "cursor", "not a cursor"),
    ({"families": ["lease", None]}, "families", "None"),
    ({"checkpoints": "yes"}, "checkpoints", "yes"),
    ({"heartbeats": "yes"}, "heartbeats", "yes"),
]


@each(("arguments", "field", "words"), BAD)
async def test_bad_input_is_named_and_opens_nothing(
    plain: ff.Engine, arguments: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        await plain.follow(**arguments)
    assert refused.value.field == field
    assert words in str(refused.value)
    assert len(plain.followers.open) == 0


async def test_a_subscription_that_nothing_refers_to_is_forgotten(plain: ff.Engine) -> None:
    events = await plain.subscribe_completion()
    await until(lambda: plain.followers.count == 1)
    del events
    await until(lambda: plain.followers.count == 0)


async def test_random_stops_and_resumes_lose_and_repeat_nothing(plain: ff.Engine) -> None:
    """A follower that stores the cursor after each event and begins again at random sees each event once."""
    chance = random.Random(7)
    begin = cursor = await end_of_log(plain)
    seen: list[EventCursor] = []
    writing = asyncio.ensure_future(_write_many(plain, 40))
    async with asyncio.timeout(PATIENCE):
        while len(seen) < 40:
            async with await plain.subscribe_completion(after=cursor) as events:
                for _ in range(chance.randint(1, 6)):
                    if len(seen) == 40:
                        break
                    event = await anext(events)
                    seen.append(event.cursor)
                    cursor = event.cursor
    await writing
    assert seen == [one.cursor for one in (await plain.read_events(family="completion", after=begin, limit=100)).items]


async def _write_many(engine: ff.Engine, count: int) -> None:
    async def one(n: int) -> None:
        await submit(engine, execution_kind=f"k{n}")

    await asyncio.gather(*(one(n) for n in range(count)))
    for _ in range(count // 4):
        batch = await asyncio.gather(*(claim_one(engine) for _ in range(4)))
        await asyncio.gather(*(engine.complete(held.handle) for held in batch))
