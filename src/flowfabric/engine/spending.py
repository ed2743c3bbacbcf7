"""Spending: reports, reservations, the ledger, and the pause of an execution that would use too much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast, get_args
from uuid import UUID

from flowfabric._postgres import rows, statements
from flowfabric.engine.amounts import (
    check_amount,
    check_amounts,
    check_dimension,
    cursor_of,
    read_cursor,
)
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.batch import Batch, Fences, raised, used
from flowfabric.engine.checks import (
    check_batch,
    check_bool,
    check_filled,
    check_int,
    check_limit,
    check_list,
    check_low_water,
    most_rows,
)
from flowfabric.engine.timers import Round
from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.values.budget import (
    MAX_BUDGETS,
    MAX_DIMENSIONS,
    AlreadyApplied,
    CancelReservation,
    ExecutionUsage,
    HardBreach,
    OnLost,
    PausedForBudget,
    Place,
    Report,
    ReportAnswer,
    ReservationCancelled,
    Reserve,
    Reserved,
    Settle,
    SpendEntry,
    Usage,
    UsageAnswer,
    UsageCall,
)
from flowfabric.values.checks import check_key, quoted
from flowfabric.values.ids import (
    BudgetId,
    ExecutionId,
    FlowId,
    ReservationId,
    mint_uuid,
    parse_execution_id,
    parse_uuid,
)
from flowfabric.values.lease import Fence, Handle
from flowfabric.values.page import Page

_ON_LOST: Final = frozenset(get_args(OnLost))
_CALLS: Final = "a Report, Reserve, Settle or CancelReservation"
_MAX_CHILDREN: Final = 10_000


class Spending(Operations):
    """report_usage, report_usage_many, record_spend, reserve_usage, settle_usage, pause_for_budget, read_usage."""

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
        Without a `place` and a `dedup_key` a repetition after a lost connection may count twice.
        """
        item = Report(authority=authority, usage=_usage(usage), budgets=_budgets(budgets), place=place)
        return cast("ReportAnswer", await self._use_one(item))

    async def report_usage_many(self, items: Sequence[Report]) -> list[ReportAnswer | FlowFabricError]:
        """Report for up to 1,000 executions in one call; one verdict per item, in their order."""
        check_batch(items)
        for item in items:
            if not isinstance(item, Report):
                raise InvalidInput(f"got {type(item).__name__}", field="items", allowed="a list of Report")
        return cast("list[ReportAnswer | FlowFabricError]", await self.use_budgets(items))

    async def report_usage_admin(
        self,
        budget_id: BudgetId,
        *,
        dimensions: Sequence[str],
        deltas: Sequence[int],
        dedup_key: str | None = None,
    ) -> ReportAnswer:
        """Count usage without a lease. A dimension that is listed twice counts with the sum."""
        target = BudgetId(parse_uuid(budget_id, "budget_id"))
        names, amounts = check_list(dimensions, "dimensions"), check_list(deltas, "deltas")
        if len(names) != len(amounts):
            raise InvalidInput(
                f"{len(names)} dimensions and {len(amounts)} deltas",
                field="deltas",
                allowed="two lists of the same length",
            )
        if len(names) > MAX_DIMENSIONS:
            raise InvalidInput(f"{len(names)} entries", field="dimensions", allowed=f"at most {MAX_DIMENSIONS}")
        key = check_key(dedup_key, "dedup_key")
        row = await self._row(
            statements.REPORT_USAGE_ADMIN,
            target,
            [check_dimension(name, "dimensions") for name in names],
            [check_amount(amount, "deltas") for amount in amounts],
            key,
            repeatable=key is not None,
        )
        return _answered(row, None)

    async def record_spend(
        self,
        budget_id: BudgetId,
        execution_id: ExecutionId,
        deltas: Mapping[str, int],
        *,
        idempotency_key: str | None = None,
    ) -> ReportAnswer:
        """Count usage without a lease, and add it to the ledger of the execution, which need not exist."""
        target = BudgetId(parse_uuid(budget_id, "budget_id"))
        spender = parse_execution_id(execution_id)
        amounts = check_amounts(deltas, "deltas")
        key = check_key(idempotency_key)
        row = await self._row(
            statements.RECORD_SPEND,
            target,
            *self._at(spender),
            list(amounts),
            list(amounts.values()),
            key,
            repeatable=key is not None,
        )
        return _answered(row, spender)

    async def release_budget(self, budget_id: BudgetId, execution_id: ExecutionId) -> None:
        """Take what the ledger has for an execution in this generation off the usage, and delete its entries."""
        target = parse_uuid(budget_id, "budget_id")
        await self._row(statements.RELEASE_BUDGET, target, parse_execution_id(execution_id), repeatable=True)

    async def list_spend(
        self,
        budget_id: BudgetId,
        *,
        execution_id: ExecutionId | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[SpendEntry, str]:
        """Return the ledger of a budget, in the order of executions, generations and dimensions."""
        target = BudgetId(parse_uuid(budget_id, "budget_id"))
        spender = None if execution_id is None else parse_execution_id(execution_id)
        size = check_limit(limit, 1000)
        after: tuple[Any, ...] = (None, None, None)
        if cursor is not None:
            text, generation, dimension = read_cursor(cursor, 3)
            if not generation.isdecimal() or int(generation) >= 2**31:
                raise InvalidInput("cannot be read", field="cursor", allowed="a next_cursor of this list")
            after = (parse_uuid(text, "cursor"), int(generation), dimension)
        if size == 0:
            return Page(())
        found = await self._fetch(statements.LIST_SPEND, target, spender, *after, size + 1, repeatable=True)
        return first_page(
            [rows.spend(row, target) for row in found],
            size,
            lambda last: cursor_of(str(last.execution_id), str(last.generation), last.dimension),
        )

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
        item = Reserve(
            authority=authority, usage=_usage(usage), budgets=_budgets(budgets), on_lost=on_lost, place=place
        )
        return cast("Reserved | HardBreach", await self._use_one(item))

    async def settle_usage(
        self, authority: Handle | Fence, reservation_id: ReservationId, usage: Usage | Mapping[str, int]
    ) -> ReportAnswer:
        """Count the real amounts in place of those held. More than fits is `HardBreach` and counted in `overrun`."""
        item = Settle(authority=authority, reservation_id=reservation_id, usage=_usage(usage))
        return cast("ReportAnswer", await self._use_one(item))

    async def cancel_reservation(
        self, authority: Handle | Fence, reservation_id: ReservationId
    ) -> ReservationCancelled | AlreadyApplied:
        """Give back what a reservation holds; `AlreadyApplied` if it was settled."""
        item = CancelReservation(authority=authority, reservation_id=reservation_id)
        return cast("ReservationCancelled | AlreadyApplied", await self._use_one(item))

    async def use_budgets(self, items: Sequence[UsageCall]) -> list[UsageAnswer | FlowFabricError]:
        """Report, reserve, settle and cancel for up to 1,000 executions in one call; one verdict per item."""
        check_batch(items)
        batch = Batch(items, _usage_columns, self._database.flow_partitions)
        if batch.is_empty:
            return batch.verdicts([])
        fences, operations, columns, is_repeatable = batch.ready
        found = await self._fetch(
            statements.USE_BUDGETS, operations, *fences.columns, *columns, repeatable=is_repeatable
        )
        return batch.verdicts(
            [
                rows.usage_answer(row, fences.execution_id(place))
                for place, row in enumerate(rows.by_place(found, len(fences.ids)))
            ]
        )

    async def _use_one(self, item: UsageCall) -> UsageAnswer:
        (answer,) = await self.use_budgets([item])
        if isinstance(answer, FlowFabricError):
            raise answer
        return answer

    async def pause_for_budget(
        self,
        authority: Handle | Fence,
        needs: Mapping[str, int],
        budgets: Sequence[BudgetId] | BudgetId | None = None,
    ) -> PausedForBudget:
        """Give the lease back until every budget has room for the needs; the same attempt continues then.

        Without `budgets` those of the execution count. If they have room already, nothing changes. The pause gives back
        what the execution holds, and the budgets must have room for that again too.
        """
        if not isinstance(authority, Handle | Fence):
            raise InvalidInput(f"got {type(authority).__name__}", field="authority", allowed="a Handle or a Fence")
        amounts = check_amounts(needs, "needs")
        named = _budgets(budgets)
        if named is not None and not 1 <= len(named) <= MAX_BUDGETS:
            raise InvalidInput(f"{len(named)} budgets", field="budgets", allowed=f"1 to {MAX_BUDGETS}, or None")
        fences = self._fences([authority])
        row = await self._row(statements.PAUSE_FOR_BUDGET, *fences.first, list(amounts), list(amounts.values()), named)
        if row["code"] not in ("ok", "covered"):
            raise raised(row, fences.execution_id(0))
        return PausedForBudget(fences.execution_id(0), row["code"] == "ok")

    async def collect_reservations(
        self, *, marked: bool = False, limit: int = 100, low_water: datetime | None = None
    ) -> Round:
        """Give back or charge what reservations hold whose lease has ended, of up to `limit` budgets. For duties.

        With `marked` only those that the end of the lease could not handle, because their budget was locked.
        `low_water`: from `look_for_due`; of them, those from before it are passed over.
        """
        row = await self._row(
            statements.COLLECT_ENDED,
            check_bool(marked, "marked"),
            check_int(limit, "limit", 1, 1000),
            check_low_water(low_water),
        )
        return Round(handled=row["handled"], failed=row["failed"], message=row["message"], more=row["more"])

    async def read_usage(
        self,
        execution_id: ExecutionId | FlowId,
        *,
        children: bool = True,
        after: tuple[ExecutionId, BudgetId] | None = None,
        limit: int | None = None,
    ) -> list[ExecutionUsage]:
        """Return what an execution and all that it submitted used and hold, per execution and budget.

        With the id of a flow: its members and all that they submitted. With a `limit` at most that many, by the ids
        of execution and budget, after those of `after`.
        """
        target = parse_execution_id(execution_id)
        beyond, budget = (None, None) if after is None else after
        found = await self._fetch(
            statements.READ_USAGE,
            *self._at(target),
            check_bool(children, "children"),
            _MAX_CHILDREN,
            None if beyond is None else parse_execution_id(beyond, "after"),
            None if budget is None else parse_uuid(budget, "after"),
            most_rows(limit),
            repeatable=True,
        )
        return rows.execution_usage(found)


def _answered(row: Any, execution_id: ExecutionId | None) -> ReportAnswer:
    answer = rows.usage_answer(row, execution_id)
    if isinstance(answer, FlowFabricError):
        raise answer
    return cast("ReportAnswer", answer)


def _usage(value: object) -> Usage:
    if isinstance(value, Usage):
        return value
    if isinstance(value, Mapping):
        return Usage(custom=value)
    raise InvalidInput(f"got {type(value).__name__}", field="usage", allowed="a Usage, or amounts by dimension")


def _budgets(value: object) -> tuple[BudgetId, ...] | None:
    if value is None:
        return None
    if isinstance(value, UUID | str):
        return (BudgetId(parse_uuid(value, "budgets")),)
    return tuple(BudgetId(parse_uuid(one, "budgets")) for one in check_list(value, "budgets"))


def _amounts_of(usage: object, *, keyed: bool) -> dict[str, int]:
    """The amounts of a usage: its fixed fields, if they are not zero, and its own dimensions."""
    if not isinstance(usage, Usage):
        raise InvalidInput(f"got {type(usage).__name__}", field="usage", allowed="a Usage")
    if not keyed and usage.dedup_key is not None:
        raise InvalidInput("given", field="dedup_key", allowed="a key of a report only; a reservation has its id")
    amounts = check_amounts(usage.custom, "usage.custom")
    fixed = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "wall_ms": 0 if usage.wall_ms is None else usage.wall_ms,
    }
    for name, amount in fixed.items():
        if check_amount(amount, f"usage.{name}"):
            if name in amounts:
                raise InvalidInput(f"also in custom: {quoted(name)}", field=f"usage.{name}", allowed="one of the two")
            amounts[name] = amount
    return amounts


def _place(value: object) -> tuple[str | None, int | None]:
    if value is None:
        return None, None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidInput(f"got {quoted(value)}", field="place", allowed="a (name, number) pair")
    return check_filled(value[0], "place", 512), check_int(value[1], "place", 0, 2**31 - 1)


def _usage_columns(items: Sequence[UsageCall], count: int) -> tuple[Fences, list[str] | None, tuple[Any, ...], bool]:
    words: list[str] = []
    keys: list[str | None] = []
    names: list[str | None] = []
    numbers: list[int | None] = []
    reservations: list[UUID | None] = []
    on_lost: list[str | None] = []
    budget_items: list[int] = []
    budget_ids: list[BudgetId] = []
    amount_items: list[int] = []
    dimensions: list[str] = []
    amounts: list[int] = []
    is_repeatable = True
    for number, item in enumerate(items, 1):
        key = lost = None
        place: tuple[str | None, int | None] = (None, None)
        reservation: UUID | None = None
        given: dict[str, int] = {}
        if isinstance(item, Report | Reserve):
            place = _place(item.place)
            named = _budgets(item.budgets)
            if named is not None:
                if not 1 <= len(named) <= MAX_BUDGETS:
                    raise InvalidInput(f"{len(named)} budgets", field="budgets", allowed=f"1 to {MAX_BUDGETS}, or None")
                budget_items += [number] * len(named)
                budget_ids += named
            given = _amounts_of(item.usage, keyed=isinstance(item, Report))
        if isinstance(item, Report):
            words.append("report")
            key = check_key(item.usage.dedup_key, "dedup_key")
            is_repeatable = is_repeatable and (key is not None or place[0] is not None)
        elif isinstance(item, Reserve):
            words.append("reserve")
            if not isinstance(item.on_lost, str) or item.on_lost not in _ON_LOST:
                raise InvalidInput(f"got {quoted(item.on_lost)}", field="on_lost", allowed="charge, release")
            lost = item.on_lost
            reservation = mint_uuid()
        elif isinstance(item, Settle):
            words.append("settle")
            reservation = parse_uuid(item.reservation_id, "reservation_id")
            given = _amounts_of(item.usage, keyed=False)
        elif isinstance(item, CancelReservation):
            words.append("cancel")
            reservation = parse_uuid(item.reservation_id, "reservation_id")
        else:
            raise InvalidInput(f"got {type(item).__name__}", field="items", allowed=_CALLS)
        amount_items += [number] * len(given)
        dimensions += given
        amounts += given.values()
        keys.append(key)
        names.append(place[0])
        numbers.append(place[1])
        reservations.append(reservation)
        on_lost.append(lost)
    for item in items:
        if not isinstance(item.authority, Handle | Fence):
            raise InvalidInput(f"got {type(item.authority).__name__}", field="authority", allowed="a Handle or a Fence")
    return (
        Fences([item.authority for item in items], count),
        words if any(word != "report" for word in words) else None,
        (
            used(keys),
            used(names),
            used(numbers),
            used(reservations),
            used(on_lost),
            budget_items,
            budget_ids,
            amount_items,
            dimensions,
            amounts,
        ),
        is_repeatable,
    )
