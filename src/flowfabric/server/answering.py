"""Signals that arrive over HTTP: checked against the schema of the wait, and delivered."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from flowfabric.bridges.answers import deliver_checked
from flowfabric.contracts.codecs import CannotDecode, Codecs
from flowfabric.contracts.waits import encode_payload
from flowfabric.engine.signals import SignalFields
from flowfabric.errors import InvalidInput, PayloadRefused
from flowfabric.server.call import Call
from flowfabric.server.members import Payload
from flowfabric.values.ids import ExecutionId, mint_uuid
from flowfabric.values.signal import Accepted, DuplicateSignal

# The same for every signal of a key: one that may choose its type would count as several sources.
SOURCE_TYPE: Final = "operator"
_PLAIN: Final = Codecs()
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
    if given is None:
        plain, payload, encoding = encode_payload(value, codecs, target)
    elif value is not None:
        raise InvalidInput("given with payload", field="input", allowed="one of them")
    else:
        plain, payload, encoding = _read(given, codecs, target)
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
        problem = f"{error.field}: {error.problem}"
        raise PayloadRefused("input", problem, error.allowed, execution_id=target) from None


def _read(given: Payload, codecs: Codecs, target: ExecutionId) -> tuple[bytes, bytes, str]:
    """Bytes as the task reads them, as they are stored, and their encoding. They are stored as they were given."""
    data, encoding = given.read()
    try:
        plain = codecs.open(data, encoding, target)
    except CannotDecode:
        plain = _UNREADABLE
    return plain, data, "json" if encoding is None else encoding
