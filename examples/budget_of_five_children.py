"""Five children share the token budget of their parent. Those that would use more pause; a raise lets them finish."""

import asyncio

import flowfabric as ff

app = ff.App()


async def ask_model(question: str) -> int:
    """Return the tokens that the answer took."""
    return 900


@app.task  # on_budget="pause" is the default
async def study(ctx: ff.Context, question: str) -> str:
    async with ctx.spend(tokens=1_000) as spend:  # held before the call is made
        spend.settle(tokens=await ctx.step("ask", ask_model, question))
    return f"{question} is studied"


@app.task
async def research(ctx: ff.Context) -> list[str]:
    children = [await study.submit(f"source {n}") for n in range(1, 6)]  # they have the budget of this run
    return [await child.result() for child in children]


async def main() -> None:
    async with ff.Worker(app):
        run = await research.options(budget=ff.Budget(tokens=3_000)).submit()
        states: list[str] = []
        while sorted(states) != ["completed"] * 3 + ["rate_limited"] * 2:  # two wait without a worker
            await asyncio.sleep(0.01)
            states = [child.state for child in await run.children()]
        print("used:", (await run.usage()).total["tokens"], "of 3000")
        await run.raise_budget(tokens=+2_000)
        print(", ".join(await run.result()))
        usage = await run.usage()
        print("tokens:", usage.total["tokens"], "by", len(usage.by_execution), "children")


if __name__ == "__main__":
    asyncio.run(main())
