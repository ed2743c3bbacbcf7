"""`flowfabric flow show`: draw a flow, once or until it ends."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask, resolve_flow
from flowfabric.cli._live import parse_interval
from flowfabric.cli._options import Dsn, Json
from flowfabric.cli._program import NO, exit_with
from flowfabric.cli.flow._frame import Frame, age, failures, read_frame
from flowfabric.cli.flow._options import Expand, Id
from flowfabric.values.flow import FlowState
from flowfabric.values.state import State

if TYPE_CHECKING:
    from flowfabric.engine import Engine

Line = list[tuple[str, str | None]]


def show(
    flow: Id,
    expand: Expand = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Redraw it until it ends. Exits with 1 unless it completed.")
    ] = False,
    interval: Annotated[
        str, typer.Option("--interval", "-i", metavar="DURATION", help="Refresh interval of --watch.")
    ] = "1s",
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Draw a flow: its nodes, their states and dependencies, followed by the failures.

    If the output is not a terminal, --watch prints the flow again whenever it changed; with --json one line each.
    """
    pause = parse_interval(interval)

    async def work(engine: Engine) -> int:
        flow_id = await resolve_flow(engine, flow)
        frame = await read_frame(engine, flow_id)
        if not watch:
            show_frame(frame, expand=expand, as_json=json)
            return 0
        if json or not sys.stdout.isatty():
            frame = await _follow(engine, frame, pause, expand=expand, as_json=json)
        else:
            frame = await _live(engine, frame, pause, expand=expand)
        return 0 if frame.state == FlowState.COMPLETED else NO

    exit_with(ask(dsn, work))


def show_frame(frame: Frame, *, expand: bool, as_json: bool) -> None:
    """Print a flow."""
    if as_json:
        _output.document(_as_json(frame))
    else:
        _print(frame, expand=expand)


async def _follow(engine: Engine, frame: Frame, pause: float, *, expand: bool, as_json: bool) -> Frame:
    """Print it whenever it has changed, until it ends."""
    is_first = True
    shown: tuple[object, ...] | None = None
    while True:
        if (frame.graph, frame.output) != shown or frame.is_ended:
            if as_json:
                _output.line(_as_json(frame))
            else:
                if not is_first:
                    _output.say()
                _print(frame, expand=expand)
                sys.stdout.flush()
            is_first, shown = False, (frame.graph, frame.output)
        if frame.is_ended:
            return frame
        await asyncio.sleep(pause)
        frame = await read_frame(engine, frame.graph.flow.flow_id, output=not as_json)


async def _live(engine: Engine, frame: Frame, pause: float, *, expand: bool) -> Frame:
    """Redraw it in place on the terminal until it ends; the last picture stays."""
    from rich.live import Live  # noqa: PLC0415

    with Live(_picture(frame, expand=expand), console=_output.console(), auto_refresh=False) as live:
        live.refresh()
        while not frame.is_ended:
            await asyncio.sleep(pause)
            frame = await read_frame(engine, frame.graph.flow.flow_id, output=True)
            live.update(_picture(frame, expand=expand), refresh=True)
    return frame


def _as_json(frame: Frame) -> dict[str, Any]:
    return {
        "flow": frame.graph.flow,
        "public_flow_state": frame.state,
        "summary": frame.summary,
        "nodes": frame.graph.nodes,
        "edges": frame.graph.edges,
    }


def _head(frame: Frame) -> list[Line]:
    flow, nodes = frame.graph.flow, frame.graph.nodes
    name = _output.printable(" ".join(flow.flow_kind.split()))
    head: Line = [(f"{name}  {flow.flow_id}  " if name else f"{flow.flow_id}  ", None), (frame.state, frame.state)]
    head.append((f"  {len(nodes):,} node{'' if len(nodes) == 1 else 's'}", None))
    counts = Counter(one.state for one in nodes)
    for state in sorted(counts, key=list(State).index):
        head += [(", " if len(head) > 3 else ": ", None), (f"{counts[state]:,} {state.value}", state.value)]
    times = f"  {_output.duration(age(frame.at, flow.created_at))} old"
    if frame.is_ended and (ends := [one.completed_at for one in nodes if one.completed_at]):
        times += f", took {_output.duration(max(ends) - flow.created_at)}"
    if flow.namespace:
        times += f"  in {_output.printable(flow.namespace)}"
    lines = [[*head, (times, None)]]
    if flow.cancelled_at is not None:
        why = _output.printable(" ".join((flow.cancel_reason or "").split()))
        words = f" {_output.when(flow.cancelled_at)} ({flow.cancellation_policy})" + (f": {why}" if why else "")
        lines.append([("cancelled", "cancelled"), (words, None)])
    return lines


def _drawn(frame: Frame, *, expand: bool) -> list[Line]:
    from flowfabric import drawing  # noqa: PLC0415

    signs = "".join(look.sign for look in drawing.LOOKS.values()) + "│…"
    lines = drawing.to_text(
        frame.graph,
        width=_output.console().width if sys.stdout.isatty() else None,
        unicode=_output.can_show(signs),
        fold=None if expand else drawing.FOLD,
    )
    return [[(piece.text, piece.state) for piece in line] for line in lines]


def _print(frame: Frame, *, expand: bool) -> None:
    for line in _head(frame):
        _output.coloured(line)
    _output.say()
    for line in _drawn(frame, expand=expand):
        _output.coloured(line)
    if frame.output:
        _output.heading("Output")
        _output.table(["NODE", "LAST LINE"], frame.output)
    title, headers, rows = failures(frame)
    if rows:
        _output.heading(title)
        _output.table(headers, rows)


def _picture(frame: Frame, *, expand: bool) -> Any:
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    parts: list[Any] = [_output.rich_line(line) for line in _head(frame)]
    parts += [Text(), *(_output.rich_line(line) for line in _drawn(frame, expand=expand))]
    if frame.output:
        parts += [Text("\nOutput", style="bold"), _output.fitted(["NODE", "LAST LINE"], frame.output)]
    title, headers, rows = failures(frame)
    if rows:
        parts += [Text(f"\n{title}", style="bold"), _output.fitted(headers, rows)]
    return Group(*parts)
