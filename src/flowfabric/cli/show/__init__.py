"""`flowfabric show`: everything about one execution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask, resolve_flow
from flowfabric.cli._loading import AppOption, load_app
from flowfabric.cli._options import Dsn, Id, Json
from flowfabric.cli.show._document import as_json
from flowfabric.cli.show._page import page, show_timeline
from flowfabric.cli.show._seen import events_of, read
from flowfabric.errors import NotFound

if TYPE_CHECKING:
    from flowfabric.engine import Engine


def show(
    execution: Id,
    payloads: Annotated[
        bool,
        typer.Option("--payload/--no-payload", help="Include input, step results, payloads of signals and the result."),
    ] = True,
    timeline: Annotated[
        bool, typer.Option("--timeline/--no-timeline", help="Include the timeline (as far back as the event log goes).")
    ] = True,
    app: AppOption = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Print whole ids, payloads and results, also on a narrow terminal.")
    ] = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Show one execution: state, what it waits for, attempts, steps, signals, failure, result and timeline.

    The id of a flow draws that flow, as `flowfabric flow show` does.
    """
    codecs = None if app is None else load_app(app).codecs

    async def work(engine: Engine) -> None:
        try:
            seen = await read(engine, execution, payloads=payloads, all_signals=json, codecs=codecs, wide=wide)
        except NotFound:
            if not await _show_flow(engine, execution, as_json=json):
                raise
            return
        if not json:
            page(seen)  # from its own rows; the log is read afterwards, and takes longer the more there is of it
        events = await events_of(engine, seen.execution.execution_id) if timeline else None
        if json:
            _output.document(as_json(seen, events))
        elif events is not None:
            show_timeline(seen, events)

    ask(dsn, work)


async def _show_flow(engine: Engine, text: str, *, as_json: bool) -> bool:
    """Draw the flow that an id names, or a unique part of one; returns whether there is one."""
    from flowfabric.cli.flow._frame import read_frame  # noqa: PLC0415
    from flowfabric.cli.flow.show import show_frame  # noqa: PLC0415

    try:
        flow_id = await resolve_flow(engine, text)
    except NotFound:
        return False
    show_frame(await read_frame(engine, flow_id), expand=False, as_json=as_json)
    return True
