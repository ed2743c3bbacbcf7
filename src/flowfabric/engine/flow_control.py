"""What moves flows on: the cascade, sibling cancels, the cancellation of a flow, and their repair."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta
from uuid import UUID

from msgspec import Struct

from flowfabric.engine.calls import check_duration, check_filter, check_int, parse_execution
from flowfabric.engine.flows import FlowCalls
from flowfabric.engine.hooks import Round
from flowfabric.errors import (
    Contention,
    InvalidInput,
    NotFound,
    RetriesExhausted,
    StateError,
    TimedOut,
    ValidationFailed,
)
from flowfabric.values.checks import escape_text
from flowfabric.values.event import Event
from flowfabric.values.flow import (
    Advanced,
    CancellationPolicy,
    CancellationScheduled,
    CascadeOutcome,
    FlowAlreadyTerminal,
    FlowCancelHeader,
    FlowCancelled,
    NoOp,
    PartiallyCancelled,
)
from flowfabric.values.ids import ExecutionId, FlowId, parse_uuid
from flowfabric.values.page import ScannerFilter

GRACE = timedelta(seconds=30)
_OUTCOMES = ("success", "failed", "cancelled", "expired", "skipped")
_EVENTS = 256  # ends in a chunk of the dispatcher
_EDGES = 500  # edges in a transaction
_MEMBERS = 500  # executions cancelled in a transaction
_CEILING = timedelta(seconds=300)  # of a wait without end
_CHUNKS = 20  # of one flow before the next has its turn
_POLL = 0.1
_ONE_LOOK = 1.0  # what closing the flow may take, however short the wait
_LISTED = 1000  # members told of a flow that was cancelled before
_DISPATCH = "select * from flowfabric.dispatch_cascades($1, $2, $3, $4, $5, $6, $7, $8)"
_CANCEL = "select handled, failed, message, remaining, last, busy from flowfabric.cancel_members($1, $2, $3, $4)"


class Sweep(Struct, frozen=True, kw_only=True):
    """A pass over ends that are still to be dispatched."""

    scanned: int
    reconciled: int
    resolved: int = 0
    errors: int = 0
    message: str | None = None
    more: bool = False
    last_event: int | None = None


class SiblingPass(Struct, frozen=True, kw_only=True):
    """One chunk of sibling cancels: what became of the entry, and how the siblings were found."""

    action: str
    reason: str | None = None
    cancelled: int = 0
    already_terminal: int = 0
    not_found: int = 0
    failed: int = 0
    message: str | None = None
    enqueued_at: datetime | None = None


class QueuedSiblings(Struct, frozen=True, kw_only=True):
    """A group that owes its siblings a cancel."""

    flow_id: FlowId
    downstream_execution_id: ExecutionId
    siblings: tuple[ExecutionId, ...]
    enqueued_at: datetime


class CancelBacklog(Struct, frozen=True, kw_only=True):
    """What a cancelled flow still owes its members."""

    requested_at: datetime
    requester: str
    reason: str
    cancellation_policy: CancellationPolicy
    grace_until: datetime
    members: tuple[ExecutionId, ...]


class EdgePlace(Struct, frozen=True):
    """Where a pass over the edge groups goes on."""

    partition: int
    flow_id: UUID
    downstream: UUID


class FlowControl(FlowCalls):
    """dispatch_completion, sibling cancels, cancel_flow, reconcilers."""

    # The cascade

    async def dispatch_completion(self, event_id: int) -> Advanced | NoOp:
        """Resolve what one completion event leads to: `NoOp` when that was done before."""
        check_int(event_id, "event_id", 0, 2**63 - 1)
        total = 0
        for pause in (0.005, 0.01, 0.0):
            while True:
                row = await self._row(_DISPATCH, 1, _EDGES, None, event_id, None, None, None, None)
                total += row["resolved"]
                if row["failed"]:
                    raise Contention("retry_exhausted", row["message"] or "")
                if row["seen"] == 0:
                    still = await self._row("select flowfabric.cascade_pending($1) as pending", event_id)
                    if not still["pending"]:
                        return Advanced(total) if total else NoOp()
                    break
                if row["finished"]:
                    return Advanced(total)
                if row["resolved"] == 0:
                    break
            await asyncio.sleep(pause)
        raise RetriesExhausted(f"event {event_id}: a group or a downstream is in somebody's hands")

    async def cascade_completion(self, event: Event) -> CascadeOutcome:
        """The same for an event as it was delivered."""
        if not isinstance(event, Event):
            raise InvalidInput(
                f"got {type(event).__name__}", field="event", allowed="an Event of the completion family"
            )
        done = await self.dispatch_completion(event.cursor.position)
        return CascadeOutcome(done.resolved if isinstance(done, Advanced) else 0)

    async def dispatch_cascades(
        self,
        *,
        limit: int = _EVENTS,
        edges: int = _EDGES,
        after: int | None = None,
        stale: timedelta | None = None,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
    ) -> Sweep:
        """One chunk of what ends have left to do, oldest first, behind the event `after`."""
        row = await self._row(
            _DISPATCH,
            check_int(limit, "limit", 1, 10_000),
            check_int(edges, "edges", 1, 10_000),
            None if after is None else check_int(after, "after", 0, 2**63 - 1),
            None,
            None if stale is None else check_duration(stale, "stale", least_ms=0),
            *check_filter(filter),
        )
        return Sweep(
            scanned=row["seen"],
            reconciled=row["finished"],
            resolved=row["resolved"],
            errors=row["failed"],
            message=row["message"],
            more=row["more"],
            last_event=row["last_event"],
        )

    async def resolve_dependency(
        self,
        flow_id: FlowId,
        *,
        edge_id: UUID,
        upstream_execution_id: ExecutionId,
        downstream_execution_id: ExecutionId,
        outcome: str,
    ) -> str:
        """Count one edge as if its upstream had ended so: `Satisfied`, `Impossible` or `AlreadyResolved`."""
        flow = self._flow(flow_id)
        if outcome not in _OUTCOMES:
            raise InvalidInput(f"got {outcome!r}", field="outcome", allowed=", ".join(_OUTCOMES))
        upstream = parse_execution(upstream_execution_id, "upstream_execution_id")
        downstream = parse_execution(downstream_execution_id, "downstream_execution_id")
        edge = parse_uuid(edge_id, "edge_id")
        row = await self._row(
            "select flowfabric.resolve_dependency($1, $2, $3, $4, $5, $6) as code",
            *flow,
            edge,
            upstream.uuid,
            downstream.uuid,
            outcome,
        )
        match row["code"]:
            case "edge_not_found":
                raise ValidationFailed("invalid_dependency", f"edge_not_found: {edge} between these in flow {flow[1]}")
            case "not_applied":
                raise ValidationFailed("invalid_dependency", f"edge {edge} is staged and not applied")
            case code:
                return {"satisfied": "Satisfied", "impossible": "Impossible"}.get(code, "AlreadyResolved")

    async def promote_blocked_to_eligible(self, execution_id: ExecutionId) -> None:
        """Release an execution that is blocked though its dependencies are satisfied. A repair."""
        target = parse_execution(execution_id)
        row = await self._row("select flowfabric.promote_blocked($1, $2) as code", target.partition, target.uuid)
        match row["code"]:
            case "ok":
                return
            case "not_found":
                raise NotFound("execution", target)
            case code:
                raise StateError(code, execution_id=target)

    async def reconcile_edges(
        self,
        after: EdgePlace | None = None,
        *,
        limit: int = 500,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
    ) -> tuple[Sweep, EdgePlace | None]:
        """Look through edge groups for what the cascade should have done, and do it; answers where to go on."""
        row = await self._row(
            "select * from flowfabric.reconcile_edges($1, $2, $3, $4, $5, $6, $7)",
            *((None, None, None) if after is None else _check_place(after)),
            check_int(limit, "limit", 1, 10_000),
            *check_filter(filter),
        )
        place = None if row["flow_id"] is None else EdgePlace(row["partition"], row["flow_id"], row["downstream"])
        return Sweep(scanned=row["scanned"], reconciled=row["reconciled"], more=place is not None), place

    # Sibling cancels

    async def cancel_siblings(
        self,
        flow_id: FlowId | None = None,
        downstream_execution_id: ExecutionId | None = None,
        *,
        limit: int = _MEMBERS,
    ) -> SiblingPass:
        """Cancel one chunk of the upstreams that a decided join no longer needs: of one group, or the first in line.

        `action` is `none`, `orphan`, `not_owed`, `busy`, `more` or `drained`.
        """
        group: tuple[int | None, UUID | None, UUID | None] = (None, None, None)
        if flow_id is not None or downstream_execution_id is not None:
            flow = self._flow(flow_id)
            group = (*flow, self._member(flow, downstream_execution_id, "downstream_execution_id").uuid)
        row = await self._row(
            "select * from flowfabric.cancel_siblings($1, $2, $3, $4)", *group, check_int(limit, "limit", 1, 10_000)
        )
        return SiblingPass(
            action=row["action"],
            reason=row["reason"],
            cancelled=row["cancelled"],
            already_terminal=row["already_terminal"],
            not_found=row["missing"],
            failed=row["failed"],
            message=row["message"],
            enqueued_at=row["enqueued_at"],
        )

    async def drain_sibling_cancel_group(self, flow_id: FlowId, downstream_execution_id: ExecutionId) -> str:
        """Forget what a group owes its siblings: `drained`, `already_drained` or `drained_sans_group`."""
        flow = self._flow(flow_id)
        target = self._member(flow, downstream_execution_id, "downstream_execution_id")
        row = await self._row("select flowfabric.drain_siblings($1, $2, $3) as action", *flow, target.uuid)
        return str(row["action"])

    async def reconcile_sibling_cancel_group(self, flow_id: FlowId, downstream_execution_id: ExecutionId) -> str:
        """Put right what a dispatcher left behind: `sremmed_stale`, `completed_drain` or `no_op`."""
        flow = self._flow(flow_id)
        target = self._member(flow, downstream_execution_id, "downstream_execution_id")
        row = await self._row("select flowfabric.reconcile_siblings($1, $2, $3) as action", *flow, target.uuid)
        return str(row["action"])

    async def list_sibling_cancels(self, *, limit: int = 50) -> list[QueuedSiblings]:
        """The groups that owe their siblings a cancel, oldest first."""
        found = await self._fetch(
            "select * from flowfabric.queued_siblings($1)", check_int(limit, "limit", 1, 10_000), repeatable=True
        )
        return [
            QueuedSiblings(
                flow_id=FlowId(row["flow_id"]),
                downstream_execution_id=ExecutionId.of(row["partition"], row["downstream"]),
                siblings=tuple(ExecutionId.of(row["partition"], one) for one in row["siblings"]),
                enqueued_at=row["enqueued_at"],
            )
            for row in found
        ]

    # Cancelling a flow

    async def cancel_flow(
        self,
        flow_id: FlowId,
        *,
        policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        reason: str = "",
        wait: bool | timedelta = False,
        grace: timedelta = GRACE,
    ) -> FlowCancelled | CancellationScheduled | PartiallyCancelled:
        """Close a flow and cancel its members: all, those that do not run (`cancel_pending`), or none (`flow_only`).

        With `wait` the members are cancelled before the answer comes, for that long at most (True: 300 s); without it
        any process that runs duties cancels them, at once.
        """
        chosen = check_cancellation(policy)
        if isinstance(wait, timedelta):
            budget: timedelta | None = wait
            if wait < timedelta():
                raise InvalidInput(f"got {wait}", field="wait", allowed="a duration, True or False")
        elif type(wait) is bool:
            budget = _CEILING if wait else None
        else:
            raise InvalidInput(f"got {type(wait).__name__}", field="wait", allowed="a duration, True or False")
        begun = time.monotonic()
        try:
            async with asyncio.timeout(None if budget is None else max(budget.total_seconds(), _ONE_LOOK)):
                header = await self.cancel_flow_header(
                    flow_id,
                    reason=reason,
                    cancellation_policy=chosen,
                    grace=grace if budget is not None else timedelta(),
                )
            if isinstance(header, FlowAlreadyTerminal):
                return FlowCancelled(
                    cancellation_policy=header.stored_cancellation_policy or chosen,
                    member_execution_ids=header.member_execution_ids[:_LISTED],
                )
            members = header.member_execution_ids
            if header.target_count == 0:
                return FlowCancelled(cancellation_policy=chosen, member_execution_ids=members)
            if budget is None:
                return CancellationScheduled(
                    cancellation_policy=chosen, member_count=header.target_count, member_execution_ids=members
                )
            async with asyncio.timeout(max(budget.total_seconds() - (time.monotonic() - begun), 0)):
                failed = await self._cancel_all(flow_id)
        except TimeoutError:
            raise TimedOut("cancel_flow", (budget or timedelta()) // timedelta(milliseconds=1)) from None
        if failed:
            return PartiallyCancelled(
                cancellation_policy=chosen,
                member_execution_ids=members,
                failed_member_execution_ids=tuple(one for one in members if one.uuid in failed),
            )
        return FlowCancelled(cancellation_policy=chosen, member_execution_ids=members)

    async def _cancel_all(self, flow_id: FlowId) -> set[UUID]:
        """Cancel members chunk by chunk until none is owed it; answers those that failed."""
        flow = self._flow(flow_id)
        failed: set[UUID] = set()
        after: UUID | None = None
        while True:
            row = await self._row(_CANCEL, *flow, _MEMBERS, after)
            failed |= set(row["failed"])
            if row["remaining"] <= len(failed):
                return failed
            after = row["last"]
            if after is None or row["busy"]:
                after = None
                await asyncio.sleep(_POLL)  # the rest is in somebody's hands

    async def cancel_flow_header(
        self,
        flow_id: FlowId,
        *,
        reason: str = "",
        cancellation_policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        grace: timedelta = GRACE,
        requester: str = "",
    ) -> FlowCancelHeader | FlowAlreadyTerminal:
        """Close a flow and note which members are owed a cancel; none of those is claimed any more.

        The members are not ended here. After `grace` the reconciler does what the caller has not.
        """
        chosen = check_cancellation(cancellation_policy, "cancellation_policy")
        flow = self._flow(flow_id)
        row = await self._row(
            "select code, policy, reason, members, targets from flowfabric.cancel_flow_header($1, $2, $3, $4, $5, $6)",
            *flow,
            escape_text(reason, 4096),
            chosen.value,
            check_grace(grace),
            escape_text(requester, 256),
        )
        if row["code"] == "flow_not_found":
            raise NotFound("flow", flow[1])
        members = tuple(ExecutionId.of(flow[0], one) for one in row["members"])
        if row["code"] == "already_terminal":
            return FlowAlreadyTerminal(
                stored_cancellation_policy=None if row["policy"] is None else CancellationPolicy(row["policy"]),
                stored_cancel_reason=row["reason"],
                member_execution_ids=members,
            )
        return FlowCancelHeader(cancellation_policy=chosen, member_execution_ids=members, target_count=row["targets"])

    async def ack_cancel_member(self, flow_id: FlowId, execution_id: ExecutionId) -> None:
        """A member owes nothing any more. Silent when it did not."""
        flow = self._flow(flow_id)
        target = parse_execution(execution_id)
        await self._row("select flowfabric.ack_cancel_member($1, $2, $3)", *flow, target.uuid, repeatable=True)

    async def read_cancel_backlog(self, flow_id: FlowId) -> CancelBacklog | None:
        """What a cancelled flow still owes; None when nothing."""
        flow = self._flow(flow_id)
        found = await self._fetch("select * from flowfabric.read_cancel_backlog($1, $2)", *flow, repeatable=True)
        if not found:
            return None
        row = found[0]
        return CancelBacklog(
            requested_at=row["requested_at"],
            requester=row["requester"],
            reason=row["reason"],
            cancellation_policy=CancellationPolicy(row["cancellation_policy"]),
            grace_until=row["grace_until"],
            members=tuple(ExecutionId.of(flow[0], one) for one in row["owed"]),
        )

    async def reconcile_cancellations(
        self, *, limit: int = 50, members: int = _MEMBERS, chunks: int = _CHUNKS
    ) -> Round:
        """A few chunks for each cancelled flow whose grace is over: cancel members that are still owed it."""
        check_int(members, "members", 1, 10_000)
        check_int(chunks, "chunks", 1, 10_000)
        due = await self._fetch(
            "select partition, flow_id from flowfabric.due_cancellations($1)", check_int(limit, "limit", 1, 10_000)
        )
        handled = failed = 0
        message: str | None = None
        more = False
        for flow in due:
            after: UUID | None = None
            before = handled
            for _ in range(chunks):
                row = await self._row(_CANCEL, flow["partition"], flow["flow_id"], members, after)
                handled += row["handled"]
                failed += len(row["failed"])
                message = row["message"] or message
                after = row["last"]
                if after is None or row["remaining"] == 0:
                    break
            else:
                more = more or handled > before
        return Round(handled=handled, failed=failed, message=message, more=more)

    async def project_flow_summaries(self, *, limit: int = 10_000) -> tuple[int, bool]:
        """Count the flows that changed since they were last counted: how many, and whether there are more."""
        row = await self._row(
            "select counted, more from flowfabric.project_touched($1)", check_int(limit, "limit", 1, 1_000_000)
        )
        return row["counted"], row["more"]


def _check_place(value: object) -> tuple[int, UUID, UUID]:
    if not isinstance(value, EdgePlace):
        raise InvalidInput(f"got {type(value).__name__}", field="after", allowed="the place an earlier pass gave")
    partition = check_int(value.partition, "after.partition", 0, 65_535)
    return partition, parse_uuid(value.flow_id, "after.flow_id"), parse_uuid(value.downstream, "after.downstream")


def check_cancellation(value: object, field: str = "policy") -> CancellationPolicy:
    """A cancellation policy; `cancel_flow_only` is another word for `flow_only`."""
    try:
        return CancellationPolicy("flow_only" if value == "cancel_flow_only" else str(value))
    except ValueError:
        raise InvalidInput(f"got {value!r}", field=field, allowed=", ".join(CancellationPolicy)) from None


def check_grace(value: object) -> int:
    """A grace in milliseconds."""
    if isinstance(value, timedelta) and timedelta() <= value and value // timedelta(milliseconds=1) < 2**53:
        return value // timedelta(milliseconds=1)
    raise ValidationFailed("invalid_grace_ms", f"grace: got {value!r}, allowed: a duration from 0 to 2^53 - 1 ms")
