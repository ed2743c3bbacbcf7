"""An app whose task kills its own process with SIGKILL while it spends. Usage: python spend_app.py; `DSN` is set."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import flowfabric as ff
from flowfabric.middleware import Middleware


class DiesOnceItClaimed(Middleware):
    """Kills the process when its claim is committed and the handler has not started."""

    async def claim(self, lanes: Sequence[str], proceed: Callable[[], Awaitable[Any]]) -> Any:
        found = await proceed()
        for one in found or ():
            if b'"claimed"' in one.input_payload and one.attempt_type == "initial":
                os.kill(os.getpid(), signal.SIGKILL)
        return found


app = ff.App(os.environ.get("DSN"), name="spending", middleware=[DiesOnceItClaimed()])
app.budget("team", hard={"tokens": 1_000})
app.quota("one", concurrent=1)


def die(ctx: ff.Context, here: str, wanted: str) -> None:
    if here == wanted and ctx.reclaim_count == 0:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(budgets=["team"], quotas=["one"], max_reclaims=3)
async def agent(ctx: ff.Context, dies: str, on_lost: str) -> int:
    die(ctx, "before", dies)
    async with ctx.spend(tokens=500, on_lost="charge" if on_lost == "charge" else "release") as spend:
        die(ctx, "held", dies)
        tokens = await ctx.step("ask", lambda: 120)
        die(ctx, "asked", dies)
        spend.settle(tokens=tokens)
    die(ctx, "settled", dies)
    await ctx.usage(tokens=7)
    die(ctx, "reported", dies)
    return tokens


if __name__ == "__main__":
    ff.Worker(app, lease_ttl=1, poll=0.2, grace=1, concurrency=1).main()
