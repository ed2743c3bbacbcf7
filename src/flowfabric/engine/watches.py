"""Watches: notifications when executions end or have new frames, and their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Literal, TypeAlias, get_args

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_batch, check_duration, check_word
from flowfabric.values.execution import Outcome
from flowfabric.values.ids import ExecutionId, parse_execution_id

WatchTopic: TypeAlias = Literal["ended", "frames"]
_TOPICS = frozenset(get_args(WatchTopic))


class Watches(Operations):
    """watch, unwatch, read_outcomes."""

    async def watch(
        self, execution_ids: Sequence[ExecutionId], within: timedelta, *, topic: WatchTopic = "ended"
    ) -> None:
        """Ask for one notification (`wakeups`) when one of up to 1,000 executions ends within a time.

        With the topic `frames` also when one has new frames, or an attempt of it ends. Notifications may be lost: poll
        once more after this call, and from time to time.
        """
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution_id(one) for one in execution_ids]
        await self._fetch(
            statements.WATCH,
            self._instance,
            check_word(topic, _TOPICS, "topic"),
            check_duration(within, "within"),
            *self._all_at(targets),
            repeatable=True,
        )

    async def unwatch(self, execution_ids: Sequence[ExecutionId], *, topic: WatchTopic = "ended") -> None:
        """Stop watching these executions."""
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution_id(one) for one in execution_ids]
        await self._fetch(
            statements.UNWATCH,
            self._instance,
            check_word(topic, _TOPICS, "topic"),
            *self._all_at(targets),
            repeatable=True,
        )

    @contextlib.contextmanager
    def wakeups(self, topic: WatchTopic) -> Iterator[asyncio.Event | None]:
        """Return an event that is set when a watched execution of this process has news; None without notifications."""
        if self._listener is None:
            yield None
            return
        with self._listener.topic(topic) as told:
            yield told

    def take_told(self) -> set[ExecutionId] | None:
        """Return the watched executions with new frames since the last call; None: any of them may have some."""
        told = set() if self._listener is None else self._listener.take_streams()
        return None if told is None else {ExecutionId(one) for one in told}

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
