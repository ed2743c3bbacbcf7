"""Helpers for tests of suspensions and signals: executions that wait, and senders.

A `SuspendingWorld` is a `World` that also puts its signing key back between cases. A `Waiting` is one execution with
its waitpoints, by key.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg

import flowfabric as ff
from flowfabric.values.attempt import Claimed
from flowfabric.values.conditions import Condition, named_keys, on
from flowfabric.values.event import Event
from flowfabric.values.lease import Handle, Operator
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.wait import (
    ExpiredSuspension,
    Fresh,
    Suspended,
    Suspension,
    SuspensionDetails,
    UsePending,
    WaitpointToken,
)
from tests.databases import fresh_database
from tests.ids import home
from tests.sql.cases import CaseEngine, World
from tests.support import WORKER, Wipe, claim_one, new_id, submit

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
LONG = timedelta(days=30)
SATISFIED = "resume_condition_satisfied"
APPENDED = "appended_to_waitpoint"
BUFFERED = "buffered_for_pending_waitpoint"

_TABLES = (
    "execution", "attempt", "ready", "timer", "waitpoint", "suspension", "signal", "event", "claim_grant", "blocked",
    "unsuccessful", "waiter",
)  # fmt: skip
_STORED = " union all ".join(f"select '{table}', to_jsonb(t)::text from flowfabric.{table} t" for table in _TABLES)


@dataclass(frozen=True)
class Point:
    """A waitpoint and the right to signal it."""

    id: UUID
    token: WaitpointToken


@dataclass
class Waiting:
    """An execution that waits or is about to, its last lease, and its waitpoints by key."""

    claimed: Claimed
    points: dict[str, Point] = field(default_factory=dict)
    suspended: Suspended | None = None

    @property
    def id(self) -> ff.ExecutionId:
        return self.claimed.execution_id

    @property
    def handle(self) -> Handle:
        return self.claimed.handle

    @property
    def key(self) -> str:
        return next(iter(self.points))

    @property
    def point(self) -> Point:
        return self.points[self.key]

    @property
    def details(self) -> SuspensionDetails:
        assert self.suspended is not None
        return self.suspended.details


class SuspendingWorld(World):
    """One database, wiped before every case, with short ways to executions that wait."""

    # Ways there

    async def hold(self, *, lease_ttl: timedelta = LONG, **creating: Any) -> Waiting:
        """An execution under a lease."""
        execution_id = await submit(self.engine, **creating)
        await self.engine.issue_claim_grant(execution_id, **WORKER)
        ids = {"lease_id": new_id(), "attempt_id": new_id()}
        return Waiting(await self.engine.claim_execution(execution_id, **WORKER, **ids, lease_ttl=lease_ttl))

    async def pend(
        self, key: str = "k", *, of: Waiting | None = None, expires_in: timedelta = HOUR, **creating: Any
    ) -> Waiting:
        """An execution under a lease, with one more pending waitpoint."""
        waiting = of if of is not None else await self.hold(**creating)
        made = await self.engine.create_waitpoint(waiting.handle, key, expires_in)
        waiting.points[key] = Point(made.waitpoint_id, made.token)
        return waiting

    async def suspend(
        self,
        condition: Condition | None = None,
        *keys: str,
        of: Waiting | None = None,
        creating: Mapping[str, Any] | None = None,
        **args: Any,
    ) -> Waiting:
        """An execution suspended on fresh waitpoints, one for each key that the condition names, or these."""
        wanted = on("k") if condition is None else condition
        waiting = of if of is not None else await self.hold(**(creating or {}))
        bindings = [Fresh(new_id(), key) for key in keys or named_keys(wanted)]
        answer = await self.engine.suspend(waiting.handle, waitpoints=bindings, resume_condition=wanted, **args)
        return bound(waiting, answer)

    async def suspend_on_pending(self, waiting: Waiting, condition: Condition | None = None, **args: Any) -> Any:
        """Suspend on the first waitpoint that it has; the answer is the engine's."""
        answer = await self.engine.suspend(
            waiting.handle,
            waitpoints=[UsePending(waiting.point.id)],
            resume_condition=on(waiting.key) if condition is None else condition,
            **args,
        )
        if isinstance(answer, Suspended):
            waiting.suspended = answer
        return answer

    async def in_an_hour(self) -> Any:
        return await self.clock.now() + HOUR

    # Signals

    async def send(
        self, waiting: Waiting, key: str | None = None, *, by: ff.Engine | None = None, **fields: Any
    ) -> Accepted | DuplicateSignal:
        """Deliver a signal with the right token, unless another is given."""
        point = waiting.points[waiting.key if key is None else key]
        given = {"signal_name": "go", "source_type": "webhook", "waitpoint_token": point.token, **fields}
        execution_id = given.pop("execution_id", waiting.id)
        return await (by or self.engine).deliver_signal(execution_id, given.pop("waitpoint_id", point.id), **given)

    async def accept(self, waiting: Waiting, key: str | None = None, **fields: Any) -> Accepted:
        """The same, and it must be accepted."""
        answer = await self.send(waiting, key, **fields)
        assert isinstance(answer, Accepted)
        return answer

    async def approve(self, waiting: Waiting, suffix: str = "1", **fields: Any) -> Accepted | DuplicateSignal:
        """An operator's decision."""
        given = {"signal_name": "approved", "lane_id": "default", "waitpoint_id": waiting.point.id, **fields}
        execution_id = given.pop("execution_id", waiting.id)
        return await self.engine.deliver_approval_signal(execution_id, idempotency_suffix=suffix, **given)

    async def reclaim_resumed(self, waiting: Waiting, **fields: Any) -> Claimed:
        """Claim what was resumed, by the resume path, with a grant."""
        await self.engine.issue_claim_grant(waiting.id, **WORKER)
        return await self.engine.claim_resumed_execution(
            waiting.id, **{**WORKER, "lease_id": new_id(), "lease_ttl": LONG, **fields}
        )

    # What is there

    async def waitpoint(self, waiting: Waiting, key: str | None = None) -> asyncpg.Record:
        """The stored row of a waitpoint."""
        found = await self.sql.fetchrow(
            "select * from flowfabric.waitpoint where partition = $1 and waitpoint_id = $2",
            home(waiting.id),
            waiting.points[waiting.key if key is None else key].id,
        )
        assert found is not None
        return found

    async def closed(self, waiting: Waiting) -> dict[str, tuple[str, str | None]]:
        """State and close reason of every waitpoint, by key."""
        rows = {key: await self.waitpoint(waiting, key) for key in waiting.points}
        return {key: (row["state"], row["close_reason"]) for key, row in rows.items()}

    async def suspension(self, waiting: Waiting) -> Suspension:
        found = await self.engine.read_suspension(waiting.id)
        assert found is not None
        return found

    async def vector(self, waiting: Waiting) -> dict[str, str]:
        """The seven dimensions as words."""
        vector = (await self.record(waiting.id)).state_vector
        return {name: str(getattr(vector, name)) for name in vector.__struct_fields__}

    async def events(self, waiting: Waiting) -> list[Event]:
        return list((await self.engine.list_events(waiting.id)).items)

    async def stored(self) -> list[tuple[str, str]]:
        """Everything in the database, to see that nothing changed."""
        return sorted((table, row) for table, row in await self.sql.fetch(_STORED))


def bound(waiting: Waiting, answer: object) -> Waiting:
    """Keep what a suspend answered."""
    assert isinstance(answer, Suspended)
    details = answer.details
    waiting.suspended = answer
    waiting.points = {
        details.waitpoint_key: Point(details.waitpoint_id, details.waitpoint_token),
        **{one.waitpoint_key: Point(one.waitpoint_id, one.waitpoint_token) for one in details.additional_waitpoints},
    }
    return waiting


def changed(before: Sequence[tuple[str, str]], after: Sequence[tuple[str, str]]) -> dict[str, list[dict[str, Any]]]:
    """The rows that another look found new or different, by table; rows that vanished are listed under `-table`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for table, row in after:
        if (table, row) not in before:
            found.setdefault(table, []).append(json.loads(row))
    kept = set(found)
    for table, row in before:
        if (table, row) not in after and table not in kept:
            found.setdefault(f"-{table}", []).append(json.loads(row))
    return found


def forged(token: WaitpointToken) -> str:
    """The same token with its last digit changed."""
    text = token.reveal()
    return text[:-1] + ("0" if text[-1] != "0" else "1")


@contextlib.asynccontextmanager
async def open_suspending(server: str) -> AsyncIterator[SuspendingWorld]:
    async with fresh_database(server) as dsn, await CaseEngine.connect(dsn, notifications=False) as engine:
        sql = await asyncpg.connect(dsn)
        try:
            yield SuspendingWorld(dsn, engine, sql, await Wipe.of(sql))
        finally:
            await sql.close()


# What it looks like

RESUMED = {
    "lifecycle_phase": "runnable", "ownership_state": "unowned", "eligibility_state": "eligible_now",
    "blocking_reason": "waiting_for_worker", "terminal_outcome": "none", "attempt_state": "attempt_interrupted",
    "public_state": "resumable",
}  # fmt: skip


def ended(state: str) -> dict[str, str]:
    return {
        "lifecycle_phase": "terminal", "ownership_state": "unowned", "eligibility_state": "not_applicable",
        "blocking_reason": "none", "terminal_outcome": state, "attempt_state": "attempt_terminal",
        "public_state": state,
    }  # fmt: skip


def short(events: list[Event]) -> list[str]:
    """Events in one word each, signals included."""
    words: list[str] = []
    for event in events:
        pairs = {"L": event.lease_type, "K": event.outcome, "O": event.operator_type, "S": event.signal_effect}
        words += [f"{letter}:{word}" for letter, word in pairs.items() if word is not None]
    return words


def numbered(items: Any) -> list[int]:
    return [one.ordinal for one in items]


# What may happen next to an execution with waitpoints.


async def nothing(world: SuspendingWorld, wait: Waiting) -> None:
    pass


async def resume(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.resume_execution(wait.id)


async def resume_by_signal(world: SuspendingWorld, wait: Waiting) -> None:
    assert (await world.accept(wait, signal_name="done")).effect == SATISFIED


async def run_again(world: SuspendingWorld, wait: Waiting) -> None:
    await resume(world, wait)
    wait.claimed = await claim_one(world.engine, lease_ttl=LONG)


async def run_to_its_end(world: SuspendingWorld, wait: Waiting) -> None:
    await run_again(world, wait)
    await world.engine.complete(wait.handle)


async def cancel(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.cancel(Operator(wait.id), "enough")


async def time_out(world: SuspendingWorld, wait: Waiting) -> None:
    await world.clock.advance(minutes=10)
    assert isinstance(await world.engine.expire_suspension(wait.id), ExpiredSuspension)


async def fail_for_good(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.fail(wait.handle, "boom", failure_class="permanent")


async def release(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.release(wait.handle)


async def delay(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.delay(wait.handle, 10 * SECOND)


async def complete(world: SuspendingWorld, wait: Waiting) -> None:
    await world.engine.complete(wait.handle)


async def pass_deadline(world: SuspendingWorld, wait: Waiting) -> None:
    await world.clock.advance(days=2)
    assert await world.engine.expire_execution(wait.id, "execution_deadline") == "expired"


Then = Callable[[SuspendingWorld, Waiting], Awaitable[None]]
ENDS: dict[str, Then] = {
    "still open": nothing,
    "resumed by an operator": resume,
    "resumed by another signal": resume_by_signal,
    "running again": run_again,
    "completed": run_to_its_end,
    "cancelled": cancel,
    "timed out": time_out,
}
