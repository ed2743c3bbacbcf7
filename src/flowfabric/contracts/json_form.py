"""Records and payloads as JSON: the one form of the command line, HTTP and exports.

Instants are RFC 3339 in UTC, durations are seconds under a name that ends in `_seconds`, payloads are JSON values, or
base64 where they are none.
"""

from __future__ import annotations

import base64
import contextlib
import json
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from flowfabric.values.hooks import FACTS
from flowfabric.values.joins import AllOf, AllSettled, AnyOf, Quorum, policy_to_json

if TYPE_CHECKING:
    from flowfabric.contracts.codecs import Codecs

# A payload nested more deeply than this is shown as text.
_MOST_LEVELS = 100


def to_json(value: Any) -> Any:
    """Our records and values as JSON: times in ISO 8601, durations in seconds under a name that ends in `_seconds`."""
    match value:
        case AllOf() | AnyOf() | Quorum() | AllSettled():
            return policy_to_json(value)
        case msgspec.Struct():
            return {
                name + ("_seconds" if _is_duration(field) else ""): to_json(getattr(value, name))
                for name, field in _fields(type(value)).items()
            }
        case datetime():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Enum():
            return value.value
        case UUID() | Path():
            return str(value)
        case bytes():
            return _bytes(value)
        case dict():
            return {str(key): to_json(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [to_json(item) for item in value]
        case _:
            return value


def _fields(cls: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(cls)}


def _is_duration(annotation: Any) -> bool:
    return annotation is timedelta or timedelta in getattr(annotation, "__args__", ())


def _bytes(data: bytes) -> Any:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def payload(data: bytes | None, encoding: str | None, codecs: Codecs | None, execution_id: UUID) -> Any:
    """A stored payload or result as JSON: its value if it is JSON, its text if it is text, else base64."""
    if data is None or encoding == "redacted":
        return None
    if encoding == FACTS:
        encoding = None  # the engine wrote it, as JSON
    elif codecs is not None:
        data, encoding = codecs.open(data, encoding, execution_id), None
    if encoding in (None, "", "json"):
        # Not NaN, which JSON does not have, and nothing nested too deeply to be written again.
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(data)
            if _is_shallow(value):
                json.dumps(value, allow_nan=False)
                return value
    return _bytes(data)


def payload_or_problem(data: bytes | None, encoding: str | None, codecs: Codecs | None, execution_id: UUID) -> Any:
    """The same; data that the app's codecs cannot read is base64 with the problem."""
    from flowfabric.contracts.codecs import CannotDecode  # noqa: PLC0415

    try:
        return payload(data, encoding, codecs, execution_id)
    except CannotDecode as error:
        return {"base64": base64.b64encode(data or b"").decode(), "problem": error.problem}


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return True
    return False
