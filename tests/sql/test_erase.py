"""Erasing: delete or redact one execution, free a key, and the retention of ended executions."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.values.attempt import Claimed
from flowfabric.values.conditions import on
from flowfabric.values.execution import Created, Duplicate
from flowfabric.values.policies import ExecutionPolicy, StreamPolicy
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.step import NewStep
from flowfabric.values.wait import Fresh, Suspended
from tests.ids import id_in
from tests.interleave import Party, waiting
from tests.sql.cases import World, outcome
from tests.support import RETRY, STATES, WORKER, claim_one, new_id, started, submit

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.both_servers]
SECRET = "s3cr3t"
ENDED = [state for state in STATES if state.startswith("T")]
OPEN = [state for state in STATES if not state.startswith("T")]


async def suspend_and_signal(world: World, held: Claimed) -> Claimed:
    """Suspend on a signal that carries a secret, which comes, and one that carries another and is not waited for."""
    engine = world.engine
    made = await engine.create_waitpoint(held.handle, "early", timedelta(hours=1))
    suspended = await engine.suspend(
        held.handle,
        waitpoints=[Fresh(new_id(), "k")],
        resume_condition=on("k", "go"),
        continuation_metadata_pointer=f"s3://{SECRET}",
    )
    assert isinstance(suspended, Suspended)
    details = suspended.details
    for waitpoint, token, name in (
        (made.waitpoint_id, made.token, "go"),
        (details.waitpoint_id, details.waitpoint_token, "no"),
        (details.waitpoint_id, details.waitpoint_token, "go"),
    ):
        await engine.deliver_signal(
            held.execution_id,
            waitpoint,
            token,
            signal_name=name,
            source_type="test",
            payload=SECRET.encode(),
            correlation_id=SECRET,
        )
    return await claim_one(engine)


async def with_secrets(world: World, end: str) -> ff.ExecutionId:
    """An execution that was suspended, retried and ended, with a secret wherever a user may put text."""
    engine = world.engine
    held = await started(engine, input_payload=SECRET.encode(), policy=RETRY)
    held = await suspend_and_signal(world, held)
    await engine.progress(held.handle, percent=5, message=SECRET)
    await engine.record_steps(
        [
            (held.handle, NewStep(name="done", result=SECRET.encode(), encoding="plain")),
            (held.handle, NewStep(name="failed", error=json.dumps({"type": "E", "message": SECRET}))),
            (held.handle, NewStep(name="nothing")),
        ]
    )
    await engine.fail(held.handle, f"boom {SECRET}")
    await world.clock.advance(seconds=11)
    await engine.promote_delayed(held.execution_id)
    held = await claim_one(engine)
    match end:
        case "completed":
            await engine.complete(held.handle, SECRET.encode(), result_encoding="plain")
        case "failed":
            await engine.fail(held.handle, f"boom {SECRET}", failure_class="permanent")
        case "cancelled":
            await engine.cancel(held.handle, f"because {SECRET}")
    return held.execution_id


async def stored_anywhere(world: World, text: str) -> list[str]:
    """The tables in which a text is found, whether as text or as bytes."""
    found = []
    for table in await world.sql.fetch(
        "select c.relname from pg_class c where c.relnamespace = 'flowfabric'::regnamespace and c.relkind = 'r'"
    ):
        name = table["relname"]
        if await world.sql.fetchval(
            f"select exists (select from flowfabric.{name} t where t::text like $1 or t::text like $2)",
            f"%{text}%",
            f"%{text.encode().hex()}%",
        ):
            found.append(name)
    return found


# ---- delete


@pytest.mark.parametrize("state", ENDED)
async def test_deleting_forgets_the_execution_and_all_it_owns(world: World, state: str) -> None:
    kept = await submit(world.engine, lane_id="other", tags={"a.b": "c"})
    at = await world.reach(state, tags={"a.b": "c"})
    await world.engine.delete_execution(at.id)
    assert await world.engine.read_execution(at.id) is None
    picture = await world.picture(at.id)
    assert {table: rows for table, rows in picture.stored.items() if rows and table != "event"} == {}
    assert [item.execution_id for item in (await world.engine.find_executions(tag=("a.b", "c"))).items] == [kept]
    assert await outcome(world.engine.delete_execution(at.id)) == "not_found"


@pytest.mark.parametrize("state", OPEN)
async def test_an_unfinished_execution_is_neither_deleted_nor_redacted(world: World, state: str) -> None:
    at = await world.reach(state)
    before = await world.picture(at.id)
    assert await outcome(world.engine.delete_execution(at.id)) == "execution_not_terminal"
    assert await outcome(world.engine.redact_execution(at.id)) == "execution_not_terminal"
    assert await world.picture(at.id) == before


SUSPENDING = ("waitpoint", "suspension", "signal")


@pytest.mark.parametrize("how", ["delete", "trim"])
async def test_waitpoints_suspensions_and_signals_go_with_their_execution_and_with_no_other(
    world: World, how: str
) -> None:
    kept = await suspend_and_signal(world, await started(world.engine))
    await world.engine.renew(kept.handle, lease_ttl=timedelta(days=99))
    gone = await suspend_and_signal(world, await started(world.engine))
    await world.engine.complete(gone.handle)
    mine = {table: len((await world.picture(gone.execution_id)).stored[table]) for table in SUSPENDING}
    assert mine == {"waitpoint": 2, "suspension": 1, "signal": 3}
    before = await world.picture(kept.execution_id)
    if how == "delete":
        await world.engine.delete_execution(gone.execution_id)
    else:
        await world.clock.advance(days=8)
        assert await world.engine.trim_retention() == 1
    picture = await world.picture(gone.execution_id)
    assert {table: rows for table, rows in picture.stored.items() if rows and table != "event"} == {}
    assert await world.engine.read_suspension(gone.execution_id) is None
    assert (await world.engine.read_signals(gone.execution_id)).items == []
    assert await world.picture(kept.execution_id) == before


async def test_deleting_takes_the_steps_of_every_generation(world: World) -> None:
    held = await started(world.engine)
    for _ in range(2):
        await world.engine.record_steps([(held.handle, NewStep(name="s"))])
        await world.engine.complete(held.handle)
        await world.engine.replay_execution(held.execution_id)
        held = await claim_one(world.engine)
    await world.engine.complete(held.handle)
    await world.engine.delete_execution(held.execution_id)
    assert await world.sql.fetchval("select count(*) from flowfabric.step") == 0


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_delete_and_a_replay_that_meet(world: World, ending: str) -> None:
    one, two = await Party.join(world.dsn), await Party.join(world.dsn)
    try:
        for first, second in (("delete", "replay"), ("replay", "delete")):
            await world.wipe()
            at = await world.reach("T:completed")
            calls: dict[str, Any] = {
                "delete": lambda party, at=at: party.delete_execution(at.id),
                "replay": lambda party, at=at: party.replay_execution(at.id),
            }
            await one.begin()
            await calls[first](one)
            task = await waiting(world.sql, two, calls[second](two), behind=one)
            await one.end(ending)
            answer = await task
            if ending == "rollback":
                assert not isinstance(answer, ff.FlowFabricError)
            else:
                assert answer.kind == {"delete": "not_found", "replay": "execution_not_terminal"}[first]
            await world.engine.check()
    finally:
        one.connection.terminate()
        two.connection.terminate()


# ---- redact


@pytest.mark.parametrize("end", ["completed", "failed", "cancelled"])
async def test_redacting_leaves_nothing_that_the_user_put_in(world: World, end: str) -> None:
    execution_id = await with_secrets(world, end)
    assert {"execution", "attempt", "step", "suspension", "signal"} <= set(await stored_anywhere(world, SECRET))
    signals = (await world.engine.read_signals(execution_id)).items
    before = await world.record(execution_id)
    steps = await world.engine.read_steps([execution_id])
    await world.engine.redact_execution(execution_id)
    assert await stored_anywhere(world, SECRET) == []
    after = await world.record(execution_id)
    assert (after.public_state, after.completed_at, after.total_attempt_count, after.execution_kind) == (
        before.public_state, before.completed_at, before.total_attempt_count, before.execution_kind,
    )  # fmt: skip
    assert [(a.attempt_index, a.end_disposition) for a in await world.engine.list_attempts(execution_id)] != []
    left = await world.engine.read_steps([execution_id])
    assert [(s.name, s.n, s.kind, s.recorded_at) for s in left] == [(s.name, s.n, s.kind, s.recorded_at) for s in steps]
    assert [(s.result, s.encoding) for s in left] == [(b"", "redacted"), (None, None), (None, None)]
    # What was signalled, where and when, stays; what it said does not.
    told = (await world.engine.read_signals(execution_id)).items
    assert [(g.signal_id, g.signal_name, g.waitpoint_key, g.accepted_at, g.observed_effect) for g in told] == [
        (g.signal_id, g.signal_name, g.waitpoint_key, g.accepted_at, g.observed_effect) for g in signals
    ]
    assert {(g.payload, g.payload_encoding, g.correlation_id) for g in told} == {(b"", "redacted", "[redacted]")}
    # Once more changes nothing more.
    await world.engine.redact_execution(execution_id)
    assert await world.engine.read_steps([execution_id]) == left


async def test_redacting_takes_what_names_and_explains_it(world: World) -> None:
    """Tags, the key, who created it, who did something to it and why: in the record, its lists, attempts and events."""
    engine = world.engine
    named = {"tags": {"a.b": SECRET}, "idempotency_key": SECRET, "creator_identity": SECRET, "namespace": "n"}
    target = (await started(engine, **named)).execution_id
    await engine.revoke_lease(target, reason=SECRET)
    again = await claim_one(engine)
    await engine.complete(again.handle)
    await engine.replay_execution(target, reason=SECRET, requested_by=SECRET)
    await engine.issue_claim_grant(target, **WORKER)
    last = await engine.claim_execution(
        target, **WORKER, lease_id=new_id(), attempt_id=new_id(), attempt_policy={"note": SECRET}
    )
    suspended = await engine.suspend(last.handle, waitpoints=[Fresh(new_id(), "k")], resume_condition=on("k"))
    assert isinstance(suspended, Suspended)
    details = suspended.details
    await engine.deliver_signal(
        target, details.waitpoint_id, details.waitpoint_token, signal_name="go", source_type="t", source_identity=SECRET
    )
    await engine.complete((await claim_one(engine)).handle)
    await engine.replay_execution(target, reason=SECRET)
    await engine.complete((await claim_one(engine)).handle)
    assert {"execution", "attempt", "idempotency"} < set(await stored_anywhere(world, SECRET))
    events = (await engine.list_events(target)).items
    await engine.redact_execution(target)
    assert await stored_anywhere(world, SECRET) == []
    assert (await engine.find_executions(tag=("a.b", SECRET))).items == []
    left = (await engine.list_events(target)).items
    assert [(one.cursor, one.lease_type, one.outcome) for one in left] == [
        (one.cursor, one.lease_type, one.outcome) for one in events
    ]
    assert await engine.audit(events=True) == []
    assert await outcome(engine.replay_execution(target)) == "execution_redacted"
    assert isinstance(await engine.create_execution(execution_kind="test", **named), Created), "the key is free"


async def test_redacting_takes_late_duplicates_of_signals_too(world: World) -> None:
    """Their events come long after the end, with thousands of others between."""
    engine = world.engine
    held = await started(engine, tags={"a.b": SECRET})
    suspended = await engine.suspend(held.handle, waitpoints=[Fresh(new_id(), "k")], resume_condition=on("k", "go"))
    assert isinstance(suspended, Suspended)
    details, signal = suspended.details, new_id()

    async def deliver() -> Any:
        return await engine.deliver_signal(
            held.execution_id,
            details.waitpoint_id,
            details.waitpoint_token,
            signal_id=signal,
            signal_name="go",
            source_type="test",
            source_identity=SECRET,
        )

    assert isinstance(await deliver(), Accepted)
    await engine.complete((await claim_one(engine)).handle)
    await world.clock.advance(hours=1)
    await world.sql.execute("select setval('flowfabric.event_number', nextval('flowfabric.event_number') + 5000)")
    assert isinstance(await deliver(), DuplicateSignal)
    shown = (await engine.list_events(held.execution_id)).items
    assert [one.signal_effect for one in shown if one.signal_effect] == ["resume_condition_satisfied", "deduped"]
    await engine.redact_execution(held.execution_id)
    assert await stored_anywhere(world, SECRET) == []
    await world.clock.advance(hours=1)
    assert isinstance(await deliver(), DuplicateSignal)
    assert await stored_anywhere(world, SECRET) == [], "who repeats it is not recorded any more"


async def test_a_redacted_result_says_so(world: World) -> None:
    execution_id = await with_secrets(world, "completed")
    await world.engine.redact_execution(execution_id)
    outcomes = await world.engine.read_outcomes([execution_id])
    assert (outcomes[execution_id].result, outcomes[execution_id].result_encoding) == (b"", "redacted")
    context = await world.engine.read_execution_context(execution_id)
    assert (context.input_payload, context.payload_encoding) == (b"", "redacted")


async def test_a_missing_execution_cannot_be_redacted(world: World) -> None:
    assert await outcome(world.engine.redact_execution(id_in(4))) == "not_found"


# ---- keys


@pytest.mark.parametrize("state", STATES)
async def test_a_key_is_freed_only_by_an_end_without_success(world: World, state: str) -> None:
    at = await world.reach(state, idempotency_key="k", namespace="n")
    freed = state in ("T:failed", "T:cancelled", "T:expired")
    assert await world.engine.free_key(at.id, "k", namespace="n") is freed
    again = await world.engine.create_execution(execution_kind="t", idempotency_key="k", namespace="n")
    assert isinstance(again, Created if freed else Duplicate)
    if freed:
        # The old one frees nothing that is not its own any more.
        assert await world.engine.free_key(at.id, "k", namespace="n") is True
        assert await world.engine.create_execution(execution_kind="t", idempotency_key="k", namespace="n") == Duplicate(
            again.execution_id
        )


async def test_the_key_of_a_deleted_execution_is_free(world: World) -> None:
    at = await world.reach("T:failed", idempotency_key="k")
    await world.engine.delete_execution(at.id)
    again = await world.engine.create_execution(execution_kind="t", idempotency_key="k")
    assert again == Duplicate(at.id), "a record lives out its own time"
    assert await world.engine.free_key(at.id, "k") is True
    assert isinstance(await world.engine.create_execution(execution_kind="t", idempotency_key="k"), Created)


async def test_freeing_a_key_leaves_those_of_others(world: World) -> None:
    failed = await world.reach("T:failed", idempotency_key="a")
    flow = new_id()
    others: list[dict[str, Any]] = [
        {"idempotency_key": "b"}, {"idempotency_key": "a", "namespace": "n"}, {"idempotency_key": "a", "flow_id": flow},
    ]  # fmt: skip
    standing = [await submit(world.engine, **fields) for fields in others]
    assert await world.engine.free_key(failed.id, "a") is True
    for fields, execution_id in zip(others, standing, strict=True):
        found = await world.engine.create_execution(execution_kind="t", **fields)
        assert found == Duplicate(execution_id)


# ---- retention


@pytest.mark.parametrize(
    ("state", "days"), [("T:completed", 7), ("T:cancelled", 7), ("T:failed", 14), ("T:expired", 14)]
)
async def test_failed_executions_are_kept_for_two_weeks_and_others_for_one(world: World, state: str, days: int) -> None:
    at = await world.reach(state)
    await world.clock.advance(days=days, seconds=-60)
    assert await world.engine.trim_retention() == 0
    await world.clock.advance(seconds=120)
    assert await world.engine.trim_retention() == 1
    assert await world.engine.read_execution(at.id) is None


@pytest.mark.parametrize("state", ENDED)
async def test_a_policy_sets_the_retention_for_every_outcome(world: World, state: str) -> None:
    policy = ExecutionPolicy(
        retry_policy=RETRY.retry_policy, stream_policy=StreamPolicy(retention_ttl=timedelta(hours=3))
    )
    await world.reach(state, policy=policy)
    await world.clock.advance(hours=2)
    assert await world.engine.trim_retention() == 0
    await world.clock.advance(hours=2)
    assert await world.engine.trim_retention() == 1


# ---- many at once


async def test_many_are_cancelled_and_replayed_with_a_verdict_each(world: World) -> None:
    waiting_one, ended = await submit(world.engine, lane_id="a"), (await world.reach("T:completed")).id
    nobody = id_in(5)
    cancelled = await world.engine.cancel_many([waiting_one, nobody, ended, waiting_one], "enough")
    assert [type(answer).__name__ for answer in cancelled] == [
        "Cancelled", "NotFound", "ExecutionNotActive", "Cancelled",
    ]  # fmt: skip
    record = await world.record(waiting_one)
    assert (record.cancellation_reason, record.cancelled_by) == ("enough", "operator_override")
    replayed = await world.engine.replay_many([nobody, waiting_one, ended, ended], reason="again", requested_by="me")
    assert [getattr(answer, "kind", "replayed") for answer in replayed] == [
        "not_found", "replayed", "replayed", "execution_not_terminal",
    ]  # fmt: skip
    assert await world.engine.cancel_many([], "x") == [] == await world.engine.replay_many([])
