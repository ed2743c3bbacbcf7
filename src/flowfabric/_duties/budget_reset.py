"""Budget reset: begin the next period of budgets that have one."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import WokenDuty
from flowfabric.engine.timers import Round


class BudgetReset(WokenDuty):
    """Resets the budgets whose period has ended, the earliest first; missed periods are one reset."""

    interval = timedelta(seconds=15)
    batch = 20

    async def round(self) -> Round:
        done = await self.engine.reset_due_budgets(limit=self.batch, low_water=self.low_water)
        self.report(done.failed, done.message)
        return done
