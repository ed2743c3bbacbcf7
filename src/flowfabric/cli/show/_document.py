"""An execution as JSON, for programs."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import TYPE_CHECKING, Any
from uuid import UUID

from flowfabric.contracts import json_form

if TYPE_CHECKING:
    from flowfabric.cli.show._seen import Seen
    from flowfabric.values.step import Step


_RESULT_OF = "result "  # how the name of a step begins that waited for an execution


def as_json(seen: Seen) -> dict[str, Any]:
    remembered = []
    for step in seen.steps:
        fields = json_form.to_json(step)
        del fields["execution_id"], fields["result"]
        if seen.payloads and step.kind == "wait":
            fields["result"] = waited_for(seen, step)
        elif seen.payloads and step.kind == "result":
            fields["result"] = ended_with(seen, step)
        elif seen.payloads:
            fields["result"] = _payload(seen, step.result, step.encoding)
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
    if seen.events is not None:
        document["events"] = seen.events
    if seen.payloads:
        context, result = seen.context, seen.result
        document["input"] = context and _payload(seen, context.input_payload, context.payload_encoding)
        document["result"] = result and _payload(seen, result.payload, result.encoding)
    return document


def waited_for(seen: Seen, step: Step) -> list[dict[str, Any]]:
    """The signals that ended a wait, as recorded in its step."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(ValueError):
        found = json.loads(step.result or b"[]")
    for one in found:
        if one["payload"] is not None:
            data = base64.b64decode(one["payload"])
            one["payload"] = _payload(seen, data, one["payload_encoding"])
    return found


def ended_with(seen: Seen, step: Step) -> Any:
    """How the execution ended that a step waited for, with its result; None after a timeout."""
    stored = _payload(seen, step.result, step.encoding)
    if not isinstance(stored, dict) or "state" not in stored:
        return stored  # nothing, or sealed
    result = stored.get("result")
    if isinstance(result, str):
        child = UUID(step.name.removeprefix(_RESULT_OF))
        data = base64.b64decode(result)
        stored["result"] = json_form.payload_or_problem(data, stored.get("result_encoding"), seen.codecs, child)
    return stored


def _payload(seen: Seen, data: bytes | None, encoding: str | None) -> Any:
    return json_form.payload_or_problem(data, encoding, seen.codecs, seen.execution.execution_id)
