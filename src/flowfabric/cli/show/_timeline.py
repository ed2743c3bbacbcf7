"""The history of an execution as rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowfabric.cli import _output, _waiting

if TYPE_CHECKING:
    from flowfabric.cli.show._seen import Seen
    from flowfabric.values.event import Event
    from flowfabric.values.signal import RecordedSignal

# Reasons for which a worker gives up a lease, in words.
_GIVEN_UP = {
    "suspend": ("suspended", ""),
    "worker_park": ("parked", "waits without a worker"),
    "failed_retry_scheduled": ("failed", "is retried"),
    "waiting_for_budget": ("paused", "gave its worker back until its budgets have room"),
    "steps_changed": ("stopped", "its code has changed: waits for code that fits"),
}
_INTERNAL = frozenset(("new_lease_epoch", "branch", "groups_reset"))  # details for programs
# Reasons of a lease's end that only repeat the outcome.
_ENDINGS = frozenset(("lease_expired", "completed", "failed_terminal", "cancelled", "expired", "claim_resumed"))


def timeline(seen: Seen, events: list[Event]) -> list[tuple[Any, str, str]]:
    """The events in words, consecutive renewals of a lease as one row."""
    lines: list[tuple[Any, str, str]] = [(seen.execution.created_at, "created", "")]
    signals = {str(one.signal_id): one for one in seen.signals}
    renewals: list[Event] = []
    for event in events:
        if event.lease_type == "renewed":
            renewals.append(event)
            continue
        lines += _renewed(renewals)
        renewals = []
        detail = _detail(event) if event.signal_effect is None else _signalled(event, signals)
        lines.append((event.occurred_at, _what(event), detail))
    return lines + _renewed(renewals)


def _renewed(renewals: list[Event]) -> list[tuple[Any, str, str]]:
    if not renewals:
        return []
    times = "once" if len(renewals) == 1 else f"{len(renewals)} times"
    return [(renewals[-1].occurred_at, "lease renewed", times)]


def _what(event: Event) -> str:
    if event.outcome:
        return "completed" if event.outcome == "success" else event.outcome
    if event.operator_type:
        return event.operator_type.replace("_", " ")
    if event.signal_effect:
        return "signal"
    if event.lease_type == "revoked" and event.reason in _GIVEN_UP:
        return _GIVEN_UP[event.reason][0]
    return f"lease {event.lease_type}"


def _signalled(event: Event, signals: dict[str, RecordedSignal]) -> str:
    """A signal and its effect. If the signal is not stored any more, only its sender is known."""
    details = event.details or {}
    one = signals.get(str(details.get("signal_id")))
    who = details.get("source_identity")
    if one is None:
        words = f"from {who}" if who else ""
    else:
        words = f"{one.signal_name} at {one.waitpoint_key} from {_waiting.source(one)}"
    effect = _waiting.effect(str(event.signal_effect))
    return f"{words}: {effect}" if words else effect


def _detail(event: Event) -> str:
    if event.lease_type == "revoked" and event.reason in _GIVEN_UP:
        return _GIVEN_UP[event.reason][1]
    words = []
    if event.attempt_index is not None and event.lease_type in ("acquired", "reclaimed"):
        words.append(f"attempt {event.attempt_index + 1}")
    if event.worker_instance_id and event.lease_type != "revoked":
        words.append(f"{'of' if event.lease_type == 'expired' else 'by'} {event.worker_instance_id}")
    if event.reason and event.reason not in _ENDINGS:
        words.append(_output.first_line(event.reason))
    if event.revoked_by and not event.outcome:
        words.append(f"by {event.revoked_by}")
    words += [f"{key} {value}" for key, value in (event.details or {}).items() if key not in _INTERNAL]
    return ", ".join(words)
