"""The handler that is running here: set by the worker, read by code that behaves differently inside a task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import Context, ContextVar
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import UUID

from flowfabric.contracts.waits import WaitRequest
from flowfabric.values.attempt import Claimed
from flowfabric.values.durations import Duration
from flowfabric.values.execution import Outcome
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.policies import RetryPolicy
from flowfabric.values.wait import OpenWait

if TYPE_CHECKING:
    from flowfabric.client.client import AsyncClient
    from flowfabric.client.connector import Connector
    from flowfabric.client.run import Run
    from flowfabric.client.submission import Submission

T = TypeVar("T")


class Scope(Protocol):
    """A running handler, as its context and the submissions and waits inside it see it."""

    claimed: Claimed
    is_parked: bool

    @property
    def app(self) -> Connector:
        """The app of its worker."""

    @property
    def client(self) -> AsyncClient: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of its worker."""

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]: ...

    @property
    def is_cancelled(self) -> bool: ...

    @property
    def unwound_at(self) -> object:
        """The wait that stopped a synchronous handler, while the handler unwinds."""

    async def step(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        retry: RetryPolicy | None,
        timeout: Duration | None,
    ) -> Any: ...

    async def sleep(self, pause: Duration) -> None: ...

    async def now(self) -> datetime: ...

    async def progress(self, percent: int | None, message: str | None) -> None: ...

    async def heartbeat(self) -> None: ...

    async def waitpoint(self, request: WaitRequest) -> OpenWait: ...

    async def wait_for(self, request: WaitRequest, opened: OpenWait | None = None) -> Any: ...

    def in_thread(self, work: Coroutine[Any, Any, T]) -> T: ...

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


running: ContextVar[Scope | None] = ContextVar("flowfabric_running", default=None)


def scope_of(app: Connector) -> Scope | None:
    """The handler that runs here, if its worker uses this app's database and this is the worker's loop.

    The loop is another one when a handler uses a sync client.
    """
    scope = running.get()
    if scope is None or scope.loop is not asyncio.get_running_loop():
        return None
    return scope if scope.app is app or scope.app.address == app.address else None
