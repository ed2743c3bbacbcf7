"""Policies and options of executions in JSON: durations in seconds, instants in RFC 3339. Stored in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from flowfabric.errors import InvalidInput
from flowfabric.values.durations import MAX_DURATION_MS, MAX_TIMESTAMP_MS, MILLISECOND
from flowfabric.values.policy_checks import check_policy_object

# The members that are durations, as they are stored.
_DURATIONS: Final = (
    "initial_delay_ms", "max_delay_ms", "delay_ms", "attempt_timeout_ms", "execution_deadline_ms", "default_timeout_ms",
    "timeout_ms", "dedup_window_ms", "retention_ttl_ms", "deadline_ms", "every_ms",
)  # fmt: skip
_SHOWN: Final[Mapping[str, str]] = {name: f"{name.removesuffix('_ms')}_seconds" for name in _DURATIONS}
_STORED: Final[Mapping[str, str]] = {shown: name for name, shown in _SHOWN.items()}
_HOOK: Final = (
    "kind", "lane", "namespace", "capabilities", "priority", "tags", "policy", "delay_ms", "deadline_ms",
)  # fmt: skip
# The members of the objects in a policy, by the name of the object.
_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "policy": tuple(check_policy_object),
    "retry_policy": ("max_retries", "backoff", "retryable_categories"),
    "timeout_policy": ("attempt_timeout_ms", "execution_deadline_ms", "max_reclaim_count"),
    "suspension_policy": ("default_timeout_ms", "timeout_behavior"),
    "backoff": ("type", "delay_ms", "initial_delay_ms", "max_delay_ms", "multiplier", "jitter"),
    "fallback_policy": ("tiers",),
    "tiers": ("provider", "model", "timeout_ms"),
    "routing_requirements": ("required_capabilities", "preferred_locality", "isolation_level"),
    "stream_policy": ("durability_mode", "retention_maxlen", "retention_ttl_ms"),
    "budget": ("hard", "soft", "enforcement_mode"),
    "flow_budget": ("hard", "soft", "enforcement_mode"),
    "hooks": ("failure", "escalation"),
    "failure": _HOOK,
    "escalation": _HOOK,
}
_DEEPEST: Final = 16
_INSTANT: Final = "delay_until"
_OWN_NAMES: Final = frozenset(("hard", "soft", "tags"))  # their members have names of the user's own: dimensions, tags
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MOST_SECONDS: Final = MAX_DURATION_MS / 1000


def shown_policy(value: Any) -> Any:
    """A stored policy, or the options and the timing of a schedule, as JSON shows it."""
    match value:
        case Mapping():
            return dict(_shown(name, item) for name, item in value.items())
        case list() | tuple():
            return [shown_policy(item) for item in value]
        case _:
            return value


def _shown(name: str, item: Any) -> tuple[str, Any]:
    if name in _OWN_NAMES:
        return name, item
    if isinstance(item, int) and not isinstance(item, bool):
        # A number that is none is in an object that the engine keeps and does not know.
        if name in _SHOWN:
            return (_SHOWN[name], item / 1000) if abs(item) <= MAX_DURATION_MS else (name, item)
        if name == _INSTANT and 0 <= item <= MAX_TIMESTAMP_MS:
            return name, (_EPOCH + item * MILLISECOND).isoformat().replace("+00:00", "Z")
    return _SHOWN.get(name, name), shown_policy(item)


def stored_policy(value: Any, field: str = "policy") -> Any:
    """A policy that came as JSON, as it is stored; refused with the name of the member that is wrong."""
    match value:
        case Mapping():
            return {
                _STORED.get(name, name): _stored_member(name, item, f"{field}.{name}") for name, item in value.items()
            }
        case list() | tuple():
            return [stored_policy(item, f"{field}[{place}]") for place, item in enumerate(value)]
        case _:
            return value


def check_members(policy: Mapping[str, Any]) -> None:
    """Refuse members of a policy that came as JSON and that no policy has: the engine would keep and ignore them."""
    _check_depth(policy)
    _check_part("policy", policy, "policy")


def _check_depth(policy: Any) -> None:
    """Refuse nesting deeper than that of any policy, before recursion does."""
    level = [policy]
    for _ in range(_DEEPEST):
        inner = [item for one in level for item in (one.values() if isinstance(one, Mapping) else one)]
        level = [one for one in inner if isinstance(one, Mapping | list)]
        if not level:
            return
    raise InvalidInput("nested deeper than any policy", field="policy", allowed=f"{_DEEPEST} levels")


def _check_part(name: str, value: Any, field: str) -> None:
    if isinstance(value, list):
        for place, item in enumerate(value):
            _check_part(name, item, f"{field}[{place}]")
    elif isinstance(value, Mapping):
        _check_names(value, _PARTS[name], field)
        for member, item in value.items():
            if member in _PARTS:
                _check_part(member, item, f"{field}.{member}")


def _check_names(given: Mapping[str, Any], known: tuple[str, ...], field: str) -> None:
    allowed = [_SHOWN.get(name, name) for name in known]
    for name in given:
        if name not in allowed and name not in _SHOWN:  # a duration in milliseconds is refused with what is meant
            raise InvalidInput("unknown", field=f"{field}.{name}", allowed=", ".join(allowed))


def _stored_member(name: str, item: Any, field: str) -> Any:
    if name in _SHOWN:
        raise InvalidInput("durations are in seconds", field=field, allowed=_SHOWN[name])
    if item is None or name in _OWN_NAMES:
        return item
    if name in _STORED:
        if isinstance(item, bool) or not isinstance(item, int | float) or not 0 <= item <= _MOST_SECONDS:
            raise InvalidInput(f"got {item!r}", field=field, allowed=f"seconds from 0 to {_MOST_SECONDS:.0f}")
        # Round up, so that a span below a millisecond does not become zero.
        return -(-timedelta(seconds=item) // MILLISECOND)
    if name == _INSTANT:
        return _instant(item, field)
    return stored_policy(item, field)


def _instant(item: Any, field: str) -> int:
    try:
        found = datetime.fromisoformat(item)
        return (found - _EPOCH) // MILLISECOND
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(f"got {item!r}", field=field, allowed="an instant as in 2030-01-01T00:00:00Z") from None
