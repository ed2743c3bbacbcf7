"""Leases: the holder's calls that do not end the execution, and how a lease is revoked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.batch import Batch, Fences, is_override, raised
from flowfabric.engine.checks import check_batch, check_duration, check_filled, check_int, check_limit
from flowfabric.engine.workers import heartbeat_of, own
from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.values.attempt import Delayed, Moved
from flowfabric.values.checks import check_text, check_worker, escape_text, instant, moment
from flowfabric.values.ids import ExecutionId, LeaseId, parse_execution_id, parse_uuid
from flowfabric.values.lease import Authority, ExpiredLease, Fence, Handle, Released, Renewed, Revoked, Stopped
from flowfabric.values.page import Page
from flowfabric.values.state import State
from flowfabric.values.wait import AlreadySatisfied
from flowfabric.values.worker import Heartbeat, OwnWorker

_DETAIL_BYTES = 4096


class Leases(Operations):
    """renew, progress, delay, wait_children, release, stop_changed, revoke_lease, list_expired_leases."""

    async def renew(self, authority: Handle | Fence, *, lease_ttl: timedelta | None = None) -> Renewed:
        """Extend the lease by its time to live from now, or by `lease_ttl`."""
        answer = (await self.renew_many([authority], lease_ttl=lease_ttl))[0]
        if isinstance(answer, FlowFabricError):
            raise answer
        return answer

    async def renew_many(
        self, authorities: Sequence[Handle | Fence], *, lease_ttl: timedelta | None = None, waits: bool = True
    ) -> list[Renewed | FlowFabricError]:
        """Extend up to 1,000 leases in one call; one verdict per lease.

        With `waits=False` an execution that another transaction has locked is refused as `execution_locked`, and
        delays no other.
        """
        batch, args = self._renewal(authorities, lease_ttl, waits=waits)
        if batch.is_empty:
            return batch.verdicts([])
        return _renewed(batch, await self._fetch(statements.RENEW, *args, repeatable=True))

    async def renew_and_heartbeat(
        self, authorities: Sequence[Handle | Fence], *, worker: OwnWorker
    ) -> tuple[list[Renewed | FlowFabricError], Heartbeat | None]:
        """Do the same without waiting, and say that a worker of this process is still there, as `heartbeat_own` does.

        It is one call; the heartbeat comes after the renewals and does not wait for a lock either.
        """
        identity = own(worker)
        batch, args = self._renewal(authorities, None, waits=False)
        if batch.is_empty:
            return batch.verdicts([]), None
        found = await self._fetch(statements.RENEW_AND_HEARTBEAT, *args, *identity, repeatable=True)
        beat = next(row for row in found if row["ordinal"] == 0)
        return _renewed(batch, [row for row in found if row is not beat]), heartbeat_of(beat, "at")

    def _renewal(
        self, authorities: Sequence[Handle | Fence], lease_ttl: timedelta | None, *, waits: bool
    ) -> tuple[Batch[Any, Any], tuple[Any, ...]]:
        check_batch(authorities, "authorities")
        ttl = None if lease_ttl is None else check_duration(lease_ttl, "lease_ttl")

        def prepare(held: Sequence[Handle | Fence], count: int) -> tuple[Fences, list[int | None]]:
            return Fences(held, count), [
                ttl if ttl is not None else check_duration(a.lease_ttl, "lease_ttl") if type(a) is Handle else None
                for a in held
            ]

        batch = Batch(authorities, prepare, self._database.flow_partitions)
        if batch.is_empty:
            return batch, ()
        fences, ttls = batch.ready
        return batch, (*fences.columns, ttls, bool(waits))

    async def progress(
        self, authority: Handle | Fence, *, percent: int | None = None, message: str | None = None
    ) -> None:
        """Record how far the work is; a field that is not given keeps its value."""
        if percent is not None:
            check_int(percent, "percent", 0, 100)
        if message is not None:
            check_text(message, "message", 64 * 1024)
        fences = self._fences([authority])
        row = await self._row(statements.PROGRESS, *fences.first, percent, message, repeatable=True)
        if row["code"] != "ok":
            raise raised(row, fences.execution_id(0))

    async def _give_back(self, as_holder: str, as_operator: str, authority: Authority, *args: object) -> asyncpg.Record:
        fences = self._fences([authority])
        if is_override(authority):
            row = await self._row(as_operator, *fences.first[:2], *args)
        else:
            row = await self._row(as_holder, *fences.first, *args)
        if row["code"] != "ok":
            raise raised(row, fences.execution_id(0))
        return row

    async def delay(self, authority: Authority, delay_until: datetime | timedelta) -> Delayed:
        """Give the lease back until a time (or for a duration); the same attempt continues then."""
        if delay_until is None:
            raise InvalidInput("missing", field="delay_until", allowed="an aware datetime or a timedelta")
        await self._give_back(
            statements.DELAY, statements.DELAY_AS_OPERATOR, authority, *instant(delay_until, "delay_until")
        )
        return Delayed(_target(authority))

    async def wait_children(self, authority: Authority) -> Moved:
        """Give the lease back until dependencies are satisfied; claimable immediately if none is open."""
        row = await self._give_back(statements.WAIT_CHILDREN, statements.WAIT_CHILDREN_AS_OPERATOR, authority)
        return Moved(_target(authority), State(row["state"]))

    async def release(self, authority: Authority) -> Released:
        """Give the lease back so that another worker continues the same attempt immediately."""
        row = await self._give_back(statements.RELEASE, statements.RELEASE_AS_OPERATOR, authority)
        return Released(_target(authority), State(row["state"]))

    async def stop_changed(self, authority: Handle | Fence, *, detail: str, digest: str) -> Stopped:
        """Give the lease back because the code that runs it does not fit its recorded steps.

        The same attempt continues: at once on a worker whose code has another digest than those that stopped it, on any
        worker a minute later, or later after further stops in a row, at most an hour. `detail` says what was recorded
        and what was asked for instead, `digest` is that of the code, as the worker registered it.
        """
        text = escape_text(detail, _DETAIL_BYTES)
        fences = self._fences([authority])
        row = await self._row(statements.STOP_CHANGED, *fences.first, text, check_filled(digest, "digest"))
        if row["code"] != "ok":
            raise raised(row, fences.execution_id(0))
        return Stopped(_target(authority), State(row["state"]), row["at"])

    async def revoke_lease(
        self,
        execution_id: ExecutionId,
        *,
        reason: str = "operator_revoke",
        expected_lease_id: UUID | None = None,
        worker_instance_id: str | None = None,
    ) -> Revoked | AlreadySatisfied:
        """Take the lease away. Not an end: the execution is reclaimed by a worker, or cancelled."""
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.REVOKE_LEASE,
            *self._at(target),
            None if not expected_lease_id else parse_uuid(expected_lease_id, "expected_lease_id"),
            None if not worker_instance_id else check_worker(worker_instance_id, "worker_instance_id"),
            escape_text(reason, 4096),
        )
        if row["code"] == "ok":
            return Revoked(target, LeaseId(UUID(row["detail"])), row["lease_epoch"])
        if row["code"] == "already_satisfied":
            return AlreadySatisfied(row["detail"])
        raise raised(row, target)

    async def list_expired_leases(
        self,
        *,
        as_of: datetime | None = None,
        after: tuple[datetime, ExecutionId] | None = None,
        limit: int = 1000,
        namespace: str | None = None,
    ) -> Page[ExpiredLease, tuple[datetime, ExecutionId]]:
        """Return active executions whose lease had expired at `as_of` (default: now), whether marked or not."""
        until = None if as_of is None else moment(as_of, "as_of")
        size = check_limit(limit, 10_000)
        place = None
        if after is not None:
            if not isinstance(after, tuple | list) or len(after) != 2:
                raise InvalidInput(
                    f"got {type(after).__name__}", field="after", allowed="a (expires_at, execution_id) pair"
                )
            place = (moment(after[0], "after"), parse_execution_id(after[1], "after"))
        wanted = None if namespace is None else check_text(namespace, "namespace")
        if size == 0:
            return Page(())
        found = await self._fetch(
            statements.LIST_EXPIRED_LEASES,
            until,
            None if place is None else place[0],
            None if place is None else place[1],
            size + 1,
            wanted,
            repeatable=True,
        )
        leases = [rows.expired_lease(row) for row in found]
        return first_page(leases, size, lambda last: (last.expires_at, last.execution_id))

    @contextlib.contextmanager
    def lost_wakeups(self, worker_instance_id: str) -> Iterator[asyncio.Event | None]:
        """Return an event that is set when leases of a worker were revoked; None without notifications."""
        if self._listener is None:
            yield None
            return
        with self._listener.topic(f"lost {check_worker(worker_instance_id, 'worker_instance_id')}") as lost:
            yield lost


def _renewed(batch: Batch[Any, Any], found: Sequence[asyncpg.Record]) -> list[Renewed | FlowFabricError]:
    fences, ttls = batch.ready
    return batch.verdicts(
        [
            Renewed(row["at"], row["lease_epoch"]) if row["code"] == "ok" else raised(row, fences.execution_id(place))
            for place, row in enumerate(rows.by_place(found, len(ttls)))
        ]
    )


def _target(authority: Authority) -> ExecutionId:
    return authority.execution_id
