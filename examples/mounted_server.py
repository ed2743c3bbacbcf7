"""The server inside a program of your own: FastAPI mounts it beside other routes."""

import asyncio

import httpx
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

import flowfabric as ff
from flowfabric.server import create_app
from flowfabric.server.keys import ApiKeyCache

app = ff.App()


@app.task
async def greet(name: str) -> str:
    return f"hello {name}"


def make_web(engine: ff.Engine) -> FastAPI:
    web = FastAPI()

    @web.get("/", response_class=PlainTextResponse)
    async def home() -> str:
        return "a shop"

    # With `app=` the arguments of its tasks are checked before anything is stored.
    # `Starlette(routes=[Mount("/flows", flows)])` does the same in a program without FastAPI.
    flows = create_app(engine, app=app, keys=ApiKeyCache(engine))
    web.mount("/flows", flows)
    return web


async def main() -> None:
    async with app, ff.Worker(app):
        engine = (await app.client()).engine
        key = await engine.create_api_key("shop", ["submit", "read"])
        headers = {"Authorization": f"Bearer {key.key.reveal()}"}
        transport = httpx.ASGITransport(make_web(engine))
        async with httpx.AsyncClient(transport=transport, base_url="https://shop.example") as browser:
            print((await browser.get("/")).text)
            task = {"execution_kind": "greet", "arguments": {"name": "Ada"}}
            print("without a key:", (await browser.post("/flows/v1/executions", json=task)).status_code)

            browser.headers.update(headers)
            wrong = {"execution_kind": "greet", "arguments": {"nam": "Ada"}}
            refused = await browser.post("/flows/v1/executions", json=wrong)
            print("wrong argument:", refused.status_code, refused.json()["errors"][0]["pointer"])
            made = await browser.post("/flows/v1/executions", json=task)
            outcome = await browser.get(f"/flows/v1/executions/{made.json()['execution_id']}/outcome?wait=10")
            print(outcome.json()["result"])
        await engine.revoke_api_key(key.key_id)  # the next run makes its own


if __name__ == "__main__":
    asyncio.run(main())
