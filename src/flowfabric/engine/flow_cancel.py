"""Cancelling a flow: its header is closed immediately, its members are cancelled in chunks."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta
from uuid import UUID

from msgspec import Struct

from flowfabric._postgres import statements
from flowfabric.engine.base import FlowOperations
from flowfabric.engine.checks import check_int, check_low_water
from flowfabric.engine.timers import Round
from flowfabric.errors import InvalidInput, NotFound, TimedOut, ValidationFailed
from flowfabric.values.checks import escape_text
from flowfabric.values.flow import (
    CancellationPolicy,
    CancellationScheduled,
    FlowAlreadyTerminal,
    FlowCancelHeader,
    FlowCancelled,
    PartiallyCancelled,
)
from flowfabric.values.ids import ExecutionId, FlowId, parse_execution_id

GRACE = timedelta(seconds=30)
_MEMBERS = 500  # executions cancelled in a transaction
_CEILING = timedelta(seconds=300)  # with wait=True
_CHUNKS = 20  # of one flow before the next flow's turn
_POLL = 0.1
_SHORTEST = 1.0  # seconds allowed for closing the flow, even with a shorter wait
_LISTED = 1000  # members returned for a flow that was cancelled before


class CancelBacklog(Struct, frozen=True, kw_only=True):
    """The members of a cancelled flow that still have to be cancelled."""

    requested_at: datetime
    requester: str
    reason: str
    cancellation_policy: CancellationPolicy
    grace_until: datetime
    members: tuple[ExecutionId, ...]


class FlowCancels(FlowOperations):
    """cancel_flow, cancel_flow_header, ack_cancel_member, read_cancel_backlog, reconcile_cancellations."""

    async def cancel_flow(
        self,
        flow_id: FlowId,
        *,
        policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        reason: str = "",
        wait: bool | timedelta = False,
        grace: timedelta = GRACE,
        requester: str = "",
    ) -> FlowCancelled | CancellationScheduled | PartiallyCancelled:
        """Close a flow and cancel its members: all, those that do not run (`cancel_pending`), or none (`flow_only`).

        With `wait` the call cancels the members before it returns, for that long at most (True: 300 s). Without it the
        call returns, and any process that runs duties cancels them immediately. A flow that was closed before keeps its
        policy, which is applied again to members that were replayed since; with `wait` the call also cancels members
        that an earlier call left to the duties. If `requester` is the id of the execution that submitted the flow, its
        members are recorded as cancelled by `handler`.
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
            async with asyncio.timeout(None if budget is None else max(budget.total_seconds(), _SHORTEST)):
                header = await self.cancel_flow_header(
                    flow_id,
                    reason=reason,
                    cancellation_policy=chosen,
                    grace=grace if budget is not None else timedelta(),
                    requester=requester,
                )
            members = header.member_execution_ids
            if isinstance(header, FlowAlreadyTerminal):
                chosen = header.stored_cancellation_policy or chosen
                members = members[:_LISTED] if header.target_count == 0 else members
            is_new = not isinstance(header, FlowAlreadyTerminal)
            if header.target_count == 0 and (is_new or budget is None):
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
                failed_member_execution_ids=tuple(one for one in members if one in failed),
            )
        return FlowCancelled(cancellation_policy=chosen, member_execution_ids=members)

    async def _cancel_all(self, flow_id: FlowId) -> set[UUID]:
        """Cancel members in chunks until all are cancelled; returns those that failed."""
        flow = self._flow(flow_id)
        failed: set[UUID] = set()
        after: UUID | None = None
        while True:
            row = await self._row(statements.CANCEL_MEMBERS, *flow, _MEMBERS, after)
            failed |= set(row["failed"])
            if row["remaining"] <= len(failed):
                return failed
            after = row["last"]
            if after is None or row["busy"]:
                after = None
                await asyncio.sleep(_POLL)  # the rest is locked by other transactions

    async def cancel_flow_header(
        self,
        flow_id: FlowId,
        *,
        reason: str = "",
        cancellation_policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        grace: timedelta = GRACE,
        requester: str = "",
    ) -> FlowCancelHeader | FlowAlreadyTerminal:
        """Close a flow and record which members have to be cancelled; workers no longer claim them.

        This call ends no member. After `grace` the reconciler cancels those that the caller has not. If the flow was
        closed before, its stored policy covers members that were replayed since.
        """
        chosen = check_cancellation(cancellation_policy, "cancellation_policy")
        flow = self._flow(flow_id)
        row = await self._row(
            statements.CANCEL_FLOW_HEADER,
            *flow,
            escape_text(reason, 4096),
            chosen.value,
            check_grace(grace),
            escape_text(requester, 256),
        )
        if row["code"] == "flow_not_found":
            raise NotFound("flow", flow[1])
        members = tuple(ExecutionId(one) for one in row["members"])
        if row["code"] == "already_terminal":
            return FlowAlreadyTerminal(
                stored_cancellation_policy=None if row["policy"] is None else CancellationPolicy(row["policy"]),
                stored_cancel_reason=row["reason"],
                member_execution_ids=members,
                target_count=row["targets"],
            )
        return FlowCancelHeader(cancellation_policy=chosen, member_execution_ids=members, target_count=row["targets"])

    async def ack_cancel_member(self, flow_id: FlowId, execution_id: ExecutionId) -> None:
        """Record that a member was cancelled. Does nothing for members that did not have to be."""
        flow = self._flow(flow_id)
        target = parse_execution_id(execution_id)
        await self._row(statements.ACK_CANCEL_MEMBER, *flow, target, repeatable=True)

    async def read_cancel_backlog(self, flow_id: FlowId) -> CancelBacklog | None:
        """Return the members of a cancelled flow that still have to be cancelled; None if there are none."""
        flow = self._flow(flow_id)
        found = await self._fetch(statements.READ_CANCEL_BACKLOG, *flow, repeatable=True)
        if not found:
            return None
        row = found[0]
        return CancelBacklog(
            requested_at=row["requested_at"],
            requester=row["requester"],
            reason=row["reason"],
            cancellation_policy=CancellationPolicy(row["cancellation_policy"]),
            grace_until=row["grace_until"],
            members=tuple(ExecutionId(one) for one in row["owed"]),
        )

    async def reconcile_cancellations(
        self,
        *,
        limit: int = 50,
        members: int = _MEMBERS,
        chunks: int = _CHUNKS,
        low_water: datetime | None = None,
    ) -> Round:
        """Cancel a few chunks of members for each cancelled flow whose grace has ended.

        `low_water`: from `look_for_due`; flows whose grace ended before it are passed over.
        """
        check_int(members, "members", 1, 10_000)
        check_int(chunks, "chunks", 1, 10_000)
        due = await self._fetch(
            statements.DUE_CANCELLATIONS,
            check_int(limit, "limit", 1, 10_000),
            check_low_water(low_water),
        )
        handled = failed = 0
        message: str | None = None
        more = False
        backlog: int | None = due[0]["backlog"] if due else None
        for flow in due:
            after: UUID | None = None
            before = handled
            for _ in range(chunks):
                row = await self._row(statements.CANCEL_MEMBERS, flow["partition"], flow["flow_id"], members, after)
                handled += row["handled"]
                failed += len(row["failed"])
                message = row["message"] or message
                after = row["last"]
                if after is None or row["remaining"] == 0:
                    backlog = (backlog or 0) - (row["remaining"] == 0)
                    break
            else:
                more = more or handled > before
        return Round(handled=handled, failed=failed, message=message, more=more, backlog=backlog)


def check_cancellation(value: object, field: str = "policy") -> CancellationPolicy:
    """A cancellation policy; `cancel_flow_only` is an alias of `flow_only`."""
    try:
        return CancellationPolicy("flow_only" if value == "cancel_flow_only" else str(value))
    except ValueError:
        raise InvalidInput(f"got {value!r}", field=field, allowed=", ".join(CancellationPolicy)) from None


def check_grace(value: object) -> int:
    """Return a grace period in milliseconds."""
    if isinstance(value, timedelta) and timedelta() <= value and value // timedelta(milliseconds=1) < 2**53:
        return value // timedelta(milliseconds=1)
    raise ValidationFailed("invalid_grace_ms", f"grace: got {value!r}, allowed: a duration from 0 to 2^53 - 1 ms")
