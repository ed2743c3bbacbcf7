"""Kill a worker in the middle of a task and watch another one continue it. `make demo` runs this.

A worker process fulfils an order in steps. The demo kills it with SIGKILL during the third step, so it cannot clean up.
When its lease has expired, a second worker process takes over: the handler runs again from the top, finished steps
return their stored result, and the interrupted step runs again. Before the parcel leaves, the order waits for a person,
here the demo itself, without occupying a worker. Meanwhile a reader follows what the task emits, from the first worker
to the second. In the end the parcel costs more than the budget of the order allows: the order pauses, and continues
after the budget is raised.

The order comes in over HTTP, through `flowfabric server`, as it would from a program in any language; the person
approves it with a link, as it would be in a mail.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
import urllib.request
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import flowfabric as ff

STEP = 0.5  # seconds per step
LEASE = "2s"  # keeps the demo short; the default is 30 seconds
KILLED_IN = "print label"
PATIENCE = 60  # seconds until the demo gives up
APP = f"{Path(__file__).stem}:app"

# The tasks -------------------------------------------------------------------------------------------------------

app = ff.App(name="demo")


async def reserve_stock(order: int) -> str:
    await work("reserve stock")
    return "2 chairs"


async def charge_card(order: int) -> str:
    await work("charge card")
    return f"payment {order * 1000 + 7}"


async def print_label(order: int) -> str:
    await work("print label")
    return f"label {order}-A"


async def notify(order: int, parcel: str) -> None:
    await work("notify")


async def mail(callback: str) -> None:
    print(f"mail {callback}", flush=True)  # the demo reads this instead of a mail


async def work(step: str) -> None:
    print(step, flush=True)  # the demo reads this to show which process started which step
    await asyncio.sleep(STEP)


@app.task
async def pack(items: str, label: str) -> str:
    await work("pack")
    return f"{items}, {label}"


@app.task(budget=ff.Budget(cents=1_000))
async def fulfil(ctx: ff.Context, order: int) -> str:
    items = await ctx.step("reserve stock", reserve_stock, order)
    await ctx.emit(f"{items} are reserved")
    payment = await ctx.step("charge card", charge_card, order)
    await ctx.emit(f"{payment} is made")
    label = await ctx.step("print label", print_label, order)
    packing = await pack.options(lane=ctx.lane_id).submit(items, label)  # another execution, submitted once
    parcel = await packing.result()  # waits without holding a worker
    await ctx.sleep(1)  # so does this
    await ctx.emit("the parcel is packed")  # once, although the handler runs again after the waits
    ada = await ctx.waitpoint("approval")
    await ctx.step("mail the link", mail, ada.callback)
    approval = await ada.wait(timeout="3 days", reason="approval")  # and this: a person decides
    await ctx.usage(cents=1_200)  # more than the order may cost: it pauses here until its budget is raised
    await ctx.step("notify", notify, order, parcel)
    return f"{parcel}, {payment}, {approval.name} by {approval.source_type}"


# The demo --------------------------------------------------------------------------------------------------------


class Demo:
    """Starts workers, reads their output, and prints it with the seconds since the order was submitted."""

    def __init__(self, console: Console, lane: str) -> None:
        self.console = console
        self.lane = lane
        self.begun: list[tuple[str, str]] = []  # step, worker
        self.emitted: list[str] = []
        self.reached = asyncio.Event()
        self.mailbox: asyncio.Queue[str] = asyncio.Queue()
        self._since = time.monotonic()

    def say(self, text: str) -> None:
        self.console.print(f"{time.monotonic() - self._since:5.1f} s  {text}")

    async def run(self) -> bool:
        self.console.print("Starting the database, the first time in a new data directory ...")
        async with app, self.server() as server, asyncio.timeout(PATIENCE):
            self._since = time.monotonic()
            order = {"execution_kind": "fulfil", "arguments": {"order": 42}, "lane_id": self.lane}
            made = await post(f"{server}/v1/executions", order | {"execution_deadline_seconds": 600})
            run = fulfil.run(made["execution_id"])
            self.say(f"order 42 is submitted over HTTP, to {server}")
            following = asyncio.create_task(self.follow(run))
            async with self.worker("worker 1") as victim:
                await self.reached.wait()
                await asyncio.sleep(STEP / 2)
                victim.kill()
                await victim.wait()
                self.say(f"[bold]worker 1 is killed with SIGKILL[/] in the middle of {KILLED_IN!r}")
            async with self.worker("worker 2"):
                await self.approve(run, server)
                await self.raise_budget(run)
                result = await run.result()
                await following
                self.say(f"the result: {result}")
            return await self.report(run)

    async def follow(self, run: ff.Run[str]) -> None:
        """Print what the task emits, as `flowfabric tail` does."""
        async for item in run.stream():
            match item:
                case ff.Frame():
                    self.emitted.append(item.text)
                    self.say(f"[cyan]a reader gets {item.text!r}[/]")
                case ff.NewAttempt():
                    self.emitted.clear()
                    self.say("[cyan]a reader learns that another attempt begins[/]")

    async def approve(self, run: ff.Run[str], server: str) -> None:
        """Approve the order once it waits, as a person does who presses the button of a link's page."""
        callback = await self.mailbox.get()
        while await run.state() is not ff.State.SUSPENDED:
            await asyncio.sleep(0.05)
        self.say("the order waits for an approval, and no worker holds it")
        await post(f"{server}/w/{callback}?name=approved")
        self.say("Ada approves it with the link that she got")

    async def raise_budget(self, run: ff.Run[str]) -> None:
        """Raise the budget once the order waits for it, as a person does with `flowfabric budgets raise`."""
        while await run.state() is not ff.State.RATE_LIMITED:
            await asyncio.sleep(0.05)
        self.say("[bold]the order stops at its budget[/]: 1,200 cents are more than 1,000")
        await run.raise_budget(cents=+500)
        self.say("the budget is raised to 1,500 cents, and the order continues")

    @contextlib.asynccontextmanager
    async def server(self) -> AsyncIterator[str]:
        """Start a process as `flowfabric server --app crash_and_continue:app` does; yield its address."""
        options = ("--listen", "127.0.0.1:0", "--auth", "none", "--no-access-log")
        async with flowfabric("server", "--app", APP, *options, stderr=PIPE) as process:
            assert process.stderr is not None
            async for line in process.stderr:
                if found := re.search(r"serving (http://[^,\s]+)", line.decode()):
                    yield found[1]
                    return

    @contextlib.asynccontextmanager
    async def worker(self, name: str) -> AsyncIterator[Process]:
        """Start a process as `flowfabric worker crash_and_continue:app` does."""
        options = ("--lane", self.lane, "--lease", LEASE, "--log-level", "warning")
        async with flowfabric("worker", APP, *options, stdout=PIPE) as process:
            self.say(f"{name} is started as process {process.pid}")
            reading = asyncio.create_task(self.read(name, process))
            yield process
        await reading

    async def read(self, name: str, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            step = line.decode().strip()
            if step.startswith("mail "):
                self.mailbox.put_nowait(step.removeprefix("mail "))
                continue
            self.begun.append((step, name))
            self.say(f"{name} begins {step!r}")
            if step == KILLED_IN:
                self.reached.set()

    async def report(self, run: ff.Run[str]) -> bool:
        """Print the stored steps beside the output of the workers; return True if both agree."""
        created_at = (await run.get()).created_at
        processes = {a.attempt_index: a.worker_instance_id.split("/")[1] for a in await run.attempts()}
        table = Table(title="What the database remembers of the order", title_justify="left")
        for heading in ("step", "begun by", "done", "in attempt", "by process"):
            table.add_column(heading)
        for step in await run.steps():
            name = "result of pack" if step.name.startswith("result ") else step.name
            who = ", ".join(worker for begun, worker in self.begun if begun == name)
            done = f"{(step.recorded_at - created_at).total_seconds():.1f} s"
            table.add_row(name, who, done, str(step.attempt_index + 1), processes[step.attempt_index])
        self.console.print(table)
        violations = await (await app.client()).engine.audit()
        self.console.print("\n".join(map(str, violations)) or "The audit of the database finds nothing wrong.")
        self.console.print(f"See it all: .venv/bin/flowfabric show {run.id}")
        once = [step for step, _ in self.begun if step != KILLED_IN]
        again = [worker for step, worker in self.begun if step == KILLED_IN]
        heard = self.emitted == ["2 chairs are reserved", "payment 42007 is made", "the parcel is packed"]
        return heard and len(set(once)) == len(once) == 4 and again == ["worker 1", "worker 2"] and not violations


@contextlib.asynccontextmanager
async def flowfabric(*command: str, **pipes: int) -> AsyncIterator[Process]:
    """A command as a process of its own, which ends with the block."""
    here = str(Path(__file__).parent)  # where the worker and the server find this module
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "flowfabric.cli", *command, env=env, **pipes)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def post(url: str, body: Any = None) -> Any:
    """A request with nothing but the standard library."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def send() -> Any:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    return await asyncio.to_thread(send)


if __name__ == "__main__":
    demo = Demo(Console(highlight=False), f"demo-{uuid.uuid4().hex[:8]}")
    try:
        sys.exit(0 if asyncio.run(demo.run()) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except TimeoutError:
        sys.exit(f"the order was not fulfilled within {PATIENCE} s")
