"""Sibling repair: remove stale entries of the sibling queue."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.duty import Duty


class SiblingRepair(Duty):
    """Removes entries of the sibling queue whose siblings need no cancel."""

    interval = timedelta(seconds=10)
    batch = 50

    async def run_once(self) -> int:
        mended = 0
        for entry in await self.engine.list_sibling_cancels(limit=self.batch):
            action = await self.engine.reconcile_sibling_cancel_group(entry.flow_id, entry.downstream_execution_id)
            mended += action != "no_op"
        return mended
