"""Dimensions, amounts and cursors as the calls of budgets take them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final
from unicodedata import category

from flowfabric.engine.checks import check_filled
from flowfabric.errors import InvalidInput
from flowfabric.values.budget import (
    MAX_AMOUNT,
    MAX_DIMENSIONS,
)
from flowfabric.values.checks import quoted

_AMOUNTS: Final = "an integer from 0 to 2**63 - 1"


def has_control(text: str) -> bool:
    return not text.isprintable() and any(category(char) == "Cc" for char in text)


def check_dimension(value: object, field: str) -> str:
    text = check_filled(value, field)
    if has_control(text):
        raise InvalidInput(
            f"contains a control character: {quoted(text)}", field=field, allowed="names without control characters"
        )
    return text


def check_dimensions(values: Any, field: str) -> list[str]:
    names = [check_dimension(value, field) for value in values]
    if len(names) > MAX_DIMENSIONS:
        raise InvalidInput(f"{len(names)} entries", field=field, allowed=f"at most {MAX_DIMENSIONS}")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"listed twice: {quoted(twice)}", field=field, allowed="each dimension once")
    return names


def check_amount(value: object, field: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= MAX_AMOUNT:
        allowed = _AMOUNTS if least == 0 else f"an integer from {least} to 2**63 - 1"
        raise InvalidInput(f"got {quoted(value)}", field=field, allowed=allowed)
    return value


def check_amounts(value: object, field: str, least: int = 0) -> dict[str, int]:
    """Amounts by dimension, checked."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="a mapping of dimensions to amounts")
    names = check_dimensions(list(value), field)
    return {name: check_amount(value[name], f"{field}[{quoted(name)}]", least) for name in names}


def cursor_of(*parts: str) -> str:
    return base64.urlsafe_b64encode("\0".join(parts).encode()).decode()


def read_cursor(cursor: object, count: int) -> list[str]:
    try:
        parts = base64.b64decode(str(cursor), altchars=b"-_", validate=True).decode().split("\0")
    except ValueError:
        parts = []
    if len(parts) != count or any(len(part) > 1024 for part in parts):
        raise InvalidInput("cannot be read", field="cursor", allowed="a next_cursor of this list")
    return parts
