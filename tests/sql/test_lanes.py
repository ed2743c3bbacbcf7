"""Lanes: how they are registered, what their states allow, and their figures."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import StateError
from flowfabric.values.execution import NewExecution
from flowfabric.values.lane import LaneState
from flowfabric.values.page import Page
from flowfabric.values.policies import ExecutionPolicy, RoutingRequirements
from tests.support import OTHER, WORKER, CheckedEngine, Clock, claim_one, started, submit

pytestmark = pytest.mark.both_servers

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
    assert all((lane.state, lane.registered_by) == (LaneState.ACTIVE, "boot") for lane in lanes)
    after = await clock.now()
    assert all(before < lane.registered_at < after for lane in lanes)
    monkeypatch.delenv("FLOWFABRIC_LANES")
    await engine.prepare()
    assert [lane.lane_id for lane in (await engine.list_lanes()).items] == ["a", "b", "default"]


async def test_preparing_does_not_open_a_lane_that_was_closed(engine: CheckedEngine) -> None:
    await engine.set_lane_state("default", "disabled")
    await engine.prepare()
    assert (await engine.list_lanes()).items[0].state is LaneState.DISABLED


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
    assert await engine.set_lane_state("default", state) is LaneState.ACTIVE
    assert await engine.set_lane_state("default", LaneState(state)) is LaneState(state)
    if takes:
        await submit(engine)
    else:
        with pytest.raises(StateError) as refused:
            await submit(engine)
        assert refused.value.kind == "lane_closed"
    claimed = await engine.claim(**WORKER)
    assert (claimed.execution_id if claimed else None) == (inside if gives else None)
    assert await engine.set_lane_state("default", "active") is LaneState(state)
    if not gives:
        assert (await claim_one(engine)).execution_id == inside
    await submit(engine)


@pytest.mark.parametrize("state", ["paused", "draining", "disabled"])
async def test_closing_a_lane_leaves_running_executions_alone(engine: CheckedEngine, clock: Clock, state: str) -> None:
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


async def test_a_lane_that_is_not_in_the_expected_state_stays_as_it_is(engine: CheckedEngine) -> None:
    await engine.set_lane_state("default", "paused")
    assert await engine.set_lane_state("default", "active", expected="draining") is LaneState.PAUSED
    assert await engine.set_lane_state("default", "draining", expected=LaneState.PAUSED) is LaneState.PAUSED
    assert (await engine.list_lanes()).items[0].state is LaneState.DRAINING


async def test_setting_the_state_of_an_unknown_lane_registers_it(engine: CheckedEngine) -> None:
    assert await engine.set_lane_state("new", "paused") is LaneState.ACTIVE
    assert [(lane.lane_id, lane.state) for lane in (await engine.list_lanes()).items] == [("new", "paused")]


async def test_opening_a_lane_wakes_a_worker_that_waits_on_it(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    engine = plain_engine
    target = await submit(engine)
    await engine.set_lane_state("default", "paused")
    waiting = asyncio.create_task(engine.claim(**WORKER, max_wait=timedelta(seconds=60)))
    while not await sql.fetchval("select count(*) from flowfabric.sleeper where lane <> ''"):
        await asyncio.sleep(0.005)
    await engine.set_lane_state("default", "draining")
    claimed = await asyncio.wait_for(waiting, 30)
    assert claimed is not None
    assert claimed.execution_id == target


async def test_waiting_delayed_and_running_executions_are_counted_per_lane(engine: CheckedEngine, clock: Clock) -> None:
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
    assert (empty.state, default.state) == (LaneState.DRAINING, LaneState.ACTIVE)
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


# ---- claiming from several lanes in one call


async def _fill(engine: ff.Engine, **counts: int) -> None:
    for lane, count in counts.items():
        await engine.create_many([NewExecution(execution_kind="test", lane_id=lane)] * count)


@pytest.mark.parametrize(
    ("filled", "shares", "limit", "expected"),
    [
        ({"a": 9, "b": 9}, {"a": 3, "b": 1}, 4, {"a": 3, "b": 1}),
        ({"a": 1, "b": 9}, {"a": 3, "b": 1}, 4, {"a": 1, "b": 3}),
        ({"a": 9}, {"a": 1, "b": 3}, 4, {"a": 4}),
        ({"b": 9}, {"a": 3, "b": 1}, 4, {"b": 4}),
        ({"a": 9, "b": 9}, {"a": 0, "b": 2}, 4, {"a": 2, "b": 2}),  # what is left goes in the order given
        ({"a": 9, "b": 9}, {"a": 0, "b": 0}, 4, {"a": 4}),
        ({"a": 9, "b": 9}, {"b": 100, "a": 100}, 4, {"b": 4}),
        ({"a": 2, "b": 2}, {"a": 1, "b": 1}, 100, {"a": 2, "b": 2}),
        ({}, {"a": 1, "b": 1}, 4, {}),
        ({"a": 3, "c": 9}, {"a": 1, "b": 1}, 4, {"a": 3}),
    ],
)
async def test_each_lane_gives_its_share_and_then_the_rest(
    engine: CheckedEngine, filled: dict[str, int], shares: dict[str, int], limit: int, expected: dict[str, int]
) -> None:
    await _fill(engine, **filled)
    claimed = await engine.claim_lanes(shares, limit=limit, **WORKER)
    assert dict(Counter(one.handle.lane_id for one in claimed)) == expected
    assert len({one.execution_id for one in claimed}) == len(claimed)


async def test_claiming_from_lanes_keeps_to_kinds_capabilities_and_lane_states(engine: CheckedEngine) -> None:
    needs = ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=("gpu",)))
    wanted = await submit(engine, lane_id="a", execution_kind="x")
    await submit(engine, lane_id="a", execution_kind="y")
    gpu = await submit(engine, lane_id="b", execution_kind="x", policy=needs)
    closed = await submit(engine, lane_id="c", execution_kind="x")
    await engine.set_lane_state("c", "paused")
    shares = {"a": 2, "b": 2, "c": 2}
    claimed = await engine.claim_lanes(shares, limit=6, kinds=["x"], **WORKER)
    assert [one.execution_id for one in claimed] == [wanted]
    claimed = await engine.claim_lanes(shares, limit=6, kinds=["x"], capabilities=["gpu"], **WORKER)
    assert [one.execution_id for one in claimed] == [gpu]
    await engine.set_lane_state("c", "active")
    (claimed_last,) = await engine.claim_lanes(shares, limit=6, kinds=["x"], max_wait=timedelta(seconds=5), **WORKER)
    assert claimed_last.execution_id == closed
    assert claimed_last.handle.worker_instance_id == WORKER["worker_instance_id"]


async def test_a_claim_from_lanes_waits_until_one_of_them_has_something(plain_engine: ff.Engine) -> None:
    waiting = asyncio.create_task(
        plain_engine.claim_lanes({"a": 1, "b": 1}, limit=2, max_wait=timedelta(seconds=60), **WORKER)
    )
    target = await submit(plain_engine, lane_id="b")
    (claimed,) = await asyncio.wait_for(waiting, 30)
    assert claimed.execution_id == target
