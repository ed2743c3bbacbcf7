"""Policies of executions, as frozen values.

Durations are `timedelta` here (plain numbers are taken as seconds). A policy is frozen when the execution is created,
by `freeze_policy` in `policy_json`. Retry decisions and backoff arithmetic happen in the database, under the lock they
need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from msgspec import Struct, StructMeta
from msgspec.structs import force_setattr

from flowfabric.errors import InvalidInput
from flowfabric.values.durations import MAX_DURATION_MS, Duration, as_timedelta
from flowfabric.values.ids import BudgetId, QuotaPolicyId

DEFAULT_DEDUP_WINDOW_MS: Final = 86_400_000
MAX_MULTIPLIER: Final = 1000.0
_LONGEST: Final = timedelta(milliseconds=MAX_DURATION_MS)


def _as_tuple(value: object, _field: str) -> object:
    match value:
        case list():
            return tuple(value)
        case set() | frozenset():
            return tuple(sorted(value, key=str))
        case _:
            return value  # freezing the policy refuses anything but a tuple, and names its path


_Conversion: TypeAlias = tuple[str, Callable[[object, str], object]]
_CONVERSIONS: Final[Mapping[str, tuple[_Conversion, ...]]] = {
    "Exponential": (("initial", as_timedelta), ("maximum", as_timedelta)),
    "Fixed": (("delay", as_timedelta),),
    "RetryPolicy": (("retryable_categories", _as_tuple),),
    "TimeoutPolicy": (("attempt_timeout", as_timedelta), ("execution_deadline", as_timedelta)),
    "SuspensionPolicy": (("default_timeout", as_timedelta),),
    "StreamPolicy": (("retention_ttl", as_timedelta),),
    "FallbackTier": (("timeout", as_timedelta),),
    "FallbackPolicy": (("tiers", _as_tuple),),
    "RoutingRequirements": (("required_capabilities", _as_tuple),),
    "ExecutionPolicy": (("budget_ids", _as_tuple), ("quota_policy_ids", _as_tuple), ("dedup_window", as_timedelta)),
}


class _Named(StructMeta):
    """Wrong arguments of a policy are `InvalidInput`, with the name that was probably meant."""

    if not TYPE_CHECKING:  # checkers look at the fields

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except TypeError as error:
                fields = self.__struct_fields__
                unknown = next((name for name in kwargs if name not in fields), None)
                if unknown is not None:
                    near = get_close_matches(unknown, fields, n=1)
                    problem = f"has no field {unknown!r}" + (f"; did you mean {near[0]!r}?" if near else "")
                else:
                    problem = f"takes its values by name, got {', '.join(map(repr, args))}" if args else str(error)
                raise InvalidInput(
                    problem, field=self.__name__, allowed=", ".join(f"{one}=" for one in fields)
                ) from None


class PolicyValue(Struct, frozen=True, kw_only=True, metaclass=_Named):
    """Numbers given for durations become timedeltas, and lists become tuples, at construction."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field, convert in _CONVERSIONS.get(name, ()):
            value = getattr(self, field)
            if value is not None:
                force_setattr(self, field, convert(value, f"{name}.{field}"))
        self._check()

    def _check(self) -> None:
        """Refuse values that users write by hand where they write them; the rest is checked when it is frozen."""

    def _span(self, field: str) -> timedelta:
        value: timedelta = getattr(self, field)
        if not timedelta(0) <= value <= _LONGEST:
            raise self._wrong(field, "from zero to a century")
        return value

    def _wrong(self, field: str, allowed: str) -> InvalidInput:
        value = getattr(self, field)
        shown = f"{value.total_seconds():g} s" if isinstance(value, timedelta) else repr(value)
        return InvalidInput(f"got {shown}", field=f"{type(self).__name__}.{field}", allowed=allowed)


class Exponential(PolicyValue, frozen=True, kw_only=True):
    """Wait `initial`, then `multiplier` times longer before each further retry, never above `maximum`.

    The wait is random, uniformly between half of that and all of it, so that what failed together does not return
    together. `jitter=False`: exactly that.
    """

    initial: Duration = timedelta(seconds=1)
    maximum: Duration = timedelta(seconds=60)
    multiplier: float = 2.0
    jitter: bool = True

    def _check(self) -> None:
        longest = self._span("maximum")
        if self._span("initial") > longest:
            raise self._wrong("initial", f"at most maximum, which is {longest.total_seconds():g} s")
        factor = self.multiplier
        if type(factor) not in (int, float) or not 0 <= factor <= MAX_MULTIPLIER:
            raise self._wrong("multiplier", f"a number from 0 to {MAX_MULTIPLIER:g}")
        if type(self.jitter) is not bool:
            raise self._wrong("jitter", "True or False")


class Fixed(PolicyValue, frozen=True):
    """Wait the same time before every retry."""

    delay: Duration = timedelta(seconds=1)

    def _check(self) -> None:
        self._span("delay")


class RetryPolicy(PolicyValue, frozen=True, kw_only=True):
    """How often and how soon a failed attempt is repeated.

    `max_retries` counts the repetitions, not the first attempt. With `retryable_categories` only failures of
    these categories are repeated; empty means all.
    """

    max_retries: int = 3
    backoff: Exponential | Fixed = Exponential()
    retryable_categories: tuple[str, ...] = ()

    def _check(self) -> None:
        if type(self.max_retries) is not int or not 0 <= self.max_retries < 2**32:
            raise self._wrong("max_retries", "an integer from 0")
        if not isinstance(self.backoff, Exponential | Fixed | None):
            raise self._wrong("backoff", "Exponential(...) or Fixed(...)")
        if not isinstance(self.retryable_categories, tuple) or not all(
            isinstance(one, str) for one in self.retryable_categories
        ):
            raise self._wrong("retryable_categories", "a list of texts")


class TimeoutPolicy(PolicyValue, frozen=True, kw_only=True):
    """`attempt_timeout` limits one attempt's active time; `execution_deadline` counts from creation."""

    attempt_timeout: Duration | None = None
    execution_deadline: Duration | None = None


TimeoutBehavior: TypeAlias = Literal["fail", "cancel", "expire", "auto_resume_with_timeout_signal", "escalate"]


class SuspensionPolicy(PolicyValue, frozen=True, kw_only=True):
    """The timeout of suspensions that have none of their own."""

    default_timeout: Duration | None = None
    timeout_behavior: TimeoutBehavior = "fail"


class StreamPolicy(PolicyValue, frozen=True, kw_only=True):
    """How much of an execution's output is kept. `retention_ttl` also applies to the ended execution itself."""

    durability_mode: Literal["buffered", "durable"] = "buffered"
    retention_maxlen: int = 10_000
    retention_ttl: Duration | None = None


class FallbackTier(PolicyValue, frozen=True, kw_only=True):
    provider: str
    model: str
    timeout: Duration | None = None


class FallbackPolicy(PolicyValue, frozen=True, kw_only=True):
    """Alternatives in order of preference. Stored for the handler; the engine does not interpret them."""

    tiers: tuple[FallbackTier, ...] = ()


class RoutingRequirements(PolicyValue, frozen=True, kw_only=True):
    """Which workers may take the execution. Only the capabilities are matched; the rest is stored."""

    required_capabilities: tuple[str, ...] = ()
    preferred_locality: str | None = None
    isolation_level: str | None = None


class OwnBudget(PolicyValue, frozen=True, kw_only=True):
    """A budget of one execution and all it submits: created with it, known by its id, purged after the last of them."""

    hard: Mapping[str, int] = {}
    soft: Mapping[str, int] = {}
    enforcement_mode: Literal["strict", "warn"] = "strict"


class ExecutionPolicy(PolicyValue, frozen=True, kw_only=True):
    """Everything about how an execution runs that is fixed when it is created."""

    priority: int = 0
    delay_until: datetime | None = None
    retry_policy: RetryPolicy | None = None
    timeout_policy: TimeoutPolicy | None = None
    max_reclaim_count: int = 100
    suspension_policy: SuspensionPolicy | None = None
    fallback_policy: FallbackPolicy | None = None
    max_replay_count: int = 10
    budget_ids: tuple[BudgetId, ...] = ()
    budget: OwnBudget | None = None
    flow_budget: OwnBudget | None = None  # of the flow, in the policy of its first node
    inherit_budgets: bool | None = None
    quota_policy_id: QuotaPolicyId | None = None
    quota_policy_ids: tuple[QuotaPolicyId, ...] | None = None
    routing_requirements: RoutingRequirements | None = None
    dedup_window: Duration | None = None
    stream_policy: StreamPolicy | None = None
    max_signals_per_execution: int = 10_000


class Derived(Struct, frozen=True, kw_only=True):
    """The columns that the engine derives from the policy when it creates an execution."""

    required_capabilities: tuple[str, ...] = ()
    budget_ids: tuple[BudgetId, ...] = ()
    quota_policy_ids: tuple[QuotaPolicyId, ...] = ()
    delay_until_ms: int | None = None
    execution_deadline_ms: int | None = None
    dedup_window_ms: int = DEFAULT_DEDUP_WINDOW_MS


class FrozenPolicy(Struct, frozen=True):
    """A checked policy: the stored text and the columns derived from it."""

    text: str
    derived: Derived


PolicyInput: TypeAlias = ExecutionPolicy | FrozenPolicy | Mapping[str, Any] | str | bytes | None
