"""An execution in words and tables, for people."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flowfabric.cli import _output, _waiting
from flowfabric.cli._output import Column
from flowfabric.cli.budgets import needs
from flowfabric.cli.show._timeline import timeline
from flowfabric.contracts import json_form
from flowfabric.values.durations import counted
from flowfabric.values.history import how_to_fit
from flowfabric.values.step import BRANCHED
from flowfabric.values.vector import BlockingReason
from flowfabric.values.worker import why_unserved

if TYPE_CHECKING:
    from flowfabric.cli.show._seen import Membership, Seen
    from flowfabric.values.attempt import Attempt
    from flowfabric.values.event import Event
    from flowfabric.values.execution import Execution
    from flowfabric.values.signal import RecordedSignal

_UPSTREAMS = 10  # how many are named
_CHILDREN = 50  # how many are listed
_LIVES = {
    "started": "running",
    "ended_success": "succeeded",
    "ended_failure": "failed",
    "ended_cancelled": "cancelled",
    "interrupted_reclaimed": "taken over",
}
_ENDS = {"terminal_failed": "failed for good", "retry_scheduled": "retried", "reclaimed": "taken over"}
_SHOWN = 2000  # characters of an input or a result


def page(seen: Seen) -> None:
    found = seen.execution
    _show_facts(seen)
    _show_wait(seen)
    if found.stops and found.blocking_detail:
        _output.heading("Changed code")
        changed = _output.opened(found.blocking_detail, seen.codecs, found.execution_id)
        _output.block(changed)
        _output.block(how_to_fit(changed))
    if found.failure_reason:
        _output.heading(f"Failure ({found.failure_category or 'no category'})")
        _output.block(_output.opened(found.failure_reason, seen.codecs, found.execution_id))
    if seen.attempts:
        _output.heading("Attempts")
        _output.table(
            [
                Column("#"), Column("TYPE"), Column("STATE", cut=9, drop=2), Column("STARTED"), Column("TOOK"),
                Column("WORKER", cut=14, drop=1, ends=True), Column("OUTCOME", folds=True),
            ],
            [
                (
                    one.attempt_index + 1,
                    one.attempt_type,
                    _LIVES.get(one.attempt_lifecycle, one.attempt_lifecycle.replace("_", " ")),
                    one.started_at,
                    one.ended_at - one.started_at if one.ended_at else None,
                    one.worker_instance_id,
                    _outcome(seen, one),
                )
                for one in seen.attempts
            ],
            wide=seen.wide or None,
        )  # fmt: skip
    _show_children(seen)
    _show_steps(seen)
    _show_signals(seen)
    if seen.frames and seen.payloads:
        _output.heading(f"Output{_part(seen)} (flowfabric tail)")
        _output.table(
            ["EMITTED", Column("TYPE", cut=12), Column("TEXT", cut=28)],
            [(frame.at, frame.type, _text(seen, frame.payload, frame.encoding)) for frame in seen.frames],
            wide=seen.wide or None,
        )
    if seen.context is not None and seen.context.input_payload:
        _output.heading("Input")
        _show_value(seen, seen.context.input_payload, seen.context.payload_encoding)
    if seen.result is not None:
        _output.heading("Result")
        _show_value(seen, seen.result.payload, seen.result.encoding)


def show_timeline(seen: Seen, events: list[Event]) -> None:
    created = seen.execution.created_at
    _output.heading("Timeline")
    _output.table(
        ["WHEN", Column("AFTER", drop=1), "WHAT", Column("DETAIL", folds=True)],
        [(at, at - created, what, detail) for at, what, detail in timeline(seen, events)],
        wide=seen.wide or None,
    )


_OF_LANE_OR_FLEET = (BlockingReason.PAUSED_BY_POLICY, BlockingReason.WAITING_FOR_CAPABLE_WORKER)
_WAITS_FOR = "waits for "  # what the database says of an execution that waits for others or for signals


def _show_facts(seen: Seen) -> None:
    found, membership, frames = seen.execution, seen.membership, seen.frame_count
    lease = found.current_lease or found.lost_lease
    reason = (
        "its recorded steps do not fit the code"
        if found.stops
        else _waiting.because(found.blocking_detail, found.blocking_reason)
    )
    held, limits = seen.held, seen.limits
    if held is not None:
        reason = None  # shown by the lines below
    awaited = membership and _upstreams(membership)
    if seen.unserved is not None and found.blocking_reason in _OF_LANE_OR_FLEET and not found.stops:
        reason = None  # shown below, with what to do about it
    if reason is not None and reason.startswith(_WAITS_FOR):
        awaited, reason = reason.removeprefix(_WAITS_FOR), None
    percent = None if found.progress_pct is None else f"{found.progress_pct} %"
    message = _output.opened(found.progress_message, seen.codecs, found.execution_id)
    _output.pairs(
        [
            ("id", found.execution_id),
            ("kind", found.execution_kind),
            ("version", found.version),
            ("state", found.public_state),
            ("because", reason),
            ("waits for", awaited),
            ("held by", held and f"{held.what} {held.name}" + (f", {held.key}" if held.key else "")),
            ("held since", held and held.since),
            ("needs", held and needs(held.needs)),
            ("next try", held and held.retry_at),
            ("until", held and held.until),
            ("but", None if seen.unserved is None else why_unserved(seen.unserved, in_show=True)),
            ("lane", found.lane_id),
            ("namespace", found.namespace),
            ("flow", found.flow_id if membership is None else f"{found.flow_id} {membership.name}".rstrip()),
            ("node", membership and membership.node),
            ("priority", found.priority or None),
            ("key", found.idempotency_key),
            ("submitted by", found.parent_id),
            ("fork of", _forked(found)),
            ("by", found.creator_identity if found.creator_identity != str(found.parent_id) else None),
            ("requires", ", ".join(found.required_capabilities)),
            ("budgets", limits and ", ".join(limits.budgets)),
            ("quotas", limits and ", ".join(limits.quotas)),
            ("used", limits and needs(limits.usage.total)),
            ("holds", limits and needs({key: value for key, value in limits.usage.held.items() if value})),
            ("tags", ", ".join(f"{key}={value}" for key, value in sorted(found.tags.items()))),
            ("created", found.created_at),
            ("started", found.started_at),
            ("ended", found.completed_at),
            ("took", found.completed_at - found.started_at if found.completed_at and found.started_at else None),
            ("not before", None if found.stops else found.delay_until),
            ("stopped", _stopped(found)),
            ("deadline", found.deadline_at),
            ("attempt until", found.attempt_timeout_at),
            ("progress", " ".join(part for part in (percent, message) if part)),
            ("output", f"{frames:,} frame{'' if frames == 1 else 's'}" if frames else None),
            ("summary", seen.summary and f"{counted(seen.summary.version, 'change')} (flowfabric summary)"),
            ("worker", lease and lease.worker_instance_id),
            ("lease until", found.current_lease and found.current_lease.expires_at),
            ("lease lost", found.lease_lost),
            ("retried", _times(found.retry_count)),
            ("taken over", _times(found.lease_reclaim_count)),
            ("replayed", _times(found.replay_count)),
            ("cancelled by", _waiting.cancelled_by(found.cancelled_by)),
            ("reason", found.cancellation_reason),
            ("on failure", None if seen.hook is None else f"{seen.hook.task} {seen.hook.execution_id or ''}".rstrip()),
        ]
    )


def _part(seen: Seen) -> str:
    """How much of the output is shown: the newest durable frames."""
    shown = len(seen.frames)
    return "" if shown == seen.frame_count else f", the last {shown} of {counted(seen.frame_count, 'frame')}"


def _stopped(found: Execution) -> str:
    """That changed code stopped it, and which workers may claim it."""
    if not found.stops:
        return ""
    opens = found.delay_until
    who = (
        "any worker may claim it"
        if opens is None
        else f"other code may claim it, any worker from {_output.when(opens)}"
    )
    return f"by changed code, {_times(found.stops)}; {who}"


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
        then = _waiting.at_deadline(open_one.timeout_behavior)
        _output.pairs(
            [
                ("condition", _waiting.condition(open_one.resume_condition)),
                ("reason", _waiting.reason(open_one.reason_code, "active")),
                ("since", open_one.suspended_at),
                ("deadline", open_one.timeout_at and f"{_output.when(open_one.timeout_at)}, then {then}"),
            ]
        )
    counts = Counter(signal.waitpoint_id for signal in seen.signals)
    refused = Counter(signal.waitpoint_id for signal in seen.signals if signal.refused is not None)
    _output.table(
        [
            Column("KEY", cut=16),
            Column("STATE"),
            Column("SINCE", drop=2),
            Column("UNTIL", drop=1),
            Column("SIGNALS"),
            Column("NAMES", cut=16),
        ],
        [
            (
                one.waitpoint_key,
                one.state,
                one.created_at,
                one.expires_at,
                _waiting.counted(counts[one.waitpoint_id], refused[one.waitpoint_id]),
                _waiting.names(one.required_signal_names, one.state),
            )
            for one in seen.waitpoints
        ],
        wide=seen.wide or None,
    )


def _show_children(seen: Seen) -> None:
    children = seen.children
    if not children:
        return
    _output.heading(
        "Children" if len(children) <= _CHILDREN else f"Children, the last {_CHILDREN} of {len(children):,}"
    )
    _output.table(
        ["ID", "STATE", "KIND", "NAME", "CREATED", "ENDED"],
        [
            (one.id, one.state, "flow" if one.kind == "flow" else "task", one.name, one.created_at, one.completed_at)
            for one in children[-_CHILDREN:]
        ],
        wide=seen.wide or None,
    )


def _show_signals(seen: Seen) -> None:
    if not seen.signals:
        return
    _output.heading(
        f"Signals, the last {seen.signals.maxlen}" if len(seen.signals) == seen.signals.maxlen else "Signals"
    )
    _output.table(
        [
            Column("WHEN"),
            Column("NAME", cut=10),
            Column("KEY", cut=8, drop=1),
            Column("FROM", cut=12),
            Column("EFFECT", cut=10, folds=True),
            *[Column("PAYLOAD", cut=14)] * seen.payloads,
        ],
        [
            [
                one.accepted_at,
                one.signal_name,
                one.waitpoint_key,
                _waiting.source(one),
                _effect(one),
                *[_shortened(seen, _text(seen, one.payload, one.payload_encoding))] * seen.payloads,
            ]
            for one in seen.signals
        ],
        wide=seen.wide or None,
    )


def _effect(signal: RecordedSignal) -> str:
    """The effect of a signal, with the reason if it did not resume the execution."""
    if signal.refused is not None:
        return f"refused: {signal.refused}"
    words = _waiting.effect(signal.observed_effect)
    if signal.observed_effect == "appended_to_waitpoint":
        return f"{words} ({signal.match_detail.replace('_', ' ')})"
    return words


def _outcome(seen: Seen, attempt: Attempt) -> str:
    failure = _output.opened(attempt.failure_reason, seen.codecs, seen.execution.execution_id)
    ended = attempt.end_disposition or ""
    words = _joined(_ENDS.get(ended, ended.replace("_", " ")), _output.failure_line(failure))
    if attempt.attempt_type != "replay":
        return words
    who = f"replayed by {attempt.replay_requested_by}" if attempt.replay_requested_by else "replayed"
    return f"{words} ({who}{': ' if attempt.replay_reason else ''}{attempt.replay_reason or ''})".lstrip()


def _joined(ended: str, why: str) -> str:
    """How an attempt ended and why, without the words that both have."""
    while ended and why.startswith(f"{ended}: "):
        why = why.removeprefix(f"{ended}: ")
    if not ended or why == ended or why.startswith(f"{ended} "):
        return why or ended
    return f"{ended}: {why}" if why else ended


def _show_steps(seen: Seen) -> None:
    # The deadline of a wait is stored as a sleep of our own.
    own = [
        step
        for step in seen.steps
        if not (step.kind == "sleep" and step.name.startswith("timeout of ")) and step.name != BRANCHED
    ]
    if not own:
        return
    _output.heading("Steps")
    rows = []
    found = seen.execution
    is_over = found.public_state.is_terminal
    for step in own:
        value: object
        what = "failed" if step.error else "done"
        name = step.name
        if step.kind == "wait" and not step.error:
            what = _waiting.effect(step.outcome or ("not answered" if is_over else "waiting"))
            value = ", ".join(str(one["name"]) for one in json_form.step_result(step, seen.codecs))
        elif step.error:
            value = f"{step.error.get('type', '')}: {_output.first_line(str(step.error.get('message', '')))}"
        elif step.kind == "submit":
            value = step.child_id or step.flow_id or ""  # nodes added to its own flow have neither
        elif step.kind in ("now", "sleep"):
            value = _output.when(step.at)
            if step.kind == "sleep" and step.at is not None and step.at > (found.completed_at or datetime.now(UTC)):
                what = "not over" if is_over else "sleeping"
        elif step.kind == "patch":
            value = "old" if step.result else "new"
        elif step.kind == "usage":
            value = f"left: {needs(json.loads(step.result or b'{}')) or 'no limit'}"
        elif not seen.payloads:
            value = ""
        elif step.kind == "result":
            ended = json_form.step_result(step, seen.codecs)
            value = _shortened(seen, _ended_in_line(ended))
        else:
            value = _shortened(seen, _text(seen, step.result, step.encoding))
        if step.kind == "result" and not name.startswith("breach of "):
            of = "result of flow" if name.startswith("result of flow ") else "result of"
            name = f"{of} {name[-36:] if seen.wide else name[-8:]}"
        name = name if step.n == 0 else f"{name} #{step.n + 1}"
        seconds = None if step.seconds is None else _output.seconds(step.seconds)
        rows.append((name, step.kind, what, step.attempt_index + 1, step.recorded_at, seconds, value))
    _output.table(
        [
            Column("STEP", cut=23), Column("KIND", drop=3), Column("STATE", cut=9), Column("ATTEMPT", drop=4),
            Column("RECORDED", drop=2), Column("TOOK", drop=1), Column("RESULT", folds=True),
        ],
        rows,
        wide=seen.wide or None,
    )  # fmt: skip


def _show_value(seen: Seen, data: bytes, encoding: str | None) -> None:
    """Input or result; of a long one the beginning, and how to see it whole."""
    text = _text(seen, data, encoding)
    _output.block(text if seen.wide else text[:_SHOWN])
    if len(text) > _SHOWN and not seen.wide:
        short = seen.execution.execution_id.hex[-8:]
        app = "" if seen.codecs is None else " --app ..."
        rest = f"{len(text) - _SHOWN:,} more characters"
        _output.say(f"  ... ({rest}; `flowfabric show {short} --wide{app}` prints all)")


def _text(seen: Seen, data: bytes | None, encoding: str | None) -> str:
    """A payload for people."""
    return _output.payload_text(data, encoding, seen.codecs, seen.execution.execution_id)


def _ended_in_line(ended: Any) -> str:
    """How an execution or a flow ended that a step waited for: its result, or how many nodes ended in which state."""
    if isinstance(ended, dict) and isinstance(members := ended.get("members"), list):
        states = Counter(str((one.get("outcome") or {}).get("state")) for one in members if isinstance(one, dict))
        counts = ", ".join(f"{number:,} {state}" for state, number in states.most_common())
        return f"{counted(len(members), 'node')}: {counts}"
    return _in_line(ended.get("result") if isinstance(ended, dict) and "state" in ended else ended)


def _in_line(value: Any) -> str:
    if isinstance(value, dict) and "base64" in value:
        return "<sealed>"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shortened(seen: Seen, text: str, most: int = 80) -> str:
    return text if len(text) <= most or seen.wide else f"{text[: most - 3]}..."


def _forked(found: Execution) -> str | None:
    """Where a fork came from."""
    if found.forked_from is None:
        return None
    return str(found.forked_from) + (f" before {found.forked_before}" if found.forked_before else "")
