"""Sixteen processes spend from one budget: a ledger of every change shows that its limit was passed at no time."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import asyncpg

import flowfabric as ff
from flowfabric.values.budget import budget_id_of
from tests import sampling
from tests.acceptance import writers_app

SCRIPT = Path(writers_app.__file__)
PATIENCE = 120.0
WRITERS = 16
LIMIT = 1_000
# Every state that a transaction committed, and those of transactions that were rolled back are not in it.
LEDGER = """
create table public.ledger (seq bigint generated always as identity, used bigint, held bigint, hard bigint);
create function public.note() returns trigger language plpgsql as $$
begin
    insert into public.ledger (used, held, hard) values (new.used[1], new.held[1], new.hard[1]);
    return null;
end $$;
create trigger noted after insert or update on flowfabric.budget_head for each row execute function public.note();
"""


async def test_sixteen_processes_never_pass_the_limit_by_one_token(database: str) -> None:
    calls = sampling.examples(400, 30)
    limit = LIMIT if calls == 30 else 10 * LIMIT
    async with await ff.Engine.connect(database) as engine, asyncio.timeout(PATIENCE):
        await engine.create_budget(name="team", dimensions=["t"], hard_limits=[limit], soft_limits=[0])
        connection = await asyncpg.connect(database)
        await connection.execute(LEDGER)
        command = [sys.executable, str(SCRIPT), str(WRITERS), str(calls)]
        done = await asyncio.to_thread(
            subprocess.run, command, env={**os.environ, "DSN": database}, stdout=subprocess.PIPE, check=True
        )
        said = [json.loads(line) for line in done.stdout.splitlines()]
        counted: dict[int, int] = defaultdict(int)
        for number, _, amount, breach in said:
            counted[number] += max(amount, 0)
            if breach is not None:  # refused for a reason: it would not have fitted when it was asked
                used, held, requested, hard = breach
                assert used + held <= hard == limit
                assert used + held + requested > hard
        assert len(counted) == WRITERS
        assert sum(breach is not None for *_, breach in said) > 10
        killed = {number for number, what, amount, _ in said if what == "reserve" and amount < 0}
        assert killed == {WRITERS - 2, WRITERS - 1}

        states = await connection.fetch("select used, held, hard from ledger order by seq")
        assert len(states) > WRITERS
        assert [one for one in states if (one["used"] or 0) + (one["held"] or 0) > one["hard"]] == []
        # What dead processes held is charged with their leases, and fits too.
        for one in (await engine.find_executions(states=["active"], limit=100)).items:
            await engine.revoke_lease(one.execution_id)
        # Ends do not wait for a budget that another process has locked: the duty gives back what they held.
        await engine.collect_reservations(marked=True)
        found = await engine.get_budget_status(budget_id_of("team"))
        assert found.held.get("t", 0) == 0
        charged = found.usage["t"] - sum(counted.values())
        assert charged >= sum(-amount for *_, amount, _ in said if amount < 0)
        assert found.usage["t"] <= limit
        assert await engine.audit() == []
        await connection.close()
