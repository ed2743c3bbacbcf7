"""A deployment as a graph, submitted over HTTP: build, three tests, a gate that two people open by links, deploy.

Each of the two gets a link of her own. Opening it shows what is asked and decides nothing; the button decides.
"""

import asyncio
import os

import httpx

import flowfabric as ff
from flowfabric.server import create_app
from flowfabric.server.keys import ApiKeyCache

os.environ["FLOWFABRIC_PUBLIC_URL"] = "https://flows.example"  # where people reach the server
app = ff.App()
mailbox: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

GRAPH = {
    "flow_kind": "deploy",
    "nodes": {
        "build": {"execution_kind": "build", "arguments": {"version": "v7"}},
        **{
            suite: {"execution_kind": "test", "arguments": {"suite": suite}, "arguments_from": {"image": "build"}}
            for suite in ("unit", "browser", "load")
        },
        "gate": {"execution_kind": "gate", "arguments_from": {"reports": ["unit", "browser", "load"]}},
        "deploy": {"execution_kind": "deploy", "arguments_from": {"image": "build", "approved_by": "gate"}},
    },
}


@app.task
async def build(version: str) -> str:
    return f"image of {version}"


@app.task
async def test(suite: str, image: str) -> str:
    return f"{suite} tests of the {image} pass"


@app.task
async def gate(ctx: ff.Context, reports: list[str]) -> list[str]:
    asked = [await ctx.waitpoint(name) for name in ("alice", "bob")]
    for point in asked:
        await ctx.step(f"mail {point.key}", mailbox.put, (point.key, point.link))
    answers = await asyncio.gather(*(point.wait(timeout="1 day", reason="approval") for point in asked))
    if any(answer.name != "approved" for answer in answers):
        raise ff.Reject("not everybody approves")
    return [answer.key for answer in answers]


@app.task
async def deploy(image: str, approved_by: list[str]) -> str:
    return f"{image} is live, approved by {' and '.join(approved_by)}"


async def click(browser: httpx.AsyncClient, link: str, answer: str) -> str:
    """Open a link as a person does, and press a button."""
    shown = await browser.get(link)
    assert f'value="{answer}"' in shown.text
    done = await browser.post(link, data={"name": answer})
    return "Thank you" if "Thank you" in done.text else str(done.status_code)


async def main() -> None:
    async with app, ff.Worker(app):
        engine = (await app.client()).engine
        transport = httpx.ASGITransport(create_app(engine, app=app, keys=ApiKeyCache(engine)))
        key = await engine.create_api_key("ci", ["submit", "read"])
        async with (
            httpx.AsyncClient(transport=transport, base_url="https://flows.example") as ci,
            httpx.AsyncClient(transport=transport, headers={"Accept": "text/html"}) as browser,
        ):
            ci.headers["Authorization"] = f"Bearer {key.key.reveal()}"
            flow = (await ci.post("/v1/flows", json=GRAPH)).json()
            path = f"/v1/flows/{flow['flow_id']}"
            print(flow["status"], *flow["nodes"])

            for _ in range(2):
                person, link = await mailbox.get()
                print(f"{person}:", await click(browser, link, "approved"))

            while not (results := (await ci.get(f"{path}/results")).json())["is_ended"]:
                await asyncio.sleep(0.05)
            print(results["results"]["deploy"])
            print("the same link again:", (await browser.post(link, data={"name": "rejected"})).status_code)
            print((await ci.get(f"{path}/graph?format=mermaid")).text.splitlines()[0])
        await engine.revoke_api_key(key.key_id)  # the next run makes its own


if __name__ == "__main__":
    asyncio.run(main())
