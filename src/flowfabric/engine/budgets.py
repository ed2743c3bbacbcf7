"""Budgets: what may be used, what is used, what is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from flowfabric._postgres import rows, statements
from flowfabric.engine.amounts import (
    check_amount,
    check_amounts,
    check_dimension,
    check_dimensions,
    cursor_of,
    has_control,
    read_cursor,
)
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.checks import check_batch, check_duration, check_int, check_limit, check_list, check_low_water
from flowfabric.engine.timers import Round
from flowfabric.errors import Contention, InvalidInput, NotFound, ValidationFailed
from flowfabric.values.budget import (
    MAX_AMOUNT,
    MODES,
    RESERVED_ACTIONS,
    BudgetCreated,
    BudgetExists,
    BudgetNumbers,
    BudgetReset,
    BudgetsReconciled,
    BudgetStatus,
    budget_id_of,
)
from flowfabric.values.checks import check_text, moment, quoted
from flowfabric.values.ids import (
    BudgetId,
    ExecutionId,
    FlowId,
    parse_execution_id,
    parse_uuid,
)
from flowfabric.values.page import Page

_MAX_INTERVAL: Final = timedelta(days=36_500)


class Budgets(Operations):
    """create_budget, update_budget, get_budget_status, list_budgets, find_budgets, reset_budget."""

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
            check_dimensions(listed[0], "dimensions"),
            [check_amount(limit, "hard_limits") for limit in listed[1]],
            [check_amount(limit, "soft_limits") for limit in soft],
            None if owner is None else self._home(owner),
            owner,
            repeatable=True,
        )
        found = BudgetId(row["id"])
        return BudgetCreated(found) if row["code"] == "created" else BudgetExists(found)

    async def update_budget(
        self,
        budget_id: BudgetId | None = None,
        *,
        owner_id: ExecutionId | FlowId | None = None,
        hard: Mapping[str, int] | None = None,
        soft: Mapping[str, int] | None = None,
        raise_by: Mapping[str, int] | None = None,
        enforcement_mode: str | None = None,
        on_hard_limit: str | None = None,
        on_soft_limit: str | None = None,
        reset_interval: timedelta | None = None,
        defined_at: datetime | None = None,
    ) -> BudgetStatus:
        """Change a budget and return it. Usage and generation stay; executions that it held back continue.

        `owner_id`, in place of the id: the budget that this execution or flow was submitted with.
        `hard` and `soft` set limits of dimensions (0: none), `raise_by` adds to hard limits, or takes away. A limit
        below the usage exhausts the budget. With `defined_at`, that of a status, nothing changes if the definition has
        changed since: `Contention` (`stale_definition`).
        """
        if (budget_id is None) == (owner_id is None):
            raise InvalidInput("both or neither is given", field="budget_id", allowed="an id, or owner_id")
        target = None if budget_id is None else BudgetId(parse_uuid(budget_id, "budget_id"))
        owner = None if owner_id is None else parse_uuid(owner_id, "owner_id")
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
            None if defined_at is None else moment(defined_at, "defined_at"),
            owner,
        )
        if row["code"] == "not_found":
            missing = "" if owner is None else f"{owner} was submitted without a budget of its own"
            raise NotFound("budget", target, detail=missing)
        if row["code"] == "stale":
            raise Contention("stale_definition", f"budget {target or f'of {owner}'} was changed after {defined_at}")
        if row["code"] == "limit":
            raise InvalidInput(
                "the budget has no hard limit of this dimension, or the change leaves none",
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
            None if cursor is None else read_cursor(cursor, 1)[0],
        )
        if size == 0:
            return Page(())
        found = await self._fetch(statements.LIST_BUDGETS, *filters, size + 1, repeatable=True)
        return first_page([rows.budget(row) for row in found], size, lambda last: cursor_of(last.name))

    async def find_budgets(self, names: Sequence[str]) -> dict[str, BudgetId]:
        """Return the ids of the budgets with these names, at most 1,000; unknown names are left out."""
        check_batch(names, "names")
        wanted = [check_text(name, "names") for name in names]
        found = await self._fetch(statements.FIND_BUDGETS, wanted, repeatable=True) if wanted else []
        return {row["name"]: BudgetId(row["id"]) for row in found}

    async def reset_budget(self, budget_id: BudgetId) -> BudgetReset:
        """Begin a new generation: usage is 0; reservations stay held.

        A damaged budget, under which nothing is claimed, is sound again.
        """
        target = parse_uuid(budget_id, "budget_id")
        row = await self._row(statements.RESET_BUDGET, target)
        if row["code"] == "not_found":
            raise NotFound("budget", target)
        return BudgetReset(row["next_reset_at"])

    async def reset_due_budgets(self, *, limit: int = 20, low_water: datetime | None = None) -> Round:
        """Reset budgets whose period has ended, the earliest first. For the duty.

        `low_water`: from `look_for_due`; budgets that were due before it are passed over.
        """
        row = await self._row(
            statements.RESET_DUE_BUDGETS,
            check_int(limit, "limit", 1, 1000),
            check_low_water(low_water),
        )
        return Round(handled=row["handled"], failed=row["failed"], message=row["message"], more=row["more"])

    async def reconcile_budget_counters(
        self, *, after: UUID | None = None, spent_after: UUID | None = None, limit: int = 100
    ) -> BudgetsReconciled:
        """Compare a page of budgets with their rules, and remove purged executions from a page of the ledger.

        Usage is never rewritten. `spent_after`: the execution in the ledger to continue after. For the duty.
        """
        place = None if after is None else parse_uuid(after, "after")
        spent = None if spent_after is None else parse_uuid(spent_after, "spent_after")
        row = await self._row(statements.RECONCILE_BUDGETS, place, spent, check_int(limit, "limit", 1, 1000))
        return BudgetsReconciled(
            corrected=row["corrected"],
            wrong=row["wrong"],
            message=row["message"],
            next_id=row["last_id"],
            next_spent=row["last_spent"],
        )


def _limits(value: object, field: str, least: int = 0) -> tuple[list[str] | None, list[int] | None]:
    if value is None:
        return None, None
    amounts = check_amounts(value, field, least)
    return list(amounts), list(amounts.values())


def _check_name(value: object) -> str:
    return check_dimension(value, "name")


def _looks_like_uuid(text: str) -> bool:
    try:
        parse_uuid(text)
    except InvalidInput:
        return False
    return True


def _scope(scope_type: object, scope_id: object) -> tuple[str, str]:
    labels = check_text(scope_type, "scope_type"), check_text(scope_id, "scope_id")
    for field, text in zip(("scope_type", "scope_id"), labels, strict=True):
        if has_control(text):
            raise ValidationFailed("invalid_budget_scope", f"{field}: contains a control character")
    return labels


def _mode(value: object) -> str:
    if not isinstance(value, str) or value not in MODES:
        raise InvalidInput(f"got {quoted(value)}", field="enforcement_mode", allowed="strict, hard, warn, advisory")
    return MODES[value]


def _action(value: object, field: str) -> str:
    text = check_text(value, field)
    if text in RESERVED_ACTIONS or has_control(text):
        raise InvalidInput(
            f"got {quoted(text)}",
            field=field,
            allowed=f"text without control characters, other than {', '.join(sorted(RESERVED_ACTIONS))}",
        )
    return text


def _interval(value: object) -> int:
    return check_duration(value, "reset_interval", least_ms=0, most=_MAX_INTERVAL)
