"""An API allows each customer two calls at a time and five in three seconds: executions wait, and no worker does."""

import asyncio
import time
from collections import Counter

import flowfabric as ff

app = ff.App()
app.quota("api", concurrent=2, per_window=5, window="3s", key="customer")  # for each value of the tag
running: Counter[str] = Counter()
most: Counter[str] = Counter()


@app.task(quotas=["api"])
async def call_api(ctx: ff.Context, page: int) -> int:
    customer = ctx.tags["customer"]
    running[customer] += 1
    most[customer] = max(most[customer], running[customer])
    await asyncio.sleep(0.05)
    running[customer] -= 1
    return page


async def main() -> None:
    async with ff.Worker(app):
        begun = time.monotonic()
        runs = [
            await call_api.options(tags={"customer": customer}).submit(page)
            for customer, pages in (("acme", 6), ("initech", 2))
            for page in range(pages)
        ]
        first, second = runs[:5], runs[6:]
        for run in [*first, *second]:
            await run.result()
        print("at the same time:", dict(sorted(most.items())))
        quota = await (await app.client()).quota("api")
        print("started in the window:", quota.admitted, "- waiting:", quota.waiting)
        await runs[5].result()  # the sixth call of acme starts when its window has room
        print("the sixth call waited for the window:", time.monotonic() - begun > 2)


if __name__ == "__main__":
    asyncio.run(main())
