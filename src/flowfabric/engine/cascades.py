"""Cascades: the effects of a member's end on its flow, beyond those of the call that ended it."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from msgspec import Struct

from flowfabric._postgres import statements
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_duration, check_filter, check_int, check_low_water
from flowfabric.errors import Contention, InvalidInput, RetriesExhausted
from flowfabric.values.event import Event
from flowfabric.values.flow import Advanced, CascadeOutcome, NoOp
from flowfabric.values.page import ScannerFilter

_EVENTS = 256  # ends in a chunk of the dispatcher
_EDGES = 500  # edges in a transaction


class CascadePass(Struct, frozen=True, kw_only=True):
    """One chunk of cascades: how many ends were seen, finished and failed, and how many edges resolved."""

    seen: int
    finished: int
    resolved: int = 0
    failed: int = 0
    message: str | None = None
    more: bool = False
    last_event: int | None = None


class Cascades(Operations):
    """dispatch_completion, cascade_completion, dispatch_cascades."""

    async def dispatch_completion(self, event_id: int) -> Advanced | NoOp:
        """Resolve the edges that depend on one completion event: `NoOp` if that was done before."""
        check_int(event_id, "event_id", 0, 2**63 - 1)
        total = 0
        for pause in (0.005, 0.01, 0.0):
            while True:
                row = await self._row(
                    statements.DISPATCH_CASCADES, 1, _EDGES, None, event_id, None, None, None, None, None
                )
                total += row["resolved"]
                if row["failed"]:
                    raise Contention("retry_exhausted", row["message"] or "")
                if row["seen"] == 0:
                    still = await self._row(statements.CASCADE_PENDING, event_id)
                    if not still["pending"]:
                        return Advanced(total) if total else NoOp()
                    break
                if row["finished"]:
                    return Advanced(total)
                if row["resolved"] == 0:
                    break
            await asyncio.sleep(pause)
        raise RetriesExhausted(f"event {event_id}: a group or a downstream is locked by another transaction")

    async def cascade_completion(self, event: Event) -> CascadeOutcome:
        """The same, for an `Event`."""
        if not isinstance(event, Event):
            raise InvalidInput(
                f"got {type(event).__name__}", field="event", allowed="an Event of the completion family"
            )
        done = await self.dispatch_completion(event.cursor.position)
        return CascadeOutcome(done.resolved if isinstance(done, Advanced) else 0)

    async def dispatch_cascades(
        self,
        *,
        limit: int = _EVENTS,
        edges: int = _EDGES,
        after: int | None = None,
        low_water: datetime | None = None,
        stale: timedelta | None = None,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
    ) -> CascadePass:
        """Resolve one chunk of ended executions, oldest first, after the event `after`.

        `low_water`: from `look_for_due`; ends from before it are passed over.
        """
        row = await self._row(
            statements.DISPATCH_CASCADES,
            check_int(limit, "limit", 1, 10_000),
            check_int(edges, "edges", 1, 10_000),
            None if after is None else check_int(after, "after", 0, 2**63 - 1),
            None,
            None if stale is None else check_duration(stale, "stale", least_ms=0),
            *check_filter(filter),
            check_low_water(low_water),
        )
        return CascadePass(
            seen=row["seen"],
            finished=row["finished"],
            resolved=row["resolved"],
            failed=row["failed"],
            message=row["message"],
            more=row["more"],
            last_event=row["last_event"],
        )
