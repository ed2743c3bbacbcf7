"""Submit a whole graph in one call, and let it grow."""

from __future__ import annotations

from typing import Literal
from uuid import UUID, uuid5

from msgspec import Struct

from flowfabric.app.flow_builder import KEYS
from flowfabric.engine.acting import Actor
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound, ValidationFailed
from flowfabric.server.call import Answer, Call
from flowfabric.server.graphs import FlowNode, Graph, located
from flowfabric.server.namespace import check_limits
from flowfabric.server.new_execution import learn_limits
from flowfabric.server.problems import Problem
from flowfabric.server.routes.flows.reading import existing, named
from flowfabric.values.flow import (
    FlowExists,
)
from flowfabric.values.graph import FlowSubmitted
from flowfabric.values.ids import ExecutionId, FlowId, mint_uuid


class SubmitFlow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A graph: its nodes by name. Without nodes the flow is empty, and grows."""

    flow_kind: str = ""
    namespace: str | None = None
    flow_id: UUID | None = None
    tags: dict[str, str] | None = None
    nodes: dict[str, FlowNode] = {}


class ExtendFlow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nodes: dict[str, FlowNode]


class SubmittedFlow(Struct, frozen=True, kw_only=True):
    """The executions by the names of their nodes. `exists`: id or idempotency key were used before; nothing changed."""

    status: Literal["created", "exists"]
    flow_id: FlowId
    nodes: dict[str, ExecutionId]


async def submit_flow(call: Call) -> Answer:
    """Submit a whole graph in one call: all of it is stored, or nothing.

    201: it was created; 200: its id or its `Idempotency-Key` was used before, and nothing changed. `nodes` has the
    executions by the names of their nodes. Without nodes the flow is empty: add members or extend it.
    """
    body: SubmitFlow = call.body
    namespace = call.namespace or ""
    key = call.idempotency_key
    if key is not None and body.flow_id is not None:
        raise InvalidInput("given with an Idempotency-Key", field="flow_id", allowed="one of them")
    if key is not None:
        flow_id = FlowId(uuid5(KEYS, f"{namespace}\0{body.flow_kind}\0{key}"))
    else:
        flow_id = FlowId(mint_uuid() if body.flow_id is None else body.flow_id)
    await check_limits(call, [one.policy for one in body.nodes.values()])
    await learn_limits(call, [one.execution_kind for one in body.nodes.values()])
    if body.nodes:
        graph = Graph(call, flow_id, body.nodes, namespace=namespace)
        try:
            made = await call.engine.submit_flow(
                graph.nodes(), flow_kind=body.flow_kind, namespace=namespace, flow_id=flow_id, tags=body.tags
            )
        except ValidationFailed as error:
            raise located(error, names=list(body.nodes)) from None
    else:
        actor = Actor(name=call.caller.name, operation=call.operation.name, is_audited=False)
        async with call.engine.acting(actor) as engine:  # the flow with its tags, or nothing
            empty = await engine.create_flow(flow_id, flow_kind=body.flow_kind, namespace=namespace)
            existed = isinstance(empty, FlowExists)
            if not existed and body.tags:
                try:
                    await engine.set_flow_tags(flow_id, body.tags)
                except FlowFabricError:
                    engine.roll_back()
                    raise
        nodes = await _nodes(call, flow_id) if existed else {}
        made = FlowSubmitted(flow_id=flow_id, nodes=nodes, existed=existed)
    if made.existed:
        await _check_existing(call, flow_id, namespace, made, keyed=key is not None)
    return _submitted(made)


async def _check_existing(call: Call, flow_id: FlowId, namespace: str, made: FlowSubmitted, *, keyed: bool) -> None:
    """Refuse a flow of another namespace, which the caller may not see, and a key that was used for another graph."""
    stored = await call.engine.describe_flow(flow_id)
    if call.caller.namespaces is not None and (stored is None or stored.namespace != namespace):
        raise NotFound("flow", flow_id)
    if keyed and not set(call.body.nodes) <= set(made.nodes):
        raise Problem(
            422, "idempotency_key_reused", f"the Idempotency-Key was used for flow {flow_id}, which has other nodes"
        )


async def extend_flow(call: Call) -> Answer:
    """Add nodes to a flow that is open: all of them, or none.

    They may come after members that exist, by name or id.
    """
    flow_id, body = call.path["flow_id"], call.body
    stored = await existing(call)
    await check_limits(call, [one.policy for one in body.nodes.values()])
    await learn_limits(call, [one.execution_kind for one in body.nodes.values()])
    members = await _nodes(call, flow_id) if _names_others(body.nodes) else {}
    members = {**{str(one): one for one in members.values()}, **members}
    graph = Graph(call, flow_id, body.nodes, namespace=stored.namespace, members=members)
    try:
        made = await call.engine.extend_flow(flow_id, graph.nodes())
    except ValidationFailed as error:
        raise located(error, names=list(body.nodes)) from None
    return _submitted(made)


def _submitted(made: FlowSubmitted) -> Answer:
    return Answer(
        body=SubmittedFlow(status="exists" if made.existed else "created", flow_id=made.flow_id, nodes=made.nodes),
        status=200 if made.existed else 201,
    )


def _names_others(nodes: dict[str, FlowNode]) -> bool:
    """Whether a node comes after something that is not a node of the request."""
    for node in nodes.values():
        wanted = [one for given in (node.arguments_from or {}).values() for one in _listed(given)]
        if any(one not in nodes for one in [*(node.after or ()), *wanted]):
            return True
    return False


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


async def _nodes(call: Call, flow_id: FlowId) -> dict[str, ExecutionId]:
    return {named(one): one.execution_id for one in await call.engine.list_flow_members(flow_id)}
