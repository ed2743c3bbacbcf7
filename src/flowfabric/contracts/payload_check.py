"""Checks a payload against a stored schema, before it is delivered.

A check refuses only what the schema certainly excludes. It takes bounded time and fetches nothing: a schema that is not
understood, a pattern that could take long and a check that takes too many steps are left to the worker, which decodes
the payload and sets it aside if it does not fit.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from decimal import Decimal
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, cast
from uuid import UUID

import msgspec

from flowfabric.contracts.misfits import shown_name
from flowfabric.contracts.payload_schema import MAX_SCHEMA
from flowfabric.contracts.safe_patterns import longest_text

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

_STEPS: Final = 20_000  # keywords that one check may look at
_DEPTH: Final = 60  # keywords inside keywords: far below the limit of recursion, which the library does not survive
_SHOWN: Final = 10  # values of an enumeration that a refusal names
_left: ContextVar[list[int]] = ContextVar("flowfabric_check_steps")  # how many steps, and how deep
# A schema with one of these words is not understood: no type of ours writes them.
_STRANGE: Final = ('"patternProperties"', '"$id"', '"$dynamicRef"', '"$anchor"', '"$dynamicAnchor"', '"$schema"')
_NAMES: Final = {
    "string": "text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
# The formats of texts: the type that reads one, and its name.
_FORMATS: Final[Mapping[str, tuple[Any, str]]] = {
    "base64": (bytes, "base64"),
    "date": (datetime.date, "a date"),
    "date-time": (Annotated[datetime.datetime, msgspec.Meta(tz=True)], "a date and time with an offset from UTC"),
    "local-date-time": (Annotated[datetime.datetime, msgspec.Meta(tz=False)], "a date and time without an offset"),
    "any-date-time": (datetime.datetime, "a date and time"),
    "time": (Annotated[datetime.time, msgspec.Meta(tz=True)], "a time with an offset from UTC"),
    "local-time": (Annotated[datetime.time, msgspec.Meta(tz=False)], "a time without an offset"),
    "any-time": (datetime.time, "a time"),
    "duration": (datetime.timedelta, "a duration such as P1DT2H"),
    "uuid": (UUID, "a UUID"),
    "decimal": (Decimal, "a decimal number"),
    "integer-key": (dict[int, None], "an integer"),
    "number-key": (dict[float, None], "a number"),
}


class Misfit(NamedTuple):
    """A problem of a payload: the path of the field, the problem, and what is allowed. Never the value."""

    field: str
    problem: str
    allowed: str


class PayloadCheck:
    """A stored schema, ready to check payloads."""

    def __init__(self, schema: str) -> None:
        self.digest = sha256(schema.encode()).digest()
        self._validator = _validator(schema)

    def misfit(self, payload: Any) -> Misfit | None:
        """Return what is wrong with a payload, a plain JSON value; None if it fits, or only the worker can tell."""
        if self._validator is None:
            return None
        counted = _left.set([_STEPS, _DEPTH])
        try:
            if self._validator.is_valid(payload):
                return None
            found = _best(self._validator.iter_errors(payload))
        except Exception:  # too many steps, too deep, a reference that leads nowhere: the worker decides
            return None
        except BaseException as error:
            # A caller so deep in its stack that even this ends in a panic of the library's native part.
            if type(error).__name__ == "PanicException":
                return None
            raise
        finally:
            _left.reset(counted)
        return None if found is None else _described(found)


@lru_cache(maxsize=256)
def check_of(schema: str) -> PayloadCheck:
    """Return the check of a stored schema."""
    return PayloadCheck(schema)


def _validator(schema: str) -> Validator | None:
    if len(schema) > MAX_SCHEMA or any(word in schema for word in _STRANGE):
        return None
    try:
        parsed = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError):
        return None
    made: Validator | None = _make_validator()(parsed) if isinstance(parsed, dict) else None
    return made


class _TooLong(Exception):
    """The check takes more steps than it may."""


@lru_cache(maxsize=1)
def _make_validator() -> Callable[[Any], Validator]:
    """Return a maker of validators that know the keywords of our schemas, and nothing outside of them."""
    from jsonschema import Draft202012Validator, TypeChecker, validators  # noqa: PLC0415 - few processes check
    from referencing import Registry  # noqa: PLC0415

    known = Draft202012Validator.VALIDATORS
    plain = (
        "$ref allOf anyOf oneOf type properties required additionalProperties items prefixItems minItems maxItems"
        " minLength maxLength minimum maximum exclusiveMinimum exclusiveMaximum"
        " propertyNames minProperties maxProperties"
    )
    keywords = {word: known[word] for word in plain.split()}
    keywords |= {"enum": _enum, "const": _const, "format": _format, "pattern": _pattern, "multipleOf": _multiple_of}
    types = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
        "array": list,
        "object": dict,
    }
    cls = validators.create(
        meta_schema=Draft202012Validator.META_SCHEMA,
        validators={word: _counted(keyword) for word, keyword in keywords.items()},
        type_checker=TypeChecker({name: _is_type(name, cls) for name, cls in types.items()}),
    )
    # An empty registry has no way to retrieve anything: references lead into the schema itself or nowhere.
    return lambda schema: cls(schema, registry=Registry())


def _is_type(name: str, cls: Any) -> Any:
    # As the decoder: 1.0 is no integer, and true no number.
    if name in ("integer", "number"):
        return lambda _, value: isinstance(value, cls) and not isinstance(value, bool)
    return lambda _, value: isinstance(value, cls)


def _counted(keyword: Any) -> Any:
    """Count the steps of a check: alternatives inside alternatives could take forever."""

    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        left = _left.get()
        left[0] -= 1
        left[1] -= 1
        try:
            if min(left) < 0:
                raise _TooLong
            yield from keyword(validator, value, instance, schema) or ()
        finally:
            left[1] += 1

    return check


def _error(text: str) -> ValidationError:
    from jsonschema.exceptions import ValidationError  # noqa: PLC0415

    return ValidationError(text)


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal, and of the same type: neither 1.0 nor true is 1."""
    return type(one) is type(other) and one == other


def _enum(_: Any, values: Any, instance: Any, __: Any) -> Iterator[ValidationError]:
    if not any(_same(each, instance) for each in values):
        yield _error("enum")


def _const(_: Any, value: Any, instance: Any, __: Any) -> Iterator[ValidationError]:
    if not _same(value, instance):
        yield _error("const")


def _multiple_of(_: Any, factor: Any, instance: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(instance, int | float) and not isinstance(instance, bool):
        both_ints = isinstance(instance, int) and isinstance(factor, int)
        if instance % factor if both_ints else math.fmod(instance, factor):
            yield _error("multipleOf")


def _pattern(_: Any, pattern: Any, instance: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and len(instance) <= longest_text(pattern) and not re.search(pattern, instance):
        yield _error("pattern")


def _format(_: Any, name: Any, instance: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and name in _FORMATS:
        cls, _name = _FORMATS[name]
        try:
            msgspec.convert({instance: None} if name.endswith("-key") else instance, cls, str_keys=True)
        except (msgspec.ValidationError, ValueError, OverflowError):
            yield _error("format")


# Refusals in words


def _best(errors: Iterator[ValidationError]) -> ValidationError | None:
    """Return the error that tells most: of alternatives, the one that came furthest."""
    found = next(errors, None)
    while found is not None and found.context:
        # An alternative is not meant if its type or its tag is another; of the others, the one that came furthest.
        by_alternative: dict[Any, list[ValidationError]] = {}
        for each in found.context:
            by_alternative.setdefault(each.schema_path[0], []).append(each)
        meant = [
            errors
            for errors in by_alternative.values()
            if not any(each.validator in ("enum", "const") for each in errors)
            and not any(each.validator == "type" and each.absolute_path == found.absolute_path for each in errors)
        ]
        if not meant:
            return found
        found = max((errors[0] for errors in meant), key=lambda each: len(each.absolute_path))
    return found


def _described(error: ValidationError) -> Misfit:
    path = "payload" + "".join(map(_step, error.absolute_path))
    schema: Any = error.schema
    value: Any = error.instance
    word, wanted = error.validator, cast("Any", error.validator_value)
    if word == "required":
        name = next((each for each in wanted if each not in value), "")
        wanted = schema.get("properties", {}).get(name)
        return Misfit(f"{path}{_step(name)}", "missing", _allowed(wanted, error) if wanted else "a value")
    if word == "additionalProperties":
        known = schema.get("properties", {})
        name = next((each for each in value if each not in known), "")
        return Misfit(f"{path}{_step(name)}", "an unknown field", ", ".join(known) or "no fields")
    return Misfit(path, f"got {_kind(value)}", _allowed(schema, error))


def _step(part: Any) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if part.isidentifier() and len(part) <= 64 else f"[{shown_name(part)}]"


def _kind(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return "a boolean"
        case str():
            return "text"
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "an object"
        case _:
            return "an integer" if isinstance(value, int) else "a number"


def _allowed(schema: Any, error: ValidationError) -> str:
    """Say what a schema allows, in a few words."""
    if not isinstance(schema, dict):
        return "nothing"
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        shown = ", ".join(msgspec.json.encode(each).decode() for each in values[:_SHOWN])
        return f"one of {shown}" + (f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else "")
    if "anyOf" in schema or "oneOf" in schema:
        found = dict.fromkeys(_allowed(each, error) for each in schema.get("anyOf") or schema["oneOf"])
        return " or ".join(found)
    if "$ref" in schema:
        return f"{str(schema['$ref']).rpartition('/')[2]} (an object)" if schema["$ref"] != "#" else "an object"
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]][1]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    named = str(schema.get("title", "")) or " or ".join(_NAMES.get(each, str(each)) for each in kinds)
    words = [named or "another value"]
    for name, text in _CONSTRAINTS.items():
        if name in schema:
            words.append(text.format(schema[name]))
    return ", ".join(words)


_CONSTRAINTS: Final = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "pattern": "like {}",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minProperties": "at least {} fields",
    "maxProperties": "at most {} fields",
}
