"""Whether all tasks of a handler wait without needing a worker: every way of waiting in asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import copy_context
from typing import Any

import pytest

from flowfabric.worker.durable import task_tree

GLOBAL_LOCK = asyncio.Lock()
Wait = Callable[[], Awaitable[None]]


class Handler:
    """A handler that runs, and the futures it is parked at."""

    def __init__(self) -> None:
        self.tasks = task_tree.HandlerTasks()
        self.parked: set[asyncio.Future[None]] = set()
        self.other: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # nothing is known of it
        self.began = 0

    async def park(self) -> None:
        """Wait for something that needs no worker."""
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parked.add(gate)
        self.began += 1
        try:
            await gate
        finally:
            self.parked.discard(gate)

    async def busy(self) -> None:
        """Wait for something else."""
        self.began += 1
        await self.other

    @property
    def all_wait(self) -> bool:
        return task_tree.all_wait(self.tasks, self.parked)


@contextlib.asynccontextmanager
async def running(code: Callable[[Handler], Awaitable[Any]]) -> AsyncIterator[Handler]:
    """Run a handler until it has come to rest, stop it afterwards."""
    loop = asyncio.get_running_loop()
    handler = Handler()
    loop.set_task_factory(task_tree.factory)  # type: ignore[arg-type]

    def begin() -> asyncio.Task[Any]:
        task_tree.owner.set(handler.tasks)
        return asyncio.ensure_future(code(handler))

    main = copy_context().run(begin)
    try:
        for _ in range(10):
            await asyncio.sleep(0)
        yield handler
    finally:
        for task in list(handler.tasks):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await main
        await asyncio.gather(*handler.tasks, return_exceptions=True)
        loop.set_task_factory(None)


# ---- ways to wait that are understood


async def alone(h: Handler) -> None:
    await h.park()


async def deep(h: Handler) -> None:
    async def inner() -> None:
        await h.park()

    async def middle() -> None:
        try:
            await inner()
        finally:
            await asyncio.sleep(0)

    await middle()


async def gathered(h: Handler) -> None:
    await asyncio.gather(h.park(), h.park(), h.park())


async def gathered_with_one_done(h: Handler) -> None:
    await asyncio.gather(h.park(), asyncio.sleep(0))


async def gathered_twice(h: Handler) -> None:
    async def two() -> None:
        await asyncio.gather(h.park(), h.park())

    await asyncio.gather(two(), two())


async def grouped(h: Handler) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(h.park())
        group.create_task(h.park())


async def grouped_and_itself(h: Handler) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(h.park())
        await h.park()


async def groups_in_groups(h: Handler) -> None:
    async def inner() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(h.park())

    async with asyncio.TaskGroup() as group:
        group.create_task(inner())
        group.create_task(gathered(h))


async def a_task_awaited(h: Handler) -> None:
    await asyncio.create_task(h.park())


async def a_task_beside(h: Handler) -> None:
    task = asyncio.create_task(h.park())
    await h.park()
    await task


async def waited(h: Handler) -> None:
    await asyncio.wait([asyncio.create_task(h.park()), asyncio.create_task(h.park())])


async def waited_for_the_first(h: Handler) -> None:
    tasks = [asyncio.create_task(h.park()), asyncio.create_task(h.park())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def as_completed(h: Handler) -> None:
    for one in asyncio.as_completed([h.park(), h.park()]):
        await one


async def shielded(h: Handler) -> None:
    await asyncio.shield(h.park())


async def shielded_task(h: Handler) -> None:
    await asyncio.shield(asyncio.create_task(h.park()))


async def waited_for_without_a_time(h: Handler) -> None:
    await asyncio.wait_for(h.park(), None)


async def a_timeout_that_never_strikes(h: Handler) -> None:
    async with asyncio.timeout(None):
        await h.park()


async def a_timeout_that_is_over(h: Handler) -> None:
    async with asyncio.timeout(1000):
        await asyncio.sleep(0)
    await h.park()


async def a_semaphore_of_its_own(h: Handler) -> None:
    limit = asyncio.Semaphore(1)

    async def one() -> None:
        async with limit:
            await h.park()

    await asyncio.gather(one(), one(), one())


async def a_lock_given_along(h: Handler) -> None:
    async def one(lock: asyncio.Lock) -> None:
        await lock.acquire()
        await h.park()

    lock = asyncio.Lock()
    await asyncio.gather(one(lock), one(lock))


async def inside_managers(h: Handler) -> None:
    @contextlib.asynccontextmanager
    async def manager() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.sleep(0)

    async with manager(), contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(manager())
        with contextlib.suppress(ValueError):
            await h.park()


async def from_a_generator(h: Handler) -> None:
    class Steps:
        def __aiter__(self) -> Steps:
            return self

        async def __anext__(self) -> None:
            await h.park()

    async for _ in Steps():
        pass


class Awaited:
    def __init__(self, what: Awaitable[None]) -> None:
        self._what = what

    def __await__(self) -> Iterator[Any]:
        return self._what.__await__()


async def through_an_object(h: Handler) -> None:
    await Awaited(h.park())


@pytest.mark.parametrize(
    "code",
    [
        alone, deep, gathered, gathered_with_one_done, gathered_twice, grouped, grouped_and_itself, groups_in_groups,
        a_task_awaited, a_task_beside, waited, waited_for_the_first, as_completed, shielded, shielded_task,
        waited_for_without_a_time, a_timeout_that_never_strikes, a_timeout_that_is_over, a_semaphore_of_its_own,
        a_lock_given_along, inside_managers, from_a_generator, through_an_object,
    ],
    ids=lambda code: code.__name__,
)  # fmt: skip
async def test_a_handler_that_only_waits_is_seen_to(code: Callable[[Handler], Awaitable[None]]) -> None:
    async with running(code) as handler:
        assert handler.began > 0
        assert handler.all_wait
        # And it is not, when one of what it waits for needs a worker after all.
        handler.parked.pop()
        assert not handler.all_wait


# ---- something goes on


async def nothing_yet(h: Handler) -> None:
    while True:
        await asyncio.sleep(0)


async def an_unknown_future(h: Handler) -> None:
    await h.other


async def an_ordinary_sleep(h: Handler) -> None:
    await asyncio.sleep(1000)


async def a_sibling_is_busy(h: Handler) -> None:
    await asyncio.gather(h.park(), h.busy())


async def a_member_is_busy(h: Handler) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(h.park())
        group.create_task(h.busy())


async def a_task_left_alone_is_busy(h: Handler) -> None:
    task = asyncio.create_task(h.busy())
    await h.park()
    await task


async def the_main_task_is_busy(h: Handler) -> None:
    task = asyncio.create_task(h.park())
    await h.busy()
    await task


async def a_limited_wait_for(h: Handler) -> None:
    await asyncio.wait_for(h.park(), 1000)


async def a_limited_block(h: Handler) -> None:
    async with asyncio.timeout(1000):
        await h.park()


async def a_named_limited_block(h: Handler) -> None:
    async with asyncio.timeout(1000) as limit:
        with contextlib.suppress(ValueError):
            await h.park()
    assert limit.expired()


async def a_limit_further_out(h: Handler) -> None:
    async def inner() -> None:
        await asyncio.gather(h.park(), h.park())

    async with asyncio.timeout(1000):
        await inner()


async def a_limit_in_a_sibling(h: Handler) -> None:
    async def limited() -> None:
        async with asyncio.timeout(1000):
            await h.park()

    await asyncio.gather(h.park(), limited())


async def a_limited_wait(h: Handler) -> None:
    await asyncio.wait([asyncio.create_task(h.park())], timeout=1000)


async def a_limited_as_completed(h: Handler) -> None:
    for one in asyncio.as_completed([h.park()], timeout=1000):
        await one


async def gathered_with_a_future_of_others(h: Handler) -> None:
    await asyncio.gather(h.park(), h.other)


async def waited_with_a_future_of_others(h: Handler) -> None:
    await asyncio.wait([asyncio.create_task(h.park()), h.other])


async def shielded_from_others(h: Handler) -> None:
    task = asyncio.create_task(h.park())
    await asyncio.shield(h.other)
    await task


async def a_lock_of_everybody(h: Handler) -> None:
    async def one() -> None:
        async with GLOBAL_LOCK:
            await h.park()

    await asyncio.gather(one(), one())


async def a_semaphore_inside_something_shared(h: Handler) -> None:
    class Client:
        limit = asyncio.Semaphore(1)

        async def call(self) -> None:
            async with self.limit:
                await h.park()

    client = Client()
    await asyncio.gather(client.call(), client.call())


async def an_event(h: Handler) -> None:
    event = asyncio.Event()
    await asyncio.gather(h.park(), event.wait())


async def a_queue(h: Handler) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    await asyncio.gather(h.park(), queue.get())


async def a_thread(h: Handler) -> None:
    over = threading.Event()
    try:
        await asyncio.gather(h.park(), asyncio.to_thread(over.wait, 60))
    finally:
        over.set()


@pytest.mark.parametrize(
    "code",
    [
        nothing_yet, an_unknown_future, an_ordinary_sleep, a_sibling_is_busy, a_member_is_busy,
        a_task_left_alone_is_busy, the_main_task_is_busy, a_limited_wait_for, a_limited_block, a_named_limited_block,
        a_limit_further_out, a_limit_in_a_sibling, a_limited_wait, a_limited_as_completed,
        gathered_with_a_future_of_others, waited_with_a_future_of_others, shielded_from_others, a_lock_of_everybody,
        a_semaphore_inside_something_shared, an_event, a_queue, a_thread,
    ],
    ids=lambda code: code.__name__,
)  # fmt: skip
async def test_a_handler_that_does_something_is_left_alone(code: Callable[[Handler], Awaitable[None]]) -> None:
    async with running(code) as handler:
        assert not handler.all_wait
    if GLOBAL_LOCK.locked():
        GLOBAL_LOCK.release()


async def test_tasks_of_a_task_belong_to_its_handler_until_they_end() -> None:
    async def code(h: Handler) -> None:
        async def child() -> None:
            await asyncio.create_task(h.park())

        quick = asyncio.create_task(asyncio.sleep(0))
        task = asyncio.create_task(child())
        await quick
        await task

    async with running(code) as one, running(alone) as two:
        assert (len(one.tasks), len(two.tasks)) == (3, 1)
        assert not one.tasks & two.tasks
    assert (one.tasks, two.tasks) == (set(), set())


async def test_a_task_outside_handlers_is_not_recorded() -> None:
    async with running(alone) as handler:
        task = asyncio.create_task(asyncio.sleep(0))
        assert task not in handler.tasks
        await task


async def test_a_loop_with_nothing_left_to_do_is_idle() -> None:
    loop = asyncio.get_running_loop()
    looked: list[bool] = []
    done = loop.create_future()

    def look() -> None:
        looked.append(task_tree.is_idle(loop))

    loop.call_soon(look)
    loop.call_soon(look)
    loop.call_soon(done.set_result, None)
    await done
    assert looked == [False, False]
    last = loop.create_future()

    def look_last() -> None:
        looked.append(task_tree.is_idle(loop))
        last.set_result(None)

    loop.call_soon(look_last)
    await last
    assert looked[2]
    assert not task_tree.is_idle(asyncio.AbstractEventLoop())
