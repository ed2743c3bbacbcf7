"""Fork an execution: keep the steps before one, change an argument, and run the rest again."""

import asyncio

import flowfabric as ff

app = ff.App()


def search(topic: str) -> list[str]:
    print(f"searching for {topic} (this is expensive)")
    return [f"a fact about {topic}", f"another fact about {topic}"]


@app.task
async def report(ctx: ff.Context, topic: str, tone: str = "sober") -> str:
    facts = await ctx.step("research", lambda: search(topic))
    return await ctx.step("draft", lambda: f"{tone}: {' and '.join(facts)}")


async def main() -> None:
    async with app, ff.Worker(app):
        run = await report.submit("fjords")
        print(await run.result())
        fork = await run.fork(before="draft", payload={"tone": "cheerful"})
        print(await fork.result())
        print("forked from the first:", (await fork.get()).forked_from == run.execution_id)
        print("the first is unchanged:", await run.result())


asyncio.run(main())
