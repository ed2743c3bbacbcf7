"""What is always true of the event log, whatever happens: one test for each rule that no other module has."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.engine import followers as loop
from flowfabric.errors import FlowFabricError
from flowfabric.values.event import Event, EventCursor
from flowfabric.values.lease import Operator
from tests import sampling
from tests.sql.suspending import SuspendingWorld as World
from tests.sql.test_subscriptions import drain, end_of_log, is_asleep, plain, until, write  # noqa: F401 - a fixture
from tests.support import OTHER, Clock, claim_one, end_one, started, submit

# Which lease event may follow which; None: the first.
FOLLOWS = {
    "acquired": {None, "revoked", "expired"},
    "reclaimed": {"expired", "revoked"},
    "renewed": {"acquired", "reclaimed", "renewed"},
    "expired": {"acquired", "reclaimed", "renewed"},
    "revoked": {"acquired", "reclaimed", "renewed", "expired"},
}


@pytest.mark.asyncio(loop_scope="session")
async def test_an_end_is_one_completion_a_signal_one_event_and_a_refused_call_none(world: World) -> None:
    """Also if the call is repeated."""
    engine = world.engine
    wait = await world.suspend()
    other = await world.suspend()
    begin = (await engine.count_events()).cursor
    for _ in range(3):
        await world.send(wait, idempotency_key="once")
    for _ in range(2):
        with pytest.raises(FlowFabricError):
            await world.send(other, waitpoint_token="forged")
        with pytest.raises(FlowFabricError):
            await engine.signal_execution(
                engine.mint_id(), "k", signal_name="s", signal_category="c", source_type="user"
            )
    signals = (await engine.read_events(family="signal", after=begin)).items
    assert [(one.execution_id, one.signal_effect) for one in signals] == [
        (wait.id, "resume_condition_satisfied"),
        (wait.id, "deduped"),
        (wait.id, "deduped"),
    ]
    held = await world.hold()
    for _ in range(2):
        await engine.complete(held.handle)
    for call in (engine.fail(held.handle, "no"), engine.cancel(held.handle, "no")):
        with pytest.raises(FlowFabricError):
            await call
    for _ in range(2):
        await engine.cancel(Operator(other.id), "no")
    ends = (await engine.read_events(family="completion", after=begin)).items
    assert [(one.execution_id, one.outcome) for one in ends] == [(held.id, "success"), (other.id, "cancelled")]


@pytest.mark.parametrize("seed", sampling.seeds(1, 2, 3, 4))
async def test_the_lease_events_of_an_execution_are_a_legal_history(
    plain_engine: ff.Engine, clock: Clock, seed: int
) -> None:
    """Random calls of two workers, an operator and the clock; read in the order of the log."""
    engine, chance = plain_engine, random.Random(seed)
    ids = [await submit(engine) for _ in range(3)]
    holders: list[Any] = []
    for _ in range(60):
        held = chance.choice(holders) if holders else None
        try:
            match chance.randrange(9), held:
                case 0 | 1 | 2, _:
                    found = await engine.claim(**(OTHER if chance.random() < 0.5 else {**OTHER, "worker_id": "w"}))
                    holders += [found] if found is not None else []
                case 3, _:
                    await clock.advance(seconds=chance.choice((1, 31)))
                case 4, None:
                    await engine.revoke_lease(chance.choice(ids), reason="maintenance")
                case 4, _:
                    await engine.revoke_lease(held.execution_id, reason="maintenance")
                case 5, _:
                    await engine.mark_lease_expired_if_due(chance.choice(ids))
                case _, None:
                    continue
                case 6, _:
                    await engine.renew(held.handle)
                case 7, _:
                    await engine.delay(held.handle, timedelta(seconds=1))
                case _:
                    await engine.release(held.handle)
        except FlowFabricError:
            continue  # it has lost its lease
    histories: dict[Any, list[Event]] = {}
    for event in (await engine.read_events(family="lease", limit=1000)).items:
        histories.setdefault(event.execution_id, []).append(event)
    assert {event.lease_type for events in histories.values() for event in events} >= {"acquired", "revoked", "renewed"}
    for events in histories.values():
        before: Event | None = None
        for event in events:
            word = None if before is None else before.lease_type
            assert word in FOLLOWS[str(event.lease_type)], (word, event.lease_type)
            if before is not None:
                assert before.cursor.position < event.cursor.position
                assert before.occurred_at <= event.occurred_at
                assert int(before.lease_epoch or 0) <= int(event.lease_epoch or 0)
            before = event


@pytest.mark.both_servers
async def test_followers_from_one_cursor_see_the_same_sequence(
    database: str,
    plain: ff.Engine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the end of the log, page by page for itself, with a full queue, and in another process; under writers."""
    monkeypatch.setattr(loop, "QUEUE", 4)
    monkeypatch.setattr(loop, "PAGE", 3)
    begin = await end_of_log(plain)
    async with await ff.Engine.connect(database) as other:
        early = [await plain.follow(after=begin), await other.follow(after=begin)]
        writers = [await asyncpg.connect(database) for _ in range(3)]

        async def writes(connection: asyncpg.Connection[Any]) -> None:
            for _ in range(8):
                async with connection.transaction():
                    await write(connection)
                    await asyncio.sleep(0)
                    await write(connection, "signal")

        await asyncio.gather(*(writes(one) for one in writers), *(end_one(plain) for _ in range(3)))
        for one in writers:
            await one.close()
        late = await other.follow(after=begin)
        end = await end_of_log(plain)
        seen = [[event.cursor for event in await drain(one, end)] for one in (*early, late)]
        for one in (*early, late):
            await one.aclose()
    assert len(seen[0]) == 3 * 8 * 2 + 3 * 2
    assert seen[0] == seen[1] == seen[2] == sorted(seen[0], key=lambda cursor: cursor.position)


async def test_an_event_keeps_the_tags_and_the_time_of_its_transaction(plain_engine: ff.Engine, clock: Clock) -> None:
    held = await started(plain_engine, tags={"a.b": "old"}, namespace="n")
    now = await plain_engine.server_time_ms()
    await clock.advance(hours=2)
    await plain_engine.set_execution_tag(held.execution_id, "a.b", "new")
    await plain_engine.cancel(Operator(held.execution_id), "no")
    first, last = (await plain_engine.read_events()).items
    assert (first.tags, last.tags, first.namespace) == ({"a.b": "old"}, {"a.b": "new"}, "n")
    assert first.occurred_at <= last.occurred_at - timedelta(hours=2)
    assert abs(first.occurred_at.timestamp() * 1000 - now) < 3_600_000


async def test_a_call_that_is_rolled_back_leaves_no_event_and_holes_mean_nothing(
    database: str, plain_engine: ff.Engine
) -> None:
    begin = await end_of_log(plain_engine)
    other = await asyncpg.connect(database)
    transaction = other.transaction()
    await transaction.start()
    await write(other)
    await transaction.rollback()
    await other.close()
    assert (await plain_engine.read_events(after=begin)).items == []
    await end_one(plain_engine)
    found = (await plain_engine.read_events(after=begin)).items
    assert [one.lease_type for one in found] == ["acquired", "revoked"]
    assert found[0].cursor.position > begin.position + 1
    assert isinstance(found[0].cursor, EventCursor)


async def test_waiting_followers_hold_no_connection(
    database: str, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of one: a hundred of them wait, and calls go through. Also once their loop sleeps."""
    monkeypatch.setattr(loop, "_POLL", 10_000.0)
    async with await ff.Engine.connect(database, max_size=1) as engine:
        followers = [await engine.subscribe_completion() for _ in range(100)]
        waiting = [asyncio.ensure_future(anext(one)) for one in followers]
        await until(lambda: engine.followers.count == 100)
        ended = await end_one(engine)
        async with asyncio.timeout(30):
            assert {one.execution_id for one in await asyncio.gather(*waiting)} == {ended}

        async def sleeps() -> bool:
            return await is_asleep(sql, engine.instance)

        await until(sleeps)
        idle = engine._database._pool._idle
        await until(lambda: len(idle) == 1)
        for _ in range(100):
            await asyncio.sleep(0)
            assert len(idle) == 1
        for one in followers:
            await one.aclose()


async def test_an_execution_that_was_claimed_twice_has_each_lease_in_the_log(plain_engine: ff.Engine) -> None:
    held = await started(plain_engine)
    await plain_engine.release(held.handle)
    again = await claim_one(plain_engine)
    found = (await plain_engine.read_events(family="lease")).items
    assert [(one.lease_type, one.lease_id) for one in found] == [
        ("acquired", held.handle.lease_id),
        ("revoked", held.handle.lease_id),
        ("acquired", again.handle.lease_id),
    ]


async def test_a_retention_that_was_changed_makes_no_gap(
    plain_engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any]
) -> None:
    """A segment of the log then has old and new events, and one with events between them is emptied."""

    async def slot() -> int:
        found: int = await sql.fetchval("select flowfabric.event_slot(flowfabric.now())")
        return found

    engine = plain_engine
    try:
        await end_one(engine)
        first = await slot()
        await clock.advance(hours=12)
        await end_one(engine)
        removed = await end_of_log(engine)
        await sql.execute("update flowfabric.deployment set event_retention = '24 hours'")
        await clock.advance(hours=30)
        while await slot() != first:
            await clock.advance(hours=6)
        ended = await end_one(engine)
        await engine.sweep()
        assert await sql.fetchval("select event_floor from flowfabric.deployment") == removed.position
        found = list((await engine.read_events(family="completion")).items)
        assert [one.execution_id for one in found] == [ended]
        assert (await engine.count_events(EventCursor())).completion == {"success": 1}
        async with await engine.subscribe_completion(after=EventCursor()) as events:
            assert [one.execution_id for one in await drain(events, await end_of_log(engine))] == [ended]
    finally:
        await sql.execute(
            "update flowfabric.deployment set event_retention = default;"
            " delete from flowfabric.execution; delete from flowfabric.timer"
        )
