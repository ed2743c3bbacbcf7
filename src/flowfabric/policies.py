"""Policies: what a caller asks for when creating an execution, as frozen values, and their JSON form.

Durations are `timedelta` here (plain numbers are taken as seconds) and `_ms` integers in JSON. A policy is
frozen when the execution is created: `freeze_policy` checks it, writes the JSON that is stored, and names the
few values the engine keeps beside it. A mapping or JSON text is taken as the submitted object itself: keys we
do not know are kept, keys we know must have the right type.

Retry decisions and backoff arithmetic happen in the database, under the lock they need.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, Literal, NoReturn, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from flowfabric.errors import InvalidInput, ValidationFailed
from flowfabric.ids import (
    BudgetId,
    QuotaPolicyId,
    check_text,
    escape_text,
    parse_uuid,
    required_capabilities,
)

Duration: TypeAlias = timedelta | int | float | str
"""A span of time; a plain number is seconds, a text is like "90s", "1h 30m" or "2 days"."""

_UNITS: Final[Mapping[str, float]] = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
    **dict.fromkeys(("w", "week", "weeks"), 604_800),
}
_SPAN: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*,?")

DEFAULT_DEDUP_WINDOW_MS: Final = 86_400_000
# A century. Longer spans are mistakes (a timestamp taken for a duration), and would overflow a timestamp.
MAX_DURATION_MS: Final = 36_525 * 86_400_000
# The last millisecond of the year 9999, beyond which `datetime` cannot follow.
MAX_TIMESTAMP_MS: Final = 253_402_300_799_999
MAX_MULTIPLIER: Final = 1000.0

_U32: Final = 2**32 - 1
_I32: Final = 2**31
_I64: Final = 2**63 - 1
_MILLISECOND: Final = timedelta(milliseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ESCAPED_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


class FailureClass(StrEnum):
    """What kind of failure ended an attempt; it decides whether a retry is possible at all."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    INFRA_CRASH = "infra_crash"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def is_retryable(self) -> bool:
        """Whether the retry policy is asked; `permanent` and `cancelled` end the execution without it."""
        return self not in (FailureClass.PERMANENT, FailureClass.CANCELLED)


_CLASS_NAMES: Final = frozenset(FailureClass)


def classify(category: str | None, failure_class: str | None = None) -> tuple[FailureClass, str]:
    """The failure class and category to record, each filled in from the other where absent.

    A category is free text and never refused: what the database cannot hold is escaped or cut.
    """
    category = escape_text(category, 256) if category else None
    if failure_class:
        try:
            known = FailureClass(failure_class)
        except ValueError:
            raise InvalidInput(
                f"not a failure class: {failure_class!a}",
                field="failure_class",
                allowed=", ".join(FailureClass),
            ) from None
    elif category is not None and category in _CLASS_NAMES:
        known = FailureClass(category)
    else:
        known = FailureClass.TRANSIENT
    return known, category or known.value


def _as_timedelta(value: object, field: str) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str):
        value = _seconds_in(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return timedelta(seconds=value)
        except (OverflowError, ValueError):
            pass
    raise InvalidInput(
        f"not a duration: {value!a}", field=field, allowed='a timedelta, a number of seconds, or text like "2 days"'
    )


def _seconds_in(text: str) -> float | str:
    """The seconds a text stands for; the text itself when it stands for none."""
    total, at = 0.0, 0
    lowered = text.strip().lower()
    while at < len(lowered):
        part = _SPAN.match(lowered, at)
        if part is None or part[2] not in _UNITS or (not part[2] and part[0] != lowered):
            return text  # a bare number stands alone
        total += float(part[1]) * _UNITS[part[2]]
        at = part.end()
    return total if lowered else text


def duration(value: Duration, field: str) -> timedelta:
    """A span of time from any of its forms; `InvalidInput` names the field."""
    return _as_timedelta(value, field)


def _as_tuple(value: object, _field: str) -> object:
    match value:
        case list():
            return tuple(value)
        case set() | frozenset():
            return tuple(sorted(value, key=str))
        case _:
            return value  # anything else than a tuple is refused, with its path, when the policy is frozen


_Conversion: TypeAlias = tuple[str, Callable[[object, str], object]]
_CONVERSIONS: Final[Mapping[str, tuple[_Conversion, ...]]] = {
    "Exponential": (("initial", _as_timedelta), ("maximum", _as_timedelta)),
    "Fixed": (("delay", _as_timedelta),),
    "RetryPolicy": (("retryable_categories", _as_tuple),),
    "TimeoutPolicy": (("attempt_timeout", _as_timedelta), ("execution_deadline", _as_timedelta)),
    "SuspensionPolicy": (("default_timeout", _as_timedelta),),
    "StreamPolicy": (("retention_ttl", _as_timedelta),),
    "FallbackTier": (("timeout", _as_timedelta),),
    "FallbackPolicy": (("tiers", _as_tuple),),
    "RoutingRequirements": (("required_capabilities", _as_tuple),),
    "ExecutionPolicy": (("budget_ids", _as_tuple), ("dedup_window", _as_timedelta)),
}


class _Value(Struct, frozen=True, kw_only=True):
    """Numbers given for durations become timedeltas, and lists become tuples, at construction."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field, convert in _CONVERSIONS.get(name, ()):
            value = getattr(self, field)
            if value is not None:
                force_setattr(self, field, convert(value, f"{name}.{field}"))


class Exponential(_Value, frozen=True, kw_only=True):
    """Wait `initial`, then `multiplier` times longer before each further retry, never above `maximum`.

    With `jitter` the wait is drawn evenly between half of that and all of it.
    """

    initial: Duration = timedelta(seconds=1)
    maximum: Duration = timedelta(seconds=60)
    multiplier: float = 2.0
    jitter: bool = False


class Fixed(_Value, frozen=True):
    """Wait the same time before every retry."""

    delay: Duration = timedelta(seconds=1)


class RetryPolicy(_Value, frozen=True, kw_only=True):
    """How often and how soon a failed attempt is repeated.

    `max_retries` counts the repetitions, not the first attempt. With `retryable_categories` only failures of
    these categories are repeated; empty means all.
    """

    max_retries: int = 3
    backoff: Exponential | Fixed = Exponential()
    retryable_categories: tuple[str, ...] = ()


class TimeoutPolicy(_Value, frozen=True, kw_only=True):
    """`attempt_timeout` limits one attempt's active time; `execution_deadline` counts from creation."""

    attempt_timeout: Duration | None = None
    execution_deadline: Duration | None = None


TimeoutBehavior: TypeAlias = Literal["fail", "cancel", "expire", "auto_resume_with_timeout_signal", "escalate"]


class SuspensionPolicy(_Value, frozen=True, kw_only=True):
    """What happens to a suspension that names no timeout of its own."""

    default_timeout: Duration | None = None
    timeout_behavior: TimeoutBehavior = "fail"


class StreamPolicy(_Value, frozen=True, kw_only=True):
    """How much of an execution's output is kept. `retention_ttl` is also how long the ended execution is."""

    durability_mode: Literal["buffered", "durable"] = "buffered"
    retention_maxlen: int = 10_000
    retention_ttl: Duration | None = None


class FallbackTier(_Value, frozen=True, kw_only=True):
    provider: str
    model: str
    timeout: Duration | None = None


class FallbackPolicy(_Value, frozen=True, kw_only=True):
    """Alternatives in order of preference. Stored for the handler; the engine does not interpret them."""

    tiers: tuple[FallbackTier, ...] = ()


class RoutingRequirements(_Value, frozen=True, kw_only=True):
    """Which workers may take the execution. Only the capabilities are matched; the rest is stored."""

    required_capabilities: tuple[str, ...] = ()
    preferred_locality: str | None = None
    isolation_level: str | None = None


class ExecutionPolicy(_Value, frozen=True, kw_only=True):
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
    quota_policy_id: QuotaPolicyId | None = None
    routing_requirements: RoutingRequirements | None = None
    dedup_window: Duration | None = None
    stream_policy: StreamPolicy | None = None
    max_signals_per_execution: int = 10_000


class Derived(Struct, frozen=True, kw_only=True):
    """What the engine keeps beside the stored policy when an execution is created."""

    required_capabilities: tuple[str, ...] = ()
    budget_ids: tuple[BudgetId, ...] = ()
    quota_policy_id: QuotaPolicyId | None = None
    delay_until_ms: int | None = None
    execution_deadline_ms: int | None = None
    dedup_window_ms: int = DEFAULT_DEDUP_WINDOW_MS


class FrozenPolicy(Struct, frozen=True):
    """A policy that was checked before: the text that is stored and what the engine keeps beside it."""

    text: str
    derived: Derived


PolicyInput: TypeAlias = ExecutionPolicy | FrozenPolicy | Mapping[str, Any] | str | bytes | None


# Where the JSON name is not the attribute's.
_JSON_NAMES: Final[Mapping[tuple[str, str], str]] = {
    ("Exponential", "initial"): "initial_delay_ms",
    ("Exponential", "maximum"): "max_delay_ms",
    ("Fixed", "delay"): "delay_ms",
    ("TimeoutPolicy", "attempt_timeout"): "attempt_timeout_ms",
    ("TimeoutPolicy", "execution_deadline"): "execution_deadline_ms",
    ("SuspensionPolicy", "default_timeout"): "default_timeout_ms",
    ("StreamPolicy", "retention_ttl"): "retention_ttl_ms",
    ("FallbackTier", "timeout"): "timeout_ms",
    ("ExecutionPolicy", "dedup_window"): "dedup_window_ms",
}
_BACKOFF_TYPES: Final[Mapping[str, str]] = {"Exponential": "exponential", "Fixed": "fixed"}


def _plain(value: object, field: str) -> object:
    """A policy value as the JSON object it stands for, unchecked."""
    match value:
        case _Value():
            name = type(value).__name__
            plain: dict[str, object] = {"type": _BACKOFF_TYPES[name]} if name in _BACKOFF_TYPES else {}
            for attribute in value.__struct_fields__:
                item = getattr(value, attribute)
                if item is not None:
                    key = _JSON_NAMES.get((name, attribute), attribute)
                    plain[key] = _plain(item, f"{name}.{attribute}")
            return plain
        case timedelta():
            # Up, so that a span below a millisecond does not become no time at all.
            return -(-value // _MILLISECOND)
        case datetime():
            if value.tzinfo is None:
                raise InvalidInput(f"has no time zone: {value.isoformat()}", field=field, allowed="an aware datetime")
            return (value - _EPOCH) // _MILLISECOND
        case UUID():
            return str(value)
        case tuple():
            return [_plain(item, field) for item in value]
        case StrEnum():
            return value.value
        case _:
            return value


def _wrong(path: str, problem: str) -> NoReturn:
    raise ValidationFailed("invalid_policy_json", f"{path}: {problem}")


_Check: TypeAlias = Callable[[object, str], None]


def _integer(low: int, high: int) -> _Check:
    def check(value: object, path: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            _wrong(path, f"expected an integer, got {_named(value)}")
        if not low <= value <= high:
            _wrong(path, f"{value if abs(value) <= _I64 else 'the number'} is not within {low}..{high}")

    return check


def _number(low: float, high: float) -> _Check:
    def check(value: object, path: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            _wrong(path, f"expected a number, got {_named(value)}")
        if (isinstance(value, float) and not math.isfinite(value)) or not low <= value <= high:
            _wrong(path, f"the number is not within {low:g}..{high:g}")

    return check


def _boolean(value: object, path: str) -> None:
    if not isinstance(value, bool):
        _wrong(path, f"expected true or false, got {_named(value)}")


def _text(value: object, path: str) -> None:
    if not isinstance(value, str):
        _wrong(path, f"expected text, got {_named(value)}")
    check_text(value, f"policy.{path}")


def _word(*allowed: str) -> _Check:
    def check(value: object, path: str) -> None:
        if not isinstance(value, str):
            _wrong(path, f"expected text, got {_named(value)}")
        if value not in allowed:
            _wrong(path, f"{ascii(value)[:80]} is not one of {', '.join(allowed)}")

    return check


def _identifier(value: object, path: str) -> None:
    if not isinstance(value, str | UUID):
        _wrong(path, f"expected a UUID, got {_named(value)}")
    parse_uuid(value, f"policy.{path}")


def _list_of(check: _Check) -> _Check:
    def check_list(value: object, path: str) -> None:
        if not isinstance(value, list | tuple):
            _wrong(path, f"expected a list, got {_named(value)}")
        for index, item in enumerate(value):
            check(item, f"{path}[{index}]")

    return check_list


def _object(checks: Mapping[str, _Check], *, required: tuple[str, ...] = ()) -> _Check:
    def check_object(value: object, path: str) -> None:
        if not isinstance(value, Mapping):
            _wrong(path, f"expected an object, got {_named(value)}")
        for key in required:
            if value.get(key) is None:
                _wrong(f"{path}.{key}", "is missing")
        for key, check in checks.items():
            item = value.get(key)
            if item is not None:
                check(item, f"{path}.{key}")

    return check_object


def _named(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
        case _:
            return type(value).__name__


_u32: Final = _integer(0, _U32)
_duration_ms: Final = _integer(0, MAX_DURATION_MS)

_BACKOFFS: Final[Mapping[str, _Check]] = {
    "exponential": _object(
        {
            "initial_delay_ms": _duration_ms,
            "max_delay_ms": _duration_ms,
            "multiplier": _number(0.0, MAX_MULTIPLIER),
            "jitter": _boolean,
        }
    ),
    "fixed": _object({"delay_ms": _duration_ms}),
}


def _backoff(value: object, path: str) -> None:
    if not isinstance(value, Mapping):
        _wrong(path, f"expected an object, got {_named(value)}")
    word = value.get("type")
    if word is None:
        return
    if not isinstance(word, str):
        _wrong(f"{path}.type", f"expected text, got {_named(word)}")
    # A type we do not know is no error: it means the default delay.
    if word in _BACKOFFS:
        _BACKOFFS[word](value, path)


def _routing(value: object, path: str) -> None:
    if not isinstance(value, Mapping):
        raise ValidationFailed("invalid_policy_json", f"{path}:not_object")
    required_capabilities(value.get("required_capabilities"))
    for key in ("preferred_locality", "isolation_level"):
        if value.get(key) is not None:
            _text(value[key], f"{path}.{key}")


_RETRY_POLICY: Final = _object({"max_retries": _u32, "backoff": _backoff, "retryable_categories": _list_of(_text)})

_POLICY: Final[Mapping[str, _Check]] = {
    "priority": _integer(-_I32, _I32 - 1),
    "delay_until": _integer(0, MAX_TIMESTAMP_MS),
    "retry_policy": _RETRY_POLICY,
    "timeout_policy": _object(
        {
            "attempt_timeout_ms": _duration_ms,
            "execution_deadline_ms": _duration_ms,
            "max_reclaim_count": _u32,
        }
    ),
    "max_reclaim_count": _u32,
    "suspension_policy": _object(
        {
            "default_timeout_ms": _duration_ms,
            "timeout_behavior": _word("fail", "cancel", "expire", "auto_resume_with_timeout_signal", "escalate"),
        }
    ),
    "fallback_policy": _object(
        {
            "tiers": _list_of(
                _object(
                    {"provider": _text, "model": _text, "timeout_ms": _duration_ms},
                    required=("provider", "model"),
                )
            )
        }
    ),
    "max_replay_count": _u32,
    "budget_ids": _list_of(_identifier),
    "quota_policy_id": _identifier,
    "routing_requirements": _routing,
    "dedup_window_ms": _duration_ms,
    "stream_policy": _object(
        {
            "durability_mode": _word("buffered", "durable"),
            "retention_maxlen": _u32,
            "retention_ttl_ms": _duration_ms,
        }
    ),
    "max_signals_per_execution": _u32,
}


def _without_nulls(value: object) -> object:
    match value:
        case Mapping():
            return {key: _without_nulls(item) for key, item in value.items() if item is not None}
        case list() | tuple():
            return [_without_nulls(item) for item in value]
        case _:
            return value


def _encoded(value: Mapping[str, Any], field: str) -> str:
    try:
        # Absent, null and missing are one thing, and only the last is ever written. What we do not know is
        # not ours to tidy.
        known = {
            key: _without_nulls(item) if key in _POLICY else item
            for key, item in value.items()
            if item is not None or key not in _POLICY
        }
        data = msgspec.json.encode(known)
    except UnicodeEncodeError as error:
        raise InvalidInput("contains a lone surrogate", field=field, allowed="valid Unicode text") from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValidationFailed("invalid_policy_json", "malformed") from error
    if _ESCAPED_NUL.search(data):
        raise InvalidInput("contains NUL", field=field, allowed="text without NUL")
    return data.decode()


def _submitted(policy: object) -> Mapping[str, Any]:
    if isinstance(policy, str | bytes):
        try:
            policy = msgspec.json.decode(policy)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ValidationFailed("invalid_policy_json", "malformed") from error
    if not isinstance(policy, Mapping):
        raise ValidationFailed("invalid_policy_json", "malformed")
    return policy


def _freeze(policy: object) -> tuple[str, Derived]:
    value = _submitted(_plain(policy, "policy"))
    for key, check in _POLICY.items():
        item = value.get(key)
        if item is not None:
            check(item, key)

    routing = value.get("routing_requirements") or {}
    timeouts = value.get("timeout_policy") or {}
    budgets = (parse_uuid(item) for item in value.get("budget_ids") or ())
    quota = value.get("quota_policy_id")
    window = value.get("dedup_window_ms")
    derived = Derived(
        required_capabilities=required_capabilities(routing.get("required_capabilities")),
        budget_ids=tuple(dict.fromkeys(map(BudgetId, budgets))),
        quota_policy_id=None if quota is None else QuotaPolicyId(parse_uuid(quota)),
        delay_until_ms=value.get("delay_until"),
        execution_deadline_ms=timeouts.get("execution_deadline_ms"),
        dedup_window_ms=DEFAULT_DEDUP_WINDOW_MS if window is None else window,
    )
    return _encoded(value, "policy"), derived


# A task submits the same policy value over and over; checking it once is enough.
_freeze_value: Final = lru_cache(maxsize=256)(_freeze)
_NOTHING: Final = Derived()


def freeze_policy(policy: PolicyInput) -> tuple[str | None, Derived]:
    """The JSON to store and the values the engine keeps beside it; no policy gives (None, defaults).

    Raises `ValidationFailed` of kind invalid_policy_json (the detail begins with the path) or
    invalid_capabilities, and `InvalidInput` for identifiers and text that cannot be stored.
    """
    if policy is None:
        return None, _NOTHING
    if type(policy) is FrozenPolicy:
        return policy.text, policy.derived
    if isinstance(policy, ExecutionPolicy):
        try:
            hash(policy)
        except TypeError:
            return _freeze(policy)
        return _freeze_value(policy)
    return _freeze(policy)


def policy_to_json(policy: PolicyInput) -> str | None:
    """The policy as the JSON object that is stored, or None without one. Raises as `freeze_policy` does."""
    return freeze_policy(policy)[0]


def derive(policy: PolicyInput) -> Derived:
    """What the engine keeps beside the policy. Raises as `freeze_policy` does."""
    return freeze_policy(policy)[1]


def retry_policy_to_json(policy: RetryPolicy | Mapping[str, Any] | str | None) -> str | None:
    """A retry policy that overrides the frozen one for a single failure; empty text is the same as none."""
    if policy is None or policy == "":
        return None
    value = _submitted(_plain(policy, "retry_policy"))
    _RETRY_POLICY(value, "retry_policy")
    return _encoded({"retry_policy": value}, "retry_policy")[len('{"retry_policy":') : -1]
