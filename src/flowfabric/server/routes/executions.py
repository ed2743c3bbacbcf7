"""Executions: submit, list, read, wait for."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec import Struct

from flowfabric.engine.reads import Place
from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.server import problems
from flowfabric.server.call import Answer, Call, Page
from flowfabric.server.operation import LARGE, Operation, Repeats, Scope, Within
from flowfabric.values.execution import Created, Duplicate, Execution, ExecutionInfo, NewExecution
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.state import State

_encode = msgspec.json.Encoder().encode


class Payload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes that are not JSON: in base64, with the name of their encoding."""

    base64: str
    encoding: str | None = None


class SubmitExecution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task to run. `arguments` has them by the names of the task's parameters; `input` replaces them by bytes."""

    execution_kind: str
    arguments: dict[str, Any] | None = None
    input: Payload | None = None
    lane_id: str = "default"
    namespace: str | None = None
    priority: int = 0
    idempotency_key: str | None = None
    tags: dict[str, str] | None = None
    policy: dict[str, Any] | None = None
    delay_until: datetime | None = None
    delay_seconds: float | None = None
    execution_deadline_at: datetime | None = None
    execution_deadline_seconds: float | None = None
    execution_id: ExecutionId | None = None
    flow_id: FlowId | None = None


class ListExecutions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which executions: all filters must match; one given several times matches any of its values."""

    namespace: str | None = None
    lane: list[str] | None = None
    kind: list[str] | None = None
    state: list[State] | None = None
    tag: str | None = None
    flow_id: FlowId | None = None
    parent_id: ExecutionId | None = None
    created_from: datetime | None = None
    created_before: datetime | None = None
    stopped: bool = False
    order_by: str = "created"
    cursor: str | None = None
    limit: int = 50


def new_execution(call: Call, given: SubmitExecution, namespace: str | None) -> NewExecution:
    """What a submission creates."""
    payload, encoding = b"{}", None
    if given.input is not None:
        if given.arguments is not None:
            raise InvalidInput("given with arguments", field="input", allowed="one of them")
        try:
            payload, encoding = base64.b64decode(given.input.base64, validate=True), given.input.encoding
        except (binascii.Error, ValueError):
            raise InvalidInput("not base64", field="input.base64", allowed="base64") from None
    elif given.arguments is not None:
        payload = _encode(given.arguments)
    return NewExecution(
        execution_kind=given.execution_kind,
        lane_id=given.lane_id,
        namespace=namespace or "",
        input_payload=payload,
        payload_encoding=encoding,
        priority=given.priority,
        creator_identity=call.caller.name,
        idempotency_key=given.idempotency_key or call.idempotency_key,
        tags=given.tags,
        policy=given.policy,
        delay_until=_moment(given.delay_until, given.delay_seconds, "delay"),
        execution_deadline_at=_moment(given.execution_deadline_at, given.execution_deadline_seconds, "deadline"),
        execution_id=given.execution_id,
        flow_id=given.flow_id,
    )


def _moment(at: datetime | None, seconds: float | None, name: str) -> datetime | timedelta | None:
    if seconds is None:
        return at
    if at is not None:
        raise InvalidInput("given with a time", field=f"{name}_seconds", allowed="one of them")
    return timedelta(seconds=seconds)


async def submit_execution(call: Call) -> Answer:
    """Submit one execution.

    201: it was created; 200: its idempotency key or its id was used before, and `execution_id` is the existing one.
    """
    item = new_execution(call, call.body, call.namespace)
    made = (await call.engine.create_many([item]))[0]
    if isinstance(made, FlowFabricError):
        raise made
    return Answer(
        body=made,
        status=201 if isinstance(made, Created) else 200,
        headers={"Location": f"/v1/executions/{made.execution_id}"},
    )


async def list_executions(call: Call) -> Page:
    """List executions that match every filter, newest first."""
    query: ListExecutions = call.query
    found = await call.engine.find_executions(
        **_filters(query, call.namespace),
        cursor=None if query.cursor is None else Place.decode(query.cursor),
        limit=query.limit,
    )
    return Page(items=found.items, next_cursor=None if found.next_cursor is None else found.next_cursor.encode())


def _filters(query: ListExecutions, namespace: str | None) -> Mapping[str, Any]:
    tag = None
    if query.tag is not None:
        key, equals, value = query.tag.partition("=")
        if not equals:
            raise InvalidInput("not a tag", field="tag", allowed="key=value")
        tag = (key, value)
    return {
        "namespace": namespace,
        "lane_ids": query.lane,
        "kinds": query.kind,
        "states": query.state,
        "tag": tag,
        "flow_id": query.flow_id,
        "parent_id": query.parent_id,
        "created_from": query.created_from,
        "created_before": query.created_before,
        "stopped": query.stopped,
        "order_by": query.order_by,
    }


async def get_execution(call: Call) -> Execution:
    """Read everything stored about an execution but its input and its result."""
    found = await call.engine.read_execution(call.path["execution_id"])
    if found is None:
        raise problems.not_found("execution", call.path["execution_id"])
    return found


OPERATIONS = (
    Operation(
        method="GET", path="/v1/executions", handler=list_executions, engine=("find_executions",), scope=Scope.READ,
        within=Within.GIVEN, query=ListExecutions, answers={200: list[ExecutionInfo]}, etag=True,
    ),
    Operation(
        method="POST", path="/v1/executions", handler=submit_execution, engine=("create_execution",),
        scope=Scope.SUBMIT, within=Within.GIVEN, body=SubmitExecution, answers={201: Created, 200: Duplicate},
        limit=LARGE, repeats=Repeats.OWN, links={"get_execution": "execution_id"},
    ),
    Operation(
        method="GET", path="/v1/executions/{execution_id}", handler=get_execution, engine=("read_execution",),
        scope=Scope.READ, within=Within.EXECUTION, answers={200: Execution}, etag=True,
    ),
)  # fmt: skip
