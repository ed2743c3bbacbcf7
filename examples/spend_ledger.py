"""What each execution cost, entered by a program that reads the bills; a refund takes an execution's part back."""

import asyncio

import flowfabric as ff

app = ff.App()
app.budget("renders", hard={"cost_micros": ff.usd(10)})


@app.task(budgets=["renders"])
async def render(film: str) -> str:
    return f"{film}.mp4"


async def main() -> None:
    async with ff.Worker(app):
        client = await app.client()
        runs = await render.submit_many(["rain", "snow"])
        for run, cost in zip(runs, ("4.20", "1.30"), strict=True):
            await run.result()
            for _ in range(2):  # the bill is read twice; its number makes it count once
                await client.record_spend(
                    "renders", run.id, {"cost_micros": ff.usd(cost)}, idempotency_key=f"bill {run.id}"
                )
        print("used:", (await client.budget("renders")).usage["cost_micros"])
        ledger = await client.engine.list_spend((await client.budget("renders")).budget_id)
        names = {run.execution_id: film for run, film in zip(runs, ("rain", "snow"), strict=True)}
        for entry in sorted(ledger.items, key=lambda one: -one.amount):
            print(names[entry.execution_id], entry.dimension, entry.amount)
        await client.release_budget("renders", runs[0].id)  # a refund
        print("after the refund:", (await client.budget("renders")).usage["cost_micros"])
        await client.release_budget("renders", runs[1].id)  # the next run of this program begins with an empty ledger


if __name__ == "__main__":
    asyncio.run(main())
