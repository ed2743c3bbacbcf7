"""Mistakes that engines have made with suspensions and signals, each as the behaviour that rules it out.

In the order in which the contract lists them.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest

import flowfabric as ff
from flowfabric._duties import ALL, TimerDuty
from flowfabric.engine.timers import TimerKind
from flowfabric.errors import Conflict, ValidationFailed
from flowfabric.values.conditions import (
    AllMet,
    ByName,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    all_of,
    count_signals,
    from_sources,
    on,
)
from flowfabric.values.ids import ExecutionId
from flowfabric.values.keystore import Rotated
from flowfabric.values.lease import Handle, Operator
from flowfabric.values.policies import ExecutionPolicy, SuspensionPolicy, TimeoutPolicy
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.wait import AlreadySatisfied, Closed, Fresh, ResumePolicy, Suspended, UsePending, WaitpointToken
from tests.ids import home, id_in
from tests.interleave import Party, waiting
from tests.sql.cases import outcome
from tests.sql.suspending import (
    APPENDED,
    BUFFERED,
    HOUR,
    LONG,
    RESUMED,
    SATISFIED,
    SECOND,
    Point,
    SuspendingWorld,
    Waiting,
    ended,
    forged,
    short,
)
from tests.support import WORKER, claim_one, new_id

pytestmark = pytest.mark.asyncio(loop_scope="session")

NONE = timedelta(0)
KEY_A, KEY_B = "ab" * 32, "cd" * 32


async def neighbour(world: SuspendingWorld, wait: Waiting) -> Waiting:
    """Another execution of the same partition, under a lease."""
    return await world.hold(execution_id=id_in(home(wait.id)))


def faulty(handle: Handle) -> list[Handle]:
    """A handle with one member of its fence changed, each in turn."""
    replace = msgspec.structs.replace
    return [
        replace(handle, lease_id=new_id()),
        replace(handle, lease_epoch=handle.lease_epoch + 1),
        replace(handle, attempt_id=new_id()),
    ]


async def refusal_of(call: Any) -> ff.FlowFabricError:
    with pytest.raises(ff.FlowFabricError) as caught:
        await call
    return caught.value


async def test_the_deadline_of_a_suspension_that_was_left_in_time_ends_nothing(world: SuspendingWorld) -> None:
    waits = [await world.suspend(timeout_at=await world.in_an_hour()) for _ in range(4)]
    for wait in waits[:3]:
        await world.accept(wait)
    for wait in waits[:2]:
        wait.claimed = await world.reclaim_resumed(wait)
    await world.engine.complete(waits[0].handle)
    await world.engine.cancel(Operator(waits[3].id), "enough")
    await world.clock.advance(hours=2)
    assert (await world.engine.run_timers("suspension")).handled == 0
    for wait in waits:
        assert await world.engine.expire_suspension(wait.id) == AlreadySatisfied("not_suspended")
    states = [(await world.record(wait.id)).public_state for wait in waits]
    assert states == ["completed", "active", "resumable", "cancelled"]


async def test_a_webhook_that_is_sent_again_does_not_count_twice(world: SuspendingWorld) -> None:
    wait = await world.suspend(count_signals(3, "k"))
    for repeated in ({"signal_id": new_id()}, {"idempotency_key": "hook-1"}):
        first = await world.accept(wait, **repeated)
        assert first.effect == APPENDED
        assert await world.send(wait, **repeated) == DuplicateSignal(first.signal_id)
    assert await outcome(world.send(wait, max_signals_per_execution=2)) == "signal_limit_exceeded"
    last = await world.accept(wait, resume_delay=5 * SECOND)
    assert last.effect == SATISFIED
    assert (await world.record(wait.id)).public_state == "delayed"
    noisy = await world.suspend(on("k", "never"))
    for _ in range(3):
        await world.accept(noisy, signal_maxlen=1)
    assert len((await world.engine.read_signals(noisy.id)).items) == 1


async def test_a_signal_for_a_pending_waitpoint_needs_no_other_call(world: SuspendingWorld) -> None:
    wait = await world.pend()
    answer = await world.accept(wait, payload=b"early")
    assert (answer.effect, answer.match_detail) == (BUFFERED, "not_evaluated")
    assert isinstance(await world.suspend_on_pending(wait, count_signals(2, "k")), Suspended)
    assert (await world.accept(wait)).effect == SATISFIED
    assert [one.payload for one in await world.engine.observe_signals(wait.handle)] == [b"early", None]


async def test_no_execution_waits_for_a_signal_that_has_arrived(world: SuspendingWorld) -> None:
    wait = await world.pend()
    await world.accept(wait)
    assert isinstance(await world.suspend_on_pending(wait), AlreadySatisfied)
    assert (await world.record(wait.id)).public_state == "active"
    await world.engine.complete(wait.handle)


async def test_a_pending_waitpoint_that_is_not_ours_is_not_made_ours(world: SuspendingWorld) -> None:
    wait = await world.hold()
    foreign = await neighbour(world, wait)
    await world.pend(of=foreign)
    unknown = Point(new_id(), WaitpointToken("k1:none"))
    await world.pend("late", of=wait, expires_in=SECOND)
    await world.pend("closed", of=wait)
    await world.pend("good", of=wait)
    await world.engine.close_waitpoint(wait.handle, wait.points["closed"].id)
    await world.clock.advance(seconds=2)
    told = {
        "waitpoint_not_pending": wait.points["closed"],
        "pending_waitpoint_expired": wait.points["late"],
        "invalid_waitpoint_for_execution": foreign.point,
        "not_found": unknown,
        "invalid_input": wait.points["good"],  # another key than the condition's
    }
    for kind, point in told.items():
        assert (
            await outcome(
                world.engine.suspend(
                    wait.handle, waitpoints=[UsePending(point.id)], resume_condition=on("k"), timeout_at=None
                )
            )
            == kind
        )
    assert await world.sql.fetchval("select count(*) from flowfabric.waitpoint") == 4
    assert await world.closed(foreign) == {"k": ("pending", None)}
    assert (await world.accept(foreign)).effect == BUFFERED, "its token is what it was"
    await world.engine.complete(wait.handle)


async def test_a_fresh_waitpoint_does_not_overwrite_another(world: SuspendingWorld) -> None:
    victim = await world.suspend(on("secret"))
    used = [victim.point.id]
    wait = await neighbour(world, victim)
    await world.pend(of=wait)
    used.append(wait.point.id)
    await world.engine.close_waitpoint(wait.handle, wait.point.id)
    before = await world.stored()
    for taken in used:
        bindings = [Fresh(new_id(), "a"), Fresh(taken, "b")]
        error = await refusal_of(
            world.engine.suspend(wait.handle, waitpoints=bindings, resume_condition=all_of("a", "b"))
        )
        assert isinstance(error, Conflict) and error.kind == "waitpoint_already_exists"
    assert await world.stored() == before
    assert (await world.accept(victim)).effect == SATISFIED


async def test_without_the_lease_no_caller_can_suspend_or_create_waitpoints(world: SuspendingWorld) -> None:
    wait = await world.hold(lease_ttl=60 * SECOND)

    async def told(handle: Handle) -> set[str]:
        binding = [Fresh(new_id(), "k")]
        return {
            await outcome(world.engine.suspend(handle, waitpoints=binding, resume_condition=on("k"))),
            await outcome(world.engine.create_waitpoint(handle, "k", HOUR)),
        }

    for handle in faulty(wait.handle):
        assert await told(handle) == {"stale_lease"}
    await world.clock.advance(seconds=61)
    assert await told(wait.handle) == {"lease_expired"}
    wait.claimed = await claim_one(world.engine, lease_ttl=LONG)
    await world.engine.revoke_lease(wait.id)
    assert await told(wait.handle) == {"lease_revoked"}
    wait.claimed = await claim_one(world.engine, lease_ttl=LONG)
    await world.suspend(of=wait)
    assert await told(wait.handle) == {"already_suspended", "execution_not_active"}
    assert (await world.suspension(wait)).suspension_id == wait.details.suspension_id
    await world.engine.cancel(Operator(wait.id), "enough")
    assert await told(wait.handle) == {"execution_not_active"}


@pytest.mark.parametrize(
    ("bindings", "condition", "code"),
    [
        ([], on("k"), "waitpoints_empty"),
        (["k"], AllMet(()), "allof_empty_members"),
        ([""], on("k"), "waitpoint_key_empty"),
        (["k", "k"], on("k"), "duplicate_waitpoint_binding"),
        (["a"], on("b"), "waitpoint_key_mismatch"),
        (["a"], all_of("a", "b"), "referenced_waitpoint_key_missing_binding: b"),
        (["a", "b"], on("a"), "extra_binding_not_referenced_by_condition: b"),
        (["k"], TimeoutOnly(), "timeout_only_without_deadline"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_nothing_is_suspended_on_arguments_that_make_no_sense(
    world: SuspendingWorld, bindings: list[str], condition: Any, code: str
) -> None:
    wait = await world.hold()
    before = await world.stored()
    fresh = [Fresh(new_id(), key) for key in bindings]
    error = await refusal_of(world.engine.suspend(wait.handle, waitpoints=fresh, resume_condition=condition))
    assert error.kind == "invalid_input" and code in error.detail
    assert await world.stored() == before


async def test_a_repeated_suspend_never_returns_tokens_of_another_execution(world: SuspendingWorld) -> None:
    wait = await world.suspend(idempotency_key="key", timeout_at=await world.in_an_hour())
    other = await neighbour(world, wait)
    await world.suspend(of=other, idempotency_key="key")
    assert other.details.suspension_id != wait.details.suspension_id
    assert other.point.token != wait.point.token

    async def again(handle: Handle) -> Any:
        return await world.engine.suspend(
            handle, waitpoints=[Fresh(new_id(), "j")], resume_condition=on("j"), idempotency_key="key"
        )

    assert await again(wait.handle) == wait.suspended
    for handle in faulty(wait.handle):
        assert await outcome(again(handle)) == "already_suspended", "knowing the key is not enough"
    await world.clock.advance(hours=1, seconds=59)
    assert await again(wait.handle) == wait.suspended
    await world.clock.advance(seconds=2)
    assert await outcome(again(wait.handle)) == "already_suspended"
    await world.clock.advance(days=6)
    assert await again(other.handle) == other.suspended
    await world.clock.advance(days=1)
    assert await outcome(again(other.handle)) == "already_suspended"


async def test_a_stale_fence_is_not_called_a_conflict_that_may_be_tried_again(world: SuspendingWorld) -> None:
    wait = await world.hold()
    for handle in faulty(wait.handle):
        bindings = [Fresh(new_id(), "k")]
        for call in (
            world.engine.suspend(handle, waitpoints=bindings, resume_condition=on("k")),
            world.engine.suspend_by_triple(handle.fence, waitpoints=bindings, resume_condition=on("k")),
            world.engine.create_waitpoint(handle, "k", HOUR),
            world.engine.close_waitpoint(handle, new_id()),
        ):
            error = await refusal_of(call)
            assert isinstance(error, ff.LeaseLost) and error.kind == "stale_lease"
            assert not error.retryable


async def test_a_rotated_key_does_not_verify_forever(world: SuspendingWorld) -> None:
    rotate = world.engine.rotate_waitpoint_hmac_secret_all
    wait = await world.suspend(on("k", "never"))
    for kid in ("", "a:b", "a b", "x" * 65, "é"):
        assert (await refusal_of(rotate(kid, KEY_A))).kind == "invalid_kid"
    for secret in ("", "ab", "zz" * 32, "ab" * 33):
        assert (await refusal_of(rotate("k2", secret))).kind == "invalid_secret_hex"
    await rotate("k2", KEY_A, 60 * SECOND)
    await world.accept(wait)
    (conflict,) = await rotate("k1", KEY_B)
    assert isinstance(conflict.result, Conflict) and conflict.result.kind == "rotation_conflict"
    await world.clock.advance(seconds=61)
    assert (await refusal_of(world.send(wait))).detail == "token_expired"
    async with await ff.Engine.connect(world.dsn, notifications=False) as engine:
        answers = await asyncio.gather(
            *(engine.rotate_waitpoint_hmac_secret_all(f"r{n}", KEY_B) for n in range(4)),
            *(engine.seed_waitpoint_hmac_secret("r9", KEY_B) for n in range(2)),
            return_exceptions=True,
        )
    assert [isinstance(one[0].result, Rotated) for one in answers[:4]] == [True] * 4  # type: ignore[index]
    assert all(isinstance(one, ff.InvalidInput) for one in answers[4:])
    assert await world.sql.fetchval("select count(*) from flowfabric.keystore where state = 'current'") == 1
    assert (await refusal_of(world.send(wait))).detail == "invalid_token", "its secret is erased"


async def test_a_timeout_does_what_it_says_and_leaves_nothing_open(world: SuspendingWorld) -> None:
    waits = {
        behavior: await world.suspend(timeout_at=await world.in_an_hour(), timeout_behavior=behavior)
        for behavior in ("fail", "cancel", "expire", "escalate", "auto_resume_with_timeout_signal")
    }
    await world.clock.advance(hours=2)
    assert (await world.engine.run_timers("suspension")).handled == 5
    for behavior, state in (("fail", "failed"), ("cancel", "cancelled"), ("expire", "expired")):
        assert await world.vector(waits[behavior]) == ended(state)
        assert await world.closed(waits[behavior]) == {"k": ("closed", f"timed_out_{behavior}")}
        assert short(await world.events(waits[behavior]))[-1] == f"K:{state}"
    assert await world.vector(waits["auto_resume_with_timeout_signal"]) == RESUMED
    assert (await world.accept(waits["escalate"])).effect == SATISFIED


async def test_the_expiry_of_pending_waitpoints_leaves_active_ones_and_their_signals_alone(
    world: SuspendingWorld,
) -> None:
    wait = await world.pend(expires_in=60 * SECOND)
    await world.accept(wait, payload=b"early")
    at = await world.clock.now() + 30 * SECOND
    await world.suspend_on_pending(wait, count_signals(3, "k"), timeout_at=at, timeout_behavior="escalate")
    await world.accept(wait, payload=b"late")
    await world.clock.advance(minutes=5)
    before = await world.stored()
    assert await world.engine.expire_waitpoint(wait.id, wait.point.id) == AlreadySatisfied("not_pending")
    assert await world.stored() == before
    await world.engine.run_timers("waitpoint")
    assert await world.closed(wait) == {"k": ("active", None)}
    assert [one.payload for one in (await world.engine.read_signals(wait.id)).items] == [b"early", b"late"]
    assert (await world.accept(wait)).effect == SATISFIED
    spare = await world.pend(expires_in=SECOND)
    await world.clock.advance(seconds=2)
    assert await world.engine.expire_waitpoint(spare.id, spare.point.id) == Closed(spare.point.id)
    kinds = [duty.kind for duty in ALL if issubclass(duty, TimerDuty)]
    assert sorted(kinds) == sorted(TimerKind), "every kind of timer has a duty that looks after it"


async def test_an_execution_resumed_by_an_operator_is_claimable_and_promoted(world: SuspendingWorld) -> None:
    wait = await world.suspend(all_of("a", "b"))
    await world.accept(wait, "a")
    answer = await world.engine.resume_execution(wait.id, "operator", 60 * SECOND)
    assert answer.public_state == "delayed"
    assert (await world.record(wait.id)).delay_until is not None
    assert set((await world.closed(wait)).values()) == {("closed", "operator_resumed")}
    assert len((await world.engine.read_signals(wait.id)).items) == 1
    await world.clock.advance(seconds=61)
    assert (await world.engine.run_timers("delay")).handled == 1
    held = await world.reclaim_resumed(wait)
    assert await world.engine.observe_signals(held.handle) == []


async def test_a_resumed_attempt_continues_as_the_same_attempt(world: SuspendingWorld) -> None:
    timed = ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=10 * 60 * SECOND))
    wait = await world.hold(policy=timed)
    (first,) = await world.engine.list_attempts(wait.id)
    due = (await world.record(wait.id)).attempt_timeout_at
    await world.clock.advance(minutes=4)
    await world.suspend(of=wait)
    left = (await world.record(wait.id)).attempt_timeout_remaining
    assert due is not None and left == due - (await world.suspension(wait)).suspended_at
    ids = {"lease_id": new_id(), "attempt_id": new_id()}
    await world.clock.advance(hours=3)
    assert await outcome(world.engine.claim_execution(wait.id, **WORKER, **ids)) == "execution_not_leaseable"
    await world.accept(wait)
    lease = {"lease_id": new_id()}
    assert await outcome(world.engine.claim_execution(wait.id, **WORKER, **ids)) == "use_claim_resumed_execution"
    assert await outcome(world.engine.claim_resumed_execution(wait.id, **WORKER, **lease)) == "invalid_claim_grant"
    grant = await world.engine.issue_claim_grant(wait.id, **WORKER)
    wait.claimed = await world.engine.claim_resumed_execution(wait.id, **WORKER, **lease, lease_ttl=LONG)
    (again,) = await world.engine.list_attempts(wait.id)
    assert (again.attempt_id, again.started_at) == (first.attempt_id, first.started_at)
    assert again.resumed_at is not None
    assert (await world.record(wait.id)).attempt_timeout_at == again.resumed_at + left
    await world.suspend(of=wait)
    assert await world.engine.claim_from_resume_grant(grant, **WORKER) is None
    assert (await world.record(wait.id)).public_state == "suspended"


async def test_resuming_is_not_reported_as_completing(world: SuspendingWorld) -> None:
    wait = await world.suspend()
    await world.accept(wait)
    assert [event.outcome for event in await world.events(wait)] == [None] * 3
    assert short(await world.events(wait)) == ["L:acquired", "L:revoked", f"S:{SATISFIED}"]


async def test_there_is_one_way_to_sign_a_token(world: SuspendingWorld) -> None:
    await world.engine.rotate_waitpoint_hmac_secret_all("kid-1", KEY_A)
    execution, waitpoint = UUID("11111111-1111-4111-8111-111111111111"), UUID("22222222-2222-4222-8222-222222222222")
    wait = await world.hold(execution_id=ExecutionId(execution))
    answer = await world.engine.suspend(
        wait.handle,
        waitpoints=[Fresh(waitpoint, "k")],  # type: ignore[arg-type]
        resume_condition=on("k"),
    )
    assert isinstance(answer, Suspended)
    sign = "select flowfabric.sign_token('kid-1', $1, $2, $3)"
    published = "kid-1:56fca95f269d3ee28fbfbc3ee71418f7fffd0626d85a1c0d864998cbac02af87"
    assert await world.sql.fetchval(sign, 0, execution, waitpoint) == published
    expected = await world.sql.fetchval(sign, home(execution), execution, waitpoint)
    assert answer.details.waitpoint_token.reveal() == expected


async def test_a_caller_without_a_token_learns_nothing(world: SuspendingWorld) -> None:
    wait, other = await world.suspend(), await world.suspend()
    over = await world.suspend()
    await world.engine.cancel(Operator(over.id), "enough")
    nowhere = id_in(home(wait.id))
    token = wait.point.token.reveal()
    told = [
        await refusal_of(call)
        for call in (
            world.send(wait, execution_id=nowhere),
            world.send(wait, waitpoint_id=new_id()),
            world.send(wait, waitpoint_id=other.point.id),
            world.send(wait, waitpoint_token="k9" + token[2:]),
            world.send(wait, waitpoint_token=forged(wait.point.token)),
            world.send(over, waitpoint_token=forged(over.point.token)),
        )
    ]
    assert {(type(error), error.kind, error.detail) for error in told} == {
        (ValidationFailed, "invalid_token", "invalid_token")
    }


async def test_a_late_signal_is_refused_as_late(world: SuspendingWorld) -> None:
    resumed, over = await world.suspend(), await world.suspend()
    await world.accept(resumed)
    await world.engine.cancel(Operator(over.id), "enough")
    assert await outcome(world.send(resumed)) == "waitpoint_closed"
    assert await outcome(world.send(over)) == "target_not_signalable"


async def test_a_worker_sees_what_woke_it_and_nothing_else(world: SuspendingWorld) -> None:
    wait = await world.suspend(from_sources(2, "k", name="yes"))
    sent = [
        await world.accept(wait, signal_id=number, signal_name=name, source_identity=who)
        for number, name, who in (
            ("ffffffff-ffff-4fff-8fff-ffffffffffff", "yes", "alice"),
            (new_id(), "no", "bob"),
            (new_id(), "yes", "alice"),
            ("00000000-0000-4000-8000-000000000000", "yes", "bob"),
        )
    ]
    observed = await world.engine.observe_signals(wait.handle)
    assert [one.signal_id for one in observed] == [sent[0].signal_id, sent[3].signal_id]
    wait.claimed = await claim_one(world.engine, lease_ttl=LONG)
    await world.pend("next", of=wait)
    early = await world.accept(wait, "next")
    wait.points = {"next": wait.points["next"]}
    assert isinstance(await world.suspend_on_pending(wait), AlreadySatisfied)
    assert [one.signal_id for one in await world.engine.observe_signals(wait.handle)] == [early.signal_id]


async def test_the_parts_of_a_condition_do_not_count_for_each_other(world: SuspendingWorld) -> None:
    wait = await world.suspend(all_of(from_sources(1, "a"), from_sources(1, "b"), count_signals(2, "c")))
    assert (await world.accept(wait, "a", source_identity="x")).effect == APPENDED
    assert (await world.accept(wait, "c", source_identity="y")).effect == APPENDED
    assert (await world.accept(wait, "c", source_identity="z")).effect == APPENDED
    assert (await world.accept(wait, "b", source_identity="x")).effect == SATISFIED
    pairs = await world.suspend(from_sources(2, "k"))
    assert (await world.accept(pairs, source_type="a:b", source_identity="c")).effect == APPENDED
    assert (await world.accept(pairs, source_type="a", source_identity="b:c")).effect == SATISFIED
    early = await world.pend()
    await world.accept(early)
    assert isinstance(await world.suspend_on_pending(early, all_of(count_signals(1, "k"))), AlreadySatisfied)


@pytest.mark.parametrize("condition", [OperatorOnly(), TimeoutOnly()])
async def test_no_name_resumes_what_no_signal_may_resume(world: SuspendingWorld, condition: Any) -> None:
    wait = await world.suspend(condition, "k", timeout_at=await world.in_an_hour())
    (listed,) = (await world.engine.list_pending_waitpoints(wait.id)).items
    (sentinel,) = listed.required_signal_names
    assert sentinel.startswith("__")
    assert await outcome(world.send(wait, signal_name=sentinel)) == "invalid_input"
    for name in (sentinel.strip("_"), "timeout", "OperatorOnly", "TimeoutOnly", "operator"):
        assert (await world.accept(wait, signal_name=name)).effect == APPENDED
    assert (await world.record(wait.id)).public_state == "suspended"


async def test_effects_have_three_words_for_every_condition(world: SuspendingWorld) -> None:
    for condition in (
        Single("k", ByName("yes")),
        AllMet((Single("k", ByName("yes")),)),
        Count(1, CountKind.DISTINCT_WAITPOINTS, ("k",), ByName("yes")),
        Count(1, CountKind.DISTINCT_SIGNALS, ("k",), ByName("yes")),
        Count(1, CountKind.DISTINCT_SOURCES, ("k",), ByName("yes")),
    ):
        wait = await world.pend()
        effects = [(await world.accept(wait, signal_name="no")).effect]
        await world.suspend_on_pending(wait, condition)
        effects += [(await world.accept(wait, signal_name=name)).effect for name in ("no", "yes")]
        assert effects == [BUFFERED, APPENDED, SATISFIED]
        assert short(await world.events(wait))[-3:] == ["L:revoked", f"S:{APPENDED}", f"S:{SATISFIED}"]


async def test_the_retry_of_a_delivery_that_succeeded_is_no_error(world: SuspendingWorld) -> None:
    wait = await world.suspend(creating={"policy": ExecutionPolicy(max_signals_per_execution=1)})
    first = await world.accept(wait, idempotency_key="hook-1")
    for _ in range(2):
        assert await world.send(wait, idempotency_key="hook-1") == DuplicateSignal(first.signal_id)
        await world.engine.cancel(Operator(wait.id), "enough")


async def test_a_payload_is_neither_cut_nor_changed(world: SuspendingWorld) -> None:
    wait = await world.suspend(count_signals(2, "k"))
    assert await outcome(world.send(wait, payload=bytes(65_537))) == "payload_too_large"
    for data in (b"\xff" * 65_536, bytes(range(256))):
        await world.accept(wait, payload=data)
    observed = await world.engine.observe_signals(wait.handle)
    assert [one.payload for one in observed] == [b"\xff" * 65_536, bytes(range(256))]


async def test_the_policies_of_a_suspension_are_read(world: SuspendingWorld) -> None:
    default = SuspensionPolicy(default_timeout=HOUR, timeout_behavior="expire")
    wait = await world.suspend(
        resume_policy=ResumePolicy(resume_delay=9 * SECOND),
        creating={"policy": ExecutionPolicy(suspension_policy=default)},
    )
    suspension = await world.suspension(wait)
    assert suspension.timeout_at == suspension.suspended_at + HOUR
    assert suspension.timeout_behavior == "expire"
    await world.accept(wait)
    record = await world.record(wait.id)
    assert record.delay_until == record.last_transition_at + 9 * SECOND


async def test_every_end_of_a_suspended_execution_closes_and_reports_everything(world: SuspendingWorld) -> None:
    overdue = await world.suspend(all_of("a", "b"), creating={"execution_deadline_at": SECOND})
    unwanted = await world.suspend(all_of("a", "b"))
    await world.clock.advance(seconds=2)
    assert (await world.engine.run_timers("deadline")).handled == 1
    await world.engine.cancel(Operator(unwanted.id), "enough")
    for wait, reason, word in (
        (overdue, "expired:execution_deadline", "expired"),
        (unwanted, "cancelled", "cancelled"),
    ):
        assert (await world.suspension(wait)).close_reason == reason
        assert set((await world.closed(wait)).values()) == {("closed", reason)}
        assert short(await world.events(wait))[-1] == f"K:{word}"


async def test_two_people_can_approve_even_after_the_key_is_gone(world: SuspendingWorld) -> None:
    wait = await world.suspend(from_sources(2, "k", name="approved"))
    await world.approve(wait, "1", source_identity="alice")
    await world.engine.rotate_waitpoint_hmac_secret_all("k2", KEY_A, NONE)
    await world.clock.advance(seconds=1)
    await world.engine.rotate_waitpoint_hmac_secret_all("k3", KEY_B, NONE)
    assert await outcome(world.send(wait)) == "invalid_token"
    answer = await world.approve(wait, "1b", source_identity="bob")
    assert isinstance(answer, Accepted) and answer.effect == SATISFIED
    assert [one.source_identity for one in await world.engine.observe_signals(wait.handle)] == ["alice", "bob"]


async def test_the_list_of_suspended_executions_shows_those_and_since_when(world: SuspendingWorld) -> None:
    wait = await world.suspend(timeout_at=await world.in_an_hour(), reason_code="waiting_for_approval")
    other = await neighbour(world, wait)
    await world.suspend(of=other)
    await world.accept(other)
    (listed,) = (await world.engine.list_suspended(home(wait.id))).items
    suspension = await world.suspension(wait)
    assert (listed.execution_id, listed.suspended_at) == (wait.id, suspension.suspended_at)
    assert (listed.timeout_at, listed.reason) == (suspension.timeout_at, "waiting_for_approval")
    await world.accept(wait)
    assert (await world.engine.list_suspended(home(wait.id))).items == []


async def test_there_is_one_clock_and_a_time_is_due_when_it_is_reached(world: SuspendingWorld) -> None:
    wait = await world.pend()
    await world.clock.advance(days=3)
    await world.pend("j", of=wait)
    wait.points = {"j": wait.points["j"]}
    timeout = await world.in_an_hour()
    await world.suspend_on_pending(wait, on("j", "never"), timeout_at=timeout)
    at = (await world.suspension(wait)).suspended_at
    row, record = await world.waitpoint(wait), await world.record(wait.id)
    (attempt,) = await world.engine.list_attempts(wait.id)
    assert {row["activated_at"], record.last_transition_at, attempt.suspended_at} == {at}
    assert (await world.events(wait))[-1].occurred_at == at
    await world.accept(wait, created_at=at - timedelta(days=9))
    (kept,) = (await world.engine.read_signals(wait.id)).items
    event, row = (await world.events(wait))[-1], await world.waitpoint(wait)
    assert {event.occurred_at, row["last_signal_at"], (await world.suspension(wait)).last_signal_at} == {
        kept.accepted_at
    }
    assert kept.accepted_at >= at
    # The clock cannot be stopped, so the two moments are given by hand.
    expire = "select flowfabric.expire_suspensions(array[$1::integer], array[$2::uuid], $3)"
    await world.sql.execute(expire, home(wait.id), wait.id, timeout - timedelta(microseconds=1))
    assert (await world.suspension(wait)).closed_at is None
    await world.sql.execute(expire, home(wait.id), wait.id, timeout)
    assert (await world.suspension(wait)).closed_at == timeout


async def test_every_stored_word_is_a_published_one(world: SuspendingWorld) -> None:
    resumed, failed = await world.pend(), await world.suspend(timeout_at=await world.clock.now() + SECOND)
    await world.accept(resumed)
    await world.suspend_on_pending(resumed, count_signals(2, "k"))
    await world.accept(resumed)
    await world.clock.advance(seconds=2)
    await world.engine.run_timers("suspension")
    await world.engine.resume_execution((await world.suspend()).id)
    await world.suspend(timeout_at=await world.in_an_hour())
    assert (await world.record(failed.id)).public_state == "failed"
    words = {
        ("execution", "state"): {"resumable", "failed", "suspended"},
        ("execution", "disposition"): {None, "terminal_failed"},
        ("execution", "pending"): {"interrupted", None},
        ("execution", "lease_lost"): {None},
        ("event", "lease_type"): {"acquired", "revoked", None},
        ("event", "outcome"): {"failed", None},
        ("event", "signal_effect"): {BUFFERED, SATISFIED, None},
        ("waitpoint", "state"): {"active", "closed"},
    }
    for (table, column), known in words.items():
        found = await world.sql.fetch(f"select distinct {column} from flowfabric.{table}")
        assert {row[0] for row in found} == known, column


@pytest.mark.parametrize(
    ("bindings", "condition", "code"),
    [
        (["a"], all_of("b"), "referenced_waitpoint_key_missing_binding: b"),
        (["a", "b"], all_of("a"), "extra_binding_not_referenced_by_condition: b"),
        (["a"], Count(2, CountKind.DISTINCT_WAITPOINTS, ("a", "a")), "count_duplicate_waitpoints"),
        (["a"], all_of(all_of(Single("a", ByName("")))), "empty signal name at members[0].members[0]"),
        (["a"], all_of(Count(1, CountKind.DISTINCT_SIGNALS, ("a",), ByName(""))), "empty signal name at members[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_keys_and_names_are_checked_at_every_number_and_depth(
    world: SuspendingWorld, bindings: list[str], condition: Any, code: str
) -> None:
    wait = await world.hold()
    fresh = [Fresh(new_id(), key) for key in bindings]
    error = await refusal_of(world.engine.suspend(wait.handle, waitpoints=fresh, resume_condition=condition))
    assert error.kind == "invalid_input" and code in error.detail


async def test_suspending_by_triple_compares_all_three(world: SuspendingWorld) -> None:
    wait = await world.hold()
    args: dict[str, Any] = {"waitpoints": [Fresh(new_id(), "k")], "resume_condition": on("k")}
    for handle in faulty(wait.handle):
        assert await outcome(world.engine.suspend_by_triple(handle.fence, **args)) == "stale_lease"
    for field in ("lease_id", "lease_epoch", "attempt_id"):
        partial = msgspec.structs.replace(wait.handle.fence, **{field: None})
        assert await outcome(world.engine.suspend_by_triple(partial, **args)) == "invalid_input"
    assert isinstance(await world.engine.suspend_by_triple(wait.handle.fence, **args), Suspended)
    assert await outcome(world.engine.suspend_by_triple(wait.handle.fence, **args)) == "execution_not_active"


async def test_a_waitpoint_id_that_was_just_taken_is_reported(world: SuspendingWorld) -> None:
    """Two executions of one partition race for one id; the index decides, and the loser keeps its lease."""
    first = await world.hold()
    second = await neighbour(world, first)
    binding = {"waitpoints": [Fresh(new_id(), "k")], "resume_condition": on("k")}
    one, two = await Party.join(world.dsn), await Party.join(world.dsn)
    try:
        await one.begin()
        await one.suspend(first.handle, **binding)  # type: ignore[arg-type]
        task = await waiting(world.sql, two, two.suspend(second.handle, **binding), behind=one)  # type: ignore[arg-type]
        await one.commit()
        answer = await task
    finally:
        await one.connection.close()
        await two.connection.close()
    assert isinstance(answer, Conflict) and answer.kind == "waitpoint_already_exists"
    await world.engine.complete(second.handle)


async def test_a_token_is_never_printed_by_accident(world: SuspendingWorld) -> None:
    wait = await world.pend("a.b")
    made = await world.engine.create_waitpoint(wait.handle, "c", HOUR)
    answer = await world.suspend_on_pending(wait)
    for thing in (made, made.token, answer, wait.point.token, [answer], {"details": answer.details}):
        for printed in (str(thing), repr(thing), f"{thing}"):
            for token in (made.token, wait.point.token):
                assert token.reveal().split(":")[1][:16] not in printed
    assert str(wait.point.token) == "k1:<REDACTED:len=64>"
    assert str(WaitpointToken("nonsense")) == "<REDACTED:malformed>"
    # A dot is allowed in the name of a key, a colon is not.
    assert isinstance((await world.engine.rotate_waitpoint_hmac_secret_all("k.2", KEY_A))[0].result, Rotated)
    assert await outcome(world.engine.rotate_waitpoint_hmac_secret_all("k:3", KEY_A)) == "invalid_kid"
