"""Task signatures: arguments and results to and from JSON, and the codecs applied to those bytes.

A value is stored as JSON and read back by its annotation. Before accepting a value, the signature reads its JSON
back with the decoder that workers use and compares: a value that would come back different (nan, a date without an
annotation, a subclass with more fields) is refused with `InvalidInput`. Stored data that no longer fits raises
`CannotDecode`. Neither error shows the data: only names, types and paths.

Compression and encryption are codecs of the user; their names are stored beside the data.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Annotated, Any, Final, Self, TypeAlias, TypeVar

import msgspec
from msgspec.structs import astuple

from flowfabric.contracts.codecs import CannotDecode
from flowfabric.contracts.json_types import ENCODER, UNIONS, annotation_text, decoder_of, schemas_of
from flowfabric.contracts.misfits import shown_name, why_not_read
from flowfabric.contracts.value_types import ValueType, checked_type, function_name, resolve_annotation
from flowfabric.errors import InvalidInput

_CONTEXT_NAMES: Final = ("ctx", "context")
_ALLOWED_PARAMETERS: Final = "parameters that can be named one by one"
_UNNAMED: Final[Mapping[Any, str]] = types.MappingProxyType(
    {
        inspect.Parameter.POSITIONAL_ONLY: "positional-only",
        inspect.Parameter.VAR_POSITIONAL: "any number of positional arguments",
        inspect.Parameter.VAR_KEYWORD: "any number of named arguments",
    }
)


class _Shared:
    """Marks a parameter that the worker fills in."""

    def __repr__(self) -> str:
        return "shared"


SHARED: Final = _Shared()
_T = TypeVar("_T")
Data: TypeAlias = Annotated[_T, SHARED]
"""A parameter that is not an argument of the task: the worker passes the object that the app provides for the class.

`http: Data[Client] = provided` keeps type checkers from asking submitters for it.
"""


provided: Any = SHARED
"""The default of a `Data` parameter, which the worker fills in."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a task, by its name in JSON. `default` is `inspect.Parameter.empty` if it is required."""

    name: str
    type: ValueType
    required: bool
    default: Any
    is_keyword_only: bool

    @property
    def annotation(self) -> str:
        return self.type.text


_ABSENT: Final = object()


class Signature:
    """The arguments and the result of one task."""

    __slots__ = (
        "_decoder",
        "_has_optional",
        "_names",
        "_positional",
        "context_param",
        "data",
        "is_async",
        "name",
        "parameters",
        "result",
    )

    context_param: str | None
    data: Mapping[str, type]
    is_async: bool
    result: ValueType
    parameters: tuple[Parameter, ...]

    def __init__(
        self,
        name: str,
        parameters: tuple[Parameter, ...],
        result: ValueType,
        *,
        context_param: str | None,
        is_async: bool,
        data: Mapping[str, type] | None = None,
    ) -> None:
        self.name = name
        self.data = data or {}
        self.parameters = parameters
        self.result = result
        self.context_param = context_param
        self.is_async = is_async
        self._names = tuple(each.name for each in parameters)
        self._positional = tuple(each.name for each in parameters if not each.is_keyword_only)
        self._has_optional = any(not each.required for each in parameters)
        # The fields have generated names, so that no argument collides with a method of the class.
        fields = [f"a{number}" for number in range(len(parameters))]
        arguments = msgspec.defstruct(
            "Arguments",
            [
                (field, each.type.json_type)
                if each.required
                else (field, each.type.json_type, msgspec.field(default=_ABSENT))
                for field, each in zip(fields, parameters, strict=True)
            ],
            rename=dict(zip(fields, self._names, strict=True)),
            kw_only=True,
            forbid_unknown_fields=True,
        )
        self._decoder = decoder_of(arguments)

    @classmethod
    def of(cls, fn: Callable[..., Any], *, context_types: tuple[type, ...]) -> Self:
        """Return the signature of a function. `InvalidInput` names the parameter that JSON cannot fill."""
        name = function_name(fn)
        if not callable(fn) or isinstance(fn, type):
            raise InvalidInput(f"{name} is not a function", field="fn", allowed="a function, sync or async")
        called = fn if hasattr(fn, "__code__") or isinstance(fn, partial) else type(fn).__call__
        if inspect.isasyncgenfunction(called) or inspect.isgeneratorfunction(called):
            raise InvalidInput(f"{name} is a generator", field="fn", allowed="a function that returns its result")
        context_param: str | None = None
        data: dict[str, type] = {}
        parameters: list[Parameter] = []
        for each in _inspected(fn).parameters.values():
            if each.kind in _UNNAMED:
                raise InvalidInput(f"is {_UNNAMED[each.kind]} in {name}", field=each.name, allowed=_ALLOWED_PARAMETERS)
            if each.annotation is each.empty and each.default is each.empty and each.name in _CONTEXT_NAMES:
                right = context_types[0 if inspect.iscoroutinefunction(called) else -1].__name__
                raise InvalidInput(
                    f"has no annotation in {name}; did you mean {each.name}: ff.{right}?",
                    field=each.name,
                    allowed="an annotation: the context, or the type of an argument",
                )
            annotation = resolve_annotation(fn, each.name, each.annotation)
            if (shared := _shared_type(annotation, each.name)) is not None:
                data[each.name] = shared
                continue
            if _is_context(annotation, context_types):
                if context_param is not None:
                    raise InvalidInput(f"is a second context in {name}", field=each.name, allowed="one context")
                context_param = each.name
                continue
            parameters.append(
                Parameter(
                    each.name,
                    checked_type(annotation, each.name, name),
                    required=each.default is each.empty,
                    default=each.default,
                    is_keyword_only=each.kind is each.KEYWORD_ONLY,
                )
            )
        return cls(
            name,
            tuple(parameters),
            ValueType.returned_by(fn),
            context_param=context_param,
            is_async=inspect.iscoroutinefunction(called),
            data=data,
        )

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Return the arguments of a call as one JSON object by name, without the defaults.

        Binds like the call, without the context. `InvalidInput` names the argument that is missing, unexpected, given
        twice, or does not fit its annotation.
        """
        given = self.bind(args, kwargs)
        try:
            data = ENCODER.encode(given)
            if self._read(data) == given:
                return data
        except Exception:  # noqa: S110 - the slow path below explains what is wrong
            pass
        return ENCODER.encode(self.check(given))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name. `InvalidInput` if there are too many, or one is given twice."""
        given = dict(zip(self._positional, args, strict=False))
        if kwargs:
            if not given.keys().isdisjoint(kwargs):
                raise self._unbound(args, kwargs)
            given.update(kwargs)
        if len(args) > len(self._positional):
            raise self._unbound(args, kwargs)
        return given

    def decode(self, data: bytes) -> dict[str, Any]:
        """Return the keyword arguments of the call; missing ones are left to their defaults.

        `CannotDecode` names the argument that is missing, unexpected, or no longer fits its annotation.
        """
        try:
            return self._read(data)
        except Exception as error:
            problem = self._misread(data, error)
        raise problem

    def json_schema(self) -> dict[str, Any]:
        """Return a JSON schema of the arguments, as far as the types have one, with defaults that JSON can hold."""
        schemas, definitions = schemas_of([each.type.json_type for each in self.parameters])
        properties = dict(zip(self._names, schemas, strict=True))
        for each in self.parameters:
            if not each.required:
                try:
                    default = msgspec.json.decode(each.type.check(each.default, each.name))
                except InvalidInput:
                    continue
                properties[each.name] = {**properties[each.name], "default": default}
        schema: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": [each.name for each in self.parameters if each.required],
            "additionalProperties": False,
        }
        return {**schema, "$defs": definitions} if definitions else schema

    def _read(self, data: bytes) -> dict[str, Any]:
        values = zip(self._names, astuple(self._decoder.decode(data)), strict=True)
        if self._has_optional:
            return {name: value for name, value in values if value is not _ABSENT}
        return dict(values)

    def _unbound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InvalidInput:
        if len(args) > len(self._positional):
            return InvalidInput(
                f"{len(args)} positional arguments given to {self.name}",
                field="arguments",
                allowed=f"at most {len(self._positional)}" + "".join(f", {name}" for name in self._positional),
            )
        twice = next(name for name in self._positional[: len(args)] if name in kwargs)
        return InvalidInput("is given twice, by position and by name", field=twice, allowed="once")

    def check(self, given: Mapping[str, Any], later: Collection[str] = ()) -> dict[str, msgspec.Raw]:
        """Return the JSON of each argument; `InvalidInput` names the wrong one. Those in `later` come later."""
        for name in given:
            if name not in self._names:
                raise InvalidInput(
                    f"is not an argument of {self.name}", field=name, allowed=", ".join(self._names) or "no arguments"
                )
        written: dict[str, msgspec.Raw] = {}
        for each in self.parameters:
            if each.name in later:
                continue
            if each.name in given:
                written[each.name] = msgspec.Raw(each.type.check(given[each.name], each.name))
            elif each.required:
                raise InvalidInput(f"is missing in the call of {self.name}", field=each.name, allowed=each.annotation)
        return written

    def _misread(self, data: bytes, error: Exception) -> CannotDecode:
        try:
            raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        except Exception as unreadable:
            return CannotDecode(f"not a JSON object ({why_not_read(unreadable)})", what=f"arguments of {self.name}")
        for name in raw:
            if name not in self._names:
                return CannotDecode(f"{self.name} takes no such argument", what=f"argument {shown_name(name)}")
        for each in self.parameters:
            if each.name in raw:
                try:
                    each.type.decode(bytes(raw[each.name]), what=f"argument {each.name!r}")
                except CannotDecode as problem:
                    return problem
            elif each.required:
                return CannotDecode(f"missing, and {self.name} has no default for it", what=f"argument {each.name!r}")
        return CannotDecode(why_not_read(error), what=f"arguments of {self.name}")

    def __repr__(self) -> str:
        arguments = ", ".join(f"{each.name}: {each.annotation}" for each in self.parameters)
        return f"Signature({self.name}({arguments}) -> {self.result.text})"


def _inspected(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except Exception as error:  # a builtin without a signature, an annotation that cannot be evaluated
        problem = f"{function_name(fn)} has no signature ({type(error).__name__}: {error})"
    raise InvalidInput(problem, field="fn", allowed="a function, sync or async")


def _shared_type(annotation: Any, name: str) -> type | None:
    """Return the class of shared data that a parameter asks for; None for an argument."""
    if typing.get_origin(annotation) is not typing.Annotated or SHARED not in typing.get_args(annotation)[1:]:
        return None
    asked = typing.get_args(annotation)[0]
    if not isinstance(asked, type):
        raise InvalidInput(f"Data[{annotation_text(asked)}] names no class", field=name, allowed="Data[SomeClass]")
    return asked


def _is_context(annotation: Any, context_types: tuple[type, ...]) -> bool:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _is_context(typing.get_args(annotation)[0], context_types)
    if origin in UNIONS:
        rest = [each for each in typing.get_args(annotation) if each is not types.NoneType]
        return len(rest) == 1 and _is_context(rest[0], context_types)
    return annotation in context_types if origin is None else origin in context_types
