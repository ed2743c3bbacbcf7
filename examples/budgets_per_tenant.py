"""Each tenant has a budget of its own, beside one for all: one that spends too much waits, and the others continue."""

import asyncio

import flowfabric as ff

app = ff.App()
app.budget("everybody", hard={"cost_micros": ff.usd(5)}, every="1 day")


@app.task
async def answer(ctx: ff.Context, question: str) -> str:
    async with ctx.spend(cost_micros=ff.usd("0.50")) as spend:  # held in both budgets, or in none
        reply = f"{question}? Yes."
        spend.settle(cost_micros=ff.usd("0.40"))
    return reply


async def ask(tenant: str, question: str) -> ff.Run[str]:
    return await answer.options(budgets=["everybody", f"tenant {tenant}"], tags={"tenant": tenant}).submit(question)


async def main() -> None:
    async with ff.Worker(app):
        client = await app.client()
        for tenant, limit in (("acme", 1), ("initech", 3)):  # when a tenant signs up
            await client.create_budget(f"tenant {tenant}", hard={"cost_micros": ff.usd(limit)}, every="1 day")
        acme = [await ask("acme", f"question {n}") for n in range(3)]
        initech = [await ask("initech", f"question {n}") for n in range(3)]
        for run in [*acme[:2], *initech]:
            await run.result()
        while await acme[2].state() is not ff.State.RATE_LIMITED:
            await asyncio.sleep(0.01)
        print("acme's third question waits for:", (await acme[2].get()).blocking_reason)
        names = ["everybody", "tenant acme", "tenant initech"]
        for name in names:
            budget = await client.budget(name)
            used = budget.usage["cost_micros"] / 1_000_000
            print(f"{name}: {used:.2f} of {budget.hard_limits['cost_micros'] / 1_000_000:.2f}")
        await client.raise_budget("tenant acme", cost_micros=ff.usd(1))
        print(await acme[2].result())
        for name in names:  # the next day, so that this program can run again
            await client.reset_budget(name)
        await client.raise_budget("tenant acme", cost_micros=-ff.usd(1))


if __name__ == "__main__":
    asyncio.run(main())
