"""The handler that is running here: set by the worker, read by code that behaves differently inside a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from flowfabric.values.execution import Outcome
from flowfabric.values.ids import ExecutionId, FlowId

if TYPE_CHECKING:
    from flowfabric.client.run import Run
    from flowfabric.client.submission import Submission


class Addressed(Protocol):
    """An app, as far as its database goes."""

    @property
    def address(self) -> tuple[str | None, str | None]: ...


class Host(Protocol):
    """The worker that runs the handler."""

    @property
    def app(self) -> Addressed: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...


class DurableScope(Protocol):
    """A running handler, as far as submitting and waiting inside it go."""

    @property
    def worker(self) -> Host: ...

    async def submit_durably(
        self,
        submission: Submission,
        around: Callable[[Callable[[Submission], Awaitable[Run[Any]]]], Callable[[Submission], Awaitable[Run[Any]]]],
    ) -> Run[Any]:
        """Submit once, even if the handler is re-run; `around` is the middleware for the first time."""
        ...

    async def outcome_of(self, execution_id: ExecutionId, timeout: timedelta | None = None) -> Outcome:
        """Wait for another execution to end without holding a worker; `TimedOut` if it takes too long."""
        ...

    async def end_of_flow(
        self, flow_id: FlowId, live: Callable[[], Awaitable[list[ExecutionId]]], timeout: timedelta | None = None
    ) -> None:
        """Wait until no member of a flow is `live`, without holding a worker; `TimedOut` if it takes too long."""
        ...

    async def flow_seed(self, name: str) -> UUID | None:
        """The seed for the ids of a flow submitted here, the same in every run of the handler; None inside a step."""
        ...


def background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task that belongs to the process, not to the handler that happens to start it."""
    return asyncio.Task(work, loop=asyncio.get_running_loop(), name=name, context=Context())


running: ContextVar[DurableScope | None] = ContextVar("flowfabric_running", default=None)


def scope_of(app: Addressed) -> DurableScope | None:
    """The handler that runs here, if its worker uses this app's database and this is the worker's loop.

    The loop is another one when a handler uses a sync client.
    """
    scope = running.get()
    if scope is None or scope.worker.loop is not asyncio.get_running_loop():
        return None
    return scope if scope.worker.app is app or scope.worker.app.address == app.address else None
