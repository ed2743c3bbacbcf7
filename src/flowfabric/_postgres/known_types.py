"""A connection that knows the array types of Postgres.

The driver asks each new connection what each array type consists of, with a query that takes longer than most of our
calls. Built-in types are the same in every database, so one query serves all connections of the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import asyncpg

_FIRST_USER_TYPE = 16_384  # lower numbers belong to Postgres itself
_ANSWERED = SimpleNamespace(name="known types")  # a statement with a name: no other one has to be prepared again
_known: dict[int, list[asyncpg.Record]] = {}


class Connection(asyncpg.Connection):  # type: ignore[misc]
    """The driver's connection; what it learns about built-in types is kept for the next ones."""

    async def _introspect_types(self, typeoids: Iterable[int], timeout: float | None) -> Any:
        wanted = list(typeoids)
        if any(oid >= _FIRST_USER_TYPE for oid in wanted):
            return await super()._introspect_types(wanted, timeout)
        for oid in wanted:
            if oid not in _known:
                _known[oid], _ = await super()._introspect_types([oid], timeout)
        found = {row["oid"]: row for oid in wanted for row in _known[oid]}
        return list(found.values()), _ANSWERED
