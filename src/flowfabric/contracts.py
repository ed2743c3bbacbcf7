"""Task signatures: what a function takes and returns, to and from JSON, and the codecs applied to those bytes.

A value is stored as JSON and read back by its annotation. Whatever is written is read back before it is
accepted, with the very decoder a worker uses, and compared with what was given: a value that would come back
different (nan, a date where the annotation says nothing, a subclass with more fields) is refused with
`InvalidInput` instead of being stored. The other way round, data that no longer fits is `CannotDecode`.
Neither error shows the data: only names, types and places.

Compression and encryption are codecs of the user; the names of those applied travel beside the data. Where
the bytes are kept, and who calls the function, belongs to others.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Final, Protocol, Self, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import astuple

from flowfabric._json_types import (
    ALLOWED_TYPES,
    ENCODER,
    UNIONS,
    annotation_text,
    check_json_type,
    decoder_of,
    json_type_of,
    mentions_abstract,
    schemas_of,
)
from flowfabric._misfits import difference_of, non_finite, shown_name, type_name, why_not_read, why_not_written
from flowfabric.errors import Corruption, InvalidInput
from flowfabric.ids import TEXT_MAX_BYTES

_CODEC_NAME: Final = re.compile(r"[a-z0-9_-]+")
_PLAIN: Final = "json"
_ALLOWED_PARAMETERS: Final = "parameters that can be named one by one"
_UNNAMED: Final[Mapping[Any, str]] = types.MappingProxyType(
    {
        inspect.Parameter.POSITIONAL_ONLY: "positional-only",
        inspect.Parameter.VAR_POSITIONAL: "any number of positional arguments",
        inspect.Parameter.VAR_KEYWORD: "any number of named arguments",
    }
)
_ALLOWED_UNTYPED: Final = "text, numbers, bool, None, lists, dicts with text keys; annotate what is of another type"


class CannotDecode(Corruption):
    """Stored arguments or a stored result no longer fit the code, or a codec cannot read them.

    `what` names the argument, result or step. The message says what is wrong and never shows the data.
    """

    def __init__(self, problem: str, *, what: str | None = None, execution_id: str | None = None) -> None:
        self.what = what
        self.problem = problem
        super().__init__(problem if what is None else f"{what}: {problem}", execution_id=execution_id)


class _Shared:
    """Marks a parameter that the worker fills in."""

    def __repr__(self) -> str:
        return "shared"


SHARED: Final = _Shared()
_T = TypeVar("_T")
Data: TypeAlias = Annotated[_T, SHARED]
"""A parameter that is no argument of the task: the worker gives it what the app provides for the class.

`http: Data[Client] = provided` keeps type checkers from asking submitters for it.
"""


provided: Any = SHARED
"""The default of a `Data` parameter: it says that the worker fills it in."""


class Codec(Protocol):
    """Turns the bytes that are stored into others and back: compression, encryption.

    `name` (`[a-z0-9_-]+`) is stored beside the data and must keep its meaning as long as such data exists.
    Both methods may be called from several threads at once.
    """

    @property
    def name(self) -> str: ...

    def encode(self, data: bytes) -> bytes: ...

    def decode(self, data: bytes) -> bytes: ...


class Codecs:
    """The codecs of an app: applied in order when writing; reading goes by the names stored beside the data.

    `also_read` are retired ones: nothing is written with them, what was written stays readable.
    """

    def __init__(self, codecs: Sequence[Codec] = (), *, also_read: Sequence[Codec] = ()) -> None:
        self._writing = tuple(codecs)
        self._reading: dict[str, Codec] = {}
        for field, group in (("codecs", self._writing), ("also_read", tuple(also_read))):
            for codec in group:
                name = _codec_name(codec, field)
                if name in self._reading:
                    raise InvalidInput(f"two codecs are called {name!r}", field=field, allowed="one codec per name")
                self._reading[name] = codec
        self._encoding = "+".join((_PLAIN, *(codec.name for codec in self._writing))) if self._writing else None
        if self._encoding is not None and len(self._encoding) > TEXT_MAX_BYTES:
            raise InvalidInput(
                f"the names together are {len(self._encoding)} bytes long",
                field="codecs",
                allowed=f"at most {TEXT_MAX_BYTES} bytes with {_PLAIN!r} and the plus signs",
            )

    @property
    def is_plain(self) -> bool:
        """Whether what is written is plain JSON, which everybody who sees the database can read."""
        return not self._writing

    def seal(self, data: bytes) -> tuple[bytes, str | None]:
        """The bytes to store and the encoding to store beside them; None is plain JSON."""
        for codec in self._writing:
            data = codec.encode(data)
            if not isinstance(data, bytes):
                raise InvalidInput(
                    f"{codec.name!r} encoded to {type_name(data)}", field="codecs", allowed="encode() returns bytes"
                )
        return data, self._encoding

    def open(self, data: bytes, encoding: str | None) -> bytes:
        """What `seal` was given, from what it answered. Raises `CannotDecode`, which never shows the data."""
        if encoding is None or encoding == _PLAIN:
            return data
        plain, *names = encoding.split("+")
        if plain != _PLAIN:
            raise CannotDecode(f"encoding {encoding!r} is not {_PLAIN!r} with the names of codecs")
        for name in reversed(names):
            codec = self._reading.get(name)
            if codec is None:
                raise CannotDecode(f"no codec is called {name!r} (encoding {encoding!r})")
            try:
                data = codec.decode(data)
            except Exception as error:  # its text may quote the data
                problem: str | None = f"cannot read the data ({type(error).__name__})"
            else:
                problem = None if isinstance(data, bytes) else f"decoded to {type_name(data)}, not to bytes"
            if problem is not None:
                raise CannotDecode(f"codec {name!r} {problem} (encoding {encoding!r})")
        return data

    def __repr__(self) -> str:
        return f"Codecs({self._encoding or _PLAIN})"


def _codec_name(codec: Codec, field: str) -> str:
    name = getattr(codec, "name", None)
    if not isinstance(name, str) or not _CODEC_NAME.fullmatch(name) or name == _PLAIN:
        raise InvalidInput(
            f"a codec is called {name!r}", field=field, allowed=f"{_CODEC_NAME.pattern}, other than {_PLAIN!r}"
        )
    return name


class ValueType:
    """One value of a known annotation, to and from JSON: an argument, a result, the result of a step.

    A value comes back equal to what was given, in the type of the annotation: an int given for a float is a
    float, a tuple given for a Sequence is a list. A datetime keeps its moment and its offset from UTC, not the
    name of its time zone.
    """

    __slots__ = ("_accepts_none", "_decoder", "_is_abstract", "allowed", "annotation", "json_type", "text")

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation
        self.text = annotation_text(annotation)
        self.allowed = _ALLOWED_UNTYPED if self.text == "Any" else self.text
        self.json_type = json_type_of(annotation)
        check_json_type(self.json_type)
        self._is_abstract = mentions_abstract(annotation)
        self._decoder = decoder_of(self.json_type)
        try:
            self._decoder.decode(b"null")
        except Exception:
            self._accepts_none = False
        else:
            self._accepts_none = True

    @classmethod
    def of(cls, annotation: Any) -> ValueType:
        """The type of an annotation; none at all means anything JSON can hold. `InvalidInput` if it has no JSON."""
        if annotation is inspect.Parameter.empty:
            annotation = Any
        try:
            return _value_type(annotation)
        except TypeError:  # cannot be hashed
            return _new_value_type(annotation)

    @classmethod
    def returned_by(cls, fn: Callable[..., Any]) -> ValueType:
        """The type of what a function returns, or what awaiting it gives. `InvalidInput` names the function."""
        key = getattr(fn, "__func__", fn)
        try:
            known = _returned.get(key)
            if known is None:
                known = _returned[key] = _return_type(fn)
        except TypeError:  # cannot be hashed or weakly referenced
            return _return_type(fn)
        return known

    def encode(self, value: Any, *, field: str = "result") -> bytes | None:
        """The JSON of a value, None for None. `InvalidInput` when it does not fit or would read back different."""
        if value is None and self._accepts_none:
            return None
        try:
            data = ENCODER.encode(value)
            if self._decoder.decode(data) == value:
                return data
        except Exception:  # noqa: S110 - looked at again, at leisure
            pass
        return self.check(value, field)

    def check(self, value: Any, field: str) -> bytes:
        """The JSON of a value, the slow way: says what is wrong with it."""
        data = b""
        try:
            data = ENCODER.encode(value)
            read = self._decoder.decode(data)
        except Exception as error:
            if data:
                problem = f"{type_name(value)} does not fit ({non_finite(value) or why_not_read(error)})"
            else:
                problem = f"{type_name(value)} cannot be written as JSON ({why_not_written(error)})"
        else:
            try:
                difference = difference_of(value, read, self._is_abstract)
            except Exception as error:
                difference = f"{type_name(value)} cannot be compared ({type(error).__name__})"
            if difference is None:
                return data
            problem = f"would read back different: {difference}"
        raise InvalidInput(problem, field=field, allowed=self.allowed)

    def decode(self, data: bytes | None, *, what: str = "result") -> Any:
        """The value back; None for None. Raises `CannotDecode`, naming `what`, when it no longer fits."""
        if data is None:
            return None
        try:
            return self._decoder.decode(data)
        except Exception as error:
            why = why_not_read(error)
        raise CannotDecode(f"does not fit {self.text} ({why})", what=what)

    def __repr__(self) -> str:
        return f"ValueType({self.text})"


_returned: WeakKeyDictionary[Any, ValueType] = WeakKeyDictionary()


def _new_value_type(annotation: Any) -> ValueType:
    try:
        return ValueType(annotation)
    except InvalidInput:
        raise
    except Exception as error:
        reason = str(error).partition(" - type `")[0]
        problem = f"{annotation_text(annotation)} cannot be read from JSON ({reason})"
    raise InvalidInput(problem, field="annotation", allowed=ALLOWED_TYPES)


_value_type = lru_cache(maxsize=4096)(_new_value_type)


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a task as it is named in JSON. `default` is `Parameter.empty` of inspect when required."""

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
        # The fields have names of ours, so that no argument can collide with a method of the class.
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
        """The signature of a function. `InvalidInput` names the parameter that JSON arguments cannot serve."""
        name = _function_name(fn)
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
            annotation = _resolved(fn, each.name, each.annotation)
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
                    _type_of(annotation, each.name, name),
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
        """The arguments of a call as one JSON object by name; those not given are not stored.

        Binds as the call would, without the context. `InvalidInput` names the argument that is missing, not
        expected, given twice, or does not fit its annotation.
        """
        given = self.bind(args, kwargs)
        try:
            data = ENCODER.encode(given)
            if self._read(data) == given:
                return data
        except Exception:  # noqa: S110 - looked at again, at leisure
            pass
        return ENCODER.encode(self.check(given))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name. `InvalidInput` when there are too many, or one is given twice."""
        given = dict(zip(self._positional, args, strict=False))
        if kwargs:
            if not given.keys().isdisjoint(kwargs):
                raise self._unbound(args, kwargs)
            given.update(kwargs)
        if len(args) > len(self._positional):
            raise self._unbound(args, kwargs)
        return given

    def decode(self, data: bytes) -> dict[str, Any]:
        """The keyword arguments of the call; those not given are left to their defaults.

        `CannotDecode` names the argument that is missing, not expected, or no longer fits its annotation.
        """
        try:
            return self._read(data)
        except Exception as error:
            problem = self._misread(data, error)
        raise problem

    def json_schema(self) -> dict[str, Any]:
        """A JSON schema of the arguments object, as far as the types have one; defaults that JSON can hold."""
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
        """The JSON of each argument; `InvalidInput` names what is wrong. Those in `later` will come by themselves."""
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


def _function_name(fn: object) -> str:
    inner = fn.func if isinstance(fn, partial) else fn
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def _inspected(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except Exception as error:  # a builtin that tells nothing, an annotation that cannot be evaluated
        problem = f"{_function_name(fn)} has no signature ({type(error).__name__}: {error})"
    raise InvalidInput(problem, field="fn", allowed="a function, sync or async")


def _resolved(fn: Callable[..., Any], name: str, annotation: Any) -> Any:
    """One annotation of a function with its strings replaced by what they name."""
    inner: Any = inspect.unwrap(fn.func if isinstance(fn, partial) else fn)
    inner = getattr(inner, "__func__", inner)
    if not hasattr(inner, "__globals__"):  # an object that can be called
        inner = type(inner).__call__
    code = getattr(inner, "__code__", None)
    cells = zip(code.co_freevars, inner.__closure__ or (), strict=False) if code is not None else ()
    known: dict[str, Any] = {}
    for variable, cell in cells:
        try:
            known[variable] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    try:
        hints = typing.get_type_hints(holder, getattr(inner, "__globals__", {}), known, include_extras=True)
    except Exception as error:
        shown = annotation if isinstance(annotation, str) else annotation_text(annotation)
        problem = f"the annotation {shown!r} cannot be resolved ({type(error).__name__}: {error})"
    else:
        return hints[name]
    raise InvalidInput(
        problem, field=name, allowed=f"names that {_function_name(fn)} can see in its module when it is declared"
    )


def _return_type(fn: Callable[..., Any]) -> ValueType:
    try:
        annotation = inspect.signature(fn).return_annotation
    except (TypeError, ValueError):  # a builtin without a signature
        return ValueType.of(Any)
    resolved = _resolved(fn, "return", annotation)
    if typing.get_origin(resolved) in (abc.Awaitable, abc.Coroutine):
        resolved = (typing.get_args(resolved) or (Any,))[-1]
    return _type_of(resolved, "return", _function_name(fn))


def _type_of(annotation: Any, parameter: str, function: str) -> ValueType:
    try:
        return ValueType.of(annotation)
    except InvalidInput as error:
        problem = f"of {function}: {error.problem}"
    raise InvalidInput(problem, field=parameter, allowed=ALLOWED_TYPES)


def _shared_type(annotation: Any, name: str) -> type | None:
    """The type of shared data that a parameter asks for; None when it is an argument."""
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
