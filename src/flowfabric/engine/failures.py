"""Failures in groups."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_int, check_list, check_tag
from flowfabric.errors import InvalidInput
from flowfabric.values.api_key import check_namespaces
from flowfabric.values.checks import check_lane, check_text, moment
from flowfabric.values.failure import Failures
from flowfabric.values.state import UNSUCCESSFUL, State

_DEFAULT = (State.FAILED, State.EXPIRED)


class FailureReads(Operations):
    """list_failures."""

    async def list_failures(
        self,
        *,
        namespaces: Collection[str] | None = None,
        lane_ids: Collection[str] | None = None,
        kinds: Collection[str] | None = None,
        states: Collection[State | str] = _DEFAULT,
        tag: tuple[str, str] | None = None,
        created_from: datetime | None = None,
        created_before: datetime | None = None,
        most: int = 10_000,
        limit: int = 100,
    ) -> Failures:
        """Group executions that ended without success by kind, state, error type and text, the largest group first.

        Looks at the `most` that ended last in these states. Ids, addresses and numbers in a text count as equal.
        """
        wanted = []
        for state in check_list(states, "states"):
            if state not in UNSUCCESSFUL:
                raise InvalidInput(f"got {state!r}", field="states", allowed=", ".join(sorted(UNSUCCESSFUL)))
            wanted.append(State(state).value)
        found = await self._fetch(
            statements.LIST_FAILURES,
            check_namespaces(namespaces),
            None if lane_ids is None else [check_lane(lane, "lane_ids") for lane in check_list(lane_ids, "lane_ids")],
            None if kinds is None else [check_text(kind, "kinds") for kind in check_list(kinds, "kinds")],
            wanted,
            *check_tag(tag, "tag"),
            None if created_from is None else moment(created_from, "created_from"),
            None if created_before is None else moment(created_before, "created_before"),
            check_int(most, "most", 1, 50_000),
            check_int(limit, "limit", 1, 1000),
            repeatable=True,
        )
        return Failures(
            groups=tuple(rows.failure_group(row) for row in found),
            examined=found[0]["examined"] if found else 0,
            is_complete=found[0]["is_complete"] if found else True,
        )
