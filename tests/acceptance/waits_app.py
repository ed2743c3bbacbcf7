"""An app for the fault tests of waits, and a worker process of it that can kill itself at a given call.

Usage: python waits_app.py OPTIONS, with the options of the worker as JSON. `DSN` is the database and `LEDGER` a file to
which handlers write their actions. `DIE` is a call of the engine and whether to die `before` it is sent or `after` its
response, as "suspend_on before": the process kills itself there, once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from typing import Any

import flowfabric as ff

app = ff.App(os.environ.get("DSN"), name="waits")


def note(what: str, execution_id: object, **more: object) -> None:
    line = json.dumps({"what": what, "execution": str(execution_id), "pid": os.getpid(), **more}) + "\n"
    fd = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, line.encode())
    os.close(fd)


@app.task
async def approval(ctx: ff.Context) -> list[Any]:
    """A step, a waitpoint that is handed out, a wait alone, a step."""
    await ctx.step("before", note, "before", ctx.execution_id)
    place = await ctx.waitpoint("approval")
    note("link", ctx.execution_id, link=place.callback)
    found = await place.wait()
    await ctx.step("after", note, "after", ctx.execution_id)
    return [found.payload]


@app.task
def plain(ctx: ff.SyncContext) -> list[Any]:
    """The same in a thread."""
    ctx.step("before", note, "before", ctx.execution_id)
    place = ctx.waitpoint("approval")
    note("link", ctx.execution_id, link=place.callback)
    found = place.wait()
    ctx.step("after", note, "after", ctx.execution_id)
    return [found.payload]


@app.task
async def company(ctx: ff.Context) -> list[Any]:
    """Waits beside others: the execution is parked for a time, then suspended on several waits."""
    await ctx.step("before", note, "before", ctx.execution_id)
    place = await ctx.waitpoint("approval")
    note("link", ctx.execution_id, link=place.callback)
    found, other, late, _ = await asyncio.gather(
        place.wait(), ctx.wait_for("other"), ctx.wait_for("late", timeout=0.05, default=None), ctx.sleep(0.05)
    )
    await ctx.step("after", note, "after", ctx.execution_id)
    return [found.payload, other.payload, late]


def die_at(call: str, when: str) -> None:
    """Kill this process at a call of the engine."""
    real = getattr(ff.Engine, call)

    async def deadly(self: ff.Engine, *args: Any, **options: Any) -> Any:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await real(self, *args, **options)
        os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(ff.Engine, call, deadly)


def main() -> None:
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if "DIE" in os.environ:
        die_at(*os.environ["DIE"].split())
    options: dict[str, Any] = json.loads(sys.argv[1])
    ff.Worker(app, **options).main()


if __name__ == "__main__":
    main()
