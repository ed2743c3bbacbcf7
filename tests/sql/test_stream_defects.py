"""Mistakes that engines have made with streams, each as the behaviour that rules it out.

In the order in which the contract lists them.
"""

from __future__ import annotations

import asyncio
import base64
import json
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.engine.streams import MAX_BLOCK
from flowfabric.errors import ResourceExhausted, StateError, ValidationFailed
from flowfabric.values.conditions import on
from flowfabric.values.ids import ExecutionId, mint_uuid
from flowfabric.values.lease import Fence, Handle
from flowfabric.values.policies import ExecutionPolicy, StreamPolicy
from flowfabric.values.stream import BestEffortLive, DurableSummary, NewFrame, parse_position
from flowfabric.values.wait import Fresh
from tests.interleave import Stage, waiting
from tests.support import Clock, claim_one, new_id, started

pytestmark = pytest.mark.asyncio(loop_scope="session")
LIVE = BestEffortLive(ttl=timedelta(seconds=5))


async def refused(engine: ff.Engine, authority: Handle | Fence, frame: NewFrame) -> str:
    with pytest.raises(ff.FlowFabricError) as caught:
        await engine.append_frame(authority, frame)
    return caught.value.kind


async def summary(engine: ff.Engine, patches: list[Any]) -> Any:
    held = await started(engine)
    for patch in patches:
        await engine.append_frame(held.handle, NewFrame(payload=json.dumps(patch).encode(), mode=DurableSummary()))
    found = await engine.read_summary(held.execution_id)
    return None if found is None else found.document


async def test_an_append_has_a_fence_a_size_limit_and_a_closed_check(engine: ff.Engine) -> None:
    held = await started(engine)
    frame = NewFrame(payload=b"x")
    handle = held.handle
    fence = {"lease_epoch": handle.lease_epoch, "attempt_id": handle.attempt_id}
    forged = Fence(execution_id=handle.execution_id, lease_id=new_id(), **fence)  # type: ignore[arg-type]
    assert await refused(engine, forged, frame) == "stale_owner_cannot_append"
    nobody = Fence(execution_id=ExecutionId(new_id()), lease_id=handle.lease_id, **fence)  # type: ignore[arg-type]
    assert await refused(engine, nobody, frame) == "not_found"
    assert await refused(engine, handle, NewFrame(payload=b"x" * 65_537)) == "retention_limit_exceeded"
    await engine.complete(handle, None)
    assert await refused(engine, handle, frame) == "stream_closed"
    page = await engine.read_stream(held.execution_id)
    assert (page.frames, page.frame_count) == ((), 0)


async def test_ids_are_minted_under_the_lock_and_grow_though_the_clock_steps_back(stage: Stage) -> None:
    """The clock is moved while the second append waits for the lock of the first."""
    await stage.empty()
    first, second = await stage.company(2)
    held = await started(first)
    await first.begin()
    before = await first.append_frame(held.handle, NewFrame(payload=b"1"))
    call = second.append_frame(held.handle, NewFrame(payload=b"2"))
    later = await waiting(stage.watch, second, call, behind=first)
    await stage.clock.advance(seconds=-20)
    await first.commit()
    after = await later
    assert before is not None and after is not None
    assert parse_position(after.stream_id, "id") > parse_position(before.stream_id, "id")
    page = await first.tail_stream(held.execution_id, 0, before.stream_id)
    assert [frame.payload for frame in page.frames] == [b"2"]


async def test_a_finished_attempt_is_closed_though_it_had_no_frame(engine: ff.Engine) -> None:
    held = await started(engine)
    await engine.complete(held.handle, None)
    page = await engine.tail_stream(held.execution_id, 0, block=MAX_BLOCK)  # returns at once
    assert page.closed_reason == "attempt_success" and page.closed_at is not None


@pytest.mark.parametrize(
    ("patches", "document"),
    [
        ([{"a": ["__ff_null__", {"b": "__ff_null__"}]}], {"a": [None, {"b": None}]}),
        ([{"a": {"x": 1}}, {"a": {}}], {"a": {"x": 1}}),
        ([{"a": [], "b": {}}], {"a": [], "b": {}}),
        ([{"1": "one", "2": "two"}, {"1": None}], {"2": "two"}),
        ([{"a": {"0": "x"}}], {"a": {"0": "x"}}),
    ],
)
async def test_a_merge_confuses_neither_arrays_nor_objects_nor_numbers(
    engine: ff.Engine, patches: list[Any], document: Any
) -> None:
    assert await summary(engine, patches) == document


async def test_a_patch_that_is_no_object_or_too_deep_replaces_nothing(engine: ff.Engine) -> None:
    held = await started(engine)
    await engine.append_frame(held.handle, NewFrame(payload=b'{"a": 1}', mode=DurableSummary()))
    deep: Any = {}
    for _ in range(17):
        deep = {"x": deep}
    for patch in (b"[1]", b"null", b'"a"', b"5", json.dumps(deep).encode()):
        assert await refused(engine, held.handle, NewFrame(payload=patch, mode=DurableSummary())) == "invalid_input"
    found = await engine.read_summary(held.execution_id)
    assert found is not None and (found.document, found.version) == ({"a": 1}, 1)


async def test_the_rate_starts_at_the_floor_and_two_frames_of_one_millisecond_raise_it(
    engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    rates = await sql.fetch(
        "with first as (select flowfabric.live_rate(row(1, 1, null, 0, 0, 0, 0, 0, 0, 0, 10000, null, false, null,"
        " null, 0, 0, null, null, null)::flowfabric.stream_head, 1, 7000, 5000, 64, 16384, 0.2) as h),"
        " second as (select flowfabric.live_rate(h, 1, 7000, 5000, 64, 16384, 0.2) as h from first)"
        " select (h).ema, (h).live_cap from first union all select (h).ema, (h).live_cap from second"
    )
    assert [(round(row["ema"], 6), row["live_cap"]) for row in rates] == [(6.4, 64), (205.12, 2052)]


async def test_best_effort_frames_have_an_age_and_the_others_a_cap(engine: ff.Engine, clock: Clock) -> None:
    held = await started(engine, policy=ExecutionPolicy(stream_policy=StreamPolicy(retention_maxlen=3)))
    live = NewFrame(payload=b"live", mode=LIVE)
    await engine.append_frames([(held.handle, NewFrame(payload=b"%d" % n)) for n in range(5)])
    await engine.append_frames(
        [(held.handle, NewFrame(payload=b'{"n": %d}' % n, mode=DurableSummary())) for n in range(70)]
    )
    await engine.append_frame(held.handle, live)

    async def kept() -> dict[str, int]:
        page = await engine.read_stream(held.execution_id, count_limit=10_000)
        modes = [frame.mode for frame in page.frames]
        return {mode: modes.count(mode) for mode in set(modes)}

    assert await kept() == {"durable": 3, "summary": 64, "best_effort": 1}
    await clock.advance(seconds=10.1)
    assert await kept() == {"durable": 3, "summary": 64}


async def test_no_mode_removes_the_frames_of_another(engine: ff.Engine) -> None:
    held = await started(engine, policy=ExecutionPolicy(stream_policy=StreamPolicy(retention_maxlen=5)))
    await engine.append_frames([(held.handle, NewFrame(payload=b"%d" % n)) for n in range(5)])
    for mode in (LIVE, DurableSummary()):
        for _ in range(3):
            await engine.append_frames([(held.handle, NewFrame(payload=b"{}", mode=mode)) for _ in range(100)])
    page = await engine.read_stream(held.execution_id, count_limit=10_000)
    assert [frame.payload for frame in page.frames if frame.mode == "durable"] == [b"%d" % n for n in range(5)]


async def test_the_frame_count_is_of_appends_and_survives_a_trim(engine: ff.Engine) -> None:
    held = await started(engine, policy=ExecutionPolicy(stream_policy=StreamPolicy(retention_maxlen=2)))
    counts = []
    for n in range(30):
        stored = await engine.append_frame(held.handle, NewFrame(payload=b"%d" % n))
        assert stored is not None
        counts.append(stored.frame_count)
    assert counts == list(range(1, 31))
    page = await engine.read_stream(held.execution_id)
    assert (page.frame_count, [frame.payload for frame in page.frames]) == (30, [b"28", b"29"])


async def test_bytes_stay_bytes_and_every_field_is_there(engine: ff.Engine) -> None:
    held = await started(engine)
    payload = bytes(range(256))
    await engine.append_frame(held.handle, NewFrame(payload=payload, kind="blob"))
    await engine.append_frame(held.handle, NewFrame(payload=b"{}", mode=DurableSummary()))
    blob, delta = (await engine.read_stream(held.execution_id)).frames
    assert blob.payload == payload
    assert (blob.fields["encoding"], base64.b64decode(blob.fields["payload"])) == ("base64", payload)
    assert blob.fields["ts"] == blob.id.partition("-")[0]
    assert (blob.fields["mode"], delta.fields["mode"], delta.fields["summary_version"]) == ("durable", "summary", "1")


async def test_a_filter_never_returns_an_empty_page_before_the_end(engine: ff.Engine) -> None:
    held = await started(engine)
    frames = [NewFrame(payload=b"live", mode=LIVE)] * 30 + [NewFrame(payload=b"durable")]
    await engine.append_frames([(held.handle, frame) for frame in frames])
    page = await engine.read_stream(held.execution_id, count_limit=1, visibility="exclude_best_effort")
    assert [frame.payload for frame in page.frames] == [b"durable"]


async def test_a_bad_count_is_refused_and_a_bare_millisecond_is_all_of_it(engine: ff.Engine) -> None:
    held = await started(engine)
    for count in (0, -1, 10_001):
        with pytest.raises(ValidationFailed):
            await engine.read_stream(held.execution_id, count_limit=count)
        with pytest.raises(ValidationFailed):
            await engine.tail_stream(held.execution_id, count_limit=count)
    stored = await engine.append_frames([(held.handle, NewFrame(payload=b"%d" % n)) for n in range(5)])
    assert stored[0] is not None and not isinstance(stored[0], ff.FlowFabricError)
    page = await engine.read_stream(held.execution_id, 0, "start", stored[0].stream_id.partition("-")[0])
    assert len(page.frames) == 5


async def test_tails_have_a_ceiling_and_so_has_their_wait(database: str) -> None:
    async with await ff.Engine.connect(database, stream_ops=1) as engine:
        held = await started(engine)
        with pytest.raises(ValidationFailed):
            await engine.tail_stream(held.execution_id, block=MAX_BLOCK + timedelta(milliseconds=1))
        tail = asyncio.create_task(engine.tail_stream(held.execution_id, block=MAX_BLOCK))
        while not engine.tails.count:
            await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted) as caught:
            await engine.tail_stream(held.execution_id)
        assert caught.value.http_status == 429
        tail.cancel()
        await asyncio.gather(tail, return_exceptions=True)
        await engine.tail_stream(held.execution_id)


async def test_all_tails_of_a_process_share_one_listening_connection(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    listening = "select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen%'"
    before = await sql.fetchval(listening)
    async with await ff.Engine.connect(database) as engine:
        held = [await started(engine) for _ in range(5)]
        tails = [asyncio.create_task(engine.tail_stream(one.execution_id, block=MAX_BLOCK)) for one in held]
        while await sql.fetchval("select count(*) from flowfabric.watch where topic = 'frames'") < 5:
            await asyncio.sleep(0)
        assert await sql.fetchval(listening) - before <= 1
        await engine.complete_many([one.handle for one in held])
        await asyncio.gather(*tails)


async def test_a_suspended_execution_is_stale_and_not_closed(engine: ff.Engine) -> None:
    held = await started(engine)
    await engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "ok")], resume_condition=on("ok"))
    with pytest.raises(StateError) as caught:
        await engine.append_frame(held.handle, NewFrame(payload=b"x"))
    assert caught.value.kind == "stale_owner_cannot_append"
    assert (await engine.read_stream(held.execution_id)).closed_at is None


async def test_a_lost_lease_is_stale_until_it_is_marked_and_a_reclaim_has_a_stream_of_its_own(
    engine: ff.Engine, clock: Clock
) -> None:
    held = await started(engine)
    await clock.advance(seconds=31)
    assert await refused(engine, held.handle, NewFrame(payload=b"x")) == "stale_owner_cannot_append"
    await engine.run_timers("lease")
    assert await refused(engine, held.handle, NewFrame(payload=b"x")) == "stream_closed"
    again = await claim_one(engine)
    await engine.append_frame(again.handle, NewFrame(payload=b"y"))
    pages = [await engine.read_stream(held.execution_id, attempt) for attempt in (0, 1)]
    assert [len(page.frames) for page in pages] == [0, 1]
    assert [page.closed_reason for page in pages] == ["reclaimed", None]
