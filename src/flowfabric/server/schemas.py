"""JSON schemas of records, in the JSON form: of requests as they are read, of answers as they are written.

Made from the types by the same rules as `contracts.json_form`: durations are numbers of seconds, bytes a text or
base64, a record of several has the member `status`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum
from types import NoneType
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec
from msgspec import Meta, Struct, UnsetType
from msgspec.structs import FieldInfo, fields

from flowfabric.contracts.json_form import json_name
from flowfabric.server.answers import is_record, snake_case, union_members
from flowfabric.values.event import EventCursor
from flowfabric.values.joins import AllOf, AllSettled, AnyOf, Quorum

Schema = dict[str, Any]
_PLAIN: Final[Mapping[Any, Schema]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    NoneType: {"type": "null"},
    datetime: {"type": "string", "format": "date-time"},
    timedelta: {"type": "number", "description": "In seconds."},
    UUID: {"type": "string", "format": "uuid"},
    EventCursor: {"type": "string", "description": "A position in the event log."},
    Any: {},
    msgspec.Raw: {},
    bytes: {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "required": ["base64"], "properties": {"base64": {"type": "string"}}},
        ]
    },
    **{one: {"type": "object"} for one in (AllOf, AnyOf, Quorum, AllSettled, dict)},
    list: {"type": "array"},
}
_BOUNDS: Final = {
    "gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum", "multiple_of": "multipleOf",
    "pattern": "pattern",
}  # fmt: skip


class Schemas:
    """Schemas of types, with those of records collected as components."""

    def __init__(self, ref: str = "#/components/schemas/{}") -> None:
        self._ref = ref
        self.components: dict[str, Schema] = {}
        self._names: dict[tuple[type, bool, str | None], str] = {}

    def of(self, tp: Any, *, answer: bool) -> Schema:
        """The schema of a type: as an `answer` writes it, or as a request has to give it."""
        while hasattr(tp, "__supertype__"):
            tp = tp.__supertype__
        if tp in _PLAIN:
            return dict(_PLAIN[tp])
        origin, parts = get_origin(tp), get_args(tp)
        if origin is Annotated:
            return self.of(parts[0], answer=answer) | _bounds(parts[0], parts[1:])
        if origin is Literal:
            return {"enum": list(parts)}
        if isinstance(tp, type) and issubclass(tp, Enum):
            return {"type": "string", "enum": [one.value for one in tp]}
        if is_record(tp):
            return {"$ref": self._ref.format(self._record(tp, answer=answer))}
        if len(members := union_members(tp)) > 1:
            return self._union(members, answer=answer)
        if origin in (list, tuple, set, frozenset, Sequence) or (
            inspect.isclass(origin) and issubclass(origin, Sequence)
        ):
            items = parts[0] if parts else Any
            if origin is tuple and (len(parts) != 2 or parts[1] is not ...):
                return {"type": "array", "prefixItems": [self.of(one, answer=answer) for one in parts],
                        "minItems": len(parts), "maxItems": len(parts)}  # fmt: skip
            return {"type": "array", "items": self.of(items, answer=answer)}
        if inspect.isclass(origin) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(parts[1], answer=answer)}
        raise TypeError(f"no schema for {tp!r}")

    def tagged(self, record: type[Struct]) -> Schema:
        """The schema of an answer that says by `status` which of several records it is."""
        return {"$ref": self._ref.format(self._record(record, answer=True, status=snake_case(record.__name__)))}

    def _union(self, members: Sequence[Any], *, answer: bool) -> Schema:
        found = [self.of(one, answer=answer) for one in members if one is not UnsetType]
        if len(found) == 1:
            return found[0]
        if all(one.keys() == {"type"} for one in found):
            types = list(dict.fromkeys(one["type"] for one in found))
            return {"type": types if len(types) > 1 else types[0]}
        return {"anyOf": found}

    def _record(self, record: type[Struct], *, answer: bool, status: str | None = None) -> str:
        key = (record, answer, status)
        if key not in self._names:
            name = _name(record)
            while name in self.components:
                name += "_"
            self._names[key] = name
            self.components[name] = {}
            self.components[name] = self._members(record, answer=answer, status=status)
        return self._names[key]

    def _members(self, record: type[Struct], *, answer: bool, status: str | None) -> Schema:
        config = record.__struct_config__
        properties: dict[str, Schema] = {}
        required: list[str] = []
        tag, value = ("status", status) if status is not None else (config.tag_field, config.tag)
        if tag is not None:
            properties[tag] = {"const": value}
            required.append(tag)
        for one in fields(record):
            name = json_name(one.encode_name, one.type)
            properties[name] = self.of(_shown_type(record, one), answer=answer) | _default(one, answer=answer)
            if (answer and not _may_be_left_out(one, config)) or (not answer and one.required):
                required.append(name)
        schema: Schema = {"type": "object", "title": _name(record)}
        if words := described(record):
            schema["description"] = words
        schema["properties"] = properties
        if required:
            schema["required"] = required
        if config.forbid_unknown_fields and not answer:
            schema["additionalProperties"] = False
        return schema


def _shown_type(record: type[Struct], one: FieldInfo) -> Any:
    """The type of a member: that of the property which JSON shows in place of the field, if there is one."""
    found = getattr(record, one.encode_name, None)
    return get_type_hints(found.fget)["return"] if isinstance(found, property) else one.type


def described(thing: Any) -> str:
    """The docstring of a record or a handler, unless it has none of its own; None is null in JSON."""
    words = thing.__doc__
    return "" if not words or words == Struct.__doc__ else re.sub(r"\bNone\b", "null", inspect.cleandoc(words))


def _name(record: type) -> str:
    arguments = "".join(getattr(one, "__name__", str(one)) for one in get_args(record))
    return record.__name__ + arguments


def _may_be_left_out(one: FieldInfo, config: Any) -> bool:
    return UnsetType in union_members(one.type) or (config.omit_defaults and not one.required)


def _default(one: FieldInfo, *, answer: bool) -> Schema:
    if answer or one.default in (msgspec.NODEFAULT, None, msgspec.UNSET):
        return {}
    return {"default": one.default.value if isinstance(one.default, Enum) else one.default}


def _bounds(of: Any, marks: Sequence[Any]) -> Schema:
    found: Schema = {}
    is_text = str in union_members(of)
    for mark in marks:
        if not isinstance(mark, Meta):
            continue
        for name, word in _BOUNDS.items():
            if (value := getattr(mark, name)) is not None:
                found[word] = value
        for name, ending in (("min_length", "min"), ("max_length", "max")):
            if (value := getattr(mark, name)) is not None:
                found[ending + ("Length" if is_text else "Items")] = value
        if mark.description:
            found["description"] = mark.description
        if mark.examples:
            found["examples"] = mark.examples
    return found


def request_schema(record: type[Struct]) -> Schema:
    """The schema of one request record, with everything it refers to."""
    made = Schemas("#/$defs/{}")
    return {**made.of(record, answer=False), "$defs": made.components}
