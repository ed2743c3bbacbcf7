"""Kill a worker in the middle of its work and watch every execution finish. `make demo` runs this.

Two worker processes share a few hundred executions. One is killed with SIGKILL while it holds leases, and nobody
cleans up after it. When its leases have lapsed, the other worker takes the executions over as new attempts; the table
at the end shows which.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import uuid
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import flowfabric as ff

EXECUTIONS = 300
BATCH = 10
WORK = 0.03  # seconds for one execution
LEASE = timedelta(seconds=2)  # far more than a batch takes; longer work would renew its leases
KILLED_IN_BATCH = 6
PATIENCE = 180  # seconds until the demo gives up


# A worker process ------------------------------------------------------------------------------------------------


async def work(payload: bytes) -> bytes:
    await asyncio.sleep(WORK)
    return payload.upper()


async def worker(name: str, lane: str, *, runs_duties: bool) -> None:
    """Claim, work, complete: until the parent closes stdin, which its death does too."""
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(await ff.Engine.connect())
        if runs_duties:  # one process is enough: lapsed leases are found, retries and deadlines come due
            await stack.enter_async_context(ff.Duties(engine))
        stopped = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        while not stopped.done():
            batch = await engine.claim_many(
                lane,
                limit=BATCH,
                worker_id="demo",
                worker_instance_id=name,
                lease_ttl=LEASE,
                max_wait=timedelta(seconds=1),
            )
            if batch:
                print(len(batch), flush=True)
                done = [ff.Completion(claimed.handle, await work(claimed.input_payload)) for claimed in batch]
                # One verdict per item. A lease lost meanwhile is refused: somebody else does that work now.
                await engine.complete_many(done)


# The demo --------------------------------------------------------------------------------------------------------


async def main(console: Console) -> bool:
    run = uuid.uuid4().hex[:8]
    lane = f"demo-{run}"
    console.print("Starting the database, the first time in a new data directory ...")
    async with await ff.Engine.connect() as engine, asyncio.timeout(PATIENCE):
        console.print(f"Submitting {EXECUTIONS} executions to lane {lane} in {engine.target}.")
        await engine.create_many(
            [
                ff.NewExecution(
                    execution_kind="shout",
                    lane_id=lane,
                    namespace=run,
                    input_payload=f"execution {number}".encode(),
                    execution_deadline_at=timedelta(minutes=10),  # tidies up after a demo that was interrupted
                )
                for number in range(EXECUTIONS)
            ]
        )

        begun = time.monotonic()
        async with worker_process("worker-1", lane) as victim:
            assert victim.stdout is not None
            await victim.stdout.readline()  # it has claimed its first batch
            async with worker_process("worker-2", lane, "--duties") as survivor:
                killing = asyncio.create_task(kill_in_mid_batch(victim, console))
                reclaimed = await follow(engine, run, survivor, console)
                killing.cancel()  # has long happened, unless worker-1 never got going
        seconds = time.monotonic() - begun
        return await report(engine, run, reclaimed, seconds, console)


@contextlib.asynccontextmanager
async def worker_process(*arguments: str) -> AsyncIterator[Process]:
    # In a session of its own, so that Ctrl-C reaches the demo alone, which then ends its workers.
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "worker", *arguments, stdin=PIPE, stdout=PIPE, start_new_session=True
    )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()


async def kill_in_mid_batch(victim: Process, console: Console) -> None:
    """A worker says how many it claimed, then works on them: the best moment to kill it."""
    assert victim.stdout is not None
    for _ in range(KILLED_IN_BATCH - 2):
        await victim.stdout.readline()
    if held := (await victim.stdout.readline()).decode().strip():
        victim.kill()
        await victim.wait()
        lapse = f"{LEASE.total_seconds():.0f} s"
        console.print(f"[bold]worker-1 was killed with SIGKILL and held {held} leases.[/] They lapse within {lapse}.")


async def follow(engine: ff.Engine, run: str, survivor: Process, console: Console) -> list[ff.ExecutionId]:
    """Read the event log until every execution of this run has ended; answers which were reclaimed."""
    finished = 0
    reclaimed: dict[ff.ExecutionId, None] = {}
    cursor = ff.EventCursor()
    spoken_at = time.monotonic()
    with Progress(
        TextColumn("finished"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task("finished", total=EXECUTIONS)
        while finished < EXECUTIONS:
            page = await engine.read_events(after=cursor, limit=1000, filter=ff.ScannerFilter(namespace=run))
            cursor = page.next_cursor or cursor
            for event in page.items:
                finished += event.outcome is not None
                if event.lease_type == "reclaimed" and event.execution_id is not None:
                    reclaimed[event.execution_id] = None
            progress.update(bar, completed=finished)
            if not console.is_terminal and time.monotonic() - spoken_at >= 1:
                spoken_at = time.monotonic()
                console.print(f"{finished} of {EXECUTIONS} finished, {len(reclaimed)} reclaimed")
            if survivor.returncode is not None:
                raise SystemExit(f"worker-2 ended with status {survivor.returncode}")
            await asyncio.sleep(0.1)
    return list(reclaimed)


async def report(
    engine: ff.Engine, run: str, reclaimed: list[ff.ExecutionId], seconds: float, console: Console
) -> bool:
    """What happened, as it is stored; True if all is well."""
    attempts = Table(title="Attempts whose lease was lost, and who took over", title_justify="left")
    for heading in ("execution", "first by", "epoch", "reclaimed by", "epoch", "ended as"):
        attempts.add_column(heading, justify="right" if heading == "epoch" else "left")
    for execution_id in reclaimed[:20]:
        first, *_, last = await engine.list_attempts(execution_id)
        attempts.add_row(
            f"...{execution_id[-12:]}",
            first.worker_instance_id,
            str(first.lease_epoch),
            last.worker_instance_id,
            str(last.lease_epoch),
            last.attempt_lifecycle,
        )
    if len(reclaimed) > 20:
        attempts.caption = f"and {len(reclaimed) - 20} more"
    console.print(attempts)

    page = await engine.find_executions(namespace=run, limit=1000)
    states = Counter(str(execution.public_state) for execution in page.items)
    violations = await engine.audit()
    finished = states["completed"]
    summary = Table(show_header=False)
    for state, count in states.items():
        summary.add_row(state, f"{count} of {EXECUTIONS}")
    summary.add_row("reclaimed", str(len(reclaimed)))
    summary.add_row("rate", f"{finished / seconds:.0f} executions/s over {seconds:.1f} s ({WORK} s of sleep in each)")
    summary.add_row("audit", "\n".join(map(str, violations)) or "nothing wrong")
    console.print(summary)
    return finished == EXECUTIONS and bool(reclaimed) and not violations


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        asyncio.run(worker(sys.argv[2], sys.argv[3], runs_duties="--duties" in sys.argv))
    else:
        try:
            sys.exit(0 if asyncio.run(main(Console(highlight=False))) else 1)
        except KeyboardInterrupt:
            sys.exit(130)
        except TimeoutError:
            sys.exit(f"not all executions finished within {PATIENCE} s")
