"""The base of the client: the engine, the app, and handles on executions and flows."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec

from flowfabric.client.connector import Connector
from flowfabric.client.flow_run import FlowRun
from flowfabric.client.outcomes import Outcomes
from flowfabric.client.run import Run
from flowfabric.contracts.codecs import Codecs
from flowfabric.contracts.value_types import ValueType
from flowfabric.engine import Engine
from flowfabric.errors import NotFound
from flowfabric.values.execution import Execution
from flowfabric.values.found import FoundId, What
from flowfabric.values.ids import ExecutionId, parse_execution_id, parse_flow_id

_ANYTHING = ValueType.of(Any)
_SEALED_TEXTS = ("failure_reason", "progress_message")  # what codecs seal of what a record shows


class ClientBase:
    """An app's tasks and codecs on a connected engine."""

    def __init__(self, engine: Engine, connector: Connector) -> None:
        self.engine = engine
        self.outcomes = Outcomes(engine)
        self._connector = connector

    @property
    def codecs(self) -> Codecs:
        """The codecs of the app."""
        return self._connector.codecs

    async def close(self) -> None:
        """Stop waiting and close the connections."""
        await self.outcomes.close()
        await self.engine.close()

    def result_type(self, kind: str | None) -> ValueType:
        """The type that results of a kind are decoded to: its task's annotation, if the app has that task."""
        task = None if kind is None else self._connector.tasks.get(kind)
        return _ANYTHING if task is None else task.signature.result

    def run(self, execution_id: str | ExecutionId | Run[Any], *, kind: str | None = None) -> Run[Any]:
        """A handle on an execution from its id (or from a handle of another process)."""
        if isinstance(execution_id, Run):
            known = execution_id
            return Run(known.execution_id, kind=known.kind or kind, connector=self._connector, is_new=known.is_new)
        return Run(parse_execution_id(execution_id), kind=kind, connector=self._connector)

    def flow(self, flow_id: str | UUID | FlowRun) -> FlowRun:
        """A handle on a flow from its id (or from a handle of another process)."""
        if isinstance(flow_id, FlowRun):
            return FlowRun(flow_id.flow_id, nodes=flow_id.nodes, connector=self._connector, is_new=flow_id.is_new)
        return FlowRun(parse_flow_id(flow_id), connector=self._connector, is_new=False)

    async def find_id(self, text: str, *, what: What | None = None, limit: int = 10) -> list[FoundId]:
        """Executions and flows whose id ends or begins with at least 6 hex digits, newest first."""
        return await self.engine.find_id(text, what=what, limit=limit)

    async def get(self, execution_id: str | ExecutionId) -> Execution:
        """Read everything about an execution except payload and result; `NotFound` if it does not exist."""
        wanted = parse_execution_id(execution_id)
        found = await self.engine.read_execution(wanted)
        if found is None:
            raise NotFound("execution", wanted)
        texts = {name: getattr(found, name) for name in _SEALED_TEXTS}
        return msgspec.structs.replace(
            found, **{name: self.codecs.open_text(text, wanted) for name, text in texts.items() if text is not None}
        )
