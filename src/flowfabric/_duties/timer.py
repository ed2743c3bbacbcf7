"""Duties that are woken when there is something to do, and those among them that act when a time has come."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from flowfabric._duties.duty import Duty
from flowfabric.engine.timers import Round, TimerKind

log = logging.getLogger("flowfabric.duties")


class WokenDuty(Duty):
    """Works in bounded rounds, and is woken when there is something to do."""

    async def round(self) -> Round:
        """One bounded round."""
        raise NotImplementedError

    async def run_once(self) -> int:
        handled = 0
        while True:
            done = await self.round()
            handled += done.handled
            if not done.more or self.stopping.is_set():
                return handled


class TimerDuty(WokenDuty):
    """Works off the due timers of one kind, oldest first, until none is due."""

    kind: TimerKind
    batch = 1000  # executions a round
    backoff = timedelta(seconds=30)
    _after: datetime | None = None

    async def round(self) -> Round:
        """One bounded round, behind what the rounds before it had to pass over."""
        done = await self.engine.run_timers(
            self.kind, limit=self.batch, after=self._after, filter=self.filter, backoff=self.backoff
        )
        if done.failed:
            log.warning("%s: %d put off, the last because: %s", self.name, done.failed, done.message)
        # What somebody else has locked stays due; look behind it until the list is through.
        passed_over = done.more and done.handled + done.failed == 0
        self._after = done.last_due_at if passed_over else (self._after if done.more else None)
        return done
