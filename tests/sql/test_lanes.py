"""Lanes: how they come into being, what their states allow, and what is counted on them."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.models import Page
from tests.support import OTHER, WORKER, CheckedEngine, Clock, claim_one, started, submit

# What each state allows: new work in, work out.
ALLOWS = {"active": (True, True), "paused": (True, False), "draining": (False, True), "disabled": (False, False)}


async def test_the_configured_lanes_are_registered_at_boot(
    engine: CheckedEngine, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setenv("FLOWFABRIC_LANES", "b, a")
    before = await clock.now()
    for _ in range(2):
        await engine.prepare()
    lanes = (await engine.list_lanes()).items
    assert [lane.lane_id for lane in lanes] == ["a", "b"]
    assert all((lane.state, lane.registered_by) == (ff.LaneState.ACTIVE, "boot") for lane in lanes)
    after = await clock.now()
    assert all(before < lane.registered_at < after for lane in lanes)
    monkeypatch.delenv("FLOWFABRIC_LANES")
    await engine.prepare()
    assert [lane.lane_id for lane in (await engine.list_lanes()).items] == ["a", "b", "default"]


async def test_preparing_does_not_open_a_lane_that_was_closed(engine: CheckedEngine) -> None:
    await engine.set_lane_state("default", "disabled")
    await engine.prepare()
    assert (await engine.list_lanes()).items[0].state is ff.LaneState.DISABLED


async def test_lanes_are_listed_by_the_bytes_of_their_names(engine: CheckedEngine) -> None:
    names = ["b", "B", "~", " ", "a-b", "a b", "ab", "Z9", "z"]
    for name in names:
        await engine.set_lane_state(name, "active")
    expected = sorted(names)
    for size in (1, 2, 8, 9, 10):
        seen: list[str] = []
        cursor = None
        while True:
            page = await engine.list_lanes(cursor=cursor, limit=size)
            seen += [lane.lane_id for lane in page.items]
            cursor = page.next_cursor
            if cursor is None:
                break
            assert len(page.items) == size
        assert seen == expected
        assert page.items
    assert await engine.list_lanes(limit=0) == Page(())
    between = await engine.list_lanes(cursor="a-c")
    assert [lane.lane_id for lane in between.items] == [name for name in expected if name > "a-c"]


@pytest.mark.parametrize("state", ALLOWS)
async def test_a_lane_takes_and_gives_what_its_state_allows(engine: CheckedEngine, state: str) -> None:
    takes, gives = ALLOWS[state]
    inside = await submit(engine)
    assert await engine.set_lane_state("default", state) is ff.LaneState.ACTIVE
    assert await engine.set_lane_state("default", ff.LaneState(state)) is ff.LaneState(state)
    if takes:
        await submit(engine)
    else:
        with pytest.raises(ff.StateError) as refused:
            await submit(engine)
        assert refused.value.kind == "lane_closed"
    claimed = await engine.claim(**WORKER)
    assert (claimed.execution_id if claimed else None) == (inside if gives else None)
    assert await engine.set_lane_state("default", "active") is ff.LaneState(state)
    if not gives:
        assert (await claim_one(engine)).execution_id == inside
    await submit(engine)


@pytest.mark.parametrize("state", ["paused", "draining", "disabled"])
async def test_closing_a_lane_leaves_what_runs_alone(engine: CheckedEngine, clock: Clock, state: str) -> None:
    claimed = await started(engine)
    lost = await started(engine, lease_ttl=timedelta(seconds=1))
    await engine.set_lane_state("default", state)
    await engine.renew(claimed.handle)
    await engine.complete(claimed.handle, b"done")
    await clock.advance(seconds=2)
    await engine.mark_lease_expired_if_due(lost.execution_id)
    again = await engine.claim(**OTHER)
    assert (again is not None) is ALLOWS[state][1]


async def test_a_lane_is_its_own(engine: CheckedEngine) -> None:
    await engine.set_lane_state("a", "disabled")
    target = await submit(engine, lane_id="b")
    assert (await claim_one(engine, lane_id="b")).execution_id == target


async def test_setting_the_state_of_an_unknown_lane_registers_it(engine: CheckedEngine) -> None:
    assert await engine.set_lane_state("new", "paused") is ff.LaneState.ACTIVE
    assert [(lane.lane_id, lane.state) for lane in (await engine.list_lanes()).items] == [("new", "paused")]


async def test_opening_a_lane_wakes_a_worker_that_waits_on_it(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    engine = plain_engine
    target = await submit(engine)
    await engine.set_lane_state("default", "paused")
    waiting = asyncio.create_task(engine.claim(**WORKER, max_wait=timedelta(seconds=60)))
    while not await sql.fetchval("select count(*) from flowfabric.sleeper where topic = 'work'"):
        await asyncio.sleep(0.005)
    await engine.set_lane_state("default", "draining")
    claimed = await asyncio.wait_for(waiting, 30)
    assert claimed is not None
    assert claimed.execution_id == target


async def test_what_waits_is_delayed_and_runs_is_counted_per_lane(engine: CheckedEngine, clock: Clock) -> None:
    def counts(stats: Any) -> tuple[str, int, int, int]:
        return stats.lane_id, stats.depth, stats.delayed, stats.running

    assert await engine.lane_stats() == []
    await engine.set_lane_state("empty", "draining")
    first = await submit(engine)
    await clock.advance(seconds=100)
    await submit(engine), await submit(engine, execution_kind="other")
    await submit(engine, delay_until=timedelta(hours=1))
    await submit(engine, lane_id="b", delay_until=timedelta(hours=1))
    default, b, empty = sorted(await engine.lane_stats(), key=lambda stats: (stats.lane_id != "default", stats.lane_id))
    assert counts(default) == ("default", 3, 1, 0)
    assert counts(b) == ("b", 0, 1, 0)
    assert counts(empty) == ("empty", 0, 0, 0)
    assert (empty.state, default.state) == (ff.LaneState.DRAINING, ff.LaneState.ACTIVE)
    assert (b.oldest_age, empty.oldest_age) == (None, None)
    assert default.oldest_age is not None
    assert default.oldest_age >= timedelta(seconds=100)
    assert [stats.lane_id for stats in await engine.lane_stats()] == ["b", "default", "empty"]

    claimed = await claim_one(engine)
    assert claimed.execution_id == first
    again = await claim_one(engine)
    (only,) = await engine.lane_stats(["default"])
    assert counts(only) == ("default", 1, 1, 2)
    assert only.oldest_age is not None
    assert only.oldest_age < timedelta(seconds=100)
    await engine.complete(claimed.handle)
    await engine.delay(again.handle, timedelta(hours=1))
    (only,) = await engine.lane_stats(["default", "unknown"])
    assert counts(only) == ("default", 1, 2, 0)
    assert await engine.lane_stats([]) == []


async def test_a_renewed_or_reclaimed_lease_is_counted_once(engine: CheckedEngine, clock: Clock) -> None:
    claimed = await started(engine, lease_ttl=timedelta(seconds=5))
    for _ in range(3):
        await clock.advance(seconds=4)
        await engine.renew(claimed.handle)
    (stats,) = await engine.lane_stats()
    assert (stats.running, stats.depth) == (1, 0)
    await clock.advance(seconds=6)
    await engine.mark_lease_expired_if_due(claimed.execution_id)
    (stats,) = await engine.lane_stats()
    assert (stats.running, stats.depth) == (0, 1)
    await claim_one(engine)
    (stats,) = await engine.lane_stats()
    assert (stats.running, stats.depth) == (1, 0)
