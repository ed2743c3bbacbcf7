"""The audit on damaged rows of suspensions, waitpoints, signals and keys: every rule finds its own violation."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from importlib import resources
from typing import Any
from uuid import UUID

import pytest

from flowfabric.values.attempt import Claimed
from flowfabric.values.conditions import count_signals, from_sources
from flowfabric.values.ids import ExecutionId, mint_uuid
from flowfabric.values.policies import ExecutionPolicy, TimeoutPolicy
from flowfabric.values.signal import Accepted
from flowfabric.values.wait import Fresh, Suspended, WaitpointToken
from tests.ids import home
from tests.interleave import Party, Stage
from tests.sql.damage import Damage, finds, found, one_party  # noqa: F401 - a fixture among them
from tests.support import claim_one, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = timedelta(days=30)
MINUTE = timedelta(seconds=60)
TIMED = ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout=timedelta(hours=1)))


# Where the damage is done


async def _send(engine: Party, target: ExecutionId, waitpoint: UUID, token: WaitpointToken, **fields: Any) -> Accepted:
    answer = await engine.deliver_signal(
        target, waitpoint, token, **{"signal_name": "go", "source_type": "webhook", **fields}
    )
    assert isinstance(answer, Accepted)
    return answer


async def _held(stage: Stage, engine: Party) -> Claimed:
    await submit(engine, policy=TIMED)
    return await claim_one(engine, lease_ttl=LONG)


async def _pending(stage: Stage, engine: Party) -> Claimed:
    """A waitpoint that no suspension uses yet, with a signal on it."""
    held = await _held(stage, engine)
    made = await engine.create_waitpoint(held.handle, "k", MINUTE)
    await _send(engine, held.execution_id, made.waitpoint_id, made.token)
    return held


async def _suspended(stage: Stage, engine: Party, behavior: Any = "auto_resume_with_timeout_signal") -> Suspended:
    """Two signals of three, and one that does not count and was dropped."""
    held = await _held(stage, engine)
    answer = await engine.suspend(
        held.handle,
        waitpoints=[Fresh(mint_uuid(), "k")],
        resume_condition=count_signals(3, "k", name="go"),
        timeout_at=await stage.clock.now() + MINUTE,
        timeout_behavior=behavior,
    )
    assert isinstance(answer, Suspended)
    for name in ("other", "go", "go"):
        await _on(engine, answer, signal_name=name, signal_maxlen=0)
    return answer


async def _on(engine: Party, at: Suspended, **fields: Any) -> Accepted:
    details = at.details
    return await _send(engine, at.handle.execution_id, details.waitpoint_id, details.waitpoint_token, **fields)


async def _resumed(stage: Stage, engine: Party) -> None:
    at = await _suspended(stage, engine)
    assert (await _on(engine, at)).effect == "resume_condition_satisfied"


async def _timed_out(stage: Stage, engine: Party) -> None:
    await _suspended(stage, engine)
    await stage.clock.advance(seconds=61)
    assert (await engine.run_timers("suspension")).handled == 1


async def _expired(stage: Stage, engine: Party) -> None:
    await _pending(stage, engine)
    await stage.clock.advance(seconds=61)
    assert (await engine.run_timers("waitpoint")).handled == 1


async def _ended(stage: Stage, engine: Party) -> None:
    held = await _pending(stage, engine)
    await engine.complete(held.handle)


async def _parked(stage: Stage, engine: Party) -> None:
    held = await _held(stage, engine)
    made = await engine.create_waitpoint(held.handle, "k", MINUTE)
    child = await submit(engine, execution_kind="child")
    assert (await engine.park(held.handle, ends_of=[child], signals_on={made.waitpoint_id: 0})).parked


async def _rotated(stage: Stage, engine: Party) -> None:
    await engine.rotate_waitpoint_hmac_secret_all("k2", "ab" * 32)


PLACES: dict[str, Callable[[Stage, Party], Awaitable[Any]]] = {
    "pending": _pending,
    "suspended": _suspended,
    "resumed": _resumed,
    "timed out": _timed_out,
    "expired": _expired,
    "ended": _ended,
    "parked": _parked,
    "rotated": _rotated,
}


_EXECUTION = "update flowfabric.execution set "
_SUSPENSION = "update flowfabric.suspension set "
_WAITPOINT = "update flowfabric.waitpoint set "
_SIGNAL = "update flowfabric.signal set "
_KEY = "update flowfabric.keystore set "
DAMAGES = [
    Damage("suspension_open", "suspended", "delete from flowfabric.suspension"),
    Damage("suspension_open", "suspended", _SUSPENSION + "closed_at = now(), close_reason = 'resumed'"),
    Damage("suspension_open", "resumed", _SUSPENSION + "closed_at = null, close_reason = null"),
    Damage("suspension_facts", "suspended", _EXECUTION + "suspension_timeout_at = null"),
    Damage(
        "suspension_facts", "suspended", _EXECUTION + "suspension_timeout_at = suspension_timeout_at + '1 s'::interval"
    ),
    Damage("suspension_facts", "suspended", _EXECUTION + "attempt_timeout_at = now()"),
    Damage("suspension_facts", "suspended", _EXECUTION + "has_waitpoints = false"),
    Damage("suspension_facts", "suspended", _EXECUTION + "blocking_reason = 'waiting_for_approval'"),
    Damage("suspension_facts", "suspended", _SUSPENSION + "attempt_index = attempt_index + 1"),
    Damage("suspension_facts", "suspended", _SUSPENSION + "attempt_id = gen_random_uuid()"),
    Damage("suspension_facts", "suspended", _SUSPENSION + "close_reason = 'resumed'"),
    Damage(
        "suspension_waitpoints", "suspended", _WAITPOINT + "state = 'closed', closed_at = now(), close_reason = 'x'"
    ),
    Damage("suspension_waitpoints", "suspended", _WAITPOINT + "suspension_id = gen_random_uuid()"),
    Damage("suspension_waitpoints", "suspended", _SUSPENSION + "waitpoint_ids = waitpoint_ids || gen_random_uuid()"),
    Damage("suspension_waitpoints", "suspended", "delete from flowfabric.waitpoint"),
    Damage("suspension_waitpoints", "resumed", _WAITPOINT + "state = 'active'"),
    Damage("waitpoint_state", "pending", _WAITPOINT + "attempt_index = attempt_index + 1"),
    Damage("waitpoint_state", "pending", _WAITPOINT + "suspension_id = gen_random_uuid()"),
    Damage("waitpoint_state", "pending", _WAITPOINT + "closed_at = now()"),
    Damage("waitpoint_state", "pending", _WAITPOINT + "expires_at = null"),
    Damage("waitpoint_state", "pending", _WAITPOINT + "state = 'odd'"),
    Damage("waitpoint_state", "pending", _EXECUTION + "has_waitpoints = false"),
    Damage("waitpoint_state", "pending", "delete from flowfabric.execution"),
    Damage("waitpoint_state", "ended", _WAITPOINT + "state = 'pending', closed_at = null, close_reason = null"),
    Damage("waitpoint_state", "ended", _WAITPOINT + "close_reason = null"),
    Damage("waitpoint_state", "ended", _WAITPOINT + "closed_at = null"),
    Damage("waitpoint_state", "ended", "delete from flowfabric.execution"),
    Damage("waitpoint_state", "expired", _WAITPOINT + "close_reason = 'proactive_close'"),
    Damage("waitpoint_state", "expired", _WAITPOINT + "suspension_id = gen_random_uuid()"),
    Damage("waitpoint_state", "suspended", _SUSPENSION + "waitpoint_ids = array[gen_random_uuid()]"),
    Damage("waitpoint_state", "resumed", _WAITPOINT + "state = 'active'"),
    Damage("timer_waitpoint", "pending", "delete from flowfabric.timer where kind = 'waitpoint'"),
    Damage("timer_waitpoint", "pending", "update flowfabric.timer set due_at = due_at + '1 s'::interval"),
    Damage("timer_suspension", "suspended", "delete from flowfabric.timer where kind = 'suspension'"),
    Damage("timer_suspension", "suspended", "update flowfabric.timer set due_at = due_at + '1 s'::interval"),
    Damage(
        "condition_held",
        "suspended",
        _SIGNAL + "signal_name = 'go', is_dropped = false where is_dropped",
    ),
    Damage(
        "condition_held", "resumed", _SIGNAL + "signal_name = 'no' where observed_effect = 'resume_condition_satisfied'"
    ),
    Damage("condition_held", "resumed", _SIGNAL + "signal_name = 'go', is_dropped = false where is_dropped"),
    Damage("condition_held", "resumed", _SUSPENSION + "closer_signal_id = satisfier_signal_ids[1]"),
    Damage("condition_held", "resumed", _SUSPENSION + "closer_signal_id = null"),
    Damage("condition_held", "resumed", _SUSPENSION + "satisfier_signal_ids = satisfier_signal_ids[1:2]"),
    Damage("condition_held", "resumed", _SUSPENSION + "satisfier_signal_ids = null"),
    Damage("signal_count", "pending", _WAITPOINT + "dropped_upto = 1"),
    Damage("condition_counts", "suspended", _SUSPENSION + "counts = array[1]"),
    Damage("condition_counts", "suspended", _SUSPENSION + "counts = null"),
    Damage("condition_counts", "suspended", _WAITPOINT + "counted_by = array[1]"),
    Damage("condition_counts", "suspended", _SIGNAL + "source_hash = 7 where match_detail = 'advanced'"),
    Damage("condition_counts", "suspended", _SIGNAL + "match_detail = 'matcher_failed'"),
    Damage(
        "satisfier_unknown", "resumed", _SUSPENSION + "satisfier_signal_ids = satisfier_signal_ids || gen_random_uuid()"
    ),
    Damage("satisfier_unknown", "resumed", _SIGNAL + "is_dropped = true"),
    Damage("satisfier_unknown", "resumed", "delete from flowfabric.signal where match_detail = 'advanced'"),
    Damage("satisfier_unknown", "timed out", "delete from flowfabric.signal where source_type = 'system'"),
    Damage("signal_order", "suspended", _SIGNAL + "ordinal = 5 where ordinal = 3"),
    Damage("signal_order", "suspended", _SIGNAL + "ordinal = 0 where ordinal = 1"),
    Damage("signal_order", "suspended", "delete from flowfabric.signal where ordinal = 1"),
    Damage("signal_order", "ended", "delete from flowfabric.execution"),
    Damage("signal_count", "suspended", _WAITPOINT + "signal_count = signal_count + 1"),
    Damage("signal_count", "suspended", _WAITPOINT + "dropped_signal_count = 0"),
    Damage("signal_count", "suspended", _WAITPOINT + "refused_signal_count = 1"),
    Damage("signal_count", "suspended", "delete from flowfabric.signal where ordinal = 3"),
    Damage("signal_events", "suspended", "delete from flowfabric.signal where ordinal = 3"),
    Damage("signal_events", "suspended", "delete from flowfabric.event where signal_effect is not null"),
    Damage("keystore", "rotated", _KEY + "expires_at = now() where state = 'current'"),
    Damage("keystore", "rotated", _KEY + "inner_key = null where state = 'current'"),
    Damage("keystore", "rotated", _KEY + "expires_at = null where state = 'verifying'"),
    Damage("keystore", "rotated", _KEY + "inner_key = null where state = 'verifying'"),
    Damage("keystore", "rotated", _KEY + "state = 'retired' where state = 'verifying'"),
    Damage("waits_for_nothing", "parked", "delete from flowfabric.waiter"),
    Damage("waiter_missed", "parked", _WAITPOINT + "state = 'closed', closed_at = now(), close_reason = 'x'"),
    Damage("waiter_missed", "parked", "delete from flowfabric.waitpoint"),
    Damage("lease_epochs", "suspended", "delete from flowfabric.event where reason = 'suspend'"),
    Damage("lease_epochs", "suspended", _EXECUTION + "epoch = epoch + 1"),
    Damage("lease_epochs", "suspended", _EXECUTION + "epoch = epoch - 1"),
    Damage("state_facts", "suspended", _EXECUTION + "lease_lost = 'expired'"),
    Damage("state_facts", "suspended", _EXECUTION + "pending = null"),
    Damage("state_facts", "resumed", _EXECUTION + "resume_pending = false"),
    Damage("state_facts", "resumed", _EXECUTION + "state = 'waiting'"),
]


@pytest.mark.parametrize("place", PLACES)
async def test_a_sound_database_has_no_violations(stage: Stage, engine: Party, place: str) -> None:
    await PLACES[place](stage, engine)
    assert await found(stage) == set()


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: f"{d.rule}, {d.place}, {d.sql.split('flowfabric.')[1]}")
async def test_a_rule_finds_its_damage(stage: Stage, engine: Party, damage: Damage) -> None:
    await PLACES[damage.place](stage, engine)
    assert await found(stage) == set()
    await finds(stage, damage.rule, damage.sql)


async def test_every_rule_about_suspensions_is_tried() -> None:
    """Rules that read the tables of this chapter, by the text of the audit."""
    folder = resources.files("flowfabric._postgres") / "sql" / "functions" / "audit"
    tables = re.compile(r"flowfabric\.(suspension|waitpoint|signal|keystore)\b|signal_effect|'suspend'")
    texts = [file.read_text() for file in folder.iterdir()]
    about = {rule for text in texts if tables.search(text) for rule in re.findall(r"select '([a-z_]+)'[, ]", text)}
    assert about and about <= {damage.rule for damage in DAMAGES}


async def test_the_audit_of_one_partition_checks_only_that_partition(stage: Stage, engine: Party) -> None:
    at = await _suspended(stage, engine)
    await stage.watch.execute(_WAITPOINT + "signal_count = 7")
    mine = home(at.handle.execution_id)
    for partition, expected in ((mine, ["signal_count"]), ((mine + 1) % 256, [])):
        rows = await stage.watch.fetch("select rule from flowfabric.audit($1, true)", partition)
        assert [row["rule"] for row in rows] == expected


async def test_a_redacted_execution_passes_the_audit(stage: Stage, engine: Party) -> None:
    """The senders of signals are forgotten; their number is not."""
    held = await _held(stage, engine)
    at = await engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=from_sources(2, "k"))
    assert isinstance(at, Suspended)
    for name in ("alice", "bob"):
        await _on(engine, at, source_identity=name)
    again = await claim_one(engine)
    await engine.complete(again.handle)
    await engine.redact_execution(held.execution_id)
    assert await found(stage) == set()
    stored = await stage.watch.fetch("select source_identity from flowfabric.signal")
    assert not {row["source_identity"] for row in stored} & {"alice", "bob"}
