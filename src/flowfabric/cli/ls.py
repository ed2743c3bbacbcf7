"""`flowfabric ls`: list executions."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _completion, _output
from flowfabric.cli._database import ask, resolve, resolve_flow, resolve_owner, unknown_lane
from flowfabric.cli._filters import Filter, filtered
from flowfabric.cli._live import Interval, live, parse_interval
from flowfabric.cli._options import Dsn, Json, Wide
from flowfabric.cli._output import Column
from flowfabric.cli._pages import Cursor, Limit, up_to
from flowfabric.cli._tree import COLUMNS, Roots, Tree
from flowfabric.cli.budgets import needs
from flowfabric.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from uuid import UUID

    from flowfabric.engine import Engine
    from flowfabric.engine.reads import Place
    from flowfabric.values.execution import ExecutionInfo
    from flowfabric.values.held import Held
    from flowfabric.values.page import Page


@filtered
def ls(
    *,
    wanted: Filter,
    flow: Annotated[
        str | None,
        typer.Option(
            "--flow",
            "-f",
            metavar="ID",
            help="Only nodes of this flow: its id, or a unique end or beginning of it.",
            autocompletion=_completion.flows,
            show_default=False,
        ),
    ] = None,
    parent: Annotated[
        str | None,
        typer.Option(
            "--parent",
            metavar="ID",
            help="Only tasks that this execution submitted: its id, or a unique end or beginning of it.",
            show_default=False,
        ),
    ] = None,
    tree: Annotated[
        bool,
        typer.Option(
            "--tree",
            help="With everything that they submitted below each: tasks, flows and their nodes. --limit counts trees.",
        ),
    ] = False,
    held_by: Annotated[
        str | None,
        typer.Option(
            "--held-by",
            metavar="NAME",
            help="Only executions that this budget or quota holds back, first in line first.",
            autocompletion=_completion.limits,
            show_default=False,
        ),
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="List all; with --json one line each, as they are read.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the ids.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh the list until interrupted; as many as the terminal holds.")
    ] = False,
    interval: Interval = "1s",
    wide: Wide = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List executions, newest first. All filters must match; a filter given several times matches any of its values."""
    pause = parse_interval(interval)
    if tree and everything:
        raise InvalidInput("given with --all", field="--tree", allowed="with --limit")
    if watch and (everything or quiet or cursor is not None):
        raise InvalidInput("given with --all, --quiet or --cursor", field="--watch", allowed="without them")

    if held_by is not None:
        others = {"--tree": tree, "--watch": watch, "--all": everything}
        others |= {"--state": "states" in wanted.arguments, "--stopped": "stopped" in wanted.arguments}
        if given := [option for option, is_given in others.items() if is_given]:
            raise InvalidInput(
                f"given with {' and '.join(given)}",
                field="--held-by",
                allowed="with the filters --lane, --kind, --namespace, --tag, --flow, --parent, --since and --until",
            )

    async def work(engine: Engine) -> None:
        from flowfabric.engine.reads import Place  # noqa: PLC0415

        chosen = wanted if flow is None else wanted.replace(flow_id=await resolve_flow(engine, flow))
        if parent is not None:
            chosen = chosen.replace(parent_id=await resolve(engine, parent))
        if held_by is not None:
            await _held(engine, held_by, chosen, limit, cursor, as_json=json, quiet=quiet, wide=wide)
            return
        start = None if cursor is None else Place.decode(cursor)
        if everything:
            await _all(engine, chosen, start, as_json=json, quiet=quiet, wide=wide)
            return
        if watch:
            await _watch(engine, chosen, limit, pause, tree=tree, as_json=json)
            return
        found, rest = await up_to(limit, _pages(engine, chosen, tree=tree), start)
        if tree and not quiet:
            seen = await Tree.read(engine, found)
            if json:
                _output.document({"items": seen.as_json(), "next_cursor": rest and rest.encode()})
            else:
                seen.show(wide=wide)
        elif json:
            _output.document({"items": found, "next_cursor": rest and rest.encode()})
        elif quiet:
            for one in found:
                _output.say(str(one.execution_id))
        else:
            _show(found, wide=wide)
        if rest is not None and not json:
            _output.note(f"there is more: --all, or --cursor {rest.encode()}")
        if not found:
            await _explain(engine, wanted.lanes)

    ask(dsn, work)


async def _held(
    engine: Engine, name: str, wanted: Filter, limit: int, cursor: str | None, *, as_json: bool, quiet: bool, wide: bool
) -> None:
    """List what a limit holds back of the executions that match."""
    limits = await engine.find_limits([name], [name])
    if not limits and (owner := await resolve_owner(engine, name)) is not None:
        limits = await engine.find_limits([str(owner)], [])
    if not limits:
        raise NotFound("budget or quota", _output.printable(name), detail="see `flowfabric budgets` and `quotas`")
    found: list[Held] = []
    rest: str | None = None
    for one in limits:  # a budget and a quota may have the same name
        more, rest = await up_to(limit - len(found), partial(_held_page, engine, one.id, wanted), cursor)
        found += more
        if rest is not None:
            break
    if as_json:
        _output.document({"items": found, "next_cursor": rest})
    elif quiet:
        for each in found:
            _output.say(str(each.execution_id))
    elif found:
        is_keyed = any(one.key for one in limits)
        _output.table(
            [
                Column("ID"), Column("KIND", cut=12), Column("LANE", cut=8, drop=2), Column("KEY", cut=10, drop=1),
                Column("SINCE"), Column("NEXT TRY", drop=3), Column("NEEDS", cut=14),
            ],
            [
                (
                    each.execution_id, each.execution_kind, each.lane_id, each.key if is_keyed else "",
                    each.blocked_at, each.retry_at, needs(each.needs),
                )
                for each in found
            ],
            wide=wide,
        )  # fmt: skip
    else:
        which = "none of these executions" if wanted else "no execution"
        _output.note(f"{_output.printable(name)} holds {which} back")
    if rest is not None and not as_json:
        _output.note(f"there is more: --limit, or --cursor '{rest}'")


async def _held_page(engine: Engine, limit_id: UUID, wanted: Filter, cursor: str | None, size: int) -> Page[Held, str]:
    return await engine.list_held(limit_id, **wanted.arguments, cursor=cursor, limit=size)


def _pages(
    engine: Engine, wanted: Filter, *, tree: bool
) -> Callable[[Any, int], Awaitable[Page[ExecutionInfo, Place]]]:
    # With a filter, each match is the top of a tree; without one, only executions that no handler submitted are.
    return Roots(engine, wanted).page if tree and not wanted else partial(wanted.page, engine)


async def _watch(engine: Engine, wanted: Filter, limit: int, pause: float, *, tree: bool, as_json: bool) -> None:
    """Refresh the list until interrupted: in place on a terminal, else printed again whenever it changed."""
    if not as_json and _output.terminal_width() is not None:

        async def draw() -> Any:
            height = _output.console().height
            room = max(height - 4, 5)
            found, rest = await up_to(min(limit, room), _pages(engine, wanted, tree=tree))
            if not tree:
                return _picture(*_table(found), is_more=rest is not None)
            rows = (await Tree.read(engine, found)).rows()
            return _picture(COLUMNS, rows[:room], is_more=rest is not None or len(rows) > room)

        await live(engine, draw, pause)
    shown: Any = None
    while True:
        found, _ = await up_to(limit, _pages(engine, wanted, tree=tree))
        seen = await Tree.read(engine, found) if tree else None
        now = found if seen is None else seen.rows()
        if as_json:
            _output.line({"items": found if seen is None else seen.as_json()})
        elif now != shown:
            if shown is not None:
                _output.say()
            if seen is None:
                _show(found, wide=True)
            else:
                seen.show(wide=True)
        shown = now
        sys.stdout.flush()
        await asyncio.sleep(pause)


def _picture(columns: Sequence[Column], rows: Sequence[Sequence[object]], *, is_more: bool) -> Any:
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    if not rows:
        return Text("no execution matches")
    return Group(_output.fitted(columns, rows), Text("there is more" if is_more else "", style="dim"))


async def _all(engine: Engine, wanted: Filter, start: Place | None, *, as_json: bool, quiet: bool, wide: bool) -> None:
    if not as_json and not quiet:
        found: list[ExecutionInfo] = []
        async for page in wanted.pages(engine, cursor=start):
            found += page.items
        _show(found, wide=wide)
        return
    async for page in wanted.pages(engine, cursor=start):
        for one in page.items:
            if as_json:
                _output.line(one)
            else:
                _output.say(str(one.execution_id))


def _table(found: Sequence[ExecutionInfo]) -> tuple[list[Column], list[list[object]]]:
    """The list as a table; columns in which all are empty are left out."""
    columns = [
        Column("ID"), Column("STATE"), Column("LANE", cut=7, drop=5), Column("KIND", cut=12),
        Column("NODE", cut=8, drop=2), Column("ARGUMENTS", cut=12, drop=3), Column("CREATED"),
        Column("TOOK", drop=1), Column("ATTEMPT", drop=4), Column("NAMESPACE", cut=9, drop=6),
        Column("PRIORITY", drop=7), Column("FORK OF", cut=8, drop=8, ends=True),
    ]  # fmt: skip
    rows: list[list[object]] = []
    for one in found:
        took = one.completed_at - one.started_at if one.completed_at and one.started_at else None
        attempt = one.current_attempt_index + 1 if one.started_at else None
        rows.append(
            [
                one.execution_id, one.public_state, one.lane_id, one.execution_kind, one.node,
                one.arguments, one.created_at, took, attempt, one.namespace, one.priority or None, one.forked_from,
            ]
        )  # fmt: skip
    always = {"ID", "STATE", "KIND", "LANE", "CREATED", "TOOK", "ATTEMPT"}
    kept = [at for at, column in enumerate(columns) if column.name in always or any(row[at] for row in rows)]
    return [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]


def _show(found: Sequence[ExecutionInfo], *, wide: bool) -> None:
    from flowfabric.values.vector import BlockingReason  # noqa: PLC0415

    if found:
        columns, rows = _table(found)
        _output.table(columns, rows, wide=wide)
    if stopped := sum(one.stops is not None for one in found):
        _output.note(f"changed code stopped {stopped:,} of these: `flowfabric failures --stopped` says why")
    reasons = [one.state_vector.blocking_reason for one in found if one.stops is None]
    if paused := reasons.count(BlockingReason.PAUSED_BY_POLICY):
        _output.note(f"{paused:,} of these wait in a lane that hands out no work: `flowfabric lanes` shows which")
    if uncovered := reasons.count(BlockingReason.WAITING_FOR_CAPABLE_WORKER):
        _output.note(f"no live worker covers {uncovered:,} of these: `flowfabric workers` shows what is missing")


async def _explain(engine: Engine, lanes: list[str]) -> None:
    """Explain an empty list; names a lane that does not exist."""
    _output.note((lanes and await unknown_lane(engine, lanes)) or "no execution matches")
