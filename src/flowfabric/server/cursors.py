"""Cursors of lists: opaque text, bound to the operation, the filters and the namespace of their list."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any, Final

import msgspec

from flowfabric.server.problems import FieldError, Problem

_FORM: Final = re.compile(r"(.+)~([0-9a-f]{12})", re.DOTALL)
_DIGITS: Final = 18  # of numbers that the database can store
_encode = msgspec.json.Encoder(order="sorted").encode


def seal(cursor: str, *filters: Any) -> str:
    """The cursor as clients get it."""
    return f"{cursor}~{_digest(filters)}"


def unseal(text: str, *filters: Any) -> str:
    """The cursor itself; refused if it is not one, or belongs to a list with other filters."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise _refused("not a cursor", "next_cursor of a page")
    if found[2] != _digest(filters):
        raise _refused("belongs to a list with other filters", "next_cursor of a page with the same filters")
    return found[1]


def number(cursor: str) -> int:
    """A cursor that is a number."""
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= _DIGITS):
        raise _refused("cannot be read", "next_cursor of a page")
    return int(cursor)


def _digest(filters: Any) -> str:
    return blake2b(_encode(filters), digest_size=6).hexdigest()


def _refused(problem: str, allowed: str) -> Problem:
    return Problem(
        422, "invalid_request", f"cursor: {problem}", errors=[FieldError(problem, parameter="cursor", allowed=allowed)]
    )
