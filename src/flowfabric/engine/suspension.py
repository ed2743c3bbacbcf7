"""Suspension: executions that wait for people, callbacks or tools without holding a worker, and the signals that wake
them. Only who holds a token that the engine signed, or an operator, can signal a waitpoint."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, get_args
from uuid import UUID

import asyncpg
import msgspec

from flowfabric._postgres import rows
from flowfabric._postgres.refusals import refusal
from flowfabric.engine.calls import (
    Calls,
    Fences,
    check_duration,
    check_int,
    check_limit,
    check_list,
    moment,
    optional_bytes,
    parse_execution,
    parse_partition,
    raised,
)
from flowfabric.errors import Conflict, FlowFabricError, InvalidInput, NotFound, StateError, ValidationFailed
from flowfabric.values.checks import check_lane, check_text
from flowfabric.values.conditions import Condition, check_condition, condition_to_json, named_keys
from flowfabric.values.ids import ExecutionId, PartitionKey, mint_uuid, parse_uuid
from flowfabric.values.lease import Fence, Handle, HandleKind
from flowfabric.values.page import Page
from flowfabric.values.policies import TimeoutBehavior
from flowfabric.values.signal import Accepted, DuplicateSignal, ReceivedSignal, RecordedSignal
from flowfabric.values.state import State
from flowfabric.values.wait import (
    AlreadySatisfied,
    BoundWaitpoint,
    Closed,
    ExpiredSuspension,
    Fresh,
    NewWaitpoint,
    OpenWait,
    PendingWaitpoint,
    ReasonCode,
    RequestedBy,
    Resumed,
    ResumePolicy,
    Suspended,
    SuspendedExecution,
    Suspension,
    SuspensionDetails,
    TriggerType,
    UsePending,
    Wait,
    WaitpointToken,
    WaitState,
)

DEDUP_TTL = timedelta(days=1)
_MAXLEN = 1000
_REASONS = frozenset(get_args(ReasonCode))
_REQUESTERS = frozenset(get_args(RequestedBy))
_BEHAVIORS = frozenset(get_args(TimeoutBehavior))
_TRIGGERS = frozenset(get_args(TriggerType))
_SCOPES = ("waitpoint", "execution")
_CREATE = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at, token from flowfabric.create_waitpoint("
    "$1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
)
_CLOSE = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at"
    " from flowfabric.close_waitpoint($1, $2, $3, $4, $5, $6, $7, $8)"
)
_SUSPEND = (
    "select * from flowfabric.suspend("
    "$1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)"
)
_DELIVER = (
    "select code, detail, signal_id, effect, match_detail from flowfabric.deliver_signal("
    "$1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20)"
)
_RESUME = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at from flowfabric.resume_execution($1, $2, $3, $4)"
)
_OPEN_WAIT = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at, waitpoint_ids, waitpoint_keys, tokens"
    " from flowfabric.open_wait($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
)
_SETTLE_WAIT = (
    "select ordinal, code, detail, state, lease_epoch, attempt_id, at, outcome, result, seen"
    " from flowfabric.settle_wait($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"
)


class Suspensions(Calls):
    """suspend, create_waitpoint, deliver_signal, deliver_approval_signal, resume_execution, observe_signals, ..."""

    # Waitpoints

    async def create_waitpoint(
        self,
        authority: Handle | Fence,
        waitpoint_key: str,
        expires_in: timedelta,
        *,
        outlives_attempt: bool = False,
    ) -> NewWaitpoint:
        """A waitpoint and its token, to be handed out before the execution suspends. The lease is kept.

        It expires unless `suspend` uses it in time. With `outlives_attempt` it is not closed when the attempt is
        replaced by a retry or a reclaim, but goes over to the next one.
        """
        fences = Fences([authority])
        key = check_text(waitpoint_key, "waitpoint_key")
        if not isinstance(expires_in, timedelta):
            raise InvalidInput(f"got {type(expires_in).__name__}", field="expires_in", allowed="a timedelta")
        waitpoint_id = mint_uuid()
        row = await self._row(
            _CREATE, *fences.first, waitpoint_id, key, expires_in / timedelta(milliseconds=1), bool(outlives_attempt)
        )
        if row["code"] != "ok":
            raise _refused(row, fences.execution_id(0), waitpoint_id)
        return NewWaitpoint(waitpoint_id, WaitpointToken(row["token"]), row["at"])

    async def close_waitpoint(
        self, authority: Handle | Fence, waitpoint_id: UUID, reason: str = "proactive_close"
    ) -> Closed:
        """Close a pending waitpoint that will not be used. One that is closed already stays so."""
        fences = Fences([authority])
        target = parse_uuid(waitpoint_id, "waitpoint_id")
        row = await self._row(_CLOSE, *fences.first, target, _filled(reason, "reason"), repeatable=True)
        if row["code"] != "ok":
            raise _refused(row, fences.execution_id(0), target)
        return Closed(target)

    async def expire_waitpoint(self, execution_id: ExecutionId, waitpoint_id: UUID) -> Closed | AlreadySatisfied:
        """Expire one pending waitpoint if its time is over; what the duty does for all."""
        target = parse_execution(execution_id)
        waitpoint = parse_uuid(waitpoint_id, "waitpoint_id")
        row = await self._row(
            "select flowfabric.expire_waitpoint($1, $2, $3) as code",
            target.partition,
            target.uuid,
            waitpoint,
            repeatable=True,
        )
        return Closed(waitpoint) if row["code"] == "expired" else AlreadySatisfied(row["code"])

    async def list_pending_waitpoints(
        self, execution_id: ExecutionId, *, after: UUID | None = None, limit: int = 100
    ) -> Page[PendingWaitpoint, UUID]:
        """The waitpoints of an execution that can be signalled, by id. Tokens are not shown."""
        target = parse_execution(execution_id)
        size = min(max(check_int(limit, "limit", -(2**31), 2**31 - 1), 1), 1000)
        found = await self._fetch(
            "select * from flowfabric.list_pending_waitpoints($1, $2, $3, $4)",
            target.partition,
            target.uuid,
            None if after is None else parse_uuid(after, "after"),
            size,
            repeatable=True,
        )
        if found and found[0]["waitpoint_id"] is None:
            raise NotFound("execution", target)
        items = [
            PendingWaitpoint(
                waitpoint_id=row["waitpoint_id"],
                waitpoint_key=row["waitpoint_key"],
                state=row["state"],
                required_signal_names=tuple(row["required_signal_names"]),
                created_at=row["created_at"],
                activated_at=row["activated_at"],
                expires_at=row["expires_at"],
                execution_id=target,
                token_kid=row["token_kid"],
                token_fingerprint=row["token_fingerprint"] or "",
            )
            for row in found[:size]
        ]
        return Page(items, items[-1].waitpoint_id if len(found) > size else None)

    async def read_waitpoint_token(
        self, partition_key: str | PartitionKey, waitpoint_id: UUID
    ) -> WaitpointToken | None:
        """The token of a waitpoint that can still be signalled. For operators' tools: it is the right to signal."""
        partition = parse_partition(partition_key, self._database.flow_partitions)
        row = await self._row(
            "select flowfabric.read_waitpoint_token($1, $2) as token",
            partition,
            parse_uuid(waitpoint_id, "waitpoint_id"),
            repeatable=True,
        )
        return None if row["token"] is None else WaitpointToken(row["token"])

    async def probe_waitpoint(
        self, execution_id: ExecutionId, waitpoint_id: UUID, waitpoint_token: WaitpointToken | str
    ) -> str:
        """`ok`, `mismatch`, or `unknown` for a waitpoint that cannot be signalled. An early answer for bridges."""
        target = parse_execution(execution_id)
        row = await self._row(
            "select flowfabric.probe_waitpoint($1, $2, $3, $4) as code",
            target.partition,
            target.uuid,
            parse_uuid(waitpoint_id, "waitpoint_id"),
            _token(waitpoint_token),
            repeatable=True,
        )
        return str(row["code"])

    # Suspending

    async def suspend(
        self,
        authority: Handle,
        *,
        waitpoints: Sequence[Fresh | UsePending],
        resume_condition: Condition | dict[str, Any] | str,
        suspension_id: UUID | None = None,
        resume_policy: ResumePolicy | None = None,
        reason_code: ReasonCode = "waiting_for_signal",
        requested_by: RequestedBy = "worker",
        timeout_at: datetime | None = None,
        timeout_behavior: TimeoutBehavior = "fail",
        continuation_metadata_pointer: str | None = None,
        idempotency_key: str | None = None,
    ) -> Suspended | AlreadySatisfied:
        """Give the lease back until signals satisfy the condition, an operator resumes it, or its time is over.

        When signals that arrived on a pending waitpoint satisfy it already, the lease is kept and `observe_signals`
        gives them. A repeated call with the same `idempotency_key` and lease gets the first answer.
        """
        if not isinstance(authority, Handle):
            raise InvalidInput(f"got {type(authority).__name__}", field="authority", allowed="a Handle")
        args = _suspend_args(locals())
        if authority.kind is HandleKind.SUSPENDED:
            raise StateError("already_suspended", execution_id=authority.execution_id)
        return await self._suspend(authority, False, args)

    async def suspend_by_triple(
        self,
        authority: Fence,
        *,
        waitpoints: Sequence[Fresh | UsePending],
        resume_condition: Condition | dict[str, Any] | str,
        suspension_id: UUID | None = None,
        resume_policy: ResumePolicy | None = None,
        reason_code: ReasonCode = "waiting_for_signal",
        requested_by: RequestedBy = "worker",
        timeout_at: datetime | None = None,
        timeout_behavior: TimeoutBehavior = "fail",
        continuation_metadata_pointer: str | None = None,
        idempotency_key: str | None = None,
    ) -> Suspended | AlreadySatisfied:
        """The same for who has the fence but no handle."""
        if not isinstance(authority, Fence):
            raise InvalidInput(f"got {type(authority).__name__}", field="authority", allowed="a Fence")
        return await self._suspend(authority, True, _suspend_args(locals()))

    async def suspend_on(
        self,
        authority: Handle,
        waitpoints: Sequence[UUID],
        resume_condition: Condition,
        *,
        reason_code: ReasonCode = "waiting_for_signal",
        timeout_at: datetime | None = None,
        timeout_behavior: TimeoutBehavior = "fail",
    ) -> Suspended | AlreadySatisfied:
        """`suspend` on any number of pending waitpoints at once, as tasks do: their tokens are handed out by then."""
        bindings = [parse_uuid(one, "waitpoints") for one in check_list(waitpoints, "waitpoints")]
        if not bindings:
            raise InvalidInput("waitpoints_empty", field="waitpoints", allowed="at least one")
        condition = check_condition(resume_condition, has_deadline=timeout_at is not None)
        args = (
            mint_uuid(),
            bindings,
            [None] * len(bindings),
            _json(condition_to_json(condition)),
            _json(_policy(None)),
            _word(reason_code, _REASONS, "reason_code"),
            "worker",
            None if timeout_at is None else moment(timeout_at, "timeout_at"),
            _word(timeout_behavior, _BEHAVIORS, "timeout_behavior"),
            None,
            None,
        )
        return await self._suspend(authority, False, args)

    async def _suspend(
        self, authority: Handle | Fence, by_triple: bool, args: tuple[Any, ...]
    ) -> Suspended | AlreadySatisfied:
        fences = Fences([authority])
        execution_id = fences.execution_id(0)
        _, _, lease_id, lease_epoch, attempt_id, _ = fences.first
        row = await self._row(_SUSPEND, *fences.first, by_triple, *args, False)
        if row["code"] != "ok":
            raise _refused(row, execution_id, args[1])
        bound = [
            BoundWaitpoint(waitpoint_id, key, WaitpointToken(token))
            for waitpoint_id, key, token in zip(row["waitpoint_ids"], row["waitpoint_keys"], row["tokens"], strict=True)
        ]
        details = SuspensionDetails(
            suspension_id=row["suspension_id"],
            waitpoint_id=bound[0].waitpoint_id,
            waitpoint_key=bound[0].waitpoint_key,
            waitpoint_token=bound[0].waitpoint_token,
            additional_waitpoints=tuple(bound[1:]),
        )
        if row["variant"] == "already_satisfied":
            return AlreadySatisfied("signals", details)
        if isinstance(authority, Handle):
            return Suspended(details, msgspec.structs.replace(authority, kind=HandleKind.SUSPENDED))
        return Suspended(
            details,
            Handle(
                partition=execution_id.partition,
                uuid=execution_id.uuid,
                attempt_index=row["attempt_index"],
                attempt_id=attempt_id,
                lease_id=lease_id,
                lease_epoch=lease_epoch,
                lease_ttl=timedelta(milliseconds=row["lease_ttl_ms"]),
                lane_id=row["lane"],
                worker_instance_id=row["worker_instance_id"],
                kind=HandleKind.SUSPENDED,
            ),
        )

    # Signals

    async def deliver_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: UUID,
        waitpoint_token: WaitpointToken | str,
        *,
        signal_name: str,
        source_type: str,
        source_identity: str = "",
        signal_category: str = "external",
        signal_id: UUID | None = None,
        payload: bytes | None = None,
        payload_encoding: str = "json",
        correlation_id: str | None = None,
        idempotency_key: str | None = None,
        target_scope: str = "waitpoint",
        created_at: datetime | None = None,
        dedup_ttl: timedelta = DEDUP_TTL,
        resume_delay: timedelta | None = None,
        max_signals_per_execution: int | None = None,
        signal_maxlen: int = _MAXLEN,
    ) -> Accepted | DuplicateSignal:
        """Deliver a signal to a waitpoint. `ValidationFailed` of kind `invalid_token` when the token is not its own.

        Repeat it with the same `signal_id` or `idempotency_key` as often as needed: it is taken once.
        """
        return await self._deliver(
            parse_execution(execution_id),
            waitpoint_id,
            (_token(waitpoint_token), None),
            (signal_id, signal_name, signal_category, source_type, source_identity),
            (payload, payload_encoding, correlation_id, idempotency_key, target_scope, created_at),
            (dedup_ttl, resume_delay, max_signals_per_execution, signal_maxlen),
        )

    async def deliver_approval_signal(
        self,
        execution_id: ExecutionId,
        lane_id: str,
        waitpoint_id: UUID,
        *,
        signal_name: str,
        idempotency_suffix: str,
        signal_dedup_ttl: timedelta = DEDUP_TTL,
        source_identity: str = "",
        maxlen: int = _MAXLEN,
        max_signals_per_execution: int | None = None,
    ) -> Accepted | DuplicateSignal:
        """Deliver an operator's decision. The caller has authenticated the operator; no token is needed."""
        suffix = check_text(idempotency_suffix, "idempotency_suffix")
        return await self._deliver(
            parse_execution(execution_id),
            waitpoint_id,
            (None, check_lane(lane_id)),
            (None, signal_name, "approval", "operator", source_identity),
            (None, "json", None, f"approval:{signal_name}:{suffix}", "execution", None),
            (signal_dedup_ttl, None, max_signals_per_execution, maxlen),
        )

    async def _deliver(
        self,
        target: ExecutionId,
        waitpoint_id: UUID,
        right: tuple[str | None, str | None],
        who: tuple[Any, Any, Any, Any, Any],
        what: tuple[Any, Any, Any, Any, Any, Any],
        limits: tuple[Any, Any, Any, Any],
    ) -> Accepted | DuplicateSignal:
        signal_id, name, category, source_type, identity = who
        payload, encoding, correlation, key, scope, created_at = what
        dedup, delay, most, maxlen = limits
        name = _filled(name, "signal_name")
        if name.startswith("__"):
            raise InvalidInput("reserved_signal_name", field="signal_name", allowed="not beginning with __")
        if _filled(source_type, "source_type") == "system":
            raise InvalidInput("reserved for the engine", field="source_type", allowed="anything but system")
        if scope not in _SCOPES:
            raise InvalidInput(f"got {scope!r}", field="target_scope", allowed=", ".join(_SCOPES))
        waitpoint = parse_uuid(waitpoint_id, "waitpoint_id")
        row = await self._row(
            _DELIVER,
            target.partition,
            target.uuid,
            waitpoint,
            *right,
            mint_uuid() if signal_id is None else parse_uuid(signal_id, "signal_id"),
            name,
            check_text(category, "signal_category"),
            source_type,
            check_text(identity, "source_identity"),
            optional_bytes(payload, "payload"),
            check_text(encoding, "payload_encoding"),
            None if correlation is None else check_text(correlation, "correlation_id", 512),
            None if key is None else check_text(key, "idempotency_key", 1100),
            scope,
            None if created_at is None else moment(created_at, "created_at"),
            check_duration(dedup, "dedup_ttl", least_ms=0),
            None if delay is None else check_duration(delay, "resume_delay", least_ms=0),
            None if most is None else check_int(most, "max_signals_per_execution", 0, 2**32 - 1),
            check_int(maxlen, "signal_maxlen", 0, 2**31 - 1),
            repeatable=True,  # its id is the same however often it is sent
        )
        match row["code"]:
            case "accepted":
                return Accepted(row["signal_id"], row["effect"], row["match_detail"])
            case "duplicate":
                return DuplicateSignal(row["signal_id"])
            case "invalid_token" | "payload_too_large" | "signal_limit_exceeded":
                raise ValidationFailed(row["code"], row["detail"] or "", execution_id=target)
            case "invalid_input":
                raise InvalidInput(row["detail"], execution_id=target)  # its beginning is contract: lane_mismatch
            case "not_found":
                if right[1] is None:  # purged since its token was verified
                    raise ValidationFailed("invalid_token", "invalid_token", execution_id=target)
                raise NotFound("execution", target)
            case "waitpoint_not_found":
                raise NotFound("waitpoint", waitpoint)
            case code:
                raise refusal(code, row["detail"] or "", execution_id=target)

    async def observe_signals(self, authority: Handle | Fence) -> list[ReceivedSignal]:
        """The signals that ended the newest suspension of the handle's attempt, in the order they were accepted."""
        if not isinstance(authority, Handle | Fence):
            raise InvalidInput(f"got {type(authority).__name__}", field="authority", allowed="a Handle or a Fence")
        target = parse_execution(authority.execution_id)
        if authority.attempt_index is None:
            raise InvalidInput("missing", field="attempt_index", allowed="an integer")
        found = await self._fetch(
            "select * from flowfabric.observe_signals($1, $2, $3)",
            target.partition,
            target.uuid,
            check_int(authority.attempt_index, "attempt_index", 0, 2**31 - 1),
            repeatable=True,
        )
        return [ReceivedSignal(**_received(row)) for row in found]

    async def read_signals(
        self, execution_id: ExecutionId, *, after: int = 0, limit: int = 100
    ) -> Page[RecordedSignal, int]:
        """All signals that an execution accepted, with what each did, in order."""
        target = parse_execution(execution_id)
        size = check_limit(limit, 1000)
        if size == 0:
            return Page(())
        found = await self._fetch(
            "select * from flowfabric.read_signals($1, $2, $3, $4)",
            target.partition,
            target.uuid,
            check_int(after, "after", 0, 2**31 - 1),
            size + 1,
            repeatable=True,
        )
        items = [
            RecordedSignal(
                ordinal=row["ordinal"],
                waitpoint_id=row["waitpoint_id"],
                suspension_id=row["suspension_id"],
                target_scope=row["target_scope"],
                created_at=row["created_at"],
                observed_effect=row["observed_effect"],
                match_detail=row["match_detail"],
                **_received(row),
            )
            for row in found[:size]
        ]
        return Page(items, items[-1].ordinal if len(found) > size else None)

    # Resuming and expiring

    async def resume_execution(
        self,
        execution_id: ExecutionId,
        trigger_type: TriggerType = "signal",
        resume_delay: timedelta = timedelta(0),
    ) -> Resumed:
        """Resume a suspended execution whatever its condition says; an operator's override."""
        target = parse_execution(execution_id)
        row = await self._row(
            _RESUME,
            target.partition,
            target.uuid,
            _word(trigger_type, _TRIGGERS, "trigger_type"),
            check_duration(resume_delay, "resume_delay", least_ms=0),
        )
        if row["code"] != "ok":
            raise raised(row, target)
        return Resumed(target, State(row["state"]))

    async def expire_suspension(self, execution_id: ExecutionId) -> ExpiredSuspension | AlreadySatisfied:
        """End one suspension if its time is over; what the duty does for all."""
        target = parse_execution(execution_id)
        row = await self._row(
            "select code, behavior from flowfabric.expire_suspension($1, $2)",
            target.partition,
            target.uuid,
            repeatable=True,
        )
        if row["code"] == "done":
            return ExpiredSuspension(target, row["behavior"])
        return AlreadySatisfied(row["code"])

    # Reads

    async def read_suspension(self, execution_id: ExecutionId) -> Suspension | None:
        """The newest suspension of an execution, open or closed; None when it has none."""
        target = parse_execution(execution_id)
        found = await self._fetch(
            "select * from flowfabric.read_suspension($1, $2)", target.partition, target.uuid, repeatable=True
        )
        if not found:
            return None
        row = found[0]
        return Suspension(
            suspension_id=row["suspension_id"],
            execution_id=target,
            attempt_index=row["attempt_index"],
            waitpoint_ids=tuple(row["waitpoint_ids"]),
            waitpoint_keys=tuple(row["waitpoint_keys"]),
            reason_code=row["reason_code"],
            requested_by=row["requested_by"],
            continuation_metadata_pointer=row["continuation_metadata_pointer"],
            resume_condition=rows.decode_json(row["resume_condition"]),
            resume_policy=rows.decode_json(row["resume_policy"]),
            suspended_at=row["suspended_at"],
            timeout_at=row["timeout_at"],
            timeout_behavior=row["timeout_behavior"],
            last_signal_at=row["last_signal_at"],
            satisfied_at=row["satisfied_at"],
            closed_at=row["closed_at"],
            close_reason=row["close_reason"],
            trigger_type=row["trigger_type"],
            closer_signal_id=row["closer_signal_id"],
            satisfier_signal_ids=tuple(row["satisfier_signal_ids"] or ()),
        )

    async def list_suspended(
        self, partition_key: str | PartitionKey, *, cursor: str | None = None, limit: int = 100
    ) -> Page[SuspendedExecution, str]:
        """The suspended executions of a partition, by when they were suspended."""
        partition = parse_partition(partition_key, self._database.flow_partitions)
        at, uuid = _place(cursor)
        size = check_limit(limit, 1000)
        if size == 0:
            return Page(())
        found = await self._fetch(
            "select * from flowfabric.list_suspended($1, $2, $3, $4)", partition, at, uuid, size, repeatable=True
        )
        items = [
            SuspendedExecution(
                execution_id=ExecutionId.of(partition, row["id"]),
                suspended_at=row["suspended_at"],
                reason=row["reason_code"],
                timeout_at=row["timeout_at"],
            )
            for row in found[:size]
        ]
        last = items[-1] if len(found) > size else None
        return Page(items, None if last is None else _cursor(last.suspended_at, last.execution_id.uuid))

    async def list_waits(
        self,
        *,
        lane_id: str | None = None,
        namespace: str | None = None,
        waitpoint_key: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[Wait, str]:
        """The waitpoints that can be signalled, over all partitions, the longest waiting first."""
        at, uuid = _place(cursor)
        size = check_limit(limit, 1000)
        if size == 0:
            return Page(())
        found = await self._fetch(
            "select * from flowfabric.list_waits($1, $2, $3, $4, $5, $6)",
            at,
            uuid,
            size,
            None if lane_id is None else check_lane(lane_id),
            None if namespace is None else check_text(namespace, "namespace"),
            None if waitpoint_key is None else check_text(waitpoint_key, "waitpoint_key"),
            repeatable=True,
        )
        items = [
            Wait(
                execution_id=ExecutionId.of(row["partition"], row["id"]),
                execution_kind=row["kind"],
                lane_id=row["lane"],
                namespace=row["namespace"],
                waitpoint_id=row["waitpoint_id"],
                waitpoint_key=row["waitpoint_key"],
                state=row["state"],
                reason=row["reason_code"],
                since=row["created_at"],
                timeout_at=row["timeout_at"],
                timeout_behavior=row["timeout_behavior"],
                required_signal_names=tuple(row["required_signal_names"]),
                signal_count=row["signal_count"],
            )
            for row in found[:size]
        ]
        last = items[-1] if len(found) > size else None
        return Page(items, None if last is None else _cursor(last.since, last.waitpoint_id))

    # Waits of tasks

    async def open_wait(
        self, authority: Handle | Fence, name: str, n: int, keys: Sequence[str], within: timedelta | None
    ) -> OpenWait:
        """The waitpoints of a task's wait, made and remembered under a name; or those that are remembered already."""
        fences = Fences([authority])
        bound = [_filled(key, "keys") for key in check_list(keys, "keys")]
        if not bound:
            raise InvalidInput("empty", field="keys", allowed="at least one key")
        if not isinstance(within, timedelta | None):
            raise InvalidInput(f"got {type(within).__name__}", field="within", allowed="a timedelta or None")
        row = await self._row(
            _OPEN_WAIT,
            *fences.first,
            _filled(name, "name", 512),
            check_int(n, "n", 0, 2**31 - 1),
            [mint_uuid() for _ in bound],
            bound,
            None if within is None else max(within / timedelta(milliseconds=1), 0.0),
            repeatable=True,
        )
        if row["code"] != "ok":
            raise _refused(row, fences.execution_id(0), None)
        return OpenWait(
            waitpoints=tuple(
                BoundWaitpoint(waitpoint_id, key, WaitpointToken(token))
                for waitpoint_id, key, token in zip(
                    row["waitpoint_ids"], row["waitpoint_keys"], row["tokens"], strict=True
                )
            ),
            deadline=row["at"],
        )

    async def settle_wait(
        self,
        authority: Handle | Fence,
        name: str,
        n: int,
        condition: Condition,
        *,
        reason_code: ReasonCode = "waiting_for_signal",
        deadline: datetime | None = None,
        give_up: bool = False,
    ) -> WaitState:
        """How a task's wait stands; once it is over, that is remembered. `give_up`: it is over if it is still open."""
        fences = Fences([authority])
        row = await self._row(
            _SETTLE_WAIT,
            *fences.first,
            _filled(name, "name", 512),
            check_int(n, "n", 0, 2**31 - 1),
            mint_uuid(),
            _json(condition_to_json(check_condition(condition, has_deadline=True))),
            _word(reason_code, _REASONS, "reason_code"),
            None if deadline is None else moment(deadline, "deadline"),
            bool(give_up),
            repeatable=True,
        )
        if row["code"] != "ok":
            raise _refused(row, fences.execution_id(0), None)
        return WaitState(outcome=row["outcome"], result=row["result"], seen=tuple(row["seen"]))


def _suspend_args(given: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a suspend, checked in the order of the contract; the detail begins with the code it gives."""
    bindings = given["waitpoints"]
    if isinstance(bindings, str | bytes) or not isinstance(bindings, Sequence):
        raise InvalidInput(f"got {type(bindings).__name__}", field="waitpoints", allowed="a list of bindings")
    if not bindings:
        raise InvalidInput("waitpoints_empty", allowed="at least one binding")
    for binding in bindings:
        if not isinstance(binding, Fresh | UsePending):
            raise InvalidInput(f"got {type(binding).__name__}", field="waitpoints", allowed="Fresh or UsePending")
    timeout_at = None if given["timeout_at"] is None else moment(given["timeout_at"], "timeout_at")
    condition = check_condition(given["resume_condition"], has_deadline=timeout_at is not None)
    fresh = [binding for binding in bindings if isinstance(binding, Fresh)]
    for binding in fresh:
        if check_text(binding.waitpoint_key, "waitpoint_key") == "":
            raise InvalidInput("waitpoint_key_empty", allowed="a non-empty key")
    ids = [parse_uuid(binding.waitpoint_id, "waitpoint_id") for binding in bindings]
    keys = [binding.waitpoint_key for binding in fresh]
    if len(set(ids)) < len(ids) or len(set(keys)) < len(keys):
        raise InvalidInput("duplicate_waitpoint_binding", allowed="distinct ids and keys")
    if len(fresh) < len(bindings) and len(bindings) > 1:
        raise InvalidInput("use_pending_with_extras_unsupported", allowed="UsePending alone")
    if fresh:
        _check_binding(condition, keys)
    return (
        mint_uuid() if given["suspension_id"] is None else parse_uuid(given["suspension_id"], "suspension_id"),
        ids,
        [binding.waitpoint_key if isinstance(binding, Fresh) else None for binding in bindings],
        _json(condition_to_json(condition)),
        _json(_policy(given["resume_policy"])),
        _word(given["reason_code"], _REASONS, "reason_code"),
        _word(given["requested_by"], _REQUESTERS, "requested_by"),
        timeout_at,
        _word(given["timeout_behavior"], _BEHAVIORS, "timeout_behavior"),
        None
        if given["continuation_metadata_pointer"] is None
        else check_text(given["continuation_metadata_pointer"], "continuation_metadata_pointer", 65_536),
        None if given["idempotency_key"] is None else check_text(given["idempotency_key"], "idempotency_key", 512),
    )


def _check_binding(condition: Condition, keys: list[str]) -> None:
    """Every key of the condition is bound, every binding is named: but for one alone under Operator- or TimeoutOnly."""
    named = named_keys(condition)
    if len(keys) == 1 and type(condition).__name__ == "Single" and named != keys:
        raise InvalidInput("waitpoint_key_mismatch", allowed=f"the condition's key {named[0]!r}")
    for key in named:
        if key not in keys:
            raise InvalidInput(f"referenced_waitpoint_key_missing_binding: {key}")
    if len(keys) == 1 and type(condition).__name__ in ("OperatorOnly", "TimeoutOnly"):
        return
    for key in keys:
        if key not in named:
            raise InvalidInput(f"extra_binding_not_referenced_by_condition: {key}")


def _policy(value: object) -> dict[str, Any]:
    policy = ResumePolicy() if value is None else value
    if not isinstance(policy, ResumePolicy) or policy.resume_target != "runnable":
        raise InvalidInput(f"got {value!r}", field="resume_policy", allowed="a ResumePolicy with target runnable")
    delay = policy.resume_delay
    return {
        "resume_target": policy.resume_target,
        "resume_delay_ms": None if delay is None else check_duration(delay, "resume_delay", least_ms=0),
        "consume_matched_signals": bool(policy.consume_matched_signals),
        "retain_signal_buffer_until_closed": bool(policy.retain_signal_buffer_until_closed),
        "close_waitpoint_on_resume": bool(policy.close_waitpoint_on_resume),
    }


def _refused(row: asyncpg.Record, execution_id: ExecutionId, waitpoints: object) -> FlowFabricError:
    match row["code"]:
        case "waitpoint_not_found":
            return NotFound("waitpoint", waitpoints[0] if isinstance(waitpoints, list) else waitpoints)
        case "waitpoint_already_exists":
            return Conflict("waitpoint_already_exists", execution_id=execution_id)
        case "invalid_waitpoint_for_execution":
            return ValidationFailed("invalid_waitpoint_for_execution", execution_id=execution_id)
        case "already_suspended" | "waitpoint_not_pending" | "pending_waitpoint_expired" as kind:
            return StateError(kind, execution_id=execution_id)
        case _:
            return raised(row, execution_id)


_SIGNAL_FIELDS = (
    "signal_id", "signal_name", "signal_category", "source_type", "source_identity", "correlation_id", "accepted_at",
    "payload", "payload_encoding", "waitpoint_key",
)  # fmt: skip


def _received(row: asyncpg.Record) -> dict[str, Any]:
    return {name: row[name] for name in _SIGNAL_FIELDS}


def _token(value: object) -> str:
    """A token as it can be asked about; what can be none becomes a text that is none, refused like any other."""
    text = value.reveal() if isinstance(value, WaitpointToken) else value
    if not isinstance(text, str):
        raise InvalidInput(f"got {type(value).__name__}", field="waitpoint_token", allowed="a token")
    if len(text) > 200 or not text.isascii() or "\0" in text:
        return "no token"
    return text


def _filled(value: object, field: str, most: int = 256) -> str:
    text = check_text(value, field, most)
    if not text:
        raise InvalidInput("empty", field=field, allowed="a non-empty text")
    return text


def _word(value: object, allowed: frozenset[str], field: str) -> str:
    if value == "auto_resume" and field == "timeout_behavior":
        return "auto_resume_with_timeout_signal"
    if not isinstance(value, str) or value not in allowed:
        raise InvalidInput(f"got {value!r}", field=field, allowed=", ".join(sorted(allowed)))
    return value


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _cursor(at: datetime, uuid: UUID) -> str:
    return base64.urlsafe_b64encode(f"{at.isoformat()} {uuid}".encode()).decode()


def _place(cursor: object) -> tuple[datetime | None, UUID | None]:
    if cursor is None:
        return None, None
    try:
        at, uuid = base64.urlsafe_b64decode(str(cursor).encode()).decode().split(" ")
        return moment(datetime.fromisoformat(at), "cursor"), UUID(uuid)
    except (ValueError, binascii.Error, InvalidInput):
        raise InvalidInput("not one of ours", field="cursor", allowed="a next_cursor of this list") from None
