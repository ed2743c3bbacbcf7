"""Lease expiry: offer executions whose worker stopped renewing to other workers."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class LeaseExpiry(TimerDuty):
    """Gives executions back whose worker stopped renewing; any capable worker can claim them."""

    kind = TimerKind.LEASE
    interval = timedelta(seconds=1.5)
