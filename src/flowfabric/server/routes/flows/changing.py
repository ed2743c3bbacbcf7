"""What operators do to whole flows: replay, cancel, delete."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from flowfabric.errors import FlowFabricError, NotFound, TimedOut
from flowfabric.server.call import Answer, Call
from flowfabric.server.problems import Problem
from flowfabric.server.routes.flows.reading import named
from flowfabric.values.flow import (
    CancellationPolicy,
)
from flowfabric.values.graph import replayable
from flowfabric.values.ids import ExecutionId, FlowId

_CHUNK: Final = 500  # members replayed in one call
_LONGEST_WAIT: Final = 300


class ReplayFlow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: str | None = None


class CancelFlow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cancellation_policy: CancellationPolicy = CancellationPolicy.CANCEL_ALL
    reason: str = "cancelled over HTTP"


class WaitForCancel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    wait: Annotated[float, Meta(ge=0, le=_LONGEST_WAIT)] = 0  # seconds


class ReplayedNode(Struct, frozen=True, kw_only=True):
    node: str
    execution_id: ExecutionId


class RefusedNode(Struct, frozen=True, kw_only=True):
    node: str
    execution_id: ExecutionId
    problem: str


class FlowReplayed(Struct, frozen=True, kw_only=True):
    flow_id: FlowId
    replayed: list[ReplayedNode]
    refused: list[RefusedNode]


async def replay_flow(call: Call) -> FlowReplayed:
    """Run failed nodes again, and the nodes skipped because of them. Nodes that lost a race stay as they are."""
    graph = await call.engine.read_flow_graph(call.path["flow_id"])
    if graph is None:
        raise NotFound("flow", call.path["flow_id"])
    chosen = replayable(graph)
    replayed: list[ReplayedNode] = []
    refused: list[RefusedNode] = []
    for place in range(0, len(chosen), _CHUNK):
        part = chosen[place : place + _CHUNK]
        verdicts = await call.engine.replay_many(
            [one.execution_id for one in part], reason=call.body.reason, requested_by=call.caller.name
        )
        for one, verdict in zip(part, verdicts, strict=True):
            if isinstance(verdict, FlowFabricError):
                refused.append(RefusedNode(node=named(one), execution_id=one.execution_id, problem=str(verdict)))
            else:
                replayed.append(ReplayedNode(node=named(one), execution_id=one.execution_id))
    return FlowReplayed(flow_id=graph.flow.flow_id, replayed=replayed, refused=refused)


async def cancel_flow(call: Call) -> Any:
    """Close a flow and cancel its members: all, those that do not run (`cancel_pending`), or none (`flow_only`).

    The members are cancelled in the background. With `wait` the request returns when they are, or with 504 after so
    many seconds: the flow is closed then, too, and the rest is cancelled in the background. A flow that was closed
    before keeps its policy.
    """
    flow_id, wait = call.path["flow_id"], call.query.wait
    done = await call.engine.cancel_flow(
        flow_id, policy=call.body.cancellation_policy, reason=call.body.reason, requester=call.caller.name
    )
    if not wait:
        return done

    async def finish() -> Any:
        try:
            return await call.service.engine.cancel_flow(flow_id, wait=timedelta(seconds=wait))
        except TimedOut:
            raise Problem(
                504,
                "timeout",
                f"the members are not cancelled after {wait:g} s; the flow is closed, and the rest follows",
                kind="timed_out",
                family="timed_out",
            ) from None

    return Answer(body=done, then=finish)


async def delete_flow(call: Call) -> None:
    """Delete a flow whose members have all ended, with its members and everything they own, now."""
    await call.engine.delete_flow(call.path["flow_id"])
