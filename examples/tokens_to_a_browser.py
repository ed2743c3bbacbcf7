"""Tokens of a model appear in a browser, and a page that loses its connection continues where it was.

As a program it plays the browser itself. To see the page: `uvicorn tokens_to_a_browser:web`, with a worker beside it.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

import flowfabric as ff
from flowfabric.bridges import sse

app = ff.App()
PAGE = """<pre id="out"></pre><script>
const source = new EventSource('/events/%s');
source.addEventListener('begin', () => out.textContent = '');  // with several steps: only the text of this one
source.addEventListener('delta', event => out.textContent += event.data);
source.addEventListener('end', () => source.close());
</script>"""


async def model(question: str) -> AsyncIterator[str]:
    """Stands for a model: a word now and then."""
    for word in f"{question} Once upon a time there was a queue that never lost a job.".split():
        await asyncio.sleep(0.02)
        yield word + " "


@app.task
async def answer(ctx: ff.Context, question: str) -> str:
    async def ask_model() -> str:
        await ctx.emit({"step": "ask model"}, type="begin")  # if this step runs again, another answer begins
        text = ""
        async for token in model(question):
            await ctx.emit(token, type="delta")
            text += token
        return text

    return await ctx.step("ask model", ask_model)


async def page(_: Request) -> Response:
    run = await answer.submit("Why?")
    return HTMLResponse(PAGE % run.id)


async def events(request: Request) -> Response:
    run = answer.run(request.path_params["id"])
    try:
        items = await run.stream(after=request.headers.get("last-event-id"), keep_alive=15).open()
    except (ff.NotFound, ff.InvalidInput) as error:
        return Response(str(error), status_code=404 if isinstance(error, ff.NotFound) else 400)
    return StreamingResponse(sse.events(items), media_type=sse.MEDIA_TYPE, headers=sse.HEADERS)


web = Starlette(routes=[Route("/", page), Route("/events/{id}", events)])


async def browse(execution_id: str, last_event_id: str, most: int) -> list[str]:
    """What a browser receives until the end, or until it leaves after `most` events."""
    received: list[str] = []
    left = asyncio.Event()

    async def send(message: Any) -> None:
        if body := message.get("body", b"").decode():
            received.append(body)
        if len(received) == most:
            left.set()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    headers = [(b"last-event-id", last_event_id.encode())]
    path = f"/events/{execution_id}"
    await web({"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b""}, receive, send)
    return received[:most]


async def main() -> None:
    async with ff.Worker(app):
        run = await answer.submit("Why?")
        first = await browse(run.id, "", most=6)
        last_id = first[-1].partition("id: ")[2].partition("\n")[0]
        rest = await browse(run.id, last_id, most=1000)
        tokens = [part.partition("data: ")[2].partition("\n")[0] for part in first + rest if "event: delta" in part]
        assert "".join(tokens) == await run.result()
        print(f"{len(first) - 1} tokens, a lost connection, {len(rest) - 1} more")
        print("".join(tokens).strip())


if __name__ == "__main__":
    asyncio.run(main())
