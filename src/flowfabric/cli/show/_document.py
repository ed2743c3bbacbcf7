"""An execution as JSON, for programs."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import TYPE_CHECKING, Any

from flowfabric.cli import _output

if TYPE_CHECKING:
    from flowfabric.cli.show._seen import Seen
    from flowfabric.values.step import Step


def as_json(seen: Seen) -> dict[str, Any]:
    remembered = []
    for step in seen.steps:
        fields = _output.to_json(step)
        del fields["execution_id"], fields["result"]
        if seen.payloads and step.kind == "wait":
            fields["result"] = waited_for(seen, step)
        elif seen.payloads:
            fields["result"] = _payload(seen, step.result, step.encoding)
        remembered.append(fields)
    received = []
    for signal in seen.signals:
        fields = _output.to_json(signal)
        del fields["payload"]
        if seen.payloads:
            fields["payload"] = _payload(seen, signal.payload, signal.payload_encoding)
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


def _payload(seen: Seen, data: bytes | None, encoding: str | None) -> Any:
    return _output.payload(data, encoding, seen.codecs, seen.execution.execution_id)
