"""Quota reconciler: remove aged entries of windows, and slots that nothing holds."""

from __future__ import annotations

import logging
from datetime import timedelta
from uuid import uuid4

from flowfabric._duties.paged import PagedDuty
from flowfabric.values.quota import QuotaPlace

log = logging.getLogger("flowfabric.duties")


class QuotaReconciler(PagedDuty[QuotaPlace]):
    """Removes aged entries of windows, and slots of grants and callers that ended without giving them back."""

    interval = timedelta(seconds=30)

    def anywhere(self) -> QuotaPlace:
        return QuotaPlace(uuid4(), "")

    async def page(self, after: QuotaPlace | None) -> tuple[int, QuotaPlace | None]:
        done = await self.engine.reconcile_quotas(after=after, limit=self.batch)
        if done.slots:
            log.info("%s: removed %d slots that nothing held", self.name, done.slots)
        return done.entries + done.slots + done.heads, done.last
