"""Grants: the right to claim one execution, issued to one worker and consumed by it."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any, overload
from uuid import UUID

import asyncpg

from flowfabric._postgres import rows, statements
from flowfabric.engine.batch import raised
from flowfabric.engine.checks import MAX_GRANT_TTL, check_duration, check_int
from flowfabric.engine.claims import Claims, check_namespace, warn_of_reclaims
from flowfabric.engine.workers import serving_columns
from flowfabric.errors import Contention, InvalidInput, Unavailable
from flowfabric.values.attempt import Claimed
from flowfabric.values.checks import capability_hash, check_lane, check_text, check_worker, instant, worker_capabilities
from flowfabric.values.grant import (
    ClaimGrant,
    Granted,
    GrantNotFound,
    NotReclaimable,
    NoWork,
    ReclaimCapExceeded,
    ReclaimGrant,
    ReclaimGranted,
    ResumeGrant,
)
from flowfabric.values.ids import ExecutionId, parse_execution_id, parse_uuid
from flowfabric.values.policy_json import policy_to_json
from flowfabric.values.words import GrantCheck
from flowfabric.values.worker import Kinds

MAX_GRANTS = 64


class Grants(Claims):
    """claim_for_worker, issue_claim_grant, claim_execution, claim_resumed_execution, issue_reclaim_grant, ..."""

    @overload
    async def claim_for_worker(
        self,
        lane_id: str = ...,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Collection[str] = ...,
        kinds: Kinds | None = ...,
        namespace: str | None = ...,
        grant_ttl: timedelta = ...,
        max_grants: None = ...,
    ) -> Granted | ReclaimGranted | NoWork: ...

    @overload
    async def claim_for_worker(
        self,
        lane_id: str = ...,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Collection[str] = ...,
        kinds: Kinds | None = ...,
        namespace: str | None = ...,
        grant_ttl: timedelta = ...,
        max_grants: int,
    ) -> list[Granted | ReclaimGranted]: ...

    async def claim_for_worker(
        self,
        lane_id: str = "default",
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Collection[str] = (),
        kinds: Kinds | None = None,
        namespace: str | None = None,
        grant_ttl: timedelta = timedelta(seconds=5),
        max_grants: int | None = None,
    ) -> Granted | ReclaimGranted | NoWork | list[Granted | ReclaimGranted]:
        """Reserve the best execution a worker can run: `claim` for callers that pass a grant on, such as a server.

        `Granted` is consumed with `claim_execution`, or `claim_resumed_execution` if its grant is a `ResumeGrant`;
        `ReclaimGranted` with `reclaim_execution`. With `max_grants` (1 to 64) it returns a list, best first, empty
        without work. `namespace` limits it to one, which is not the default one. Without a signing key: `Unavailable`.
        """
        lane = check_lane(lane_id)
        names, _, _ = serving_columns(kinds)
        has = list(worker_capabilities(capabilities))
        most = 1 if max_grants is None else check_int(max_grants, "max_grants", 1, MAX_GRANTS)
        args = (
            check_worker(worker_id),
            check_worker(worker_instance_id, "worker_instance_id"),
            check_duration(grant_ttl, "grant_ttl", most=MAX_GRANT_TTL),
        )
        only = check_namespace(namespace)
        service = None if kinds is None else await self._service(kinds, capabilities)
        found = await self._fetch(
            statements.CLAIM_FOR_WORKER, lane, names, has, *args, most, service, only, capability_hash(has)
        )
        if found and found[0]["code"] == "unavailable":
            raise Unavailable("claim_for_worker", "no signing key is installed")
        outcomes = [_granted(row, lane) for row in found]
        if max_grants is not None:
            return outcomes
        return outcomes[0] if outcomes else NoWork()

    async def issue_claim_grant(
        self,
        execution_id: ExecutionId,
        *,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str | None = None,
        worker_capabilities: Collection[str] = (),
        grant_ttl: timedelta = timedelta(seconds=5),
        capability_hash: str | None = None,
        route_snapshot_json: str | None = None,
        admission_summary: str | None = None,
    ) -> ClaimGrant:
        """Reserve an execution for one worker. For schedulers: neither budget nor quota is asked."""
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.ISSUE_CLAIM_GRANT,
            *_grant_args(
                self._at(target), lane_id, worker_id, worker_instance_id, worker_capabilities, grant_ttl,
                capability_hash, route_snapshot_json, admission_summary,
            ),
        )  # fmt: skip
        if row["code"] == "unavailable":
            raise Unavailable("issue_claim_grant", "no signing key is installed")
        if row["code"] != "ok":
            raise raised(row, target)
        return ClaimGrant(
            execution_id=target,
            grant_key=row["detail"],
            expires_at=row["at"],
        )

    async def verify_grant(self, execution_id: ExecutionId, grant_key: str) -> GrantCheck:
        """Return whether a grant key is valid, or what is wrong with it."""
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.VERIFY_GRANT,
            *self._at(target),
            check_text(grant_key, "grant_key", 4096),
            repeatable=True,
        )
        return GrantCheck(row["answer"])

    async def claim_execution(
        self,
        execution_id: ExecutionId,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_id: UUID,
        attempt_id: UUID,
        lane_id: str | None = None,
        lease_ttl: timedelta = timedelta(seconds=30),
        expected_attempt_index: int = 0,
        grant_key: str | None = None,
        attempt_policy: Any = None,
        attempt_timeout: timedelta | None = None,
        execution_deadline_at: datetime | None = None,
    ) -> Claimed:
        """Consume a claim grant: starts a new attempt with the ids given. `expected_attempt_index` is advisory."""
        check_int(expected_attempt_index, "expected_attempt_index", 0, 2**32 - 1)
        return await self._claim_granted(
            False, execution_id, lane_id, worker_id, worker_instance_id, lease_id, attempt_id, lease_ttl, grant_key,
            attempt_policy, attempt_timeout, execution_deadline_at,
        )  # fmt: skip

    async def claim_resumed_execution(
        self,
        execution_id: ExecutionId,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_id: UUID,
        lane_id: str | None = None,
        lease_ttl: timedelta = timedelta(seconds=30),
        current_attempt_index: int = 0,
        grant_key: str | None = None,
        remaining_attempt_timeout: timedelta | None = None,
    ) -> Claimed:
        """Consume a claim grant to continue an interrupted attempt. `current_attempt_index` is advisory."""
        check_int(current_attempt_index, "current_attempt_index", 0, 2**32 - 1)
        return await self._claim_granted(
            True, execution_id, lane_id, worker_id, worker_instance_id, lease_id, None, lease_ttl, grant_key, None,
            remaining_attempt_timeout, None,
        )  # fmt: skip

    async def claim_from_resume_grant(
        self,
        grant: ClaimGrant,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl: timedelta = timedelta(seconds=30),
    ) -> Claimed | None:
        """The same with a lease id that the engine mints; None if there is nothing left to resume."""
        if not isinstance(grant, ClaimGrant):
            raise InvalidInput(f"got {type(grant).__name__}", field="grant", allowed="a ClaimGrant or ResumeGrant")
        try:
            return await self._claim_granted(
                True, grant.execution_id, grant.lane_id if isinstance(grant, ResumeGrant) else None, worker_id,
                worker_instance_id, None, None, lease_ttl, grant.grant_key, None, None, None,
            )  # fmt: skip
        except Contention as error:
            if error.kind in ("execution_not_leaseable", "not_a_resumed_execution"):
                return None
            raise

    async def issue_grant_and_claim(
        self,
        execution_id: ExecutionId,
        *,
        lane_id: str | None = None,
        lease_duration: timedelta = timedelta(seconds=30),
    ) -> Claimed:
        """Claim one execution as an operator, ignoring its requirements. A failure leaves no grant."""
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.CLAIM_AS_OPERATOR,
            *self._at(target),
            None if not lane_id else check_lane(lane_id),
            "operator",
            "operator",
            check_duration(lease_duration, "lease_duration"),
        )
        if row["code"] != "ok":
            raise raised(_verdict(row), target)
        return rows.claimed(tuple(row)[2:], lease_duration, "operator")

    async def _claim_granted(
        self,
        is_resumed: bool,
        execution_id: ExecutionId,
        lane_id: str | None,
        worker_id: str,
        worker_instance_id: str,
        lease_id: UUID | None,
        attempt_id: UUID | None,
        lease_ttl: timedelta,
        grant_key: str | None,
        attempt_policy: Any,
        timeout: timedelta | None,
        deadline: datetime | None,
    ) -> Claimed:
        target = parse_execution_id(execution_id)
        deadline_at, deadline_ms = instant(deadline, "execution_deadline_at")
        if deadline_ms is not None:
            raise InvalidInput("a duration", field="execution_deadline_at", allowed="an aware datetime")
        row = await self._row(
            statements.CLAIM_GRANTED,
            is_resumed,
            *_claim_columns(
                self._at(target),
                lane_id,
                worker_id,
                worker_instance_id,
                lease_id,
                attempt_id,
                lease_ttl,
                grant_key,
                attempt_policy,
            ),
            None if not timeout else check_duration(timeout, "attempt_timeout"),
            deadline_at,
        )
        if row["code"] != "ok":
            raise raised(_verdict(row), target)
        return rows.claimed(tuple(row)[2:], lease_ttl, worker_instance_id)

    async def issue_reclaim_grant(
        self,
        execution_id: ExecutionId,
        *,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str | None = None,
        worker_capabilities: Collection[str] = (),
        grant_ttl: timedelta = timedelta(seconds=5),
        capability_hash: str | None = None,
        route_snapshot_json: str | None = None,
        admission_summary: str | None = None,
        max_reclaim_count: int | None = None,
    ) -> ReclaimGrant | NotReclaimable | ReclaimCapExceeded:
        """Reserve a lost lease for one worker. At the cap the execution fails instead."""
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.ISSUE_RECLAIM_GRANT,
            *_grant_args(
                self._at(target), lane_id, worker_id, worker_instance_id, worker_capabilities, grant_ttl,
                capability_hash, route_snapshot_json, admission_summary,
            ),
            None if max_reclaim_count is None else check_int(max_reclaim_count, "max_reclaim_count", 0, 2**32 - 1),
        )  # fmt: skip
        match row["code"]:
            case "ok":
                return ReclaimGrant(
                    execution_id=target,
                    grant_key=row["detail"],
                    expires_at=row["at"],
                    lane_id=row["lane"],
                )
            case "not_reclaimable":
                return NotReclaimable(target, row["detail"])
            case "reclaim_cap_exceeded":
                return ReclaimCapExceeded(target, row["lease_epoch"])
            case "unavailable":
                raise Unavailable("issue_reclaim_grant", "no signing key is installed")
            case _:
                raise raised(row, target)

    async def reclaim_execution(
        self,
        execution_id: ExecutionId,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_id: UUID,
        attempt_id: UUID,
        lane_id: str | None = None,
        lease_ttl: timedelta = timedelta(seconds=30),
        grant_key: str | None = None,
        attempt_policy: Any = None,
        max_reclaim_count: int | None = None,
    ) -> Claimed | NotReclaimable | ReclaimCapExceeded | GrantNotFound:
        """Consume a reclaim grant: a new attempt replaces the one whose lease was lost."""
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.RECLAIM,
            *_claim_columns(
                self._at(target),
                lane_id,
                worker_id,
                worker_instance_id,
                parse_uuid(lease_id, "lease_id"),
                parse_uuid(attempt_id, "attempt_id"),
                lease_ttl,
                grant_key,
                attempt_policy,
            ),
            None if max_reclaim_count is None else check_int(max_reclaim_count, "max_reclaim_count", 0, 2**32 - 1),
        )
        match row["code"]:
            case "ok":
                claimed = rows.claimed(tuple(row)[2:], lease_ttl, worker_instance_id)
                warn_of_reclaims(claimed)
                return claimed
            case "not_reclaimable":
                return NotReclaimable(target, row["detail"])
            case "reclaim_cap_exceeded":
                return ReclaimCapExceeded(target, row["lease_epoch"])
            case "grant_not_found":
                return GrantNotFound(target)
            case _:
                raise raised(_verdict(row), target)


def _granted(row: asyncpg.Record, lane: str) -> Granted | ReclaimGranted:
    target, key, until = ExecutionId(row["id"]), row["grant_key"], row["expires_at"]
    if row["kind"] == "reclaim":
        return ReclaimGranted(ReclaimGrant(execution_id=target, grant_key=key, expires_at=until, lane_id=lane))
    if row["is_resumed"]:
        return Granted(ResumeGrant(execution_id=target, grant_key=key, expires_at=until, lane_id=lane))
    return Granted(ClaimGrant(execution_id=target, grant_key=key, expires_at=until))


def _verdict(row: asyncpg.Record) -> Any:
    return {**row, "state": None}


def _claim_columns(
    at: tuple[int, UUID],
    lane_id: str | None,
    worker_id: str,
    worker_instance_id: str,
    lease_id: UUID | None,
    attempt_id: UUID | None,
    lease_ttl: timedelta,
    grant_key: str | None,
    attempt_policy: Any,
) -> tuple[Any, ...]:
    """Return the columns that every call that consumes a grant sends."""
    return (
        *at,
        None if not lane_id else check_lane(lane_id),
        check_worker(worker_id),
        check_worker(worker_instance_id, "worker_instance_id"),
        None if lease_id is None else parse_uuid(lease_id, "lease_id"),
        None if attempt_id is None else parse_uuid(attempt_id, "attempt_id"),
        check_duration(lease_ttl, "lease_ttl"),
        None if grant_key is None else check_text(grant_key, "grant_key", 4096),
        _attempt_policy(attempt_policy),
    )


def _attempt_policy(value: Any) -> str | None:
    return None if value is None or value == "" else policy_to_json(value)


def _grant_args(
    at: tuple[int, UUID],
    lane_id: str | None,
    worker_id: str,
    worker_instance_id: str,
    capabilities: Collection[str],
    grant_ttl: timedelta,
    capability_hash: str | None,
    snapshot: str | None,
    summary: str | None,
) -> tuple[Any, ...]:
    return (
        *at,
        None if not lane_id else check_lane(lane_id),
        check_worker(worker_id),
        check_worker(worker_instance_id, "worker_instance_id"),
        list(worker_capabilities(capabilities)),
        check_duration(grant_ttl, "grant_ttl", most=MAX_GRANT_TTL),
        None if capability_hash is None else check_text(capability_hash, "capability_hash"),
        None if snapshot is None else check_text(snapshot, "route_snapshot_json", 64 * 1024),
        None if summary is None else check_text(summary, "admission_summary", 64 * 1024),
    )
