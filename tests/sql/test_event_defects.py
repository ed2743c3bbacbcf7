"""Mistakes that an event log invites, one test for each."""

from __future__ import annotations

import json
from typing import Any

import asyncpg

import flowfabric as ff
from flowfabric.values.conditions import on
from flowfabric.values.event import EventCursor, EventFilter
from flowfabric.values.ids import FlowId, mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.wait import Fresh
from tests.each import each
from tests.ids import home
from tests.sql.test_subscriptions import TTL, drain, end_of_log, take
from tests.support import claim_one, end_one, started, submit, submit_member

START = EventCursor()


async def followed(engine: ff.Engine, families: Any = None, **options: Any) -> list[Any]:
    async with await engine.follow(families, after=START, **options) as events:
        return await drain(events, await end_of_log(engine))


async def test_followers_see_events_of_all_partitions(plain_engine: ff.Engine) -> None:
    ids = [await submit(plain_engine) for _ in range(12)]
    assert len({home(one) for one in ids}) > 1
    for _ in ids:
        await plain_engine.complete((await claim_one(plain_engine)).handle)
    for families in (("completion",), ("lease",)):
        assert {one.execution_id for one in await followed(plain_engine, families)} == set(ids)


async def test_a_completion_has_a_cursor_of_its_own_that_is_honoured(plain_engine: ff.Engine) -> None:
    ended = [await end_one(plain_engine) for _ in range(3)]
    first, *_ = await followed(plain_engine, ("completion",))
    async with await plain_engine.subscribe_completion(after=first.cursor) as events:
        assert [one.execution_id for one in await take(events, 2)] == ended[1:]


WAYS = ["complete", "fail", "cancel", "cancel_waiting", "expire"]


@each("way", WAYS)
async def test_every_end_is_one_completion_with_the_namespace_and_tags_of_its_execution(
    plain_engine: ff.Engine, clock: Any, way: str
) -> None:
    begin = await end_of_log(plain_engine)
    made = await submit(plain_engine, namespace=way, tags={"tenant": "x"}, execution_deadline_at=TTL)
    held = None if way in ("cancel_waiting", "expire") else await claim_one(plain_engine)
    match way:
        case "complete":
            assert held is not None
            await plain_engine.complete(held.handle)
        case "fail":
            assert held is not None
            await plain_engine.fail(held.handle, "no")
        case "expire":
            await clock.advance(seconds=11)
            assert await plain_engine.expire_execution(made, "execution_deadline") == "expired"
        case _:
            await plain_engine.cancel(Operator(made), "no")
    async with await plain_engine.subscribe_completion(
        after=begin, filter=EventFilter(namespace=way, instance_tag=("tenant", "x"))
    ) as events:
        (found,) = await drain(events, await end_of_log(plain_engine))
    assert (found.execution_id, found.execution_kind) == (made, "test")
    expected = {"complete": "success", "fail": "failed", "expire": "expired"}
    assert found.outcome == expected.get(way, "cancelled")


async def test_a_tag_filter_compares_the_key_that_was_asked_for(plain_engine: ff.Engine) -> None:
    await end_one(plain_engine, tags={"a": "x", "b": "y"})
    for tag, count in ((("a", "x"), 1), (("b", "x"), 0), (("a", "y"), 0), (("A", "x"), 0)):
        for families in (("completion",), ("lease",)):
            found = await followed(plain_engine, families, filter=EventFilter(instance_tag=tag))
            assert len(found) == (count if families == ("completion",) else 2 * count)


async def test_resuming_is_no_completion(plain_engine: ff.Engine) -> None:
    held = await started(plain_engine)
    await plain_engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
    await plain_engine.resume_execution(held.execution_id, "operator")
    assert await followed(plain_engine, ("completion",)) == []
    async with await plain_engine.subscribe_operator_events(after=START) as events:
        (found,) = await take(events, 1)
    assert (found.event_type, set(found.details)) == (
        "resumed",
        {"trigger_type", "suspension_id", "resume_delay_ms"},
    )


async def test_words_that_are_not_known_are_delivered_and_failure_is_read_as_failed(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    async def write(column: str, word: str) -> None:
        await sql.execute(
            "with log as materialized (select flowfabric.open_log(flowfabric.now()) as slot)"
            f" insert into flowfabric.event (slot, occurred_at, partition, id, {column})"
            " select slot, flowfabric.now(), 0, $1::uuid, $2::text from log",
            mint_uuid(),
            word,
        )

    await write("outcome", "failure")
    for column in ("outcome", "lease_type", "operator_type", "signal_effect", "worker_type"):
        await write(column, "from the future")
    async with await plain_engine.subscribe_completion(after=START) as ends:
        assert [one.outcome for one in await take(ends, 2)] == ["failed", "from the future"]
    for subscribe, word in (
        (plain_engine.subscribe_lease_history, "event_type"),
        (plain_engine.subscribe_operator_events, "event_type"),
        (plain_engine.subscribe_signal_delivery, "effect"),
        (plain_engine.subscribe_worker_events, "event_type"),
    ):
        async with await subscribe(after=START) as events:  # type: ignore[operator]
            (found,) = await take(events, 1)
        assert getattr(found, word) == "from the future"


async def test_a_signal_event_says_what_it_did_and_never_what_it_said(plain_engine: ff.Engine) -> None:
    held = await started(plain_engine)
    opened: Any = await plain_engine.suspend(
        held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k")
    )
    for _ in range(2):
        await plain_engine.signal_execution(
            held.execution_id,
            "k",
            signal_name="answer",
            signal_category="c",
            source_type="user",
            payload=b"the secret",
            idempotency_key="once",
            source_identity="ada",
        )
    async with await plain_engine.subscribe_signal_delivery(after=START) as events:
        first, again = await take(events, 2)
    assert (again.effect, again.signal_id, first.source_identity) == ("deduped", first.signal_id, "ada")
    assert first.waitpoint_id == again.waitpoint_id == str(opened.details.waitpoint_id)
    stored = json.dumps([event.details for event in (await plain_engine.read_events()).items], default=str)
    assert "the secret" not in stored
    assert opened.details.waitpoint_token.reveal() not in stored


async def test_an_event_of_a_flow_has_the_flow_and_no_execution(plain_engine: ff.Engine) -> None:
    flow = FlowId(mint_uuid())
    await submit_member(plain_engine, flow)
    await plain_engine.cancel_flow(flow, reason="no")
    async with await plain_engine.subscribe_operator_events(after=START) as events:
        (found,) = await take(events, 1)
    assert (found.event_type, found.flow_id, found.execution_id) == ("flow_cancel_requested", flow, None)
    assert set(found.details) == {"flow_id", "cancellation_policy", "reason", "member_count"}


async def test_two_events_of_workers_in_one_moment_are_two(plain_engine: ff.Engine) -> None:
    for name in ("w-1", "w-2"):
        await plain_engine.register_worker("w", name, lanes=["default"], liveness_ttl=TTL)
    found = await followed(plain_engine, ("worker",))
    assert [one.worker_instance_id for one in found] == ["w-1", "w-2"]
    assert found[0].cursor.position < found[1].cursor.position
