"""The server inside a program of your own: Starlette mounts it beside other routes."""

import asyncio

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

import flowfabric as ff
from flowfabric.server import create_app
from flowfabric.server.keys import ApiKeyCache

app = ff.App()


@app.task
async def greet(name: str) -> str:
    return f"hello {name}"


async def home(_: Request) -> PlainTextResponse:
    return PlainTextResponse("a shop")


def make_web(engine: ff.Engine) -> Starlette:
    # With `app=` the arguments of its tasks are checked before anything is stored.
    flows = create_app(engine, app=app, keys=ApiKeyCache(engine))
    return Starlette(routes=[Route("/", home), Mount("/flows", flows)])


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
