"""An append and another call on the same execution at the same time: the outcome is that of one of the two orders."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.errors import StateError
from flowfabric.values.attempt import Claimed
from flowfabric.values.lease import Operator
from flowfabric.values.stream import Appended, BestEffortLive, DurableSummary, NewFrame
from tests.interleave import PATIENCE, Party, Stage, settled, waiting
from tests.support import OTHER, claim_one, started

pytestmark = pytest.mark.asyncio(loop_scope="session")
MODES = (NewFrame(payload=b"d"), NewFrame(payload=b"{}", mode=DurableSummary()),
         NewFrame(payload=b"l", mode=BestEffortLive(ttl=timedelta(minutes=5))))  # fmt: skip

Call = Callable[[Party, Claimed], Awaitable[Any]]
ENDS: dict[str, Call] = {
    "complete": lambda party, held: party.complete(held.handle, b"done"),
    "fail": lambda party, held: party.fail(held.handle, "boom", failure_class="permanent"),
    "cancel": lambda party, held: party.cancel(Operator(held.execution_id), "no"),
    "revoke": lambda party, held: party.revoke_lease(held.execution_id),
    "release": lambda party, held: party.release(held.handle),
    "renew": lambda party, held: party.renew(held.handle),
}
STILL_OPEN = {"renew"}


async def append(party: Party, held: Claimed, frame: NewFrame = MODES[0]) -> Any:
    return await party.append_frame(held.handle, frame)


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("other", ENDS)
async def test_an_append_waits_for_the_other_call(stage: Stage, other: str, ending: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    held = await started(one)
    await one.begin()
    await ENDS[other](one, held)
    task = await waiting(stage.watch, two, append(two, held), behind=one)
    await one.end(ending)
    answer = await asyncio.wait_for(task, PATIENCE)
    if ending == "rollback" or other in STILL_OPEN:
        assert isinstance(answer, Appended)
    else:
        assert isinstance(answer, StateError)
    await stage.audit()


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("other", ENDS)
async def test_the_other_call_waits_for_an_append(stage: Stage, other: str, ending: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    held = await started(one)
    await one.begin()
    assert isinstance(await append(one, held), Appended)
    task = await waiting(stage.watch, two, ENDS[other](two, held), behind=one)
    await one.end(ending)
    assert not isinstance(await asyncio.wait_for(task, PATIENCE), ff.FlowFabricError)
    page = await one.read_stream(held.execution_id)
    assert len(page.frames) == (ending == "commit")
    await stage.audit()


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_an_append_behind_a_deletion_leaves_nothing(stage: Stage, ending: str) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    held = await started(one)
    for frame in MODES:
        await append(one, held, frame)
    await one.complete(held.handle, b"done")
    await one.begin()
    await one.delete_execution(held.execution_id)
    task = await waiting(stage.watch, two, append(two, held), behind=one)
    await one.end(ending)
    answer = await asyncio.wait_for(task, PATIENCE)
    assert answer.kind == ("not_found" if ending == "commit" else "stream_closed")
    left = await stage.watch.fetchval("select count(*) from flowfabric.frame where id = $1", held.execution_id)
    assert (left > 0) == (ending == "rollback")
    await stage.audit()


@pytest.mark.parametrize(("first", "second"), list(itertools.product(range(3), range(3))))
async def test_two_appends_to_one_stream_are_one_after_the_other(stage: Stage, first: int, second: int) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    held = await started(one)
    await append(one, held)
    await one.begin()
    before = await append(one, held, MODES[first])
    task = await waiting(stage.watch, two, append(two, held, MODES[second]), behind=one)
    await one.commit()
    after = await asyncio.wait_for(task, PATIENCE)
    ids = [tuple(map(int, appended.stream_id.split("-"))) for appended in (before, after)]
    assert ids[0] < ids[1]
    assert (before.frame_count, after.frame_count) == (2, 3)
    page = await one.read_stream(held.execution_id)
    assert [frame.id for frame in page.frames[1:]] == [before.stream_id, after.stream_id]
    await stage.audit()


async def test_appends_of_different_executions_do_not_wait(stage: Stage) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    held = [await started(one) for _ in range(2)]
    await one.begin()
    await append(one, held[0])
    assert isinstance(await asyncio.wait_for(settled(append(two, held[1])), PATIENCE), Appended)
    await one.commit()


async def test_appends_of_many_in_opposite_orders_do_not_deadlock(stage: Stage) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    held = [await started(one) for _ in range(20)]

    async def rounds(party: Party, order: list[Claimed]) -> None:
        for _ in range(20):
            answers = await party.append_frames([(each.handle, MODES[0]) for each in order])
            assert all(isinstance(answer, Appended) for answer in answers)

    await asyncio.wait_for(asyncio.gather(rounds(one, held), rounds(two, held[::-1])), PATIENCE)
    pages = [await one.read_stream(each.execution_id, count_limit=1000) for each in held]
    assert [page.frame_count for page in pages] == [40] * 20
    await stage.audit()


async def test_an_append_behind_a_reclaim_is_refused(stage: Stage) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    held = await started(one)
    await stage.clock.advance(seconds=31)
    await one.mark_lease_expired_if_due(held.execution_id)
    await one.begin()
    again = await claim_one(one, **OTHER)
    task = await waiting(stage.watch, two, append(two, held), behind=one)
    await one.commit()
    refused = await asyncio.wait_for(task, PATIENCE)
    assert (refused.kind, refused.detail) == ("stream_closed", "reclaimed")
    assert isinstance(await append(two, again), Appended)
    await stage.audit()


async def test_a_reader_sees_frames_and_the_close_of_one_moment(stage: Stage) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    held = await started(one)
    await one.begin()
    await append(one, held)
    await one.complete(held.handle, b"done")
    page = await two.read_stream(held.execution_id)
    assert (page.frames, page.closed_at) == ((), None)
    await one.commit()
    page = await two.read_stream(held.execution_id)
    assert (len(page.frames), page.closed_reason) == (1, "attempt_success")


async def test_an_append_and_a_close_notify_once_and_only_those_that_wait(stage: Stage) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    held = await started(one)
    told: list[str] = []
    channel = f"flowfabric_{two.instance}"
    listen = stage.watch

    def note(*event: Any) -> None:
        told.append(str(event[-1]))

    await listen.add_listener(channel, note)
    try:
        await append(one, held)
        await two.watch([held.execution_id], timedelta(seconds=60), topic="frames")
        await two.watch([held.execution_id], timedelta(seconds=60))
        await append(one, held)
        await append(one, held)
        await two.watch([held.execution_id], timedelta(seconds=60), topic="frames")
        await one.complete(held.handle, None)
        await listen.execute("select 1")
        async with asyncio.timeout(PATIENCE):
            while len(told) < 3:
                await asyncio.sleep(0.005)
        assert sorted(told) == ["ended", f"frames {held.execution_id}", f"frames {held.execution_id}"]
        assert await listen.fetchval("select count(*) from flowfabric.watch") == 0
    finally:
        await listen.remove_listener(channel, note)
