"""Waitpoints: where signals arrive. A signal needs the token that the engine signed, or a trusted caller."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import asyncpg

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.batch import raised
from flowfabric.engine.checks import check_filled, check_int, check_token, parse_partition
from flowfabric.errors import Conflict, FlowFabricError, InvalidInput, NotFound, StateError, ValidationFailed
from flowfabric.values.checks import check_text
from flowfabric.values.ids import ExecutionId, PartitionKey, mint_uuid, parse_execution_id, parse_uuid
from flowfabric.values.lease import Fence, Handle
from flowfabric.values.page import Page
from flowfabric.values.wait import AlreadySatisfied, Closed, NewWaitpoint, PendingWaitpoint, WaitpointToken
from flowfabric.values.words import TokenCheck


class Waitpoints(Operations):
    """create, close, expire, list and probe waitpoints; read their tokens."""

    async def create_waitpoint(
        self,
        authority: Handle | Fence,
        waitpoint_key: str,
        expires_in: timedelta,
        *,
        outlives_attempt: bool = False,
    ) -> NewWaitpoint:
        """Create a waitpoint and its token, to hand out before the execution suspends. The lease is kept.

        It expires unless `suspend` uses it in time. With `outlives_attempt` it stays open when a retry or a reclaim
        replaces the attempt, and moves to the next one.
        """
        fences = self._fences([authority])
        key = check_text(waitpoint_key, "waitpoint_key")
        if not isinstance(expires_in, timedelta):
            raise InvalidInput(f"got {type(expires_in).__name__}", field="expires_in", allowed="a timedelta")
        waitpoint_id = mint_uuid()
        row = await self._row(
            statements.CREATE_WAITPOINT,
            *fences.first,
            waitpoint_id,
            key,
            expires_in / timedelta(milliseconds=1),
            bool(outlives_attempt),
        )
        if row["code"] != "ok":
            raise waitpoint_refused(row, fences.execution_id(0), waitpoint_id)
        return NewWaitpoint(waitpoint_id, WaitpointToken(row["token"]), row["at"])

    async def close_waitpoint(
        self, authority: Handle | Fence, waitpoint_id: UUID, reason: str = "proactive_close"
    ) -> Closed:
        """Close a pending waitpoint that will not be used. One that is closed already stays closed."""
        fences = self._fences([authority])
        target = parse_uuid(waitpoint_id, "waitpoint_id")
        row = await self._row(
            statements.CLOSE_WAITPOINT, *fences.first, target, check_filled(reason, "reason"), repeatable=True
        )
        if row["code"] != "ok":
            raise waitpoint_refused(row, fences.execution_id(0), target)
        return Closed(target)

    async def expire_waitpoint(self, execution_id: ExecutionId, waitpoint_id: UUID) -> Closed | AlreadySatisfied:
        """Expire one pending waitpoint if it is due; the duty does this for all."""
        target = parse_execution_id(execution_id)
        waitpoint = parse_uuid(waitpoint_id, "waitpoint_id")
        row = await self._row(
            statements.EXPIRE_WAITPOINT,
            *self._at(target),
            waitpoint,
            repeatable=True,
        )
        return Closed(waitpoint) if row["code"] == "expired" else AlreadySatisfied(row["code"])

    async def list_pending_waitpoints(
        self, execution_id: ExecutionId, *, after: UUID | None = None, limit: int = 100
    ) -> Page[PendingWaitpoint, UUID]:
        """The waitpoints of an execution that can be signalled, by id. Tokens are not shown."""
        target = parse_execution_id(execution_id)
        size = min(max(check_int(limit, "limit", -(2**31), 2**31 - 1), 1), 1000)
        found = await self._fetch(
            statements.LIST_PENDING_WAITPOINTS,
            *self._at(target),
            None if after is None else parse_uuid(after, "after"),
            size,
            repeatable=True,
        )
        if found and found[0]["waitpoint_id"] is None:
            raise NotFound("execution", target)
        return first_page([rows.pending_waitpoint(row, target) for row in found], size, lambda last: last.waitpoint_id)

    async def read_waitpoint_token(
        self, partition_key: UUID | int | str | PartitionKey, waitpoint_id: UUID
    ) -> WaitpointToken | None:
        """Return the token of a waitpoint that accepts signals. For operators' tools: anyone who has it can signal.

        `partition_key` is the id of the execution, or its partition.
        """
        partition = parse_partition(partition_key, self._database.flow_partitions)
        row = await self._row(
            statements.READ_WAITPOINT_TOKEN,
            partition,
            parse_uuid(waitpoint_id, "waitpoint_id"),
            repeatable=True,
        )
        return None if row["token"] is None else WaitpointToken(row["token"])

    async def probe_waitpoint(
        self, execution_id: ExecutionId, waitpoint_id: UUID, waitpoint_token: WaitpointToken | str
    ) -> TokenCheck:
        """Return whether a token fits, early, for bridges; `unknown` for a waitpoint that cannot be signalled.

        `closed` with the right token: answered, or not open at the moment. It may open again.
        A mismatch is recorded with the execution (`last_hmac_validation_failed_at`).
        """
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.PROBE_WAITPOINT,
            *self._at(target),
            parse_uuid(waitpoint_id, "waitpoint_id"),
            check_token(waitpoint_token),
            repeatable=True,
        )
        return TokenCheck(row["code"])


def waitpoint_refused(row: asyncpg.Record, execution_id: ExecutionId, waitpoints: object) -> FlowFabricError:
    match row["code"]:
        case "waitpoint_not_found":
            return NotFound("waitpoint", waitpoints[0] if isinstance(waitpoints, list) else waitpoints)
        case "waitpoint_already_exists":
            return Conflict("waitpoint_already_exists", execution_id=execution_id)
        case "invalid_waitpoint_for_execution":
            return ValidationFailed("invalid_waitpoint_for_execution", execution_id=execution_id)
        case "already_suspended" | "waitpoint_not_pending" | "pending_waitpoint_expired" as kind:
            return StateError(kind, execution_id=execution_id)
        case _:
            return raised(row, execution_id)
