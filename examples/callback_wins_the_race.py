"""A payment service calls back before the task waits for it. The signal is kept, and the wait returns at once."""

import asyncio

import msgspec

import flowfabric as ff

app = ff.App()


class Payment(msgspec.Struct):
    reference: str
    cents: int


async def request_payment(cents: int, callback: str) -> None:
    """A quick service: it calls back before its own response has arrived."""
    client = await app.client()
    received = await client.receive(callback, msgspec.json.encode(Payment("p-17", cents)))
    print("called back:", received.status, received.outcome)


@app.task
async def buy(ctx: ff.Context, cents: int) -> str:
    paid = await ctx.waitpoint("payment")  # first make the waitpoint that receives the answer ...
    await ctx.step("request payment", request_payment, cents, paid.callback)  # ... then ask
    signal = await paid.wait(payload=Payment, timeout="5 minutes")
    print("continues", "after a wait" if ctx.is_resumed else "without a wait")
    return f"{signal.payload.cents} cents, reference {signal.payload.reference}"


async def main() -> None:
    async with ff.Worker(app):
        run = await buy.submit(990)
        print(await run.result())


if __name__ == "__main__":
    asyncio.run(main())
