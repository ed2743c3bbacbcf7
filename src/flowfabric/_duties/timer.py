"""Duties that are woken when there is work, and among them those that run due timers."""

from __future__ import annotations

from datetime import datetime, timedelta

from flowfabric._duties.duty import Duty
from flowfabric.engine.timers import Round, TimerKind


class WokenDuty(Duty):
    """Works in bounded rounds, and is woken when there is work."""

    low_water: datetime | None = None  # nothing that is due is left before it, as far as this process knows

    @property
    def queue(self) -> str:
        """What it polls: a queue of its own name, or a kind of timers."""
        return self.name

    async def round(self) -> Round:
        """Run one bounded round."""
        raise NotImplementedError

    async def run_once(self) -> int:
        handled = 0
        while True:
            done = await self.round()
            handled += done.handled
            if not done.more or self.stopping.is_set():
                return handled


class TimerDuty(WokenDuty):
    """Runs the due timers of one kind, oldest first, until none is due."""

    kind: TimerKind
    batch = 1000  # executions per round
    backoff = timedelta(seconds=30)
    _after: datetime | None = None

    @property
    def queue(self) -> str:
        return self.kind

    async def round(self) -> Round:
        """Run one bounded round, after the timers that earlier rounds had to skip."""
        done = await self.engine.run_timers(
            self.kind, limit=self.batch, after=self._after or self.low_water, filter=self.filter, backoff=self.backoff
        )
        self.report(done.failed, done.message)
        # Timers locked by other transactions stay due; continue after them until the list is done.
        passed_over = done.more and done.handled + done.failed == 0
        self._after = done.last_due_at if passed_over else (self._after if done.more else None)
        return done
