"""Describes what is wrong with a value or with stored data without showing it: names, types and paths only."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import abc
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

import msgspec

from flowfabric.contracts.json_types import is_model, pydantic_module

# msgspec's messages about types and forms; its other messages quote the data.
_SAFE_REASON: Final = re.compile(
    r"(?P<text>Expected |Object missing required field |JSON is malformed|Input data was truncated|Number out of range"
    r"|Integer value out of range|Duration is out of range"
    r"|Invalid (?:UUID|RFC3339|ISO8601|base64|decimal)).*",
    re.DOTALL,
)
_PLACE: Final = re.compile(r" - at `(?P<key>key` in `)?\$(?P<path>.*)`$", re.DOTALL)


def type_name(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def shown_name(name: str) -> str:
    return repr(name if len(name) <= 64 else f"{name[:64]}...")


def why_not_written(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep, or contains itself"
    if isinstance(error, UnicodeEncodeError):
        return "text with a lone surrogate"
    if isinstance(error, TypeError) and str(error).endswith("has no JSON form"):
        return str(error)
    if isinstance(error, TypeError) and str(error).startswith("Only dicts with"):
        return "keys that are neither text nor numbers"
    return type(error).__name__


def why_not_read(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return "text that is not UTF-8"
    text = str(error)
    place = ""
    found = _PLACE.search(text)
    if found is not None:
        text = text[: found.start()]
        place = f" at {'a key of ' if found['key'] else ''}{found['path'] or 'the top'}"
    if error.__cause__ is not None:  # raised by a class of the user or by pydantic: the text may quote the data
        return f"{_refusal(error.__cause__)}{place}"
    if isinstance(error, msgspec.MsgspecError) and _SAFE_REASON.fullmatch(text):
        return f"{text[0].lower()}{text[1:]}{place}" if not text.startswith("JSON") else f"{text}{place}"
    if text.startswith("Object contains unknown field"):
        return f"an unknown field{place}"
    if isinstance(error, msgspec.MsgspecError):
        return f"a value that is not allowed{place}"
    return type(error).__name__


def _refusal(cause: BaseException) -> str:
    pydantic = pydantic_module()
    if pydantic is not None and isinstance(cause, pydantic.ValidationError):
        first = cause.errors(include_input=False, include_context=False, include_url=False)[0]
        return f"{cause.title}: {first['type']}"
    return f"{type(cause).__name__} in its class"


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from (("[...]", each) for each in value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", each) for number, each in enumerate(value))
    else:
        yield from ((f".{name}", getattr(value, name)) for name in _field_names(value))


def _field_names(value: Any) -> tuple[str, ...]:
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    if dataclasses.is_dataclass(value):
        return tuple(each.name for each in dataclasses.fields(value) if each.compare)
    if is_model(type(value)):
        return (*type(value).model_fields, *(value.model_extra or ()))
    return ()


def non_finite(value: Any, path: str = "", depth: int = 0) -> str | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value} has no JSON form{f', at {path}' if path else ''}"
    if depth > 50:
        return None
    found = (non_finite(child, f"{path}{step}", depth + 1) for step, child in _children(value))
    return next((each for each in found if each is not None), None)


def difference_of(sent: Any, read: Any, is_abstract: bool, path: str = "") -> str | None:
    """Describe, in types, where the value read differs from the value sent; None if they are equal."""
    at = f" at {path}" if path else ""
    if isinstance(sent, dict) and isinstance(read, dict):
        if sent.keys() != read.keys():
            return f"the keys change{at}"
        pairs = ((f"{path}[...]", value, read[key]) for key, value in sent.items())
    elif _both(sent, read, (list, tuple)):  # the annotation decides which of the two comes back
        if len(sent) != len(read):
            return f"the length changes{at}"
        pairs = ((f"{path}[{number}]", *both) for number, both in enumerate(zip(sent, read, strict=True)))
    elif is_abstract and isinstance(sent, abc.Set) and isinstance(read, (abc.Set, list)):
        return None if len(sent) == len(read) and sent == set(read) else f"the members change{at}"
    elif is_abstract and isinstance(sent, abc.Mapping) and isinstance(read, dict):
        return difference_of(dict(sent), read, is_abstract, path)
    elif sent == read or _same_moment(sent, read) or (_both(sent, read, Decimal) and sent.is_nan() and read.is_nan()):
        return None
    elif type(sent) is type(read) and (names := _field_names(sent)):
        pairs = ((f"{path}.{name}", getattr(sent, name), getattr(read, name)) for name in names)
    elif isinstance(sent, float) and not math.isfinite(sent):
        return f"{sent} has no JSON form{at}"
    elif type(sent) is type(read):
        return f"{type_name(sent)} changes{at}"
    else:
        return f"{type_name(sent)} becomes {type_name(read)}{at}"
    found = (difference_of(old, new, is_abstract, place) for place, old, new in pairs)
    return next((each for each in found if each is not None), None)


def _both(sent: Any, read: Any, cls: type | tuple[type, ...]) -> bool:
    return isinstance(sent, cls) and isinstance(read, cls)


def _same_moment(sent: Any, read: Any) -> bool:
    # Around a clock change, datetimes of two zones are never equal, even for the same moment.
    if not (isinstance(sent, datetime) and isinstance(read, datetime)) or None in (sent.utcoffset(), read.utcoffset()):
        return False
    return sent.astimezone(UTC) == read.astimezone(UTC)
