"""`flowfabric flow`: draw flows, list, export, wait for, cancel, replay and delete them."""

from __future__ import annotations

import asyncio
import json as _json
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct

from flowfabric.cli import _completion, _output
from flowfabric.cli._database import ask, near, resolve_flow
from flowfabric.cli._loading import AppOption, load_app
from flowfabric.cli._options import Dsn, Json, Namespace, Yes, login_name, parse_duration
from flowfabric.cli._program import NO, TIMEOUT, confirm, tell
from flowfabric.cli.wait import Timeout
from flowfabric.errors import InvalidInput, NotFound, TimedOut
from flowfabric.values.flow import (
    CancellationPolicy,
    CancellationScheduled,
    FlowGraph,
    FlowInfo,
    FlowNode,
    FlowState,
    FlowSummary,
    PartiallyCancelled,
)
from flowfabric.values.graph import RACE_LOST, replayable
from flowfabric.values.state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowfabric.app.app import App
    from flowfabric.client.flow_run import FlowRun
    from flowfabric.contracts.codecs import Codecs
    from flowfabric.engine import Engine
    from flowfabric.engine.flow_reads import Member
    from flowfabric.values.ids import FlowId

app = typer.Typer(help="Draw flows, list, export, wait for, cancel, replay, delete.", invoke_without_command=True)

_PAGE = 1000
_CHUNK = 500
_FAILURES = 20  # for people: the first
_ENDED = (FlowState.COMPLETED, FlowState.FAILED, FlowState.CANCELLED)


class Format(StrEnum):
    """A language for pictures."""

    MERMAID = "mermaid"
    DOT = "dot"
    SVG = "svg"


_ENDINGS = {
    ".svg": Format.SVG,
    ".dot": Format.DOT,
    ".gv": Format.DOT,
    ".mmd": Format.MERMAID,
    ".mermaid": Format.MERMAID,
}

Id = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The flow: its id, or enough of its beginning.",
        autocompletion=_completion.flows,
        show_default=False,
    ),
]
Expand = Annotated[bool, typer.Option("--expand", "-e", help="Draw every node; else many alike are drawn as one.")]
Reason = Annotated[
    str | None,
    typer.Option("--reason", "-r", metavar="TEXT", help="Why; stored with the attempts.", show_default=False),
]


@app.callback()
def _default(ctx: typer.Context, json: Json = False, dsn: Dsn = None) -> None:
    """Draw flows, list, export, wait for, cancel, replay, delete. Without a command: ls."""
    if ctx.invoked_subcommand is None:
        ls(json=json, dsn=dsn)


# ls


@app.command()
def ls(
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Only of this name.",
            autocompletion=_completion.flow_names,
            show_default=False,
        ),
    ] = None,
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=100_000, help="How many at most.")] = 50,
    cursor: Annotated[
        str | None,
        typer.Option("--cursor", metavar="CURSOR", help="Go on where an earlier list ended.", show_default=False),
    ] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List flows, newest first. The status is as last counted: a moment behind what `flow show` says."""

    async def work(engine: Engine) -> None:
        found: list[FlowInfo] = []
        rest = cursor
        while True:
            page = await engine.find_flows(
                namespace=namespace, flow_kind=name, cursor=rest, limit=min(limit - len(found), _PAGE)
            )
            found += page.items
            rest = page.next_cursor
            if rest is None or len(found) >= limit:
                break
        if json:
            _output.document({"items": found, "next_cursor": rest})
            return
        if found:
            _show_list(found, await _now(engine))
        else:
            _output.note(await _none(engine, name))
        if rest is not None:
            _output.note(f"there is more: --limit, or --cursor {rest}")

    ask(dsn, work)


def _show_list(found: Sequence[FlowInfo], now: datetime) -> None:
    has_namespace = any(one.namespace for one in found)
    rows: list[list[object]] = [
        [
            one.flow_id,
            one.status,
            one.node_count,
            _age(now, one.created_at),
            *[one.namespace] * has_namespace,
            one.flow_kind,
        ]
        for one in found
    ]
    _output.table(["ID", "STATUS", "NODES", "AGE", *["NAMESPACE"] * has_namespace, "NAME"], rows)


async def _none(engine: Engine, name: str | None) -> str:
    """A list that is empty because of a name that is not there says what is near."""
    known = {one.flow_kind for one in (await engine.find_flows(limit=_PAGE)).items}
    hint = "" if name is None or name in known else near(name, sorted(known))
    return f"no flow matches; {hint}" if hint else "no flow matches"


async def _now(engine: Engine) -> datetime:
    return datetime.fromtimestamp(await engine.server_time_ms() / 1000, UTC)


def _age(now: datetime, then: datetime) -> timedelta:
    return max(now - then, timedelta())


# show


class Frame(Struct, frozen=True, kw_only=True):
    """One look at a flow. Without members it has no summary."""

    at: datetime
    graph: FlowGraph
    summary: FlowSummary | None

    @property
    def state(self) -> str:
        """What its members make of it, by the rule of the summary; without any what its header says."""
        return self.graph.flow.public_flow_state if self.summary is None else self.summary.public_flow_state.value

    @property
    def is_ended(self) -> bool:
        return self.state in _ENDED


@app.command()
def show(
    flow: Id,
    expand: Expand = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Draw it anew until it has ended; exit 1 unless it completed.")
    ] = False,
    interval: Annotated[
        str, typer.Option("--interval", "-i", metavar="DURATION", help="Between two looks of --watch.")
    ] = "1s",
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Draw a flow: its nodes with their states and what they come after, and what failed below.

    Away from a terminal --watch writes it anew when something changed, with --json as one line each.
    """
    pause = parse_duration(interval, "--interval").total_seconds()
    if not 0.1 <= pause <= 3600:
        raise InvalidInput(f"got {interval!r}", field="--interval", allowed="100ms to 1h")

    async def work(engine: Engine) -> int:
        flow_id = await resolve_flow(engine, flow)
        frame = await _look(engine, flow_id)
        if not watch:
            if json:
                _output.document(_as_json(frame))
            else:
                _print(frame, expand=expand)
            return 0
        if json or not sys.stdout.isatty():
            frame = await _follow(engine, frame, pause, expand=expand, as_json=json)
        else:
            frame = await _live(engine, frame, pause, expand=expand)
        return 0 if frame.state == FlowState.COMPLETED else NO

    if code := ask(dsn, work):
        raise typer.Exit(code)


async def _look(engine: Engine, flow_id: FlowId) -> Frame:
    # The nodes come last: what the summary says has ended has ended in the picture, too.
    await engine.project_flow_summary(flow_id)
    summary = await engine.read_flow_summary(flow_id)
    graph = await engine.read_flow_graph(flow_id)
    if graph is None:
        raise NotFound("flow", flow_id)
    return Frame(at=await _now(engine), graph=graph, summary=summary)


async def _follow(engine: Engine, frame: Frame, pause: float, *, expand: bool, as_json: bool) -> Frame:
    """Write what is new until it has ended."""
    is_first = True
    shown: FlowGraph | None = None
    while True:
        if frame.graph != shown or frame.is_ended:
            if as_json:
                _output.line(_as_json(frame))
            else:
                if not is_first:
                    _output.say()
                _print(frame, expand=expand)
                sys.stdout.flush()
            is_first, shown = False, frame.graph
        if frame.is_ended:
            return frame
        await asyncio.sleep(pause)
        frame = await _look(engine, frame.graph.flow.flow_id)


async def _live(engine: Engine, frame: Frame, pause: float, *, expand: bool) -> Frame:
    """Draw it on the terminal, in place, until it has ended; the last picture stays."""
    from rich.live import Live  # noqa: PLC0415

    with Live(_picture(frame, expand=expand), console=_output.console(), auto_refresh=False) as live:
        live.refresh()
        while not frame.is_ended:
            await asyncio.sleep(pause)
            frame = await _look(engine, frame.graph.flow.flow_id)
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


_Line = list[tuple[str, str | None]]


def _head(frame: Frame) -> list[_Line]:
    flow, nodes = frame.graph.flow, frame.graph.nodes
    name = _output.printable(" ".join(flow.flow_kind.split()))
    head: _Line = [(f"{name}  {flow.flow_id}  " if name else f"{flow.flow_id}  ", None), (frame.state, frame.state)]
    head.append((f"  {len(nodes):,} node{'' if len(nodes) == 1 else 's'}", None))
    counts = Counter(one.state for one in nodes)
    for state in sorted(counts, key=list(State).index):
        head += [(", " if len(head) > 3 else ": ", None), (f"{counts[state]:,} {state.value}", state.value)]
    age = f"  {_output.duration(_age(frame.at, flow.created_at))} old"
    if frame.is_ended and (ends := [one.completed_at for one in nodes if one.completed_at]):
        age += f", took {_output.duration(max(ends) - flow.created_at)}"
    if flow.namespace:
        age += f"  in {_output.printable(flow.namespace)}"
    lines = [[*head, (age, None)]]
    if flow.cancelled_at is not None:
        why = _output.printable(" ".join((flow.cancel_reason or "").split()))
        words = f" {_output.when(flow.cancelled_at)} ({flow.cancellation_policy})" + (f": {why}" if why else "")
        lines.append([("cancelled", "cancelled"), (words, None)])
    return lines


def _drawn(frame: Frame, *, expand: bool) -> list[_Line]:
    from flowfabric import drawing  # noqa: PLC0415

    signs = "".join(look.sign for look in drawing.LOOKS.values()) + "│…"
    lines = drawing.to_text(
        frame.graph,
        width=_output.console().width if sys.stdout.isatty() else None,
        unicode=_output.can_show(signs),
        fold=None if expand else drawing.FOLD,
    )
    return [[(piece.text, piece.state) for piece in line] for line in lines]


def _failures(frame: Frame) -> tuple[str, list[str], list[tuple[Any, ...]]]:
    """Members that did not succeed of themselves: a title and the columns. In a cancelled flow the rest is no news."""
    is_cancelled = frame.graph.flow.cancelled_at is not None
    found = [one for one in frame.graph.nodes if _is_failure(one) and not (is_cancelled and _is_cancelled(one))]
    rest = len(found) - _FAILURES
    title = f"Failures, the first {_FAILURES} of {len(found):,}" if rest > 0 else "Failures"
    rows = [
        (
            one.name or one.execution_kind,
            one.state,
            one.execution_id,
            _output.failure_line(one.failure_reason or one.cancellation_reason),
        )
        for one in found[:_FAILURES]
    ]
    return title, ["NODE", "STATE", "ID", "FAILURE"], rows


def _is_cancelled(node: FlowNode) -> bool:
    return node.state is State.CANCELLED


def _is_failure(node: FlowNode) -> bool:
    if _is_cancelled(node):
        return not (node.cancellation_reason or "").startswith("sibling_quorum_")
    return node.state in (State.FAILED, State.EXPIRED)


def _print(frame: Frame, *, expand: bool) -> None:
    for line in _head(frame):
        _output.coloured(line)
    _output.say()
    for line in _drawn(frame, expand=expand):
        _output.coloured(line)
    title, headers, rows = _failures(frame)
    if rows:
        _output.heading(title)
        _output.table(headers, rows)


def _picture(frame: Frame, *, expand: bool) -> Any:
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    parts: list[Any] = [_output.rich_line(line) for line in _head(frame)]
    parts += [Text(), *(_output.rich_line(line) for line in _drawn(frame, expand=expand))]
    title, headers, rows = _failures(frame)
    if rows:
        parts += [Text(f"\n{title}", style="bold"), _output.rich_table(headers, rows)]
    return Group(*parts)


# export


@app.command()
def export(
    flow: Id,
    language: Annotated[
        Format | None,
        typer.Option(
            "--format",
            "-f",
            metavar="FORMAT",
            help="mermaid, dot or svg. Default: by the ending of --out, else mermaid.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Into this file, not to standard output.", show_default=False),
    ] = None,
    expand: Expand = False,
    dsn: Dsn = None,
) -> None:
    """Draw a flow as it stands for other programs: a Mermaid chart, a Graphviz graph, an SVG picture."""
    from flowfabric import drawing  # noqa: PLC0415

    chosen = language or _ENDINGS.get(out.suffix.lower() if out else "", Format.MERMAID)
    draw = {Format.MERMAID: drawing.to_mermaid, Format.DOT: drawing.to_dot, Format.SVG: drawing.to_svg}[chosen]

    async def work(engine: Engine) -> FlowGraph:
        flow_id = await resolve_flow(engine, flow)
        found = await engine.read_flow_graph(flow_id)
        if found is None:
            raise NotFound("flow", flow_id)
        return found

    # Pictures are UTF-8, wherever they go.
    data = draw(ask(dsn, work), fold=None if expand else drawing.FOLD).encode()
    if out is None:
        typer.echo(data, nl=False)
    else:
        out.write_bytes(data)
        _output.note(f"{_output.printable(out)}: {len(data):,} bytes of {chosen.value}")


# wait


@app.command()
def wait(flow: Id, timeout: Timeout = None, app: AppOption = None, json: Json = False, dsn: Dsn = None) -> None:
    """Wait until every node has ended and print results. Exit 1 unless the flow completed, 3 when it took too long."""
    span = None if timeout is None else parse_duration(timeout, "--timeout")
    known = None if app is None else load_app(app)

    async def work(engine: Engine) -> int:
        flow_id = await resolve_flow(engine, flow)
        run = _handle(engine, flow_id, known)
        try:
            if (await _look(engine, flow_id)).graph.nodes:
                await run.wait(span)
        except TimedOut:
            frame = await _look(engine, flow_id)
            if json:
                _output.document({"flow_id": flow_id, "public_flow_state": frame.state, "is_ended": False})
            else:
                live = sum(not one.state.is_terminal for one in frame.graph.nodes)
                _output.note(
                    f"flowfabric: {flow_id} has not ended in time; it is {frame.state},"
                    f" {live:,} of {len(frame.graph.nodes):,} nodes have not ended"
                )
            return TIMEOUT
        finally:
            await (await run._client()).outcomes.close()
        frame = await _look(engine, flow_id)
        members = await engine.list_flow_members(flow_id, results=True)
        _tell_end(frame, members, None if known is None else known.codecs, as_json=json)
        return 0 if frame.state == FlowState.COMPLETED else NO

    if code := ask(dsn, work, notifications=True):
        raise typer.Exit(code)


def _handle(engine: Engine, flow_id: FlowId, known: App | None) -> FlowRun:
    """A handle that uses the connections of the command."""
    from flowfabric.app.app import App  # noqa: PLC0415
    from flowfabric.client import AsyncClient  # noqa: PLC0415

    connector = App() if known is None else known
    client = AsyncClient(engine, connector)
    connector.adopt(client)
    return client.flow(flow_id)


def _tell_end(frame: Frame, members: Sequence[Member], codecs: Codecs | None, *, as_json: bool) -> None:
    from flowfabric.client.flow_run import named  # noqa: PLC0415

    flow_id = frame.graph.flow.flow_id
    results = {
        named(one): _output.payload(one.result, one.result_encoding, codecs)
        for one in members
        if one.state is State.COMPLETED
    }
    if as_json:
        _output.document(
            {
                "flow_id": flow_id,
                "public_flow_state": frame.state,
                "is_ended": frame.is_ended,
                "results": results,
                "failures": {
                    named(one): {
                        "execution_id": one.execution_id,
                        "public_state": one.state,
                        "failure_reason": one.failure_reason,
                        "failure_category": one.failure_category,
                        "cancellation_reason": one.cancellation_reason,
                    }
                    for one in members
                    if one.state in (State.FAILED, State.EXPIRED, State.CANCELLED)
                },
                "skipped": [named(one) for one in members if one.state is State.SKIPPED],
            }
        )
        return
    if results:
        _output.table(
            ["NODE", "RESULT"],
            [
                (name, value if isinstance(value, str) else _json.dumps(value, ensure_ascii=False))
                for name, value in results.items()
            ],
        )
    if frame.state != FlowState.COMPLETED:
        _, _, rows = _failures(frame)
        _output.note(f"flowfabric: {flow_id} is {frame.state}")
        for node, state, _, why in rows:
            _output.note(_output.printable(f"{node} {state}: {why}" if why else f"{node} {state}"))


# cancel, replay, delete


@app.command()
def cancel(
    flow: Id,
    policy: Annotated[
        CancellationPolicy,
        typer.Option(
            "--policy",
            "-p",
            metavar="POLICY",
            help="cancel_all cancels every node that has not ended, cancel_pending those that have not started,"
            " flow_only none: nothing can be added any more, and what is there runs on.",
        ),
    ] = CancellationPolicy.CANCEL_ALL,
    reason: Annotated[
        str, typer.Option("--reason", "-r", metavar="TEXT", help="Why; stored with the flow and its nodes.")
    ] = "cancelled by an operator",
    waits: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Cancel the nodes now, or leave them to whoever runs the duties."),
    ] = True,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Close a flow and cancel its nodes. What was cancelled before stays as it was."""

    async def work(engine: Engine) -> int:
        flow_id = await resolve_flow(engine, flow)
        before = await _look(engine, flow_id)
        header = before.graph.flow
        if is_new := header.cancelled_at is None:
            live = sum(not one.state.is_terminal for one in before.graph.nodes)
            confirm(f"cancel {_named(before)}? {live:,} of its nodes have not ended.", yes=yes)
        try:
            done = await engine.cancel_flow(flow_id, policy=policy, reason=reason, wait=waits)
        except TimedOut as error:
            tell(error)
            _output.note(f"{flow_id} is closed; the rest of its nodes is cancelled in the background")
            return TIMEOUT
        scheduled = done.member_count if isinstance(done, CancellationScheduled) else 0
        failed = done.failed_member_execution_ids if isinstance(done, PartiallyCancelled) else ()
        after = await _look(engine, flow_id)
        if json:
            _output.document(
                {
                    "flow_id": flow_id,
                    "is_new": is_new,
                    "cancellation_policy": done.cancellation_policy,
                    "cancel_reason": after.graph.flow.cancel_reason,
                    "public_flow_state": after.state,
                    "summary": after.summary,
                    "scheduled": scheduled,
                    "failed_member_execution_ids": failed,
                }
            )
        else:
            counts = Counter(one.state.value for one in after.graph.nodes)
            words = ", ".join(f"{count:,} {state}" for state, count in sorted(counts.items())) or "no nodes"
            how = "cancelled" if is_new else f"was cancelled before ({done.cancellation_policy})"
            _output.say(f"{flow_id} {how}: {words}")
            if scheduled:
                _output.note(f"{scheduled:,} nodes are cancelled in the background, by a worker")
            for one in failed:
                _output.note(f"{one} could not be cancelled yet; it is tried again in the background")
        return NO if failed else 0

    if code := ask(dsn, work):
        raise typer.Exit(code)


def _named(frame: Frame) -> str:
    flow = frame.graph.flow
    name = _output.printable(" ".join(flow.flow_kind.split()))
    count = len(frame.graph.nodes)
    parts = [*([name] if name else []), f"{count:,} node{'' if count == 1 else 's'}", frame.state]
    return f"flow {flow.flow_id} ({', '.join(parts)})"


@app.command()
def replay(flow: Id, reason: Reason = None, json: Json = False, dsn: Dsn = None) -> None:
    """Run again what did not succeed, and what was skipped because of it. What lost a race stays as it is."""

    async def work(engine: Engine) -> int:
        from flowfabric.client.flow_run import named  # noqa: PLC0415

        flow_id = await resolve_flow(engine, flow)
        graph = (await _look(engine, flow_id)).graph
        chosen = replayable(graph)
        done: list[str] = []
        refused: list[tuple[FlowNode, Exception]] = []
        for place in range(0, len(chosen), _CHUNK):
            part = chosen[place : place + _CHUNK]
            verdicts = await engine.replay_many(
                [one.execution_id for one in part], reason=reason, requested_by=login_name()
            )
            for one, verdict in zip(part, verdicts, strict=True):
                if isinstance(verdict, Exception):
                    refused.append((one, verdict))
                else:
                    done.append(named(one))
        if json:
            _output.document(
                {
                    "flow_id": flow_id,
                    "replayed": done,
                    "refused": [
                        {"node": named(one), "execution_id": one.execution_id, "problem": str(why)}
                        for one, why in refused
                    ],
                }
            )
        elif not chosen:
            _output.note(_nothing_to_replay(graph))
        else:
            names = ", ".join(_output.printable(name) for name in done[:10]) + (", ..." if len(done) > 10 else "")
            _output.say(f"{len(done)} replayed" + (f": {names}" if done else ""))
            for one, why in refused[:_FAILURES]:
                _output.note(_output.printable(f"{named(one)} refused: {why}"))
        return NO if refused else 0

    if code := ask(dsn, work):
        raise typer.Exit(code)


def _nothing_to_replay(graph: FlowGraph) -> str:
    if any(one.cancellation_reason == RACE_LOST for one in graph.nodes):
        return "nothing to replay: who did not succeed lost a race"
    return "nothing to replay: no node failed"


@app.command()
def delete(flow: Id, yes: Yes = False, json: Json = False, dsn: Dsn = None) -> None:
    """Forget a flow whose nodes have all ended, with its nodes and everything they own, now."""

    async def work(engine: Engine) -> None:
        flow_id = await resolve_flow(engine, flow)
        confirm(f"delete {_named(await _look(engine, flow_id))}? It cannot be undone.", yes=yes)
        await engine.delete_flow(flow_id)
        if json:
            _output.document({"flow_id": flow_id, "done": "deleted"})
        else:
            _output.say(f"{flow_id} deleted")

    ask(dsn, work)
