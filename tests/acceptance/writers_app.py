"""Processes that spend from one budget at the same time. Usage: python writers_app.py PROCESSES CALLS; `DSN` is set.

Each prints what it was answered: one line for each call. The last two die with SIGKILL between holding and settling.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import traceback
from datetime import timedelta

import flowfabric as ff
from flowfabric.values.budget import HardBreach, Reserved, budget_id_of

BUDGET = budget_id_of("team")


async def write(number: int, calls: int, ready: int, go: int, *, dies: bool) -> None:
    dice = random.Random(number)
    async with await ff.Engine.connect(max_size=1, notifications=False, dsn=os.environ["DSN"]) as engine:
        who = {"worker_id": "writer", "worker_instance_id": f"writer-{number}", "lease_ttl": timedelta(hours=1)}
        await engine.create_execution(execution_kind="write", lane_id=f"lane-{number}")
        claimed = await engine.claim(f"lane-{number}", **who)  # type: ignore[arg-type]
        assert claimed is not None
        handle = claimed.handle
        os.write(ready, b".")
        await asyncio.to_thread(os.read, go, 1)  # until all are ready
        held: list[tuple[ff.ReservationId, int]] = []
        for turn in range(calls):
            amount = dice.randint(1, 9)
            what = (
                dice.choice(["report", "reserve", "settle", "cancel"]) if held else dice.choice(["report", "reserve"])
            )
            if dies and turn > 2:
                what = "reserve"
            counted, breach = 0, None
            if what == "report":
                answer = await engine.report_usage(handle, {"t": amount}, BUDGET)
                breach = answer if isinstance(answer, HardBreach) else None
                counted = 0 if breach else amount
            elif what == "reserve":
                kept = await engine.reserve_usage(handle, {"t": amount}, BUDGET)
                if isinstance(kept, Reserved):
                    held.append((kept.reservation_id, amount))
                    if dies and turn > 2:
                        say(number, what, -amount, None)
                        os.kill(os.getpid(), signal.SIGKILL)
                else:
                    breach = kept if isinstance(kept, HardBreach) else None
            elif what == "settle":
                reservation, _ = held.pop()
                settled = await engine.settle_usage(handle, reservation, {"t": amount})
                over = settled.overrun if isinstance(settled, HardBreach) else 0
                counted = amount - over
            else:
                await engine.cancel_reservation(handle, held.pop()[0])
            say(number, what, counted, breach)
        await engine.complete(handle)


def say(number: int, what: str, counted: int, breach: HardBreach | None) -> None:
    told = None if breach is None else [breach.current_usage, breach.held, breach.requested, breach.hard_limit]
    os.write(1, f"{json.dumps([number, what, counted, told])}\n".encode())


def main(processes: int, calls: int) -> None:
    ready, is_ready = os.pipe()
    wait, go = os.pipe()
    children = []
    for number in range(processes):
        if (child := os.fork()) == 0:
            os.close(go)
            try:
                asyncio.run(write(number, calls, is_ready, wait, dies=number >= processes - 2))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    os.close(is_ready)
    told = 0
    while told < processes and (some := os.read(ready, processes)):
        told += len(some)
    os.close(go)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends == [0] * (processes - 2) + [-signal.SIGKILL] * 2, ends


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
