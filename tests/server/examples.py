"""A request for every operation of the table: its path with ids, and the smallest body and query it takes."""

from __future__ import annotations

import types
from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from flowfabric.server.operation import Operation

# Members whose smallest value is not a valid one.
_VALUES: dict[str, Any] = {"scopes": ["read"], "filter": {"kinds": ["none of these"]}, "state": "active", "priority": 1}
UNKNOWN = UUID("0b0e8400-e29b-41d4-a716-446655440000")
# Refused with 503 by an app in a test: it has no metrics of its own, and not the owner's address.
UNAVAILABLE = frozenset(("metrics", "rotate_waitpoint_secret"))


def example(tp: Any, name: str = "") -> Any:
    """The smallest JSON value of a type."""
    if name in _VALUES:
        return _VALUES[name]
    origin, args = get_origin(tp), get_args(tp)
    if origin in (Union, types.UnionType):
        return example(next(one for one in args if one is not type(None)), name)
    if origin is Literal:
        return args[0]
    if isinstance(tp, type) and issubclass(tp, Struct):
        return required(tp)
    if isinstance(tp, type) and issubclass(tp, Enum):
        return next(iter(tp)).value
    if origin in (list, tuple) or tp in (list, tuple):
        return [example(args[0])] if args else []
    if origin is dict or tp is dict:
        return {}
    if getattr(tp, "__supertype__", None) is not None:
        return example(tp.__supertype__, name)
    return {int: 1, float: 1.0, bool: False, UUID: str(UNKNOWN), datetime: "2030-01-01T00:00:00Z"}.get(tp, "x")


def required(record: type[Struct]) -> dict[str, Any]:
    """The members that a record must have."""
    return {
        one.encode_name: example(one.type, one.encode_name)
        for one in fields(record)
        if one.default is msgspec.NODEFAULT and one.default_factory is msgspec.NODEFAULT
    }


def path_of(operation: Operation, ids: Mapping[str, object]) -> str:
    """The path with ids; those that are not given name nothing."""
    path = operation.path
    while "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        default = {"attempt": 0, "key_id": "0" * 12, "code": "not_found", "key": "a.b"}.get(
            name, UNKNOWN if name.endswith("_id") else "x"
        )
        path = path.replace(f"{{{name}}}", str(ids.get(name, default)))
    return path


def request_of(operation: Operation, ids: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of a client's `request`."""
    body = required(operation.body) if isinstance(operation.body, type(Struct)) else None
    if body is not None:
        body |= {name: str(one) for name, one in ids.items() if name in body}
    return {
        "method": operation.method,
        "url": path_of(operation, ids),
        "params": required(operation.query),
        "json": body,
    }
