"""Which handler is running here: set by the worker, asked by whatever behaves differently inside a task."""

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
    """Whose database is known: an app."""

    @property
    def address(self) -> tuple[str | None, str | None]: ...


class Host(Protocol):
    """Who runs the handler: a worker."""

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
        """Submit once, however often the handler is run again; `around` is the middleware, for what is new."""
        ...

    async def outcome_of(self, execution_id: ExecutionId, timeout: timedelta | None = None) -> Outcome:
        """How another execution ended, waiting for it without holding a worker; `TimedOut` when that takes too long."""
        ...

    async def end_of_flow(
        self, flow_id: FlowId, live: Callable[[], Awaitable[list[ExecutionId]]], timeout: timedelta | None = None
    ) -> None:
        """Wait until none of a flow's members is `live`, without holding a worker; `TimedOut` when it lasts longer."""
        ...

    async def flow_seed(self, name: str) -> UUID | None:
        """What the ids of a flow submitted here come from, the same in every run of the handler; None inside a step."""
        ...


def background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task that belongs to the process, also when a handler is the first to need it."""
    return asyncio.Task(work, loop=asyncio.get_running_loop(), name=name, context=Context())


running: ContextVar[DurableScope | None] = ContextVar("flowfabric_running", default=None)


def scope_of(app: Addressed) -> DurableScope | None:
    """The handler that runs here, if its worker is on the database of this app, and this is the worker's loop.

    The loop is another one when a handler uses a sync client.
    """
    scope = running.get()
    if scope is None or scope.worker.loop is not asyncio.get_running_loop():
        return None
    return scope if scope.worker.app is app or scope.worker.app.address == app.address else None
