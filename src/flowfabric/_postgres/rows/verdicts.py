"""Verdicts: one row per item of a call, and the exception for a refusal.

Items are numbered from 1. A row with the ordinal 0 applies to all items without their own row, so that a call in which
everything succeeds returns a single row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import asyncpg

from flowfabric._postgres.refusals import refusal
from flowfabric._postgres.rows.values import Row
from flowfabric.errors import FlowFabricError
from flowfabric.values.ids import ExecutionId
from flowfabric.values.state import State

FOR_ALL = 0  # the ordinal of a row that applies to every item without its own row


def by_place(found: Sequence[asyncpg.Record], count: int) -> list[asyncpg.Record]:
    """Return verdict rows in the order of their items."""
    ordered: list[asyncpg.Record | None] = [None] * count
    for row in found:
        if row["ordinal"] != FOR_ALL:
            ordered[row["ordinal"] - 1] = row
        else:
            ordered = [one or row for one in ordered]
    return cast("list[asyncpg.Record]", ordered)


def refused(row: Row, execution_id: ExecutionId) -> FlowFabricError:
    """Return the exception for a verdict."""
    code, detail = row["code"], row["detail"] or ""
    if code == "execution_not_active":
        state = State(row["state"])
        return refusal(
            code,
            detail,
            execution_id=execution_id,
            terminal_outcome=state.outcome.value,
            lease_epoch=str(row["lease_epoch"]),
            lifecycle_phase=_phase(state),
            attempt_id="" if row["attempt_id"] is None else str(row["attempt_id"]),
        )
    if code == "invalid_input":
        problem, field = _PROBLEMS.get(detail, (detail, None))
        return refusal(code, problem, execution_id=execution_id, field=field)
    return refusal(code, detail, execution_id=execution_id)


_PROBLEMS = {
    "lane_id": ("not the lane of the execution", "lane_id"),
    "used_id": ("an attempt of this execution already has it", "lease_id or attempt_id"),
    "worker_id": ("the grant belongs to another worker", "worker_id"),
    "frame_type": ("is longer than 128 bytes", "frame_type"),
    "mode or kind": ("an unknown word", "mode or kind"),
    "patch": ("not a JSON object that the database can hold", "patch"),
    "patch_depth_exceeded": ("patch_depth_exceeded", "patch"),
    "fence_required": ("fence_required", "authority"),
    "partial_fence_triple": ("partial_fence_triple", "authority"),
}


def _phase(state: State) -> str:
    if state.is_terminal:
        return "terminal"
    return {State.ACTIVE: "active", State.SUSPENDED: "suspended"}.get(state, "runnable")
