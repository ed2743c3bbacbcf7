"""Arguments that are results of other nodes of a flow: how they are stored, and filled in when the node starts.

A payload with such arguments is `{"given": {name: value}, "wanted": {name: place}}`. A place tells where a value
comes from: `["value", v]`, `["node", uuid]`, `["list", places]`, `["dict", {key: place}]`, `["first", uuids]`,
`["all", uuids]`, or `["settled", uuids]` for outcomes (`values.settled`) instead of results.
Results of nodes that did not succeed are left out of lists and dicts, and are null as single values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import msgspec

from flowfabric.client.failure import parse_failure
from flowfabric.contracts.codecs import CannotDecode, Codecs
from flowfabric.contracts.json_types import ENCODER
from flowfabric.values.attempt import Passed
from flowfabric.values.ids import ExecutionId
from flowfabric.values.settled import Cancelled, Expired, Failed, Settled, Skipped, Succeeded
from flowfabric.values.state import State

_ABSENT: Final = object()
_NULL: Final = msgspec.Raw(b"null")


class Stored(msgspec.Struct):
    """A payload with places."""

    given: dict[str, msgspec.Raw]
    wanted: dict[str, Any]


def write(given: Mapping[str, msgspec.Raw], wanted: Mapping[str, Any]) -> bytes:
    """The payload of a node."""
    return ENCODER.encode(Stored(dict(given), dict(wanted)))


def by_name(data: bytes, encoding: str | None) -> dict[str, Any] | None:
    """The arguments in a payload, by name; None if they are encoded, or some are results of other nodes."""
    if encoding is not None:
        return None
    found: Any = {}
    if data:
        with contextlib.suppress(msgspec.DecodeError):
            found = msgspec.json.decode(data)
    return found if isinstance(found, dict) and found.keys() != {"given", "wanted"} else None


def fill(data: bytes, inputs: Mapping[UUID, Passed], codecs: Codecs) -> bytes:
    """The arguments of the call as one JSON object, with the results of upstream nodes filled in."""
    try:
        stored = msgspec.json.decode(data, type=Stored)
    except msgspec.MsgspecError:
        raise CannotDecode("these are not the arguments of a node", what="arguments") from None
    arguments: dict[str, Any] = dict(stored.given)
    for name, place in stored.wanted.items():
        value = _value(place, inputs, codecs)
        arguments[name] = _NULL if value is _ABSENT else value
    return ENCODER.encode(arguments)


def _value(place: Any, inputs: Mapping[UUID, Passed], codecs: Codecs) -> Any:
    match place:
        case ["value", value]:
            return value
        case ["node", str(uuid)]:
            return _result(_uuid(uuid), inputs, codecs)
        case ["list", list(places)]:
            return [value for one in places if (value := _value(one, inputs, codecs)) is not _ABSENT]
        case ["dict", dict(places)]:
            found = ((key, _value(one, inputs, codecs)) for key, one in places.items())
            return {key: value for key, value in found if value is not _ABSENT}
        case ["all", list(uuids)]:
            results = (_result(_uuid(one), inputs, codecs) for one in uuids)
            return [value for value in results if value is not _ABSENT]
        case ["first", list(uuids)]:
            results = (_result(_uuid(one), inputs, codecs) for one in uuids)
            return next((value for value in results if value is not _ABSENT), _ABSENT)
        case ["settled", list(uuids)]:
            return [_outcome(_uuid(one), inputs, codecs) for one in uuids]
    raise _unknown()


def _outcome(upstream: UUID, inputs: Mapping[UUID, Passed], codecs: Codecs) -> Settled[Any]:
    passed = inputs.get(upstream)
    if passed is None:
        raise CannotDecode("the outcome of an upstream node is missing", what="arguments")
    if passed.state is State.COMPLETED:
        return Succeeded(_result(upstream, inputs, codecs))
    reason = (passed.result or b"").decode()
    match passed.state:
        case State.CANCELLED:
            return Cancelled(reason)
        case State.SKIPPED:
            return Skipped()
        case State.FAILED | State.EXPIRED as state:
            error_type, message, _ = parse_failure(codecs.open_text(reason, ExecutionId(upstream)))
            kind = Failed if state is State.FAILED else Expired
            return kind(message, error_type, passed.encoding)
    raise _replayed()


def _replayed() -> CannotDecode:
    return CannotDecode("the result of an upstream node is gone, because that node was replayed", what="arguments")


def _uuid(text: Any) -> UUID:
    try:
        return UUID(text)
    except (ValueError, AttributeError, TypeError):
        raise _unknown() from None


def _unknown() -> CannotDecode:
    return CannotDecode("refers to an unknown place", what="arguments")


def _result(upstream: UUID, inputs: Mapping[UUID, Passed], codecs: Codecs) -> Any:
    passed = inputs.get(upstream)
    if passed is None or (passed.state.is_terminal and passed.state is not State.COMPLETED):
        return _ABSENT
    if passed.state is not State.COMPLETED:
        raise _replayed()
    return _NULL if passed.result is None else msgspec.Raw(codecs.open(passed.result, passed.encoding, upstream))
