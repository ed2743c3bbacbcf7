"""An execution as JSON, for programs."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import TYPE_CHECKING, Any

from flowfabric.cli import _output

if TYPE_CHECKING:
    from flowfabric.cli.show._seen import Seen
    from flowfabric.contracts.codecs import Codecs
    from flowfabric.values.step import Step


def as_json(seen: Seen) -> dict[str, Any]:
    remembered = []
    for step in seen.steps:
        fields = _output.to_json(step)
        del fields["execution_id"], fields["result"]
        if seen.payloads and step.kind == "wait":
            fields["result"] = waited_for(step, seen.codecs)
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


def waited_for(step: Step, codecs: Codecs | None) -> list[dict[str, Any]]:
    """The signals that ended a wait, as recorded in its step."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(ValueError):
        found = json.loads(step.result or b"[]")
    for one in found:
        if one["payload"] is not None:
            data = base64.b64decode(one["payload"])
            one["payload"] = _output.payload(data, one["payload_encoding"], codecs)
    return found
