"""Which asyncio tasks belong to a handler, and whether all of them wait for something that needs no worker.

The worker's loop makes tasks through `factory`, which records their handler. A handler may be stopped and run again
later when each of its tasks waits for a parked future, directly or through its siblings (gather, a TaskGroup, `await
task`, asyncio.wait, as_completed, shield, a lock or semaphore of its own). Anything unknown counts as busy, and so does
everything inside an `asyncio.timeout` that has not expired: then the handler keeps its slot until its wait ends.

`all_wait` and `is_idle` are the only functions that read internals of asyncio and CPython: `_fut_waiter`, `cr_await`,
the frames and closures of the standard library's own coroutines, `_ready` of the loop. Everything below them is a
helper. Checked with `tests/unit/test_task_tree.py` on CPython 3.11.7, 3.12.1 and 3.13.0; on another version run that
file first. If those internals change, handlers count as busy and keep their slots, which the tests notice.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextvars import ContextVar
from types import CellType, CodeType
from typing import Any

Tasks = Collection[asyncio.Task[Any]]
Futures = Collection[asyncio.Future[Any]]


class HandlerTasks(set[asyncio.Task[Any]]):
    """The unfinished tasks of one handler, those that are in a call of the database, and whether it can be judged.

    It cannot after it cancelled a task or a wait, or called from a thread of its own.
    """

    has_cancelled = False
    has_threads = False

    def __init__(self) -> None:
        super().__init__()
        self.calling: set[asyncio.Task[Any]] = set()

    @property
    def is_unclear(self) -> bool:
        """Whether which steps the handler takes may differ between runs."""
        return self.has_cancelled or self.has_threads

    def ended(self, task: asyncio.Task[Any]) -> None:
        self.discard(task)
        if task.cancelled():
            self.has_cancelled = True


owner: ContextVar[HandlerTasks | None] = ContextVar("flowfabric_tasks", default=None)


def factory(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    """A task factory that records every task a handler makes."""
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
    tasks = owner.get()
    if tasks is not None:
        tasks.add(task)
        task.add_done_callback(tasks.ended)
    return task


def install(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Use the factory for a loop; returns the function that puts the earlier one back."""
    earlier = loop.get_task_factory()
    loop.set_task_factory(factory)  # type: ignore[arg-type]  # the stub names no options

    def restore() -> None:
        # Another worker of the loop may still need it, or another library has replaced it.
        if earlier is not factory and loop.get_task_factory() is factory:
            loop.set_task_factory(earlier)

    return restore


def all_wait(tasks: Tasks, parked: Futures, *, with_timeouts: bool = False) -> bool:
    """Whether every task waits for a parked future or for a task that does.

    `with_timeouts`: also those inside an `asyncio.timeout`, which could end the wait.
    """
    return all(task.done() or _waits(task, tasks, parked, with_timeouts) for task in tasks)


def is_idle(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether nothing is left to do in this turn of the loop or the next; False if the loop does not tell (uvloop)."""
    return not getattr(loop, "_ready", True)


# The internals that `all_wait` reads


def _codes(*found: object) -> frozenset[CodeType]:
    return frozenset(fn.__code__ for fn in found if hasattr(fn, "__code__"))


# Coroutines of the standard library that wait only for tasks. Some have moved between versions.
_JOINS = _codes(asyncio.TaskGroup.__aexit__, getattr(asyncio.TaskGroup, "_aexit", None))
_WAIT = _codes(getattr(asyncio.tasks, "_wait", None))
_AS_COMPLETED = _codes(
    getattr(getattr(asyncio.tasks, "_AsCompletedIterator", None), "_wait_for_one", None)
) | frozenset(
    code for code in asyncio.as_completed.__code__.co_consts if isinstance(code, CodeType) and "one" in code.co_name
)
# Locks: one task waits until another of the same handler releases it.
_LOCKS = (asyncio.Lock, asyncio.Semaphore, asyncio.Barrier)


def _waits(task: asyncio.Task[Any], tasks: Tasks, parked: Futures, with_timeouts: bool) -> bool:
    awaited = getattr(task, "_fut_waiter", None)
    if awaited is None or awaited.done():
        return False  # about to continue
    chain = list(_chain(task))
    if not with_timeouts and any(_has_timeout(coro) for coro in chain):
        return False
    if awaited in parked:
        return True
    if isinstance(awaited, asyncio.Task):
        return awaited in tasks
    children = getattr(awaited, "_children", None)
    if children is not None:  # of gather
        return _are_ours(children, tasks, parked)
    shielded = _shielded(awaited)
    if shielded is not None:
        return _are_ours([shielded], tasks, parked)
    return bool(chain) and _joins(chain, tasks, parked)


def _are_ours(futures: Collection[Any], tasks: Tasks, parked: Futures) -> bool:
    return all(one.done() or one in tasks or one in parked for one in futures)


def _chain(task: asyncio.Task[Any]) -> Iterator[Any]:
    """The coroutines of a task, from the outermost to the one that waits."""
    coro: Any = task.get_coro()
    while hasattr(coro, "cr_await"):
        yield coro
        coro = coro.cr_await


def _has_timeout(coro: Any) -> bool:
    """Whether a coroutine is inside `asyncio.timeout` or `wait_for` with a timeout: its frame refers to the manager."""
    for found in gc.get_referents(coro):
        manager = getattr(found, "__self__", found)
        if isinstance(manager, asyncio.Timeout) and manager.when() is not None:
            return True
    return False


def _shielded(outer: Any) -> asyncio.Future[Any] | None:
    """Return the inner future of one made by `shield`."""
    for callback, *_ in getattr(outer, "_callbacks", None) or ():
        if getattr(callback, "__qualname__", "") == "shield.<locals>._outer_done_callback":
            for cell in callback.__closure__ or ():
                if isinstance(cell.cell_contents, asyncio.Future) and cell.cell_contents is not outer:
                    return cell.cell_contents
    return None


def _joins(chain: list[Any], tasks: Tasks, parked: Futures) -> bool:
    """Whether the innermost coroutines of a task wait only for tasks of the same handler."""
    innermost = chain[-1]
    code = innermost.cr_code
    if code in _JOINS:
        return True
    local = innermost.cr_frame.f_locals if innermost.cr_frame is not None else {}
    if code in _WAIT:
        return local.get("timeout") is None and _are_ours(local.get("fs", (None,)), tasks, parked)
    if isinstance(local.get("self"), _LOCKS):
        return _is_own(local["self"], tasks)
    return any(coro.cr_code in _AS_COMPLETED for coro in chain) and _completes(chain, tasks, parked)


def _completes(chain: list[Any], tasks: Tasks, parked: Futures) -> bool:
    """Whether the `as_completed` that a task waits for has tasks of the handler left, and no time limit."""
    for coro in chain:
        for found in gc.get_referents(coro):
            if getattr(found, "gi_code", None) is asyncio.as_completed.__code__ and found.gi_frame is not None:
                todo, limit = (found.gi_frame.f_locals.get(name) for name in ("todo", "timeout_handle"))
            elif type(found).__name__ == "_AsCompletedIterator":
                todo, limit = found._todo, found._timeout_handle
            else:
                continue
            return todo is not None and limit is None and _are_ours(todo, tasks, parked)
    return False


def _is_own(tool: object, tasks: Tasks) -> bool:
    """Whether a lock belongs to this handler, as far as we can tell: a local variable holds it and no global does."""
    for task in tasks:
        for coro in _chain(task):
            if coro.cr_frame is None or coro.cr_frame.f_locals.get("self") is tool:
                continue  # the lock's own code
            if any(value is tool for value in coro.cr_frame.f_globals.values()):
                return False
            for found in gc.get_referents(coro):
                if found is tool or (isinstance(found, CellType) and _content(found) is tool):
                    return True
    return False


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
