"""Which members of a body are wrong: all of them, each with its place, what is wrong and what is allowed.

Only for bodies that were refused. Values are never shown, only names, types and bounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from types import NoneType
from typing import Any, Final
from uuid import UUID

import msgspec
from jsonschema import Draft202012Validator, FormatChecker
from msgspec import Struct

from flowfabric.server.answers import union_members
from flowfabric.server.problems import FieldError
from flowfabric.server.schemas import Schema, Schemas, request_schema

MOST: Final = 50  # wrong members that a problem lists
_FORMATS: Final = {"uuid": "a UUID", "date-time": "an instant such as 2030-01-31T12:00:00Z"}
_TYPES: Final = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
_WORDS: Final = {
    "minimum": "at least {}", "maximum": "at most {}", "exclusiveMinimum": "more than {}",
    "exclusiveMaximum": "less than {}", "multipleOf": "a multiple of {}", "minLength": "at least {} characters",
    "maxLength": "at most {} characters", "minItems": "at least {} items", "maxItems": "at most {} items",
    "pattern": "text that matches {}",
}  # fmt: skip
_checker = FormatChecker(formats=())


def _fits(value: object, tp: Any) -> bool:
    try:
        msgspec.convert(value, tp)
    except msgspec.ValidationError:
        return False
    return True


@_checker.checks("uuid")
def _is_uuid(value: object) -> bool:
    return not isinstance(value, str) or _fits(value, UUID)


@_checker.checks("date-time")
def _is_instant(value: object) -> bool:
    return not isinstance(value, str) or _fits(value, datetime)


@cache
def _validator(record: type[Struct]) -> Draft202012Validator:
    return Draft202012Validator(request_schema(record), format_checker=_checker)


def wrong_members(record: type[Struct], data: bytes) -> list[FieldError]:
    """Every wrong member; empty if the schema of the record finds nothing wrong."""
    try:
        document = json.loads(data)
        found: list[FieldError] = []
        for error in _validator(record).iter_errors(document):
            found += _told(error)
            if len(found) >= MOST:
                break
    except (ValueError, RecursionError):
        return []
    return sorted(found[:MOST], key=lambda one: one.pointer or "")


def allowed_values(tp: Any) -> str | None:
    """What a parameter of this type takes, in words; None: any text."""
    schemas = [Schemas().of(one, answer=False) for one in union_members(tp) if one is not NoneType]
    found = [words for one in schemas if (words := _allowed(one.get("items", one))) is not None]
    return " or ".join(found) or None


def _allowed(schema: Schema) -> str | None:
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "format" in schema:
        return _FORMATS[schema["format"]]
    kind = {"integer": "an integer", "number": "a number", "boolean": "true, false"}.get(schema.get("type", ""))
    if kind is None:
        return None
    bounds = [_WORDS[word].format(schema[word]) for word in ("minimum", "maximum") if word in schema]
    return " of ".join(filter(None, (kind, " and ".join(bounds))))


def _told(error: Any) -> Iterator[FieldError]:
    """What an error of jsonschema says, for each member it concerns."""
    where = pointer(error.absolute_path)
    match error.validator:
        case "additionalProperties":
            known = error.schema.get("properties", {})
            for name in error.instance:
                if name not in known:
                    yield FieldError("unknown", pointer=where + pointer([name]), allowed=", ".join(known) or "nothing")
        case "required":
            for name in error.validator_value:
                if name not in error.instance:
                    yield FieldError("missing", pointer=where + pointer([name]))
        case "anyOf":
            yield from _of_branches(error, where)
        case "type":
            allowed = error.validator_value
            yield FieldError(
                f"got {_type(error.instance)}",
                pointer=where,
                allowed=allowed if isinstance(allowed, str) else " or ".join(allowed),
            )
        case "enum" | "const":
            allowed = error.validator_value if error.validator == "enum" else [error.validator_value]
            yield FieldError("none of the allowed values", pointer=where, allowed=", ".join(map(str, allowed)))
        case "format":
            yield FieldError("not of this form", pointer=where, allowed=_FORMATS[error.validator_value])
        case word:
            allowed = _WORDS.get(str(word), f"{word} {{}}").format(error.validator_value)
            yield FieldError("out of bounds", pointer=where, allowed=allowed)


def _of_branches(error: Any, where: str) -> Iterator[FieldError]:
    """Of a member that may be one of several types: what is wrong with the one that was meant."""
    branches: dict[Any, list[Any]] = {}
    for one in error.context or ():
        branches.setdefault(one.relative_schema_path[0], []).append(one)
    meant = [
        found
        for found in branches.values()
        if not any(one.validator in ("type", "const") and one.absolute_path == error.absolute_path for one in found)
        and not any(one.validator == "const" for one in found)
    ]
    if len(meant) == 1:
        for one in meant[0]:
            yield from _told(one)
        return
    types = [str(one.validator_value) for found in branches.values() for one in found if one.validator == "type"]
    yield FieldError(f"got {_type(error.instance)}", pointer=where, allowed=" or ".join(dict.fromkeys(types)) or None)


def _type(value: Any) -> str:
    return _TYPES.get(type(value), "number")


def pointer(path: Any) -> str:
    """A JSON pointer (RFC 6901)."""
    return "".join("/" + str(one).replace("~", "~0").replace("/", "~1") for one in path)
