"""The middleware class, the objects its hooks receive, and chains of several middlewares.

The first of a list is the outermost: it sees the call first and the result last. A hook that is not overridden is left
out when the chain is built, so it costs nothing. The hooks' arguments are small protocols: a middleware may annotate
with them without importing the client, the bridges or the worker, and a test can pass objects of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, Protocol, Self, TypeVar, cast

from flowfabric.engine.timers import Round
from flowfabric.errors import InvalidInput, RetryLater
from flowfabric.values.budget import SoftBreach
from flowfabric.values.ids import ExecutionId
from flowfabric.values.options import Options

log = logging.getLogger("flowfabric.middleware")
Hook = Literal["submit", "execute", "call", "claim", "duty", "leads", "soft_limit"]
OutcomeWord = Literal["ok", "error", "retry", "timeout", "cancelled", "parked"]

# Operations that only release resources of this process. They do not need the database and must work without it.
LOCAL: Final = frozenset({"close", "shutdown_prepare"})


class Submission(Protocol):
    """A submission on its way. It is immutable: pass on a copy made with `replace`."""

    @property
    def kind(self) -> str: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> Mapping[str, Any]: ...
    @property
    def options(self) -> Options: ...

    def replace(self, **changes: Any) -> Self: ...


class Run(Protocol):
    """A submitted execution; `is_new` is False if it existed already."""

    @property
    def execution_id(self) -> ExecutionId: ...
    @property
    def is_new(self) -> bool: ...


class Running(Protocol):
    """A running attempt: the context that its handler receives."""

    @property
    def execution_id(self) -> ExecutionId: ...
    @property
    def attempt_index(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def lane_id(self) -> str: ...
    @property
    def tags(self) -> Mapping[str, str]: ...
    @property
    def created_at(self) -> datetime: ...
    @property
    def log(self) -> logging.Logger | logging.LoggerAdapter[Any]: ...


class Middleware:
    """Hooks around submissions, handlers and engine calls. Override the ones you need; the others cost nothing.

    A hook awaits `proceed` once, not at all to refuse, or again to retry; its caller gets what the hook returns.
    """

    async def submit(self, submission: Submission, proceed: Callable[[Submission], Awaitable[Run]]) -> Run:
        """Runs around one submission, before its arguments are encoded."""
        return await proceed(submission)

    async def execute(self, task: Running, proceed: Callable[[], Awaitable[Any]]) -> Any:
        """Runs around the handler of one attempt, and again when a task resumes after a wait."""
        return await proceed()

    async def call(self, method: str, proceed: Callable[[], Awaitable[Any]]) -> Any:
        """Runs around one operation of the `Engine`; `method` is its name."""
        return await proceed()

    async def claim(self, lanes: Sequence[str], proceed: Callable[[], Awaitable[Any]]) -> Any:
        """Runs around an operation of the `Engine` that claims, inside `call`; `lanes` are those it may take from."""
        return await proceed()

    async def duty(self, name: str, proceed: Callable[[], Awaitable[Round]]) -> Round:
        """Runs around one round of a background duty, in the second thread of the worker that leads the duties.

        `proceed` returns how many items the round handled, and how many failed.
        """
        return await proceed()

    def leads(self, group: str, is_ours: bool) -> None:
        """This process began or ceased to lead a group of duties (`duties`, `cascades`); in the second thread."""

    def soft_limit(self, task: Running, breach: SoftBreach) -> None:
        """A handler's report or settlement was counted, and a dimension is above its soft limit."""


def check_middlewares(value: Iterable[Middleware], field: str = "middleware") -> tuple[Middleware, ...]:
    """Check that the list contains only middlewares."""
    allowed = "a list of Middleware objects, the outermost first"
    if isinstance(value, Middleware) or not isinstance(value, Iterable):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed=allowed)
    found = tuple(value)
    for item in found:
        if not isinstance(item, Middleware):
            what = f"the class {item.__name__}" if isinstance(item, type) else type(item).__name__
            raise InvalidInput(f"contains {what}", field=field, allowed=allowed)
    return found


def overriding(middlewares: Iterable[Middleware], hook: Hook) -> list[Middleware]:
    """The middlewares that override this hook."""
    default = getattr(Middleware, hook)
    # Check the object, not its class: an object may also decline a hook of its class.
    return [each for each in middlewares if getattr(getattr(each, hook), "__func__", None) is not default]


_S = TypeVar("_S", bound=Submission)
_R = TypeVar("_R", bound=Run)
Proceed = Callable[[], Awaitable[Any]]


def chain_submit(
    middlewares: Sequence[Middleware], final: Callable[[_S], Awaitable[_R]]
) -> Callable[[_S], Awaitable[_R]]:
    """`final` inside the `submit` hooks; `final` itself if there are none. Build once, call often."""
    for each in reversed(overriding(middlewares, "submit") if middlewares else ()):
        final = _around_submit(each, final)
    return final


def _around_submit(middleware: Middleware, proceed: Callable[[_S], Awaitable[_R]]) -> Callable[[_S], Awaitable[_R]]:
    # The protocols cannot express it: a hook passes on a submission of the same type and returns the same type of run.
    around = cast("Callable[[_S, Callable[[_S], Awaitable[_R]]], Awaitable[_R]]", middleware.submit)
    return lambda submission: around(submission, proceed)


def chain_execute(middlewares: Sequence[Middleware], task: Running, final: Proceed) -> Proceed:
    """`final` inside the `execute` hooks for one attempt; `final` itself if there are none."""
    for each in reversed(overriding(middlewares, "execute") if middlewares else ()):
        final = _around_execute(each, task, final)
    return final


def _around_execute(middleware: Middleware, task: Running, proceed: Proceed) -> Proceed:
    return lambda: middleware.execute(task, proceed)


def chain_call(middlewares: Sequence[Middleware], method: str, final: Proceed) -> Proceed:
    """`final` inside the `call` hooks of these middlewares, all of which must override it."""
    for each in reversed(middlewares):
        final = _around_call(each, method, final)
    return final


def _around_call(middleware: Middleware, method: str, proceed: Proceed) -> Proceed:
    return lambda: middleware.call(method, proceed)


def chain_claim(middlewares: Sequence[Middleware], lanes: Sequence[str], final: Proceed) -> Proceed:
    """`final` inside the `claim` hooks of these middlewares, all of which must override it."""
    for each in reversed(middlewares):
        final = _around_claim(each, lanes, final)
    return final


def _around_claim(middleware: Middleware, lanes: Sequence[str], proceed: Proceed) -> Proceed:
    return lambda: middleware.claim(lanes, proceed)


class DutyHooks:
    """The `duty` and `leads` hooks of some middlewares: what watches the duties of a worker."""

    def __init__(self, middlewares: Sequence[Middleware]) -> None:
        self._around = overriding(middlewares, "duty")
        self._told = overriding(middlewares, "leads")

    async def round(self, name: str, proceed: Callable[[], Awaitable[Round]]) -> Round:
        for each in reversed(self._around):
            proceed = _around_duty(each, name, proceed)
        return await proceed()

    def leads(self, group: str, is_ours: bool) -> None:
        for each in self._told:
            try:
                each.leads(group, is_ours)
            except Exception:
                log.exception("%s.leads failed", type(each).__name__)


def _around_duty(
    middleware: Middleware, name: str, proceed: Callable[[], Awaitable[Round]]
) -> Callable[[], Awaitable[Round]]:
    return lambda: middleware.duty(name, proceed)


def is_resumed(task: Running) -> bool:
    """Whether the attempt resumes after a wait, with its handler run from the top; False if the context cannot tell."""
    return bool(getattr(task, "is_resumed", False))


def is_parked(task: Running | None) -> bool:
    """Whether the handler is stopped because it only waits; False if the context cannot tell."""
    return bool(getattr(task, "is_parked", False))


def outcome_of(error: BaseException | None, task: Running | None = None) -> OutcomeWord:
    """How a hook's `proceed` ended, in one word; `task` is the attempt if it was a handler."""
    match error:
        case None:
            return "ok"
        case RetryLater():
            return "retry"
        case TimeoutError():
            return "timeout"
        case Exception():
            return "error"
        case _ if is_parked(task):
            return "parked"
        case _:
            return "cancelled"


def type_name(error: BaseException) -> str:
    """The class of an error, for telemetry. Its message may quote user data and is never shown."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def missing(name: str, library: str, extra: str) -> ImportError:
    """The error for a middleware whose library is not installed."""
    return ImportError(f"{name} needs {library}; install it with: pip install flowfabric[{extra}]", name=extra)
