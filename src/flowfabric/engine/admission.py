"""Admission: a scheduler holds executions back, releases them, and lists what is claimable."""

from __future__ import annotations

from flowfabric._postgres import statements
from flowfabric.engine.base import Operations
from flowfabric.engine.batch import raised
from flowfabric.engine.checks import check_limit, parse_partition
from flowfabric.errors import InvalidInput, ValidationFailed
from flowfabric.values.checks import check_lane, check_text
from flowfabric.values.execution import Blocked, Changed, Rejected
from flowfabric.values.ids import ExecutionId, PartitionKey, parse_execution_id

BLOCKING_REASONS = frozenset(
    (
        "waiting_for_budget",
        "waiting_for_quota",
        "waiting_for_capable_worker",
        "paused_by_operator",
        "paused_by_policy",
    )
)


class Admission(Operations):
    """block_execution_for_admission, block_route, unblock_execution, scan_eligible_executions."""

    async def block_execution_for_admission(
        self, execution_id: ExecutionId, reason: str, *, reason_detail: str | None = None
    ) -> Blocked | Rejected:
        """Hold an execution back. A refusal is returned, not raised, so that a scheduler's loop can continue."""
        if not isinstance(reason, str) or reason not in BLOCKING_REASONS:
            raise ValidationFailed(
                "invalid_blocking_reason",
                f"reason: got {reason!r}, allowed: {', '.join(sorted(BLOCKING_REASONS))}",
            )
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.BLOCK,
            *self._at(target),
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
        """Hold an execution back because no worker can run it; a worker with the capabilities can still claim it."""
        return await self.block_execution_for_admission(
            execution_id, "waiting_for_capable_worker", reason_detail=reason_detail
        )

    async def unblock_execution(
        self, execution_id: ExecutionId, *, expected_blocking_reason: str | None = None
    ) -> Changed:
        """Make an execution claimable again, if it is still held back for the expected reason."""
        if expected_blocking_reason is not None and (
            not isinstance(expected_blocking_reason, str) or expected_blocking_reason not in BLOCKING_REASONS
        ):
            raise InvalidInput(
                f"got {expected_blocking_reason!r}",
                field="expected_blocking_reason",
                allowed=", ".join(sorted(BLOCKING_REASONS)),
            )
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.UNBLOCK,
            *self._at(target),
            expected_blocking_reason,
        )
        if row["code"] != "ok":
            raise raised(row, target)
        return Changed(target)

    async def scan_eligible_executions(
        self, lane_id: str, *, partition_key: int | str | PartitionKey | None = None, limit: int = 100
    ) -> list[ExecutionId]:
        """Return the ids of claimable executions, in claim order. For schedulers and tests."""
        found = await self._fetch(
            statements.SCAN_ELIGIBLE,
            check_lane(lane_id),
            None if partition_key is None else parse_partition(partition_key, self._database.flow_partitions),
            check_limit(limit, 1000),
            repeatable=True,
        )
        return [ExecutionId(row["id"]) for row in found]
