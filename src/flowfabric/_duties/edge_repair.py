"""Edge repair: find edges and blocked members that the cascade missed."""

from __future__ import annotations

import logging
from datetime import timedelta

from flowfabric._duties.duty import Duty
from flowfabric.engine.edges import EdgePlace

log = logging.getLogger("flowfabric.duties")


class EdgeRepair(Duty):
    """Repairs edges and blocked members that the cascade missed. Finds none unless there is a defect."""

    interval = timedelta(seconds=15)
    batch = 100
    _after: EdgePlace | None = None

    async def run_once(self) -> int:
        done, self._after = await self.engine.reconcile_edges(self._after, limit=self.batch, filter=self.filter)
        if done.reconciled:
            log.error("%s: the cascade missed %d edges or members", self.name, done.reconciled)
        return done.reconciled
