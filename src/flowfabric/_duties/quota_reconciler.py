"""Quota reconciler: remove aged entries of windows, and slots that nothing holds."""

from __future__ import annotations

import logging
from datetime import timedelta
from uuid import UUID

from flowfabric._duties.duty import Duty

log = logging.getLogger("flowfabric.duties")


class QuotaReconciler(Duty):
    """Removes aged entries of windows, and slots of grants and callers that ended without giving them back."""

    interval = timedelta(seconds=30)
    batch = 100
    _after: tuple[UUID, str] | None = None

    async def run_once(self) -> int:
        """Check one page of keys, and go on while pages have something to remove."""
        removed = 0
        while True:
            done = await self.engine.reconcile_quotas(after=self._after, limit=self.batch)
            if done.slots:
                log.info("%s: removed %d slots that nothing held", self.name, done.slots)
            self._after = done.last
            found = done.entries + done.slots + done.heads
            removed += found
            if not found or self._after is None or self.stopping.is_set():
                return removed
