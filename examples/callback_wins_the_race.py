"""A payment service calls back before the task waits for it. The signal is kept, and the wait is over at once."""

import asyncio

import msgspec

import flowfabric as ff

app = ff.App()


class Payment(msgspec.Struct):
    reference: str
    cents: int


async def request_payment(cents: int, callback: str) -> None:
    """Stands for a service that is quick: it has called back before its answer is here."""
    client = await app.client()
    received = await client.receive(callback, msgspec.json.encode(Payment("p-17", cents)))
    print("called back:", received.status, received.outcome)


@app.task
async def buy(ctx: ff.Context, cents: int) -> str:
    paid = await ctx.waitpoint("payment")  # first the place where the answer can arrive ...
    await ctx.step("request payment", request_payment, cents, paid.callback)  # ... then the question
    signal = await paid.wait(payload=Payment, timeout="5 minutes")
    print("goes on", "after a wait" if ctx.is_resumed else "without a wait")
    return f"{signal.payload.cents} cents, reference {signal.payload.reference}"


async def main() -> None:
    async with ff.Worker(app):
        run = await buy.submit(990)
        print(await run.result())


if __name__ == "__main__":
    asyncio.run(main())
