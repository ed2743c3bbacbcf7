"""Timers: actions that are due, for a single execution or in one round over all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum

from msgspec import Struct

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_duration, check_filter, check_int, check_list, check_low_water
from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_text, moment
from flowfabric.values.ids import ExecutionId, parse_execution_id
from flowfabric.values.page import ScannerFilter
from flowfabric.values.state import State
from flowfabric.values.wait import AlreadySatisfied
from flowfabric.values.words import Expiry, Promotion
from flowfabric.values.worker import Leader


class TimerKind(StrEnum):
    """The kinds of timers."""

    LEASE = "lease"
    ATTEMPT = "attempt"
    DEADLINE = "deadline"
    DELAY = "delay"
    PARKED = "parked"
    SUSPENSION = "suspension"
    WAITPOINT = "waitpoint"
    RETENTION = "retention"


class MarkedExpired(Struct, frozen=True):
    execution_id: ExecutionId


class Round(Struct, frozen=True, kw_only=True):
    """One round of a duty: how many were handled or failed, and whether more are due.

    `backlog`: of `reconcile_cancellations`, how many cancelled flows had members left to cancel.
    """

    handled: int
    failed: int = 0
    message: str | None = None
    more: bool = False
    last_due_at: datetime | None = None
    backlog: int | None = None


class Swept(Struct, frozen=True, kw_only=True):
    """How many rows a sweep removed: grants, keys of usage, and everything together."""

    grants: int
    usage_keys: int
    total: int


class DueNow(Struct, frozen=True, kw_only=True):
    """The duties that have work, by kind of timer or name of queue, and the seconds until the next timer."""

    due: frozenset[str]
    pause: float
    announced: datetime | None
    low_water: dict[str, datetime | None]  # for each that was asked for: nothing is left before it


class Lead(Struct, frozen=True, kw_only=True):
    """Whether this process leads a group of duties, and for how long at least."""

    is_ours: bool
    left: timedelta


class Timers(Operations):
    """mark_lease_expired_if_due, promote_delayed, expire_execution, run_timers, trim_retention, sweep, next_due."""

    async def _one(self, kind: TimerKind, execution_id: ExecutionId) -> tuple[str, str | None, str | None]:
        target = parse_execution_id(execution_id)
        row = await self._row(statements.RUN_ONE, kind.value, *self._at(target))
        return row["code"], row["state"], row["lease_lost"]

    async def mark_lease_expired_if_due(self, execution_id: ExecutionId) -> MarkedExpired | AlreadySatisfied:
        """Mark an expired lease so that another worker may reclaim the execution."""
        code, state, lost = await self._one(TimerKind.LEASE, execution_id)
        match code:
            case "done":
                return MarkedExpired(parse_execution_id(execution_id))
            case "not_found":
                return AlreadySatisfied("execution_not_found")
            case "not_yet_due":
                return AlreadySatisfied("not_yet_expired")
            case _ if state != State.ACTIVE:
                return AlreadySatisfied("not_active")
            case _:
                return AlreadySatisfied(f"already_{lost}")

    async def promote_delayed(self, execution_id: ExecutionId) -> Promotion:
        """Make an execution claimable whose delay has passed."""
        code, state, _ = await self._one(TimerKind.DELAY, execution_id)
        match code:
            case "done":
                return Promotion.PROMOTED
            case "not_applicable":
                known = State(str(state))
                if known.is_terminal or known in (State.ACTIVE, State.SUSPENDED):
                    return Promotion.NOT_RUNNABLE
                return Promotion.NOT_DELAYED
            case _:
                return Promotion(code)

    async def expire_execution(self, execution_id: ExecutionId, phase: str) -> Expiry:
        """End an attempt or an execution whose time has passed; `phase`: `attempt_timeout` or `execution_deadline`."""
        kinds = {"attempt_timeout": TimerKind.ATTEMPT, "execution_deadline": TimerKind.DEADLINE}
        if not isinstance(phase, str) or phase not in kinds:
            raise InvalidInput(f"got {phase!r}", field="phase", allowed=", ".join(kinds))
        code, state, _ = await self._one(kinds[phase], execution_id)
        match code:
            case "done":
                return Expiry.RETRY_SCHEDULED if state == State.DELAYED else Expiry.EXPIRED
            case "not_applicable":
                return Expiry.ALREADY_TERMINAL if State(str(state)).is_terminal else Expiry.NOT_YET_DUE
            case _:
                return Expiry(code)

    async def run_timers(
        self,
        kind: TimerKind | str,
        *,
        limit: int = 1000,
        after: datetime | None = None,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
        backoff: timedelta = timedelta(seconds=30),
    ) -> Round:
        """Run one round of one duty over the timers that are due, oldest first.

        Takes timers until they cover `limit` executions, at least one. Skips timers due at `after` or before.
        """
        try:
            wanted = TimerKind(kind)
        except ValueError:
            raise InvalidInput(f"got {kind!r}", field="kind", allowed=", ".join(TimerKind)) from None
        chosen = check_filter(filter)
        row = await self._row(
            statements.RUN_TIMERS,
            wanted.value,
            check_int(limit, "limit", 1, 10_000),
            None if after is None else moment(after, "after"),
            *chosen,
            check_duration(backoff, "backoff", least_ms=0),
        )
        return Round(
            handled=row["handled"],
            failed=row["failed"],
            message=row["message"],
            more=row["more"],
            last_due_at=row["last_due_at"],
        )

    async def trim_retention(
        self,
        *,
        limit: int = 100,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
    ) -> int:
        """Delete ended executions whose retention has ended, with everything they own; returns how many it checked.

        Children that their parent needs, and members of flows that are not due as a whole, are checked again later.
        """
        return (await self.run_timers(TimerKind.RETENTION, limit=limit, filter=filter)).handled

    async def sweep(self, *, limit: int = 1000) -> Swept:
        """Remove idempotency records, grants, event segments and others that have expired."""
        row = await self._row(statements.SWEEP, check_int(limit, "limit", 1, 10_000))
        return Swept(grants=row["grants"], usage_keys=row["usage_keys"], total=row["total"])

    async def submit_hooks(self, *, limit: int = 100, low_water: datetime | None = None) -> Round:
        """Submit tasks that executions which failed, expired or were escalated name as their hooks, oldest first.

        `low_water`: from `look_for_due`; hooks that were due before it are passed over.
        """
        row = await self._row(
            statements.SUBMIT_HOOKS,
            check_int(limit, "limit", 1, 10_000),
            check_low_water(low_water),
        )
        return Round(handled=row["submitted"], failed=row["failed"], message=row["message"], more=row["more"])

    async def next_due(self) -> datetime | None:
        """Return when the next timer is due."""
        row = await self._row(statements.NEXT_DUE, [kind.value for kind in TimerKind], repeatable=True)
        at: datetime | None = row["at"]
        return at

    async def look_for_due(
        self,
        after: Mapping[str, datetime | None],
        *,
        at_most: timedelta,
        before: datetime | None = None,
    ) -> DueNow:
        """Return which of these kinds of timers and queues have work now, and when the next of them is due.

        A queue has the name of its duty. `after` is, for each, the time before which nothing is left; None: not known.
        Announces that this process sleeps until then: an earlier timer wakes it. `before` is what the previous
        announcement returned.
        """
        row = await self._row(
            statements.LOOK_FOR_DUE,
            [str(kind) for kind in after],
            list(after.values()),
            self._instance if self._listener is not None else None,
            check_duration(at_most, "at_most", least_ms=0),
            None if before is None else moment(before, "before"),
        )
        return DueNow(
            due=frozenset(row["due"]),
            pause=float(row["pause_ms"]) / 1000,
            announced=row["announced"],
            low_water=dict(zip(after, row["low_water"] or (), strict=True)),
        )

    async def take_lead(self, names: Sequence[str], for_: timedelta) -> dict[str, Lead]:
        """Lead groups of duties for a while, those that no other process leads; returns who leads them."""
        wanted = [check_text(name, "names") for name in check_list(names, "names")]
        found = await self._fetch(statements.TAKE_LEAD, wanted, self._instance, check_duration(for_, "for_"))
        return {row["name"]: Lead(is_ours=row["is_ours"], left=timedelta(milliseconds=row["left_ms"])) for row in found}

    async def leave_lead(self) -> None:
        """Give up what this process leads."""
        await self._fetch(statements.LEAVE_LEAD, self._instance, repeatable=True)

    async def list_leaders(self) -> list[Leader]:
        """Return which process leads each group of duties."""
        return [rows.leader(row) for row in await self._fetch(statements.LIST_LEADS, repeatable=True)]

    @contextlib.contextmanager
    def timer_wakeups(self) -> Iterator[asyncio.Event | None]:
        """Return an event that is set when another process sets an earlier timer; None without notifications."""
        if self._listener is None:
            yield None
            return
        with self._listener.topic("timer") as woken:
            yield woken
