"""The event log, read in an order that never changes behind the reader."""

from __future__ import annotations

from flowfabric._postgres import rows
from flowfabric.engine.calls import Calls, check_filter, check_int, check_limit
from flowfabric.errors import InvalidInput
from flowfabric.models import Event, EventCursor, Page, ScannerFilter

FAMILIES = ("lease", "completion", "operator")


class Events(Calls):
    """read_events."""

    async def read_events(
        self,
        *,
        family: str | None = None,
        after: EventCursor | None = None,
        limit: int = 256,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
    ) -> Page[Event, EventCursor]:
        """Committed events behind `after`, oldest first; `next_cursor` is where to go on, and is always set.

        An event is shown once no call is under way that may still write an earlier one, so nothing can appear before
        what was read, and the events of one execution stand in the order of its history.
        """
        if family is not None and family not in FAMILIES:
            raise InvalidInput(f"got {family!r}", field="family", allowed=", ".join(FAMILIES))
        start = after if after is not None else EventCursor()
        if not isinstance(start, EventCursor):
            raise InvalidInput(f"got {type(after).__name__}", field="after", allowed="an EventCursor")
        check_int(start.position, "after", 0, 2**63 - 1)
        size = check_limit(limit, 10_000)
        chosen = check_filter(filter)
        if size == 0:
            return Page((), start)
        found = await self._fetch(
            "select * from flowfabric.read_events($1, $2, $3, $4, $5, $6)",
            family,
            start.position,
            size,
            *chosen,
            repeatable=True,
        )
        items = [rows.event(row) for row in found if row["occurred_at"] is not None]
        # What a filter passed over need not be looked at again.
        return Page(items, EventCursor(found[-1]["seq"]) if found else start)
