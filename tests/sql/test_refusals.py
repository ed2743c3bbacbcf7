"""Which refusal comes first, which fence a call needs, and the results of repeated and displaced calls."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest

import flowfabric as ff
from flowfabric.errors import ExecutionNotActive
from flowfabric.values.attempt import Failure, RetryScheduled
from flowfabric.values.conditions import on
from flowfabric.values.execution import Duplicate
from flowfabric.values.lease import Handle, HandleKind, Operator
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.wait import Fresh
from tests import sampling
from tests.ids import home, id_in
from tests.sql.cases import (
    BY_NAME,
    HOLDER_CALLS,
    OPERATOR_CALLS,
    Case,
    World,
    outcome,
    shorthand,
    stranger,
)
from tests.support import OTHER, RETRY, WORKER, Reached, claim_one, new_id, started, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")
FENCED = tuple(name for name in HOLDER_CALLS if name != "cancel as billing")


def other_lease(handle: Handle) -> Handle:
    return msgspec.structs.replace(handle, lease_id=new_id())


# The functions behind the holder's calls, with a fence in $1..$6 and harmless arguments for the rest.
SQL_CALLS = {
    "renew": "select code, detail from flowfabric.renew(array[$1::int], array[$2::uuid], array[$3::uuid],"
    " array[$4::bigint], array[$5::uuid], array[$6::int], array[1000], true)",
    "progress": "select code, detail from flowfabric.progress($1::int, $2::uuid, $3::uuid, $4::bigint, $5::uuid,"
    " $6::int, 1::smallint, null)",
    "complete": "select code, detail from flowfabric.complete(array[$1::int], array[$2::uuid], array[$3::uuid],"
    " array[$4::bigint], array[$5::uuid], array[$6::int], array[null::bytea], array[null::text])",
    "fail": "select code, detail from flowfabric.fail(array[$1::int], array[$2::uuid], array[$3::uuid],"
    " array[$4::bigint], array[$5::uuid], array[$6::int], array['x'], array['transient'], array['transient'],"
    " array[null::text])",
    "delay": "select code, detail from flowfabric.delay($1::int, $2::uuid, $3::uuid, $4::bigint, $5::uuid, $6::int,"
    " null, 1000)",
    "release": "select code, detail from flowfabric.release($1::int, $2::uuid, $3::uuid, $4::bigint, $5::uuid,"
    " $6::int)",
    "wait_children": "select code, detail from flowfabric.wait_children($1::int, $2::uuid, $3::uuid, $4::bigint,"
    " $5::uuid, $6::int)",
    "park": "select code, detail from flowfabric.park($1::int, $2::uuid, $3::uuid, $4::bigint, $5::uuid, $6::int,"
    " '2999-01-01', '{}', '{}', '{}', '{}', '{}', null, 'fail', 'waiting_for_signal', gen_random_uuid())",
    "create_waitpoint": "select code, detail from flowfabric.create_waitpoint($1::int, $2::uuid, $3::uuid, $4::bigint,"
    " $5::uuid, $6::int, gen_random_uuid(), '', 0, false)",
    "close_waitpoint": "select code, detail from flowfabric.close_waitpoint($1::int, $2::uuid, $3::uuid, $4::bigint,"
    " $5::uuid, $6::int, gen_random_uuid(), 'x')",
    "suspend": "select code, detail from flowfabric.suspend($1::int, $2::uuid, $3::uuid, $4::bigint, $5::uuid, $6::int,"
    " true, gen_random_uuid(), array[gen_random_uuid()], array[null::text], '\"OperatorOnly\"', '{}', 'manual_pause',"
    " 'worker', null, null, 'fail', null, null)",
    "open_wait": "select code, detail from flowfabric.open_wait($1::int, $2::uuid, $3::uuid, $4::bigint, $5::uuid,"
    " $6::int, 'w', 0, array[gen_random_uuid()], array['k'], null, null)",
    "settle_wait": "select code, detail from flowfabric.settle_wait($1::int, $2::uuid, $3::uuid, $4::bigint, $5::uuid,"
    " $6::int, 'w', 0, gen_random_uuid(), '\"OperatorOnly\"', 'manual_pause', null, false, null)",
    "refuse_signals": "select code, detail from flowfabric.refuse_signals($1::int, $2::uuid, $3::uuid, $4::bigint,"
    " $5::uuid, $6::int, 'w', 0, '{}', '{}')",
    "record_steps": "select code, detail from flowfabric.record_steps(array[$1::int], array[$2::uuid], array[$3::uuid],"
    " array[$4::bigint], array[$5::uuid], array[$6::int], array['s'], array[0], null, null, null, null, null, null,"
    " null, null, null, null)",
    "cancel": "select code, detail from flowfabric.cancel(array[$1::int], array[$2::uuid], array[$3::uuid],"
    " array[$4::bigint], array[$5::uuid], array[$6::int], true, 'x', false)",
}
PARTIAL = [given for given in itertools.product((True, False), repeat=3) if any(given) and not all(given)]


HELD_OR_NOT = ("A", "V", "T:completed", "missing")


@pytest.mark.parametrize("call", SQL_CALLS)
async def test_a_partial_fence_is_refused_before_anything_is_looked_up(world: World, call: str) -> None:
    """All calls ask the same check: each meets every part and every state once, only `--full` tries each pair."""
    pairs = list(itertools.product(HELD_OR_NOT, PARTIAL))
    if not sampling.is_full() and call != "complete":
        turn = list(SQL_CALLS).index(call)
        pairs = [(HELD_OR_NOT[(turn + place) % 4], given) for place, given in enumerate(PARTIAL)]
    for state in HELD_OR_NOT:
        await world.wipe()
        missing = stranger(id_in(3))
        handle = missing if state == "missing" else (await world.reach(state)).handle
        before = await world.picture(handle.execution_id)
        triple = (handle.lease_id, handle.lease_epoch, handle.attempt_id)
        for given in [given for at, given in pairs if at == state]:
            fence = [value if shown else None for value, shown in zip(triple, given, strict=True)]
            row = await world.sql.fetchrow(SQL_CALLS[call], handle.partition, handle.uuid, *fence, None)
            assert row is not None
            assert tuple(row) == ("invalid_input", "partial_fence_triple"), (state, given)
            assert await world.picture(handle.execution_id) == before


@pytest.mark.parametrize("name", ["renew", "progress"])
async def test_a_missing_execution_is_reported_before_a_missing_fence(world: World, name: str) -> None:
    nobody = Operator(id_in(3))
    with pytest.raises(ff.NotFound) as caught:
        await getattr(world.engine, name)(nobody)
    assert caught.value.entity == "execution"


@pytest.mark.parametrize("name", ["renew", "progress"])
@pytest.mark.parametrize("state", ["A", "X", "V", "S", "T:completed", "W.1"])
async def test_a_missing_fence_is_reported_before_any_state(world: World, name: str, state: str) -> None:
    at = await world.reach(state)
    with pytest.raises(ff.InvalidInput, match="fence_required"):
        await getattr(world.engine, name)(Operator(at.id))


# A bare fence has no kind, and to suspend is the one call that a suspended handle is told of in its own words.
@pytest.mark.parametrize("name", [name for name in HOLDER_CALLS if not name.startswith(("cancel as", "suspend"))])
async def test_a_suspended_handle_is_stale_before_anything_is_looked_up(world: World, name: str) -> None:
    for execution_id in ((await world.reach("T:completed")).id, id_in(3)):
        case = Case(world, Reached(execution_id, None))
        case.handle = msgspec.structs.replace(case.handle, kind=HandleKind.SUSPENDED)
        with pytest.raises(ff.LeaseLost) as caught:
            await BY_NAME[name].call(case)
        assert caught.value.kind == "stale_lease"


# Two or three faults at once; the first in the order of the lease check is reported.
FAULTS = [
    ("missing", "another lease", "not_found"),
    ("T:expired", "another lease", "execution_not_active"),
    ("D.i", "another lease", "execution_not_active"),
    ("W.s", "another lease", "execution_not_active"),
    ("T:expired", "past its time", "execution_not_active"),
    ("V", "another lease", "lease_revoked"),
    ("V", "past its time", "lease_revoked"),
    ("V", "past its time, another lease", "lease_revoked"),
    ("X", "another lease", "lease_expired"),
    ("A", "past its time, another lease", "lease_expired"),
    ("A", "another lease", "stale_lease"),
    ("A", "another epoch", "stale_lease"),
    ("A", "another attempt", "stale_lease"),
    ("A", "another index", "stale_lease"),
]


@pytest.mark.parametrize("name", FENCED)
@pytest.mark.parametrize(("state", "faults", "told"), FAULTS, ids=lambda v: str(v))
async def test_the_first_fault_in_the_order_of_the_lease_check_is_reported(
    world: World, name: str, state: str, faults: str, told: str
) -> None:
    reached = Reached(id_in(3), None) if state == "missing" else await world.reach(state)
    case = Case(world, reached)
    replace = msgspec.structs.replace
    for fault in faults.split(", "):
        match fault:
            case "another lease":
                case.handle = other_lease(case.handle)
            case "another epoch":
                case.handle = replace(case.handle, lease_epoch=case.handle.lease_epoch + 1)
            case "another attempt":
                case.handle = replace(case.handle, attempt_id=new_id())
            case "another index":
                case.handle = replace(case.handle, attempt_index=1)
            case "past its time":
                await world.clock.advance(seconds=31)
    before = await world.picture(case.id)
    assert await outcome(BY_NAME[name].call(case)) == told
    after = await world.picture(case.id)
    if state == "A" and told == "lease_expired":
        assert (after.at, shorthand(after.since(before))) == ("X", ["L:expired"])
    else:
        assert after == before


@pytest.mark.parametrize("name", OPERATOR_CALLS)
@pytest.mark.parametrize(
    ("state", "seconds", "told"),
    [("T:failed", 31, "execution_not_active"), ("V", 31, "lease_revoked"), ("A", 31, "lease_expired")],
)
async def test_an_operator_skips_the_fence_and_no_other_check(
    world: World, name: str, state: str, seconds: int, told: str
) -> None:
    case = Case(world, await world.reach(state))
    await world.clock.advance(seconds=seconds)
    assert await outcome(BY_NAME[name].call(case)) == told


@pytest.mark.parametrize("state", ["W.1", "W.r", "D.r", "D.i", "S", "W.s", "T:failed"])
async def test_an_execution_that_is_not_active_is_refused_with_all_four_facts(world: World, state: str) -> None:
    at = await world.reach(state)
    before = await world.record(at.id)
    with pytest.raises(ExecutionNotActive) as caught:
        await world.engine.renew(stranger(at.id))
    told = caught.value
    assert told.terminal_outcome == before.state_vector.terminal_outcome
    assert told.lifecycle_phase == before.state_vector.lifecycle_phase
    assert told.lease_epoch == str(before.current_lease_epoch)
    assert told.attempt_id == ("" if before.current_attempt is None else str(before.current_attempt.attempt_id))
    # Once a retry is scheduled no attempt is current, but its index is kept.
    assert (told.attempt_id == "") == (state in ("W.1", "W.r", "D.r"))
    if state == "D.r":
        assert before.current_attempt_index == 0


Then = Callable[[World, Handle], Awaitable[Any]]


async def _nothing(world: World, handle: Handle) -> None:
    pass


async def _a_day_passes(world: World, handle: Handle) -> None:
    await world.clock.advance(hours=23)


async def _the_retry_runs(world: World, handle: Handle) -> None:
    await world.clock.advance(seconds=11)
    await world.engine.promote_delayed(handle.execution_id)
    await claim_one(world.engine)


async def _the_retry_was_revoked(world: World, handle: Handle) -> None:
    await _the_retry_runs(world, handle)
    await world.engine.revoke_lease(handle.execution_id)


async def _the_retry_lapsed(world: World, handle: Handle) -> None:
    await _the_retry_runs(world, handle)
    await world.clock.advance(seconds=31)


async def _the_retry_completed(world: World, handle: Handle) -> None:
    await world.clock.advance(seconds=11)
    await world.engine.promote_delayed(handle.execution_id)
    await world.engine.complete((await claim_one(world.engine)).handle, b"later")


async def _it_is_replayed(world: World, handle: Handle) -> None:
    await world.engine.replay_execution(handle.execution_id)


async def _the_replay_runs(world: World, handle: Handle) -> None:
    await _it_is_replayed(world, handle)
    await claim_one(world.engine)


async def _the_replay_failed(world: World, handle: Handle) -> None:
    await _it_is_replayed(world, handle)
    await world.engine.fail((await claim_one(world.engine)).handle, "boom", failure_class="permanent")


_AFTER_AN_END = (_nothing, _a_day_passes, _it_is_replayed, _the_replay_runs, _the_replay_failed)
_AFTER_A_RETRY = (
    _nothing,
    _a_day_passes,
    _the_retry_runs,
    _the_retry_was_revoked,
    _the_retry_lapsed,
    _the_retry_completed,
)
REPEATED = [
    (state, name, answer, then)
    for state, name, answer, later in (
        ("T:completed", "complete", "Completed", _AFTER_AN_END),
        ("T:failed", "fail for good", "TerminalFailed", _AFTER_AN_END),
        ("T:cancelled", "cancel", "Cancelled", _AFTER_AN_END),
        ("T:cancelled", "cancel as lease_holder", "Cancelled", _AFTER_AN_END[:4]),
        ("D.r", "fail with a retry", "RetryScheduled", _AFTER_A_RETRY),
    )
    for then in later
]


@pytest.mark.parametrize(("state", "name", "answer", "then"), REPEATED, ids=lambda v: getattr(v, "__name__", str(v)))
async def test_a_repeated_terminal_call_gets_the_first_result_and_changes_nothing(
    world: World, state: str, name: str, answer: str, then: Then
) -> None:
    case = Case(world, await world.reach(state))
    await then(world, case.handle)
    before = await world.picture(case.id)
    for _ in range(2):
        assert await outcome(BY_NAME[name].call(case)) == answer
    assert await world.picture(case.id) == before


async def test_a_repeated_fail_always_returns_the_original_time(world: World) -> None:
    at = await world.reach("A")
    first = await world.engine.fail(at.handle, "boom")
    assert isinstance(first, RetryScheduled)
    assert first.next_attempt_index == 1
    await _the_retry_runs(world, at.handle)
    again = await world.engine.fail(at.handle, "another reason", failure_class="permanent")
    assert isinstance(again, RetryScheduled)
    assert again.delay_until == first.delay_until


async def test_a_repeated_complete_keeps_the_first_result(world: World) -> None:
    at = await world.reach("A")
    await world.engine.complete(at.handle, b"first")
    await world.engine.complete(at.handle, b"second")
    assert await world.engine.get_execution_result(at.id) == b"first"


async def test_a_repeat_needs_the_whole_fence_of_the_ended_attempt(world: World) -> None:
    at = await world.reach("T:completed")
    for change in ({"lease_id": new_id()}, {"lease_epoch": 2}, {"attempt_id": new_id()}, {"attempt_index": 1}):
        assert await outcome(world.engine.complete(msgspec.structs.replace(at.handle, **change))) == (
            "execution_not_active"
        )


async def test_a_repeat_with_an_earlier_lease_of_the_same_attempt_is_no_repeat(world: World) -> None:
    at = await world.reach("W.i")
    resumed = await claim_one(world.engine)
    assert resumed.handle.attempt_id == at.handle.attempt_id
    await world.engine.complete(resumed.handle)
    assert await outcome(world.engine.complete(at.handle)) == "execution_not_active"
    assert await outcome(world.engine.complete(resumed.handle)) == "Completed"


@pytest.mark.parametrize(
    ("state", "name", "told"),
    [
        (state, name, "execution_not_active")
        for state, same in {
            "T:completed": ("complete",),
            "T:failed": ("fail with a retry", "fail for good"),
            "D.r": ("fail with a retry", "fail for good"),
            "T:cancelled": ("cancel",),
            "T:expired": (),
        }.items()
        for name in ("complete", "fail with a retry", "fail for good", "cancel", "renew", "delay", "wait_children")
        if name not in same
    ]
    + [("D.i", "delay", "execution_not_active"), ("W.i", "wait_children", "execution_not_active")],
)
async def test_a_call_of_another_kind_on_an_ended_attempt_is_no_repeat(
    world: World, state: str, name: str, told: str
) -> None:
    case = Case(world, await world.reach(state))
    before = await world.picture(case.id)
    assert await outcome(BY_NAME[name].call(case)) == told
    assert await world.picture(case.id) == before


@pytest.mark.parametrize("name", OPERATOR_CALLS)
async def test_an_unfenced_repeat_is_no_repeat(world: World, name: str) -> None:
    case = Case(world, await world.reach("A"))
    assert await outcome(BY_NAME[name].call(case)) == BY_NAME[name].answer
    assert await outcome(BY_NAME[name].call(case)) == "execution_not_active"


async def test_a_cancel_by_the_holder_after_the_operators_succeeds(world: World) -> None:
    at = await world.reach("A")
    await world.engine.cancel(Operator(at.id), "first reason")
    before = await world.picture(at.id)
    await world.engine.cancel(at.handle, "second reason")
    assert await world.picture(at.id) == before
    record = await world.record(at.id)
    assert (record.cancellation_reason, record.cancelled_by) == ("first reason", "operator_override")


async def _reclaimed(world: World, handle: Handle) -> None:
    await world.clock.advance(seconds=31)
    await world.engine.mark_lease_expired_if_due(handle.execution_id)
    await claim_one(world.engine, **OTHER)


async def _resumed_by_itself(world: World, handle: Handle) -> None:
    await world.engine.release(handle)
    await claim_one(world.engine)


async def _revoked_and_reclaimed(world: World, handle: Handle) -> None:
    await world.engine.revoke_lease(handle.execution_id)
    await claim_one(world.engine, **OTHER)


async def _replayed_and_running(world: World, handle: Handle) -> None:
    await world.engine.cancel(Operator(handle.execution_id), "x")
    await world.engine.replay_execution(handle.execution_id)
    await claim_one(world.engine)


async def _revoked(world: World, handle: Handle) -> None:
    await world.engine.revoke_lease(handle.execution_id)


async def _lapsed(world: World, handle: Handle) -> None:
    await world.clock.advance(seconds=31)


async def _delayed(world: World, handle: Handle) -> None:
    await world.engine.delay(handle, timedelta(hours=1))


async def _suspended(world: World, handle: Handle) -> None:
    await world.engine.suspend(handle, waitpoints=[Fresh(new_id(), "k")], resume_condition=on("k"))


async def _suspended_and_resumed(world: World, handle: Handle) -> None:
    await _suspended(world, handle)
    await world.engine.resume_execution(handle.execution_id, "operator")


async def _suspended_and_running_again(world: World, handle: Handle) -> None:
    await _suspended_and_resumed(world, handle)
    await claim_one(world.engine, **OTHER)


async def _retry_scheduled(world: World, handle: Handle) -> None:
    await world.engine.fail(Operator(handle.execution_id), "boom")


async def _ended(world: World, handle: Handle) -> None:
    await world.engine.fail(Operator(handle.execution_id), "boom", failure_class="permanent")


DISPLACED = [
    (_lapsed, "lease_expired"),
    (_revoked, "lease_revoked"),
    (_reclaimed, "stale_lease"),
    (_revoked_and_reclaimed, "stale_lease"),
    (_resumed_by_itself, "stale_lease"),
    (_replayed_and_running, "stale_lease"),
    (_delayed, "execution_not_active"),
    (_suspended, "execution_not_active"),
    (_suspended_and_resumed, "execution_not_active"),
    (_suspended_and_running_again, "stale_lease"),
    (_retry_scheduled, "execution_not_active"),
    (_ended, "execution_not_active"),
]


@pytest.mark.parametrize("name", ["renew", "progress", "complete", "delay", "wait_children", "release"])
@pytest.mark.parametrize(("happened", "told"), DISPLACED, ids=lambda v: getattr(v, "__name__", str(v)))
async def test_a_displaced_worker_learns_what_happened(world: World, name: str, happened: Then, told: str) -> None:
    case = Case(world, await world.reach("A"))
    await happened(world, case.handle)
    before = await world.picture(case.id)
    assert await outcome(BY_NAME[name].call(case)) == told
    if happened is not _lapsed:
        assert await world.picture(case.id) == before


async def test_the_epoch_grows_by_one_with_every_lease_and_suspension_and_with_nothing_else(world: World) -> None:
    engine = world.engine
    execution_id = await submit(engine, policy=RETRY)
    epochs: list[int] = []

    async def epoch() -> int:
        return (await world.record(execution_id)).current_lease_epoch

    async def lease(claimed: Any) -> Handle:
        epochs.append(claimed.handle.lease_epoch)
        assert await epoch() == len(epochs)
        return claimed.handle  # type: ignore[no-any-return]

    assert await epoch() == 0
    handle = await lease(await claim_one(engine))
    await engine.renew(handle)
    await engine.progress(handle, percent=1)
    await engine.delay(handle, timedelta(0))
    await engine.promote_delayed(execution_id)
    handle = await lease(await engine.issue_grant_and_claim(execution_id))
    await engine.wait_children(handle)
    handle = await lease(await claim_one(engine))
    # Suspending makes every older fence stale at once.
    await engine.suspend(handle, waitpoints=[Fresh(new_id(), "k")], resume_condition=on("k"))
    epochs.append(await epoch())
    await engine.resume_execution(execution_id)
    handle = await lease(await claim_one(engine))
    await engine.release(handle)
    handle = await lease(await claim_one(engine))
    await engine.fail(handle, "boom")
    await world.clock.advance(seconds=11)
    await engine.promote_delayed(execution_id)
    handle = await lease(await claim_one(engine))
    await engine.revoke_lease(execution_id)
    assert await epoch() == 7
    handle = await lease(await claim_one(engine))
    await world.clock.advance(seconds=31)
    await engine.mark_lease_expired_if_due(execution_id)
    assert await epoch() == 8
    handle = await lease(await claim_one(engine))
    await engine.complete(handle)
    await engine.replay_execution(execution_id)
    assert await epoch() == 9
    handle = await lease(await claim_one(engine))
    await engine.cancel(handle, "enough")
    assert await epoch() == 10
    assert epochs == list(range(1, 11))


async def test_cancel_checks_the_end_before_the_fence(world: World) -> None:
    ended = await world.reach("T:completed")
    for source in ("lease_holder", "billing", "operator_override"):
        assert await outcome(world.engine.cancel(Operator(ended.id, source), "x")) == "execution_not_active"
    cancelled = await world.reach("T:cancelled")
    for source in ("lease_holder", "billing", "operator_override"):
        assert await outcome(world.engine.cancel(Operator(cancelled.id, source), "x")) == "Cancelled"


@pytest.mark.parametrize("source", ["lease_holder", "billing"])
@pytest.mark.parametrize("state", ["A", "X", "V"])
async def test_cancel_names_missing_parts_of_the_fence_before_it_checks_the_lease(
    world: World, source: str, state: str
) -> None:
    at = await world.reach(state)
    await world.clock.advance(seconds=31)
    before = await world.picture(at.id)
    with pytest.raises(ff.InvalidInput, match="missing: lease_id, lease_epoch, attempt_id"):
        await world.engine.cancel(Operator(at.id, source), "x")
    row = await world.sql.fetchrow(
        "select code, detail from flowfabric.cancel_as_operator(array[$1::int], array[$2::uuid], array[$3::uuid],"
        " array[null::bigint], array[null::uuid], array[null::int], $4, 'x', false)",
        home(at.id),
        at.id,
        at.handle.lease_id,
        source,
    )
    assert row is not None
    assert tuple(row) == ("invalid_input", "missing: lease_epoch, attempt_id")
    assert await world.picture(at.id) == before


async def test_cancel_records_the_reason_the_source_and_who_took_the_lease(world: World) -> None:
    takers = {"operator_override": "operator", "flow_cascade": "backend", "system_timeout": "backend"}
    for source, revoked_by in takers.items():
        at = await world.reach("A")
        await world.engine.cancel(Operator(at.id, source), "enough")
        after = await world.picture(at.id)
        assert after.record is not None
        assert (after.record.cancellation_reason, after.record.cancelled_by) == ("enough", source)
        last = after.stored["event"][-1]
        assert (last["reason"], last["revoked_by"], last["outcome"]) == ("cancelled", revoked_by, "cancelled")
        assert after.attempts[-1].failure_reason == "cancelled: enough"
        assert after.attempts[-1].end_disposition == "cancelled"


REVOKES = [
    ("W.1", True, True, "no_active_lease"),
    ("S", True, True, "no_active_lease"),
    ("T:completed", True, True, "no_active_lease"),
    ("V", True, True, "already_revoked"),
    ("X", True, True, "already_expired"),
    ("A", True, True, "different_worker_instance_id"),
    ("A", True, False, "different_worker_instance_id"),
    ("A", False, True, "lease_id_mismatch"),
    ("A", False, False, "Revoked"),
]


@pytest.mark.parametrize(("state", "other_instance", "other_lease_id", "told"), REVOKES)
async def test_revoke_reports_the_first_reason_why_there_is_nothing_to_revoke(
    world: World, state: str, other_instance: bool, other_lease_id: bool, told: str
) -> None:
    at = await world.reach(state)
    lease_id = at.handle.lease_id if state == "A" else new_id()
    answer = await outcome(
        world.engine.revoke_lease(
            at.id,
            worker_instance_id="somebody-else" if other_instance else "pool-1",
            expected_lease_id=new_id() if other_lease_id else lease_id,
        )
    )
    assert answer == told


async def test_revoke_returns_the_revoked_lease_and_leaves_the_epoch_alone(world: World) -> None:
    at = await world.reach("A")
    revoked = await world.engine.revoke_lease(at.id, reason="drained")
    assert (revoked.lease_id, revoked.lease_epoch) == (at.handle.lease_id, 1)  # type: ignore[union-attr]
    after = await world.picture(at.id)
    assert after.record is not None
    assert (after.record.lease_revoke_reason, after.record.current_lease_epoch) == ("drained", 1)
    assert after.record.blocking_detail == "lease revoked: drained"
    last = after.stored["event"][-1]
    assert (last["lease_type"], last["reason"], last["revoked_by"]) == ("revoked", "drained", "operator")
    assert (last["lease_id"], last["lease_epoch"]) == (str(at.handle.lease_id), 1)
    assert (last["worker_id"], last["worker_instance_id"]) == ("pool", "pool-1")


async def test_replay_checks_the_end_before_the_number_of_replays(world: World) -> None:
    none_left = ExecutionPolicy(max_replay_count=1)
    await submit(world.engine, policy=none_left)
    for attempt in range(2):
        claimed = await claim_one(world.engine)
        await world.engine.complete(claimed.handle)
        if attempt == 0:
            await world.engine.replay_execution(claimed.execution_id)
            assert await outcome(world.engine.replay_execution(claimed.execution_id)) == "execution_not_terminal"
    assert await outcome(world.engine.replay_execution(claimed.execution_id)) == "max_replays_exhausted"
    running = await world.reach("A", policy=ExecutionPolicy(max_replay_count=0))
    assert await outcome(world.engine.replay_execution(running.id)) == "execution_not_terminal"


@pytest.mark.parametrize("state", ["W.1", "D.1", "A", "X", "S", "T:completed"])
async def test_another_lane_than_the_executions_is_refused_before_its_state(world: World, state: str) -> None:
    at = await world.reach(state)
    before = await world.picture(at.id)
    elsewhere = {"lane_id": "elsewhere"}
    minted = {"lease_id": new_id(), "attempt_id": new_id()}
    calls = [
        world.engine.change_priority(at.id, 3, **elsewhere),
        world.engine.issue_claim_grant(at.id, **WORKER, **elsewhere),
        world.engine.claim_execution(at.id, **WORKER, **minted, **elsewhere),
        world.engine.claim_resumed_execution(at.id, **WORKER, lease_id=new_id(), **elsewhere),
        world.engine.issue_grant_and_claim(at.id, **elsewhere),
        world.engine.issue_reclaim_grant(at.id, **WORKER, **elsewhere),
        world.engine.reclaim_execution(at.id, **WORKER, **minted, **elsewhere),
    ]
    for call in calls:
        with pytest.raises(ff.InvalidInput, match="lane_id"):
            await call
    assert await world.picture(at.id) == before
    unknown = id_in(3)
    assert await outcome(world.engine.change_priority(unknown, 3, **elsewhere)) == "not_found"


async def test_change_priority_clamps_and_reports_even_an_equal_value(world: World) -> None:
    execution_id = await submit(world.engine, priority=10)
    for new, stored in ((-5, 0), (99_999, 9000), (9000, 9000)):
        await world.engine.change_priority(execution_id, new)
        assert (await world.record(execution_id)).priority == stored
    details = [e["details"] for e in (await world.picture(execution_id)).stored["event"]]
    assert details == [
        {"old_priority": 10, "new_priority": 0},
        {"old_priority": 0, "new_priority": 9000},
        {"old_priority": 9000, "new_priority": 9000},
    ]


async def test_a_known_key_or_id_is_a_duplicate_even_where_the_lane_is_closed(world: World) -> None:
    first = await submit(world.engine, idempotency_key="k", lane_id="closing")
    await world.engine.set_lane_state("closing", "draining")
    again = await world.engine.create_execution(execution_kind="test", idempotency_key="k", lane_id="closing")
    same_id = await world.engine.create_execution(execution_kind="test", execution_id=first, lane_id="closing")
    assert again == same_id == Duplicate(first)
    assert await outcome(world.engine.create_execution(execution_kind="test", lane_id="closing")) == "lane_closed"


async def test_arguments_out_of_range_are_refused_and_change_nothing(world: World) -> None:
    at = await world.reach("A")
    before = await world.picture(at.id)
    engine = world.engine
    zero = timedelta(0)
    for call in (
        engine.renew(at.handle, lease_ttl=zero),
        engine.progress(at.handle, percent=101),
        engine.progress(at.handle, percent=-1),
        engine.claim(**WORKER, lease_ttl=zero),
        engine.issue_reclaim_grant(at.id, **WORKER, grant_ttl=zero),
        engine.issue_claim_grant(at.id, **WORKER, grant_ttl=timedelta(seconds=61)),
        engine.cancel(at.handle, "x", source="operator_override"),
        engine.cancel(Operator(at.id, ""), "x"),
        engine.expire_execution(at.id, "lease"),
    ):
        assert await outcome(call) == "invalid_input"
    assert await outcome(engine.fail(at.handle, "x", retry_policy="{")) == "invalid_policy_json"
    assert await outcome(engine.fail(at.handle, "x", retry_policy={"max_retries": "3"})) == "invalid_policy_json"
    assert await outcome(engine.block_execution_for_admission(at.id, "tired")) == "invalid_blocking_reason"
    assert await world.picture(at.id) == before


async def test_progress_keeps_fields_that_are_not_given(world: World) -> None:
    claimed = await started(world.engine)
    await world.engine.progress(claimed.handle, percent=40, message="half way")
    await world.engine.progress(claimed.handle, message="nearly")
    record = await world.record(claimed.execution_id)
    assert (record.progress_pct, record.progress_message) == (40, "nearly")
    await world.engine.progress(claimed.handle, percent=0)
    record = await world.record(claimed.execution_id)
    assert (record.progress_pct, record.progress_message) == (0, "nearly")


async def test_verdicts_of_a_batch_are_in_the_order_of_their_items(world: World) -> None:
    done = (await world.reach("T:completed")).handle
    failed = (await world.reach("T:failed")).handle
    held = (await world.reach("A")).handle
    lost = (await world.reach("V")).handle
    unknown = stranger(id_in(3))
    answers = await world.engine.complete_many([lost, held, unknown, done, other_lease(held)])
    kinds = [getattr(answer, "kind", type(answer).__name__) for answer in answers]
    assert kinds == ["lease_revoked", "Completed", "not_found", "Completed", "execution_not_active"]
    failures = [Failure(authority=done, reason="x"), Failure(authority=failed, reason="x")]
    kinds = [getattr(a, "kind", type(a).__name__) for a in await world.engine.fail_many(failures)]
    assert kinds == ["execution_not_active", "TerminalFailed"]
