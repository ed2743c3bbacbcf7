"""Signals that arrive over HTTP: checked against the schema of the wait, and delivered."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec

from flowfabric.bridges.answers import deliver_checked
from flowfabric.contracts.codecs import CannotDecode, Codecs
from flowfabric.contracts.waits import encode_payload
from flowfabric.engine.signals import SignalFields
from flowfabric.errors import InvalidInput, PayloadRefused, ValidationFailed
from flowfabric.server.call import Call
from flowfabric.server.members import Payload
from flowfabric.values.ids import ExecutionId, mint_uuid
from flowfabric.values.signal import Accepted, DuplicateSignal

# The same for every signal of a key: a key that could choose its type would count as several sources.
SOURCE_TYPE: Final = "operator"
_PLAIN: Final = Codecs()
_MOST: Final = 64 * 1024  # bytes of a payload that can be stored
_MOST_OPENED: Final = 1024 * 1024  # and of what the codecs make of one that was given as bytes
_UNREADABLE: Final = b"\0"  # not JSON: it fits no type that a task waits for


async def send(
    call: Call,
    target: ExecutionId,
    key: str | None,
    value: Any,
    given: Payload | None = None,
    *,
    token: tuple[UUID, str] | None = None,
    **fields: Any,
) -> Accepted | DuplicateSignal:
    """Deliver a signal of the caller to the waitpoint with this key, or to one with its token; `fields` are the others.

    The payload is a JSON value, or the bytes `given`. `PayloadRefused` if it does not fit what the task waits for: then
    nothing is recorded.
    """
    engine = call.engine
    codecs = call.service.codecs or _PLAIN
    problem: str | None = None
    if given is None:
        plain, payload, encoding = encode_payload(value, codecs, target)
    elif value is not None:
        raise InvalidInput("given with payload", field="input", allowed="one of them")
    else:
        payload, named = given.read()
        plain, problem = await call.service.opening.run(len(payload), lambda: _opened(payload, named, codecs, target))
        encoding = "json" if named is None else named
    signal: SignalFields = {
        **fields,  # type: ignore[typeddict-item]  # checked by the engine
        "payload": payload,
        "payload_encoding": encoding,
        "source_type": SOURCE_TYPE,
        "source_identity": call.caller.name,
    }
    if signal.get("signal_id") is None:
        signal["signal_id"] = mint_uuid()  # the same in the second delivery
    try:
        if token is not None:
            waitpoint_id, text = token
            return await deliver_checked(
                lambda checked: engine.try_deliver(target, waitpoint_id, text, checked=checked, **signal),
                plain,
                key=f"callback {signal['signal_name']}",
                execution_id=target,
            )
        return await deliver_checked(
            lambda checked: engine.try_signal(target, key, checked=checked, **signal),
            plain,
            key=f"signal {key}",
            execution_id=target,
        )
    except PayloadRefused as error:
        if given is None:
            raise
        if problem is None:
            place = error.field.removeprefix("payload").removeprefix(".")
            problem = f"{place}: {error.problem}" if place else error.problem
        raise PayloadRefused("input", problem, error.allowed, execution_id=target) from None


def _opened(data: bytes, encoding: str | None, codecs: Codecs, target: ExecutionId) -> tuple[bytes, str | None]:
    """Bytes as the task reads them, or bytes that it cannot read and why. They are stored as they were given."""
    _check_length(data, _MOST)
    try:
        plain = codecs.open(data, encoding, target, max_length=_MOST_OPENED)
    except CannotDecode as error:
        return _UNREADABLE, error.problem
    _check_length(plain, _MOST_OPENED, " when opened")
    try:
        msgspec.json.decode(plain)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise InvalidInput(
            "not JSON", field="input", allowed="JSON, or an encoding that says what the bytes are"
        ) from None
    return plain, None


def _check_length(data: bytes, most: int, when: str = "") -> None:
    if len(data) > most:
        raise ValidationFailed("payload_too_large", f"{len(data)} bytes{when}, {most} are allowed")
