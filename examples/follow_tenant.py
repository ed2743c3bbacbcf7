"""Follow the completions of one tenant: stop anywhere, and continue with the stored cursor."""

import asyncio

import flowfabric as ff
from flowfabric.values.event import EventCursor, EventFilter

app = ff.App()


@app.task
async def bill(amount: int) -> int:
    if amount < 0:
        raise ff.Reject("a bill is never negative")
    return amount


async def follow(engine: ff.Engine, cursor: EventCursor, count: int) -> EventCursor:
    """Act on `count` completions of the tenant; returns where to continue."""
    only_acme = EventFilter(namespace="acme")
    async with await engine.subscribe_completion(after=cursor, filter=only_acme) as events:
        for _ in range(count):
            event = await anext(events)
            print(f"{event.tags['bill']}: {event.outcome}")
            cursor = event.cursor  # store it here, after acting
    return cursor


async def main() -> None:
    async with app, ff.Worker(app):
        engine = (await app.client()).engine
        cursor = (await engine.count_events()).cursor  # the end of the log: from now on
        for number, amount in enumerate((10, 20, -30)):
            run = await bill.submit(amount, namespace="acme", tags={"bill": f"bill {number}"})
            await run.outcome()
            other = await bill.submit(amount, namespace="other")
            await other.outcome()
        cursor = await follow(engine, cursor, 2)
        print(f"stored {len(cursor.encode())} bytes, and begins again")
        await follow(engine, cursor, 1)


asyncio.run(main())
