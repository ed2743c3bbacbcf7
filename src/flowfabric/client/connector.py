"""What the client needs to know of an app and of a flow that was built: both belong to layers above."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from flowfabric.client.submission import Submission, Submittable
from flowfabric.contracts import Codecs
from flowfabric.graph import NewNode
from flowfabric.ids import ExecutionId, FlowId
from flowfabric.middleware import Middleware

if TYPE_CHECKING:
    from flowfabric.client.client import AsyncClient


class Connector(Protocol):
    """Whoever knows the tasks and the way to a client: an app."""

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
    """A flow that was built: what `app.flow()` makes."""

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
