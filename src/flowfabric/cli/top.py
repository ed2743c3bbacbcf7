"""`flowfabric top`: a live view of workers, lanes, rates, running and failed executions."""

from __future__ import annotations

import asyncio
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct

from flowfabric.cli import _output, lanes, waits, workers
from flowfabric.cli._database import ask
from flowfabric.cli._live import Interval, live, parse_interval
from flowfabric.cli._options import Dsn, Json
from flowfabric.cli._output import Column
from flowfabric.cli.flow import ls as flow_list
from flowfabric.errors import CursorRefused
from flowfabric.values.durations import counted
from flowfabric.values.event import EventCounts
from flowfabric.values.execution import ExecutionInfo
from flowfabric.values.flow import FlowInfo, FlowState
from flowfabric.values.held import HeldCount
from flowfabric.values.lane import LaneStats
from flowfabric.values.state import State
from flowfabric.values.wait import Wait
from flowfabric.values.worker import Leader, WorkerRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowfabric.engine import Engine

_RUNNING = 10
_FAILED = 5
_WAITS = 10
_FLOWS = 10
_FLOWS_READ = 50  # the newest; those that have ended are left out
_CLAIMS = ("acquired", "reclaimed")
_ALWAYS = ("claimed", "completed", "failed")  # the rates that are shown when nothing happens, too
_ENDED = (FlowState.COMPLETED, FlowState.FAILED, FlowState.CANCELLED)


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
    alive: list[WorkerRecord]
    leaders: list[Leader]
    lanes: list[LaneStats]
    held: list[HeldCount]
    running: list[ExecutionInfo]
    waits: list[Wait]
    flows: list[FlowInfo]
    failed: list[Failed]


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, measured over one interval, and exit.")
    ] = False,
    interval: Interval = "1s",
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Watch lanes, workers, rates, and what runs, waits and fails. With --json one line per refresh."""
    pause = parse_interval(interval)

    async def work(engine: Engine) -> None:
        watch = _Watch(engine)
        await watch.begin()
        if not once and not json and _output.terminal_width() is not None:
            await live(engine, watch.picture, pause)
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
        (counts, alive, leaders, (stats, held)), (running, failed, waiting, found_flows) = await asyncio.gather(
            asyncio.gather(
                self._count(),
                workers.alive(engine),
                engine.list_leaders(),
                asyncio.gather(engine.lane_stats(), engine.count_held()),
            ),
            asyncio.gather(
                engine.find_executions(states=[State.ACTIVE], limit=_RUNNING),
                engine.find_executions(states=[State.FAILED, State.EXPIRED], order_by="ended", limit=_FAILED),
                engine.list_waits(limit=_WAITS),
                engine.find_flows(limit=_FLOWS_READ),
            ),
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
            alive=alive,
            leaders=leaders,
            lanes=stats,
            held=held,
            running=list(running.items),
            waits=list(waiting.items),
            flows=[one for one in found_flows.items if one.state not in _ENDED][:_FLOWS],
            failed=[
                Failed(one, _output.failure_line(outcomes[one.execution_id].failure_reason))
                if one.execution_id in outcomes
                else Failed(one, "")
                for one in failed.items
            ],
        )

    async def picture(self) -> Any:
        return _picture(await self.frame())

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
    return "per second: " + ", ".join(f"{number:,.1f} {word}" for number, word in words if number or word in _ALWAYS)


def _workers(frame: Frame) -> str:
    if not frame.workers:
        return "workers: none is alive"
    leader = next((one.worker_instance_id for one in frame.leaders if one.name == "duties"), None)
    return f"workers: {frame.workers:,} with {counted(frame.slots, 'slot')}" + (
        f"; {_output.printable(leader)} leads the duties" if leader else ""
    )


def _sections(frame: Frame) -> list[tuple[str, Sequence[str | Column], Sequence[Sequence[object]]]]:
    """The tables of a frame with their titles; those without rows are left out, but never the lanes."""
    at = frame.at
    running = [
        (
            one.execution_id, one.execution_kind, one.lane_id, one.current_attempt_index + 1,
            max(at - one.started_at, timedelta()) if one.started_at else None,
        )
        for one in frame.running
    ]  # fmt: skip
    failed = [
        (
            one.execution.execution_id, one.execution.public_state, one.execution.execution_kind,
            one.execution.completed_at, _output.without_module(one.failure),
        )
        for one in frame.failed
    ]  # fmt: skip
    kind, lane = Column("KIND", cut=12), Column("LANE", cut=7, drop=2)
    found: list[tuple[str, Sequence[str | Column], Sequence[Sequence[object]]]] = [
        ("Lanes", *lanes.table(frame.lanes, frame.held)),
        ("Workers", *workers.rows(frame.alive, at)),
        ("Running, newest first", ["ID", kind, lane, "ATTEMPT", "FOR"], running),
        ("Waiting for signals, longest first", *waits.columns(frame.waits)),
        ("Flows that have not ended, newest first", *flow_list.table(frame.flows, at)),
        (
            "Failed, newest first",
            ["ID", "STATE", kind, Column("ENDED", drop=1), Column("FAILURE", cut=28)],
            failed,
        ),
    ]
    return [one for one in found if one[2] or one[0] == "Lanes"]


def _print(frame: Frame) -> None:
    for line in (_head(frame), _workers(frame), _rates(frame)):
        _output.say(line)
    for title, columns, rows in _sections(frame):
        _output.heading(title)
        _output.table(columns, rows, short=True)


def _picture(frame: Frame) -> Any:
    """The frame as large as the terminal: each table gets its share of the lines."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    screen = _output.console()
    head = [_head(frame), _workers(frame), _rates(frame)]
    parts: list[Any] = [Text(line, style="bold" if line is head[0] else "", no_wrap=True) for line in head]
    sections = _sections(frame)
    left = screen.height - len(parts) - 1
    for place, (title, columns, rows) in enumerate(sections):
        # A blank line, the title and the headers come with each table; what one does not need, the next may use.
        room = max(left // (len(sections) - place) - 3, 1)
        shown = rows[:room]
        left -= len(shown) + 3
        more = f" ({len(shown)} of {len(rows)})" if len(shown) < len(rows) else ""
        parts += [Text(f"\n{title}{more}", style="bold"), _output.fitted(columns, shown, short=True)]
    return Group(*parts, Text("Ctrl-C ends this.", style="dim"))
