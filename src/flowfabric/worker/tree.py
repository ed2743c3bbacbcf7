"""Which asyncio tasks belong to a handler, and whether all of them wait for something that needs no worker.

The worker's loop makes tasks through `factory`, which notes for whom. A handler may be stopped and run again later
when each of its tasks waits for a parked future, directly or through its siblings (gather, a TaskGroup, `await task`).
Whatever is not understood counts as busy: then the handler simply stays where it is until its wait is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from contextvars import ContextVar
from typing import Any

owner: ContextVar[set[asyncio.Task[Any]] | None] = ContextVar("flowfabric_tasks", default=None)

# Coroutines that wait for other tasks and for nothing else.
_JOINS = frozenset(
    fn.__code__ for fn in (asyncio.TaskGroup.__aexit__, getattr(asyncio.TaskGroup, "_aexit", None)) if fn is not None
)
_WAIT = frozenset(fn.__code__ for fn in (getattr(asyncio.tasks, "_wait", None),) if fn is not None)


def factory(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    """A task factory that notes every task a handler makes."""
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
    tasks = owner.get()
    if tasks is not None:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    return task


def all_wait(tasks: Collection[asyncio.Task[Any]], parked: Collection[asyncio.Future[Any]]) -> bool:
    """Whether every task waits for a parked future or for a task that does."""
    return all(task.done() or _waits(task, tasks, parked) for task in tasks)


def _waits(
    task: asyncio.Task[Any], tasks: Collection[asyncio.Task[Any]], parked: Collection[asyncio.Future[Any]]
) -> bool:
    awaited = getattr(task, "_fut_waiter", None)
    if awaited is None:
        return False
    if awaited in parked:
        return True
    if isinstance(awaited, asyncio.Task):
        return awaited in tasks
    children = getattr(awaited, "_children", None)
    if children is not None:  # of gather
        return all(child.done() or child in tasks or child in parked for child in children)
    return _joins(task, tasks, parked)


def _joins(
    task: asyncio.Task[Any], tasks: Collection[asyncio.Task[Any]], parked: Collection[asyncio.Future[Any]]
) -> bool:
    """Whether the innermost coroutine of a task is one that waits for tasks of the same handler and nothing else."""
    coro: Any = task.get_coro()
    while True:
        inner = getattr(coro, "cr_await", None)
        if inner is None or not hasattr(inner, "cr_await"):
            break
        coro = inner
    code = getattr(coro, "cr_code", None)
    if code in _JOINS:
        return True
    frame = getattr(coro, "cr_frame", None)
    if code not in _WAIT or frame is None or frame.f_locals.get("timeout") is not None:
        return False
    return all(one.done() or one in tasks or one in parked for one in frame.f_locals.get("fs", (None,)))
