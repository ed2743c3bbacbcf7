"""Which annotations have a JSON form, and how their values are written and read.

msgspec does the work; its two hooks handle types it cannot read (pydantic's types, paths), and annotations it does
not know are replaced by ones it does. This module never imports pydantic: if no other module did, none of its
classes exist. `misfits` describes values that do not fit.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections import abc
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import Any, Final

import msgspec
from msgspec import inspect as shapes

from flowfabric.errors import InvalidInput

ALLOWED_TYPES: Final = (
    "builtin types, dates, UUID, Decimal, bytes, Path, Enum, dataclass, Struct, TypedDict, NamedTuple,"
    " pydantic model, and collections of them"
)
# Abstract annotations and the type they are read as: any value that fits may come back as that type.
_ABSTRACT: Final[Mapping[Any, Any]] = types.MappingProxyType(
    {
        abc.Iterable: abc.Collection,
        abc.Collection: abc.Collection,
        abc.Container: abc.Collection,
        abc.Reversible: abc.Sequence,
        abc.Sequence: abc.Sequence,
        abc.MutableSequence: abc.MutableSequence,
        abc.Set: abc.Set,
        abc.MutableSet: abc.MutableSet,
        abc.Mapping: abc.Mapping,
        abc.MutableMapping: abc.MutableMapping,
    }
)
UNIONS: Final = (typing.Union, types.UnionType)
_KEYS: Final = (
    shapes.AnyType,
    shapes.StrType,
    shapes.IntType,
    shapes.FloatType,
    shapes.EnumType,
    shapes.UUIDType,
    shapes.DateTimeType,
    shapes.DateType,
    shapes.TimeType,
    shapes.TimeDeltaType,
    shapes.DecimalType,
    shapes.BytesType,
)


def annotation_text(annotation: Any) -> str:
    """Return the annotation as source code, without the metadata of `Annotated`."""
    if annotation is None or annotation is types.NoneType:
        return "None"
    if annotation is Any or annotation is inspect.Parameter.empty:
        return "Any"
    if annotation is Ellipsis:
        return "..."
    if isinstance(annotation, list):  # the parameters of a Callable
        return f"[{', '.join(map(annotation_text, annotation))}]"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return annotation_text(arguments[0])
    if origin in UNIONS:
        return " | ".join(map(annotation_text, arguments))
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is not None and arguments:
        return f"{annotation_text(origin)}[{', '.join(map(annotation_text, arguments))}]"
    return inspect.formatannotation(annotation)


def pydantic_module() -> Any:
    """Return pydantic if any module imported it; otherwise none of its classes can exist."""
    return sys.modules.get("pydantic")


def is_model(cls: object) -> bool:
    pydantic = pydantic_module()
    return pydantic is not None and isinstance(cls, type) and issubclass(cls, pydantic.BaseModel)


def _is_pydantic(cls: object) -> bool:
    """Whether pydantic has to read and write it: a model, or a type with its own schema such as a URL."""
    return pydantic_module() is not None and isinstance(cls, type) and hasattr(cls, "__get_pydantic_core_schema__")


def _is_pydantic_dataclass(cls: object) -> bool:
    return isinstance(cls, type) and dataclasses.is_dataclass(cls) and hasattr(cls, "__pydantic_validator__")


@lru_cache(maxsize=1024)
def _adapter(cls: abc.Hashable) -> Any:
    return pydantic_module().TypeAdapter(cls)


def adapter_of(cls: Any) -> Any:
    """Return what reads and writes a type for pydantic."""
    return cls.adapter if issubclass(cls, _Adapted) else _adapter(cls)


@lru_cache(maxsize=1)
def _alias_options() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return how models are written and read: by field name if pydantic can read that, else by alias."""
    version = tuple(int(part) for part in pydantic_module().VERSION.split(".")[:2])
    if version >= (2, 11):
        return {"by_alias": False}, {"by_alias": True, "by_name": True}
    return {"by_alias": True}, {}


class _AdaptedMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return True  # msgspec checks the type that the hook returned; the adapter has checked it already


class _Adapted(metaclass=_AdaptedMeta):
    """Replaces an annotation that only pydantic can read, such as a union with one of its models."""

    adapter: Any


def _write_other(value: Any) -> Any:
    """msgspec's hook for values it cannot write."""
    if _is_pydantic(type(value)):
        writing, _ = _alias_options()
        return msgspec.Raw(adapter_of(type(value)).dump_json(value, round_trip=True, warnings=False, **writing))
    if isinstance(value, PurePath | str):  # a subclass of str, such as an execution's id, is a string
        return str(value)
    if isinstance(value, abc.Mapping):
        return dict(value)
    if value is None or isinstance(value, (bool, tuple, frozenset)):  # written without a hook, except as keys
        raise TypeError(f"a key that is a {type(value).__name__} has no JSON form")
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _read_other(cls: type, value: Any) -> Any:
    """msgspec's hook for values it cannot read."""
    if issubclass(cls, PurePath):
        if not isinstance(value, str):
            raise TypeError("not a path")
        return cls(value)
    adapter = adapter_of(cls)
    _, reading = _alias_options()
    # Back to JSON: pydantic accepts a date, a tuple or bytes from JSON, but may refuse them as objects.
    return adapter.validate_json(ENCODER.encode(value), **reading)


ENCODER: Final = msgspec.json.Encoder(enc_hook=_write_other)


def decoder_of(json_type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(json_type, dec_hook=_read_other)


def schemas_of(json_types: Sequence[Any]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Return a JSON schema for each type, and the definitions they refer to."""
    definitions: dict[str, Any] = {}
    schemas, components = msgspec.json.schema_components(
        json_types, schema_hook=lambda cls: _schema_of_other(cls, definitions)
    )
    return schemas, definitions | components


def _schema_of_other(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    if issubclass(cls, PurePath):
        return {"type": "string", "format": "path"}
    schema: dict[str, Any] = adapter_of(cls).json_schema()
    definitions.update(schema.pop("$defs", {}))  # referred to from the root
    return schema


def json_type_of(annotation: Any) -> Any:
    """Return the annotation in a form that msgspec can read."""
    annotation = _unaliased(annotation)
    if annotation is object:
        return Any
    if annotation in (typing.NoReturn, typing.Never):
        return None
    if annotation is typing.LiteralString:
        return str
    if _needs_adapter(annotation):
        return _AdaptedMeta("Adapted", (_Adapted,), {"adapter": pydantic_module().TypeAdapter(annotation)})
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is None:
        return _ABSTRACT.get(annotation, annotation) if isinstance(annotation, type) else annotation
    if origin is typing.Literal:
        return annotation
    if origin is typing.Annotated:
        inner, *extras = arguments
        return typing.Annotated[(json_type_of(inner), *extras)]
    changed = tuple(json_type_of(each) if each is not Ellipsis else each for each in arguments)
    if origin in UNIONS:
        return typing.Union[changed]  # noqa: UP007 - the members are known only now
    if origin in _ABSTRACT:
        return _ABSTRACT[origin][changed] if changed else _ABSTRACT[origin]
    if all(new is old for new, old in zip(changed, arguments, strict=True)):
        return annotation
    return origin[changed]


def _unaliased(annotation: Any) -> Any:
    while type(annotation).__name__ == "TypeAliasType":  # `type X = ...`, which Python 3.11 does not have
        annotation = annotation.__value__
    return annotation


def _needs_adapter(annotation: Any) -> bool:
    """Whether only pydantic can read it: its constraints, its dataclasses, its models beside others in a union."""
    if pydantic_module() is None:
        return False
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *extras = typing.get_args(annotation)
        if any(type(each).__module__.partition(".")[0] in ("pydantic", "annotated_types") for each in extras):
            return True
    if typing.get_origin(annotation) in UNIONS:
        members = [_unaliased(each) for each in typing.get_args(annotation) if each is not types.NoneType]
        return len(members) > 1 and any(is_model(each) or _needs_adapter(each) for each in members)
    return _is_pydantic_dataclass(annotation) or (_is_pydantic(annotation) and not is_model(annotation))


def check_json_type(json_type: Any) -> None:
    """Raise for a type that JSON cannot express, at any depth."""
    seen: set[int] = set()

    def look(shape: Any) -> None:
        if id(shape) in seen:
            return
        seen.add(id(shape))
        if isinstance(shape, shapes.CustomType):
            if not (_is_pydantic(shape.cls) or issubclass(shape.cls, (PurePath, _Adapted))):
                raise InvalidInput(
                    f"{annotation_text(shape.cls)} has no JSON form", field="annotation", allowed=ALLOWED_TYPES
                )
        elif isinstance(shape, shapes.DictType) and not _is_key(shape.key_type):
            raise InvalidInput(
                f"keys of {annotation_text(json_type)} have no JSON form",
                field="annotation",
                allowed="keys of text, numbers, dates, UUID, Enum",
            )
        elif isinstance(shape, shapes.DataclassType) and _is_pydantic_dataclass(shape.cls):
            raise InvalidInput(
                f"{annotation_text(shape.cls)} is a pydantic dataclass inside another class",
                field="annotation",
                allowed="a pydantic model",
            )
        if isinstance(shape, (shapes.Type, shapes.Field)):
            for name in shape.__struct_fields__:
                for part in _parts(getattr(shape, name)):
                    look(part)

    look(shapes.type_info(json_type))


def _is_key(shape: shapes.Type) -> bool:
    if isinstance(shape, shapes.UnionType):
        return all(_is_key(each) for each in shape.types)
    if isinstance(shape, shapes.LiteralType):
        return all(isinstance(each, (str, int)) and not isinstance(each, bool) for each in shape.values)
    return isinstance(shape, _KEYS)


def _parts(value: Any) -> tuple[Any, ...]:
    parts = value if isinstance(value, tuple) else (value,)
    return tuple(each for each in parts if isinstance(each, (shapes.Type, shapes.Field)))


def mentions_abstract(annotation: Any, seen: set[type] | None = None) -> bool:
    """Whether an abstract collection is part of the annotation, or of a field of a class in it."""
    seen = set() if seen is None else seen
    annotation = _unaliased(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.ClassVar, typing.Literal):
        return False
    if origin is typing.Annotated:  # the metadata beside the type is no type
        arguments = arguments[:1]
    elif origin in _ABSTRACT or (isinstance(annotation, type) and annotation in _ABSTRACT):
        return True
    if any(mentions_abstract(each, seen) for each in arguments):
        return True
    cls = origin or annotation
    if not isinstance(cls, type) or cls in seen:
        return False
    seen.add(cls)
    return any(mentions_abstract(each, seen) for each in _field_annotations(cls))


def _field_annotations(cls: Any) -> list[Any]:
    if is_model(cls):
        return [each.annotation for each in cls.model_fields.values()]
    if not hasattr(cls, "__annotations__"):
        return []
    try:
        return list(typing.get_type_hints(cls).values())
    except Exception:  # names that cannot be resolved here; msgspec may resolve them
        return []
