"""Count and time what an app does. In a service, give `PrometheusSink()` to `Metrics` and serve the registry."""

import asyncio

import flowfabric as ff
from flowfabric.middleware import MemorySink, Metrics

sink = MemorySink()
app = ff.App(middleware=[Metrics(sink)])


@app.task
async def halve(number: int) -> int:
    if number % 2:
        raise ff.Reject("odd")
    return number // 2


async def main() -> None:
    async with ff.Worker(app):
        runs = [await halve.submit(number) for number in range(1, 6)]
        for run in runs:
            await run.outcome()

    seen = sink.snapshot()
    for series, count in sorted(seen.counts.items()):
        print(series, count)
    handlers = seen.timings['flowfabric_execution_seconds{kind="halve"}']
    print(f"{handlers.count} handlers took {handlers.longest * 1000:.1f} ms at most")


if __name__ == "__main__":
    asyncio.run(main())
