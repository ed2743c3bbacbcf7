"""Quota reconciler: remove aged entries of windows, and slots that nothing holds."""

from __future__ import annotations

import logging
from datetime import timedelta
from uuid import uuid4

from flowfabric._duties.paged import PagedDuty
from flowfabric.engine import Engine
from flowfabric.values.page import ScannerFilter
from flowfabric.values.quota import QuotaPlace

log = logging.getLogger("flowfabric.duties")


class QuotaReconciler(PagedDuty[QuotaPlace]):
    """Removes aged entries of windows, and slots of grants and callers that ended without giving them back."""

    interval = timedelta(seconds=30)

    def __init__(self, engine: Engine, *, filter: ScannerFilter | None = None) -> None:  # noqa: A002
        super().__init__(engine, filter=filter)
        self.place = QuotaPlace(uuid4(), "")  # anywhere: those that led before may never have come to the end

    async def page(self, after: QuotaPlace | None) -> tuple[int, QuotaPlace | None]:
        done = await self.engine.reconcile_quotas(after=after, limit=self.batch)
        if done.slots:
            log.info("%s: removed %d slots that nothing held", self.name, done.slots)
        return done.entries + done.slots + done.heads, done.last
