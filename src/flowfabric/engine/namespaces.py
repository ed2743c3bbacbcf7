"""Which executions and flows a caller with namespaces may reach."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flowfabric._postgres import statements
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_batch
from flowfabric.values.api_key import check_namespaces
from flowfabric.values.ids import ExecutionId, FlowId, parse_execution_id, parse_flow_id


class Namespaces(Operations):
    """in_namespaces."""

    async def in_namespaces(
        self,
        namespaces: Collection[str],
        execution_ids: Sequence[ExecutionId] = (),
        flow_ids: Sequence[FlowId] = (),
    ) -> list[bool]:
        """Whether each execution, then each flow, exists and belongs to one of the namespaces. It never changes."""
        check_batch(execution_ids, "execution_ids")
        check_batch(flow_ids, "flow_ids")
        only = check_namespaces(namespaces) or []
        ids = [parse_execution_id(one) for one in execution_ids] + [parse_flow_id(one) for one in flow_ids]
        row = await self._row(
            statements.IN_NAMESPACES,
            [self._home(one) for one in ids],
            ids,
            [False] * len(execution_ids) + [True] * len(flow_ids),
            only,
            repeatable=True,
        )
        return list(row["known"])
