"""`ctx.map`: a function for each of many items, some of them at a time, with a recorded step each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from flowfabric.errors import InvalidInput
from flowfabric.worker.durable.in_thread import calling_thread
from flowfabric.worker.runners.threads import Threads

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

_IDLE = 1.0  # seconds that a thread of a map waits for its next item


async def map_steps(
    running: Running, fn: Callable[[Any], Any], items: Iterable[Any], limit: int, name: str | None
) -> list[Any]:
    """Return the results in the order of the items. The first error cancels the rest and is raised."""
    title = _title(fn, name)
    if type(limit) is not int or limit < 1:
        raise InvalidInput(f"got {limit!r}", field="limit", allowed="an integer from 1")
    if not isinstance(items, Iterable):
        raise InvalidInput(f"got {type(items).__name__}", field="items", allowed="a list, or another iterable")
    work = list(items)
    results: list[Any] = [None] * len(work)
    places = iter(range(len(work)))
    if calling_thread.get() is not None:
        # The handler's own thread waits here. Those of the worker are for handlers, all of which may wait like this.
        calling_thread.set(Threads(limit, idle=_IDLE))

    async def line() -> None:
        for place in places:
            results[place] = await running.step(f"{title} {place}", fn, (work[place],), {}, None, None)

    lines = [asyncio.ensure_future(line()) for _ in range(min(limit, len(work)))]
    try:
        await asyncio.gather(*lines)
    finally:
        for one in lines:
            one.cancel()
        await asyncio.gather(*lines, return_exceptions=True)
    return results


def _title(fn: object, name: str | None) -> str:
    if name is not None:
        return name
    own = getattr(fn, "__name__", "")
    if not own or own == "<lambda>":
        what = "a lambda" if own else f"a {type(fn).__name__}"
        raise InvalidInput(f"{what} has no name for its steps", field="name", allowed="name=...")
    return str(own)
