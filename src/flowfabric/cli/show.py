"""`flowfabric show`: everything about one execution."""

from __future__ import annotations

import json as _json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask, missing, resolve
from flowfabric.cli._loading import AppOption, load_app
from flowfabric.cli._options import Dsn, Id, Json

if TYPE_CHECKING:
    from flowfabric.contracts import Codecs
    from flowfabric.engine import Engine
    from flowfabric.models import Attempt, Event, Execution, ExecutionContext, Result, Step


def show(
    execution: Id,
    payloads: Annotated[
        bool, typer.Option("--payload/--no-payload", help="With input, step results and result, or without.")
    ] = True,
    timeline: Annotated[
        bool, typer.Option("--timeline/--no-timeline", help="With what happened when, as far as the event log reaches.")
    ] = True,
    app: AppOption = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Show one execution: state, attempts, steps, failure, result and timeline."""
    codecs = None if app is None else load_app(app).codecs

    async def work(engine: Engine) -> None:
        target = await resolve(engine, execution)
        found = await engine.read_execution(target)
        if found is None:
            raise await missing(engine, target)
        seen = _Seen(
            execution=found,
            attempts=await engine.list_attempts(target),
            steps=await engine.read_steps([target], all_generations=True),
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


@dataclass(frozen=True)
class _Seen:
    """What was read about the execution, as far as it was asked for."""

    execution: Execution
    attempts: list[Attempt]
    steps: list[Step]
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
        if seen.payloads:
            fields["result"] = _output.payload(step.result, step.encoding, seen.codecs)
        remembered.append(fields)
    document: dict[str, Any] = {"execution": seen.execution, "attempts": seen.attempts, "steps": remembered}
    if seen.events is not None:
        document["events"] = seen.events
    if seen.payloads:
        context, result = seen.context, seen.result
        document["input"] = context and _output.payload(context.input_payload, context.payload_encoding, seen.codecs)
        document["result"] = result and _output.payload(result.payload, result.encoding, seen.codecs)
    return document


def _show(seen: _Seen) -> None:
    found = seen.execution
    _show_facts(found)
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
            [(at, at - found.created_at, what, detail) for at, what, detail in _timeline(found, seen.events)],
        )


def _show_facts(found: Execution) -> None:
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
            ("flow", found.flow_id),
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
        if step.error:
            value = f"{step.error.get('type', '')}: {_output.first_line(str(step.error.get('message', '')))}"
        elif step.kind == "submit":
            value = str(step.child_id)
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


def _timeline(found: Execution, events: list[Event]) -> list[tuple[Any, str, str]]:
    """What happened, renewals of one lease in one line."""
    lines: list[tuple[Any, str, str]] = [(found.created_at, "created", "")]
    renewals: list[Event] = []
    for event in events:
        if event.lease_type == "renewed":
            renewals.append(event)
            continue
        lines += _renewed(renewals)
        renewals = []
        lines.append((event.occurred_at, _what(event), _detail(event)))
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
    return f"lease {event.lease_type}"


# Reasons of a lease's end that say no more than the outcome beside them.
_ENDINGS = frozenset(("completed", "failed_terminal", "cancelled", "expired"))


def _detail(event: Event) -> str:
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
