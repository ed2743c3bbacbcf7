"""The event log: which call writes which event, in which family, and how a reader follows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.values.attempt import Claimed
from flowfabric.values.event import Event, EventCursor
from flowfabric.values.ids import FlowId
from flowfabric.values.lease import Operator
from flowfabric.values.page import ScannerFilter
from flowfabric.values.policies import ExecutionPolicy, TimeoutPolicy
from tests.ids import home
from tests.support import OTHER, CheckedEngine, Clock, claim_one, started, submit, submit_member

CAP_0 = ExecutionPolicy(max_reclaim_count=0)
RETRY_ONCE = ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(5))


async def _all(engine: ff.Engine, **fields: Any) -> list[Event]:
    return list((await engine.read_events(**fields)).items)


def _short(event: Event) -> tuple[str | None, ...]:
    return event.lease_type, event.outcome, event.operator_type, event.reason, event.revoked_by


# Every way a lease ends or begins: the steps after the first claim, and what they leave in the log.
async def _complete(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await engine.complete(held.handle)


async def _complete_as_operator(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await engine.complete(Operator(held.execution_id))


async def _fail(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await engine.fail(held.handle, "no")


async def _retry(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await engine.fail(held.handle, "no", retry_policy=RETRY_ONCE)


async def _cancel(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await engine.cancel(held.handle, "no")


async def _cancel_as_operator(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await engine.cancel(Operator(held.execution_id), "no")


async def _cancel_by_cascade(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await engine.cancel(Operator(held.execution_id, "flow_cascade"), "no")


async def _delay(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await engine.delay(held.handle, timedelta(hours=1))


async def _wait_children(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await engine.wait_children(held.handle)


async def _release(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await engine.release(held.handle)


async def _revoke(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await engine.revoke_lease(held.execution_id, reason="maintenance tonight")


async def _stop_changed(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await engine.stop_changed(held.handle, detail="recorded: a", digest="new")


async def _expire(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await clock.advance(seconds=31)
    await engine.mark_lease_expired_if_due(held.execution_id)


async def _renew(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await engine.renew(held.handle)


async def _deadline(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await clock.advance(seconds=20)
    assert await engine.expire_execution(held.execution_id, "execution_deadline") == "expired"


async def _timeout(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await clock.advance(seconds=10)
    assert await engine.expire_execution(held.execution_id, "attempt_timeout") == "expired"


async def _reclaim(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await _expire(engine, clock, held)
    await engine.claim(**OTHER)


async def _capped(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await _expire(engine, clock, held)
    assert await engine.claim(**OTHER) is None


async def _cancel_after_expiry(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await _expire(engine, clock, held)
    await engine.cancel(Operator(held.execution_id), "no")


async def _deadline_after_revoke(engine: ff.Engine, clock: Clock, held: Claimed) -> None:
    await _revoke(engine, clock, held)
    await _deadline(engine, clock, held)


EXPIRED = ("expired", None, None, "lease_expired", None)
REVOKED = ("revoked", None, None, "maintenance tonight", "operator")
Step = Callable[[ff.Engine, Clock, Claimed], Awaitable[None]]
ENDINGS: list[tuple[Step, dict[str, Any], list[tuple[str | None, ...]]]] = [
    (_complete, {}, [("revoked", "success", None, "completed", "backend")]),
    (_complete_as_operator, {}, [("revoked", "success", None, "completed", "backend")]),
    (_fail, {}, [("revoked", "failed", None, "failed_terminal", "backend")]),
    (_retry, {}, [("revoked", None, None, "failed_retry_scheduled", "backend")]),
    (_cancel, {}, [("revoked", "cancelled", None, "cancelled", "backend")]),
    (_cancel_as_operator, {}, [("revoked", "cancelled", None, "cancelled", "operator")]),
    (_cancel_by_cascade, {}, [("revoked", "cancelled", None, "cancelled", "backend")]),
    (_delay, {}, [("revoked", None, None, "worker_delay", "backend")]),
    (_wait_children, {}, [("revoked", None, None, "waiting_children", "backend")]),
    (_release, {}, [("revoked", None, None, "worker_release", "backend")]),
    (_stop_changed, {}, [("revoked", None, None, "steps_changed", "backend")]),
    (_revoke, {}, [REVOKED]),
    (_expire, {}, [EXPIRED]),
    (_deadline, {"execution_deadline_at": timedelta(seconds=15)},
     [("revoked", "expired", None, "expired:execution_deadline", "reconciler")]),
    (_timeout, {"policy": ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=5))},
     [("revoked", "expired", None, "expired:attempt_timeout", "reconciler")]),
    (_capped, {"policy": CAP_0}, [EXPIRED, ("revoked", "failed", None, "max_reclaims_exceeded", "reconciler")]),
    (_cancel_after_expiry, {}, [EXPIRED, (None, "cancelled", None, None, None)]),
    (_deadline_after_revoke, {"execution_deadline_at": timedelta(seconds=15)},
     [REVOKED, (None, "expired", None, None, None)]),
]  # fmt: skip


@pytest.mark.parametrize(("step", "fields", "expected"), ENDINGS, ids=[step.__name__[1:] for step, _, _ in ENDINGS])
async def test_every_end_of_a_lease_leaves_its_reason(
    engine: CheckedEngine, clock: Clock, step: Step, fields: dict[str, Any], expected: list[tuple[str | None, ...]]
) -> None:
    held = await started(engine, namespace="n", tags={"a.b": "c"}, **fields)
    await step(engine, clock, held)
    acquired, *rest = await _all(engine)
    assert (acquired.lease_type, acquired.outcome, acquired.operator_type) == ("acquired", None, None)
    assert [_short(event) for event in rest] == expected
    for event in (acquired, *rest):
        assert (event.execution_id, event.namespace, event.tags) == (held.execution_id, "n", {"a.b": "c"})
        if event.lease_type is not None:
            assert (event.lease_id, event.lease_epoch) == (held.handle.lease_id, 1)
            assert (event.worker_id, event.worker_instance_id) == ("pool", "pool-1")
        assert (event.attempt_id, event.attempt_index) == (held.handle.attempt_id, 0)


@pytest.mark.parametrize("step", [_complete, _retry, _revoke, _expire])
async def test_readers_of_a_stream_are_notified_when_its_attempt_ends(
    engine: CheckedEngine, clock: Clock, sql: asyncpg.Connection[Any], step: Step
) -> None:
    held = await started(engine)
    await sql.execute(
        "select flowfabric.watch(gen_random_uuid(), 'frames', 60000, array[$1::integer], array[$2::uuid])",
        home(held.execution_id),
        held.execution_id,
    )
    await step(engine, clock, held)
    # A notification uses the row up.
    assert await sql.fetchval("select count(*) from flowfabric.watch") == 0


async def test_a_renewal_and_a_reclaim_are_lease_events(engine: CheckedEngine, clock: Clock) -> None:
    held = await started(engine)
    await _renew(engine, clock, held)
    await _reclaim(engine, clock, held)
    events = await _all(engine, family="lease")
    assert [event.lease_type for event in events] == ["acquired", "renewed", "expired", "reclaimed"]
    assert [event.lease_epoch for event in events] == [1, 1, 1, 1]
    assert events[1].lease_id == held.handle.lease_id
    assert (events[3].attempt_index, events[3].worker_instance_id) == (1, "pool-2")
    assert events[3].lease_id != held.handle.lease_id


async def test_a_clock_that_is_set_back_hides_no_event(plain_engine: ff.Engine, clock: Clock) -> None:
    target = await submit(plain_engine)
    await clock.advance(seconds=-5)
    held = await claim_one(plain_engine)
    assert [one.lease_type for one in (await plain_engine.list_events(target)).items] == ["acquired"]
    await clock.advance(seconds=10)
    await plain_engine.complete(held.handle)
    assert len((await plain_engine.list_events(target)).items) == 2


async def test_the_end_of_a_leased_execution_is_one_event_in_two_families(engine: CheckedEngine) -> None:
    held = await started(engine)
    await engine.complete(held.handle)
    lease = await _all(engine, family="lease")
    completion = await _all(engine, family="completion")
    assert len(await _all(engine)) == 2
    assert lease[1] == completion[0]
    assert len(completion) == 1
    assert await _all(engine, family="operator") == []


async def test_the_end_of_an_unleased_execution_is_only_a_completion(engine: CheckedEngine) -> None:
    target = await submit_member(engine, FlowId(UUID("11111111-1111-1111-1111-111111111111")))
    await engine.cancel(Operator(target), "no")
    (event,) = await _all(engine)
    assert _short(event) == (None, "cancelled", None, None, None)
    assert (event.lease_id, event.lease_epoch, event.worker_id) == (None, None, None)
    assert str(event.flow_id) == "11111111-1111-1111-1111-111111111111"
    assert await _all(engine, family="lease") == []


async def test_operators_leave_details(engine: CheckedEngine) -> None:
    target = await submit(engine, priority=3, namespace="n", tags={"a.b": "c"})
    await engine.change_priority(target, 99_999)
    await engine.change_priority(target, 9000)
    await engine.cancel(Operator(target), "no")
    await engine.replay_execution(target, reason="again")
    events = await _all(engine, family="operator")
    assert [event.operator_type for event in events] == ["priority_changed", "priority_changed", "replayed"]
    assert [event.details for event in events] == [
        {"old_priority": 3, "new_priority": 9000},
        {"old_priority": 9000, "new_priority": 9000},
        {"branch": "normal"},
    ]
    assert all((event.namespace, event.tags) == ("n", {"a.b": "c"}) for event in events)
    assert events[2].reason == "again"


async def test_submission_progress_blocks_and_tags_are_silent(engine: CheckedEngine) -> None:
    target = await submit(engine)
    await engine.block_execution_for_admission(target, "paused_by_operator")
    await engine.unblock_execution(target)
    await engine.set_execution_tag(target, "a.b", "c")
    assert await _all(engine) == []
    held = await claim_one(engine)
    await engine.progress(held.handle, percent=5)
    assert [event.lease_type for event in await _all(engine)] == ["acquired"]
    assert (await _all(engine))[0].tags == {"a.b": "c"}


async def test_an_ended_execution_that_ran_again_has_one_completion_per_end(engine: CheckedEngine) -> None:
    held = await started(engine)
    await engine.fail(held.handle, "no")
    await engine.replay_execution(held.execution_id)
    held = await claim_one(engine)
    await engine.complete(held.handle)
    for _ in range(2):
        await engine.complete(held.handle)
    assert [event.outcome for event in await _all(engine, family="completion")] == ["failed", "success"]


async def test_a_reader_follows_by_cursor_and_sees_everything_once_in_order(engine: CheckedEngine) -> None:
    for _ in range(4):
        await submit(engine)
    held = await engine.claim_many(limit=4, worker_id="w", worker_instance_id="w")
    await engine.complete_many([one.handle for one in held[:2]])
    await engine.fail(held[2].handle, "no")
    everything = await _all(engine)
    assert len(everything) == 7
    cursors = [event.cursor.position for event in everything]
    assert cursors == sorted(set(cursors))
    for size in (1, 2, 3, 7, 100):
        seen: list[Event] = []
        after = None
        while True:
            page = await engine.read_events(after=after, limit=size)
            if not page.items:
                assert page.next_cursor == (after or EventCursor())
                break
            assert len(page.items) <= size
            assert page.next_cursor == page.items[-1].cursor
            seen += page.items
            after = page.next_cursor
        assert seen == everything
    assert (await engine.read_events(limit=0)).next_cursor == EventCursor()
    last = everything[-1].cursor
    await engine.complete(held[3].handle)
    (new,) = await _all(engine, after=last)
    assert (new.execution_id, new.outcome) == (held[3].execution_id, "success")


async def test_each_family_is_what_concerns_it(engine: CheckedEngine, clock: Clock) -> None:
    held = await started(engine)
    await engine.complete(held.handle)
    await engine.replay_execution(held.execution_id)
    everything = await _all(engine)
    for family, word in (("lease", "lease_type"), ("completion", "outcome"), ("operator", "operator_type")):
        expected = [event for event in everything if getattr(event, word) is not None]
        assert expected
        assert await _all(engine, family=family) == expected


@pytest.mark.parametrize("family", [None, "lease", "completion"])
async def test_a_filtered_reader_gets_exactly_the_matching_events(engine: CheckedEngine, family: str | None) -> None:
    worlds: list[tuple[str, dict[str, str] | None]] = [
        ("", None),
        ("n", {"a.b": "c"}),
        ("n", {"a.b": "d", "no dot": "c"}),
        ("m", {"a.b": "c"}),
        ("m", {"a.b": ""}),
    ]
    for namespace, tags in worlds:
        held = await started(engine, namespace=namespace, tags=tags)
        await engine.complete(held.handle)
    everything = await _all(engine, family=family)
    filters = [
        ScannerFilter(),
        *(ScannerFilter(namespace=n) for n in ("", "n", "x")),
        *(ScannerFilter(instance_tag=t) for t in (("a.b", "c"), ("a.b", ""), ("no dot", "c"), ("x", "c"))),
        ScannerFilter(namespace="n", instance_tag=("a.b", "c")),
        ScannerFilter(namespace="m", instance_tag=("a.b", "d")),
    ]
    for chosen in filters:
        expected = [
            event
            for event in everything
            if chosen.namespace in (None, event.namespace)
            and (chosen.instance_tag is None or event.tags.get(chosen.instance_tag[0]) == chosen.instance_tag[1])
        ]
        assert await _all(engine, family=family, filter=chosen) == expected
        seen = []
        after = None
        while (page := await engine.read_events(family=family, filter=chosen, after=after, limit=1)).items:
            seen += page.items
            after = page.next_cursor
        assert seen == expected


async def test_an_event_waits_for_every_older_transaction(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any]
) -> None:
    """What took its number early and commits late must not be skipped by a reader who is already past it."""
    engine = plain_engine
    early = await submit(engine)
    late = await submit(engine)
    slow = sql.transaction()
    await slow.start()
    await sql.execute(
        "select flowfabric.cancel_as_operator(array[$1::int], array[$2::uuid], array[null]::uuid[],"
        " array[null]::bigint[], array[null]::uuid[], array[null]::int[], 'operator_override', 'slow', false)",
        home(early),
        early,
    )
    await engine.cancel(Operator(late), "quick")
    assert (await engine.read_events()).items == []
    await slow.commit()
    events = await _all(engine)
    assert [event.execution_id for event in events] == [early, late]


async def test_a_stored_failure_spelt_the_old_way_reads_as_failed(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    target = await submit(plain_engine)
    await plain_engine.cancel(Operator(target), "no")
    await sql.execute("update flowfabric.event set outcome = 'failure'")
    (event,) = await _all(plain_engine)
    assert event.outcome == "failed"
    await sql.execute("update flowfabric.event set outcome = 'cancelled'")


async def test_events_outlive_their_execution(engine: CheckedEngine, clock: Clock) -> None:
    target = await submit(engine, namespace="n", tags={"a.b": "c"})
    await engine.cancel(Operator(target), "no")
    await clock.advance(days=8)
    assert await engine.trim_retention() == 1
    (event,) = await _all(engine)
    assert (event.execution_id, event.namespace, event.tags) == (target, "n", {"a.b": "c"})
