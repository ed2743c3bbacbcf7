"""What the duties do, callable one by one: on a single execution, or one round over what is due."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from msgspec import Struct

from flowfabric.engine.calls import Calls, check_duration, check_filter, check_int, moment, parse_execution
from flowfabric.errors import InvalidInput
from flowfabric.values.ids import ExecutionId
from flowfabric.values.page import ScannerFilter
from flowfabric.values.state import State
from flowfabric.values.wait import AlreadySatisfied

_ONE = "select code, state, lease_lost from flowfabric.run_one($1, $2, $3)"
_ROUND = "select * from flowfabric.run_timers($1, $2, $3, $4, $5, $6, $7)"


class TimerKind(StrEnum):
    """Whose time may come."""

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
    """One round of a duty: how many were handled or failed, and whether more are due behind them."""

    handled: int
    failed: int = 0
    message: str | None = None
    more: bool = False
    last_due_at: datetime | None = None


class Violation(Struct, frozen=True, kw_only=True):
    """Something the audit found that must never be."""

    rule: str
    execution_id: ExecutionId | None
    detail: str | None


class Hooks(Calls):
    """mark_lease_expired_if_due, promote_delayed, expire_execution, trim_retention, run_timers, audit."""

    async def _one(self, kind: TimerKind, execution_id: ExecutionId) -> tuple[str, str | None, str | None]:
        target = parse_execution(execution_id)
        row = await self._row(_ONE, kind.value, target.partition, target.uuid)
        return row["code"], row["state"], row["lease_lost"]

    async def mark_lease_expired_if_due(self, execution_id: ExecutionId) -> MarkedExpired | AlreadySatisfied:
        """Mark a lapsed lease so that others may reclaim it."""
        code, state, lost = await self._one(TimerKind.LEASE, execution_id)
        match code:
            case "done":
                return MarkedExpired(parse_execution(execution_id))
            case "not_found":
                return AlreadySatisfied("execution_not_found")
            case "not_yet_due":
                return AlreadySatisfied("not_yet_expired")
            case _ if state != State.ACTIVE:
                return AlreadySatisfied("not_active")
            case _:
                return AlreadySatisfied(f"already_{lost}")

    async def promote_delayed(self, execution_id: ExecutionId) -> str:
        """`promoted`, or why not: not_yet_due, not_delayed, not_runnable, not_found."""
        code, state, _ = await self._one(TimerKind.DELAY, execution_id)
        match code:
            case "done":
                return "promoted"
            case "not_applicable":
                known = State(str(state))
                if known is State.DELAYED:
                    return "not_yet_due"  # its time never comes: it waits for another execution
                return (
                    "not_runnable" if known.is_terminal or known in (State.ACTIVE, State.SUSPENDED) else "not_delayed"
                )
            case _:
                return code

    async def expire_execution(self, execution_id: ExecutionId, phase: str) -> str:
        """`expired`, `retry_scheduled`, `not_yet_due`, `already_terminal` or `not_found`.

        `phase` is `attempt_timeout` or `execution_deadline`.
        """
        kinds = {"attempt_timeout": TimerKind.ATTEMPT, "execution_deadline": TimerKind.DEADLINE}
        if not isinstance(phase, str) or phase not in kinds:
            raise InvalidInput(f"got {phase!r}", field="phase", allowed=", ".join(kinds))
        code, state, _ = await self._one(kinds[phase], execution_id)
        match code:
            case "done":
                return "retry_scheduled" if state == State.DELAYED else "expired"
            case "not_applicable":
                return "already_terminal" if State(str(state)).is_terminal else "not_yet_due"
            case _:
                return code

    async def run_timers(
        self,
        kind: TimerKind | str,
        *,
        limit: int = 1000,
        after: datetime | None = None,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
        backoff: timedelta = timedelta(seconds=30),
    ) -> Round:
        """One round of one duty over the timers that are due, oldest first.

        Timers are taken until they point at `limit` executions, at least one. Those due at `after` or before are left.
        """
        try:
            wanted = TimerKind(kind)
        except ValueError:
            raise InvalidInput(f"got {kind!r}", field="kind", allowed=", ".join(TimerKind)) from None
        chosen = check_filter(filter)
        row = await self._row(
            _ROUND,
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
        """Forget ended executions whose retention is over, with everything they own; answers how many."""
        return (await self.run_timers(TimerKind.RETENTION, limit=limit, filter=filter)).handled

    async def sweep(self, *, limit: int = 1000) -> int:
        """Remove idempotency records, grants and event segments whose time is over."""
        row = await self._row("select flowfabric.sweep($1) as n", check_int(limit, "limit", 1, 10_000))
        return int(row["n"])

    async def next_due(self) -> datetime | None:
        """When the duties have something to do next."""
        row = await self._row(
            "select flowfabric.next_due($1) as at", [kind.value for kind in TimerKind], repeatable=True
        )
        at: datetime | None = row["at"]
        return at

    async def sleep_until_due(self, at_most: timedelta) -> float:
        """Seconds until the next timer, at most `at_most`; tells others to wake this process for an earlier one."""
        row = await self._row(
            "select * from flowfabric.sleep_until_due($1, $2, $3)",
            [kind.value for kind in TimerKind],
            self._instance if self._listener is not None else None,
            check_duration(at_most, "at_most", least_ms=0),
        )
        return float(row["pause_ms"]) / 1000

    @contextlib.contextmanager
    def timer_wakeups(self) -> Iterator[asyncio.Event | None]:
        """An event that is set when an earlier timer was set elsewhere; None without notifications."""
        if self._listener is None:
            yield None
            return
        with self._listener.topic("timer") as woken:
            yield woken

    def attach(self, background: Any) -> None:
        """Remember a runner of duties, for `shutdown_prepare`."""
        self._background.append(background)

    def detach(self, background: Any) -> None:
        """Forget it again."""
        with contextlib.suppress(ValueError):
            self._background.remove(background)

    @property
    def flow_partitions(self) -> int:
        """How many partitions this deployment has; fixed when it was set up."""
        return self._database.flow_partitions

    async def audit(self, partition: int | None = None, *, events: bool = False) -> list[Violation]:
        """What must never be, in one partition or all: empty on a sound database. Reports, repairs nothing.

        `events` also compares with the event log, which is right only while the log still holds everything.
        """
        found = await self._fetch(
            "select rule, partition, id, detail from flowfabric.audit($1, $2)",
            None if partition is None else check_int(partition, "partition", 0, 65_535),
            bool(events),
            repeatable=True,
        )
        return [
            Violation(
                rule=row["rule"],
                execution_id=None if row["id"] is None else ExecutionId.of(row["partition"], row["id"]),
                detail=row["detail"],
            )
            for row in found
        ]
