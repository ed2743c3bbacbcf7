"""A payment service calls a Flask application back."""

import asyncio
from typing import Any

from flask import Flask, request

import flowfabric as ff

app = ff.App()
handed_out: asyncio.Queue[str] = asyncio.Queue()


@app.task
async def buy(ctx: ff.Context, cents: int) -> str:
    paid = await ctx.waitpoint("payment")
    await ctx.step("request payment", handed_out.put, f"/callbacks/{paid.callback}")
    signal = await paid.wait(payload=dict[str, str], timeout="1 hour")
    return f"{cents} cents, reference {signal.payload['reference']}"


def make_web(client: ff.Client) -> Flask:
    web = Flask(__name__)

    @web.post("/callbacks/<callback>")
    def receive(callback: str) -> tuple[dict[str, Any], int]:
        key = request.headers.get("Idempotency-Key")
        received = client.receive(callback, request.get_data(), idempotency_key=key)
        return received.body, received.status

    return web


def call_back(link: str) -> None:
    with ff.Client(app) as client:
        service = make_web(client).test_client()
        for _ in range(2):  # services repeat their calls
            answer = service.post(link, json={"reference": "p-17"}, headers={"Idempotency-Key": "p-17"})
            print("POST:", answer.status_code, answer.get_json()["outcome"])


async def main() -> None:
    async with ff.Worker(app):
        run = await buy.submit(990)
        while await run.state() is not ff.State.SUSPENDED:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(call_back, await handed_out.get())
        print(await run.result())


if __name__ == "__main__":
    asyncio.run(main())
