"""An execution in words and tables, for people."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from flowfabric.cli import _output, _waiting
from flowfabric.cli.show._document import waited_for
from flowfabric.cli.show._timeline import timeline

if TYPE_CHECKING:
    from flowfabric.cli.show._seen import Membership, Seen
    from flowfabric.values.attempt import Attempt
    from flowfabric.values.execution import Execution
    from flowfabric.values.signal import RecordedSignal

_UPSTREAMS = 10  # how many are named


def page(seen: Seen) -> None:
    found = seen.execution
    _show_facts(found, seen.membership)
    _show_wait(seen)
    if found.failure_reason:
        _output.heading(f"Failure ({found.failure_category or 'no category'})")
        _output.block(_output.failure_text(found.failure_reason, seen.codecs, found.execution_id))
    if seen.attempts:
        _output.heading("Attempts")
        _output.table(
            ["#", "TYPE", "STATE", "STARTED", "TOOK", "WORKER", "OUTCOME"],
            [
                (
                    one.attempt_index + 1,
                    one.attempt_type,
                    one.attempt_lifecycle,
                    one.started_at,
                    one.ended_at - one.started_at if one.ended_at else None,
                    one.worker_instance_id,
                    _outcome(seen, one),
                )
                for one in seen.attempts
            ],
        )
    _show_steps(seen)
    _show_signals(seen)
    if seen.context is not None and seen.context.input_payload:
        _output.heading("Input")
        _output.block(_text(seen, seen.context.input_payload, seen.context.payload_encoding))
    if seen.result is not None:
        _output.heading("Result")
        _output.block(_text(seen, seen.result.payload, seen.result.encoding))
    if seen.events is not None:
        _output.heading("Timeline")
        _output.table(
            ["WHEN", "AFTER", "WHAT", "DETAIL"],
            [(at, at - found.created_at, what, detail) for at, what, detail in timeline(seen, seen.events)],
        )


_WAITS_FOR = "waits for "  # what the database says of an execution that waits for others or for signals


def _show_facts(found: Execution, membership: Membership | None) -> None:
    lease = found.current_lease or found.lost_lease
    reason = found.blocking_detail or (found.blocking_reason and found.blocking_reason.value.replace("_", " "))
    awaited = membership and _upstreams(membership)
    if reason is not None and reason.startswith(_WAITS_FOR):
        awaited, reason = reason.removeprefix(_WAITS_FOR), None
    percent = None if found.progress_pct is None else f"{found.progress_pct} %"
    _output.pairs(
        [
            ("id", found.execution_id),
            ("kind", found.execution_kind),
            ("state", found.public_state),
            ("because", reason),
            ("waits for", awaited),
            ("lane", found.lane_id),
            ("namespace", found.namespace),
            ("flow", found.flow_id if membership is None else f"{found.flow_id} {membership.name}".rstrip()),
            ("node", membership and membership.node),
            ("priority", found.priority or None),
            ("key", found.idempotency_key),
            ("by", found.creator_identity),
            ("requires", ", ".join(found.required_capabilities)),
            ("tags", ", ".join(f"{key}={value}" for key, value in sorted(found.tags.items()))),
            ("created", found.created_at),
            ("started", found.started_at),
            ("ended", found.completed_at),
            ("took", found.completed_at - found.started_at if found.completed_at and found.started_at else None),
            ("not before", found.delay_until),
            ("deadline", found.deadline_at),
            ("attempt until", found.attempt_timeout_at),
            ("progress", " ".join(part for part in (percent, found.progress_message) if part)),
            ("worker", lease and lease.worker_instance_id),
            ("lease until", found.current_lease and found.current_lease.expires_at),
            ("lease lost", found.lease_lost),
            ("retried", _times(found.retry_count)),
            ("taken over", _times(found.lease_reclaim_count)),
            ("replayed", _times(found.replay_count)),
            ("cancelled by", found.cancelled_by),
            ("reason", found.cancellation_reason),
        ]
    )


def _times(count: int) -> str:
    return "" if not count else "once" if count == 1 else f"{count} times"


def _upstreams(membership: Membership) -> str:
    """The nodes it waits for, in one line."""
    from flowfabric.drawing.labels import join_words  # noqa: PLC0415

    names = [f"{one.node or one.execution_id} ({one.state})" for one in membership.waits_for[:_UPSTREAMS]]
    if not names:
        return ""
    more = len(membership.waits_for) - len(names)
    join = join_words(membership.policy, membership.dependencies)
    return f"{join + ': ' if join else ''}{', '.join(names)}" + (f" and {more:,} more" if more else "")


def _show_wait(seen: Seen) -> None:
    """Its current wait, and the waitpoints that can be signalled."""
    if not seen.waitpoints:
        return
    _output.heading("Waits for")
    open_one = seen.suspension
    if open_one is not None and open_one.closed_at is None:
        then = _waiting.then(open_one.timeout_behavior, open_one.timeout_at is not None)
        _output.pairs(
            [
                ("condition", _waiting.condition(open_one.resume_condition)),
                ("reason", _waiting.reason(open_one.reason_code, "active")),
                ("since", open_one.suspended_at),
                ("deadline", open_one.timeout_at and f"{_output.when(open_one.timeout_at)}, then {then}"),
            ]
        )
    counts = Counter(signal.waitpoint_id for signal in seen.signals)
    _output.table(
        ["KEY", "STATE", "SINCE", "UNTIL", "SIGNALS", "NAMES"],
        [
            (
                one.waitpoint_key,
                one.state,
                one.created_at,
                one.expires_at,
                counts[one.waitpoint_id],
                _waiting.names(one.required_signal_names, one.state),
            )
            for one in seen.waitpoints
        ],
    )


def _show_signals(seen: Seen) -> None:
    if not seen.signals:
        return
    _output.heading(
        f"Signals, the last {seen.signals.maxlen}" if len(seen.signals) == seen.signals.maxlen else "Signals"
    )
    _output.table(
        ["WHEN", "NAME", "KEY", "FROM", "EFFECT", *["PAYLOAD"] * seen.payloads],
        [
            [
                one.accepted_at,
                one.signal_name,
                one.waitpoint_key,
                _waiting.source(one),
                _effect(one),
                *[_shortened(_text(seen, one.payload, one.payload_encoding))] * seen.payloads,
            ]
            for one in seen.signals
        ],
    )


def _effect(signal: RecordedSignal) -> str:
    """The effect of a signal, with the reason if it did not resume the execution."""
    if signal.observed_effect == "appended_to_waitpoint":
        return f"{signal.observed_effect} ({signal.match_detail})"
    return signal.observed_effect


def _outcome(seen: Seen, attempt: Attempt) -> str:
    failure = _output.failure_text(attempt.failure_reason, seen.codecs, seen.execution.execution_id)
    words = [attempt.end_disposition or "", _output.failure_line(failure)]
    if attempt.attempt_type == "replay":
        words += [
            attempt.replay_reason or "",
            f"by {attempt.replay_requested_by}" if attempt.replay_requested_by else "",
        ]
    return ": ".join(word for word in words if word)


def _show_steps(seen: Seen) -> None:
    if not seen.steps:
        return
    _output.heading("Steps")
    rows = []
    for step in seen.steps:
        what = "failed" if step.error else "done"
        if step.kind == "wait" and not step.error:
            what = step.outcome or "waiting"
            value = ", ".join(str(one["name"]) for one in waited_for(seen, step))
        elif step.error:
            value = f"{step.error.get('type', '')}: {_output.first_line(str(step.error.get('message', '')))}"
        elif step.kind == "submit":
            value = "" if step.child_id is None else str(step.child_id)  # a flow has none
        elif step.kind in ("now", "sleep"):
            value = _output.when(step.at)
        elif not seen.payloads:
            value = ""
        else:
            value = _shortened(_text(seen, step.result, step.encoding))
        name = step.name if step.n == 0 else f"{step.name} #{step.n + 1}"
        seconds = None if step.seconds is None else _output.seconds(step.seconds)
        rows.append((name, step.kind, what, step.attempt_index + 1, step.recorded_at, seconds, value))
    _output.table(["STEP", "KIND", "STATE", "ATTEMPT", "RECORDED", "TOOK", "RESULT"], rows)


def _text(seen: Seen, data: bytes | None, encoding: str | None) -> str:
    """A payload for people."""
    if data is None:
        return ""
    value = _output.payload(data, encoding, seen.codecs, seen.execution.execution_id)
    if isinstance(value, dict) and list(value) == ["base64"]:
        return f"({len(data)} bytes{f' of {encoding}' if encoding else ''})"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shortened(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
