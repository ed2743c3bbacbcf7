"""`flowfabric flow delete`: delete a flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowfabric.cli import _output
from flowfabric.cli._database import ask, resolve_flow
from flowfabric.cli._options import Dsn, Json, Yes
from flowfabric.cli._program import confirm
from flowfabric.cli.flow._frame import named_flow, read_frame
from flowfabric.cli.flow._options import Id

if TYPE_CHECKING:
    from flowfabric.engine import Engine


def delete(flow: Id, yes: Yes = False, json: Json = False, dsn: Dsn = None) -> None:
    """Delete a flow whose nodes have all ended, with its nodes and everything that belongs to them."""

    async def work(engine: Engine) -> None:
        flow_id = await resolve_flow(engine, flow)
        confirm(f"delete {named_flow(await read_frame(engine, flow_id))}? It cannot be undone.", yes=yes)
        await engine.delete_flow(flow_id)
        if json:
            _output.document({"flow_id": flow_id, "done": "deleted"})
        else:
            _output.say(f"{flow_id} deleted")

    ask(dsn, work)
