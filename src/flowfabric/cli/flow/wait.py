"""`flowfabric flow wait`: wait until every node has ended, and print the results."""

from __future__ import annotations

import json as _json
from typing import TYPE_CHECKING

from flowfabric.cli import _output
from flowfabric.cli._database import ask, resolve_flow
from flowfabric.cli._loading import AppOption, load_app
from flowfabric.cli._options import Dsn, Json, parse_duration
from flowfabric.cli._output import Column
from flowfabric.cli._program import NO, TIMEOUT, exit_with
from flowfabric.cli.flow._frame import Frame, failures, read_frame
from flowfabric.cli.flow._options import Id
from flowfabric.cli.wait import Timeout
from flowfabric.contracts import json_form
from flowfabric.errors import TimedOut
from flowfabric.values.flow import FlowState
from flowfabric.values.state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowfabric.app.app import App
    from flowfabric.client import AsyncClient
    from flowfabric.contracts.codecs import Codecs
    from flowfabric.engine import Engine
    from flowfabric.engine.flow_reads import Member


def wait(flow: Id, timeout: Timeout = None, app: AppOption = None, json: Json = False, dsn: Dsn = None) -> None:
    """Wait until every node has ended and print the results. Exits with 1 unless the flow completed, 3 on a timeout."""
    span = None if timeout is None else parse_duration(timeout, "--timeout")
    known = None if app is None else load_app(app)

    async def work(engine: Engine) -> int:
        flow_id = await resolve_flow(engine, flow)
        client = client_of(engine, known)
        try:
            if (await read_frame(engine, flow_id)).graph.nodes:
                await client.flow(flow_id).wait(span)
        except TimedOut:
            frame = await read_frame(engine, flow_id)
            if json:
                _output.document({"flow_id": flow_id, "public_flow_state": frame.state, "is_ended": False})
            else:
                live = sum(not one.state.is_terminal for one in frame.graph.nodes)
                _output.note(
                    f"flowfabric: {flow_id} did not end in time; it is {frame.state},"
                    f" {live:,} of {len(frame.graph.nodes):,} nodes have not ended"
                )
            return TIMEOUT
        finally:
            await client.outcomes.close()
        frame = await read_frame(engine, flow_id)
        members = await engine.list_flow_members(flow_id, results=True)
        _tell_end(frame, members, None if known is None else known.codecs, as_json=json)
        return 0 if frame.state == FlowState.COMPLETED else NO

    exit_with(ask(dsn, work, notifications=True))


def client_of(engine: Engine, known: App | None) -> AsyncClient:
    """A client on the connections of the command, which the app's handles use, too."""
    from flowfabric.app.app import App  # noqa: PLC0415
    from flowfabric.client import AsyncClient  # noqa: PLC0415

    connector = App() if known is None else known
    client = AsyncClient(engine, connector)
    connector.adopt(client)
    return client


def _tell_end(frame: Frame, members: Sequence[Member], codecs: Codecs | None, *, as_json: bool) -> None:
    from flowfabric.client.flow_run import named  # noqa: PLC0415

    flow_id = frame.graph.flow.flow_id
    results = {
        named(one): json_form.payload(one.result, one.result_encoding, codecs, one.execution_id)
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
                        "failure_reason": _output.opened(one.failure_reason, codecs, one.execution_id) or None,
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
            [Column("NODE", cut=16), Column("RESULT", folds=True)],
            [
                (name, value if isinstance(value, str) else _json.dumps(value, ensure_ascii=False))
                for name, value in results.items()
            ],
        )
    if frame.state != FlowState.COMPLETED:
        _, _, rows = failures(frame)
        _output.note(f"flowfabric: {flow_id} is {frame.state}")
        for node, state, _, why in rows:
            _output.note(_output.printable(f"{node} {state}: {why}" if why else f"{node} {state}"))
