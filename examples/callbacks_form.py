"""A link in a mail leads to a form with fields: what it posts becomes the typed payload that the task waits for."""

import asyncio
import json
from dataclasses import dataclass
from urllib.parse import parse_qsl

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import flowfabric as ff

app = ff.App()
mailbox: asyncio.Queue[str] = asyncio.Queue()


@dataclass
class Decision:
    granted: bool
    comment: str = ""


@app.task
async def refund(ctx: ff.Context, order: int) -> str:
    manager = await ctx.waitpoint("manager", payload=Decision)
    await ctx.step("mail the link", mailbox.put, f"/decide/{manager.callback}")
    decision = (await manager.wait(payload=Decision, timeout="3 days")).payload
    return f"order {order}: {'refunded' if decision.granted else 'not refunded'} ({decision.comment})"


FORM = """<form method="post">
<input name="comment" maxlength="200">
<button name="granted" value="true">Refund</button> <button name="granted" value="false">Do not</button>
</form>"""


async def show(request: Request) -> Response:
    client = await app.client()
    if await client.look(request.path_params["callback"]) is None:
        return HTMLResponse("This link is invalid or has expired.", 404)
    return HTMLResponse(FORM)


async def decide(request: Request) -> Response:
    fields = dict(parse_qsl((await request.body()).decode()))
    decision = {"granted": fields.get("granted") == "true", "comment": fields.get("comment", "")}
    client = await app.client()
    received = await client.receive(request.path_params["callback"], json.dumps(decision).encode(), name="decided")
    if received.status == 422:  # the payload does not fit: the wait stays open, and the form can be sent again
        return HTMLResponse(f"{received.field}: {received.problem}", 422)
    words = "Thank you." if received.status < 300 else "This link is invalid or has expired."
    return HTMLResponse(words, received.status)


web = Starlette(routes=[Route("/decide/{callback}", show), Route("/decide/{callback}", decide, methods=["POST"])])


async def main() -> None:
    async with (
        ff.Worker(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(web), base_url="https://shop.example") as browser,
    ):
        run = await refund.submit(42)
        link = await mailbox.get()
        print("GET:", (await browser.get(link)).status_code)
        posted = await browser.post(link, data={"granted": "true", "comment": "came broken"})
        print("POST:", posted.text)
        print(await run.result())


if __name__ == "__main__":
    asyncio.run(main())
