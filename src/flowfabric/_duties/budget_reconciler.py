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
        self._after: UUID | None = None
        self._spent_after: UUID | None = None
        self._wrong: dict[UUID | None, tuple[int, str | None]] = {}  # in this pass, by page
        self._reported: dict[UUID | None, tuple[int, str | None]] = {}  # in the pass before

    async def run_once(self) -> int:
        """Check one page, and go on while pages have something to remove or to correct."""
        collected = await self.engine.collect_reservations(marked=False)
        self.report(collected.failed, collected.message)
        handled = collected.handled
        while not self.stopping.is_set():
            page = await self.engine.reconcile_budget_counters(
                after=self._after, spent_after=self._spent_after, limit=self.batch
            )
            handled += page.corrected
            if page.wrong:
                found = self._wrong[self._after] = (page.wrong, page.message)
                if found != self._reported.get(self._after):  # once: a limit set below the usage stays there
                    log.warning("%s: %d budgets are above a limit, the last: %s", self.name, page.wrong, page.message)
            self._after, self._spent_after = page.next_id, page.next_spent
            if self._after is None:
                self._reported, self._wrong = self._wrong, {}
            if not page.corrected or self._after is None:
                break
        return handled
