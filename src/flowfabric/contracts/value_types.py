"""One typed value to and from JSON."""

from __future__ import annotations

import inspect
import types
import typing
from collections import abc
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from flowfabric.contracts.codecs import CannotDecode
from flowfabric.contracts.json_types import (
    ALLOWED_TYPES,
    ENCODER,
    annotation_text,
    check_json_type,
    decoder_of,
    json_type_of,
    mentions_abstract,
)
from flowfabric.contracts.misfits import difference_of, non_finite, type_name, why_not_read, why_not_written
from flowfabric.errors import InvalidInput

_ALLOWED_UNTYPED: Final = "text, numbers, bool, None, lists, dicts with text keys; annotate other types"


class ValueType:
    """One value of a known annotation, to and from JSON: an argument, a result, the result of a step.

    A value comes back equal to the one given, in the type of the annotation: an int given for a float becomes a
    float, a tuple given for a Sequence a list. A datetime keeps its moment and its offset from UTC, not the
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
        """Return the type of an annotation; no annotation means any JSON. `InvalidInput` if it has no JSON form."""
        if annotation is inspect.Parameter.empty:
            annotation = Any
        try:
            return _value_type(annotation)
        except TypeError:  # cannot be hashed
            return _new_value_type(annotation)

    @classmethod
    def returned_by(cls, fn: Callable[..., Any]) -> ValueType:
        """Return the type of a function's result, awaited if it is async. `InvalidInput` names the function."""
        if type(fn) is types.FunctionType and not fn.__annotations__ and not fn.__dict__:
            return ValueType.of(Any)  # most lambdas: new at every call, and there is nothing to find out
        key = getattr(fn, "__func__", fn)
        try:
            known = _returned.get(key)
            if known is None:
                known = _returned[key] = _return_type(fn)
        except TypeError:  # cannot be hashed or weakly referenced
            return _return_type(fn)
        return known

    def encode(self, value: Any, *, field: str = "result") -> bytes | None:
        """Return the JSON of a value, None for None. `InvalidInput` if it does not fit or would read back different."""
        if value is None and self._accepts_none:
            return None
        try:
            data = ENCODER.encode(value)
            if self._decoder.decode(data) == value:
                return data
        except Exception:  # noqa: S110 - the slow path below explains what is wrong
            pass
        return self.check(value, field)

    def check(self, value: Any, field: str) -> bytes:
        """Return the JSON of a value on the slow path, which explains what is wrong with it."""
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
        """Return the value; None for None. Raises `CannotDecode`, naming `what`, if it no longer fits."""
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


def function_name(fn: object) -> str:
    inner = fn.func if isinstance(fn, partial) else fn
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def resolve_annotation(fn: Callable[..., Any], name: str, annotation: Any) -> Any:
    """Return one annotation of a function with its strings resolved."""
    inner: Any = inspect.unwrap(fn.func if isinstance(fn, partial) else fn)
    inner = getattr(inner, "__func__", inner)
    if not hasattr(inner, "__globals__"):  # a callable object
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
        problem, field=name, allowed=f"names that {function_name(fn)} can see in its module when it is declared"
    )


def _return_type(fn: Callable[..., Any]) -> ValueType:
    try:
        annotation = inspect.signature(fn).return_annotation
    except (TypeError, ValueError):  # a builtin without a signature
        return ValueType.of(Any)
    resolved = resolve_annotation(fn, "return", annotation)
    if typing.get_origin(resolved) in (abc.Awaitable, abc.Coroutine):
        resolved = (typing.get_args(resolved) or (Any,))[-1]
    return checked_type(resolved, "return", function_name(fn))


def checked_type(annotation: Any, parameter: str, function: str) -> ValueType:
    try:
        return ValueType.of(annotation)
    except InvalidInput as error:
        problem = f"of {function}: {error.problem}"
    raise InvalidInput(problem, field=parameter, allowed=ALLOWED_TYPES)
