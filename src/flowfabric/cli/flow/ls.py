"""`flowfabric flow ls`: list flows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _completion, _output
from flowfabric.cli._database import ask, near
from flowfabric.cli._options import Dsn, Json, Namespace, Wide
from flowfabric.cli._output import Column
from flowfabric.cli._pages import PAGE, Cursor, Limit, up_to
from flowfabric.cli.flow._frame import age, now

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from flowfabric.engine import Engine
    from flowfabric.values.flow import FlowInfo
    from flowfabric.values.page import Page


def ls(
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Only flows with this name.",
            autocompletion=_completion.flow_names,
            show_default=False,
        ),
    ] = None,
    namespace: Namespace = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    wide: Wide = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List flows, newest first. The state may be some seconds older than that of `flow show`."""

    async def work(engine: Engine) -> None:
        async def fetch(after: str | None, size: int) -> Page[FlowInfo, str]:
            return await engine.find_flows(namespace=namespace, flow_kind=name, cursor=after, limit=size)

        found, rest = await up_to(limit, fetch, cursor)
        if json:
            _output.document({"items": found, "next_cursor": rest})
            return
        if found:
            _output.table(*table(found, await now(engine)), wide=wide)
        else:
            _output.note(await _none(engine, name))
        if rest is not None:
            _output.note(f"there is more: --limit, or --cursor {rest}")

    ask(dsn, work)


def table(found: Sequence[FlowInfo], at: datetime) -> tuple[list[Column], list[list[object]]]:
    """Flows as a table."""
    has_namespace = any(one.namespace for one in found)
    rows: list[list[object]] = [
        [
            one.flow_id,
            one.state or one.status,
            one.node_count,
            age(at, one.created_at),
            *[one.namespace] * has_namespace,
            one.flow_kind,
        ]
        for one in found
    ]
    columns = [Column("ID"), Column("STATE"), Column("NODES"), Column("AGE")]
    return [*columns, *[Column("NAMESPACE", cut=9, drop=1)] * has_namespace, Column("NAME", cut=20)], rows


async def _none(engine: Engine, name: str | None) -> str:
    """The note for an empty list; suggests a similar name."""
    known = {one.flow_kind for one in (await engine.find_flows(limit=PAGE)).items}
    hint = "" if name is None or name in known else near(name, sorted(known))
    return f"no flow matches; {hint}" if hint else "no flow matches"
