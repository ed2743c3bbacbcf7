"""A coroutine that a synchronous handler's thread waits for, and functions that the thread runs for it meanwhile."""

from __future__ import annotations

import asyncio
import threading
import traceback
from types import SimpleNamespace
from typing import Any

import pytest

from flowfabric.errors import Interrupted
from flowfabric.worker.durable.in_thread import calling_thread, in_thread
from flowfabric.worker.durable.task_tree import HandlerTasks

PATIENCE = 60.0


def a_handler(**changes: Any) -> Any:
    """As much of a running execution as is needed."""
    worker = SimpleNamespace(loop=asyncio.get_running_loop())
    facts = {"worker": worker, "is_cancelled": False, "unwound_at": None, "stop_reason": "told to", **changes}
    threads = {"tasks": HandlerTasks(), "in_threads": 0, "is_in_own_thread": True}
    return SimpleNamespace(refused=lambda: 0, claimed=SimpleNamespace(execution_id=None), **threads, **facts)


async def ask(fn: Any, *args: Any) -> Any:
    """A coroutine that has the thread call a function."""
    thread = calling_thread.get()
    assert thread is not None
    return await thread.run(fn, *args)


async def test_a_function_runs_in_the_thread_that_waits() -> None:
    handler = a_handler()

    def handle() -> tuple[int, int]:
        return threading.get_ident(), in_thread(handler, ask(threading.get_ident))

    here, there = await asyncio.to_thread(handle)
    assert here == there != threading.get_ident()
    assert calling_thread.get() is None


async def test_a_function_may_wait_for_another_coroutine() -> None:
    handler = a_handler()

    def outer(value: int) -> int:
        found: int = in_thread(handler, ask(lambda: value + 1))
        return found * 2

    assert await asyncio.to_thread(in_thread, handler, ask(outer, 4)) == 10


async def test_an_exception_has_the_traceback_of_the_function_alone() -> None:
    handler = a_handler()

    def fail() -> None:
        raise LookupError("not here")

    with pytest.raises(LookupError, match="not here") as raised:
        await asyncio.to_thread(in_thread, handler, ask(fail))
    files = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    inside = files[next(place for place, name in enumerate(files) if name.endswith("durable/in_thread.py")) :]
    assert inside[-1] == __file__
    assert not [name for name in inside if "asyncio" in name or "concurrent" in name]


async def test_a_function_that_raises_what_a_future_cannot_carry() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.to_thread(in_thread, a_handler(), ask(next, iter(())))


async def test_an_interruption_leaves_the_thread_immediately_and_cancels_the_coroutine() -> None:
    cancelled = asyncio.Event()

    def unwind() -> None:
        raise Interrupted("now")

    async def work() -> None:
        try:
            await ask(unwind)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(Interrupted, match="now"):
        await asyncio.to_thread(in_thread, a_handler(), work())
    await asyncio.wait_for(cancelled.wait(), PATIENCE)


async def test_the_end_of_a_stopped_handler_is_an_interruption() -> None:
    handler = a_handler()

    async def work() -> None:
        handler.is_cancelled = True
        raise asyncio.CancelledError

    with pytest.raises(Interrupted, match="told to"):
        await asyncio.to_thread(in_thread, handler, work())


async def test_a_coroutine_that_is_cancelled_before_it_begins_is_closed() -> None:
    """One that is never awaited would be warned about."""
    handler = a_handler()
    loop = asyncio.get_running_loop()

    def cancelled(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        handler.is_cancelled = task.cancel()
        return task

    waiting = asyncio.ensure_future(asyncio.to_thread(in_thread, handler, ask(int)))
    loop.set_task_factory(cancelled)  # type: ignore[arg-type]
    try:
        with pytest.raises(Interrupted, match="told to"):
            await waiting
    finally:
        loop.set_task_factory(None)


@pytest.mark.parametrize("changes", [{"is_cancelled": True}, {"unwound_at": object()}])
async def test_a_handler_that_was_asked_to_stop_is_refused(changes: dict[str, Any]) -> None:
    async def work() -> None:
        pytest.fail("never begun")

    with pytest.raises(Interrupted, match="told to"):
        await asyncio.to_thread(in_thread, a_handler(**changes), work())
