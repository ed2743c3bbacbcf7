"""An agent: a loop of model and tools in which a crash repeats nothing that was paid for.

Every model call and every tool call is a step. Tokens stream to a browser, each model call is reserved and settled
against the budget of the run, and money leaves only after a person has approved it through a signed link.

As a program it plays the browser and the person itself. It kills the first worker with SIGKILL in the middle of an
answer, shows what the second one did again and what was paid, and forks the run with another prompt. To see the page:
`uvicorn agent:web`, with `flowfabric worker agent:app` beside it. The model here needs no network; replace `model`
with a real one as docs/guides/build-an-agent.md shows.
"""

import asyncio
import contextlib
import json
import os
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import flowfabric as ff
from flowfabric.bridges import sse

app = ff.App(name="agent")
app.budget("agents", hard={"tokens": 10_000_000}, every="1 day")  # of all agents together
MOST_TOKENS = 400  # of one model call: its messages and the longest answer
MOST_TURNS = 10

# The model -------------------------------------------------------------------------------------------------------


class Call(msgspec.Struct):
    id: str
    tool: str
    arguments: dict[str, Any]


class Reply(msgspec.Struct):
    text: str
    tokens: int  # that the provider charges
    calls: list[Call] = []


Message = dict[str, Any]


async def model(messages: list[Message]) -> AsyncIterator[str | Reply]:
    """Stands for a model: yields tokens, then the whole reply, which depends on the messages alone."""
    prompt, last = messages[0]["content"], messages[-1]
    tool, arguments = "", {"order": 17, "cents": 4990}
    if last["role"] == "user":
        text, tool, arguments = "Let me look at the order first.", "look_up", {"order": 17}
    elif "broken" not in last["content"]:
        text = f"Done: {last['content']}."
    elif "voucher" in prompt:
        text, tool = "The lamp arrived broken, so a voucher is due.", "voucher"
    else:
        text, tool = "The lamp arrived broken, so a refund is due.", "refund"
    words = text.split()
    for word in words:
        await asyncio.sleep(0.05)
        yield word + " "
    tokens = 40 * len(messages) + len(words)
    print("paid", tokens, flush=True)  # the account of the provider, which charges whole replies; the demo reads it
    yield Reply(text, tokens, [Call(f"call-{len(messages)}", tool, arguments)] if tool else [])


# The tools -------------------------------------------------------------------------------------------------------


async def look_up(order: int, key: str) -> str:
    print("did look_up", flush=True)
    return f"order {order}: a lamp for 49.90, arrived broken"


async def refund(order: int, cents: int, key: str) -> str:
    print("did refund", flush=True)  # a real one passes the key on, so that the bank pays once
    return f"{cents} cents are refunded"


async def voucher(order: int, cents: int, key: str) -> str:
    print("did voucher", flush=True)
    return f"a voucher of {cents} cents is sent"


TOOLS: dict[str, Callable[..., Awaitable[str]]] = {"look_up": look_up, "refund": refund, "voucher": voucher}
DANGEROUS = {"refund"}

# The agent -------------------------------------------------------------------------------------------------------


@app.task(budgets=["agents"])
async def agent(ctx: ff.Context, question: str, prompt: str = "Refund what arrives broken.") -> str:
    messages: list[Message] = [{"role": "system", "content": prompt}, {"role": "user", "content": question}]
    for turn in range(MOST_TURNS):
        async with ctx.spend(tokens=MOST_TOKENS) as spend:  # held before the call is made
            reply = await ctx.step("model", ask_model, ctx, turn, messages)
            spend.settle(tokens=reply.tokens)
        if not reply.calls:
            return reply.text
        messages.append(as_message(reply))
        for call in reply.calls:
            content = await use_tool(ctx, turn, call)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return "I give up."


async def ask_model(ctx: ff.Context, turn: int, messages: list[Message]) -> Reply:
    """Stream one reply. If a crash interrupts it, it begins again, and the page clears this part of its text."""
    print("began model", turn, flush=True)
    await ctx.emit({"turn": turn}, type="begin")
    async for item in model(messages):
        if isinstance(item, Reply):
            return item
        await ctx.emit(item, type="delta")
    raise ConnectionError("the model stopped in the middle of its reply")


def as_message(reply: Reply) -> Message:
    """The reply as the model wants to see it again."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.tool, "arguments": json.dumps(call.arguments)},
        }
        for call in reply.calls
    ]
    return {"role": "assistant", "content": reply.text, "tool_calls": calls}


class Decision(msgspec.Struct):
    ok: bool


async def use_tool(ctx: ff.Context, turn: int, call: Call) -> str:
    if call.tool not in TOOLS:
        return f"there is no tool {call.tool}"  # the model reads it and tries something else
    if call.tool in DANGEROUS:
        approval = await ctx.waitpoint(f"approve {turn} {call.id}", payload=Decision)
        await ctx.step(f"ask a person {call.id}", send_mail, call, approval.callback)
        answer = await approval.wait(timeout="1 day", default=None, reason="approval")  # holds no worker
        if answer is None or not answer.payload.ok:
            return f"a person did not allow {call.tool}"
    key = f"{ctx.execution_id}/{turn}/{call.id}"  # some models repeat ids in a later turn
    try:
        return await ctx.step(f"{call.tool} {call.id}", TOOLS[call.tool], **call.arguments, key=key)
    except (TypeError, ValueError) as error:
        return f"{call.tool} failed: {error}"  # the model may have made up an argument


async def send_mail(call: Call, link: str) -> None:
    print("mail", link, flush=True)  # stands for a mail to the person; a link does not belong in a log


# The web ---------------------------------------------------------------------------------------------------------

PAGE = """<div id="out"></div><script>
const source = new EventSource('/runs/%s/events');
let part;
source.addEventListener('begin', event => {
  const id = 'turn' + JSON.parse(event.data).turn;
  part = document.getElementById(id) || out.appendChild(Object.assign(document.createElement('p'), {id}));
  part.textContent = '';
});
source.addEventListener('delta', event => part.textContent += event.data);
source.addEventListener('end', () => source.close());
</script>"""


async def page(_: Request) -> Response:
    run = await agent.options(budget=ff.Budget(tokens=5_000)).submit("My lamp of order 17 is broken!")
    return HTMLResponse(PAGE % run.id)


async def events(request: Request) -> Response:
    run = agent.run(request.path_params["id"])
    try:
        items = await run.stream(after=request.headers.get("last-event-id"), keep_alive=15).open()
    except (ff.NotFound, ff.InvalidInput) as error:
        return Response(str(error), status_code=404 if isinstance(error, ff.NotFound) else 400)
    return StreamingResponse(sse.events(items), media_type=sse.MEDIA_TYPE, headers=sse.HEADERS)


async def decide(request: Request) -> Response:
    received = await (await app.client()).receive(request.path_params["callback"], await request.body())
    return JSONResponse(received.body, received.status)


web = Starlette(
    routes=[
        Route("/", page),
        Route("/runs/{id}/events", events),
        Route("/approvals/{callback}", decide, methods=["POST"]),
    ]
)

# The demo --------------------------------------------------------------------------------------------------------


class Demo:
    """Starts workers and reads what they print: who began which model call, what was paid, which tools ran."""

    def __init__(self) -> None:
        self.lane = f"agent-{uuid.uuid4().hex[:8]}"
        self.began: dict[str, list[str]] = {}  # model call: workers
        self.paid: list[int] = []
        self.did: list[str] = []
        self.mails: asyncio.Queue[str] = asyncio.Queue()
        self.text: dict[int, str] = {}  # what the page shows, by turn
        self.in_the_middle = asyncio.Event()

    async def run(self) -> None:
        await app.prepare()
        run = await agent.options(lane=self.lane, budget=ff.Budget(tokens=5_000)).submit(
            "My lamp of order 17 is broken!"
        )
        browser = asyncio.create_task(self.browse(run.id))
        async with self.worker("worker 1") as victim:
            await self.in_the_middle.wait()
            victim.kill()
            await victim.wait()
            print(f"worker 1 is killed; the page shows: {self.text[1]}...")
        async with self.worker("worker 2"):
            await self.approve(await self.mails.get())
            result = await run.result()
            await browser
        print("the page shows:", " / ".join(text.strip() for text in self.text.values()))
        assert self.text[max(self.text)].strip() == result
        await self.show_ledger(run)
        await self.fork(run)

    async def show_ledger(self, run: ff.Run[str]) -> None:
        for call, workers in self.began.items():
            print(f"{call} was begun by {' and '.join(workers)}")
        print("tools that ran:", ", ".join(self.did))
        print(f"the provider charged {' + '.join(map(str, self.paid))} = {sum(self.paid)} tokens")
        budget, held = await run.budget(), (await run.usage()).held
        assert budget is not None
        print(
            f"the budget of the run counts {budget.usage['tokens']} of {budget.hard_limits['tokens']:,}, held: {held}"
        )
        assert budget.usage["tokens"] == sum(self.paid)

    async def fork(self, run: ff.Run[str]) -> None:
        """Keep the first model call and its tool, and do the rest with another prompt."""
        self.paid, self.did = [], []
        fork = await run.fork(before=("model", 1), payload={"prompt": "Send a voucher for what arrives broken."})
        async with self.worker("worker 3"):
            print("the fork:", await fork.result())
        print("tools that ran:", ", ".join(self.did))
        used = (await fork.usage()).total["tokens"]
        print(f"the provider charged {' + '.join(map(str, self.paid))} = {used} tokens")
        assert used == sum(self.paid)

    async def approve(self, link: str) -> None:
        transport = httpx.ASGITransport(web)
        async with httpx.AsyncClient(transport=transport, base_url="https://shop.example") as person:
            forged = await person.post(f"/approvals/{link[:-4]}AAAA", json={"ok": True})
            real = await person.post(f"/approvals/{link}", json={"ok": True})
        print(f"a forged link: {forged.status_code}, the real one: {real.status_code} {real.json()['outcome']}")

    async def browse(self, run_id: str) -> None:
        """Do what the script of the page does."""
        turn = 0

        async def send(message: Any) -> None:
            nonlocal turn
            fields = dict(
                line.split(": ", 1) for line in message.get("body", b"").decode().splitlines() if ": " in line
            )
            match fields.get("event"):
                case "begin":
                    turn = json.loads(fields["data"])["turn"]
                    self.text[turn] = ""
                case "delta":
                    self.text[turn] += fields["data"]
                    if turn == 1 and self.text[turn].count(" ") == 3:
                        self.in_the_middle.set()

        async def receive() -> Any:
            await asyncio.Event().wait()  # this browser stays

        request = {
            "type": "http",
            "method": "GET",
            "path": f"/runs/{run_id}/events",
            "headers": [],
            "query_string": b"",
        }
        await web(request, receive, send)

    @contextlib.asynccontextmanager
    async def worker(self, name: str) -> AsyncIterator[Process]:
        """Start a process as `flowfabric worker agent:app` does."""
        command = ("-m", "flowfabric.cli", "worker", f"{Path(__file__).stem}:app")
        options = ("--lane", self.lane, "--lease", "2s", "--log-level", "error")
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        process = await asyncio.create_subprocess_exec(sys.executable, *command, *options, stdout=PIPE, env=env)
        reading = asyncio.create_task(self.read(name, process))
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
            await reading

    async def read(self, name: str, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            match line.decode().split():
                case ["began", *call]:
                    self.began.setdefault(" ".join(call), []).append(name)
                case ["paid", tokens]:
                    self.paid.append(int(tokens))
                case ["did", tool]:
                    self.did.append(tool)
                case ["mail", link]:
                    self.mails.put_nowait(link)


async def main() -> None:
    async with app, asyncio.timeout(120):
        await Demo().run()


if __name__ == "__main__":
    asyncio.run(main())
