"""Records and payloads as JSON: the one form of the command line, HTTP and exports.

Instants are RFC 3339 in UTC, durations are seconds under a name that ends in `_seconds`, payloads are JSON values, or
base64 where they are none.
"""

from __future__ import annotations

import base64
import contextlib
import json
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin
from uuid import UUID

import msgspec

from flowfabric.contracts.policy_form import shown_policy
from flowfabric.values.event import EventCursor
from flowfabric.values.hooks import FACTS
from flowfabric.values.joins import AllOf, AllSettled, AnyOf, Quorum, policy_to_json

if TYPE_CHECKING:
    from flowfabric.contracts.codecs import Codecs
    from flowfabric.values.step import Step

# A payload nested more deeply than this is shown as text.
_MOST_LEVELS = 100
_LONG: Final = 4096  # bytes of JSON: from here on, reading it takes longer than checking it
_RESULT_OF: Final = "result "  # how the name of a step begins that waited for an execution
_AS_STORED: Final = frozenset(("policy", "options", "timing"))  # members that hold what the database has
_ENCODER: Final = msgspec.json.Encoder()
_DIRECT: Final = frozenset((str, int, float, bool, NoneType, msgspec.UnsetType, datetime, UUID, Any))
_OWN_FORM: Final = frozenset((AllOf, AnyOf, Quorum, AllSettled, EventCursor))


def to_json(value: Any) -> Any:
    """Our records and values as JSON: times in ISO 8601, durations in seconds under a name that ends in `_seconds`."""
    match value:
        case AllOf() | AnyOf() | Quorum() | AllSettled():
            return policy_to_json(value)
        case EventCursor():
            return str(value)
        case msgspec.Struct():
            return _tag(type(value)) | {
                shown: to_json(_member(value, name)) for name, shown, _ in _members(type(value))
            }
        case datetime():
            return instant(value)
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


def instant(value: datetime) -> str:
    """A time in RFC 3339, in UTC."""
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


def encode(value: Any) -> bytes:
    """The same as bytes of JSON."""
    return _ENCODER.encode(_for_encoder(value))


def _for_encoder(value: Any) -> Any:
    """The value with what the encoder would write in another form in ours."""
    cls: Any = type(value)
    if is_direct(cls):
        return value
    if issubclass(cls, msgspec.Struct) and cls not in _OWN_FORM:
        return _tag(cls) | {
            shown: getattr(value, name) if direct else _for_encoder(_member(value, name))
            for name, shown, direct in _members(cls)
        }
    if cls is dict:
        return {str(key): _for_encoder(item) for key, item in value.items()}
    if cls is list or cls is tuple:
        return [_for_encoder(item) for item in value]
    return to_json(value)


@cache
def is_direct(cls: Any) -> bool:
    """Whether the encoder writes every value of a type in our form by itself, which is faster."""
    while hasattr(cls, "__supertype__"):
        cls = cls.__supertype__
    if cls in _DIRECT or get_origin(cls) is Literal or (isinstance(cls, type) and issubclass(cls, Enum)):
        return True
    if isinstance(cls, type) and issubclass(cls, msgspec.Struct):
        return cls not in _OWN_FORM and all(direct and name in _types(cls) for name, _, direct in _members(cls))
    parts = get_args(cls)
    return bool(parts) and all(is_direct(one) for one in parts if one is not ...)


def _tag(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """The member by which a record of several says which one it is, if it has one."""
    config = cls.__struct_config__
    return {} if config.tag_field is None else {config.tag_field: config.tag}


@cache
def _types(cls: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(cls)}


@cache
def _members(cls: type[msgspec.Struct]) -> tuple[tuple[str, str, bool], ...]:
    """The members of a record: its attribute, its name in JSON, and whether the encoder writes it by itself.

    A field that has the name of a property in JSON is shown as that property.
    """
    return tuple(
        (name, json_name(name, one.type), name not in _AS_STORED and is_direct(one.type))
        for one in msgspec.structs.fields(cls)
        for name in [one.encode_name if hasattr(cls, one.encode_name) else one.name]
    )


def _member(value: msgspec.Struct, name: str) -> Any:
    found = getattr(value, name)
    return shown_policy(found) if name in _AS_STORED else found


def json_name(name: str, annotation: Any) -> str:
    """The name of a field in JSON."""
    return f"{name}_seconds" if _is_duration(annotation) else name


def _is_duration(annotation: Any) -> bool:
    return annotation is timedelta or timedelta in getattr(annotation, "__args__", ())


def _bytes(data: bytes, encoding: str | None = None) -> Any:
    try:
        return data.decode()
    except UnicodeDecodeError:
        shown = {"base64": base64.b64encode(data).decode()}
        return {**shown, "encoding": encoding} if encoding else shown


def payload(
    data: bytes | None, encoding: str | None, codecs: Codecs | None, execution_id: UUID | None, *, raw: bool = False
) -> Any:
    """A stored payload or result as JSON: its value if it is JSON, its text if it is text, else base64.

    With `raw` long JSON is not read, only checked, and returned as `msgspec.Raw` for the encoder to write.
    """
    if data is None or encoding == "redacted":
        return None
    if encoding == FACTS:
        encoding = None  # the engine wrote it, as JSON
    elif codecs is not None:
        data, encoding = codecs.open(data, encoding, execution_id), None
    if encoding in (None, "", "json"):
        if raw and len(data) > _LONG and (unread := _unread(data)) is not None:
            return unread
        # Not NaN, which JSON does not have, nor half of a pair of surrogates, nor anything nested too deeply to be
        # written again.
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(data)
            if _is_shallow(value):
                json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
                return value
    return _bytes(data, encoding)


def _unread(data: bytes) -> msgspec.Raw | None:
    """JSON as it is. None if it is not JSON, or has line breaks, which lines of JSON must not have."""
    if b"\n" in data or b"\r" in data:
        return None
    try:
        data.decode()  # the decoder does not look into texts
        return msgspec.json.decode(data, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return None


def payload_or_problem(
    data: bytes | None, encoding: str | None, codecs: Codecs | None, execution_id: UUID | None, *, raw: bool = False
) -> Any:
    """The same; data that the app's codecs cannot read is base64 with the problem."""
    from flowfabric.contracts.codecs import CannotDecode  # noqa: PLC0415

    try:
        return payload(data, encoding, codecs, execution_id, raw=raw)
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


def step_result(step: Step, codecs: Codecs | None, *, raw: bool = False) -> Any:
    """The recorded data: the value of a step, the signals of a wait, the end of the execution it waited for."""
    if step.kind == "wait":
        return _waited_for(step, codecs)
    raw = raw and step.kind == "step"
    stored = payload_or_problem(step.result, step.encoding, codecs, step.execution_id, raw=raw)
    if step.kind != "result" or not isinstance(stored, dict) or "state" not in stored:
        return stored
    if isinstance(result := stored.get("result"), str):
        child = UUID(step.name.removeprefix(_RESULT_OF))
        stored["result"] = payload_or_problem(base64.b64decode(result), stored.get("result_encoding"), codecs, child)
    return stored


def _waited_for(step: Step, codecs: Codecs | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with contextlib.suppress(ValueError):
        found = json.loads(step.result or b"[]")
    for one in found:
        if one["payload"] is not None:
            data = base64.b64decode(one["payload"])
            one["payload"] = payload_or_problem(data, one["payload_encoding"], codecs, step.execution_id)
    return found
