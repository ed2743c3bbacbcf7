"""Which operation writes which events, and what their bodies contain: tables, each row tried."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, NamedTuple, get_args

import pytest

import flowfabric as ff
from flowfabric.errors import FlowFabricError
from flowfabric.values.conditions import count_signals
from flowfabric.values.event import (
    FAMILIES,
    CompletionEvent,
    Event,
    Family,
    LeaseEvent,
    OperatorEvent,
    RegistryEvent,
    SignalEvent,
)
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, TimeoutPolicy
from flowfabric.values.wait import AlreadySatisfied
from tests.each import each
from tests.sql.flowing import empty_flow, submitted
from tests.sql.suspending import SuspendingWorld as World
from tests.sql.test_subscriptions import COLUMNS
from tests.support import OTHER, claim_one

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.both_servers]
SOON = timedelta(seconds=30)
RETRY = ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(5))
TIMED = {"policy": ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=5))}
TIMED_AGAIN = {"policy": ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=5), retry_policy=RETRY)}
ONCE = {"policy": ExecutionPolicy(max_reclaim_count=0)}
DEADLINE = {"execution_deadline_at": timedelta(seconds=15)}

# ---- the operations. Each returns what is to be done, once everything before it is done.

Then = Callable[[], Awaitable[Any]]


async def hold(world: World, **fields: Any) -> ff.Handle:
    return (await world.hold(lease_ttl=SOON, **fields)).handle


async def create(world: World) -> Then:
    return lambda: world.engine.create_execution(execution_kind="test")


async def promote(world: World) -> Then:
    later = await world.engine.create_execution(execution_kind="test", delay_until=SOON)
    await world.clock.advance(seconds=31)
    return lambda: world.engine.promote_delayed(later.execution_id)


async def claim(world: World) -> Then:
    await world.engine.create_execution(execution_kind="test")
    return lambda: claim_one(world.engine)


async def claim_resumed(world: World) -> Then:
    wait = await world.suspend()
    await world.accept(wait)
    return lambda: world.reclaim_resumed(wait)


async def renew(world: World) -> Then:
    handle = await hold(world)
    return lambda: world.engine.renew(handle)


async def expire(world: World) -> Then:
    handle = await hold(world)
    await world.clock.advance(seconds=31)
    return lambda: world.engine.mark_lease_expired_if_due(handle.execution_id)


async def reclaim(world: World) -> Then:
    await (await expire(world))()
    return lambda: world.engine.claim(**OTHER)


async def reclaim_once_too_often(world: World) -> Then:
    handle = await hold(world, **ONCE)
    await world.clock.advance(seconds=31)
    await world.engine.mark_lease_expired_if_due(handle.execution_id)
    return lambda: world.engine.claim(**OTHER)


async def revoke(world: World) -> Then:
    handle = await hold(world)
    return lambda: world.engine.revoke_lease(handle.execution_id, reason="maintenance")


async def complete(world: World) -> Then:
    handle = await hold(world)
    return lambda: world.engine.complete(handle)


async def complete_what_another_waits_for(world: World) -> Then:
    """The other one becomes claimable, which is no event."""
    waiting, awaited = await hold(world), await hold(world)
    await world.engine.park(waiting, ends_of=[awaited.execution_id])
    return lambda: world.engine.complete(awaited)


async def fail_and_retry(world: World) -> Then:
    handle = await hold(world)
    return lambda: world.engine.fail(handle, "no", retry_policy=RETRY)


async def fail(world: World) -> Then:
    handle = await hold(world)
    return lambda: world.engine.fail(handle, "no", failure_class="permanent")


async def suspend(world: World) -> Then:
    wait = await world.hold()
    return lambda: world.suspend(of=wait)


async def suspend_on_a_signal_that_came(world: World) -> Then:
    wait = await world.pend()
    await world.accept(wait)

    async def then() -> None:
        assert isinstance(await world.suspend_on_pending(wait), AlreadySatisfied)

    return then


async def delay(world: World) -> Then:
    handle = await hold(world)
    return lambda: world.engine.delay(handle, SOON)


async def park(world: World) -> Then:
    handle = await hold(world)
    until = await world.in_an_hour()
    return lambda: world.engine.park(handle, until=until)


async def park_for_another(world: World) -> Then:
    handle = await hold(world)
    other = await world.engine.create_execution(execution_kind="test")
    return lambda: world.engine.park(handle, ends_of=[other.execution_id])


async def pause_for_budget(world: World) -> Then:
    handle = await hold(world)
    small = await world.engine.create_budget(name="small", dimensions=["t"], hard_limits=[1], soft_limits=[0])
    return lambda: world.engine.pause_for_budget(handle, {"t": 2}, small.budget_id)


async def stop_changed(world: World) -> Then:
    handle = await hold(world)
    return lambda: world.engine.stop_changed(handle, detail="recorded: a", digest="new")


async def wait_for_children(world: World) -> Then:
    handle = await hold(world)
    return lambda: world.engine.wait_children(handle)


async def release(world: World) -> Then:
    handle = await hold(world)
    return lambda: world.engine.release(handle)


async def cancel_by_its_holder(world: World) -> Then:
    handle = await hold(world)
    return lambda: world.engine.cancel(handle, "no")


async def cancel_by_an_operator(world: World) -> Then:
    handle = await hold(world)
    return lambda: world.engine.cancel(Operator(handle.execution_id), "no")


async def cancel_without_lease(world: World) -> Then:
    waiting = await world.engine.create_execution(execution_kind="test")
    return lambda: world.engine.cancel(Operator(waiting.execution_id), "no")


async def attempt_timeout_with_retries(world: World) -> Then:
    handle = await hold(world, **TIMED_AGAIN)
    await world.clock.advance(seconds=6)
    return lambda: world.engine.expire_execution(handle.execution_id, "attempt_timeout")


async def attempt_timeout(world: World) -> Then:
    handle = await hold(world, **TIMED)
    await world.clock.advance(seconds=6)
    return lambda: world.engine.expire_execution(handle.execution_id, "attempt_timeout")


async def deadline(world: World) -> Then:
    handle = await hold(world, **DEADLINE)
    await world.clock.advance(seconds=20)
    return lambda: world.engine.expire_execution(handle.execution_id, "execution_deadline")


def suspension_timeout(behavior: str) -> Callable[[World], Awaitable[Then]]:
    async def made(world: World) -> Then:
        wait = await world.suspend(timeout_at=await world.in_an_hour(), timeout_behavior=behavior)
        await world.clock.advance(hours=1, seconds=1)
        return lambda: world.engine.expire_suspension(wait.id)

    made.__name__ = f"suspension timeout {behavior}"
    return made


async def signal(world: World) -> Then:
    wait = await world.suspend()
    return lambda: world.accept(wait, source_identity="me")


async def signal_for_later(world: World) -> Then:
    wait = await world.pend()
    return lambda: world.accept(wait)


async def signal_of_two(world: World) -> Then:
    wait = await world.suspend(count_signals(2, "k"))
    return lambda: world.accept(wait)


async def signal_again(world: World) -> Then:
    wait = await world.suspend()
    await world.accept(wait, idempotency_key="one")
    return lambda: world.send(wait, idempotency_key="one")


async def approve(world: World) -> Then:
    wait = await world.suspend()
    return lambda: world.approve(wait)


async def refused_signal(world: World) -> Then:
    wait = await world.suspend()

    async def then() -> None:
        with pytest.raises(FlowFabricError):
            await world.send(wait, waitpoint_token="forged")

    return then


async def resume(world: World) -> Then:
    wait = await world.suspend()
    return lambda: world.engine.resume_execution(wait.id)


async def apply_dependency(world: World) -> Then:
    flow = await empty_flow(world.engine, "a", "b")
    await flow.stage("a", "b")
    return lambda: flow.apply("a", "b")


async def satisfy_dependency(world: World) -> Then:
    flow = await submitted(world.engine, {"a": (), "b": ("a",)})
    held = await flow.claim("a")

    async def then() -> None:
        await world.engine.complete(held.handle)
        await flow.drain()
        assert await flow.claimable("b")

    return then


async def impossible(world: World) -> Then:
    flow = await empty_flow(world.engine, "a", "b")
    await flow.stage("a", "b")
    await flow.fail("a")

    async def then() -> None:
        await flow.apply("a", "b")
        await flow.drain()

    return then


async def impossible_while_leased(world: World) -> Then:
    """A worker holds an execution that gets a dependency only then."""
    flow = await empty_flow(world.engine, "a", "b")
    await flow.claim("b")
    await flow.stage("a", "b")
    await flow.fail("a")

    async def then() -> None:
        await flow.apply("a", "b")
        await flow.drain()

    return then


async def impossible_after_its_lease_was_revoked(world: World) -> Then:
    flow = await empty_flow(world.engine, "a", "b")
    await flow.claim("b")
    await world.engine.revoke_lease(flow["b"], reason="maintenance")
    await flow.stage("a", "b")
    await flow.fail("a")

    async def then() -> None:
        await flow.apply("a", "b")
        await flow.drain()

    return then


async def change_priority(world: World) -> Then:
    waiting = await world.engine.create_execution(execution_kind="test")
    return lambda: world.engine.change_priority(waiting.execution_id, 5)


async def replay(world: World) -> Then:
    handle = await hold(world)
    await world.engine.complete(handle)
    return lambda: world.engine.replay_execution(handle.execution_id)


async def replay_of_a_skipped_member(world: World) -> Then:
    flow = await submitted(world.engine, {"a": (), "b": ("a",)})
    await flow.fail("a")
    await flow.drain()
    return lambda: world.engine.replay_execution(flow["b"])


async def request_flow_cancel(world: World) -> Then:
    flow = await submitted(world.engine, {"a": ()})
    return lambda: world.engine.cancel_flow_header(flow.id, reason="enough")


async def acknowledge_flow_cancel(world: World) -> Then:
    flow = await submitted(world.engine, {"a": ()})
    await world.engine.cancel_flow_header(flow.id)
    await world.engine.cancel(Operator(flow["a"], "flow_cascade"), "flow_cancelled")
    return lambda: world.engine.ack_cancel_member(flow.id, flow["a"])


async def end_again(world: World) -> Then:
    """An execution that is replayed and ends again."""
    await (await replay(world))()
    held = await claim_one(world.engine)
    return lambda: world.engine.complete(held.handle)


async def register(world: World) -> Then:
    return lambda: world.engine.register_worker("w", "w-1", lanes=["default"], liveness_ttl=SOON, namespace="n")


async def beat(world: World) -> Then:
    await (await register(world))()
    return lambda: world.engine.heartbeat_worker("w-1", namespace="n")


async def mark_dead(world: World) -> Then:
    await (await register(world))()
    return lambda: world.engine.mark_worker_dead("w-1", reason="broken", namespace="n")


async def sweep_dead(world: World) -> Then:
    await (await register(world))()
    await world.clock.advance(seconds=31)
    return lambda: world.engine.sweep_workers()


# The operation, and its events by family: the word, and for a lease the reason and by whom.
MATRIX: list[tuple[Callable[[World], Awaitable[Then]], dict[str, tuple[str | None, ...]]]] = [
    (create, {}),
    (promote, {}),
    (claim, {"lease": ("acquired", None, None)}),
    (claim_resumed, {"lease": ("acquired", "claim_resumed", None)}),
    (renew, {"lease": ("renewed", None, None)}),
    (expire, {"lease": ("expired", "lease_expired", None)}),
    (reclaim, {"lease": ("reclaimed", None, None)}),
    (reclaim_once_too_often, {"lease": ("revoked", "max_reclaims_exceeded", "reconciler"), "completion": ("failed",)}),
    (revoke, {"lease": ("revoked", "maintenance", "operator")}),
    (complete, {"lease": ("revoked", "completed", "backend"), "completion": ("success",)}),
    (complete_what_another_waits_for, {"lease": ("revoked", "completed", "backend"), "completion": ("success",)}),
    (fail_and_retry, {"lease": ("revoked", "failed_retry_scheduled", "backend")}),
    (fail, {"lease": ("revoked", "failed_terminal", "backend"), "completion": ("failed",)}),
    (suspend, {"lease": ("revoked", "suspend", "backend")}),
    (suspend_on_a_signal_that_came, {}),
    (delay, {"lease": ("revoked", "worker_delay", "backend")}),
    (wait_for_children, {"lease": ("revoked", "waiting_children", "backend")}),
    (park, {"lease": ("revoked", "worker_park", "backend")}),
    (park_for_another, {"lease": ("revoked", "worker_park", "backend")}),
    (pause_for_budget, {"lease": ("revoked", "waiting_for_budget", "backend")}),
    (stop_changed, {"lease": ("revoked", "steps_changed", "backend")}),
    (release, {"lease": ("revoked", "worker_release", "backend")}),
    (cancel_by_its_holder, {"lease": ("revoked", "cancelled", "backend"), "completion": ("cancelled",)}),
    (cancel_by_an_operator, {"lease": ("revoked", "cancelled", "operator"), "completion": ("cancelled",)}),
    (cancel_without_lease, {"completion": ("cancelled",)}),
    (attempt_timeout_with_retries, {"lease": ("revoked", "expired:attempt_timeout", "reconciler")}),
    (attempt_timeout, {"lease": ("revoked", "expired:attempt_timeout", "reconciler"), "completion": ("expired",)}),
    (deadline, {"lease": ("revoked", "expired:execution_deadline", "reconciler"), "completion": ("expired",)}),
    (suspension_timeout("fail"), {"completion": ("failed",)}),
    (suspension_timeout("cancel"), {"completion": ("cancelled",)}),
    (suspension_timeout("expire"), {"completion": ("expired",)}),
    (suspension_timeout("auto_resume_with_timeout_signal"), {}),
    (suspension_timeout("escalate"), {"operator": ("suspension_escalated",)}),
    (signal, {"signal": ("resume_condition_satisfied",)}),
    (signal_for_later, {"signal": ("buffered_for_pending_waitpoint",)}),
    (signal_of_two, {"signal": ("appended_to_waitpoint",)}),
    (signal_again, {"signal": ("deduped",)}),
    (approve, {"signal": ("resume_condition_satisfied",)}),
    (refused_signal, {}),
    (resume, {"operator": ("resumed",)}),
    (apply_dependency, {}),
    (satisfy_dependency, {"lease": ("revoked", "completed", "backend"), "completion": ("success",)}),
    (impossible, {"completion": ("skipped",)}),
    (
        impossible_while_leased,
        {"lease": ("revoked", "dependency_impossible", "reconciler"), "completion": ("skipped",)},
    ),
    (impossible_after_its_lease_was_revoked, {"completion": ("skipped",)}),
    (change_priority, {"operator": ("priority_changed",)}),
    (replay, {"operator": ("replayed",)}),
    (replay_of_a_skipped_member, {"operator": ("replayed",)}),
    (request_flow_cancel, {"operator": ("flow_cancel_requested",)}),
    (acknowledge_flow_cancel, {}),
    (end_again, {"lease": ("revoked", "completed", "backend"), "completion": ("success",)}),
    (register, {"worker": ("registered",)}),
    (beat, {"worker": ("heartbeat",)}),
    (mark_dead, {"worker": ("marked_dead",)}),
    (sweep_dead, {"worker": ("ttl_swept",)}),
]


async def written(world: World, prepare: Callable[[World], Awaitable[Then]]) -> list[Event]:
    """The events of an operation alone. What subscriptions make of them has the same values."""
    await world.wipe()
    then = await prepare(world)
    before = (await world.engine.count_events()).cursor
    await then()
    for family, body in BODIES.items():
        rows = (await world.engine.read_events(family=family, after=before)).items
        if rows:
            options = {"heartbeats": True} if family == "worker" else {}
            async with await getattr(world.engine, body.subscription)(after=before, **options) as events:
                for row in rows:
                    compare(await anext(events), row, family)
    return list((await world.engine.read_events(after=before)).items)


def compare(event: Any, row: Event, family: Family) -> None:
    """The typed event has the word and the values of the row, and what its word says that it has."""
    body = BODIES[family]
    assert type(event) is body.kind
    word = getattr(row, COLUMNS[family])
    expected = {name: getattr(row, name, (row.details or {}).get(name)) for name in ENVELOPE | body.fields}
    if "details" in body.fields:
        expected["details"] = row.details or {}
    assert {name: getattr(event, name) for name in event.__struct_fields__} == {body.word: word, **expected}
    assert [name for name in body.words[word] if getattr(event, name) in (None, {})] == []


@each(("prepare", "expected"), MATRIX)
async def test_each_operation_writes_the_events_of_the_matrix_and_no_others(
    world: World, prepare: Callable[[World], Awaitable[Then]], expected: dict[str, tuple[str | None, ...]]
) -> None:
    found: dict[str, tuple[str | None, ...]] = {}
    for event in await written(world, prepare):
        for family in event.families:
            assert family not in found, f"two events of {family}"
            more = (event.reason, event.revoked_by) if family == "lease" else ()
            found[family] = (getattr(event, COLUMNS[family]), *more)
    assert found == expected, prepare.__name__


async def change_budget(world: World) -> Then:
    budget = await limited(world)
    return lambda: world.engine.update_budget(budget, raise_by={"t": 1})


async def pass_soft_limit(world: World) -> Then:
    budget = await limited(world)
    return lambda: use(world, budget, 6)


async def exhaust(world: World) -> Then:
    budget = await limited(world)
    await use(world, budget, 6)
    return lambda: use(world, budget, 4)


async def reset_exhausted(world: World) -> Then:
    budget = await limited(world)
    await use(world, budget, 10)
    return lambda: world.engine.reset_budget(budget)


async def change_quota(world: World) -> Then:
    made = await world.engine.create_quota_policy(name="q", max_concurrent=1)
    return lambda: world.engine.update_quota_policy(made.quota_policy_id, max_concurrent=2)


async def limited(world: World) -> Any:
    """A budget with a soft limit of 5 and a hard one of 10."""
    made = await world.engine.create_budget(name="b", dimensions=["t"], hard_limits=[10], soft_limits=[5])
    return made.budget_id


async def use(world: World, budget: Any, amount: int) -> Any:
    return await world.engine.report_usage_admin(budget, dimensions=["t"], deltas=[amount])


# The events of limits, all of the operator family: a reset may be two.
LIMITS: list[tuple[Callable[[World], Awaitable[Then]], list[str]]] = [
    (change_budget, ["budget_changed"]),
    (pass_soft_limit, ["budget_soft_limit_reached"]),
    (exhaust, ["budget_exhausted"]),
    (reset_exhausted, ["budget_reopened", "budget_reset"]),
    (change_quota, ["quota_policy_changed"]),
]


@each(("prepare", "words"), LIMITS)
async def test_limits_write_events_of_operators(
    world: World, prepare: Callable[[World], Awaitable[Then]], words: list[str]
) -> None:
    found = await written(world, prepare)
    assert [(event.families, event.operator_type) for event in found] == [(("operator",), word) for word in words]


# The details of each type of operator events.
DETAILS: list[tuple[Callable[[World], Awaitable[Then]], set[str]]] = [
    (change_priority, {"old_priority", "new_priority"}),
    (replay, {"branch"}),
    (replay_of_a_skipped_member, {"branch", "groups_reset"}),
    (request_flow_cancel, {"flow_id", "cancellation_policy", "reason", "member_count"}),
    (resume, {"trigger_type", "suspension_id", "resume_delay_ms"}),
    (suspension_timeout("escalate"), {"suspension_id", "timeout_at"}),
]


@each(("prepare", "fields"), DETAILS)
async def test_operator_events_have_the_details_of_their_type(
    world: World, prepare: Callable[[World], Awaitable[Then]], fields: set[str]
) -> None:
    (event,) = await written(world, prepare)
    details = dict(event.details or {})
    if event.flow_id is not None:
        details.setdefault("flow_id", event.flow_id)
    if event.reason is not None:
        details.setdefault("reason", event.reason)
    assert fields <= set(details), prepare.__name__


class Body(NamedTuple):
    """Of a family: its subscription, its type, the field with its word, the other fields of its body, and its words.

    Each word with the fields that its events always have.
    """

    subscription: str
    kind: Any
    word: str
    fields: set[str]
    words: dict[str, set[str]]


ENVELOPE = {"cursor", "occurred_at", "execution_id", "flow_id", "namespace", "tags", "lane_id", "execution_kind"}
ABOUT = {"execution_id", "namespace", "lane_id", "execution_kind"}
LEASE = {"lease_id", "lease_epoch", "attempt_id", "attempt_index", "worker_id", "worker_instance_id"}
SIGNAL = {"signal_id", "waitpoint_id"}
WORKER = {"namespace", "worker_id", "worker_instance_id"}
BODIES: dict[Family, Body] = {
    "completion": Body(
        "subscribe_completion",
        CompletionEvent,
        "outcome",
        {"attempt_index", "parent_id"},
        {
            "success": ABOUT | {"attempt_index"},
            "failed": ABOUT | {"attempt_index"},
            "cancelled": ABOUT,
            "expired": ABOUT,
            "skipped": ABOUT | {"flow_id"},
        },
    ),
    "lease": Body(
        "subscribe_lease_history",
        LeaseEvent,
        "event_type",
        LEASE | {"reason", "revoked_by"},
        {
            "acquired": ABOUT | LEASE,
            "renewed": ABOUT | LEASE,
            "expired": ABOUT | LEASE | {"reason"},
            "reclaimed": ABOUT | LEASE,
            "revoked": ABOUT | LEASE | {"reason", "revoked_by"},
        },
    ),
    "signal": Body(
        "subscribe_signal_delivery",
        SignalEvent,
        "effect",
        SIGNAL | {"source_identity"},
        # The words with which the call answers.
        {
            "resume_condition_satisfied": ABOUT | SIGNAL,
            "appended_to_waitpoint": ABOUT | SIGNAL,
            "buffered_for_pending_waitpoint": ABOUT | SIGNAL,
            "deduped": ABOUT | SIGNAL,
        },
    ),
    "operator": Body(
        "subscribe_operator_events",
        OperatorEvent,
        "event_type",
        {"details", "reason", "actor"},
        {
            "priority_changed": ABOUT | {"details"},
            "replayed": ABOUT | {"details"},
            "flow_cancel_requested": {"flow_id", "namespace", "reason", "details"},
            "resumed": ABOUT | {"details"},
            "suspension_escalated": ABOUT | {"details"},
            "budget_changed": {"details"},
            "budget_reset": {"details"},
            "budget_soft_limit_reached": {"details"},
            "budget_exhausted": {"details"},
            "budget_reopened": {"details"},
            "quota_policy_changed": {"details"},
        },
    ),
    "worker": Body(
        "subscribe_worker_events",
        RegistryEvent,
        "event_type",
        {"worker_id", "worker_instance_id", "reason"},
        {"registered": WORKER, "heartbeat": WORKER, "marked_dead": WORKER | {"reason"}, "ttl_swept": WORKER},
    ),
}


async def test_the_tables_have_every_family_every_word_and_every_field() -> None:
    """The operations above write all words of the bodies, and no others."""
    assert set(BODIES) == set(FAMILIES) == set(get_args(Family)) == set(COLUMNS)
    for family, body in BODIES.items():
        assert set(body.kind.__struct_fields__) == ENVELOPE | body.fields | {body.word}
        used = {expected[family][0] for _, expected in MATRIX if family in expected}
        if family == "operator":
            used |= {word for _, words in LIMITS for word in words}
        assert used == set(body.words), family


async def test_no_event_contains_a_token_a_secret_or_the_payload_of_a_signal(world: World) -> None:
    said = b'"a secret payload"'
    waits = [await world.suspend(), await world.pend()]
    for wait in waits:
        for _ in range(2):
            await world.send(wait, payload=said, idempotency_key="one", source_identity="me")
    await world.approve(await world.suspend())
    stored = await world.sql.fetchval("select string_agg(e::text, ' ') from flowfabric.event e")
    assert stored.count("deduped") == 2
    assert "secret" not in stored
    assert said.hex() not in stored
    for wait in waits:
        token = wait.point.token.reveal()
        assert token not in stored
        assert token.split(":")[-1] not in stored
