"""Versions of budgets and quotas: records with a definition, which people change, and numbers that move.

The numbers move with every execution, so a tag has two parts: one for the definition and one for the whole record.
`If-None-Match` compares both, `If-Match` only the definition: a caller who raises a limit wants to know whether the
limit is still the one that was read, and usage keeps changing meanwhile.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from flowfabric.contracts import json_form
from flowfabric.server.call import Call
from flowfabric.server.problems import Problem


def tag_of(defined: Any, record: Any) -> str:
    """The tag of a record: of when it was defined, and of all that it shows."""
    return f'"{_digest(defined)}.{_digest(record)}"'


def check_definition(call: Call, tag: str) -> bool:
    """Refuse a change (412) if `If-Match` names another definition; returns whether it names one at all."""
    if call.if_match is None or call.if_match.strip() == "*":
        return False
    given = [one.strip().removeprefix("W/").strip('"').partition(".")[0] for one in call.if_match.split(",")]
    if tag.strip('"').partition(".")[0] not in given:
        raise stale()
    return True


def stale() -> Problem:
    """The refusal of a change of a definition that has changed meanwhile."""
    return Problem(412, "precondition_failed", "If-Match names another version than the stored one")


def _digest(value: Any) -> str:
    return blake2b(json_form.encode(value), digest_size=8).hexdigest()
