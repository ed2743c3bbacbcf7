"""Budgets: what may be used, what is used, what is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from flowfabric.engine.base import Operations
from flowfabric.errors import FlowFabricError
from flowfabric.values.budget import (
    AlreadyApplied,
    BudgetCreated,
    BudgetExists,
    BudgetNumbers,
    BudgetReset,
    BudgetStatus,
    ExecutionUsage,
    HardBreach,
    OnLost,
    PausedForBudget,
    Place,
    Report,
    ReportAnswer,
    ReservationCancelled,
    Reserved,
    SpendEntry,
    Usage,
    UsageAnswer,
    UsageCall,
)
from flowfabric.values.ids import BudgetId, ExecutionId, ReservationId
from flowfabric.values.lease import Fence, Handle
from flowfabric.values.page import Page


class Budgets(Operations):
    """create_budget, get_budget_status, report_usage, reserve_usage, settle_usage, reset_budget, list_budgets, ..."""

    async def create_budget(
        self,
        budget_id: BudgetId | None = None,
        *,
        name: str | None = None,
        scope_type: str = "",
        scope_id: str = "",
        enforcement_mode: str = "strict",
        on_hard_limit: str = "",
        on_soft_limit: str = "",
        reset_interval: timedelta = timedelta(0),
        dimensions: Sequence[str] = (),
        hard_limits: Sequence[int] = (),
        soft_limits: Sequence[int] = (),
    ) -> BudgetCreated | BudgetExists:
        """Create a budget. An id or a name that exists changes nothing.

        The three lists have one entry per dimension; a limit of 0 is none. Without an id the name decides it
        (`budget_id_of`), without a name the id is the name. Usage that was reported before counts.
        """
        raise NotImplementedError

    async def update_budget(
        self,
        budget_id: BudgetId,
        *,
        hard: Mapping[str, int] | None = None,
        soft: Mapping[str, int] | None = None,
        raise_by: Mapping[str, int] | None = None,
        enforcement_mode: str | None = None,
        on_hard_limit: str | None = None,
        on_soft_limit: str | None = None,
        reset_interval: timedelta | None = None,
    ) -> BudgetStatus:
        """Change a budget and return it. Usage and generation stay; executions that it held back continue.

        `hard` and `soft` set limits of dimensions (0: none), `raise_by` adds to hard limits, or takes away. A limit
        below the usage exhausts the budget.
        """
        raise NotImplementedError

    async def get_budget_status(self, budget_id: BudgetId) -> BudgetStatus:
        """Return a budget; `NotFound` if it was never created."""
        raise NotImplementedError

    async def read_budget_usage_and_limits(self, budget_id: BudgetId) -> BudgetNumbers:
        """Return the limits and the usage; both empty for an unknown or limitless budget."""
        raise NotImplementedError

    async def list_budgets(
        self,
        *,
        scope_type: str | None = None,
        scope_id: str | None = None,
        exhausted: bool | None = None,
        prefix: str | None = None,
        owner_id: ExecutionId | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[BudgetStatus, str]:
        """Return budgets in the order of their names, which begin with `prefix`."""
        raise NotImplementedError

    async def find_budgets(self, names: Sequence[str]) -> dict[str, BudgetId]:
        """Return the ids of the budgets with these names, at most 1,000; unknown names are left out."""
        raise NotImplementedError

    async def report_usage(
        self,
        authority: Handle | Fence,
        usage: Usage | Mapping[str, int],
        budgets: Sequence[BudgetId] | BudgetId | None = None,
        *,
        place: Place | None = None,
    ) -> ReportAnswer:
        """Count usage in one or several budgets, all or none; without `budgets` in all budgets of the execution.

        A mapping is `Usage(custom=...)`. With a `place` it is recorded as a step and counted once per generation.
        """
        raise NotImplementedError

    async def report_usage_many(self, items: Sequence[Report]) -> list[ReportAnswer | FlowFabricError]:
        """Report for up to 1,000 executions in one call; one verdict per item, in their order."""
        raise NotImplementedError

    async def report_usage_admin(
        self,
        budget_id: BudgetId,
        *,
        dimensions: Sequence[str],
        deltas: Sequence[int],
        dedup_key: str | None = None,
    ) -> ReportAnswer:
        """Count usage without a lease. A dimension that is listed twice counts with the sum."""
        raise NotImplementedError

    async def record_spend(
        self,
        budget_id: BudgetId,
        execution_id: ExecutionId,
        deltas: Mapping[str, int],
        *,
        idempotency_key: str | None = None,
    ) -> ReportAnswer:
        """Count usage without a lease, and add it to the ledger of the execution, which need not exist."""
        raise NotImplementedError

    async def release_budget(self, budget_id: BudgetId, execution_id: ExecutionId) -> None:
        """Take what the ledger has for an execution in this generation off the usage, and delete its entries."""
        raise NotImplementedError

    async def list_spend(
        self,
        budget_id: BudgetId,
        *,
        execution_id: ExecutionId | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[SpendEntry, str]:
        """Return the ledger of a budget, in the order of executions, generations and dimensions."""
        raise NotImplementedError

    async def reset_budget(self, budget_id: BudgetId) -> BudgetReset:
        """Begin a new generation: usage is 0; what reservations hold stays held."""
        raise NotImplementedError

    async def reserve_usage(
        self,
        authority: Handle | Fence,
        usage: Usage | Mapping[str, int],
        budgets: Sequence[BudgetId] | BudgetId | None = None,
        *,
        on_lost: OnLost = "charge",
        place: Place | None = None,
    ) -> Reserved | HardBreach:
        """Hold amounts before they are used, in all of the budgets or in none.

        The reservation belongs to the lease. When the lease ends, what was not settled is given back; if it is lost,
        it is charged, unless `on_lost` is `release`. With a `place` the handler finds it again when it is run again.
        """
        raise NotImplementedError

    async def settle_usage(
        self, authority: Handle | Fence, reservation_id: ReservationId, usage: Usage | Mapping[str, int]
    ) -> ReportAnswer:
        """Count the real amounts in place of those held. More than fits is `HardBreach` and counted in `overrun`."""
        raise NotImplementedError

    async def cancel_reservation(
        self, authority: Handle | Fence, reservation_id: ReservationId
    ) -> ReservationCancelled | AlreadyApplied:
        """Give back what a reservation holds; `AlreadyApplied` if it was settled."""
        raise NotImplementedError

    async def use_budgets(self, items: Sequence[UsageCall]) -> list[UsageAnswer | FlowFabricError]:
        """Report, reserve, settle and cancel for up to 1,000 executions in one call; one verdict per item."""
        raise NotImplementedError

    async def pause_for_budget(
        self,
        authority: Handle | Fence,
        needs: Mapping[str, int],
        budgets: Sequence[BudgetId] | BudgetId | None = None,
    ) -> PausedForBudget:
        """Give the lease back until every budget covers the needs; the same attempt continues then."""
        raise NotImplementedError

    async def read_usage(self, execution_id: ExecutionId, *, children: bool = True) -> list[ExecutionUsage]:
        """Return what an execution and its children used and hold, per execution and budget."""
        raise NotImplementedError
