"""What the audit says when rows of executions, attempts, leases or events are damaged: every rule finds its own."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from importlib import resources
from typing import Any

import pytest

from flowfabric.values.conditions import on
from flowfabric.values.ids import mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, TimeoutPolicy
from flowfabric.values.wait import Fresh
from tests.each import Rows
from tests.ids import home
from tests.interleave import Party, Stage
from tests.sql import test_fleet, test_flow_audit, test_limit_audit, test_streams, test_suspension_audit
from tests.sql.damage import finds, found, one_party  # noqa: F401 - a fixture among them
from tests.support import STATES, WORKER, claim_one, started, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOUR = timedelta(hours=1)
CAPPED = ExecutionPolicy(max_reclaim_count=0)
TIMED = ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=timedelta(seconds=10)))


# Where the damage is done: the states that an execution can be in, and these


async def _retried(stage: Stage, engine: Party) -> None:
    """A second attempt runs."""
    await STATES["W.r"](engine, stage.clock)
    await claim_one(engine)


async def _reclaimed(stage: Stage, engine: Party) -> None:
    await STATES["X"](engine, stage.clock)
    await claim_one(engine)


async def _renewed(stage: Stage, engine: Party) -> None:
    """The timer of the lease is earlier than its end."""
    at = await STATES["A"](engine, stage.clock)
    await stage.clock.advance(seconds=1)
    await engine.renew(at.handle)


async def _replayed(stage: Stage, engine: Party) -> None:
    """It succeeded, was replayed and failed."""
    await STATES["W.p"](engine, stage.clock)
    await engine.fail((await claim_one(engine)).handle, "boom", failure_class="permanent")


async def _given_up(stage: Stage, engine: Party) -> None:
    """Its lease lapsed, it was cancelled before a worker took it over, and runs again."""
    at = await STATES["X"](engine, stage.clock)
    await engine.cancel(Operator(at.id), "enough")
    await engine.replay_execution(at.id)
    await claim_one(engine)


async def _capped(stage: Stage, engine: Party) -> None:
    """The lease was lost once too often, first by time, then by an operator."""
    lapsed = await started(engine, policy=CAPPED)
    await stage.clock.advance(seconds=31)
    await engine.mark_lease_expired_if_due(lapsed.execution_id)
    assert await engine.claim(**WORKER) is None
    revoked = await started(engine, policy=CAPPED)
    await engine.revoke_lease(revoked.execution_id)
    assert await engine.claim(**WORKER) is None


async def _granted(stage: Stage, engine: Party) -> None:
    await engine.issue_claim_grant(await submit(engine), **WORKER)


async def _granted_again(stage: Stage, engine: Party) -> None:
    await engine.issue_claim_grant((await STATES["W.s"](engine, stage.clock)).id, **WORKER)


async def _reclaim_granted(stage: Stage, engine: Party) -> None:
    await engine.issue_reclaim_grant((await STATES["V"](engine, stage.clock)).id, **WORKER)


async def _grant_lapsed(stage: Stage, engine: Party) -> None:
    """It was not used, and the execution was claimed in another way."""
    await _granted(stage, engine)
    await stage.clock.advance(seconds=6)
    await claim_one(engine)


async def _grant_forgotten(stage: Stage, engine: Party) -> None:
    """A lapsed grant was deleted; the ready row still says until when it was hidden."""
    await _granted(stage, engine)
    await stage.clock.advance(seconds=6)
    await stage.watch.execute("delete from flowfabric.claim_grant")


async def _tagged(stage: Stage, engine: Party) -> None:
    await submit(engine, tags={"a": "1", "b": "2"})


async def _timed(stage: Stage, engine: Party) -> None:
    await started(engine, policy=TIMED, execution_deadline_at=HOUR)


async def _versioned(stage: Stage, engine: Party) -> None:
    """It began with a version, and waits for a worker that serves it."""
    await submit(engine)
    await engine.release((await claim_one(engine, kinds={"test": [2]})).handle)


async def _dated(stage: Stage, engine: Party) -> None:
    await submit(engine, execution_deadline_at=HOUR)


async def _kept_longer(stage: Stage, engine: Party) -> None:
    """It ended before the retention was shortened."""
    await STATES["T:completed"](engine, stage.clock)
    await stage.watch.execute("update flowfabric.deployment set retention = '1 h'")


async def _floored(stage: Stage, engine: Party) -> None:
    """The floor of the route is the first of two rows."""
    await submit(engine)
    await stage.watch.execute(
        "insert into flowfabric.ready_floor select 'default', route, rank, created_at, id from flowfabric.ready"
    )
    await submit(engine)


async def _suspended_for_budget(stage: Stage, engine: Party) -> None:
    """A suspension with a reason that would be listed in another state."""
    at = await STATES["A"](engine, stage.clock)
    await engine.suspend(
        at.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"), reason_code="paused_by_budget"
    )


PLACES: dict[str, Callable[[Stage, Party], Awaitable[Any]]] = {
    "retried": _retried,
    "reclaimed": _reclaimed,
    "renewed": _renewed,
    "replayed": _replayed,
    "given up": _given_up,
    "capped": _capped,
    "granted": _granted,
    "granted again": _granted_again,
    "reclaim granted": _reclaim_granted,
    "grant lapsed": _grant_lapsed,
    "grant forgotten": _grant_forgotten,
    "tagged": _tagged,
    "timed": _timed,
    "dated": _dated,
    "versioned": _versioned,
    "kept longer": _kept_longer,
    "floored": _floored,
    "suspended for budget": _suspended_for_budget,
}


# The damage: per place, for each rule that must say so, what is changed


def _set(table: str, *changes: str) -> list[str]:
    return [f"update flowfabric.{table} set {change}" for change in changes]


def _execution(*changes: str) -> list[str]:
    return _set("execution", *changes)


_READY = (
    "insert into flowfabric.ready (route, rank, created_at, id, partition, available_at)"
    " select route, flowfabric.rank_of(priority), created_at, id, partition, case when state = 'active' then now() end"
    " from flowfabric.execution"
)


def _elsewhere(table: str) -> str:
    """In the route of the execution itself, where any worker of its kind would claim it."""
    return f"update flowfabric.{table} set route = e.route from flowfabric.execution e"


_LISTED = "insert into flowfabric.{0} select {1}, created_at, id, partition from flowfabric.execution"
_ENDED_ROW = (
    "insert into flowfabric.unsuccessful select '{0}', created_at, coalesce(completed_at, now()), id, partition"
    " from flowfabric.execution"
)
_BLOCKED = _LISTED.format("blocked", "blocking_reason")
_NO_LEASE_EVENTS = "delete from flowfabric.event where lease_type is not null"
_NO_END = "delete from flowfabric.event where outcome is not null"
_NO_REVOCATION = "delete from flowfabric.event where lease_type = 'revoked'"


def _is_not_in_order(*words: str) -> list[str]:
    return [f"update flowfabric.event set lease_type = '{word}' where lease_type is not null" for word in words]


def _no_timer(kind: str) -> dict[str, list[str]]:
    later = f"update flowfabric.timer set due_at = due_at + '1 h'::interval where kind = '{kind}'"
    return {f"timer_{kind}": [f"delete from flowfabric.timer where kind = '{kind}'", later]}


_ENDED = {
    "unsuccessful_row": [
        "delete from flowfabric.unsuccessful",
        *_set("unsuccessful", "state = 'odd'", "created_at = created_at + '1 s'::interval"),
        *_set("unsuccessful", "ended_at = ended_at + '1 s'::interval"),
        *_set("unsuccessful", "id = gen_random_uuid()", "partition = partition + 1"),
    ],
    "completion_events": [_NO_END],
    "last_outcome": [_NO_END, *_set("event", "outcome = 'success' where outcome is not null")],
    "attempt_open": _execution("disposition = null", "disposition = 'reclaimed'"),
    "completed_at": _execution("completed_at = null", "state = 'waiting'"),
    "timer_retention": ["delete from flowfabric.timer where kind = 'retention'"],
}


def _blocked(other: str, **more: list[str]) -> dict[str, list[str]]:
    return {
        "blocked_row": [
            "delete from flowfabric.blocked",
            *_set("blocked", f"blocking_reason = '{other}'", "created_at = created_at + '1 s'::interval"),
            *_execution(f"blocking_reason = '{other}'", "state = 'active'"),
        ],
        "blocked_orphan": [
            *_set("blocked", "id = gen_random_uuid()", "partition = partition + 1", f"blocking_reason = '{other}'"),
            *_execution(f"blocking_reason = '{other}'"),
        ],
        **more,
    }


DAMAGES: dict[str, dict[str, list[str]]] = {
    "W.1": {
        "facts_known": _execution("pending = 'second'", "priority = 9001", "priority = -1"),
        "state_facts": _execution(
            "state = 'odd'", "lease_lost = 'expired'", "pending = null", "delay_until = now()", "state = 'resumable'",
            "blocking_detail = 'x'", "blocking_reason = 'waiting_for_budget', blocking_detail = 'x'",
            "blocking_reason = null", "state = 'suspended'", "state = 'rate_limited'", "state = 'waiting_children'",
            "state = 'delayed'", "state = 'active'", "state = 'completed'",
        ),
        "completed_at": _execution("completed_at = now()"),
        "pending_agrees_with_attempts": _execution("attempts = 1", "pending = 'retry'", "pending = 'interrupted'"),
        "times_ordered": _execution(
            "mutated_at = transitioned_at - '1 s'::interval", "created_at = transitioned_at + '1 s'::interval"
        ),
        "lane_registered": _execution("route = 0"),
        "ready_row": [
            "delete from flowfabric.ready",
            *_set("ready", "rank = rank + 1", "route = route + 1", "created_at = created_at + '1 s'::interval"),
            *_set("ready", "deadline_at = now()", "available_at = now()", "partition = partition + 1"),
            *_execution("priority = 5", "state = 'delayed'", "blocking_reason = 'paused_by_operator'"),
        ],
        "ready_orphan": _set("ready", "id = gen_random_uuid()", "partition = partition + 1"),
        "ready_below_floor": [
            "delete from flowfabric.ready_floor",
            *_set("ready_floor", "rank = rank + 1", "created_at = created_at + '1 s'::interval"),
            *_set("ready_floor", "id = ('f' || repeat('0', 31))::uuid", "route = route + 1", "lane = 'other'"),
        ],
        "blocked_row": [_BLOCKED],
        "blocked_orphan": [_LISTED.format("blocked", "'waiting_for_budget'")],
        "unsuccessful_row": [
            _ENDED_ROW.format(state) for state in ("failed", "cancelled", "expired", "skipped")
        ],
        "tag_rows": [_LISTED.format("tag", "7")],
        "attempt_history": _execution(
            "attempts = 1", "attempts = 2", "attempt_index = 0", "attempt_id = id", "lease_id = id"
        ),
        "reclaims_counted": _execution("reclaims = 1"),
        "retries_counted": _execution("retries = 1"),
        "completion_events": _execution("replays = 1"),
        "replayed_events": _execution("replays = 1"),
        "lease_epochs": _execution("epoch = 1"),
        "grant_hides": _set("ready", "granted_until = now() + '1 h'::interval"),
    },
    "W.i": {
        "attempt_open": _execution("disposition = 'terminal_failed'"),
        "pending_agrees_with_attempts": _execution("pending = 'first'", "attempts = 0"),
        "leased_last_event": [_NO_REVOCATION],
        "ready_row": ["delete from flowfabric.ready"],
    },
    "W.s": {
        "ready_row": ["delete from flowfabric.ready"],
        "state_facts": _execution(
            "resume_pending = false", "state = 'waiting'",
            "blocking_reason = 'paused_by_operator', blocking_detail = 'x'",
        ),
    },
    "W.r": {"pending_agrees_with_attempts": _execution("pending = 'first'")},
    "W.p": {
        "replayed_events": [
            "delete from flowfabric.event where operator_type = 'replayed'", *_execution("replays = 0"),
        ],
        "completion_events": [_NO_END, *_execution("replays = 0", "completed_at = now()")],
    },
    "D.1": {
        **_no_timer("delay"),
        "ready_row": [_READY],
        "state_facts": _execution(
            "lease_lost = 'expired'", "delay_until = null", "blocking_detail = ''", "pending = 'retry'",
            "blocking_reason = 'waiting_for_retry_backoff'", "state = 'waiting'",
        ),
    },
    "D.r": {
        **_no_timer("delay"),
        "retries_counted": _execution("retries = 0"),
        "attempt_open": _execution("disposition = null", "disposition = 'reclaimed'"),
        "leased_last_event": [_NO_REVOCATION],
        "state_facts": _execution(
            "pending = 'first'", "pending = 'interrupted'", "blocking_reason = 'waiting_for_delay'"
        ),
    },
    "D.s": {"state_facts": _execution("pending = 'retry'", "pending = 'first'")},
    "B.budget": _blocked("waiting_for_quota",
        state_facts=_execution("lease_lost = 'expired'", "pending = null", "blocking_reason = 'waiting_for_worker'"),
        ready_row=[_READY],
    ),
    "B.quota": _blocked("waiting_for_budget"),
    "B.route": _blocked("paused_by_operator",
        ready_row=["delete from flowfabric.ready"],
        state_facts=_execution("blocking_detail = ''", "blocking_detail = null"),
    ),
    "B.operator": _blocked("paused_by_policy", ready_row=[_READY]),
    "B.lane": _blocked("paused_by_operator", state_facts=_execution("blocking_detail = ''")),
    "B.changed": _blocked("paused_by_operator",
        **_no_timer("delay"),
        ready_row=["delete from flowfabric.ready", _elsewhere("ready")],
        state_facts=_execution("delay_until = null", "stop_epoch = 7", "pending = 'retry'", "state = 'delayed'"),
        derived_route=_execution("stop_digests = '{other}'", "stop_route = route"),
        leased_last_event=[_NO_REVOCATION],
    ),
    "versioned": {
        "derived_route": _execution("pinned = route", "pinned = 0", "stop_route = pinned"),
        "ready_row": ["delete from flowfabric.ready", _elsewhere("ready")],
    },
    "A": {
        **_no_timer("lease"),
        "times_finite": _execution("lease_expires_at = 'infinity'", "deadline_at = 'infinity'"),
        "state_facts": _execution(
            "blocking_reason = 'waiting_for_worker'", "blocking_detail = 'x'", "pending = 'interrupted'",
            "delay_until = now()", "resume_pending = true", "lease_id = null", "worker = null",
            "attempt_started_at = null", "lease_expires_at = null", "attempt_id = null", "lease_lost = 'expired'",
        ),
        "facts_known": _execution("lease_lost = 'stolen'"),
        "ready_row": [_READY],
        "attempt_history": _execution("attempt_index = 1", "attempt_index = null", "attempt_id = null", "attempts = 0"),
        "attempt_open": _execution("disposition = 'completed'", "disposition = 'reclaimed'"),
        "reclaims_counted": _execution("attempt_type = 'reclaim'"),
        "retries_counted": _execution("disposition = 'retry_scheduled'"),
        "lease_epochs": [_NO_LEASE_EVENTS, *_set("event", "lease_epoch = 2")],
        "lease_history": _is_not_in_order("renewed", "reclaimed", "expired", "revoked", "odd"),
        "leased_last_event": [_NO_LEASE_EVENTS, *_is_not_in_order("revoked", "expired")],
        "event_namespace": _set("event", "namespace = 'other'", "namespace = null"),
        "event_route": _set("event", "route = route + 1", "route = null"),
        "log_epochs": [
            "delete from flowfabric.log_epoch",
            *_set("log_epoch", "epoch = 3", "last_position = 1"),
            "insert into flowfabric.log_epoch (epoch, last_position) values (7, 1)",
            "update flowfabric.log_epoch set last_position = 1000000;"
            " insert into flowfabric.log_epoch (epoch) values (7)",
            "update flowfabric.log_epoch set last_position = 2;"
            " insert into flowfabric.log_epoch (epoch, last_position) values (7, 1), (8, null)",
        ],
        "worker_known": ["delete from flowfabric.worker"],
        "event_worker": _set("event", "worker = 0"),
        "completed_at": _execution("completed_at = now()"),
    },
    "X": {
        "state_facts": _execution(
            "blocking_reason = 'paused_by_operator'", "blocking_detail = ''", "pending = 'retry'",
            "resume_pending = true", "lease_lost_at = null", "lease_id = null",
        ),
        "ready_row": ["delete from flowfabric.ready", *_set("ready", "available_at = null")],
        "attempt_open": _execution("disposition = 'reclaimed'"),
        "lease_history": _set("event", "lease_epoch = lease_epoch + 1 where lease_type = 'expired'"),
        "leased_last_event": ["delete from flowfabric.event where lease_type = 'expired'"],
    },
    "V": {"leased_last_event": [_NO_REVOCATION], "ready_row": ["delete from flowfabric.ready"]},
    "S": {"blocked_row": [_BLOCKED], "attempt_open": _execution("disposition = 'completed'")},
    "T:completed": {
        "state_facts": _execution(
            "blocking_reason = 'waiting_for_worker'", "blocking_detail = 'x'", "pending = 'retry'",
            "lease_lost = 'expired'", "delay_until = now()", "attempt_timeout_at = now()",
            "attempt_timeout_left = '1 s'", "resume_pending = true", "completed_at = null",
        ),
        "completed_at": _execution("completed_at = null", "state = 'waiting'"),
        "last_outcome": [_NO_END, *_set("event", "outcome = 'failed' where outcome is not null")],
        "completion_events": [_NO_END, *_execution("completed_at = null")],
        "unsuccessful_row": [_ENDED_ROW.format("failed")],
        "attempt_open": _execution("disposition = null"),
        "timer_retention": ["delete from flowfabric.timer where kind = 'retention'"],
    },
    "T:failed": _ENDED,
    "T:cancelled": _ENDED,
    "T:expired": _ENDED,
    "retried": {
        "attempt_history": [
            "delete from flowfabric.attempt",
            *_set("attempt", "attempt_index = 1"),
            *_execution("attempts = 3", "attempts = 1, attempt_index = 0"),
        ],
        "attempt_history_ended": _set(
            "attempt", "attempt_lifecycle = 'started'", "ended_at = null", "disposition = null"
        ),
        "attempt_orphan": _set("attempt", "id = gen_random_uuid()", "partition = partition + 1"),
        "attempt_identity": [
            f"update flowfabric.attempt a set {column} = e.{value} from flowfabric.execution e"
            for column, value in (("attempt_id", "attempt_id"), ("lease_id", "lease_id"), ("lease_epoch", "epoch"))
        ],
        "epoch_order": _set("attempt", "lease_epoch = 2", "lease_epoch = 3", "lease_epoch = 0"),
        "retries_counted": _execution("retries = 0", "retries = 2"),
        "lease_history": [_NO_REVOCATION],
        "lease_epochs": _set("event", "lease_epoch = 3 - lease_epoch where lease_type = 'acquired'"),
    },
    "reclaimed": {
        "reclaims_counted": _execution("reclaims = 0", "reclaims = 2"),
        "lease_history": [
            "delete from flowfabric.event where lease_type = 'expired'",
            "update flowfabric.event set lease_type = 'acquired' where lease_type = 'reclaimed'",
        ],
        "lease_epochs": ["update flowfabric.event set lease_type = 'expired' where lease_type = 'reclaimed'"],
        "leased_last_event": ["delete from flowfabric.event where lease_type = 'reclaimed'"],
    },
    "renewed": {
        **_no_timer("lease"),
        "lease_history": [
            *_set("event", "lease_epoch = lease_epoch + 1 where lease_type = 'renewed'"),
            "update flowfabric.event set lease_type = 'acquired' where lease_type = 'renewed'",
        ],
    },
    "replayed": {"last_outcome": ["update flowfabric.event set outcome = 'success' where outcome = 'failed'"]},
    "given up": {
        "lease_history": _set("event", "lease_type = 'renewed' where lease_type = 'expired'"),
    },
    "capped": {
        "lease_history": _set("event", "reason = 'x' where lease_type = 'revoked' and reason = 'max_reclaims_exceeded'")
    },
    "granted": {
        "grant_state": [
            *_execution("state = 'delayed'", "blocking_reason = 'paused_by_operator'"),
            *_set("claim_grant", "id = gen_random_uuid()", "kind = 'reclaim'"),
        ],
        "grant_hides": [
            "delete from flowfabric.claim_grant",
            *_set("claim_grant", "expires_at = expires_at + '1 s'::interval"),
        ],
    },
    "granted again": {"grant_state": _execution("state = 'suspended'")},
    "reclaim granted": {"grant_state": _execution("lease_lost = null", "state = 'waiting'")},
    "tagged": {
        "tag_rows": [
            "delete from flowfabric.tag",
            *_set("tag", "digest = digest + 1", "created_at = created_at + '1 s'::interval"),
            *_set("tag", "id = gen_random_uuid()", "partition = partition + 1"),
            _LISTED.format("tag", "7"),
            *_execution("tags = null", """tags = '{"a": "1"}'""", """tags = '{"a": "1", "b": "3"}'"""),
        ],
    },
    "timed": {**_no_timer("attempt"), **_no_timer("deadline"), **_no_timer("lease")},
    "dated": {"ready_row": _set("ready", "deadline_at = null", "deadline_at = deadline_at + '1 s'::interval")},
    "floored": {
        "ready_below_floor": ["update flowfabric.ready_floor set rank = rank + 1", *_set("ready", "rank = rank - 1")]
    },
}  # fmt: skip


@pytest.mark.parametrize("place", [*STATES, *PLACES])
async def test_every_rule_finds_its_damage_and_leaves_alone_what_is_in_order(
    stage: Stage, engine: Party, place: str
) -> None:
    if place in STATES:
        await STATES[place](engine, stage.clock)
    else:
        await PLACES[place](stage, engine)
    assert await found(stage) == set()
    rows = Rows()
    for rule, statements in DAMAGES.get(place, {}).items():
        for statement in statements:
            with rows.row((rule, statement)):
                await finds(stage, rule, statement)
    rows.tell()


async def test_every_rule_is_tried_by_one_of_the_chapters() -> None:
    folder = resources.files("flowfabric._postgres") / "sql" / "functions" / "audit"
    rules = {rule for file in folder.iterdir() for rule in re.findall(r"select '([a-z_]+)', ", file.read_text())}
    tried = {rule for damages in DAMAGES.values() for rule in damages} | {
        damage.rule for chapter in (test_flow_audit, test_suspension_audit) for damage in chapter.DAMAGES
    }
    # test_steps, test_workers, test_children, test_streams, test_limit_audit, test_fleet, test_bindings
    elsewhere = {
        "step_orphan",
        "registration_facts",
        "worker_history",
        *test_streams.DAMAGES,
        *test_limit_audit.DAMAGES,
        *test_fleet.DAMAGES,
    }
    elsewhere |= {"child_partition", "child_row", "child_forgotten", "limit_binding"}
    assert rules and rules - elsewhere <= tried


async def test_the_audit_of_one_partition_finds_a_tag_that_is_not_listed(stage: Stage, engine: Party) -> None:
    execution_id = await submit(engine, tags={"a": "1"})
    await stage.watch.execute("delete from flowfabric.tag")
    assert await found(stage, home(execution_id)) == {"tag_rows"}
    assert await found(stage, (home(execution_id) + 1) % 256) == set()
