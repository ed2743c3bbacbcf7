"""A task submits others and waits for them. It occupies no worker meanwhile: one slot is enough for all of them."""

import asyncio

import flowfabric as ff

app = ff.App()


@app.task
async def count(ctx: ff.Context, words: str) -> int:
    ctx.log.info("counting")
    return len(words.split())


@app.task
async def total(chapters: list[str]) -> int:
    runs = [await count.submit(chapter) for chapter in chapters]  # once each, even if the handler re-runs
    return sum(await asyncio.gather(*(run.result() for run in runs)))


async def main() -> None:
    async with ff.Worker(app, concurrency=1):
        run = await total.submit(["it was a dark night", "and it rained", "the end"])
        print("words:", await run.result())

        steps = await run.steps()
        print("children:", sum(step.kind == "submit" for step in steps))


if __name__ == "__main__":
    asyncio.run(main())
