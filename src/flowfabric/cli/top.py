"""`flowfabric top`: a live view of workers, lanes, rates, running and failed executions."""

from __future__ import annotations

import asyncio
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct

from flowfabric.cli import _output, lanes, workers
from flowfabric.cli._database import ask
from flowfabric.cli._options import Dsn, Json, parse_duration
from flowfabric.errors import CursorRefused, InvalidInput
from flowfabric.values.event import EventCounts
from flowfabric.values.execution import ExecutionInfo
from flowfabric.values.lane import LaneStats
from flowfabric.values.state import State
from flowfabric.values.worker import Leader

if TYPE_CHECKING:
    from flowfabric.engine import Engine

_RUNNING = 10
_FAILED = 5
_CLAIMS = ("acquired", "reclaimed")


class Failed(Struct, frozen=True):
    """A failed execution and its failure in one line."""

    execution: ExecutionInfo
    failure: str


class Frame(Struct, frozen=True, kw_only=True):
    """The deployment at one moment. Rates are per second since the previous frame."""

    at: datetime
    target: str
    period: timedelta
    claimed_rate: float
    completed_rate: float
    failed_rate: float
    cancelled_rate: float
    expired_rate: float
    lost_lease_rate: float
    workers: int
    slots: int
    leaders: list[Leader]
    lanes: list[LaneStats]
    running: list[ExecutionInfo]
    failed: list[Failed]


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, measured over one interval, and exit.")
    ] = False,
    interval: Annotated[str, typer.Option("--interval", "-i", metavar="DURATION", help="Refresh interval.")] = "1s",
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Watch workers, lanes, rates, running and failed executions. With --json one line per refresh."""
    pause = parse_duration(interval, "--interval").total_seconds()
    if not 0.1 <= pause <= 3600:
        raise InvalidInput(f"got {interval!r}", field="--interval", allowed="100ms to 1h")

    async def work(engine: Engine) -> None:
        watch = _Watch(engine)
        await watch.begin()
        if once or json or not sys.stdout.isatty():
            while True:
                await asyncio.sleep(pause)
                frame = await watch.frame()
                if json and once:
                    _output.document(frame)
                elif json:
                    _output.line(frame)
                else:
                    _print(frame)
                if once:
                    return
                sys.stdout.flush()
        from rich.live import Live  # noqa: PLC0415

        with Live(_picture(await watch.frame()), console=_output.console(), screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(pause)
                live.update(_picture(await watch.frame()), refresh=True)

    ask(dsn, work)


class _Watch:
    """Reads the deployment repeatedly and counts the events in between."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cursor: Any = None
        self._at = 0.0

    async def begin(self) -> None:
        self._cursor = (await self._engine.count_events()).cursor
        self._at = time.monotonic()

    async def frame(self) -> Frame:
        engine = self._engine
        counts, alive, leaders, stats, running, failed = await asyncio.gather(
            self._count(),
            workers.alive(engine),
            engine.list_leaders(),
            engine.lane_stats(),
            engine.find_executions(states=[State.ACTIVE], limit=_RUNNING),
            engine.find_executions(states=[State.FAILED, State.EXPIRED], limit=_FAILED),
        )
        now = time.monotonic()
        period, self._at, self._cursor = max(now - self._at, 0.001), now, counts.cursor
        outcomes = await engine.read_outcomes([one.execution_id for one in failed.items]) if failed.items else {}
        rate = _Rates(counts, period)
        return Frame(
            at=datetime.now(UTC),
            target=engine.target,
            period=timedelta(seconds=period),
            claimed_rate=rate.lease(*_CLAIMS),
            completed_rate=rate.completion("success"),
            failed_rate=rate.completion("failed"),
            cancelled_rate=rate.completion("cancelled"),
            expired_rate=rate.completion("expired"),
            lost_lease_rate=rate.lease("expired"),
            workers=len(alive),
            slots=sum(one.slots or 0 for one in alive),
            leaders=leaders,
            lanes=stats,
            running=list(running.items),
            failed=[
                Failed(one, _output.failure_line(outcomes[one.execution_id].failure_reason))
                if one.execution_id in outcomes
                else Failed(one, "")
                for one in failed.items
            ],
        )

    async def _count(self) -> EventCounts:
        try:
            return await self._engine.count_events(self._cursor)
        except CursorRefused:  # a restore or failover lost the events up to here
            return await self._engine.count_events()


class _Rates:
    def __init__(self, counts: EventCounts, period: float) -> None:
        self._counts = counts
        self._period = period

    def lease(self, *words: str) -> float:
        return round(sum(self._counts.lease.get(word, 0) for word in words) / self._period, 2)

    def completion(self, word: str) -> float:
        return round(self._counts.completion.get(word, 0) / self._period, 2)


def _head(frame: Frame) -> str:
    return f"flowfabric  {_output.printable(frame.target)}  {_output.when(frame.at)}"


def _rates(frame: Frame) -> str:
    words = [
        (frame.claimed_rate, "claimed"),
        (frame.completed_rate, "completed"),
        (frame.failed_rate, "failed"),
        (frame.cancelled_rate, "cancelled"),
        (frame.expired_rate, "expired"),
        (frame.lost_lease_rate, "leases lost"),
    ]
    return "per second: " + ", ".join(f"{number:,.1f} {word}" for number, word in words)


def _workers(frame: Frame) -> str:
    if not frame.workers:
        return "workers: none is alive"
    leader = next((one.worker_instance_id for one in frame.leaders if one.name == "duties"), None)
    return f"workers: {frame.workers:,} with {frame.slots:,} slots" + (
        f"; {_output.printable(leader)} leads the duties" if leader else ""
    )


def _running(frame: Frame) -> tuple[list[str], list[tuple[Any, ...]]]:
    return ["ID", "KIND", "LANE", "ATTEMPT", "FOR"], [
        (
            one.execution_id, one.execution_kind, one.lane_id, one.current_attempt_index + 1,
            max(frame.at - one.started_at, timedelta()) if one.started_at else None,
        )
        for one in frame.running
    ]  # fmt: skip


def _failed(frame: Frame) -> tuple[list[str], list[tuple[Any, ...]]]:
    return ["ID", "STATE", "KIND", "ENDED", "FAILURE"], [
        (
            one.execution.execution_id, one.execution.public_state, one.execution.execution_kind,
            one.execution.completed_at, one.failure,
        )
        for one in frame.failed
    ]  # fmt: skip


def _print(frame: Frame) -> None:
    _output.say(_head(frame))
    _output.say(_workers(frame))
    _output.say(_rates(frame))
    _output.heading("Lanes")
    _output.table(lanes.HEADERS, [lanes.row(one) for one in frame.lanes])
    if frame.running:
        _output.heading("Running, newest first")
        _output.table(*_running(frame))
    if frame.failed:
        _output.heading("Failed, newest first")
        _output.table(*_failed(frame))


def _picture(frame: Frame) -> Any:
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    parts: list[Any] = [Text(_head(frame), style="bold"), Text(_workers(frame)), Text(_rates(frame)), Text()]
    parts.append(_output.rich_table(lanes.HEADERS, [lanes.row(one) for one in frame.lanes]))
    if frame.running:
        parts += [Text("\nRunning, newest first", style="bold"), _output.rich_table(*_running(frame))]
    if frame.failed:
        parts += [Text("\nFailed, newest first", style="bold"), _output.rich_table(*_failed(frame))]
    return Group(*parts, Text("\nPress Ctrl-C to end.", style="dim"))
