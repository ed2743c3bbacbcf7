"""Count words by map and reduce. A task inside the flow finds out how many parts there are, and extends the flow."""

import asyncio
from collections import Counter

import flowfabric as ff

app = ff.App()
TEXT = """it was a dark night and it rained
nobody was at the window
and it rained on"""


@app.task
async def split(ctx: ff.Context, text: str) -> int:
    flow = ctx.flow()  # the flow this task is a node of
    parts = flow.map(count, text.splitlines())
    flow.add(merge, parts)
    await flow.submit()  # once, even if the handler re-runs
    return len(parts)


@app.task
async def count(line: str) -> dict[str, int]:
    return dict(Counter(line.split()))


@app.task
async def merge(counts: list[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total.most_common(3))


async def main() -> None:
    async with ff.Worker(app):
        flow = app.flow("word count")
        flow.add(split, TEXT)
        run = await flow.submit()
        results = await run.result(timeout=30)
        print("parts:", results["split"])
        print("nodes:", len(run.nodes))
        print("most common:", results["merge"])


if __name__ == "__main__":
    asyncio.run(main())
