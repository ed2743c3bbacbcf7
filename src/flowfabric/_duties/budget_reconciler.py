"""Budget reconciler: compare the numbers of budgets with their rules, and collect reservations of ended leases."""

from __future__ import annotations

import logging
from datetime import timedelta
from uuid import UUID

from flowfabric._duties.duty import Duty

log = logging.getLogger("flowfabric.duties")


class BudgetReconciler(Duty):
    """Reports budgets above their limits, removes what purged executions left, ends reservations of ended leases."""

    interval = timedelta(seconds=30)
    batch = 100

    async def run_once(self) -> int:
        handled = (await self.engine.collect_reservations(marked=False)).handled
        after: UUID | None = None
        while not self.stopping.is_set():
            page = await self.engine.reconcile_budget_counters(after=after, limit=self.batch)
            handled += page.corrected
            if page.wrong:
                log.warning("%s: %d budgets are above a limit, the last: %s", self.name, page.wrong, page.message)
            after = page.next_id
            if after is None:
                break
        return handled
