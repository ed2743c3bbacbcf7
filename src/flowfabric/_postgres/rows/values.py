"""The type of a row, and how its values are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import msgspec

from flowfabric.errors import Corruption

Row = Mapping[str, Any]

DECODER = msgspec.json.Decoder()
_NAMES: Final = ("id", "flow_id", "name", "worker_instance_id")
_P = ParamSpec("_P")
_Record = TypeVar("_Record")
_Choice = TypeVar("_Choice", bound=StrEnum)


def decode_json(text: str | None) -> Any:
    return None if text is None else DECODER.decode(text)


def json_of(row: Row, field: str) -> Any:
    """Return the JSON of a column; None for null."""
    try:
        return decode_json(row[field])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{field}: {error}") from error


def one_of(choices: type[_Choice], row: Row, field: str) -> _Choice:
    """Return the choice that a column names."""
    try:
        return choices(row[field])
    except ValueError:
        raise ValueError(f"{field}: {row[field]!r} is unknown") from None


def readable(read: Callable[Concatenate[Row, _P], _Record]) -> Callable[Concatenate[Row, _P], _Record]:
    """Make `read` raise `Corruption` that names the row and the column, for a row that it cannot read.

    The database refuses such rows, so one that exists was written past its functions. A list with one fails as a whole,
    and says which row it is.
    """

    @functools.wraps(read)
    def named(row: Row, /, *args: _P.args, **kwargs: _P.kwargs) -> _Record:
        try:
            return read(row, *args, **kwargs)
        except (ValueError, TypeError, Corruption) as error:
            name = next((row.get(name) for name in _NAMES if row.get(name) is not None), "a row")
            why = error.detail if isinstance(error, Corruption) else error
            raise Corruption(f"cannot read {name}: {why}") from error

    return named
