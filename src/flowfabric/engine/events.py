"""Reading the event log. Events never appear before a position that was already read."""

from __future__ import annotations

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_filter, check_int, check_limit
from flowfabric.errors import InvalidInput
from flowfabric.values.event import Event, EventCounts, EventCursor
from flowfabric.values.ids import ExecutionId, parse_execution_id
from flowfabric.values.page import Page, ScannerFilter

FAMILIES = ("lease", "completion", "operator", "signal")
MOST_LOOKED_AT = 50_000  # events that one read looks at, however few of them the filter lets through


class Events(Operations):
    """read_events, list_events, count_events."""

    async def read_events(
        self,
        *,
        family: str | None = None,
        after: EventCursor | None = None,
        limit: int = 256,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
    ) -> Page[Event, EventCursor]:
        """Return committed events after `after`, oldest first; `next_cursor` continues and is always set.

        An event is returned once no open transaction can still write an earlier one, so nothing appears before events
        already read, and the events of one execution come in the order of its history. One call looks at 50,000 events
        at most: a page may be empty although events follow. `CursorRefused` if events after `after` are missing.
        """
        if family is not None and family not in FAMILIES:
            raise InvalidInput(f"got {family!r}", field="family", allowed=", ".join(FAMILIES))
        start = after if after is not None else EventCursor()
        position, epoch = _checked(start)
        size = check_limit(limit, 10_000)
        chosen = check_filter(filter)
        if size == 0:
            return Page((), start)
        found = await self._fetch(
            statements.READ_EVENTS,
            family,
            position,
            epoch,
            size,
            *chosen,
            MOST_LOOKED_AT,
            repeatable=True,
        )
        *events, end = found
        items = [rows.event(row, end["log_epoch"]) for row in events]
        # Events that the filter skipped need not be read again.
        read = end["seq"] or (items[-1].cursor.position if items else position)
        return Page(items, EventCursor(read, end["log_epoch"]))

    async def list_events(
        self, execution_id: ExecutionId, *, after: EventCursor | None = None, limit: int = 1000
    ) -> Page[Event, EventCursor]:
        """What happened to one execution, oldest first, as far back as the log is kept; empty for an unknown id.

        One call looks at 50,000 events of the log at most; while `next_cursor` is set, there may be more.
        `CursorRefused` if a restore or failover lost the events up to `after`.
        """
        target = parse_execution_id(execution_id)
        start = (None, None) if after is None else _checked(after)
        size = check_limit(limit, 10_000)
        if size == 0:
            return Page((), after)
        found = await self._fetch(
            statements.LIST_EVENTS, *self._at(target), *start, size, MOST_LOOKED_AT, repeatable=True
        )
        if not found:
            return Page([])
        *events, end = found
        items = [rows.event(row, end["log_epoch"]) for row in events]
        if end["seq"] is not None:
            return Page(items, EventCursor(end["seq"], end["log_epoch"]))
        return Page(items, items[-1].cursor if len(items) == size else None)

    async def count_events(self, after: EventCursor | None = None) -> EventCounts:
        """Count events of each type after `after`. Without `after`, return only the current end of the log.

        `CursorRefused` if events after `after` are missing.
        """
        start = (None, None) if after is None else _checked(after)
        found = await self._fetch(statements.COUNT_EVENTS, *start, repeatable=True)
        leases: dict[str, int] = {}
        outcomes: dict[str, int] = {}
        operator: dict[str, int] = {}
        signals: dict[str, int] = {}
        for row in found[:-1]:
            outcome = "failed" if row["outcome"] == "failure" else row["outcome"]
            words = (row["lease_type"], outcome, row["operator_type"], row["signal_effect"])
            for word, counts in zip(words, (leases, outcomes, operator, signals), strict=True):
                if word is not None:
                    counts[word] = counts.get(word, 0) + row["n"]
        end = EventCursor(found[-1]["seq"], found[-1]["log_epoch"])
        return EventCounts(cursor=end, lease=leases, completion=outcomes, operator=operator, signal=signals)


def _checked(after: EventCursor) -> tuple[int, int]:
    if not isinstance(after, EventCursor):
        raise InvalidInput(f"got {type(after).__name__}", field="after", allowed="an EventCursor")
    return check_int(after.position, "after", 0, 2**63 - 1), check_int(after.epoch, "after", 0, 2**32 - 1)
