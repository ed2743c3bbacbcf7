"""What operators and schedulers do to an execution they do not hold."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from flowfabric.engine.calls import (
    Calls,
    by_place,
    check_batch,
    check_int,
    check_limit,
    parse_execution,
    parse_partition,
    raised,
)
from flowfabric.errors import FlowFabricError, InvalidInput, ValidationFailed
from flowfabric.values.attempt import Cancelled
from flowfabric.values.checks import check_lane, check_text, check_worker, escape_text
from flowfabric.values.execution import Blocked, Changed, Rejected, Replayed
from flowfabric.values.ids import ExecutionId, LeaseId, PartitionKey, parse_uuid
from flowfabric.values.lease import Revoked
from flowfabric.values.state import State
from flowfabric.values.wait import AlreadySatisfied

_VERDICT = "select ordinal, code, detail, state, lease_epoch, attempt_id, at from"
BLOCKING_REASONS = frozenset(
    (
        "waiting_for_budget",
        "waiting_for_quota",
        "waiting_for_capable_worker",
        "paused_by_operator",
        "paused_by_policy",
    )
)


class Control(Calls):
    """revoke_lease, replay, cancel_many, delete, redact, change_priority, block and unblock."""

    async def revoke_lease(
        self,
        execution_id: ExecutionId,
        *,
        reason: str = "operator_revoke",
        expected_lease_id: UUID | None = None,
        worker_instance_id: str | None = None,
    ) -> Revoked | AlreadySatisfied:
        """Take the lease away. Not an end: the execution is reclaimed by a worker, or cancelled."""
        target = parse_execution(execution_id)
        row = await self._row(
            f"{_VERDICT} flowfabric.revoke_lease($1, $2, $3, $4, $5)",
            target.partition,
            target.uuid,
            None if not expected_lease_id else parse_uuid(expected_lease_id, "expected_lease_id"),
            None if not worker_instance_id else check_worker(worker_instance_id, "worker_instance_id"),
            escape_text(reason, 4096),
        )
        if row["code"] == "ok":
            return Revoked(target, LeaseId(UUID(row["detail"])), row["lease_epoch"])
        if row["code"] == "already_satisfied":
            return AlreadySatisfied(row["detail"])
        raise raised(row, target)

    async def replay_execution(
        self, execution_id: ExecutionId, *, reason: str | None = None, requested_by: str | None = None
    ) -> Replayed:
        """Run an ended execution again as a new attempt; every earlier attempt stays as it is."""
        target = parse_execution(execution_id)
        row = await self._row(
            f"{_VERDICT} flowfabric.replay($1, $2, $3, $4)",
            [target.partition],
            [target.uuid],
            None if reason is None else escape_text(reason, 4096),
            None if requested_by is None else check_text(requested_by, "requested_by"),
        )
        if row["code"] != "ok":
            raise raised(row, target)
        return Replayed(target, State(row["state"]))

    async def replay_many(
        self, execution_ids: Sequence[ExecutionId], *, reason: str | None = None, requested_by: str | None = None
    ) -> list[Replayed | FlowFabricError]:
        """Replay up to 1,000 ended executions in one call; one verdict per execution."""
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution(one) for one in execution_ids]
        found = await self._fetch(
            f"{_VERDICT} flowfabric.replay($1, $2, $3, $4)",
            [target.partition for target in targets],
            [target.uuid for target in targets],
            None if reason is None else escape_text(reason, 4096),
            None if requested_by is None else check_text(requested_by, "requested_by"),
        )
        return [
            Replayed(target, State(row["state"])) if row["code"] == "ok" else raised(row, target)
            for target, row in zip(targets, by_place(found, len(targets)), strict=True)
        ]

    async def cancel_many(self, execution_ids: Sequence[ExecutionId], reason: str) -> list[Cancelled | FlowFabricError]:
        """Cancel up to 1,000 executions as an operator in one call; one verdict per execution."""
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution(one) for one in execution_ids]
        nothing: list[None] = [None] * len(targets)
        found = await self._fetch(
            f"{_VERDICT} flowfabric.cancel($1, $2, $3, $4, $5, $6, false, 'operator_override', $7)",
            [target.partition for target in targets],
            [target.uuid for target in targets],
            nothing,
            nothing,
            nothing,
            nothing,
            escape_text(reason, 4096),
            repeatable=True,
        )
        return [
            Cancelled(target) if row["code"] == "ok" else raised(row, target)
            for target, row in zip(targets, by_place(found, len(targets)), strict=True)
        ]

    async def delete_execution(self, execution_id: ExecutionId) -> None:
        """Forget an ended execution and everything it owns, now. Its events live out their own time."""
        await self._erase("flowfabric.delete_execution($1, $2)", execution_id)

    async def redact_execution(self, execution_id: ExecutionId) -> None:
        """Remove what the user put into an ended execution (payload, result, texts); its history stays."""
        await self._erase("flowfabric.redact_execution($1, $2)", execution_id)

    async def _erase(self, call: str, execution_id: ExecutionId) -> None:
        target = parse_execution(execution_id)
        row = await self._row(f"{_VERDICT} {call}", target.partition, target.uuid)
        if row["code"] != "ok":
            raise raised(row, target)

    async def change_priority(
        self, execution_id: ExecutionId, new_priority: int, *, lane_id: str | None = None
    ) -> Changed:
        """Another rank for an execution that may be claimed now; clamped to 0..9000."""
        target = parse_execution(execution_id)
        row = await self._row(
            f"{_VERDICT} flowfabric.change_priority($1, $2, $3, $4)",
            target.partition,
            target.uuid,
            check_int(new_priority, "new_priority", -(2**31), 2**31 - 1),
            None if not lane_id else check_lane(lane_id),
        )
        if row["code"] != "ok":
            raise raised(row, target)
        return Changed(target)

    async def block_execution_for_admission(
        self, execution_id: ExecutionId, reason: str, *, reason_detail: str | None = None
    ) -> Blocked | Rejected:
        """Hold an execution back. A refusal is an answer, so that a scheduler's loop can go on."""
        if not isinstance(reason, str) or reason not in BLOCKING_REASONS:
            raise ValidationFailed(
                "invalid_blocking_reason",
                f"reason: got {reason!r}, allowed: {', '.join(sorted(BLOCKING_REASONS))}",
            )
        target = parse_execution(execution_id)
        row = await self._row(
            f"{_VERDICT} flowfabric.block($1, $2, $3, $4)",
            target.partition,
            target.uuid,
            reason,
            None if reason_detail is None else check_text(reason_detail, "reason_detail", 4096),
        )
        match row["code"]:
            case "ok":
                return Blocked(target, reason)
            case "not_found":
                return Rejected("execution_not_found")
            case code:
                return Rejected(code)

    async def block_route(self, execution_id: ExecutionId, *, reason_detail: str | None = None) -> Blocked | Rejected:
        """Hold an execution back because no worker can run it; a capable worker's claim still finds it."""
        return await self.block_execution_for_admission(
            execution_id, "waiting_for_capable_worker", reason_detail=reason_detail
        )

    async def unblock_execution(
        self, execution_id: ExecutionId, *, expected_blocking_reason: str | None = None
    ) -> Changed:
        """Let an execution be claimed again, if it is still held back for the expected reason."""
        if expected_blocking_reason is not None and (
            not isinstance(expected_blocking_reason, str) or expected_blocking_reason not in BLOCKING_REASONS
        ):
            raise InvalidInput(
                f"got {expected_blocking_reason!r}",
                field="expected_blocking_reason",
                allowed=", ".join(sorted(BLOCKING_REASONS)),
            )
        target = parse_execution(execution_id)
        row = await self._row(
            f"{_VERDICT} flowfabric.unblock($1, $2, $3)",
            target.partition,
            target.uuid,
            expected_blocking_reason,
        )
        if row["code"] != "ok":
            raise raised(row, target)
        return Changed(target)

    async def scan_eligible_executions(
        self, lane_id: str, *, partition_key: str | PartitionKey | None = None, limit: int = 100
    ) -> list[ExecutionId]:
        """Ids that may be claimed now, in claim order. For schedulers and tests."""
        found = await self._fetch(
            "select partition, id from flowfabric.scan_eligible($1, $2, $3)",
            check_lane(lane_id),
            None if partition_key is None else parse_partition(partition_key, self._database.flow_partitions),
            check_limit(limit, 1000),
            repeatable=True,
        )
        return [ExecutionId.of(row["partition"], row["id"]) for row in found]
