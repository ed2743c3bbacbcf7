"""The audit: finds and reports violations of the invariants."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg
from msgspec import Struct

from flowfabric._postgres import statements
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_int
from flowfabric.values.ids import ExecutionId


class Violation(Struct, frozen=True, kw_only=True):
    """A violated invariant that the audit found."""

    rule: str
    execution_id: ExecutionId | None
    detail: str | None


class Audits(Operations):
    """audit, audit_sample, repair_floors."""

    async def audit(self, partition: int | None = None, *, events: bool = False) -> list[Violation]:
        """Return the violated invariants in one partition or all: none on a sound database. It repairs nothing.

        `events` also compares with the event log, which is valid only while the log is complete. The cost grows with
        what is stored; `audit_sample` is for a database in use.
        """
        found = await self._fetch(
            statements.AUDIT,
            None if partition is None else check_int(partition, "partition", 0, 65_535),
            bool(events),
            repeatable=True,
        )
        return _violations(found)

    async def audit_sample(self, partition: int, *, limit: int = 100) -> list[Violation]:
        """Return the violated invariants of a few executions and flows of one partition, chosen at random.

        Checks the rules that an index bounds: its cost does not depend on what is stored.
        """
        found = await self._fetch(
            statements.AUDIT_SAMPLE,
            check_int(partition, "partition", 0, 65_535),
            check_int(limit, "limit", 1, 10_000),
            repeatable=True,
        )
        return _violations(found)

    async def repair_floors(self, *, limit: int = 100) -> list[ExecutionId]:
        """Make ready executions that no claim would find claimable again, in up to `limit` queues chosen at random.

        Returns the first one of each queue that was repaired: none in a sound database.
        """
        found = await self._fetch(statements.REPAIR_FLOORS, check_int(limit, "limit", 1, 10_000), repeatable=True)
        return [ExecutionId(row["id"]) for row in found]


def _violations(found: Sequence[asyncpg.Record]) -> list[Violation]:
    return [
        Violation(
            rule=row["rule"],
            execution_id=None if row["id"] is None else ExecutionId(row["id"]),
            detail=row["detail"],
        )
        for row in found
    ]
