"""`flowfabric show`: everything about one execution."""

from __future__ import annotations

import base64
import contextlib
import json as _json
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct

from flowfabric.cli import _output, _waiting
from flowfabric.cli._database import ask, missing, resolve
from flowfabric.cli._loading import AppOption, load_app
from flowfabric.cli._options import Dsn, Id, Json
from flowfabric.values.flow import GroupState
from flowfabric.values.ids import FlowId
from flowfabric.values.joins import EdgeGroupPolicy
from flowfabric.values.state import State

if TYPE_CHECKING:
    from flowfabric.contracts.codecs import Codecs
    from flowfabric.engine import Engine
    from flowfabric.values.attempt import Attempt
    from flowfabric.values.event import Event
    from flowfabric.values.execution import Execution, ExecutionContext, Result
    from flowfabric.values.ids import ExecutionId
    from flowfabric.values.signal import RecordedSignal
    from flowfabric.values.step import Step
    from flowfabric.values.wait import PendingWaitpoint, Suspension

_SIGNALS = 100  # for people: the newest
_UPSTREAMS = 10  # for people: the first


def show(
    execution: Id,
    payloads: Annotated[
        bool,
        typer.Option(
            "--payload/--no-payload", help="With input, step results, signals' payloads and result, or without."
        ),
    ] = True,
    timeline: Annotated[
        bool, typer.Option("--timeline/--no-timeline", help="With what happened when, as far as the event log reaches.")
    ] = True,
    app: AppOption = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Show one execution: state, what it waits for, attempts, steps, signals, failure, result and timeline."""
    codecs = None if app is None else load_app(app).codecs

    async def work(engine: Engine) -> None:
        target = await resolve(engine, execution)
        found = await engine.read_execution(target)
        if found is None:
            raise await missing(engine, target)
        seen = _Seen(
            execution=found,
            membership=await _membership(engine, found),
            attempts=await engine.list_attempts(target),
            steps=await engine.read_steps([target], all_generations=True),
            suspension=await engine.read_suspension(target),
            waitpoints=await _waiting.client_of(engine).waitpoints_of(target),
            signals=await _signals(engine, target, None if json else _SIGNALS),
            events=await engine.list_events(target) if timeline else None,
            context=await engine.read_execution_context(target) if payloads else None,
            result=await engine.read_result(target) if payloads else None,
            payloads=payloads,
            codecs=codecs,
        )
        if json:
            _output.document(_as_json(seen))
        else:
            _show(seen)

    ask(dsn, work)


class Upstream(Struct, frozen=True):
    """A member that another one comes after, and that has not succeeded."""

    execution_id: str
    node: str
    state: State


class Membership(Struct, frozen=True, kw_only=True):
    """Where an execution stands in its flow. `waits_for` is empty once it waits for no other member."""

    flow_id: FlowId
    name: str
    node: str
    policy: EdgeGroupPolicy | None
    dependencies: int
    waits_for: tuple[Upstream, ...]


async def _membership(engine: Engine, found: Execution) -> Membership | None:
    """Its flow and node, and the upstreams that keep it waiting."""
    flow = None if found.flow_id is None else await engine.describe_flow(found.flow_id)
    if flow is None:
        return None
    members = {one.execution_id: one for one in await engine.list_flow_members(flow.flow_id)}
    group = next((one for one in flow.edge_groups if one.downstream_execution_id == found.execution_id), None)
    waits_for: list[Upstream] = []
    if group is not None and group.group_state is GroupState.PENDING and not found.public_state.is_terminal:
        edges = await engine.list_edges(flow.flow_id, incoming=found.execution_id)
        above = {edge.upstream_execution_id for edge in edges if edge.edge_state == "applied"}
        waits_for += [
            Upstream(one, member.name, member.state)
            for one, member in members.items()
            if one in above and member.state is not State.COMPLETED
        ]
    own = members.get(found.execution_id)
    return Membership(
        flow_id=flow.flow_id,
        name=flow.flow_kind,
        node="" if own is None else own.name,
        policy=None if group is None else group.policy,
        dependencies=0 if group is None else group.total_deps,
        waits_for=tuple(waits_for),
    )


async def _signals(engine: Engine, target: ExecutionId, most: int | None) -> deque[RecordedSignal]:
    found: deque[RecordedSignal] = deque(maxlen=most)
    after: int | None = 0
    while after is not None:
        page = await engine.read_signals(target, after=after, limit=1000)
        found.extend(page.items)
        after = page.next_cursor
    return found


@dataclass(frozen=True)
class _Seen:
    """What was read about the execution, as far as it was asked for."""

    execution: Execution
    membership: Membership | None
    attempts: list[Attempt]
    steps: list[Step]
    suspension: Suspension | None
    waitpoints: list[PendingWaitpoint]
    signals: deque[RecordedSignal]
    events: list[Event] | None
    context: ExecutionContext | None
    result: Result | None
    payloads: bool
    codecs: Codecs | None


def _as_json(seen: _Seen) -> dict[str, Any]:
    remembered = []
    for step in seen.steps:
        fields = _output.to_json(step)
        del fields["execution_id"], fields["result"]
        if seen.payloads and step.kind == "wait":
            fields["result"] = _waited_for(step, seen.codecs)
        elif seen.payloads:
            fields["result"] = _output.payload(step.result, step.encoding, seen.codecs)
        remembered.append(fields)
    received = []
    for signal in seen.signals:
        fields = _output.to_json(signal)
        del fields["payload"]
        if seen.payloads:
            fields["payload"] = _output.payload(signal.payload, signal.payload_encoding, seen.codecs)
        received.append(fields)
    document: dict[str, Any] = {
        "execution": seen.execution,
        "flow": seen.membership,
        "attempts": seen.attempts,
        "steps": remembered,
        "suspension": seen.suspension,
        "waitpoints": seen.waitpoints,
        "signals": received,
    }
    if seen.events is not None:
        document["events"] = seen.events
    if seen.payloads:
        context, result = seen.context, seen.result
        document["input"] = context and _output.payload(context.input_payload, context.payload_encoding, seen.codecs)
        document["result"] = result and _output.payload(result.payload, result.encoding, seen.codecs)
    return document


def _show(seen: _Seen) -> None:
    found = seen.execution
    _show_facts(found, seen.membership)
    _show_wait(seen)
    if found.failure_reason:
        _output.heading(f"Failure ({found.failure_category or 'no category'})")
        _output.block(found.failure_reason)
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
                    _outcome(one),
                )
                for one in seen.attempts
            ],
        )
    _show_steps(seen)
    _show_signals(seen)
    if seen.context is not None and seen.context.input_payload:
        _output.heading("Input")
        _output.block(_text(seen.context.input_payload, seen.context.payload_encoding, seen.codecs))
    if seen.result is not None:
        _output.heading("Result")
        _output.block(_text(seen.result.payload, seen.result.encoding, seen.codecs))
    if seen.events is not None:
        _output.heading("Timeline")
        _output.table(
            ["WHEN", "AFTER", "WHAT", "DETAIL"],
            [(at, at - found.created_at, what, detail) for at, what, detail in _timeline(seen, seen.events)],
        )


def _show_facts(found: Execution, membership: Membership | None) -> None:
    lease = found.current_lease or found.lost_lease
    reason = found.blocking_reason.value if found.blocking_reason else None
    if reason and found.blocking_detail:
        reason = f"{reason}: {found.blocking_detail}"
    percent = None if found.progress_pct is None else f"{found.progress_pct} %"
    counts = ((found.retry_count, "retries"), (found.lease_reclaim_count, "reclaims"), (found.replay_count, "replays"))
    _output.pairs(
        [
            ("id", found.execution_id),
            ("kind", found.execution_kind),
            ("state", found.public_state),
            ("because", reason),
            ("lane", found.lane_id),
            ("namespace", found.namespace),
            ("flow", found.flow_id if membership is None else f"{found.flow_id} {membership.name}".rstrip()),
            ("node", membership and membership.node),
            ("waits for", membership and _upstreams(membership)),
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
            ("counted", ", ".join(f"{count} {word}" for count, word in counts if count)),
            ("cancelled by", found.cancelled_by),
            ("reason", found.cancellation_reason),
        ]
    )


def _upstreams(membership: Membership) -> str:
    """The members that it waits for, in a line."""
    from flowfabric.drawing.labels import join_words  # noqa: PLC0415

    names = [f"{one.node or one.execution_id} ({one.state})" for one in membership.waits_for[:_UPSTREAMS]]
    if not names:
        return ""
    more = len(membership.waits_for) - len(names)
    join = join_words(membership.policy, membership.dependencies)
    return f"{join + ': ' if join else ''}{', '.join(names)}" + (f" and {more:,} more" if more else "")


def _show_wait(seen: _Seen) -> None:
    """What it waits for now, and the waitpoints where a signal would arrive."""
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


def _show_signals(seen: _Seen) -> None:
    if not seen.signals:
        return
    _output.heading(f"Signals, the last {_SIGNALS}" if len(seen.signals) == seen.signals.maxlen else "Signals")
    _output.table(
        ["WHEN", "NAME", "KEY", "FROM", "EFFECT", *["PAYLOAD"] * seen.payloads],
        [
            [
                one.accepted_at,
                one.signal_name,
                one.waitpoint_key,
                _waiting.source(one),
                _effect(one),
                *[_shortened(_text(one.payload, one.payload_encoding, seen.codecs))] * seen.payloads,
            ]
            for one in seen.signals
        ],
    )


def _effect(signal: RecordedSignal) -> str:
    """What a signal did; why, where it could have done more."""
    if signal.observed_effect == "appended_to_waitpoint":
        return f"{signal.observed_effect} ({signal.match_detail})"
    return signal.observed_effect


def _outcome(attempt: Attempt) -> str:
    words = [attempt.end_disposition or "", _output.failure_line(attempt.failure_reason)]
    if attempt.attempt_type == "replay":
        words += [
            attempt.replay_reason or "",
            f"by {attempt.replay_requested_by}" if attempt.replay_requested_by else "",
        ]
    return ": ".join(word for word in words if word)


def _show_steps(seen: _Seen) -> None:
    if not seen.steps:
        return
    _output.heading("Steps")
    rows = []
    for step in seen.steps:
        what = "failed" if step.error else "done"
        if step.kind == "wait" and not step.error:
            # Beside what came of it stands how it ended, in place of an encoding.
            what = step.encoding or "waiting"
            value = ", ".join(str(one["name"]) for one in _waited_for(step, None))
        elif step.error:
            value = f"{step.error.get('type', '')}: {_output.first_line(str(step.error.get('message', '')))}"
        elif step.kind == "submit":
            value = "" if step.child_id is None else str(step.child_id)  # none of a flow
        elif step.kind in ("now", "sleep"):
            value = _output.when(step.at)
        elif not seen.payloads:
            value = ""
        else:
            value = _shortened(_text(step.result, step.encoding, seen.codecs))
        name = step.name if step.n == 0 else f"{step.name} #{step.n + 1}"
        seconds = None if step.seconds is None else _output.seconds(step.seconds)
        rows.append((name, step.kind, what, step.attempt_index + 1, step.recorded_at, seconds, value))
    _output.table(["STEP", "KIND", "STATE", "ATTEMPT", "RECORDED", "TOOK", "RESULT"], rows)


def _waited_for(step: Step, codecs: Codecs | None) -> list[dict[str, Any]]:
    """The signals that ended a wait, as its step remembers them."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(ValueError):
        found = _json.loads(step.result or b"[]")
    for one in found:
        if one["payload"] is not None:
            data = base64.b64decode(one["payload"])
            one["payload"] = _output.payload(data, one["payload_encoding"], codecs)
    return found


def _text(data: bytes | None, encoding: str | None, codecs: Codecs | None) -> str:
    """A payload for people."""
    if data is None:
        return ""
    value = _output.payload(data, encoding, codecs)
    if isinstance(value, dict) and list(value) == ["base64"]:
        return f"({len(data)} bytes{f' of {encoding}' if encoding else ''})"
    return value if isinstance(value, str) else _json.dumps(value, ensure_ascii=False)


def _shortened(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _timeline(seen: _Seen, events: list[Event]) -> list[tuple[Any, str, str]]:
    """What happened, renewals of one lease in one line."""
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
    if event.lease_type == "revoked" and event.reason == "suspend":
        return "suspended"
    return f"lease {event.lease_type}"


def _signalled(event: Event, signals: dict[str, RecordedSignal]) -> str:
    """A signal with what it did; of one that is not kept only who sent it is known."""
    details = event.details or {}
    one = signals.get(str(details.get("signal_id")))
    who = details.get("source_identity")
    if one is None:
        words = f"from {who}" if who else ""
    else:
        words = f"{one.signal_name} at {one.waitpoint_key} from {_waiting.source(one)}"
    return f"{words}: {event.signal_effect}" if words else str(event.signal_effect)


# Reasons of a lease's end that say no more than the outcome beside them.
_ENDINGS = frozenset(("completed", "failed_terminal", "cancelled", "expired"))


def _detail(event: Event) -> str:
    if event.lease_type == "revoked" and event.reason == "suspend":
        return ""
    words = []
    if event.attempt_index is not None and event.lease_type in ("acquired", "reclaimed"):
        words.append(f"attempt {event.attempt_index + 1}")
    if event.worker_instance_id and event.lease_type != "revoked":
        words.append(f"by {event.worker_instance_id}")
    if event.reason and event.reason not in _ENDINGS:
        words.append(_output.first_line(event.reason))
    if event.revoked_by and not event.outcome:
        words.append(f"by {event.revoked_by}")
    for key, value in (event.details or {}).items():
        words.append(f"{key} {value}")
    return ", ".join(words)
