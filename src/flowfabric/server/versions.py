"""`If-Match`: a change that holds only for the version that the caller read, by the `ETag` of its GET.

Budgets, quotas and schedules have a definition, which people change, and numbers that move with every execution. Their
tags have two parts, one for the definition and one for the whole record: `If-None-Match` compares both, `If-Match` only
the first. A caller who raises a limit wants to know whether the limit is still the one that was read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Final

from flowfabric.contracts import json_form
from flowfabric.errors import Contention
from flowfabric.server.call import Call
from flowfabric.server.problems import Problem

_STALE: Final = "If-Match names another version than the stored one"


def tag_of(defined: Any, record: Any) -> str:
    """The tag of a record: of when it was defined, and of all that it shows."""
    return f'"{_digest(defined)}.{_digest(record)}"'


def check_match(call: Call, tag: str, detail: str = _STALE) -> bool:
    """Refuse a change (412) if `If-Match` names another version than `tag`; returns whether it names one.

    It names none if it is missing, or `*`: whichever version there is.
    """
    if call.if_match is None or call.if_match.strip() == "*":
        return False
    if _defined(tag) not in map(_defined, call.if_match.split(",")):
        raise stale(detail)
    return True


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Refuse a change (412) that the engine refuses because the record was changed after it was read."""
    try:
        yield
    except Contention as error:
        if error.kind != "stale_definition":
            raise
        raise stale() from None


def stale(detail: str = _STALE) -> Problem:
    """The refusal of a change of something that has changed meanwhile."""
    return Problem(412, "precondition_failed", detail)


def _defined(tag: str) -> str:
    return tag.strip().removeprefix("W/").strip('"').partition(".")[0]


def _digest(value: Any) -> str:
    return blake2b(json_form.encode(value), digest_size=8).hexdigest()
