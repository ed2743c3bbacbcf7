"""Watches: notifications when executions end, and their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_batch, check_duration
from flowfabric.values.execution import Outcome
from flowfabric.values.ids import ExecutionId, parse_execution_id


class Watches(Operations):
    """watch, unwatch, read_outcomes."""

    async def watch(self, execution_ids: Sequence[ExecutionId], within: timedelta) -> None:
        """Ask for a notification (`ended_wakeups`) when one of up to 1,000 executions ends within a time.

        Notifications may be lost: poll once more after this call, and from time to time.
        """
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution_id(one) for one in execution_ids]
        await self._fetch(
            statements.WATCH,
            self._instance,
            check_duration(within, "within"),
            *self._all_at(targets),
            repeatable=True,
        )

    async def unwatch(self, execution_ids: Sequence[ExecutionId]) -> None:
        """Stop watching these executions."""
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution_id(one) for one in execution_ids]
        await self._fetch(
            statements.UNWATCH,
            self._instance,
            *self._all_at(targets),
            repeatable=True,
        )

    @contextlib.contextmanager
    def ended_wakeups(self) -> Iterator[asyncio.Event | None]:
        """Return an event that is set when a watched execution of this process ends; None without notifications."""
        if self._listener is None:
            yield None
            return
        with self._listener.topic("ended") as told:
            yield told

    async def read_outcomes(self, execution_ids: Sequence[ExecutionId]) -> dict[ExecutionId, Outcome]:
        """Return how up to 1,000 executions ended; unfinished ones are absent, unknown ones have no state."""
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution_id(one) for one in execution_ids]
        found = await self._fetch(
            statements.READ_OUTCOMES,
            *self._all_at(targets),
            repeatable=True,
        )
        return {targets[row["ordinal"] - 1]: rows.outcome(row) for row in found}
