"""`flowfabric flow ls`: which flows there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _completion, _output
from flowfabric.cli._database import ask, near
from flowfabric.cli._options import Dsn, Json, Namespace
from flowfabric.cli.flow._frame import age, now
from flowfabric.graph import FlowInfo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from flowfabric.engine import Engine

_PAGE = 1000


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
            _show_list(found, await now(engine))
        else:
            _output.note(await _none(engine, name))
        if rest is not None:
            _output.note(f"there is more: --limit, or --cursor {rest}")

    ask(dsn, work)


def _show_list(found: Sequence[FlowInfo], at: datetime) -> None:
    has_namespace = any(one.namespace for one in found)
    rows: list[list[object]] = [
        [
            one.flow_id,
            one.status,
            one.node_count,
            age(at, one.created_at),
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
