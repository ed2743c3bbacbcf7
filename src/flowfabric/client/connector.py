"""Protocols of the app and of a built flow, as the client sees them. Both are defined in layers above."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from flowfabric.client.submission import Submission, Submittable
from flowfabric.contracts.codecs import Codecs
from flowfabric.middleware import Middleware
from flowfabric.values.graph import NewNode
from flowfabric.values.ids import ExecutionId, FlowId

if TYPE_CHECKING:
    from flowfabric.client.client import AsyncClient


class Connector(Protocol):
    """An app: its tasks, its codecs, and a client on its database."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def address(self) -> tuple[str | None, str | None]: ...

    @property
    def codecs(self) -> Codecs: ...

    @property
    def middleware(self) -> Sequence[Middleware]: ...

    @property
    def tasks(self) -> Mapping[str, Submittable[Any]]: ...

    async def client(self) -> AsyncClient: ...


class Graph(Protocol):
    """A flow built with `app.flow()`."""

    @property
    def name(self) -> str: ...

    @property
    def namespace(self) -> str: ...

    @property
    def tags(self) -> Mapping[str, str]: ...

    @property
    def grows(self) -> FlowId | None: ...

    def id_of(self, key: str) -> FlowId: ...

    def submissions(self) -> dict[str, Submission]: ...

    def ids(self, flow_id: FlowId, partitions: int, seed: UUID | None = None) -> dict[str, ExecutionId]: ...

    def build(
        self, ids: Mapping[str, ExecutionId], changed: Mapping[str, Submission] | None = None
    ) -> list[NewNode]: ...
