"""The duties that act when a time has come: one mechanism for all of them."""

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


class LeaseExpiry(TimerDuty):
    """Gives executions back whose worker stopped renewing; any capable worker's claim takes them up."""

    name = "lease_expiry"
    kind = TimerKind.LEASE
    interval = timedelta(seconds=1.5)


class AttemptTimeout(TimerDuty):
    """Ends attempts that ran longer than they may; the retry policy decides what follows."""

    name = "attempt_timeout"
    kind = TimerKind.ATTEMPT
    interval = timedelta(seconds=2)


class ExecutionDeadline(TimerDuty):
    """Expires executions that took too long as a whole, whatever they are doing."""

    name = "execution_deadline"
    kind = TimerKind.DEADLINE
    interval = timedelta(seconds=5)


class DelayedPromotion(TimerDuty):
    """Makes delayed executions claimable when their time has come."""

    name = "delayed_promoter"
    kind = TimerKind.DELAY
    interval = timedelta(milliseconds=750)


class ParkedPromotion(TimerDuty):
    """Wakes parked executions that whoever ended the awaited one found in somebody else's hands."""

    name = "parked_promoter"
    kind = TimerKind.PARKED
    interval = timedelta(milliseconds=750)


class SuspensionTimeout(TimerDuty):
    """Ends suspensions whose time is over, as each of them asked for."""

    name = "suspension_timeout"
    kind = TimerKind.SUSPENSION
    interval = timedelta(seconds=2)
    batch = 50


class WaitpointExpiry(TimerDuty):
    """Expires waitpoints that nobody suspended on in time."""

    name = "waitpoint_expiry"
    kind = TimerKind.WAITPOINT
    interval = timedelta(seconds=5)
    batch = 100


class Retention(TimerDuty):
    """Forgets ended executions when their retention is over."""

    name = "retention_trimmer"
    kind = TimerKind.RETENTION
    interval = timedelta(seconds=60)
