"""The JSON schema of a signal's payload: what a wait stores, so that senders can be checked before they deliver.

A schema accepts what the worker's decoder accepts. Where JSON schema cannot say it exactly, the schema accepts more:
the worker decodes every payload and has the last word. Only keywords and formats that `payload_check` knows are used.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from typing import Any, Final

import msgspec
from msgspec import inspect as shapes

from flowfabric.contracts.pydantic_schema import pydantic_schema
from flowfabric.contracts.value_types import ValueType

MAX_SCHEMA: Final = 65_536  # bytes; a longer schema is not stored
_BOUNDS: Final = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_TEXTS: Final[dict[type[shapes.Type], str]] = {
    shapes.BytesType: "base64",
    shapes.ByteArrayType: "base64",
    shapes.MemoryViewType: "base64",
    shapes.DateType: "date",
    shapes.TimeDeltaType: "duration",
    shapes.UUIDType: "uuid",
}
# By whether the time has an offset from UTC: always, never, or as the sender likes.
_DATETIMES: Final = {True: "date-time", False: "local-date-time", None: "any-date-time"}
_TIMES: Final = {True: "time", False: "local-time", None: "any-time"}
_DICTS: Final = tuple(
    found for name in ("DictType", "FrozenDictType") if (found := getattr(shapes, name, None)) is not None
)


@lru_cache(maxsize=1024)
def schema_of(payload: ValueType) -> str | None:
    """Return the schema of a payload's type as JSON; None if every JSON value fits, or the schema cannot be stored."""
    try:
        writer = _Writer()
        schema = writer.of(shapes.type_info(payload.json_type))
        if writer.definitions:
            schema = {**schema, "$defs": writer.definitions}
        text = msgspec.json.encode(schema)
    except Exception:  # a type without a schema: the worker alone decides
        return None
    return text.decode() if schema and len(text) <= MAX_SCHEMA else None


class _Writer:
    """Writes the schema of one type, and the definitions of the classes in it."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # of classes, by the identity of their shape: a class may contain itself
        self._kept: list[Any] = []  # keeps the identities valid

    def of(self, shape: Any) -> dict[str, Any]:
        """Return the schema of a shape."""
        while isinstance(shape, shapes.Metadata):
            shape = shape.type
        match shape:
            case shapes.NoneType():
                return {"type": "null"}
            case shapes.BoolType():
                return {"type": "boolean"}
            case shapes.IntType() | shapes.FloatType():
                kind = "integer" if isinstance(shape, shapes.IntType) else "number"
                return {"type": kind, **_given(shape, _BOUNDS)}
            case shapes.StrType():
                names = {"min_length": "minLength", "max_length": "maxLength", "pattern": "pattern"}
                return {"type": "string", **_given(shape, names)}
            case shapes.DateTimeType():
                return {"type": "string", "format": _DATETIMES[shape.tz]}
            case shapes.TimeType():
                return {"type": "string", "format": _TIMES[shape.tz]}
            case shapes.DecimalType():
                return {"type": ["string", "number"], "format": "decimal"}
            case shapes.LiteralType():
                return {"enum": list(shape.values)}
            case shapes.EnumType():
                return _enum(shape.cls)
            case shapes.TupleType():
                return _items([self.of(each) for each in shape.item_types], len(shape.item_types), more=False)
            case shapes.CollectionType():
                # A set counts what is left without repetitions: its least length is not known here.
                is_set = isinstance(shape, shapes.SetType | shapes.FrozenSetType)
                bounds = {} if is_set else {"min_length": "minItems", "max_length": "maxItems"}
                return {"type": "array", **_filled("items", self.of(shape.item_type)), **_given(shape, bounds)}
            case shapes.UnionType():
                return self._union(shape)
            case shapes.CustomType():
                return self._other(shape.cls)
        if isinstance(shape, _DICTS):
            names = {"min_length": "minProperties", "max_length": "maxProperties"}
            return {
                "type": "object",
                **_filled("propertyNames", self._key(shape.key_type)),
                **_filled("additionalProperties", self.of(shape.value_type)),
                **_given(shape, names),
            }
        if type(shape) in _TEXTS:
            return {"type": "string", "format": _TEXTS[type(shape)]}
        if hasattr(shape, "fields"):
            return {"$ref": f"#/$defs/{self._define(shape)}"}
        return {}

    def _key(self, shape: Any) -> dict[str, Any]:
        """Return the schema of the keys of an object: JSON has only text there."""
        while isinstance(shape, shapes.Metadata):
            shape = shape.type
        match shape:
            case shapes.StrType():
                found = self.of(shape)
                del found["type"]
                return found
            case shapes.IntType():
                return {"format": "integer-key"}
            case shapes.FloatType():
                return {"format": "number-key"}
            case shapes.EnumType() | shapes.LiteralType():
                schema = self.of(shape)
                return {"enum": [str(each) for each in schema["enum"]]} if schema else {}
            case shapes.UUIDType() | shapes.DateType() | shapes.DateTimeType() | shapes.TimeType():
                return {"format": self.of(shape)["format"]}
        return {}

    def _union(self, shape: shapes.UnionType) -> dict[str, Any]:
        structs = [each for each in map(_bare, shape.types) if isinstance(each, shapes.StructType)]
        members = []
        for each in map(_bare, shape.types):
            schema = self.of(each)
            if not schema:
                return {}
            if len(structs) > 1 and each in structs and not each.array_like:
                schema = {**schema, "required": [each.tag_field]}
            members.append(schema)
        return {"anyOf": members}

    def _define(self, shape: Any) -> str:
        """Write the definition of a class and return its name."""
        if id(shape) in self._names:
            return self._names[id(shape)]
        base = "".join(letter if letter.isalnum() else "_" for letter in shape.cls.__name__)
        name, number = base, 1
        while name in self.definitions:
            number += 1
            name = f"{base}_{number}"
        self._names[id(shape)] = name
        self._kept.append(shape)
        self.definitions[name] = {}
        self.definitions[name] = self._class(shape)
        return name

    def _class(self, shape: Any) -> dict[str, Any]:
        fields = {each.encode_name: self.of(each.type) for each in shape.fields}
        required = [each.encode_name for each in shape.fields if each.required]
        is_struct = isinstance(shape, shapes.StructType)
        if isinstance(shape, shapes.NamedTupleType):
            return _items(list(fields.values()), len(required), more=False)
        if is_struct and shape.array_like:
            tag = [] if shape.tag_field is None else [{"enum": [shape.tag]}]
            least = max((place for place, each in enumerate(shape.fields, 1) if each.required), default=0)
            return _items([*tag, *fields.values()], len(tag) + least, more=not shape.forbid_unknown_fields)
        if is_struct and shape.tag_field is not None:
            fields = {shape.tag_field: {"enum": [shape.tag]}, **fields}
        closed = {"additionalProperties": False} if is_struct and shape.forbid_unknown_fields else {}
        return {"type": "object", "properties": fields, **_filled("required", required), **closed}

    def _other(self, cls: type) -> dict[str, Any]:
        if issubclass(cls, PurePath):
            return {"type": "string"}
        schema, definitions = pydantic_schema(cls)
        # Models refer to their definitions by name; two models with the same definition share it.
        for name, definition in definitions.items():
            if self.definitions.setdefault(name, definition) != definition:
                return {}
        return schema


def _bare(shape: Any) -> Any:
    while isinstance(shape, shapes.Metadata):
        shape = shape.type
    return shape


def _given(shape: Any, names: dict[str, str]) -> dict[str, Any]:
    """Return the constraints of a shape that are set."""
    return {word: value for name, word in names.items() if (value := getattr(shape, name)) is not None}


def _filled(word: str, schema: Any) -> dict[str, Any]:
    return {word: schema} if schema else {}


def _items(schemas: list[dict[str, Any]], least: int, *, more: bool) -> dict[str, Any]:
    most = {} if more else {"maxItems": len(schemas)}
    return {"type": "array", "prefixItems": schemas, "minItems": least, **most}


def _enum(cls: type[Enum]) -> dict[str, Any]:
    # A class may accept other values too.
    if cls._missing_.__func__ is not Enum._missing_.__func__:  # type: ignore[attr-defined]
        return {}
    return {"enum": [each.value for each in cls]}
