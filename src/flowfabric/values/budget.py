"""Budgets: their definition and status, usage as it is reported, reservations, and what each call returns.

An amount is an integer from 0 to 2**63 - 1 of a dimension, which is any name: tokens, `cost_micros`, calls. A budget
may limit some of its dimensions; usage of the others is counted only.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final, Literal, TypeAlias
from uuid import UUID, uuid5

from msgspec import Struct

from flowfabric.values.ids import BudgetId, ExecutionId, ReservationId
from flowfabric.values.lease import Fence, Handle

EnforcementMode: TypeAlias = Literal["strict", "warn"]
OnLost: TypeAlias = Literal["charge", "release"]
ReservationState: TypeAlias = Literal["held", "charged", "settled"]
Place: TypeAlias = tuple[str, int]
"""Where a handler reports or reserves outside a step: a name, and how often it used the name before in this run."""

MAX_AMOUNT: Final = 2**63 - 1
MAX_DIMENSIONS: Final = 64
MAX_BUDGETS: Final = 64
RESERVED_ACTIONS: Final = frozenset({"suspend", "reroute_fallback", "close_scope"})
MODES: Final[Mapping[str, EnforcementMode]] = {
    "strict": "strict",
    "hard": "strict",
    "": "strict",
    "warn": "warn",
    "advisory": "warn",
}
_NAMES: Final = UUID("6f0c5e0a-4c1b-5a57-9a55-0b0d9e7c1f2d")


def budget_id_of(name: str) -> BudgetId:
    """Return the id of the budget that was created with this name and without an id."""
    return BudgetId(uuid5(_NAMES, name))


class Usage(Struct, frozen=True, kw_only=True):
    """Amounts that were used. The three fixed fields, when not zero, count as dimensions of the same names.

    A call with a `dedup_key` that a budget has seen within 24 hours is not counted there again.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    wall_ms: int | None = None
    custom: Mapping[str, int] = {}
    dedup_key: str | None = None


class Report(Struct, frozen=True, kw_only=True):
    """A report for `use_budgets`. Without `budgets` it counts in all budgets of the execution.

    With a `place` it is recorded as a step and counted once per generation, however often the handler is run again.
    """

    authority: Handle | Fence
    usage: Usage
    budgets: tuple[BudgetId, ...] | None = None
    place: Place | None = None


class Reserve(Struct, frozen=True, kw_only=True):
    """A reservation for `use_budgets`: hold amounts in all of the budgets, or in none.

    `on_lost` says what happens to them if the lease is lost: they are charged, or given back. With a `place` a later
    run of the handler finds the reservation again.
    """

    authority: Handle | Fence
    usage: Usage
    budgets: tuple[BudgetId, ...] | None = None
    on_lost: OnLost = "charge"
    place: Place | None = None


class Settle(Struct, frozen=True, kw_only=True):
    """A settlement for `use_budgets`: count the real amounts in place of those that a reservation holds."""

    authority: Handle | Fence
    reservation_id: ReservationId
    usage: Usage


class CancelReservation(Struct, frozen=True, kw_only=True):
    """For `use_budgets`: give back what a reservation holds, or was charged for a lost lease."""

    authority: Handle | Fence
    reservation_id: ReservationId


UsageCall: TypeAlias = Report | Reserve | Settle | CancelReservation


class UsageOk(Struct, frozen=True, kw_only=True):
    """The amounts were counted. `remaining` is what is left of each limited dimension, the least of the budgets."""

    remaining: dict[str, int] = {}


class SoftBreach(Struct, frozen=True, kw_only=True):
    """The amounts were counted, and a dimension is above its soft limit; `current_usage` includes them.

    In a budget with the mode `warn` it may be the hard limit.
    """

    budget_id: BudgetId
    dimension: str
    current_usage: int
    soft_limit: int
    remaining: dict[str, int] = {}


class HardBreach(Struct, frozen=True, kw_only=True):
    """Nothing was counted or held: it would not fit under a hard limit. `current_usage` is without the `requested`.

    Of a settlement: everything that fits was counted, the rest of all dimensions is in `overrun`.
    """

    budget_id: BudgetId
    dimension: str
    current_usage: int
    hard_limit: int
    held: int = 0
    requested: int = 0
    overrun: int = 0


class AlreadyApplied(Struct, frozen=True, kw_only=True):
    """The amounts were counted by an earlier call: nothing changed. `remaining` is as it was then."""

    remaining: dict[str, int] = {}


class Reserved(Struct, frozen=True, kw_only=True):
    """The reservation. `state` is `held`; of one that an earlier run of the handler made also `charged`, `settled`."""

    reservation_id: ReservationId
    state: ReservationState
    amounts: dict[str, int]
    remaining: dict[str, int] = {}


class ReservationCancelled(Struct, frozen=True, kw_only=True):
    """The reservation holds nothing any more; `released` is what it held."""

    reservation_id: ReservationId
    released: dict[str, int]


ReportAnswer: TypeAlias = UsageOk | SoftBreach | HardBreach | AlreadyApplied
UsageAnswer: TypeAlias = ReportAnswer | Reserved | ReservationCancelled


class BudgetCreated(Struct, frozen=True):
    budget_id: BudgetId


class BudgetExists(Struct, frozen=True):
    """A budget with this id or name exists; nothing changed, even if the definition differs."""

    budget_id: BudgetId


class BudgetReset(Struct, frozen=True):
    """`next_reset_at` is None if the budget is not reset periodically."""

    next_reset_at: datetime | None


class BudgetStatus(Struct, frozen=True, kw_only=True):
    """A budget: its definition and its running numbers.

    `usage` has every dimension that was ever counted, `held` those that reservations hold now, `overrun` what
    settlements could not count. It is `exhausted_by` the first dimension whose hard limit is reached.
    `defined_at`: when it was created, or its definition changed the last time.
    """

    budget_id: BudgetId
    name: str
    scope_type: str
    scope_id: str
    enforcement_mode: EnforcementMode
    on_hard_limit: str
    on_soft_limit: str
    hard_limits: dict[str, int]
    soft_limits: dict[str, int]
    usage: dict[str, int]
    held: dict[str, int]
    overrun: dict[str, int]
    exhausted_by: str | None
    breach_count: int
    soft_breach_count: int
    last_breach_at: datetime | None
    last_breach_dim: str | None
    generation: int
    reset_interval: timedelta | None
    reset_count: int
    last_reset_at: datetime | None
    next_reset_at: datetime | None
    created_at: datetime
    last_updated_at: datetime
    defined_at: datetime
    owner_id: ExecutionId | None = None

    @property
    def is_exhausted(self) -> bool:
        return self.exhausted_by is not None


class BudgetNumbers(Struct, frozen=True):
    """Limits by `hard:<dimension>` and `soft:<dimension>`, and usage; both empty for an unknown or limitless budget."""

    limits: dict[str, str]
    usage: dict[str, int]


class BudgetsReconciled(Struct, frozen=True, kw_only=True):
    """One page of budgets: how many rows were corrected, how many budgets are wrong, and the id to continue after.

    `next_spent`: the execution to continue after in the ledger. None: the next page is the first.
    """

    corrected: int
    wrong: int
    message: str | None = None
    next_id: UUID | None = None
    next_spent: UUID | None = None


class SpendEntry(Struct, frozen=True, kw_only=True):
    """An entry of the ledger: what `record_spend` counted for an execution, in one generation of the budget."""

    budget_id: BudgetId
    execution_id: ExecutionId
    dimension: str
    amount: int
    generation: int
    recorded_at: datetime


class ExecutionUsage(Struct, frozen=True, kw_only=True):
    """The usage of a budget by one execution, all generations together: reports, settlements, charges and spends.

    `parent_id` is set for a child of the execution that was asked for.
    """

    execution_id: ExecutionId
    budget_id: BudgetId
    budget_name: str
    usage: dict[str, int]
    held: dict[str, int]
    parent_id: ExecutionId | None = None


class PausedForBudget(Struct, frozen=True):
    """The execution waits until every budget has room for its needs. Not `paused`: they have, and the lease stays."""

    execution_id: ExecutionId
    paused: bool
