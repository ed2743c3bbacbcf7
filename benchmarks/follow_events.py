"""A process that follows events beside a drain: `python -m benchmarks.follow_events DSN (filtered | all)`.

Prints "ready", then at the end of its input how many events it had, and how many notifications it got.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import asyncpg
import uvloop

import flowfabric as ff
from flowfabric.values.event import EventFilter

_FILTERED = (
    (("completion",), EventFilter(namespace="tenant")),
    (("completion",), EventFilter(instance_tag=("tenant", "a"))),
    (("operator",), None),
    (("lease", "completion"), EventFilter(kind="another")),
)


async def main(dsn: str, mode: str) -> None:
    seen = 0
    async with await ff.Engine.connect(dsn, max_size=2) as engine:

        async def follow(families: tuple[str, ...] | None, chosen: EventFilter | None) -> None:
            nonlocal seen
            async for _ in await engine.follow(families, filter=chosen):  # type: ignore[arg-type]
                seen += 1

        wanted = _FILTERED if mode == "filtered" else ((None, None),)
        tasks = [asyncio.create_task(follow(*one)) for one in wanted]
        while engine.followers.count < len(wanted):
            await asyncio.sleep(0.01)
        told = 0

        def counted(*_: object) -> None:
            nonlocal told
            told += 1

        listening = await asyncpg.connect(dsn)
        await listening.add_listener(f"flowfabric_{engine.instance}", counted)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        sys.stdout.write(f"{seen} {told} {engine.followers.reads}\n")
        sys.stdout.flush()
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
