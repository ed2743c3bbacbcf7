"""The duties that move flows on, and those that look after them."""

from __future__ import annotations

import logging
from datetime import timedelta

from flowfabric._duties.duty import Duty
from flowfabric._duties.timers import WokenDuty
from flowfabric.engine.edges import EdgePlace
from flowfabric.engine.timers import Round

log = logging.getLogger("flowfabric.duties")


class Cascade(WokenDuty):
    """Works off what ends have left to do: fan-outs beyond one call, skips behind skips, groups that were locked."""

    name = "completion_dispatcher"
    interval = timedelta(seconds=1)
    _after: int | None = None

    async def round(self) -> Round:
        done = await self.engine.dispatch_cascades(after=self._after, filter=self.filter)
        if done.errors:
            log.warning("%s: %d ends failed, the last because: %s", self.name, done.errors, done.message)
        # What could not be moved stays first in line; look behind it until the line is through.
        stuck = done.scanned > 0 and done.reconciled + done.resolved == 0
        self._after = done.last_event if stuck and done.more else None
        return Round(handled=done.reconciled + done.resolved, failed=done.errors, message=done.message, more=done.more)


class SiblingCancel(WokenDuty):
    """Cancels the upstreams that a decided join no longer needs."""

    name = "edge_cancel_dispatcher"
    interval = timedelta(seconds=1)

    async def round(self) -> Round:
        done = await self.engine.cancel_siblings()
        if done.failed:
            log.warning("%s: %d siblings could not be cancelled: %s", self.name, done.failed, done.message)
        # What is in somebody's hands went to the end of the queue, and can wait for the next look.
        more = done.action not in ("none", "busy")
        return Round(
            handled=done.cancelled + done.already_terminal, failed=done.failed, message=done.message, more=more
        )


class FlowCancel(WokenDuty):
    """Cancels the members of cancelled flows that nobody else did."""

    name = "cancel_reconciler"
    interval = timedelta(seconds=15)

    async def round(self) -> Round:
        done = await self.engine.reconcile_cancellations()
        if done.failed:
            log.warning("%s: %d members could not be cancelled: %s", self.name, done.failed, done.message)
        return done


class SiblingReconciler(Duty):
    """Removes entries of the sibling queue that nothing is owed for."""

    name = "edge_cancel_reconciler"
    interval = timedelta(seconds=10)
    batch = 50

    async def run_once(self) -> int:
        mended = 0
        for entry in await self.engine.list_sibling_cancels(limit=self.batch):
            action = await self.engine.reconcile_sibling_cancel_group(entry.flow_id, entry.downstream_execution_id)
            mended += action != "no_op"
        return mended


class EdgeReconciler(Duty):
    """Looks for edges and blocked members that the cascade has forgotten. Finds nothing, unless there is a defect."""

    name = "dependency_reconciler"
    interval = timedelta(seconds=15)
    batch = 5000
    _after: EdgePlace | None = None

    async def run_once(self) -> int:
        done, self._after = await self.engine.reconcile_edges(self._after, limit=self.batch, filter=self.filter)
        if done.reconciled:
            log.error("%s: %d had been forgotten", self.name, done.reconciled)
        return done.reconciled


class FlowProjector(Duty):
    """Counts the members of flows that have changed."""

    name = "flow_projector"
    interval = timedelta(seconds=15)

    async def run_once(self) -> int:
        counted = 0
        while True:
            batch, more = await self.engine.project_flow_summaries()
            counted += batch
            if not more or self.stopping.is_set():
                return counted
