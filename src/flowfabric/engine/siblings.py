"""Sibling cancels: the upstreams that a decided join no longer needs."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from msgspec import Struct

from flowfabric._postgres import statements
from flowfabric.engine.base import FlowOperations
from flowfabric.engine.checks import check_int, check_low_water
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.words import Drain, GroupRepair

_MEMBERS = 500  # executions cancelled in a transaction


class SiblingPass(Struct, frozen=True, kw_only=True):
    """One chunk of sibling cancels: the action taken, and the states of the siblings."""

    action: str
    reason: str | None = None
    cancelled: int = 0
    already_terminal: int = 0
    not_found: int = 0
    failed: int = 0
    message: str | None = None
    enqueued_at: datetime | None = None


class QueuedSiblings(Struct, frozen=True, kw_only=True):
    """A group whose siblings have to be cancelled."""

    flow_id: FlowId
    downstream_execution_id: ExecutionId
    siblings: tuple[ExecutionId, ...]
    enqueued_at: datetime


class Siblings(FlowOperations):
    """cancel_siblings, drain and reconcile groups, list_sibling_cancels."""

    async def cancel_siblings(
        self,
        flow_id: FlowId | None = None,
        downstream_execution_id: ExecutionId | None = None,
        *,
        limit: int = _MEMBERS,
        low_water: datetime | None = None,
    ) -> SiblingPass:
        """Cancel one chunk of upstreams that a decided join no longer needs: of one group, or the first in the queue.

        `action` is `none`, `orphan`, `not_owed`, `busy`, `more` or `drained`. `low_water`: from `look_for_due`;
        entries from before it are passed over.
        """
        group: tuple[int | None, UUID | None, UUID | None] = (None, None, None)
        if flow_id is not None or downstream_execution_id is not None:
            flow = self._flow(flow_id)
            group = (*flow, self._member(flow, downstream_execution_id, "downstream_execution_id"))
        row = await self._row(
            statements.CANCEL_SIBLINGS,
            *group,
            check_int(limit, "limit", 1, 10_000),
            check_low_water(low_water),
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

    async def drain_sibling_cancel_group(self, flow_id: FlowId, downstream_execution_id: ExecutionId) -> Drain:
        """Drop the sibling cancels of a group whose siblings have all ended; otherwise `siblings_alive`."""
        flow = self._flow(flow_id)
        target = self._member(flow, downstream_execution_id, "downstream_execution_id")
        row = await self._row(statements.DRAIN_SIBLINGS, *flow, target)
        return Drain(row["action"])

    async def reconcile_sibling_cancel_group(
        self, flow_id: FlowId, downstream_execution_id: ExecutionId
    ) -> GroupRepair:
        """Repair an entry that a dispatcher left behind."""
        flow = self._flow(flow_id)
        target = self._member(flow, downstream_execution_id, "downstream_execution_id")
        row = await self._row(statements.RECONCILE_SIBLINGS, *flow, target)
        return GroupRepair(row["action"])

    async def list_sibling_cancels(self, *, limit: int = 50) -> list[QueuedSiblings]:
        """Return the groups whose siblings have to be cancelled, oldest first."""
        found = await self._fetch(statements.QUEUED_SIBLINGS, check_int(limit, "limit", 1, 10_000), repeatable=True)
        return [
            QueuedSiblings(
                flow_id=FlowId(row["flow_id"]),
                downstream_execution_id=ExecutionId(row["downstream"]),
                siblings=tuple(ExecutionId(one) for one in row["siblings"]),
                enqueued_at=row["enqueued_at"],
            )
            for row in found
        ]
