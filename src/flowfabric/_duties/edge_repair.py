"""Edge repair: find edges and blocked members that the cascade missed."""

from __future__ import annotations

import logging
import random
from datetime import timedelta
from uuid import UUID, uuid4

from flowfabric._duties.paged import PagedDuty
from flowfabric.engine.edges import EdgePlace

log = logging.getLogger("flowfabric.duties")


class EdgeRepair(PagedDuty[EdgePlace]):
    """Repairs edges and blocked members that the cascade missed. Finds none unless there is a defect."""

    interval = timedelta(seconds=15)

    def anywhere(self) -> EdgePlace:
        return EdgePlace(random.randrange(256), uuid4(), UUID(int=0))  # noqa: S311

    async def page(self, after: EdgePlace | None) -> tuple[int, EdgePlace | None]:
        done, place = await self.engine.reconcile_edges(after, limit=self.batch, filter=self.filter)
        if done.reconciled:
            log.error("%s: the cascade missed %d edges or members", self.name, done.reconciled)
        return done.reconciled, place
