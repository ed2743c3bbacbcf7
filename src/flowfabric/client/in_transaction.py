"""Submit a task or a flow through the caller's connection, as part of the caller's transaction.

Everything runs in one coroutine. With a connection that blocks it waits for nothing, and runs at once.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from flowfabric.bridges._submission import Driver, Transaction, at_once, driver_of
from flowfabric.client.connector import Connector, Graph
from flowfabric.client.creating import around, create, made, through
from flowfabric.client.flow_run import FlowRun
from flowfabric.client.limits import learn, learn_of_flow, may_have_limits
from flowfabric.client.run import Run
from flowfabric.client.submission import Submission
from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_key
from flowfabric.values.ids import PARTITION_VALUES, FlowId, mint_uuid

T = TypeVar("T")


def submit_in(app: Connector, connection: Any, submission: Submission) -> Any:
    """The handle, or with an async connection a coroutine that returns it."""
    driver = driver_of(connection)

    async def final(changed: Submission) -> Run[Any]:
        transaction = Transaction(driver)
        if may_have_limits(changed):
            await learn(transaction, [changed])
        return made(app, changed, await create(transaction, changed.item(), changed.options))

    async def submit() -> Run[Any]:
        return await around(app, final)(submission)

    return _run(driver, submit())


def submit_flow_in(app: Connector, connection: Any, flow: Graph, idempotency_key: str | None, wake: bool) -> Any:
    """The same for a flow."""
    if flow.grows is not None:
        raise InvalidInput(
            "is a flow that grows: a handler that is run again would add its nodes again",
            field="flow",
            allowed="a new flow, from app.flow()",
        )
    key = None if idempotency_key is None else check_key(idempotency_key)
    driver = driver_of(connection)

    async def submit() -> FlowRun:
        flow_id = FlowId(mint_uuid()) if key is None else flow.id_of(key)
        # The number of partitions is not known: every id ends in the bits of the flow's.
        ids = flow.ids(flow_id, PARTITION_VALUES, None if key is None else flow_id)
        changed = await through(app, flow, ids)
        transaction = Transaction(driver)
        await learn_of_flow(transaction, flow, changed)
        nodes = flow.build(ids, changed)
        answer = await transaction.submit_flow(
            nodes,
            flow_kind=flow.name,
            namespace=flow.namespace,
            flow_id=flow_id,
            tags=dict(flow.tags),
            wake=wake,
        )
        return FlowRun(answer.flow_id, nodes=answer.nodes, connector=app, is_new=not answer.existed)

    return _run(driver, submit())


def _run(driver: Driver, work: Coroutine[Any, Any, T]) -> T | Coroutine[Any, Any, T]:
    return at_once(work) if driver.blocks else work
