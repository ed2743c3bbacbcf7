"""The movable clock: the clock of the test's database, which decides about time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from flowfabric._postgres.scratch import move_clock, read_clock
from flowfabric.engine.timers import TimerKind
from flowfabric.errors import InvalidInput

if TYPE_CHECKING:
    from flowfabric.engine import Engine
    from flowfabric.testing.worker import KitWorker

# Timers that executions wait for. Lapsed leases belong to crashes, retention to housekeeping.
_WAITED_FOR = tuple(
    kind.value for kind in (TimerKind.DELAY, TimerKind.ATTEMPT, TimerKind.DEADLINE, TimerKind.SUSPENSION)
)


class Clock:
    """The clock of the test's database. It keeps running, and moves only forward."""

    def __init__(self, engine: Callable[[], Awaitable[Engine]], workers: Callable[[], Iterable[KitWorker]]) -> None:
        self._engine = engine
        self._workers = workers

    async def now(self) -> datetime:
        """The current time of the clock."""
        return (await self._read())[0]

    async def advance(
        self,
        by: timedelta | None = None,
        *,
        weeks: float = 0,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> None:
        """Move it forward. The next `run_all` or `run_inline` handles timers that came due meanwhile.

        A running handler keeps its lease, as it would if the time had really passed. Its sleeps end when they are due,
        and an attempt timeout or deadline that has passed stops it.
        """
        span = (by or timedelta()) + timedelta(weeks=weeks, days=days, hours=hours, minutes=minutes, seconds=seconds)
        if span < timedelta():
            raise InvalidInput(f"got {span}", field="by", allowed="zero or more: the clock never moves back")
        workers = list(self._workers())
        held = [one.handle for worker in workers for one in list(worker.held.values())]
        async with (await self._engine())._database.connection() as connection:
            await move_clock(connection, span, held)
        for worker in workers:
            worker.clock_moved(span)

    async def advance_to(self, time: datetime) -> None:
        """Move it forward to a time in the future, which must have an offset."""
        if time.tzinfo is None:
            raise InvalidInput(f"got {time}", field="time", allowed="a time with an offset from UTC")
        await self.advance(time - await self.now())

    async def advance_to_next(self) -> timedelta | None:
        """Move it forward to the next timer that an execution waits for; returns by how much.

        That is the end of a sleep, a retry, a delayed start, a timeout or a deadline, room in the window of a rate, or
        the reset of a budget that holds executions; None if there is none.
        """
        now, due = await self._read(_WAITED_FOR)
        if due is None:
            return None
        span = max(due - now, timedelta())
        await self.advance(span)
        return span

    async def _read(self, kinds: Sequence[str] = ()) -> tuple[datetime, datetime | None]:
        async with (await self._engine())._database.connection() as connection:
            return await read_clock(connection, kinds)
