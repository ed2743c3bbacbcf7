"""Budget reconciler: compare the numbers of budgets with their rules, and collect reservations of ended leases."""

from __future__ import annotations

import logging
from datetime import timedelta
from uuid import UUID

from flowfabric._duties.duty import Duty
from flowfabric.engine import Engine
from flowfabric.values.page import ScannerFilter

log = logging.getLogger("flowfabric.duties")


class BudgetReconciler(Duty):
    """Reports budgets above their limits, removes what purged executions left, ends reservations of ended leases."""

    interval = timedelta(seconds=30)
    batch = 100

    def __init__(self, engine: Engine, *, filter: ScannerFilter | None = None) -> None:  # noqa: A002
        super().__init__(engine, filter=filter)
        self._wrong: dict[UUID | None, tuple[int, str | None]] = {}  # reported, by page

    async def run_once(self) -> int:
        collected = await self.engine.collect_reservations(marked=False)
        self.report(collected.failed, collected.message)
        handled = collected.handled
        after: UUID | None = None
        wrong: dict[UUID | None, tuple[int, str | None]] = {}
        while not self.stopping.is_set():
            page = await self.engine.reconcile_budget_counters(after=after, limit=self.batch)
            handled += page.corrected
            if page.wrong:
                wrong[after] = (page.wrong, page.message)
                if wrong[after] != self._wrong.get(after):  # once: a limit set below the usage stays there
                    log.warning("%s: %d budgets are above a limit, the last: %s", self.name, page.wrong, page.message)
            after = page.next_id
            if after is None:
                break
        self._wrong = wrong
        return handled
