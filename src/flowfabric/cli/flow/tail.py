"""`flowfabric flow tail`: follow what all nodes of a flow emit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowfabric.cli import _output
from flowfabric.cli._database import ask, resolve_flow
from flowfabric.cli._loading import AppOption, load_app
from flowfabric.cli._options import Dsn, Json
from flowfabric.cli._program import NO, exit_with
from flowfabric.cli.flow._options import Id
from flowfabric.cli.flow.wait import client_of
from flowfabric.cli.tail import Live, Raw, Types, printer_of, show_all
from flowfabric.values.flow import FlowState

if TYPE_CHECKING:
    from flowfabric.engine import Engine


def tail(
    flow: Id,
    live: Live = True,
    types: Types = None,
    raw: Raw = False,
    app: AppOption = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Follow the output of all nodes until they have ended. Exits with 1 unless the flow completed."""
    known = None if app is None else load_app(app)
    shown = printer_of(types, raw=raw, as_json=json)

    async def work(engine: Engine) -> int:
        flow_id = await resolve_flow(engine, flow)
        client = client_of(engine, known)
        try:
            reader = client.flow(flow_id)._reader(None, live, None, None, is_sealed=known is None)
            await show_all(reader, shown, _nothing)
            state = await reader.state()
        finally:
            await client.outcomes.close()
        if state == FlowState.COMPLETED:
            return 0
        _output.note(f"flowfabric: flow {flow_id} is {state}")
        return NO

    exit_with(ask(dsn, work, notifications=True))


async def _nothing() -> None:
    return None
