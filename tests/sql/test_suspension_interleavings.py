"""Every call of a suspension held at the lock while every other one arrives, old calls among them.

Both serial orders are run first, and they are the specification: a call that arrived while another was under way and
waited for it, or passed the locked row by and came again, must answer and leave exactly what it would have after the
other, or, when that was rolled back, alone.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric.errors import FlowFabricError
from flowfabric.values.conditions import on
from flowfabric.values.ids import mint_uuid
from flowfabric.values.keystore import Rotation
from flowfabric.values.lease import Handle
from flowfabric.values.policies import ExecutionPolicy, TimeoutPolicy
from flowfabric.values.signal import Accepted
from flowfabric.values.step import Parked
from flowfabric.values.wait import (
    AlreadySatisfied,
    ExpiredSuspension,
    Fresh,
    Resumed,
    Suspended,
    UsePending,
    WaitpointToken,
    WaitResult,
)
from tests import sampling
from tests.interleave import Party, Stage, settled, waiting
from tests.sql import test_interleavings
from tests.support import claim_one, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEASE = timedelta(minutes=10)
SOON = timedelta(seconds=60)
LATE = 61.0
GO = on("k", "go")
RETRY = ff.RetryPolicy(max_retries=3, backoff=ff.Fixed(timedelta(seconds=10)))


@dataclass
class Case:
    """One execution, its worker, a waitpoint of its own, and the id of a signal that is sent more than once."""

    id: ff.ExecutionId
    handle: Handle
    fields: Mapping[str, Any]
    waitpoint: UUID = field(default_factory=mint_uuid)
    token: WaitpointToken | str = "none"
    signal: UUID = field(default_factory=mint_uuid)
    grant_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation as both sides of a race.

    `starts`: the setups in which it does something; `leads`: those it leads to; `skips`: it passes locked rows by
    instead of waiting; `after`: how far the clock must move for it to have something to do; `fields`: what the setup
    must provide for.
    """

    name: str
    call: Callable[[Party, Any], Awaitable[Any]]
    starts: tuple[str, ...]
    leads: tuple[str, ...] = ()
    skips: bool = False
    after: float = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    is_new: bool = True


# What the operations do


async def _in(party: Party, time: timedelta) -> Any:
    return await party.connection.fetchval("select flowfabric.now()") + time


def _behavior(case: Case) -> Any:
    # Not the default, so that an answer out of the air is seen.
    return case.fields.get("behavior", "cancel")


async def _suspend(party: Party, case: Case) -> Any:
    return await party.suspend(
        case.handle,
        waitpoints=[Fresh(mint_uuid(), "k")],
        resume_condition=GO,
        timeout_at=await _in(party, SOON),
        timeout_behavior=_behavior(case),
    )


async def _use_pending(party: Party, case: Case) -> Any:
    return await party.suspend(
        case.handle,
        waitpoints=[UsePending(case.waitpoint)],
        resume_condition=GO,
        timeout_at=await _in(party, SOON),
        timeout_behavior=_behavior(case),
    )


async def _create_waitpoint(party: Party, case: Case) -> Any:
    return await party.create_waitpoint(case.handle, "another", SOON)


async def _close_waitpoint(party: Party, case: Case) -> Any:
    return await party.close_waitpoint(case.handle, case.waitpoint)


def _signal(name: str, *, same: bool = False) -> Callable[[Party, Case], Awaitable[Any]]:
    async def call(party: Party, case: Case) -> Any:
        return await party.deliver_signal(
            case.id,
            case.waitpoint,
            case.token,
            signal_name=name,
            source_type="webhook",
            signal_id=case.signal if same else None,
        )

    return call


async def _approve(party: Party, case: Case) -> Any:
    return await party.deliver_approval_signal(
        case.id, "default", case.waitpoint, signal_name="go", idempotency_suffix="1"
    )


async def _resume(party: Party, case: Case) -> Any:
    return await party.resume_execution(case.id, "operator")


async def _resume_later(party: Party, case: Case) -> Any:
    return await party.resume_execution(case.id, "operator", timedelta(seconds=5))


async def _expire_suspension(party: Party, case: Case) -> Any:
    return await party.expire_suspension(case.id)


async def _expire_waitpoint(party: Party, case: Case) -> Any:
    return await party.expire_waitpoint(case.id, case.waitpoint)


async def _open_wait(party: Party, case: Case) -> Any:
    return await party.open_wait(case.handle, "another", 0, ["k"], SOON)


async def _settle_wait(party: Party, case: Case) -> Any:
    return await party.settle_wait(case.handle, "wait", 0, GO)


async def _park(party: Party, case: Case) -> Any:
    return await party.park(case.handle, signals_on={case.waitpoint: 0})


async def _rotate(party: Party, case: Case) -> Any:
    return await party.rotate_waitpoint_hmac_secret_all("k2", "ab" * 32)


def _duty(kind: str) -> Callable[[Party, Case], Awaitable[Any]]:
    async def call(party: Party, case: Case) -> Any:
        return await party.run_timers(kind)

    return call


NEW = [
    Operation(name="suspend", call=_suspend, starts=("held",), leads=("suspended",)),
    Operation(name="suspend on pending", call=_use_pending, starts=("held", "signalled"), leads=("suspended",)),
    Operation(name="create waitpoint", call=_create_waitpoint, starts=("held",)),
    Operation(name="close waitpoint", call=_close_waitpoint, starts=("held", "signalled")),
    Operation(
        name="signal",
        call=_signal("go"),
        starts=("held", "in a wait", "suspended", "parked"),
        leads=("resumed", "signalled"),
    ),
    Operation(name="other signal", call=_signal("other"), starts=("suspended", "held")),
    Operation(
        name="same signal",
        call=_signal("go", same=True),
        starts=("suspended", "signalled", "resumed", "parked"),
        leads=("resumed", "signalled"),
    ),
    Operation(name="approval", call=_approve, starts=("suspended", "held"), leads=("resumed", "signalled")),
    Operation(name="resume", call=_resume, starts=("suspended",), leads=("resumed",)),
    Operation(name="resume later", call=_resume_later, starts=("suspended",)),
    Operation(name="expire suspension", call=_expire_suspension, starts=("suspended",), after=LATE),
    *(
        Operation(
            name=f"timeout, {behavior}",
            call=_duty("suspension"),
            starts=("suspended",),
            leads=("resumed",) if behavior == "auto_resume" else (),
            skips=True,
            after=LATE,
            fields={"behavior": behavior},
        )
        for behavior in ("fail", "auto_resume", "escalate")
    ),
    Operation(name="expire waitpoint", call=_expire_waitpoint, starts=("held", "parked"), after=LATE),
    Operation(
        name="pending expiry",
        call=_duty("waitpoint"),
        starts=("held", "signalled", "parked"),
        skips=True,
        after=LATE,
    ),
    Operation(name="open wait", call=_open_wait, starts=("held",)),
    Operation(name="settle wait", call=_settle_wait, starts=("in a wait",)),
    Operation(name="park on signals", call=_park, starts=("held", "signalled", "in a wait"), leads=("parked",)),
    Operation(name="rotate", call=_rotate, starts=("held", "suspended")),
]
# The earlier calls, where they meet these. Their table says which skip locked rows, and which need a time that is due.
_BEFORE: Mapping[str, tuple[tuple[str, ...], float, Mapping[str, Any]]] = {
    "claim": (("resumed",), 0, {}),
    "complete": (("held", "in a wait"), 0, {}),
    "fail": (("held", "in a wait"), 0, {}),
    "fail for good": (("held",), 0, {}),
    "renew": (("held",), 0, {}),
    "cancel": (("held", "suspended", "parked", "resumed"), 0, {}),
    "revoke": (("held",), 0, {}),
    "release": (("in a wait",), 0, {}),
    "delay": (("held",), 0, {}),
    "lease expiry": (("held",), 601, {}),
    "attempt timeout": (("held",), 301, {"attempt_timeout": timedelta(seconds=300)}),
    "deadline": (("suspended", "held", "parked"), 401, {"deadline": timedelta(seconds=400)}),
    "block": (("resumed",), 0, {}),
}
BEFORE = [
    Operation(
        name=name,
        call=test_interleavings.BY_NAME[name].call,
        starts=starts,
        skips=test_interleavings.BY_NAME[name].skips,
        after=after,
        fields=fields,
        is_new=False,
    )
    for name, (starts, after, fields) in _BEFORE.items()
]
# Keys belong to no execution: signing and verifying do not wait for a rotation, nor the other way round.
SIGNERS = ("suspend", "suspend on pending", "create waitpoint", "open wait", "signal", "approval", "rotate")


def meetings(first: Operation, second: Operation) -> list[str]:
    """The setups in which both could act; else one in which the first can, if that lets the second act."""
    both = [start for start in first.starts if start in second.starts]
    return both or ([first.starts[0]] if set(first.leads) & set(second.starts) else [])


def _pairs() -> list[Any]:
    found = []
    for first in (*NEW, *BEFORE):
        for second in (*NEW, *BEFORE):
            behaviors = {each.fields["behavior"] for each in (first, second) if "behavior" in each.fields}
            if not (first.is_new or second.is_new) or len(behaviors) > 1 or not meetings(first, second):
                continue
            if "rotate" in (first.name, second.name) and not {first.name, second.name} <= set(SIGNERS):
                continue
            case = pytest.param(first, second, id=f"{first.name} then {second.name}")
            found.append((first.name, second.name, case))
    return sampling.pairs(found, 120)


# The setups


async def set_up(stage: Stage, engine: Party, start: str, *operations: Operation) -> Case:
    """An execution in the place named, with the times that the operations are about."""
    await stage.empty()
    fields: dict[str, Any] = {}
    for operation in operations:
        fields |= operation.fields
    timeout = TimeoutPolicy(attempt_timeout=fields.get("attempt_timeout"))
    await submit(
        engine,
        policy=ExecutionPolicy(retry_policy=RETRY, timeout_policy=timeout),
        execution_deadline_at=fields.get("deadline"),
    )
    claimed = await claim_one(engine, lease_ttl=LEASE)
    case = Case(claimed.execution_id, claimed.handle, fields)
    match start:
        case "held" | "signalled" | "parked":
            made = await engine.create_waitpoint(case.handle, "k", SOON)
            case.waitpoint, case.token = made.waitpoint_id, made.token
            if start == "signalled":
                await _signal("go", same=True)(engine, case)
            elif start == "parked":
                assert (await _park(engine, case)).parked
        case "in a wait":
            (bound,) = (await engine.open_wait(case.handle, "wait", 0, ["k"], None)).waitpoints
            case.waitpoint, case.token = bound.waitpoint_id, bound.waitpoint_token
        case "suspended" | "resumed":
            suspended = await _suspend(engine, case)
            assert isinstance(suspended, Suspended)
            case.waitpoint, case.token = suspended.details.waitpoint_id, suspended.details.waitpoint_token
            if start == "resumed":
                await _signal("go", same=True)(engine, case)
    return case


_PICTURE = """
select jsonb_build_object(
    'executions', (select jsonb_agg(jsonb_build_array(
        state, blocking_reason, pending, resume_pending, lease_lost, epoch, attempts, retries, disposition,
        has_waitpoints, suspension_timeout_at is not null, attempt_timeout_at is not null,
        attempt_timeout_left is not null, delay_until is not null, is_parked,
        failure_reason, cancellation_reason)) from flowfabric.execution),
    'ready', (select count(*) from flowfabric.ready), 'waiters', (select count(*) from flowfabric.waiter),
    'blocked', (select count(*) from flowfabric.blocked),
    'waitpoints', (select jsonb_agg(p.row order by p.row) from (select jsonb_build_array(
        waitpoint_key, state, close_reason, signal_count, matched_signal_count, suspension_id is not null,
        satisfied_at is not null, expires_at is not null, attempt_index, required_signal_names, outlives_attempt,
        token_kid) as row from flowfabric.waitpoint) p),
    'suspensions', (select jsonb_agg(jsonb_build_array(
        number, reason_code, timeout_behavior, timeout_at is not null, is_early, close_reason, trigger_type,
        closer_signal_id is not null, cardinality(satisfier_signal_ids)) order by number) from flowfabric.suspension),
    'signals', (select jsonb_agg(jsonb_build_array(
        ordinal, signal_name, source_type, suspension_id is not null, observed_effect, match_detail) order by ordinal)
        from flowfabric.signal),
    'steps', (select jsonb_agg(jsonb_build_array(kind, name, encoding, result is not null) order by name)
        from flowfabric.step),
    'events', (select jsonb_agg(jsonb_build_array(
        lease_type, outcome, operator_type, signal_effect, reason, revoked_by, lease_epoch) order by seq)
        from flowfabric.event),
    'keys', (select jsonb_agg(jsonb_build_array(kid, state) order by kid) from flowfabric.keystore))
"""


async def picture(stage: Stage) -> Any:
    """Everything that is stored, without what differs from run to run: ids and times."""
    return json.loads(await stage.watch.fetchval(_PICTURE))


def said(answer: Any) -> str:
    """An answer in a word or two."""
    match answer:
        case FlowFabricError():
            return str(answer.kind)
        case None:
            return "nothing"
        case Accepted():
            return f"{answer.effect}, {answer.match_detail}"
        case AlreadySatisfied():
            return f"already: {answer.reason}"
        case ExpiredSuspension():
            return f"expired: {answer.behavior_applied}"
        case Resumed():
            return f"resumed: {answer.public_state}"
        case WaitResult():
            return f"{answer.outcome} {answer.seen}"
        case Parked():
            return f"parked {answer.parked} {answer.because}"
        case [Rotation() as one]:
            return type(one.result).__name__
        case _ if hasattr(answer, "handled"):
            assert answer.failed == 0, answer
            return f"handled {answer.handled}" if answer.handled else "nothing"
        case _:
            return type(answer).__name__


@pytest_asyncio.fixture(loop_scope="session")
async def pair(stage: Stage) -> list[Party]:
    return await stage.company(2)


_ALONE: dict[Any, Any] = {}


async def in_order(stage: Stage, party: Party, start: str, *operations: Operation) -> Any:
    """What the operations answer, one after the other, and what they leave."""
    case = await set_up(stage, party, start, *operations)
    answers = []
    for operation in operations:
        await stage.clock.advance(seconds=operation.after)
        answers.append(said(await settled(operation.call(party, case))))
    return answers, await picture(stage)


async def without_the_first(stage: Stage, party: Party, start: str, first: Operation, second: Operation) -> Any:
    """What the second returns and leaves without the first. Kept, because many tests need it."""
    key = (stage.dsn, start, str({**first.fields, **second.fields}), first.after, second.name)
    if key not in _ALONE:
        case = await set_up(stage, party, start, first, second)
        await stage.clock.advance(seconds=first.after + second.after)
        _ALONE[key] = [said(await settled(second.call(party, case)))], await picture(stage)
    return _ALONE[key]


async def at_once(stage: Stage, pair: list[Party], start: str, first: Operation, second: Operation, ending: str) -> Any:
    """The same with the second arriving while the first is under way; the first then commits or rolls back."""
    one, two = pair
    case = await set_up(stage, one, start, first, second)
    await stage.clock.advance(seconds=first.after)
    await one.begin()
    answer = await settled(first.call(one, case))
    assert not isinstance(answer, FlowFabricError) and said(answer) != "nothing", "the first must have something to do"
    await stage.clock.advance(seconds=second.after)
    if "rotate" in (first.name, second.name) and first is not second:
        last = await settled(second.call(two, case))
        await one.end(ending)
    elif second.skips:
        assert said(await settled(second.call(two, case))) == "nothing", "locked rows are skipped"
        await one.end(ending)
        last = await settled(second.call(two, case))
    else:
        task = await waiting(stage.watch, two, second.call(two, case), behind=one)
        await one.end(ending)
        last = await task
    await stage.audit()
    answers = [said(answer), said(last)]
    return (answers if ending == "commit" else answers[1:]), await picture(stage)


@pytest.mark.parametrize(("first", "second"), _pairs())
async def test_concurrent_calls_match_one_serial_order(
    stage: Stage, pair: list[Party], first: Operation, second: Operation
) -> None:
    one, _ = pair
    for start in meetings(first, second):
        committed = await at_once(stage, pair, start, first, second, "commit")
        expected = await in_order(stage, one, start, first, second)
        if "rotate" in (first.name, second.name) and committed != expected:
            # Who signs while another rotates came before him.
            answers, expected_picture = await in_order(stage, one, start, second, first)
            expected = answers[::-1], expected_picture
        assert committed == expected, f"commit from {start}"
        undone = await at_once(stage, pair, start, first, second, "rollback")
        assert undone == await without_the_first(stage, one, start, first, second), f"rollback from {start}"
