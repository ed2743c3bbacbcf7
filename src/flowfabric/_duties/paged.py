"""Duties that go through all that is stored, one page after the other."""

from __future__ import annotations

import time
from typing import Generic, TypeVar

from flowfabric._duties.duty import Duty

Place = TypeVar("Place")


class PagedDuty(Duty, Generic[Place]):
    """Continues where its last round ended, and at the end begins again: a round costs the same whatever is stored.

    After a page that finds something comes the next. One that finds nothing ends the round; in a duty that has to be in
    time, `allowance` seconds of them do.
    """

    batch = 100
    allowance = 0.0
    place: Place | None = None  # where the last page ended; None: the next one is the first

    async def page(self, after: Place | None) -> tuple[int, Place | None]:
        """Handle one page; returns how many items it handled, and where it ended (None: it was the last page)."""
        raise NotImplementedError

    async def run_once(self) -> int:
        """Handle pages until the allowance is used up, or everything stored was read."""
        until = time.monotonic() + self.allowance
        handled = 0
        ends = 1 if self.place is None else 2  # a round that does not begin at the first page goes around
        while not self.stopping.is_set():
            found, self.place = await self.page(self.place)
            handled += found
            ends -= self.place is None
            if not ends or (not found and time.monotonic() >= until):
                break
        return handled
