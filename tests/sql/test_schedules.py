"""Schedules in the database: stored under a name, paused, and advanced by exactly one of many processes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.errors import Contention, ValidationFailed
from flowfabric.values.execution import NewExecution
from flowfabric.values.schedule import Schedule
from tests.interleave import PATIENCE, Party, settled, waiting
from tests.sql.cases import World
from tests.support import claim_one

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.both_servers]
HOURLY = {"kind": "every", "seconds": 3600}
DUE = datetime(2020, 1, 1, tzinfo=UTC)
NEXT = DUE + timedelta(hours=1)
ITEM = NewExecution(execution_kind="report")


async def put(engine: ff.Engine, name: str = "s", **fields: Any) -> str:
    return await engine.put_schedule(
        name,
        **{"kind": "report", "timing": HOURLY, "next_at": DUE, "payload": b"{}", "options": {"priority": 1}} | fields,
    )


async def read(engine: ff.Engine, name: str = "s") -> Schedule:
    found = await engine.read_schedule(name)
    assert found is not None
    return found


async def fire(engine: ff.Engine, *items: NewExecution, **fields: Any) -> list[ff.ExecutionId] | None:
    fields = {"name": "s", "due_at": DUE, "next_at": NEXT, "fired_at": DUE, "items": items or [ITEM]} | fields
    return await engine.fire_schedule(fields.pop("name"), fields.pop("due_at"), **fields)


async def test_a_schedule_is_stored_as_it_was_given(world: World) -> None:
    assert await put(world.engine, payload=b"\0\1", payload_encoding="zip", catch_up="all") == "created"
    found = await read(world.engine)
    assert (found.name, found.kind, found.timing, found.catch_up, found.payload, found.payload_encoding) == (
        "s", "report", HOURLY, "all", b"\0\1", "zip",
    )  # fmt: skip
    assert (found.options, found.paused, found.next_at, found.last_at) == ({"priority": 1}, False, DUE, None)
    assert await world.engine.read_schedule("S") is None


async def test_a_schedule_that_was_changed_since_is_not_overwritten(world: World) -> None:
    assert await put(world.engine, expected=DUE) == "mismatch"
    assert await world.engine.read_schedule("s") is None
    await put(world.engine)
    first = (await read(world.engine)).updated_at
    await fire(world.engine)
    assert await put(world.engine, kind="other", expected=first) == "changed"
    assert await put(world.engine, kind="third", expected=first) == "mismatch"
    assert (await read(world.engine)).kind == "other"


async def test_a_schedule_that_changed_since_it_was_read_is_not_paused_resumed_or_deleted(world: World) -> None:
    engine = world.engine
    await put(engine)
    first = (await read(engine)).updated_at
    await world.clock.advance(seconds=1)
    await engine.pause_schedule("s", expected=first)
    paused = await read(engine)
    assert (paused.paused, paused.updated_at > first) == (True, True)
    for change in (engine.pause_schedule, engine.resume_schedule, engine.delete_schedule):
        for name in ("s", "unknown"):
            with pytest.raises(Contention, match="changed or deleted") as refused:
                await change(name, expected=first)
            assert refused.value.kind == "stale_definition"
    assert await read(engine) == paused
    await engine.resume_schedule("s", expected=paused.updated_at)
    resumed = await read(engine)
    assert not resumed.paused
    # That it fires is no change.
    await fire(engine)
    await engine.delete_schedule("s", expected=resumed.updated_at)
    assert await engine.read_schedule("s") is None


async def test_schedules_of_one_namespace_are_listed(world: World) -> None:
    await put(world.engine, "a", options={"namespace": "n"})
    await put(world.engine, "b", options={"namespace": "m"})
    await put(world.engine, "c", options={})
    for namespace, names in (("n", ["a"]), ("", ["c"]), ("x", []), (None, ["a", "b", "c"])):
        page = await world.engine.list_schedules(namespace=namespace)
        assert [one.name for one in page.items] == names


async def test_storing_the_same_again_changes_nothing(world: World) -> None:
    await put(world.engine)
    await fire(world.engine)
    before = await read(world.engine)
    assert await put(world.engine, next_at=DUE - timedelta(days=1)) == "unchanged"
    assert await read(world.engine) == before


@pytest.mark.parametrize(
    "change",
    [{"kind": "other"}, {"catch_up": "one"}, {"payload": b"[]"}, {"payload_encoding": "zip"}, {"options": {}}],
    ids=lambda change: next(iter(change)),
)
async def test_a_change_that_is_not_of_the_timing_keeps_the_times_and_the_pause(
    world: World, change: dict[str, Any]
) -> None:
    await put(world.engine)
    await fire(world.engine)
    await world.engine.pause_schedule("s")
    before = await read(world.engine)
    assert await put(world.engine, **change) == "changed"
    after = await read(world.engine)
    assert (after.next_at, after.last_at, after.paused) == (before.next_at, before.last_at, True)
    assert after.updated_at > before.updated_at and after.created_at == before.created_at


async def test_another_timing_brings_its_own_next_time(world: World) -> None:
    await put(world.engine)
    later = DUE + timedelta(days=3)
    assert await put(world.engine, timing={"kind": "every", "seconds": 5}, next_at=later) == "changed"
    assert (await read(world.engine)).next_at == later


async def test_schedules_are_listed_by_name_page_by_page(world: World) -> None:
    names = ["b", "a", "é", "C", "a b", "aa"]
    for name in names:
        await put(world.engine, name)
    found: list[str] = []
    cursor = None
    while True:
        page = await world.engine.list_schedules(cursor=cursor, limit=4)
        found.extend(item.name for item in page.items)
        cursor = page.next_cursor
        if cursor is None:
            break
    assert found == sorted(names, key=str.encode)
    assert (await world.engine.list_schedules(limit=0)).items == ()


async def test_only_due_schedules_are_listed_oldest_first(world: World) -> None:
    now = await world.clock.now()
    for name, at in {
        "old": DUE, "older": DUE - timedelta(days=1), "later": now + timedelta(hours=1), "never": None, "paused": DUE,
    }.items():  # fmt: skip
        await put(world.engine, name, next_at=at)
    await world.engine.pause_schedule("paused")
    due = await world.engine.due_schedules()
    assert [(each.name, each.due_at) for each in due] == [("older", DUE - timedelta(days=1)), ("old", DUE)]
    assert now <= due[0].now == due[1].now <= await world.clock.now()
    assert [each.name for each in await world.engine.due_schedules(limit=1)] == ["older"]
    assert await world.engine.due_schedules(limit=0) == []


async def test_how_long_until_the_next(world: World) -> None:
    assert await world.engine.until_next_schedule() is None
    await put(world.engine, "never", next_at=None)
    assert await world.engine.until_next_schedule() is None
    await put(world.engine, "soon", next_at=await world.clock.now() + timedelta(hours=1))
    left = await world.engine.until_next_schedule()
    assert left is not None and 3000 < left <= 3600
    await put(world.engine, "past")
    late = await world.engine.until_next_schedule()
    assert late is not None and late < 0
    for name in ("soon", "past"):
        await world.engine.pause_schedule(name)
    assert await world.engine.until_next_schedule() is None


async def test_firing_moves_on_and_creates_in_one(world: World) -> None:
    await put(world.engine)
    made = await fire(world.engine, ITEM, ITEM)
    assert made is not None and len(made) == 2
    found = await read(world.engine)
    assert (found.next_at, found.last_at, found.last_execution_id) == (NEXT, DUE, made[-1])
    claimed = {(await claim_one(world.engine)).execution_id for _ in range(2)}
    assert claimed == set(made)


async def test_only_the_process_that_read_the_current_time_fires(world: World) -> None:
    await put(world.engine)
    before = await read(world.engine)
    assert await fire(world.engine, due_at=DUE - timedelta(seconds=1)) is None
    assert await read(world.engine) == before
    assert len(await fire(world.engine) or []) == 1
    assert await fire(world.engine) is None
    assert await world.sql.fetchval("select count(*) from flowfabric.execution") == 1


async def test_nothing_paused_or_deleted_fires(world: World) -> None:
    await put(world.engine)
    await world.engine.pause_schedule("s")
    assert await fire(world.engine) is None
    assert await fire(world.engine, items=[]) is None
    await world.engine.delete_schedule("s")
    assert await fire(world.engine) is None
    assert await world.sql.fetchval("select count(*) from flowfabric.execution") == 0


async def test_moving_on_without_firing(world: World) -> None:
    await put(world.engine)
    assert await fire(world.engine, items=[], fired_at=None) == []
    found = await read(world.engine)
    assert (found.next_at, found.last_at, found.last_execution_id) == (NEXT, None, None)


async def test_the_last_time_ends_it(world: World) -> None:
    await put(world.engine)
    await fire(world.engine, next_at=None)
    assert (await read(world.engine)).next_at is None
    assert await world.engine.due_schedules() == []


async def test_a_bad_item_fires_nothing_and_moves_nothing(world: World) -> None:
    await put(world.engine)
    before = await read(world.engine)
    for bad in (NewExecution(execution_kind="\0"), NewExecution(execution_kind="k", policy={"priority": True})):
        with pytest.raises(ValidationFailed):
            await fire(world.engine, ITEM, bad)
    assert await read(world.engine) == before
    assert await world.sql.fetchval("select count(*) from flowfabric.execution") == 0


async def test_a_closed_lane_is_skipped_and_not_shown_as_created(world: World) -> None:
    await put(world.engine)
    await world.engine.set_lane_state("closed", "disabled")
    assert await fire(world.engine, NewExecution(execution_kind="report", lane_id="closed")) == []
    found = await read(world.engine)
    assert (found.next_at, found.last_execution_id) == (NEXT, None)


async def test_items_with_times_and_tags_are_made_too(world: World) -> None:
    await put(world.engine)
    made = await fire(
        world.engine,
        NewExecution(execution_kind="a", tags={"schedule.name": "s"}, priority=3),
        NewExecution(execution_kind="b", delay_until=timedelta(hours=1), execution_deadline_at=timedelta(hours=2)),
    )
    assert made is not None
    assert [await world.at(each) for each in made] == ["W.1", "D.1"]
    assert (await read(world.engine)).last_execution_id == made[-1]


@pytest.mark.parametrize(("given", "expected"), [(None, DUE), (NEXT, NEXT)])
async def test_resuming_continues_where_it_was_paused_or_at_the_time_given(
    world: World, given: datetime | None, expected: datetime
) -> None:
    await put(world.engine)
    await world.engine.pause_schedule("s")
    await world.engine.pause_schedule("s")
    assert (await read(world.engine)).paused
    await world.engine.resume_schedule("s", next_at=given)
    found = await read(world.engine)
    assert (found.paused, found.next_at) == (False, expected)
    # It runs: resuming it again moves nothing.
    await world.engine.resume_schedule("s", next_at=NEXT + timedelta(days=9))
    assert (await read(world.engine)).next_at == expected


async def test_the_executions_of_a_schedule_outlive_it(world: World) -> None:
    await put(world.engine)
    made = await fire(world.engine)
    assert made is not None
    await world.engine.delete_schedule("s")
    assert await world.at(made[0]) == "W.1"
    assert await put(world.engine) == "created"


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("second", ["fire", "skip", "pause", "delete", "change"])
async def test_two_at_one_schedule(world: World, second: str, ending: str) -> None:
    """While one fires, another comes: it waits, and then does what is still to do, which is never a second firing."""
    world.engine.checking = False
    one, two = await Party.join(world.dsn), await Party.join(world.dsn)
    try:
        await put(one)
        await one.begin()
        assert len(await fire(one) or []) == 1
        calls: dict[str, Any] = {
            "fire": lambda: fire(two),
            "skip": lambda: fire(two, items=[], fired_at=None),
            "pause": lambda: two.pause_schedule("s"),
            "delete": lambda: two.delete_schedule("s"),
            "change": lambda: put(two, timing={"kind": "every", "seconds": 7}, next_at=NEXT),
        }
        task = await waiting(world.sql, two, calls[second](), behind=one)
        await one.end(ending)
        answer = await task
        count = await world.sql.fetchval("select count(*) from flowfabric.execution")
        if second == "fire":
            assert (answer is None, count) == ((True, 1) if ending == "commit" else (False, 1))
        else:
            assert count == int(ending == "commit")
            assert (answer is None) == (second in ("pause", "delete") or (second == "skip" and ending == "commit"))
    finally:
        one.connection.terminate()
        two.connection.terminate()


async def test_a_schedule_deleted_while_it_is_stored_again_is_there_afterwards(world: World) -> None:
    one, two = await Party.join(world.dsn), await Party.join(world.dsn)
    try:
        await put(one)
        await one.begin()
        await one.delete_schedule("s")
        task = await waiting(world.sql, two, put(two), behind=one)
        await one.commit()
        assert await task == "created"
        assert (await read(world.engine)).next_at == DUE
    finally:
        one.connection.terminate()
        two.connection.terminate()


async def test_ten_processes_fire_a_hundred_times_once_each(world: World) -> None:
    world.engine.checking = False
    crew = [await Party.join(world.dsn) for _ in range(10)]
    try:
        await put(world.engine)
        end = DUE + timedelta(hours=100)
        counts = []

        async def work(party: Party) -> None:
            done = 0
            while due := await party.due_schedules():
                (at,) = due
                following = at.due_at + timedelta(hours=1)
                made = await settled(
                    party.fire_schedule(
                        at.name,
                        at.due_at,
                        next_at=following if following < end else None,
                        fired_at=at.due_at,
                        items=[NewExecution(execution_kind="report", tags={"schedule.time": at.due_at.isoformat()})],
                    )
                )
                done += len(made or ())
            counts.append(done)

        await asyncio.wait_for(asyncio.gather(*(work(party) for party in crew)), PATIENCE)
        assert sum(counts) == 100
        times = await world.sql.fetch("select tags ->> 'schedule.time' as at from flowfabric.execution")
        assert sorted(row["at"] for row in times) == [(DUE + timedelta(hours=n)).isoformat() for n in range(100)]
    finally:
        for party in crew:
            party.connection.terminate()
