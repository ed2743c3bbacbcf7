"""The next requests of a handler: compared with the record, and returned from it in the recorded order."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, NoReturn

from flowfabric.values.step import BRANCHED, NewStep, StepKind
from flowfabric.worker.durable.changes import is_compared
from flowfabric.worker.durable.in_thread import CallingThread, calling_thread
from flowfabric.worker.durable.memory import Memory, Request
from flowfabric.worker.durable.order import come
from flowfabric.worker.durable.records import store

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running


# Kinds whose record is an end. Sleeps and waits are asked for twice: when they begin, and for their end.
_WITH_ENDS: frozenset[StepKind] = frozenset(("step", "result"))


async def ask(running: Running, name: str, kind: StepKind, was: str | None = None) -> Request:
    """Return what the handler asks for next, with its record. The request of a changed handler never returns."""
    memory = running.loaded_memory or await running.memory()
    request = memory.next(name, kind, was)
    if request.known is not None:
        if kind in _WITH_ENDS:
            await come(running, request.known)
    elif is_compared(request, memory):
        if memory.missing:
            await running.changes.hold(request)
            await running.check()
        if not memory.has_branched and (running.tasks.is_unclear or _handles_an_error()):
            await _branch(running, memory)
    return request


async def _branch(running: Running, memory: Memory) -> None:
    """Record, once, that later runs may take other steps than this one: they are not compared."""
    memory.has_branched = True
    await store(running, NewStep(name=BRANCHED, kind="patch"))


async def changed(running: Running, problem: str) -> NoReturn:
    """Stop a handler whose code does not fit its records."""
    await running.changes.stop(problem)
    await running.check()
    raise asyncio.CancelledError(running.stop_reason)


def _handles_an_error() -> bool:
    """Whether the handler is in an `except` or `finally` block because of an error."""
    thread = calling_thread.get()
    return thread.handles_an_error if isinstance(thread, CallingThread) else sys.exception() is not None
