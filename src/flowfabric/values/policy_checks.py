"""Check a policy in JSON: every known key must have the right type and range; unknown keys are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NoReturn, TypeAlias
from unicodedata import category
from uuid import UUID

from flowfabric.errors import ValidationFailed
from flowfabric.values.checks import check_text, required_capabilities
from flowfabric.values.durations import MAX_DURATION_MS, MAX_TIMESTAMP_MS
from flowfabric.values.ids import parse_uuid
from flowfabric.values.policies import MAX_MULTIPLIER

_U32: Final = 2**32 - 1
_I32: Final = 2**31
_I64: Final = 2**63 - 1


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
_amount: Final = _integer(0, 2**63 - 1)
_MAX_DIMENSIONS: Final = 64

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
    # An unknown type is no error: it means the default delay.
    if word in _BACKOFFS:
        _BACKOFFS[word](value, path)


def _amounts(value: object, path: str) -> None:
    """Amounts by dimension."""
    if not isinstance(value, Mapping):
        _wrong(path, f"expected an object, got {_named(value)}")
    if len(value) > _MAX_DIMENSIONS:
        _wrong(path, f"{len(value)} dimensions, at most {_MAX_DIMENSIONS}")
    for dimension, amount in value.items():
        text = check_text(dimension, path)
        if not text or any(category(char) == "Cc" for char in text):
            _wrong(path, "a dimension is empty or has a control character")
        _amount(amount, f"{path}.{dimension}")


def _routing(value: object, path: str) -> None:
    if not isinstance(value, Mapping):
        raise ValidationFailed("invalid_policy_json", f"{path}:not_object")
    required_capabilities(value.get("required_capabilities"))
    for key in ("preferred_locality", "isolation_level"):
        if value.get(key) is not None:
            _text(value[key], f"{path}.{key}")


check_retry_object: Final = _object({"max_retries": _u32, "backoff": _backoff, "retryable_categories": _list_of(_text)})


def _hook_policy(value: object, path: str) -> None:
    _object(check_policy_object)(value, path)
    if isinstance(value, Mapping) and value.get("hooks") is not None:
        _wrong(f"{path}.hooks", "a hook has no hooks")


_hook: Final = _object(
    {
        "kind": _text,
        "lane": _text,
        "namespace": _text,
        "capabilities": _text,
        "priority": _integer(-_I32, _I32 - 1),
        "tags": _object({}),
        "policy": _hook_policy,
        "delay_ms": _duration_ms,
        "deadline_ms": _duration_ms,
    },
    required=("kind",),
)

check_policy_object: Final[Mapping[str, _Check]] = {
    "priority": _integer(-_I32, _I32 - 1),
    "delay_until": _integer(0, MAX_TIMESTAMP_MS),
    "retry_policy": check_retry_object,
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
    "budget": _object({"hard": _amounts, "soft": _amounts, "enforcement_mode": _word("strict", "warn")}),
    "flow_budget": _object({"hard": _amounts, "soft": _amounts, "enforcement_mode": _word("strict", "warn")}),
    "inherit_budgets": _boolean,
    "quota_policy_id": _identifier,
    "quota_policy_ids": _list_of(_identifier),
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
    "hooks": _object({"failure": _hook, "escalation": _hook}),
}
