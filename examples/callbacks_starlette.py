"""Links in a mail, answered by Starlette: GET shows what is asked, POST decides. FastAPI takes the same functions."""

import asyncio

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import flowfabric as ff

app = ff.App()
mailbox: asyncio.Queue[str] = asyncio.Queue()


@app.task
async def refund(ctx: ff.Context, order: int) -> str:
    manager = await ctx.waitpoint("manager")
    await ctx.step("mail the link", mailbox.put, f"/decide/{manager.callback}")
    answer = await manager.wait(timeout="3 days", reason="approval")
    return f"order {order} is {'refunded' if answer.name == 'approved' else 'not refunded'}"


async def show(request: Request) -> Response:
    client = await app.client()
    asked = await client.look(request.path_params["callback"])
    if asked is None:
        return HTMLResponse("This link is invalid or has expired.", 404)
    buttons = "".join(f'<button formaction="?answer={name}">{name}</button>' for name in ("approved", "rejected"))
    return HTMLResponse(f'<form method="post">{asked.waitpoint_key}: {buttons}</form>')


async def decide(request: Request) -> Response:
    client = await app.client()
    answer = request.query_params.get("answer", "")
    received = await client.receive(request.path_params["callback"], await request.body(), name=answer)
    return JSONResponse(received.body, received.status)


web = Starlette(routes=[Route("/decide/{callback}", show), Route("/decide/{callback}", decide, methods=["POST"])])


async def main() -> None:
    async with (
        ff.Worker(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(web), base_url="https://shop.example") as browser,
    ):
        run = await refund.submit(42)
        link = await mailbox.get()
        print("GET:", (await browser.get(link)).status_code)  # a mail program that opens links decides nothing
        print("POST:", (await browser.post(link, params={"answer": "approved"})).json()["outcome"])
        print(await run.result())
        print("GET afterwards:", (await browser.get(link)).status_code)


if __name__ == "__main__":
    asyncio.run(main())
