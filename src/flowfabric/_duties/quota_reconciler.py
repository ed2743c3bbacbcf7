"""Quota reconciler: remove aged entries of windows, and slots that nothing holds."""

from __future__ import annotations

import logging
from datetime import timedelta

from flowfabric._duties.duty import Duty

log = logging.getLogger("flowfabric.duties")


class QuotaReconciler(Duty):
    """Removes aged entries of windows, and slots of grants and callers that ended without giving them back."""

    interval = timedelta(seconds=30)
    batch = 100

    async def run_once(self) -> int:
        removed = 0
        after = None
        while True:
            done = await self.engine.reconcile_quotas(after=after, limit=self.batch)
            removed += done.entries + done.slots
            if done.slots:
                log.info("%s: removed %d slots that nothing held", self.name, done.slots)
            after = done.last_policy
            if after is None or self.stopping.is_set():
                return removed
