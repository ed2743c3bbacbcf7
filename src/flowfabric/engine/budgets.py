"""Budgets: what may be used, what is used, what is held."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, cast, get_args
from unicodedata import category
from uuid import UUID

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.batch import Batch, Fences, raised, used
from flowfabric.engine.checks import check_batch, check_duration, check_filled, check_int, check_limit, check_list
from flowfabric.engine.timers import Round
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound, ValidationFailed
from flowfabric.values.budget import (
    MAX_AMOUNT,
    MAX_BUDGETS,
    MAX_DIMENSIONS,
    MODES,
    RESERVED_ACTIONS,
    AlreadyApplied,
    BudgetCreated,
    BudgetExists,
    BudgetNumbers,
    BudgetReset,
    BudgetsReconciled,
    BudgetStatus,
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
    budget_id_of,
)
from flowfabric.values.checks import check_key, check_text, quoted
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

_AMOUNTS: Final = "an integer from 0 to 2**63 - 1"
_ON_LOST: Final = frozenset(get_args(OnLost))
_CALLS: Final = "a Report, Reserve, Settle or CancelReservation"
_MAX_INTERVAL: Final = timedelta(days=36_500)
_MAX_CHILDREN: Final = 10_000


class Budgets(Operations):
    """create_budget, get_budget_status, report_usage, reserve_usage, settle_usage, reset_budget, list_budgets."""

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
        owner_id: ExecutionId | None = None,
    ) -> BudgetCreated | BudgetExists:
        """Create a budget. An id or a name that exists changes nothing.

        The three lists have one entry per dimension; a limit of 0 is none. Without an id the name decides it
        (`budget_id_of`), without a name the id is the name. Usage that was reported before counts. A budget with an
        owner is purged with it.
        """
        if name is not None:
            _check_name(name)
        if budget_id is None:
            if name is None:
                raise InvalidInput("missing", field="name", allowed="a name, an id, or both")
            target = budget_id_of(name)
        else:
            target = BudgetId(parse_uuid(budget_id, "budget_id"))
        named = str(target) if name is None else name
        if _looks_like_uuid(named) and named != str(target):
            raise InvalidInput(f"a UUID: {quoted(named)}", field="name", allowed="text that is no UUID")
        listed = check_list(dimensions, "dimensions"), check_list(hard_limits, "hard_limits")
        soft = check_list(soft_limits, "soft_limits")
        if not len(listed[0]) == len(listed[1]) == len(soft):
            raise InvalidInput(
                f"{len(listed[0])} dimensions, {len(listed[1])} hard and {len(soft)} soft limits",
                field="dimensions",
                allowed="three lists of the same length",
            )
        owner = None if owner_id is None else parse_execution_id(owner_id, "owner_id")
        row = await self._row(
            statements.CREATE_BUDGET,
            target,
            named,
            *_scope(scope_type, scope_id),
            _mode(enforcement_mode),
            _action(on_hard_limit, "on_hard_limit"),
            _action(on_soft_limit, "on_soft_limit"),
            _interval(reset_interval),
            _dimensions(listed[0], "dimensions"),
            [_amount(limit, "hard_limits") for limit in listed[1]],
            [_amount(limit, "soft_limits") for limit in soft],
            None if owner is None else self._home(owner),
            owner,
            repeatable=True,
        )
        found = BudgetId(row["id"])
        return BudgetCreated(found) if row["code"] == "created" else BudgetExists(found)

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
        target = BudgetId(parse_uuid(budget_id, "budget_id"))
        row = await self._row(
            statements.UPDATE_BUDGET,
            target,
            *_limits(hard, "hard"),
            *_limits(soft, "soft"),
            *_limits(raise_by, "raise_by", least=-MAX_AMOUNT),
            None if enforcement_mode is None else _mode(enforcement_mode),
            None if on_hard_limit is None else _action(on_hard_limit, "on_hard_limit"),
            None if on_soft_limit is None else _action(on_soft_limit, "on_soft_limit"),
            None if reset_interval is None else _interval(reset_interval),
        )
        if row["code"] == "not_found":
            raise NotFound("budget", target)
        if row["code"] == "limit":
            raise InvalidInput(
                "there is no hard limit, or the new one would not be one",
                field=f"raise_by[{quoted(row['dimension'])}]",
                allowed="a change of an existing limit, to 1 up to 2**63 - 1",
            )
        return rows.budget(row)

    async def get_budget_status(self, budget_id: BudgetId) -> BudgetStatus:
        """Return a budget; `NotFound` if it was never created."""
        target = BudgetId(parse_uuid(budget_id, "budget_id"))
        found = await self._fetch(statements.READ_BUDGETS, [target], repeatable=True)
        if not found:
            raise NotFound("budget", target)
        return rows.budget(found[0])

    async def read_budget_usage_and_limits(self, budget_id: BudgetId) -> BudgetNumbers:
        """Return the limits and the usage; both empty for an unknown or limitless budget."""
        target = BudgetId(parse_uuid(budget_id, "budget_id"))
        found = await self._fetch(statements.READ_BUDGETS, [target], repeatable=True)
        if not found:
            return BudgetNumbers({}, {})
        status = rows.budget(found[0])
        limits = {
            f"{word}:{dimension}": str(limit)
            for word, of in (("hard", status.hard_limits), ("soft", status.soft_limits))
            for dimension, limit in of.items()
            if limit
        }
        return BudgetNumbers(limits, status.usage if limits else {})

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
        if exhausted is not None and not isinstance(exhausted, bool):
            raise InvalidInput(f"got {quoted(exhausted)}", field="exhausted", allowed="True, False or None")
        size = check_limit(limit, 1000)
        filters = (
            None if scope_type is None else _scope(scope_type, "")[0],
            None if scope_id is None else _scope("", scope_id)[1],
            exhausted,
            None if prefix is None else check_text(prefix, "prefix"),
            None if owner_id is None else parse_execution_id(owner_id, "owner_id"),
            None if cursor is None else _read_cursor(cursor, 1)[0],
        )
        if size == 0:
            return Page(())
        found = await self._fetch(statements.LIST_BUDGETS, *filters, size + 1, repeatable=True)
        return first_page([rows.budget(row) for row in found], size, lambda last: _cursor(last.name))

    async def find_budgets(self, names: Sequence[str]) -> dict[str, BudgetId]:
        """Return the ids of the budgets with these names, at most 1,000; unknown names are left out."""
        check_batch(names, "names")
        wanted = [check_text(name, "names") for name in names]
        found = await self._fetch(statements.FIND_BUDGETS, wanted, repeatable=True) if wanted else []
        return {row["name"]: BudgetId(row["id"]) for row in found}

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
            [_dimension(name, "dimensions") for name in names],
            [_amount(amount, "deltas") for amount in amounts],
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
        amounts = _custom(deltas, "deltas")
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
            text, generation, dimension = _read_cursor(cursor, 3)
            if not generation.isdecimal() or int(generation) >= 2**31:
                raise InvalidInput("cannot be read", field="cursor", allowed="a next_cursor of this list")
            after = (parse_uuid(text, "cursor"), int(generation), dimension)
        if size == 0:
            return Page(())
        found = await self._fetch(statements.LIST_SPEND, target, spender, *after, size + 1, repeatable=True)
        return first_page(
            [rows.spend(row, target) for row in found],
            size,
            lambda last: _cursor(str(last.execution_id), str(last.generation), last.dimension),
        )

    async def reset_budget(self, budget_id: BudgetId) -> BudgetReset:
        """Begin a new generation: usage is 0; what reservations hold stays held."""
        target = parse_uuid(budget_id, "budget_id")
        row = await self._row(statements.RESET_BUDGET, target)
        if row["code"] == "not_found":
            raise NotFound("budget", target)
        return BudgetReset(row["next_reset_at"])

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

        Without `budgets` those of the execution count. If they have room already, nothing changes.
        """
        if not isinstance(authority, Handle | Fence):
            raise InvalidInput(f"got {type(authority).__name__}", field="authority", allowed="a Handle or a Fence")
        amounts = _custom(needs, "needs")
        named = _budgets(budgets)
        if named is not None and not 1 <= len(named) <= MAX_BUDGETS:
            raise InvalidInput(f"{len(named)} budgets", field="budgets", allowed=f"1 to {MAX_BUDGETS}, or None")
        fences = self._fences([authority])
        row = await self._row(statements.PAUSE_FOR_BUDGET, *fences.first, list(amounts), list(amounts.values()), named)
        if row["code"] not in ("ok", "covered"):
            raise raised(row, fences.execution_id(0))
        return PausedForBudget(fences.execution_id(0), row["code"] == "ok")

    async def reset_due_budgets(self, *, limit: int = 20) -> Round:
        """Reset budgets whose period has ended, the earliest first. For the duty."""
        row = await self._row(statements.RESET_DUE_BUDGETS, check_int(limit, "limit", 1, 1000))
        return Round(handled=row["handled"], more=row["more"])

    async def collect_reservations(self, *, marked: bool = False, limit: int = 100) -> Round:
        """Give back or charge what reservations hold whose lease has ended, of up to `limit` budgets. For duties.

        With `marked` only those that the end of the lease could not handle, because their budget was locked.
        """
        row = await self._row(statements.COLLECT_ENDED, bool(marked), check_int(limit, "limit", 1, 1000))
        return Round(handled=row["handled"], more=row["more"])

    async def reconcile_budget_counters(self, *, after: UUID | None = None, limit: int = 100) -> BudgetsReconciled:
        """Compare a page of budgets with their rules. Usage is never rewritten. For the duty."""
        place = None if after is None else parse_uuid(after, "after")
        row = await self._row(statements.RECONCILE_BUDGETS, place, check_int(limit, "limit", 1, 1000))
        return BudgetsReconciled(
            corrected=row["corrected"], wrong=row["wrong"], message=row["message"], next_id=row["last_id"]
        )

    async def read_usage(self, execution_id: ExecutionId | FlowId, *, children: bool = True) -> list[ExecutionUsage]:
        """Return what an execution and all that it submitted used and hold, per execution and budget.

        With the id of a flow: its members and all that they submitted.
        """
        target = parse_execution_id(execution_id)
        found = await self._fetch(
            statements.READ_USAGE, *self._at(target), bool(children), _MAX_CHILDREN, repeatable=True
        )
        return rows.execution_usage(found)


def _answered(row: Any, execution_id: ExecutionId | None) -> ReportAnswer:
    answer = rows.usage_answer(row, execution_id)
    if isinstance(answer, FlowFabricError):
        raise answer
    return cast("ReportAnswer", answer)


def _has_control(text: str) -> bool:
    return not text.isprintable() and any(category(char) == "Cc" for char in text)


def _dimension(value: object, field: str) -> str:
    text = check_filled(value, field)
    if _has_control(text):
        raise InvalidInput(
            f"contains a control character: {quoted(text)}", field=field, allowed="names without control characters"
        )
    return text


def _dimensions(values: Any, field: str) -> list[str]:
    names = [_dimension(value, field) for value in values]
    if len(names) > MAX_DIMENSIONS:
        raise InvalidInput(f"{len(names)} entries", field=field, allowed=f"at most {MAX_DIMENSIONS}")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"listed twice: {quoted(twice)}", field=field, allowed="each dimension once")
    return names


def _amount(value: object, field: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= MAX_AMOUNT:
        allowed = _AMOUNTS if least == 0 else f"an integer from {least} to 2**63 - 1"
        raise InvalidInput(f"got {quoted(value)}", field=field, allowed=allowed)
    return value


def _custom(value: object, field: str, least: int = 0) -> dict[str, int]:
    """Amounts by dimension, checked."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="a mapping of dimensions to amounts")
    names = _dimensions(list(value), field)
    return {name: _amount(value[name], f"{field}[{quoted(name)}]", least) for name in names}


def _limits(value: object, field: str, least: int = 0) -> tuple[list[str] | None, list[int] | None]:
    if value is None:
        return None, None
    amounts = _custom(value, field, least)
    return list(amounts), list(amounts.values())


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
    amounts = _custom(usage.custom, "usage.custom")
    fixed = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "wall_ms": 0 if usage.wall_ms is None else usage.wall_ms,
    }
    for name, amount in fixed.items():
        if _amount(amount, f"usage.{name}"):
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


def _check_name(value: object) -> str:
    return _dimension(value, "name")


def _looks_like_uuid(text: str) -> bool:
    try:
        parse_uuid(text)
    except InvalidInput:
        return False
    return True


def _scope(scope_type: object, scope_id: object) -> tuple[str, str]:
    labels = check_text(scope_type, "scope_type"), check_text(scope_id, "scope_id")
    for field, text in zip(("scope_type", "scope_id"), labels, strict=True):
        if _has_control(text):
            raise ValidationFailed("invalid_budget_scope", f"{field}: contains a control character")
    return labels


def _mode(value: object) -> str:
    if not isinstance(value, str) or value not in MODES:
        raise InvalidInput(f"got {quoted(value)}", field="enforcement_mode", allowed="strict, hard, warn, advisory")
    return MODES[value]


def _action(value: object, field: str) -> str:
    text = check_text(value, field)
    if text in RESERVED_ACTIONS or _has_control(text):
        raise InvalidInput(
            f"got {quoted(text)}",
            field=field,
            allowed=f"text without control characters, other than {', '.join(sorted(RESERVED_ACTIONS))}",
        )
    return text


def _interval(value: object) -> int:
    return check_duration(value, "reset_interval", least_ms=0, most=_MAX_INTERVAL)


def _cursor(*parts: str) -> str:
    return base64.urlsafe_b64encode("\0".join(parts).encode()).decode()


def _read_cursor(cursor: object, count: int) -> list[str]:
    try:
        parts = base64.b64decode(str(cursor), altchars=b"-_", validate=True).decode().split("\0")
    except ValueError:
        parts = []
    if len(parts) != count or any(len(part) > 1024 for part in parts):
        raise InvalidInput("cannot be read", field="cursor", allowed="a next_cursor of this list")
    return parts
