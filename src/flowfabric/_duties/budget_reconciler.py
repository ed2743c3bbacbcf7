"""Budget reconciler: compare the numbers of budgets with their rules, and collect reservations of ended leases."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TypeAlias
from uuid import UUID, uuid4

from flowfabric._duties.paged import PagedDuty
from flowfabric.engine import Engine
from flowfabric.values.page import ScannerFilter

log = logging.getLogger("flowfabric.duties")
_END = UUID(int=2**128 - 1)
Place: TypeAlias = tuple[UUID | None, UUID | None]  # the last budget, and the last execution of the ledger


class BudgetReconciler(PagedDuty[Place]):
    """Reports budgets above their limits, removes what purged executions left, ends reservations of ended leases."""

    interval = timedelta(seconds=30)

    def __init__(self, engine: Engine, *, filter: ScannerFilter | None = None) -> None:  # noqa: A002
        super().__init__(engine, filter=filter)
        self._wrong: dict[UUID | None, tuple[int, str | None]] = {}  # in this pass, by page
        self._reported: dict[UUID | None, tuple[int, str | None]] = {}  # in the pass before

    def anywhere(self) -> Place:
        return uuid4(), uuid4()

    async def run_once(self) -> int:
        """Collect reservations, then check budgets and their ledger."""
        collected = await self.engine.collect_reservations(marked=False)
        self.report(collected.failed, collected.message)
        return collected.handled + await super().run_once()

    async def page(self, after: Place | None) -> tuple[int, Place | None]:
        budget, spent = after or (None, None)
        page = await self.engine.reconcile_budget_counters(after=budget, spent_after=spent, limit=self.batch)
        if page.wrong:
            found = self._wrong[budget] = (page.wrong, page.message)
            if found != self._reported.get(budget):  # once: a limit set below the usage stays there
                log.warning("%s: %d budgets are above a limit, the last: %s", self.name, page.wrong, page.message)
        if page.next_id is None and budget != _END:
            self._reported, self._wrong = self._wrong, {}
        if page.next_id is None and page.next_spent is None:
            return page.corrected, None
        # The pass that has reached its end waits there for the other.
        return page.corrected, (page.next_id or _END, page.next_spent or _END)
