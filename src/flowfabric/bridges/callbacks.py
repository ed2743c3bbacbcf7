"""Web callbacks: verify the token, deliver the signal, and return the HTTP response.

The check here only rejects invalid tokens early. The engine verifies the token again and decides.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from flowfabric import settings
from flowfabric.bridges.answers import deliver_checked
from flowfabric.contracts.codecs import Codecs
from flowfabric.engine import Engine
from flowfabric.errors import FlowFabricError, InvalidInput, PayloadRefused, TransportError, ValidationFailed
from flowfabric.values.callback import parse_callback
from flowfabric.values.ids import ExecutionId
from flowfabric.values.signal import DuplicateSignal
from flowfabric.values.wait import WaitpointToken

MAX_BODY = 256 * 1024
_CLOSED = "answered already, or not open now: try again later"


def link_to(callback: str, public_url: str | None = None) -> str | None:
    """Return the link of a callback to `flowfabric server`; None if its public address is not known.

    `public_url`: by default that of the setting `FLOWFABRIC_PUBLIC_URL`.
    """
    base = settings.load().public_url if public_url is None else public_url.rstrip("/")
    return None if base is None else f"{base}/w/{callback}"


class UnknownWaitpoint(Exception):
    """There is no such waitpoint, or its execution has ended; HTTP 404."""


class TokenMismatch(Exception):
    """The token does not belong to the waitpoint; HTTP 401."""


class TriggeredResume(Struct, frozen=True):
    """The signal satisfied the condition: the execution resumes."""

    signal_id: UUID


class AcceptedSignal(Struct, frozen=True):
    """The signal is recorded; the execution still waits."""

    signal_id: UUID
    effect: str


class Received(Struct, frozen=True):
    """The response to a callback: the HTTP status, and a JSON body without secrets."""

    status: int
    outcome: str
    signal_id: UUID | None = None
    # Of a payload that does not fit, or another argument: where, what is wrong, and what would fit.
    field: str | None = None
    problem: str | None = None
    allowed: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        facts = {
            "signal_id": None if self.signal_id is None else str(self.signal_id),
            "field": self.field,
            "problem": self.problem,
            "allowed": self.allowed,
        }
        return {"outcome": self.outcome} | {name: value for name, value in facts.items() if value is not None}


async def verify_and_deliver(
    engine: Engine,
    execution_id: ExecutionId,
    waitpoint_id: UUID,
    presented_token: WaitpointToken | str,
    plain: bytes | None = None,
    **signal: Any,
) -> TriggeredResume | AcceptedSignal | DuplicateSignal:
    """Deliver a signal if the token is valid; `signal` holds the other arguments of `Engine.deliver_signal`.

    The payload must fit the type that the task waits for: otherwise `PayloadRefused`, and nothing is recorded. `plain`
    is the payload as JSON, if `payload` is encoded. Another callback with the same `signal_id` or `idempotency_key` is
    a duplicate, even after the waitpoint closed.
    """
    repeated = bool(signal.get("idempotency_key")) or signal.get("signal_id") is not None
    probed = await engine.probe_waitpoint(execution_id, waitpoint_id, presented_token)
    if probed == "mismatch":
        raise TokenMismatch
    if probed == "unknown" and not repeated:
        raise UnknownWaitpoint
    try:
        answer = await deliver_checked(
            lambda checked: engine.try_deliver(execution_id, waitpoint_id, presented_token, checked=checked, **signal),
            signal.get("payload") if plain is None else plain,
            key=f"callback {signal['signal_name']}",
            execution_id=execution_id,
        )
    except FlowFabricError as error:
        if probed == "unknown" and error.kind in ("waitpoint_closed", "target_not_signalable", "invalid_token"):
            raise UnknownWaitpoint from None
        raise
    if isinstance(answer, DuplicateSignal):
        return answer
    if answer.effect == "resume_condition_satisfied":
        return TriggeredResume(answer.signal_id)
    return AcceptedSignal(answer.signal_id, answer.effect)


async def receive(
    engine: Engine,
    callback: str,
    body: bytes = b"",
    *,
    name: str = "callback",
    source_type: str = "callback",
    source_identity: str = "",
    idempotency_key: str | None = None,
    codecs: Codecs | None = None,
) -> Received:
    """Handle a web callback; `callback` is the text of its link. Errors of the sender become a response.

    With `codecs` the body is encoded like the app's other payloads.
    """
    if len(body) > MAX_BODY:
        return Received(413, "too_large")
    try:
        parsed = parse_callback(callback)
    except InvalidInput:
        return Received(404, "unknown")
    try:
        msgspec.json.decode(body or b"null")
    except (msgspec.DecodeError, RecursionError):
        return Received(400, "not_json")
    payload, encoding = (body or None), None
    if payload is not None and codecs is not None:
        payload, encoding = codecs.seal(payload, parsed.execution_id)
    try:
        answer = await verify_and_deliver(
            engine,
            parsed.execution_id,
            parsed.waitpoint_id,
            parsed.token,
            signal_name=name,
            source_type=source_type,
            source_identity=source_identity,
            plain=body or None,
            payload=payload,
            payload_encoding=encoding or "json",
            idempotency_key=idempotency_key,
        )
    except UnknownWaitpoint:
        return Received(404, "unknown")
    except TokenMismatch:
        return Received(401, "unauthorized")
    except TransportError:
        raise
    except PayloadRefused as error:
        return Received(422, error.kind, field=error.field, problem=error.problem, allowed=error.allowed)
    except InvalidInput as error:
        field = "name" if error.field == "signal_name" else error.field
        return Received(400, error.kind, field=field, problem=error.problem, allowed=error.allowed)
    except ValidationFailed as error:
        return Received(
            401 if error.kind == "invalid_token" else 413 if error.kind == "payload_too_large" else 400, error.kind
        )
    except FlowFabricError as error:
        if error.family != "state":
            raise
        return Received(409, error.kind, problem=_CLOSED if error.kind == "waitpoint_closed" else None)
    match answer:
        case DuplicateSignal(existing):
            return Received(200, "duplicate", existing)
        case TriggeredResume(signal_id):
            return Received(200, "resumed", signal_id)
        case AcceptedSignal(signal_id):
            return Received(202, "accepted", signal_id)
