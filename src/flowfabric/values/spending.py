"""Amounts as tasks and submitters write them: money as millionths, the budget of one run, and what a call left over."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args
from uuid import UUID

from msgspec import Struct

from flowfabric.errors import InvalidInput
from flowfabric.values.binding import Bind
from flowfabric.values.budget import MAX_AMOUNT, MAX_BUDGETS, MAX_DIMENSIONS, ExecutionUsage, SoftBreach
from flowfabric.values.checks import check_text
from flowfabric.values.ids import BudgetId, ExecutionId, QuotaPolicyId

OnBudget: TypeAlias = Literal["pause", "raise", "fail"]
Mode: TypeAlias = Literal["strict", "warn"]
ON_BUDGET: Final = get_args(OnBudget)
MODES: Final = get_args(Mode)
_MICROS: Final = 1_000_000
_MAX_NAME: Final = 256


def usd(amount: str | int | float | Decimal) -> int:
    """Return an amount of money in millionths, rounded up: `ff.usd("0.10")` is 100,000.

    Budgets count whole numbers. Use it for any currency.
    """
    allowed = "an amount of zero or more, such as 20, 0.35 or '0.10'"
    if isinstance(amount, bool) or not isinstance(amount, str | int | float | Decimal):
        raise InvalidInput(f"got {type(amount).__name__}", field="amount", allowed=allowed)
    try:
        exact = Decimal(str(amount)) * _MICROS
        micros = int(exact.to_integral_value(ROUND_CEILING))
    except (InvalidOperation, ValueError, OverflowError):
        raise InvalidInput(f"got {amount!r}", field="amount", allowed=allowed) from None
    if not 0 <= micros <= MAX_AMOUNT:
        raise InvalidInput(f"got {amount!r}", field="amount", allowed=allowed)
    return micros


def check_amount(value: object, field: str, least: int = 0, most: int = MAX_AMOUNT) -> int:
    """Return an amount: an integer that the database can hold."""
    if type(value) is not int or not least <= value <= most:
        raise InvalidInput(f"got {value!r}", field=field, allowed=f"an integer from {least} to {most}")
    return value


def check_dimension(value: object, field: str) -> str:
    """Return the name of a dimension: text without control characters."""
    name = check_text(value, field, _MAX_NAME)
    if not name or any(ord(mark) < 32 or 127 <= ord(mark) < 160 for mark in name):
        raise InvalidInput(f"got {name!r}", field=field, allowed="a non-empty text without control characters")
    return name


def amounts_of(
    given: Mapping[str, int] | None, named: Mapping[str, int], field: str, *, least: int = 0
) -> dict[str, int]:
    """Return amounts by dimension, given as a mapping, as keywords, or both."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInput(f"got {type(given).__name__}", field=field, allowed="amounts by dimension")
    found: dict[str, int] = {}
    for part in (given or {}, named):
        for name, amount in part.items():
            if check_dimension(name, field) in found:
                raise InvalidInput(f"{name!r} is given twice", field=field, allowed="once")
            found[name] = check_amount(amount, name, least)
    if not found or len(found) > MAX_DIMENSIONS:
        problem = "no dimension is given" if not found else f"got {len(found)} dimensions"
        raise InvalidInput(problem, field=field, allowed=f"1 to {MAX_DIMENSIONS} amounts, such as tokens=500")
    return found


def changes_of(given: Mapping[str, int] | None, named: Mapping[str, int], field: str) -> dict[str, int]:
    """Return changes of limits by dimension, which may be negative."""
    both = {**(given or {}), **named}
    found = amounts_of(
        {name: abs(by) if type(by) is int else by for name, by in (given or {}).items()},
        {name: abs(by) if type(by) is int else by for name, by in named.items()},
        field,
    )
    return {name: both[name] for name in found}


def check_names(given: object, field: str) -> tuple[str, ...]:
    """Return the names of budgets or quotas, each once."""
    allowed = "a list of names"
    if isinstance(given, str | bytes) or not isinstance(given, Collection):
        raise InvalidInput(f"got {given!r}", field=field, allowed=allowed)
    names = tuple(dict.fromkeys(check_limit_name(name, field) for name in given))
    if len(names) > MAX_BUDGETS:
        raise InvalidInput(f"got {len(names)}", field=field, allowed=f"at most {MAX_BUDGETS}")
    return names


def check_limit_name(given: object, field: str = "name") -> str:
    """Return the name of a budget or a quota."""
    name = check_text(given, field, _MAX_NAME)
    if not name:
        raise InvalidInput("empty", field=field, allowed="a non-empty text")
    return name


class Budget:
    """A budget of one run and everything it submits: `agent.options(budget=ff.Budget(tokens=50_000)).submit(...)`.

    It is created with the execution or flow and deleted with it. `soft` are limits that are reported and stop nothing.
    With `mode="warn"` the hard limits stop nothing either. Amounts of a dimension that is named like one of these
    keywords go into the mapping: `ff.Budget({"soft": 5})`.
    """

    __slots__ = ("hard", "mode", "soft")

    def __init__(
        self,
        hard: Mapping[str, int] | None = None,
        /,
        *,
        soft: Mapping[str, int] | None = None,
        mode: Mode = "strict",
        **limits: int,
    ) -> None:
        self.hard: dict[str, int] = limits_of(hard, limits, "budget")
        self.soft: dict[str, int] = limits_of(soft, {}, "soft")
        if not self.hard and not self.soft:
            raise InvalidInput("has no limit", field="budget", allowed="amounts by dimension, such as tokens=50_000")
        self.mode: Mode = check_mode(mode)

    def __repr__(self) -> str:
        parts = [
            f"{name}={amount}" if name.isidentifier() else f"{name!r}: {amount}" for name, amount in self.hard.items()
        ]
        parts += [f"soft={self.soft!r}"] * bool(self.soft) + [f"mode={self.mode!r}"] * (self.mode != "strict")
        return f"Budget({', '.join(parts)})"

    def _key(self) -> tuple[Any, ...]:
        return tuple(sorted(self.hard.items())), tuple(sorted(self.soft.items())), self.mode

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Budget) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._key())


def limits_of(given: Mapping[str, int] | None, named: Mapping[str, int], field: str) -> dict[str, int]:
    """Return limits by dimension, which are 1 or more; none if none are given."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInput(f"got {given!r}", field=field, allowed="limits by dimension")
    return amounts_of(given, named, field, least=1) if given or named else {}


def check_mode(value: object) -> Mode:
    """Return the mode of a budget."""
    if value not in MODES:
        raise InvalidInput(f"got {value!r}", field="mode", allowed=", ".join(MODES))
    return value  # type: ignore[return-value]  # one of the words


class Used(Struct, frozen=True, kw_only=True):
    """The result of a handler's report or settlement: `remaining` of each limited dimension, the least of the budgets.

    `soft_breach` is set if a dimension is above its soft limit. `is_recorded`: an earlier run of the handler counted
    it; `remaining` is as it was then.
    """

    remaining: dict[str, int]
    soft_breach: SoftBreach | None = None
    is_recorded: bool = False
    overrun: int = 0


class Limits(NamedTuple):
    """The budgets and quota policies of an execution to come."""

    budget_ids: tuple[BudgetId, ...] = ()
    quota_ids: tuple[QuotaPolicyId, ...] = ()


NO_LIMITS: Final = Limits()


class BudgetSpec(Struct, frozen=True, kw_only=True):
    """A budget as the code declares it."""

    name: str
    hard: dict[str, int]
    soft: dict[str, int]
    every: timedelta | None
    mode: Mode
    bind: tuple[Bind, ...] = ()


class QuotaSpec(Struct, frozen=True, kw_only=True):
    """A quota as the code declares it."""

    name: str
    concurrent: int
    per_window: int
    window: timedelta
    key: str | None
    jitter: timedelta
    bind: tuple[Bind, ...] = ()


class FoundLimit(Struct, frozen=True, kw_only=True):
    """A budget or a quota that is stored: its id by its name, and the tag per whose value a quota counts."""

    what: Literal["budget", "quota"]
    name: str
    id: UUID
    key: str | None = None


class RunUsage(Struct, frozen=True, kw_only=True):
    """The amounts that a run and everything it submitted used and hold, by dimension.

    `by_budget` has the same by the name of each budget, `by_execution` by execution: `total` and `held` are the most of
    any budget, since a report counts in all budgets of its execution.
    """

    total: dict[str, int]
    held: dict[str, int]
    by_budget: dict[str, dict[str, int]]
    by_execution: dict[ExecutionId, dict[str, int]]


class FlowUsage(RunUsage, frozen=True, kw_only=True):
    """The same of a flow: its nodes and everything that they submitted. `by_node` is what each node used itself."""

    by_node: dict[str, dict[str, int]]


def usage_of(found: Sequence[ExecutionUsage]) -> RunUsage:
    """Add up what executions used of budgets."""
    by_budget: dict[str, dict[str, int]] = {}
    held: dict[str, dict[str, int]] = {}
    by_execution: dict[ExecutionId, dict[str, int]] = {}
    for one in found:
        _add(by_budget.setdefault(one.budget_name, {}), one.usage)
        _add(held.setdefault(one.budget_name, {}), one.held)
        _most(by_execution.setdefault(one.execution_id, {}), one.usage)
    total: dict[str, int] = {}
    most_held: dict[str, int] = {}
    for amounts in by_budget.values():
        _most(total, amounts)
    for amounts in held.values():
        _most(most_held, amounts)
    return RunUsage(total=total, held=most_held, by_budget=by_budget, by_execution=by_execution)


def _add(into: dict[str, int], amounts: Mapping[str, int]) -> None:
    for name, amount in amounts.items():
        into[name] = into.get(name, 0) + amount


def _most(into: dict[str, int], amounts: Mapping[str, int]) -> None:
    for name, amount in amounts.items():
        into[name] = max(into.get(name, 0), amount)
