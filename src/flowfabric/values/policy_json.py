"""Policies to and from JSON, and the columns the engine derives from them.

A mapping or JSON text is the submitted object itself: unknown keys are kept, known keys must have the right type.
Durations are `_ms` integers in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

import msgspec

from flowfabric.errors import InvalidInput, ValidationFailed
from flowfabric.values.checks import required_capabilities
from flowfabric.values.durations import MILLISECOND
from flowfabric.values.ids import BudgetId, QuotaPolicyId, parse_uuid
from flowfabric.values.policies import (
    DEFAULT_DEDUP_WINDOW_MS,
    Derived,
    ExecutionPolicy,
    FrozenPolicy,
    PolicyInput,
    PolicyValue,
    RetryPolicy,
)
from flowfabric.values.policy_checks import check_policy_object, check_retry_object

OWN_BUDGET: Final = UUID(int=0)  # stands for the budget of the execution itself, whose id is not known yet
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ESCAPED_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
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
    """Return the JSON object of a policy value, unchecked."""
    match value:
        case PolicyValue():
            name = type(value).__name__
            plain: dict[str, object] = {"type": _BACKOFF_TYPES[name]} if name in _BACKOFF_TYPES else {}
            for attribute in value.__struct_fields__:
                item = getattr(value, attribute)
                if item is not None:
                    key = _JSON_NAMES.get((name, attribute), attribute)
                    plain[key] = _plain(item, f"{name}.{attribute}")
            return plain
        case timedelta():
            # Round up, so that a span below a millisecond does not become zero.
            return -(-value // MILLISECOND)
        case datetime():
            if value.tzinfo is None:
                raise InvalidInput(f"has no time zone: {value.isoformat()}", field=field, allowed="an aware datetime")
            return (value - _EPOCH) // MILLISECOND
        case UUID():
            return str(value)
        case tuple():
            return [_plain(item, field) for item in value]
        case StrEnum():
            return value.value
        case _:
            return value


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
        # None and null mean the same as a missing key and are not written. Unknown keys are kept as they are.
        known = {
            key: _without_nulls(item) if key in check_policy_object else item
            for key, item in value.items()
            if item is not None or key not in check_policy_object
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
    for key, check in check_policy_object.items():
        item = value.get(key)
        if item is not None:
            check(item, key)

    routing = value.get("routing_requirements") or {}
    timeouts = value.get("timeout_policy") or {}
    budgets = [parse_uuid(item) for item in value.get("budget_ids") or ()]
    if value.get("budget") is not None:
        budgets.append(OWN_BUDGET)
    quota = value.get("quota_policy_id")
    quotas = [*(value.get("quota_policy_ids") or ()), *([] if quota is None else [quota])]
    window = value.get("dedup_window_ms")
    derived = Derived(
        required_capabilities=required_capabilities(routing.get("required_capabilities")),
        budget_ids=tuple(dict.fromkeys(map(BudgetId, budgets))),
        quota_policy_ids=tuple(dict.fromkeys(QuotaPolicyId(parse_uuid(item)) for item in quotas)),
        delay_until_ms=value.get("delay_until"),
        execution_deadline_ms=timeouts.get("execution_deadline_ms"),
        dedup_window_ms=DEFAULT_DEDUP_WINDOW_MS if window is None else window,
    )
    return _encoded(value, "policy"), derived


@lru_cache(maxsize=256)
def _freeze_value(policy: ExecutionPolicy, _: str) -> tuple[str, Derived]:
    # A task submits the same policy value over and over; checking it once is enough.
    return _freeze(policy)


_NOTHING: Final = Derived()


def freeze_policy(policy: PolicyInput) -> tuple[str | None, Derived]:
    """Return the JSON to store and the columns derived from it; without a policy (None, defaults).

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
        return _freeze_value(policy, repr(policy))  # True and 1 are equal, and only one of them is an integer
    return _freeze(policy)


def policy_to_json(policy: PolicyInput) -> str | None:
    """Return the policy as the stored JSON object, or None without one. Raises as `freeze_policy` does."""
    return freeze_policy(policy)[0]


def retry_policy_to_json(policy: RetryPolicy | Mapping[str, Any] | str | None) -> str | None:
    """A retry policy that overrides the frozen one for a single failure; an empty string means none."""
    if policy is None or policy == "":
        return None
    value = _submitted(_plain(policy, "retry_policy"))
    check_retry_object(value, "retry_policy")
    return _encoded({"retry_policy": value}, "retry_policy")[len('{"retry_policy":') : -1]
