"""Duties that go through all that is stored, one page after the other."""

from __future__ import annotations

import time
from typing import Generic, TypeVar

from flowfabric._duties.duty import Duty
from flowfabric.engine import Engine
from flowfabric.values.page import ScannerFilter

Place = TypeVar("Place")


class PagedDuty(Duty, Generic[Place]):
    """Each round continues where the last one ended, at the first page after the last: its cost is bounded.

    A round reads on while pages find something, and past the last page, until it has read everything. Any other page
    that finds nothing ends it; a duty that has to be in time reads on for `allowance` seconds. A page that fails
    ends the round too, and the next one begins elsewhere.
    """

    batch = 100
    allowance = 0.0
    place: Place | None  # where the last page ended; None: the next one is the first

    def __init__(self, engine: Engine, *, filter: ScannerFilter | None = None) -> None:  # noqa: A002
        super().__init__(engine, filter=filter)
        self.place = self.anywhere()  # earlier leaders may never have reached the end

    def anywhere(self) -> Place | None:
        """Return where a process begins, and where it continues after a page that failed, and may fail every time."""
        return None

    async def page(self, after: Place | None) -> tuple[int, Place | None]:
        """Handle one page; returns how many items it handled, and where it ended (None: it was the last page)."""
        raise NotImplementedError

    async def run_once(self) -> int:
        """Handle pages until the allowance is used up, or everything stored was read."""
        until = time.monotonic() + self.allowance
        handled = 0
        ends = 1 if self.place is None else 2  # a round that does not begin at the first page goes around
        while not self.stopping.is_set():
            try:
                found, self.place = await self.page(self.place)
            except Exception:
                self.place = self.anywhere()
                raise
            handled += found
            ends -= self.place is None
            # The last page may have been nearly empty: what is stored fits into the first one, unless there is much.
            if not ends or (not found and self.place is not None and time.monotonic() >= until):
                break
        return handled
