"""An execution as JSON, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowfabric.contracts import json_form

if TYPE_CHECKING:
    from flowfabric.cli.show._seen import Seen
    from flowfabric.values.event import Event


def as_json(seen: Seen, events: list[Event] | None) -> dict[str, Any]:
    remembered = []
    for step in seen.steps:
        fields = json_form.to_json(step)
        del fields["execution_id"], fields["result"]
        if seen.payloads:
            fields["result"] = json_form.step_result(step, seen.codecs)
        remembered.append(fields)
    received = []
    for signal in seen.signals:
        fields = json_form.to_json(signal)
        del fields["payload"]
        if seen.payloads:
            fields["payload"] = _payload(seen, signal.payload, signal.payload_encoding)
        received.append(fields)
    document: dict[str, Any] = {
        "execution": seen.execution,
        "flow": seen.membership,
        "children": seen.children,
        "attempts": seen.attempts,
        "steps": remembered,
        "frame_count": seen.frame_count,
        "suspension": seen.suspension,
        "waitpoints": seen.waitpoints,
        "signals": received,
        "unserved": seen.unserved,
        "on_failure": seen.hook,
        "held_by": seen.held,
        "limits": seen.limits,
    }
    if events is not None:
        document["events"] = events
    if seen.payloads:
        context, result = seen.context, seen.result
        document["input"] = context and _payload(seen, context.input_payload, context.payload_encoding)
        document["result"] = result and _payload(seen, result.payload, result.encoding)
    return document


def _payload(seen: Seen, data: bytes | None, encoding: str | None) -> Any:
    return json_form.payload_or_problem(data, encoding, seen.codecs, seen.execution.execution_id)
