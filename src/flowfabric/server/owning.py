"""Which executions a key may name in a body, or be shown in an answer: those of its namespaces."""

from __future__ import annotations

from collections.abc import Iterable

from flowfabric.errors import NotFound
from flowfabric.server.call import Call
from flowfabric.values.ids import ExecutionId


async def own_execution(call: Call, execution_id: ExecutionId) -> None:
    """Refuse an execution of another namespace as unknown."""
    if not await own_executions(call, [execution_id]):
        raise NotFound("execution", execution_id)


async def own_executions(call: Call, execution_ids: Iterable[ExecutionId]) -> set[ExecutionId]:
    """Of some executions, those that the key may see; all of them for a key without namespaces."""
    allowed = call.caller.namespaces
    if allowed is None:
        return set(execution_ids)
    own: set[ExecutionId] = set()
    for one in execution_ids:
        found = await call.engine.read_execution_info(one)
        if found is not None and found.namespace in allowed:
            own.add(one)
    return own
