"""Reading the event log. Events never appear before a position that was already read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_filter, check_int, check_limit
from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_text, moment
from flowfabric.values.event import FAMILIES, FAMILY_BITS, HEARTBEATS, Event, EventCounts, EventCursor, EventFilter
from flowfabric.values.ids import ExecutionId, parse_execution_id, parse_flow_id
from flowfabric.values.page import Page, ScannerFilter

MOST_LOOKED_AT = 50_000  # events that one read looks at, however few of them the filter lets through


class Choice(NamedTuple):
    """Which events a reader takes: bits of families, and what must match; None: anything."""

    families: int
    namespace: str | None = None
    tag_key: str | None = None
    tag_value: str | None = None
    flow_id: Any = None
    execution_id: Any = None
    kind: str | None = None

    def takes(self, event: Event, families: int) -> bool:
        """Whether it takes an event of these families: the same as `read_events` in the database."""
        return (
            families & self.families != 0
            and (self.namespace is None or event.namespace == self.namespace)
            and (self.tag_key is None or event.tags.get(self.tag_key) == self.tag_value)
            and (self.flow_id is None or event.flow_id == self.flow_id)
            and (self.execution_id is None or event.execution_id == self.execution_id)
            and (self.kind is None or event.execution_kind == self.kind)
        )


class LogPage(NamedTuple):
    """Events, the cursor after them, whether that is the end of the log, and whether more is being written."""

    events: list[Event]
    cursor: EventCursor
    at_end: bool
    is_busy: bool


class Events(Operations):
    """read_events, list_events, count_events, seek_events."""

    async def read_events(
        self,
        *,
        family: str | Sequence[str] | None = None,
        after: EventCursor | None = None,
        limit: int = 256,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
    ) -> Page[Event, EventCursor]:
        """Return committed events after `after`, oldest first; `next_cursor` continues and is always set.

        An event is returned once no open transaction can still write an earlier one, so nothing appears before events
        already read, and the events of one execution come in the order of its history. One call looks at 50,000 events
        at most: a page may be empty although events follow. `CursorRefused` if events after `after` are missing.
        """
        families = (family,) if isinstance(family, str) else family
        chosen = choice_of(families, filter, field="family", heartbeats=True)
        start = after if after is not None else EventCursor()
        check_cursor(start)
        size = check_limit(limit, 10_000)
        if size == 0:
            return Page((), start)
        page = await self._read_log((chosen,), start, size)
        return Page(page.events, page.cursor)

    async def _read_log(
        self, choices: Sequence[Choice], after: EventCursor, limit: int, repeatable: bool = True
    ) -> LogPage:
        """Read events that one of the choices takes. `repeatable`: wait for a database that is away."""
        arguments = self._log_arguments(choices, after, limit)
        found = await self._fetch(statements.READ_EVENTS, *arguments, repeatable=repeatable)
        return self._page(found, after)

    @staticmethod
    def _log_arguments(choices: Sequence[Choice], after: EventCursor, limit: int) -> tuple[Any, ...]:
        return *map(list, zip(*choices, strict=True)), after.position, after.epoch, limit, MOST_LOOKED_AT

    @staticmethod
    def _page(found: list[asyncpg.Record], after: EventCursor) -> LogPage:
        *events, end = found
        epoch = end["log_epoch"]
        items = [rows.event(row, epoch) for row in events]
        # Events that the filter skipped need not be read again.
        read = end["seq"] or (items[-1].cursor.position if items else after.position)
        return LogPage(items, EventCursor(read, epoch), end["at_end"], end["is_busy"])

    async def list_events(
        self, execution_id: ExecutionId, *, after: EventCursor | None = None, limit: int = 1000
    ) -> Page[Event, EventCursor]:
        """What happened to one execution, oldest first, as far back as the log is kept; empty for an unknown id.

        One call looks at 50,000 events of the log at most; while `next_cursor` is set, there may be more.
        `CursorRefused` if a restore or failover lost the events up to `after`.
        """
        target = parse_execution_id(execution_id)
        start = (None, None) if after is None else check_cursor(after)
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
        start = (None, None) if after is None else check_cursor(after)
        found = await self._fetch(statements.COUNT_EVENTS, *start, repeatable=True)
        counted: dict[str, dict[str, int]] = {family: {} for family in FAMILIES}
        for row in found[:-1]:
            outcome = "failed" if row["outcome"] == "failure" else row["outcome"]
            words = (row["lease_type"], outcome, row["operator_type"], row["signal_effect"], row["worker_type"])
            for word, counts in zip(words, counted.values(), strict=True):
                if word is not None:
                    counts[word] = counts.get(word, 0) + row["n"]
        return EventCounts(cursor=EventCursor(found[-1]["seq"], found[-1]["log_epoch"]), **counted)

    async def seek_events(self, at: datetime) -> EventCursor:
        """Return a cursor that every event since a moment follows, and some older ones."""
        row = await self._row(statements.SEEK_EVENTS, moment(at, "at"), repeatable=True)
        return EventCursor(row["log_position"], row["log_epoch"])


def check_cursor(after: EventCursor) -> tuple[int, int]:
    """Return position and epoch of a cursor."""
    if not isinstance(after, EventCursor):
        raise InvalidInput(f"got {type(after).__name__}", field="after", allowed="an EventCursor")
    return check_int(after.position, "after", 0, 2**63 - 1), check_int(after.epoch, "after", 0, 2**32 - 1)


def choice_of(families: object, chosen: object, *, field: str = "families", heartbeats: bool = False) -> Choice:
    """Check which events a reader asks for. `families` None: all of them."""
    if heartbeats not in (True, False):
        raise InvalidInput(f"got {heartbeats!r}", field="heartbeats", allowed="True or False")
    if families is None:
        given: Sequence[Any] = FAMILIES
    elif isinstance(families, str) or not isinstance(families, Sequence) or not families:
        raise InvalidInput(f"got {families!r}", field=field, allowed=f"one or more of {', '.join(FAMILIES)}")
    else:
        given = families
    bits = 0
    for family in given:
        if not isinstance(family, str) or family not in FAMILY_BITS:
            raise InvalidInput(f"got {family!r}", field=field, allowed=", ".join(FAMILIES))
        bits |= FAMILY_BITS[family]
    if heartbeats and bits & FAMILY_BITS["worker"]:
        bits |= HEARTBEATS
    restricted = check_filter(chosen)
    if restricted[1] == "":
        raise InvalidInput("empty", field="filter.instance_tag", allowed="a key that is not empty")
    if not isinstance(chosen, EventFilter):
        return Choice(bits, *restricted)
    if chosen.kind == "":
        raise InvalidInput("empty", field="filter.kind", allowed="a kind that is not empty")
    return Choice(
        bits,
        *restricted,
        None if chosen.flow_id is None else parse_flow_id(chosen.flow_id, "filter.flow_id"),
        None if chosen.execution_id is None else parse_execution_id(chosen.execution_id, "filter.execution_id"),
        None if chosen.kind is None else check_text(chosen.kind, "filter.kind"),
    )


def bits_of(event: Event) -> int:
    """The families of an event, as bits."""
    return (
        (1 if event.lease_type is not None else 0)
        | (2 if event.outcome is not None else 0)
        | (4 if event.operator_type is not None else 0)
        | (8 if event.signal_effect is not None else 0)
        | (0 if event.worker_type is None else HEARTBEATS if event.worker_type == "heartbeat" else 16)
    )
