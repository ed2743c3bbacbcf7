"""Reservation end: give back or charge what reservations hold whose lease ended while their budget was locked."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import WokenDuty
from flowfabric.engine.timers import Round


class ReservationEnd(WokenDuty):
    """Gives back or charges reservations of leases that ended while a budget was locked."""

    interval = timedelta(seconds=1)

    async def round(self) -> Round:
        done = await self.engine.collect_reservations(marked=True, low_water=self.low_water)
        self.report(done.failed, done.message)
        return done
