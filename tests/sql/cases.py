"""The contract of executions as case tables, and one database that a module's cases share.

`World` holds an engine, a connection behind it and the clock. `OPERATIONS` lists every operation with the rows of the
transition table it may take and, for every other state, the refusal it returns while changing nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import asyncpg

import flowfabric as ff
from flowfabric.errors import Contention, StateError
from flowfabric.values.attempt import Attempt, Claimed
from flowfabric.values.conditions import on
from flowfabric.values.execution import Created, Duplicate, Execution, Rejected
from flowfabric.values.grant import ClaimGrant
from flowfabric.values.lease import Handle, Operator
from flowfabric.values.policies import ExecutionPolicy, SuspensionPolicy, TimeoutBehavior, TimeoutPolicy
from flowfabric.values.step import NewStep, Parked
from flowfabric.values.transitions import TRANSITIONS, Transition, matches, position
from flowfabric.values.wait import AlreadySatisfied, Fresh, UsePending, WaitpointToken
from flowfabric.values.worker import Serves
from tests.ids import home, id_in
from tests.support import RETRY, STATES, WORKER, CheckedEngine, Clock, Reached, Wipe, new_id

COUNTERS = ("total_attempt_count", "retry_count", "replay_count", "lease_reclaim_count", "current_lease_epoch")
HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)

_TABLES = (
    "execution", "attempt", "ready", "claim_grant", "blocked", "unsuccessful", "tag", "step", "waiter", "waitpoint",
    "suspension", "signal", "event",
)  # fmt: skip
_WORKER = (
    "to_jsonb(t) || coalesce((select to_jsonb(w) - array['id', 'numbered_at', 'unused_since']"
    " from flowfabric.worker w where w.id = t.worker), '{}')"
)
_PICTURE = (
    "select q.source, q.row from ("
    + " union all ".join(
        f"select '{table}', {_WORKER if table == 'event' else 'to_jsonb(t)'}, {'t.seq' if table == 'event' else '0'}"
        f" from flowfabric.{table} t where t.partition = $1 and t.id = $2"
        for table in _TABLES
    )
    + ") q (source, row, number) order by q.number, q.row"
)


class CaseEngine(CheckedEngine):
    """Audits while `checking`; gives every created execution what `creating` says, unless the caller said it."""

    checking = True
    creating: Mapping[str, Any] = {}

    async def check(self) -> None:
        if self.checking:
            await super().check()

    async def create_execution(self, **fields: Any) -> Created | Duplicate:
        policy = self.creating.get("policy", fields.get("policy"))
        return await super().create_execution(**{**self.creating, **fields, "policy": policy})


@dataclass(frozen=True)
class Picture:
    """Everything stored about one execution at one moment, but its timers."""

    record: Execution | None
    attempts: Sequence[Attempt]
    stored: Mapping[str, list[dict[str, Any]]]

    @property
    def at(self) -> str:
        return "-" if self.record is None else position(self.record.state_vector)

    def counter(self, name: str) -> int:
        return int(getattr(self.record, name))

    def since(self, before: Picture) -> list[dict[str, Any]]:
        """The events that came after another picture."""
        assert self.stored["event"][: len(before.stored["event"])] == before.stored["event"]
        return self.stored["event"][len(before.stored["event"]) :]

    def changed(self, before: Picture) -> set[str]:
        """The columns of the execution that differ from another picture."""
        (ours,), (theirs,) = self.stored["execution"], before.stored["execution"]
        return {name for name in ours if ours[name] != theirs[name]}


def shorthand(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Stored events in the words of the transition table."""
    columns = {"L": "lease_type", "K": "outcome", "O": "operator_type", "G": "signal_effect"}
    return [f"{letter}:{e[column]}" for e in events for letter, column in columns.items() if e[column] is not None]


class World:
    """One database, wiped before every case."""

    def __init__(self, dsn: str, engine: CaseEngine, sql: asyncpg.Connection[Any], wipe: Wipe) -> None:
        self.dsn = dsn
        self.engine = engine
        self.sql = sql
        self.clock = Clock(sql)
        self._wipe = wipe

    async def wipe(self) -> None:
        self.engine.checking = True
        self.engine.creating = {}
        await self._wipe()

    async def reach(self, state: str, **creating: Any) -> Reached:
        """A new execution in a state, created with these fields."""
        checking, self.engine.checking, self.engine.creating = self.engine.checking, False, creating
        try:
            return await STATES[state](self.engine, self.clock)
        finally:
            self.engine.checking, self.engine.creating = checking, {}

    async def picture(self, execution_id: ff.ExecutionId) -> Picture:
        checking, self.engine.checking = self.engine.checking, False
        try:
            record = await self.engine.read_execution(execution_id)
            attempts = await self.engine.list_attempts(execution_id)
        finally:
            self.engine.checking = checking
        stored: dict[str, list[dict[str, Any]]] = {table: [] for table in _TABLES}
        for table, row in await self.sql.fetch(_PICTURE, home(execution_id), execution_id):
            stored[table].append(json.loads(row))
        return Picture(record, attempts, stored)

    async def at(self, execution_id: ff.ExecutionId) -> str:
        record = await self.engine.read_execution(execution_id)
        return "-" if record is None else position(record.state_vector)

    async def record(self, execution_id: ff.ExecutionId) -> Execution:
        record = await self.engine.read_execution(execution_id)
        assert record is not None
        return record

    async def event_count(self) -> int:
        return int(await self.sql.fetchval("select count(*) from flowfabric.event"))


async def outcome(call: Awaitable[Any]) -> str:
    """What a call came to, as one word: the kind of its refusal, the reason of its answer, or the answer's class."""
    try:
        answer = await call
    except ff.FlowFabricError as error:
        return error.kind
    match answer:
        case None:
            return "none"
        case str() | int():
            return str(answer)
        case AlreadySatisfied(reason):
            return reason
        case Rejected(message):
            return message
        case _:
            return type(answer).__name__


def stranger(execution_id: ff.ExecutionId) -> Handle:
    """A handle of a lease that never was."""
    return Handle(
        partition=home(execution_id),
        uuid=execution_id,
        attempt_index=0,
        attempt_id=new_id(),
        lease_id=new_id(),
        lease_epoch=1,
        lease_ttl=timedelta(seconds=30),
        lane_id="default",
        worker_instance_id="pool-1",
    )


class Case:
    """One operation about to be called on one execution."""

    def __init__(self, world: World, at: Reached) -> None:
        self.world = world
        self.engine: ff.Engine = world.engine
        self.id = at.id
        self.handle = stranger(at.id) if at.claimed is None else at.handle
        self.operator = Operator(at.id)
        self.grant: ClaimGrant | None = None
        self.other = id_in(11)  # unknown until `_another` makes it
        self.binding: Fresh | UsePending = Fresh(new_id(), "k")
        self.token = WaitpointToken(f"k1:{'0' * 64}")

    def by(self, source: str) -> Operator:
        return Operator(self.id, source)


Call = Callable[[Case], Awaitable[Any]]


async def _nothing(case: Case) -> None:
    pass


def _later(**parts: float) -> Call:
    async def prepare(case: Case) -> None:
        await case.world.clock.advance(**parts)

    return prepare


async def _claim_grant(case: Case) -> None:
    """A claim grant where the state allows one."""
    with contextlib.suppress(Contention):
        case.grant = await case.engine.issue_claim_grant(case.id, **WORKER)


async def _reclaim_grant(case: Case) -> None:
    answer = await case.engine.issue_reclaim_grant(case.id, **WORKER)
    case.grant = answer if isinstance(answer, ClaimGrant) else None


async def _another(case: Case) -> None:
    """Another execution, for which one can wait."""
    await case.engine.create_execution(execution_kind="other", execution_id=case.other, delay_until=timedelta(days=9))


async def _another_ended(case: Case) -> None:
    await _another(case)
    await case.engine.cancel(Operator(case.other), "enough")


async def _verdict(batch: Awaitable[list[Any]]) -> Any:
    """The one verdict of a batch of one."""
    (answer,) = await batch
    if isinstance(answer, ff.FlowFabricError):
        raise answer
    return answer


async def _park_until(case: Case, **later: float) -> Parked:
    return await case.engine.park(case.handle, until=await case.world.clock.now() + timedelta(**later))


async def _park_for_signals(case: Case) -> Parked:
    at = case.binding.waitpoint_id if isinstance(case.binding, UsePending) else case.other
    return await case.engine.park(case.handle, signals_on={at: 0})


async def _pending_waitpoint(case: Case) -> None:
    """A pending waitpoint where there is a lease to make one with."""
    with contextlib.suppress(Contention, StateError):
        made = await case.engine.create_waitpoint(case.handle, "k", HOUR)
        case.binding, case.token = UsePending(made.waitpoint_id), made.token


async def _token(case: Case) -> None:
    """The waitpoint of the newest suspension, and its token, whether it is open or not."""
    suspension = await case.engine.read_suspension(case.id)
    assert suspension is not None
    case.binding = UsePending(suspension.waitpoint_ids[0])
    case.token = WaitpointToken(
        await case.world.sql.fetchval(
            "select flowfabric.sign_token('k1', $1, $2, $3)",
            home(case.id),
            case.id,
            case.binding.waitpoint_id,
        )
    )


async def _signal(case: Case, **fields: Any) -> Any:
    return await case.engine.deliver_signal(
        case.id, case.binding.waitpoint_id, case.token, signal_name="go", source_type="test", **fields
    )


async def _suspend(case: Case) -> Any:
    return await case.engine.suspend(case.handle, waitpoints=[case.binding], resume_condition=on("k"))


async def _suspend_by_triple(case: Case) -> Any:
    return await case.engine.suspend_by_triple(case.handle.fence, waitpoints=[case.binding], resume_condition=on("k"))


async def _claim(case: Case) -> Claimed | None:
    return await case.engine.claim(**WORKER)


async def _claim_with_other_code(case: Case) -> Claimed | None:
    return await case.engine.claim(**WORKER, kinds={"test": Serves(digest="old code")})


async def _claim_with_the_same_code(case: Case) -> Claimed | None:
    return await case.engine.claim(**WORKER, kinds={"test": Serves(digest="new code")})


async def _claim_execution(case: Case) -> Claimed:
    key = case.grant.grant_key if case.grant else None
    return await case.engine.claim_execution(case.id, **WORKER, lease_id=new_id(), attempt_id=new_id(), grant_key=key)


async def _claim_resumed(case: Case) -> Claimed:
    return await case.engine.claim_resumed_execution(case.id, **WORKER, lease_id=new_id())


async def _claim_from_resume_grant(case: Case) -> Claimed | None:
    grant = case.grant or ClaimGrant(
        execution_id=case.id,
        grant_key="no such grant",
        expires_at=await case.world.clock.now(),
    )
    return await case.engine.claim_from_resume_grant(grant, **WORKER)


async def _reclaim(case: Case, **fields: Any) -> Any:
    return await case.engine.reclaim_execution(case.id, **WORKER, lease_id=new_id(), attempt_id=new_id(), **fields)


def _unblock(expected: str | None) -> Call:
    async def call(case: Case) -> Any:
        return await case.engine.unblock_execution(case.id, expected_blocking_reason=expected)

    return call


async def _unblock_matching(case: Case) -> Any:
    record = await case.engine.read_execution(case.id)
    reason = None if record is None else record.stored_blocking_reason
    if reason not in BLOCKING_REASONS:
        reason = "paused_by_operator"
    return await case.engine.unblock_execution(case.id, expected_blocking_reason=reason)


BLOCKING_REASONS = {
    "waiting_for_budget": "blocked_by_budget",
    "waiting_for_quota": "blocked_by_quota",
    "waiting_for_capable_worker": "blocked_by_route",
    "paused_by_operator": "blocked_by_operator",
    "paused_by_policy": "blocked_by_lane_state",
}
# Retries what a worker reports, not what the timer ends.
TIMED = ExecutionPolicy(
    retry_policy=ff.RetryPolicy(backoff=ff.Fixed(10 * SECOND)), timeout_policy=TimeoutPolicy(attempt_timeout=HOUR)
)
TIMED_ONCE = ExecutionPolicy(
    retry_policy=ff.RetryPolicy(backoff=ff.Fixed(10 * SECOND), retryable_categories=("transient",)),
    timeout_policy=TimeoutPolicy(attempt_timeout=HOUR),
)
NO_RECLAIM = ExecutionPolicy(retry_policy=RETRY.retry_policy, max_reclaim_count=0)


def _gives_up(behavior: TimeoutBehavior) -> ExecutionPolicy:
    """A suspension that names no time of its own ends after an hour, in this way."""
    return ExecutionPolicy(
        retry_policy=RETRY.retry_policy,
        suspension_policy=SuspensionPolicy(default_timeout=HOUR, timeout_behavior=behavior),
    )


# The refusal of a holder's call in every state except A.
NOT_HELD = {
    "W": "execution_not_active",
    "D": "execution_not_active",
    "C": "execution_not_active",
    "B": "execution_not_active",
    "T": "execution_not_active",
    "S": "execution_not_active",
    "X": "lease_expired",
    "V": "lease_revoked",
}
EVERYWHERE = dict.fromkeys("WDCBAXVST")


@dataclass(frozen=True)
class Operation:
    """One way of calling one operation.

    `rows` are the rows of the transition table this call may take, `answer` what it then answers, `only` narrows their
    sources where the table leaves the choice to a remark. `unchanged` gives the answer in every other state, by the
    longest prefix of its name. `missing` is the answer for an unknown execution. `events` are what is written instead
    of the row's, where the table leaves them to the operation.
    """

    name: str
    call: Call
    rows: tuple[int, ...] = ()
    answer: str = ""
    unchanged: Mapping[str, str | None] = field(default_factory=dict)
    only: tuple[str, ...] | None = None
    states: tuple[str, ...] = tuple(STATES)
    prepare: Call = _nothing
    creating: Mapping[str, Any] = field(default_factory=dict)
    missing: str = "not_found"
    events: tuple[str, ...] | None = None

    def row(self, state: str, at: str) -> Transition | None:
        """The row of the table this call takes from a state, if any."""
        if self.only is not None and not any(state.startswith(prefix) for prefix in self.only):
            return None
        found = [r for r in TRANSITIONS if r.number in self.rows and any(matches(s, at) for s in r.sources)]
        assert len(found) <= 1, found
        return found[0] if found else None

    def refusal(self, state: str) -> str:
        prefixes = [p for p in self.unchanged if state.startswith(p)]
        answer = self.unchanged[max(prefixes, key=len)]
        assert answer is not None
        return answer


def _everywhere(answer: str, **others: str) -> dict[str, str | None]:
    return {**dict.fromkeys(EVERYWHERE, answer), **others}


_ENDED = {"T": "execution_not_active", "T:cancelled": "Cancelled"}


async def pause_for_budget(c: Any) -> Any:
    """Ask for more than a budget can ever have."""
    made = await c.engine.create_budget(name="too small", dimensions=["t"], hard_limits=[1], soft_limits=[0])
    return await c.engine.pause_for_budget(c.handle, {"t": 2}, made.budget_id)


OPERATIONS: tuple[Operation, ...] = (
    # claiming
    Operation(
        "claim",
        _claim,
        rows=(10, 11, 28),
        answer="Claimed",
        only=("W", "B.route", "X", "V"),
        unchanged=_everywhere("none"),
        missing="none",
    ),
    Operation(
        "claim with other code",
        _claim_with_other_code,
        rows=(10, 11, 28),
        answer="Claimed",
        only=("W", "B.route", "B.changed", "X", "V"),
        unchanged=_everywhere("none"),
        missing="none",
    ),
    Operation(
        "claim with the code that stopped it",
        _claim_with_the_same_code,
        states=("B.changed", "A", "D.i"),
        unchanged=_everywhere("none"),
        missing="none",
    ),
    Operation(
        "claim at the reclaim cap",
        _claim,
        rows=(29,),
        answer="none",
        only=("X", "V"),
        states=("X", "V", "A", "D.1", "T:failed"),
        creating={"policy": NO_RECLAIM},
        unchanged=_everywhere("none"),
        missing="none",
    ),
    Operation(
        "issue_claim_grant",
        lambda c: c.engine.issue_claim_grant(c.id, **WORKER),
        rows=(9,),
        answer="ClaimGrant",
        unchanged=_everywhere("execution_not_eligible"),
    ),
    Operation(
        "claim_execution",
        _claim_execution,
        rows=(10,),
        answer="Claimed",
        only=("W",),
        prepare=_claim_grant,
        unchanged=_everywhere(
            "execution_not_leaseable",
            **{"W.i": "use_claim_resumed_execution", "W.s": "use_claim_resumed_execution"},
        ),
    ),
    Operation(
        "claim_execution without a grant",
        _claim_execution,
        unchanged=_everywhere(
            "execution_not_leaseable",
            W="invalid_claim_grant",
            **{"W.i": "use_claim_resumed_execution", "W.s": "use_claim_resumed_execution"},
        ),
    ),
    Operation(
        "issue_grant_and_claim",
        lambda c: c.engine.issue_grant_and_claim(c.id),
        rows=(10, 11),
        answer="Claimed",
        only=("W",),
        unchanged=_everywhere("execution_not_eligible"),
    ),
    Operation(
        "claim_resumed_execution",
        _claim_resumed,
        rows=(11,),
        answer="Claimed",
        only=("W",),
        prepare=_claim_grant,
        unchanged=_everywhere("execution_not_leaseable", W="not_a_resumed_execution"),
    ),
    Operation(
        "claim_resumed_execution without a grant",
        _claim_resumed,
        unchanged=_everywhere(
            "execution_not_leaseable",
            W="not_a_resumed_execution",
            **{"W.i": "invalid_claim_grant", "W.s": "invalid_claim_grant"},
        ),
    ),
    Operation(
        "claim_from_resume_grant",
        _claim_from_resume_grant,
        rows=(11,),
        answer="Claimed",
        only=("W",),
        prepare=_claim_grant,
        unchanged=_everywhere("none"),
    ),
    Operation(
        "claim_from_resume_grant with a forged grant",
        _claim_from_resume_grant,
        unchanged=_everywhere("none", **{"W.i": "invalid_claim_grant", "W.s": "invalid_claim_grant"}),
    ),
    Operation(
        "issue_reclaim_grant",
        lambda c: c.engine.issue_reclaim_grant(c.id, **WORKER),
        rows=(27,),
        answer="ReclaimGrant",
        unchanged=_everywhere("NotReclaimable"),
    ),
    Operation(
        "issue_reclaim_grant at the cap",
        lambda c: c.engine.issue_reclaim_grant(c.id, **WORKER),
        rows=(29,),
        answer="ReclaimCapExceeded",
        creating={"policy": NO_RECLAIM},
        unchanged=_everywhere("NotReclaimable"),
    ),
    Operation(
        "reclaim_execution",
        _reclaim,
        rows=(28,),
        answer="Claimed",
        prepare=_reclaim_grant,
        unchanged=_everywhere("GrantNotFound"),
    ),
    Operation(
        "reclaim_execution without a grant",
        _reclaim,
        unchanged=_everywhere("GrantNotFound"),
    ),
    Operation(
        "reclaim_execution at the cap",
        lambda c: _reclaim(c, max_reclaim_count=0),
        rows=(29,),
        answer="ReclaimCapExceeded",
        prepare=_reclaim_grant,
        states=("X", "V", "A", "W.1"),
        creating={"policy": None},
        unchanged=_everywhere("GrantNotFound"),
    ),
    # the holder of the lease
    Operation("renew", lambda c: c.engine.renew(c.handle), rows=(13,), answer="Renewed", unchanged=NOT_HELD),
    Operation(
        "renew without a fence",
        lambda c: c.engine.renew(c.operator),  # type: ignore[arg-type]
        unchanged=_everywhere("invalid_input"),
    ),
    Operation(
        "progress",
        lambda c: c.engine.progress(c.handle, percent=7, message="on it"),
        rows=(14,),
        answer="none",
        unchanged=NOT_HELD,
    ),
    Operation(
        "progress without a fence",
        lambda c: c.engine.progress(c.operator, percent=7),  # type: ignore[arg-type]
        unchanged=_everywhere("invalid_input"),
    ),
    Operation(
        "complete",
        lambda c: c.engine.complete(c.handle, b"result"),
        rows=(15,),
        answer="Completed",
        unchanged={**NOT_HELD, "T:completed": "Completed", "W.p": "Completed"},
    ),
    Operation(
        "complete by an operator",
        lambda c: c.engine.complete(c.operator, b"result"),
        rows=(15,),
        answer="Completed",
        unchanged=NOT_HELD,
    ),
    Operation(
        "fail with a retry",
        lambda c: c.engine.fail(c.handle, "boom"),
        rows=(16,),
        answer="RetryScheduled",
        unchanged={**NOT_HELD, "D.r": "RetryScheduled", "W.r": "RetryScheduled", "T:failed": "TerminalFailed"},
    ),
    Operation(
        "fail for good",
        lambda c: c.engine.fail(c.handle, "boom", failure_class="permanent"),
        rows=(17,),
        answer="TerminalFailed",
        unchanged={**NOT_HELD, "D.r": "RetryScheduled", "W.r": "RetryScheduled", "T:failed": "TerminalFailed"},
    ),
    Operation(
        "fail by an operator",
        lambda c: c.engine.fail(c.operator, "boom"),
        rows=(16,),
        answer="RetryScheduled",
        states=tuple(state for state in STATES if state != "B.changed"),
        unchanged=NOT_HELD,
    ),
    Operation(
        "fail by an operator what changed code stopped",
        lambda c: c.engine.fail(c.operator, "boom"),
        rows=(42,),
        answer="TerminalFailed",
        only=("B.changed",),
        states=("B.changed", "B.route", "W.i", "X"),
        unchanged=NOT_HELD,
    ),
    Operation(
        "stop_changed",
        lambda c: c.engine.stop_changed(c.handle, detail="recorded: a; asked for: b", digest="new code"),
        rows=(41,),
        answer="Stopped",
        unchanged=NOT_HELD,
    ),
    Operation(
        "pause_for_budget",
        pause_for_budget,
        rows=(43,),
        answer="PausedForBudget",
        unchanged=NOT_HELD,
    ),
    Operation("delay", lambda c: c.engine.delay(c.handle, HOUR), rows=(18,), answer="Delayed", unchanged=NOT_HELD),
    Operation(
        "delay by an operator",
        lambda c: c.engine.delay(c.operator, HOUR),
        rows=(18,),
        answer="Delayed",
        unchanged=NOT_HELD,
    ),
    Operation(
        "wait_children", lambda c: c.engine.wait_children(c.handle), rows=(19,), answer="Moved", unchanged=NOT_HELD
    ),
    Operation(
        "wait_children by an operator",
        lambda c: c.engine.wait_children(c.operator),
        rows=(19,),
        answer="Moved",
        unchanged=NOT_HELD,
    ),
    Operation("release", lambda c: c.engine.release(c.handle), rows=(39,), answer="Released", unchanged=NOT_HELD),
    Operation("park", lambda c: _park_until(c, hours=1), rows=(18,), answer="Parked", unchanged=NOT_HELD),
    Operation(
        "park until another ends",
        lambda c: c.engine.park(c.handle, ends_of=[c.other]),
        rows=(19,),
        answer="Parked",
        prepare=_another,
        unchanged=NOT_HELD,
    ),
    Operation(
        "park until a signal arrives",
        _park_for_signals,
        rows=(20,),
        answer="Parked",
        prepare=_pending_waitpoint,
        unchanged=NOT_HELD,
    ),
    *(
        Operation(
            f"park when {why}",
            call,
            prepare=prepare,
            unchanged={**NOT_HELD, "A": "Parked"},
        )
        for why, call, prepare in (
            ("the time has come", lambda c: _park_until(c), _nothing),
            ("the other has ended", lambda c: c.engine.park(c.handle, ends_of=[c.other]), _another_ended),
            ("the other is unknown", lambda c: c.engine.park(c.handle, ends_of=[c.other]), _nothing),
        )
    ),
    Operation(
        "park without a fence",
        lambda c: c.engine.park(c.operator, ends_of=[c.other]),  # type: ignore[arg-type]
        prepare=_another,
        unchanged=_everywhere("invalid_input"),
    ),
    Operation(
        "record_steps without a fence",
        lambda c: _verdict(c.engine.record_steps([(c.operator, NewStep(name="s"))])),  # type: ignore[list-item]
        unchanged=_everywhere("invalid_input"),
    ),
    # suspending, and what ends a suspension
    *(
        Operation(
            name,
            call,
            rows=(20,),
            answer="Suspended",
            prepare=prepare,
            unchanged={**NOT_HELD, "S": told},
        )
        for name, call, prepare, told in (
            ("suspend", _suspend, _nothing, "already_suspended"),
            ("suspend by triple", _suspend_by_triple, _nothing, "execution_not_active"),
            ("suspend on a pending waitpoint", _suspend, _pending_waitpoint, "already_suspended"),
        )
    ),
    Operation(
        "deliver_signal",
        _signal,
        rows=(21,),
        answer="Accepted",
        prepare=_token,
        states=("S", "W.s", "D.s"),
        unchanged=_everywhere("waitpoint_closed"),
        events=("G:resume_condition_satisfied",),
        missing="invalid_token",
    ),
    Operation(
        "deliver_signal for later",
        lambda c: _signal(c, resume_delay=HOUR),
        rows=(22,),
        answer="Accepted",
        prepare=_token,
        states=("S", "W.s", "D.s"),
        unchanged=_everywhere("waitpoint_closed"),
        events=("G:resume_condition_satisfied",),
        missing="invalid_token",
    ),
    Operation(
        "resume_execution",
        lambda c: c.engine.resume_execution(c.id, "operator"),
        rows=(21,),
        answer="Resumed",
        unchanged=_everywhere("execution_not_suspended"),
        events=("O:resumed",),
    ),
    Operation(
        "resume_execution for later",
        lambda c: c.engine.resume_execution(c.id, "operator", HOUR),
        rows=(22,),
        answer="Resumed",
        unchanged=_everywhere("execution_not_suspended"),
        events=("O:resumed",),
    ),
    *(
        Operation(
            f"expire_suspension with {behavior}",
            lambda c: c.engine.expire_suspension(c.id),
            rows=(row,),
            answer="ExpiredSuspension",
            prepare=_later(hours=2),
            creating={"policy": _gives_up(behavior)},
            unchanged=_everywhere("not_suspended"),
            events=events,
        )
        for behavior, row, events in (
            ("fail", 23, ("K:failed",)),
            ("cancel", 23, ("K:cancelled",)),
            ("expire", 23, ("K:expired",)),
            ("auto_resume_with_timeout_signal", 21, ()),
            ("escalate", 24, None),
        )
    ),
    Operation(
        "expire_suspension too early",
        lambda c: c.engine.expire_suspension(c.id),
        creating={"policy": _gives_up("fail")},
        unchanged=_everywhere("not_suspended", S="not_yet_due"),
    ),
    Operation(
        "expire_suspension without a time",
        lambda c: c.engine.expire_suspension(c.id),
        prepare=_later(days=9),
        unchanged=_everywhere("not_suspended", S="not_yet_due"),
    ),
    # cancelling
    Operation(
        "cancel",
        lambda c: c.engine.cancel(c.handle, "enough"),
        rows=(34,),
        answer="Cancelled",
        only=("A",),
        unchanged={**NOT_HELD, **_ENDED},
    ),
    *(
        Operation(
            f"cancel as {source}",
            lambda c, source=source: c.engine.cancel(c.by(source), "enough"),  # type: ignore[misc]
            rows=(33, 34, 35),
            answer="Cancelled",
            unchanged=_ENDED,
        )
        for source in ("operator_override", "flow_cascade", "system_timeout")
    ),
    Operation(
        "cancel_many",
        lambda c: _verdict(c.engine.cancel_many([c.id], "enough")),
        rows=(33, 34, 35),
        answer="Cancelled",
        unchanged=_ENDED,
    ),
    Operation(
        "cancel as lease_holder",
        lambda c: c.engine.cancel(c.handle.fence, "enough", source="lease_holder"),
        rows=(34,),
        answer="Cancelled",
        only=("A",),
        unchanged={**NOT_HELD, **_ENDED},
    ),
    Operation(
        "cancel as lease_holder without a fence",
        lambda c: c.engine.cancel(c.by("lease_holder"), "enough"),
        unchanged={
            **NOT_HELD,
            **_ENDED,
            "A": "invalid_input",
            "X": "invalid_input",
            "V": "invalid_input",
        },
    ),
    Operation(
        "cancel as billing",
        lambda c: c.engine.cancel(c.handle.fence, "enough", source="billing"),
        rows=(33, 34, 35),
        answer="Cancelled",
        only=("W", "D", "C", "B", "A", "S"),
        unchanged={**_ENDED, "X": "lease_expired", "V": "lease_revoked"},
    ),
    Operation(
        "cancel as billing without a fence",
        lambda c: c.engine.cancel(c.by("billing"), "enough"),
        rows=(33, 35),
        answer="Cancelled",
        unchanged={**_ENDED, "A": "invalid_input", "X": "invalid_input", "V": "invalid_input"},
    ),
    # operators and schedulers
    Operation(
        "revoke_lease",
        lambda c: c.engine.revoke_lease(c.id),
        rows=(26,),
        answer="Revoked",
        unchanged=_everywhere("no_active_lease", X="already_expired", V="already_revoked"),
    ),
    Operation(
        "replay_execution",
        lambda c: c.engine.replay_execution(c.id),
        rows=(36,),
        answer="Replayed",
        unchanged=_everywhere("execution_not_terminal"),
    ),
    Operation(
        "replay_many",
        lambda c: _verdict(c.engine.replay_many([c.id])),
        rows=(36,),
        answer="Replayed",
        unchanged=_everywhere("execution_not_terminal"),
    ),
    Operation(
        "delete_execution",
        lambda c: c.engine.delete_execution(c.id),
        rows=(38,),
        answer="none",
        unchanged=_everywhere("execution_not_terminal"),
    ),
    Operation(
        "change_priority",
        lambda c: c.engine.change_priority(c.id, 5),
        rows=(12,),
        answer="Changed",
        unchanged=_everywhere("execution_not_eligible"),
    ),
    *(
        Operation(
            f"block as {reason}",
            lambda c, reason=reason: c.engine.block_execution_for_admission(c.id, reason),  # type: ignore[misc]
            rows=(6,),
            answer="Blocked",
            unchanged=_everywhere("execution_not_eligible", T="execution_not_active"),
            missing="execution_not_found",
        )
        for reason in BLOCKING_REASONS
    ),
    Operation(
        "unblock",
        _unblock_matching,
        rows=(7,),
        answer="Changed",
        unchanged=_everywhere("execution_not_eligible"),
    ),
    Operation(
        "unblock whatever the reason",
        _unblock(None),
        rows=(7,),
        answer="Changed",
        unchanged=_everywhere("execution_not_eligible"),
    ),
    Operation(
        "unblock as waiting_for_quota",
        _unblock("waiting_for_quota"),
        rows=(7,),
        answer="Changed",
        only=("B.quota",),
        unchanged=_everywhere("execution_not_eligible"),
    ),
    # when a time has come
    Operation(
        "mark_lease_expired_if_due",
        lambda c: c.engine.mark_lease_expired_if_due(c.id),
        rows=(25,),
        answer="MarkedExpired",
        prepare=_later(seconds=31),
        unchanged=_everywhere("not_active", X="already_expired", V="already_revoked"),
        missing="execution_not_found",
    ),
    Operation(
        "mark_lease_expired_if_due too early",
        lambda c: c.engine.mark_lease_expired_if_due(c.id),
        unchanged=_everywhere("not_active", A="not_yet_expired", X="already_expired", V="already_revoked"),
        missing="execution_not_found",
    ),
    Operation(
        "promote_delayed",
        lambda c: c.engine.promote_delayed(c.id),
        rows=(8,),
        answer="promoted",
        only=("D.1", "D.r", "D.i", "D.s"),
        prepare=_later(hours=2),
        unchanged=_everywhere("not_runnable", W="not_delayed", B="not_delayed", C="not_delayed"),
    ),
    Operation(
        "promote_delayed too early",
        lambda c: c.engine.promote_delayed(c.id),
        unchanged=_everywhere("not_runnable", W="not_delayed", B="not_delayed", C="not_delayed", D="not_yet_due"),
    ),
    Operation(
        "expire_execution attempt_timeout with a retry",
        lambda c: c.engine.expire_execution(c.id, "attempt_timeout"),
        rows=(30,),
        answer="retry_scheduled",
        prepare=_later(hours=2),
        creating={"policy": TIMED},
        unchanged=_everywhere("not_yet_due", T="already_terminal"),
    ),
    Operation(
        "expire_execution attempt_timeout for good",
        lambda c: c.engine.expire_execution(c.id, "attempt_timeout"),
        rows=(31,),
        answer="expired",
        prepare=_later(hours=2),
        creating={"policy": TIMED_ONCE},
        unchanged=_everywhere("not_yet_due", T="already_terminal"),
    ),
    Operation(
        "expire_execution attempt_timeout too early",
        lambda c: c.engine.expire_execution(c.id, "attempt_timeout"),
        creating={"policy": TIMED},
        unchanged=_everywhere("not_yet_due", T="already_terminal"),
    ),
    Operation(
        "expire_execution execution_deadline",
        lambda c: c.engine.expire_execution(c.id, "execution_deadline"),
        rows=(32,),
        answer="expired",
        prepare=_later(hours=4),
        creating={"execution_deadline_at": 3 * HOUR},
        # A replayed execution has no deadline.
        only=("W.1", "W.r", "W.i", "W.s", "D", "C", "B", "A", "X", "V", "S"),
        unchanged={"W.p": "not_yet_due", "T": "already_terminal"},
    ),
    Operation(
        "expire_execution execution_deadline too early",
        lambda c: c.engine.expire_execution(c.id, "execution_deadline"),
        creating={"execution_deadline_at": 3 * HOUR},
        unchanged=_everywhere("not_yet_due", T="already_terminal"),
    ),
    Operation(
        "trim_retention",
        lambda c: c.engine.trim_retention(),
        rows=(38,),
        answer="1",
        only=("T:completed", "T:cancelled"),
        prepare=_later(days=7, hours=1),
        unchanged=_everywhere("0"),
        missing="0",
    ),
    Operation(
        "trim_retention after two weeks",
        lambda c: c.engine.trim_retention(),
        rows=(38,),
        answer="1",
        prepare=_later(days=14, hours=1),
        unchanged=_everywhere("0"),
        missing="0",
    ),
    Operation(
        "trim_retention too early",
        lambda c: c.engine.trim_retention(),
        unchanged=_everywhere("0"),
        missing="0",
    ),
)

BY_NAME = {operation.name: operation for operation in OPERATIONS}
# Every call that passes the ordered lease check, and every one that an operator may make without a fence.
HOLDER_CALLS = (
    "renew",
    "progress",
    "complete",
    "fail with a retry",
    "fail for good",
    "delay",
    "wait_children",
    "release",
    "stop_changed",
    "pause_for_budget",
    "park",
    "suspend",
    "suspend by triple",
    "cancel",
    "cancel as lease_holder",
    "cancel as billing",
)
OPERATOR_CALLS = (
    "complete by an operator",
    "fail by an operator",
    "delay by an operator",
    "wait_children by an operator",
)

# Rows that need flows or another execution, the two of create, and the one that says "no other row".
NOT_HERE = {1, 2, 3, 4, 5, 37, 40}


def target(row: Transition, at: str) -> list[str]:
    """Where a row of the table leads from a position."""
    return [at if t == "=" else t + at[1:] if t in ("W", "B", "D", "C") else t for t in row.targets]
