"""The audit: what must never be, looked for and reported."""

from __future__ import annotations

from msgspec import Struct

from flowfabric._postgres import statements
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_int
from flowfabric.values.ids import ExecutionId


class Violation(Struct, frozen=True, kw_only=True):
    """Something the audit found that must never be."""

    rule: str
    execution_id: ExecutionId | None
    detail: str | None


class Audits(Operations):
    """audit."""

    async def audit(self, partition: int | None = None, *, events: bool = False) -> list[Violation]:
        """What must never be, in one partition or all: empty on a sound database. Reports, repairs nothing.

        `events` also compares with the event log, which is right only while the log still holds everything.
        """
        found = await self._fetch(
            statements.AUDIT,
            None if partition is None else check_int(partition, "partition", 0, 65_535),
            bool(events),
            repeatable=True,
        )
        return [
            Violation(
                rule=row["rule"],
                execution_id=None if row["id"] is None else ExecutionId(row["id"]),
                detail=row["detail"],
            )
            for row in found
        ]
