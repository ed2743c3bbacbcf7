"""Which handler is running here: set by the worker, asked by whatever behaves differently inside a task."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from flowfabric.ids import ExecutionId
from flowfabric.models import Outcome

if TYPE_CHECKING:
    from flowfabric.client.run import Run
    from flowfabric.client.submission import Submission


class DurableScope(Protocol):
    """A running handler, as far as submitting and waiting inside it go."""

    async def submit_durably(self, submission: Submission) -> Run[Any]:
        """Submit once, however often the handler is run again."""
        ...

    async def outcome_of(self, execution_id: ExecutionId, timeout: timedelta | None = None) -> Outcome:
        """How another execution ended, waiting for it without holding a worker; `TimedOut` when that takes too long."""
        ...


def background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task that belongs to the process, also when a handler is the first to need it."""
    return asyncio.Task(work, loop=asyncio.get_running_loop(), name=name, context=Context())


running: ContextVar[DurableScope | None] = ContextVar("flowfabric_running", default=None)
