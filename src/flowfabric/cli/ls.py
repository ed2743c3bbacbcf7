"""`flowfabric ls`: list executions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _completion, _output
from flowfabric.cli._database import ask, resolve_flow, unknown_lane
from flowfabric.cli._filters import Filter, filtered
from flowfabric.cli._options import Dsn, Json
from flowfabric.cli._pages import Cursor, Limit, up_to

if TYPE_CHECKING:
    from flowfabric.engine import Engine
    from flowfabric.engine.reads import Place
    from flowfabric.values.execution import ExecutionInfo


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
            help="Only members of this flow: its id, or a unique end or beginning of it.",
            autocompletion=_completion.flows,
            show_default=False,
        ),
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="List all; with --json one line each, as they are read.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the ids.")] = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List executions, newest first. All filters must match; a filter given several times matches any of its values."""

    async def work(engine: Engine) -> None:
        from flowfabric.engine.reads import Place  # noqa: PLC0415

        chosen = wanted if flow is None else wanted.replace(flow_id=await resolve_flow(engine, flow))
        start = None if cursor is None else Place.decode(cursor)
        if everything:
            await _all(engine, chosen, start, as_json=json, quiet=quiet)
            return
        found, rest = await up_to(limit, partial(chosen.page, engine), start)
        if json:
            _output.document({"items": found, "next_cursor": rest and rest.encode()})
        elif quiet:
            for one in found:
                _output.say(str(one.execution_id))
        else:
            _show(found)
        if rest is not None and not json:
            _output.note(f"there is more: --all, or --cursor {rest.encode()}")
        if not found:
            await _explain(engine, wanted.lanes)

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
                _output.say(str(one.execution_id))


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
    """Explain an empty list; names a lane that does not exist."""
    _output.note((lanes and await unknown_lane(engine, lanes)) or "no execution matches")
