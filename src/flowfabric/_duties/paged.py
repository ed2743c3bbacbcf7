"""Duties that go through all that is stored, one page after the other."""

from __future__ import annotations

import time
from typing import Generic, TypeVar

from flowfabric._duties.duty import Duty
from flowfabric.engine import Engine
from flowfabric.values.page import ScannerFilter

Place = TypeVar("Place")


class PagedDuty(Duty, Generic[Place]):
    """Continues where its last round ended, and at the end begins again: a round costs the same whatever is stored.

    After a page that finds something comes the next, and the first one after the last. Another page that finds nothing
    ends the round; in a duty that has to be in time, `allowance` seconds of them do. A page that fails ends it too, and
    the next round begins elsewhere.
    """

    batch = 100
    allowance = 0.0
    place: Place | None  # where the last page ended; None: the next one is the first

    def __init__(self, engine: Engine, *, filter: ScannerFilter | None = None) -> None:  # noqa: A002
        super().__init__(engine, filter=filter)
        self.place = self.anywhere()  # those that led before may never have come to the end

    def anywhere(self) -> Place | None:
        """Return where a process begins, and where it continues after a page that failed: a page may fail each time."""
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
