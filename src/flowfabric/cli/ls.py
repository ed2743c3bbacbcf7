"""`flowfabric ls`: which executions there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _completion, _output
from flowfabric.cli._database import ask, resolve_flow, unknown_lane
from flowfabric.cli._options import Dsn, Filter, Json, Kinds, Lanes, Namespace, Since, States, Tag, Until

if TYPE_CHECKING:
    from flowfabric.engine import Engine
    from flowfabric.engine.reads import Place
    from flowfabric.values.execution import ExecutionInfo


def ls(
    state: States = None,
    lane: Lanes = None,
    kind: Kinds = None,
    namespace: Namespace = None,
    tag: Tag = None,
    since: Since = None,
    until: Until = None,
    flow: Annotated[
        str | None,
        typer.Option(
            "--flow",
            "-f",
            metavar="ID",
            help="Only members of this flow: its id, or enough of its beginning.",
            autocompletion=_completion.flows,
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=100_000, help="How many at most.")] = 50,
    cursor: Annotated[
        str | None,
        typer.Option("--cursor", metavar="CURSOR", help="Go on where an earlier list ended.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="All of them; with --json one line each, as they are found.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Ids and nothing else.")] = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List executions, newest first. Every filter given must match; values of one filter are alternatives."""
    chosen = Filter.of(state, lane, kind, namespace, tag, since, until)

    async def work(engine: Engine) -> None:
        from flowfabric.engine.reads import Place  # noqa: PLC0415

        wanted = chosen
        if flow is not None:
            wanted = Filter({**chosen.arguments, "flow_id": await resolve_flow(engine, flow)})
        start = None if cursor is None else Place.decode(cursor)
        if everything:
            await _all(engine, wanted, start, as_json=json, quiet=quiet)
            return
        found: list[ExecutionInfo] = []
        rest: Place | None = None
        async for page in wanted.pages(engine, cursor=start, size=min(limit, 1000)):
            found += page.items
            rest = page.next_cursor
            if len(found) >= limit:
                break
        if len(found) > limit:
            last = (found := found[:limit])[-1]
            rest = Place(last.created_at, last.execution_id.uuid, last.execution_id.partition)
        if json:
            _output.document({"items": found, "next_cursor": rest and rest.encode()})
        elif quiet:
            for one in found:
                _output.say(one.execution_id)
        else:
            _show(found)
        if rest is not None and not json:
            _output.note(f"there is more: --all, or --cursor {rest.encode()}")
        if not found:
            await _explain(engine, lane or [])

    ask(dsn, work)


async def _all(engine: Engine, wanted: Filter, start: Place | None, *, as_json: bool, quiet: bool) -> None:
    if not as_json and not quiet:
        found: list[ExecutionInfo] = []
        async for page in wanted.pages(engine, cursor=start):
            found += page.items
        _show(found)
        return
    async for page in wanted.pages(engine, cursor=start):
        for one in page.items:
            if as_json:
                _output.line(one)
            else:
                _output.say(one.execution_id)


def _show(found: list[ExecutionInfo]) -> None:
    has_namespace = any(one.namespace for one in found)
    has_priority = any(one.priority for one in found)
    headers = ["ID", "STATE", "LANE", "KIND", "CREATED", "TOOK", "ATTEMPT"]
    headers += ["NAMESPACE"] * has_namespace + ["PRIORITY"] * has_priority
    rows = []
    for one in found:
        took = one.completed_at - one.started_at if one.completed_at and one.started_at else None
        attempt = one.current_attempt_index + 1 if one.started_at else None
        row: list[object] = [
            one.execution_id, one.public_state, one.lane_id, one.execution_kind, one.created_at, took, attempt,
        ]  # fmt: skip
        rows.append(row + [one.namespace] * has_namespace + [one.priority] * has_priority)
    if rows:
        _output.table(headers, rows)


async def _explain(engine: Engine, lanes: list[str]) -> None:
    """A list that is empty because of a name that does not exist says so."""
    _output.note((lanes and await unknown_lane(engine, lanes)) or "no execution matches")
