"""Budgets, and what calls that use them return."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from flowfabric._postgres.rows.values import Row, json_of, readable
from flowfabric._postgres.rows.verdicts import refused
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound
from flowfabric.values.budget import (
    AlreadyApplied,
    BudgetStatus,
    ExecutionUsage,
    HardBreach,
    ReservationCancelled,
    Reserved,
    SoftBreach,
    SpendEntry,
    UsageAnswer,
    UsageOk,
)
from flowfabric.values.ids import BudgetId, ExecutionId, ReservationId


def _amounts(dimensions: Sequence[str] | None, amounts: Sequence[int | None] | None) -> dict[str, int]:
    """The amounts by dimension, without those that are null. A damaged budget, which may have fewer, is readable."""
    pairs = zip(dimensions or (), amounts or (), strict=False)
    return {dimension: amount for dimension, amount in pairs if amount is not None}


def _used_amounts(dimensions: Sequence[str], amounts: Sequence[int]) -> dict[str, int]:
    return {dimension: amount for dimension, amount in _amounts(dimensions, amounts).items() if amount}


@readable
def budget(row: Row) -> BudgetStatus:
    """A budget."""
    counted = row["used_dimensions"]
    interval = row["reset_interval_ms"]
    return BudgetStatus(
        budget_id=BudgetId(row["id"]),
        name=row["name"],
        scope_type=row["scope_type"],
        scope_id=row["scope_id"],
        enforcement_mode=row["mode"],
        on_hard_limit=row["on_hard_limit"],
        on_soft_limit=row["on_soft_limit"],
        hard_limits=_amounts(row["dimensions"], row["hard"]),
        soft_limits=_amounts(row["dimensions"], row["soft"]),
        usage=_amounts(counted, row["used"]),
        held=_used_amounts(counted, row["held"]),
        overrun=_used_amounts(counted, row["overrun"]),
        exhausted_by=row["exhausted"],
        breach_count=row["breaches"],
        soft_breach_count=row["soft_breaches"],
        last_breach_at=row["last_breach_at"],
        last_breach_dim=row["last_breach_dim"],
        generation=row["generation"],
        reset_interval=None if interval is None else timedelta(milliseconds=interval),
        reset_count=row["reset_count"],
        last_reset_at=row["last_reset_at"],
        next_reset_at=row["next_reset_at"],
        created_at=row["created_at"],
        last_updated_at=row["updated_at"],
        owner_id=None if row["owner_id"] is None else ExecutionId(row["owner_id"]),
        defined_at=row["defined_at"],
    )


def usage_answer(row: Row, execution_id: ExecutionId | None) -> UsageAnswer | FlowFabricError:
    """The result of one item of a call that uses budgets."""
    code = row["code"]
    left = _amounts(row["left_dimensions"], row["left_amounts"])
    if code == "ok":
        return UsageOk(remaining=left)
    if code == "applied":
        return AlreadyApplied(remaining=json_of(row, "detail") or {})
    if code == "soft":
        return SoftBreach(
            budget_id=BudgetId(row["budget_id"]),
            dimension=row["dimension"],
            current_usage=row["current"],
            soft_limit=row["bound"],
            remaining=left,
        )
    if code == "hard":
        return HardBreach(
            budget_id=BudgetId(row["budget_id"]),
            dimension=row["dimension"],
            current_usage=row["current"],
            hard_limit=row["bound"],
            held=row["held"],
            requested=row["asked"],
            overrun=row["overrun"],
        )
    if code == "reserved":
        return Reserved(
            reservation_id=ReservationId(row["reservation_id"]),
            state=row["reservation_state"],
            amounts=_amounts(row["dimensions"], row["amounts"]),
            remaining=left or json_of(row, "detail") or {},
        )
    if code == "cancelled":
        return ReservationCancelled(
            reservation_id=ReservationId(row["reservation_id"]), released=_amounts(row["dimensions"], row["amounts"])
        )
    if code == "not_found" and row["reservation_id"] is not None:
        return NotFound("reservation", row["reservation_id"])
    if row["detail"] == "overflow":
        where = "" if row["budget_id"] is None else f" of budget {row['budget_id']}"
        return InvalidInput(
            f"the sum{where} would be larger than an amount can be",
            field=row["dimension"],
            allowed="sums up to 2**63 - 1",
        )
    if row["detail"] == "place":
        return InvalidInput("given twice in one call", field="place", allowed="a name and number once per execution")
    return refused(row, execution_id or ExecutionId(row["reservation_id"]))


@readable
def spend(row: Row, budget_id: BudgetId) -> SpendEntry:
    """An entry of the ledger."""
    return SpendEntry(
        budget_id=budget_id,
        execution_id=ExecutionId(row["execution_id"]),
        dimension=row["dimension"],
        amount=row["amount"],
        generation=row["generation"],
        recorded_at=row["recorded_at"],
    )


def execution_usage(found: Sequence[Row]) -> list[ExecutionUsage]:
    """The usage of executions: the rows have one dimension each."""
    made: dict[tuple[object, object], ExecutionUsage] = {}
    for row in found:
        key = (row["id"], row["budget_id"])
        if key not in made:
            made[key] = ExecutionUsage(
                execution_id=ExecutionId(row["id"]),
                budget_id=BudgetId(row["budget_id"]),
                budget_name=row["name"],
                usage={},
                held={},
                parent_id=None if row["parent_id"] is None else ExecutionId(row["parent_id"]),
            )
        if row["used"]:
            made[key].usage[row["dimension"]] = row["used"]
        if row["held"]:
            made[key].held[row["dimension"]] = row["held"]
    return list(made.values())
