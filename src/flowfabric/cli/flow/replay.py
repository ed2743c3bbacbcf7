"""`flowfabric flow replay`: run failed nodes again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask, resolve_flow
from flowfabric.cli._options import Dsn, Json, login_name
from flowfabric.cli._program import NO, exit_with
from flowfabric.cli.flow._frame import MOST_FAILURES, read_frame
from flowfabric.cli.flow._options import Id
from flowfabric.values.flow import FlowGraph, FlowNode
from flowfabric.values.graph import RACE_LOST, replayable

if TYPE_CHECKING:
    from flowfabric.engine import Engine

_CHUNK = 500

Reason = Annotated[
    str | None,
    typer.Option("--reason", "-r", metavar="TEXT", help="The reason, stored with the attempts.", show_default=False),
]


def replay(flow: Id, reason: Reason = None, json: Json = False, dsn: Dsn = None) -> None:
    """Run failed nodes again, and the nodes skipped because of them. Nodes that lost a race stay as they are."""

    async def work(engine: Engine) -> int:
        from flowfabric.client.flow_run import named  # noqa: PLC0415

        flow_id = await resolve_flow(engine, flow)
        graph = (await read_frame(engine, flow_id)).graph
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
            for one, why in refused[:MOST_FAILURES]:
                _output.note(_output.printable(f"{named(one)} refused: {why}"))
        return NO if refused else 0

    exit_with(ask(dsn, work))


def _nothing_to_replay(graph: FlowGraph) -> str:
    if any(one.cancellation_reason == RACE_LOST for one in graph.nodes):
        return "nothing to replay: the nodes that did not succeed lost a race"
    return "nothing to replay: no node failed"
