"""The handler that is running here: set by the worker, read by code that behaves differently inside a task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextvars import Context, ContextVar
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import UUID

from flowfabric.contracts.waits import WaitRequest
from flowfabric.values.attempt import Claimed
from flowfabric.values.budget import OnLost, Reserved
from flowfabric.values.durations import Duration
from flowfabric.values.execution import Outcome
from flowfabric.values.flow import FlowOutcome
from flowfabric.values.graph import FlowSubmitted, NewNode
from flowfabric.values.ids import ExecutionId, FlowId, ReservationId
from flowfabric.values.policies import RetryPolicy
from flowfabric.values.spending import Used
from flowfabric.values.stream import DurabilityMode, FrameKind
from flowfabric.values.wait import OpenWait

if TYPE_CHECKING:
    from flowfabric.client.client import AsyncClient
    from flowfabric.client.connector import Connector
    from flowfabric.client.run import Run
    from flowfabric.client.submission import Submission

T = TypeVar("T")


class ChildFlow(Protocol):
    """A flow that a handler submits: `flow_id` is set if an earlier run did. Its ids are made from `seed`."""

    parent_id: ExecutionId
    seed: UUID
    flow_id: FlowId | None
    existed: bool  # its idempotency key was known

    async def submit(
        self,
        flow_id: FlowId,
        nodes: Sequence[NewNode],
        *,
        name: str,
        namespace: str,
        tags: dict[str, str],
        detached: bool,
    ) -> FlowSubmitted | None:
        """Store it and record it; None if that was done meanwhile."""
        ...


class Scope(Protocol):
    """A running handler, as its context and the submissions and waits inside it see it."""

    claimed: Claimed
    is_parked: bool
    calls: list[Coroutine[Any, Any, Any]]  # of durable operations that may not have been awaited yet

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
        was: str | None = None,
    ) -> Any: ...

    async def patched(self, name: str) -> bool: ...

    async def map_steps(
        self, fn: Callable[[Any], Any], items: Iterable[Any], limit: int, name: str | None
    ) -> list[Any]: ...

    async def sleep(self, pause: Duration) -> None: ...

    async def now(self) -> datetime: ...

    async def progress(self, percent: int | None, message: str | None) -> None: ...

    async def heartbeat(self) -> None: ...

    async def emit(
        self,
        data: Any,
        *,
        type: str,  # noqa: A002 - the word of the context
        kind: FrameKind | None,
        live: bool,
        ttl: Duration | None,
        correlation_id: str | None,
        durability_mode: DurabilityMode | None,
    ) -> None: ...

    def emit_soon(self, line: str, type: str, kind: FrameKind) -> None:  # noqa: A002 - as in the frame
        """Emit text from any thread without waiting."""

    async def summarize(self, patch: Any, *, plain: bool, durability_mode: DurabilityMode | None) -> None: ...

    async def report_usage(self, amounts: Mapping[str, int], budgets: Collection[str] | None, name: str) -> Used: ...

    async def reserve_usage(
        self, amounts: Mapping[str, int], budgets: Collection[str] | None, name: str, on_lost: OnLost
    ) -> Reserved: ...

    async def settle_usage(self, reservation_id: ReservationId, amounts: Mapping[str, int]) -> Used: ...

    async def cancel_reservation(self, reservation_id: ReservationId) -> None: ...

    async def waitpoint(self, request: WaitRequest) -> OpenWait: ...

    async def wait_for(self, request: WaitRequest, opened: OpenWait | None = None) -> Any: ...

    def in_thread(self, work: Coroutine[Any, Any, T]) -> T: ...

    async def send(self, submission: Submission) -> Run[Any]:
        """Submit as this handler, whatever thread or task calls."""
        ...

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

    async def outcome_of_flow(
        self,
        flow_id: FlowId,
        live: Callable[[], Awaitable[list[ExecutionId]]],
        read: Callable[[], Awaitable[FlowOutcome | None]],
        timeout: timedelta | None = None,
    ) -> FlowOutcome:
        """The same, and return how its members ended, which is recorded."""
        ...

    async def as_one_call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do this in turn with the calls of the handler's other branches."""
        ...

    async def flow_seed(self, name: str) -> UUID | None:
        """The seed for the ids of nodes added here, the same in every run of the handler; None inside a step."""
        ...

    async def child_flow(self, name: str) -> ChildFlow | None:
        """The flow that is submitted here, once in all runs of the handler; None inside a step."""
        ...


def background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task that belongs to the process, not to the handler that happens to start it."""
    return asyncio.Task(work, loop=asyncio.get_running_loop(), name=name, context=Context())


log = logging.getLogger("flowfabric.client")
running: ContextVar[Scope | None] = ContextVar("flowfabric_running", default=None)
handled: ContextVar[Scope | None] = ContextVar("flowfabric_handled", default=None)
"""The same inside its steps too, where `running` is unset."""
in_step: ContextVar[bool] = ContextVar("flowfabric_in_step", default=False)
_told: set[str] = set()


def enter(scope: Scope) -> None:
    """Belong to this handler from here on, as its other threads and their tasks do not by themselves."""
    if running.get() is None and not in_step.get():
        running.set(scope)
        handled.set(scope)


def handled_id() -> ExecutionId | None:
    """The execution whose handler runs here, inside its steps too."""
    scope = handled.get()
    return None if scope is None else scope.claimed.execution_id


def tell_forgotten(app: Connector, what: str) -> None:
    """Warn, once for each thing submitted, that a handler submits with a client of another loop."""
    scope = running.get()
    if scope is not None and scope.app.address == app.address and what not in _told:
        _told.add(what)
        log.warning(
            "the handler of %s submits %s with a client of its own, which is not remembered when the handler is run"
            " again; use ctx.submit, or an idempotency key",
            scope.claimed.execution_kind,
            what,
        )


def scope_of(app: Connector) -> Scope | None:
    """The handler that runs here, if its worker uses this app's database and this is the worker's loop.

    The loop is another one when a handler uses a sync client.
    """
    scope = running.get()
    if scope is None or scope.loop is not asyncio.get_running_loop():
        return None
    return scope if scope.app is app or scope.app.address == app.address else None
