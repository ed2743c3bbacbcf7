"""`python -m benchmarks`: every selected metric in one table and one file.

--quick            smaller sizes, which the table states; targets are judged without it
--select PREFIX    only the metrics whose names begin so, and the trials they need
--out FILE         where the numbers go
--dsn DSN          a running server (superuser) instead of one of our own
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import uvloop
from rich.console import Console

from benchmarks.engine import DrainPinned, DrainWithStored, EngineCreateMany, EngineQueue, EngineVerbs
from benchmarks.floor import Floor, RawCreateMany, RawVerbs
from benchmarks.harness import (
    FULL,
    QUICK,
    Drain,
    Group,
    Results,
    Sizes,
    run_group,
    selected,
    table,
    write_json,
)
from benchmarks.peers.pgqueuer import Pgqueuer
from benchmarks.peers.procrastinate import Procrastinate
from benchmarks.server import Server, running_server
from benchmarks.stolen import load


def groups(server: Server, sizes: Sizes, console: Console) -> list[Group]:
    """Who takes turns with whom."""
    return [
        Group(
            [
                Drain(server, "engine", lambda dsn: EngineQueue(dsn, sizes), sizes.jobs),
                Drain(server, "floor", lambda dsn: Floor(dsn, sizes), sizes.jobs),
                Drain(server, "pgqueuer", lambda dsn: Pgqueuer(dsn, sizes), sizes.jobs),
                Drain(server, "procrastinate", lambda dsn: Procrastinate(dsn, sizes), sizes.slow_jobs),
            ],
            sizes.repetitions,
        ),
        Group([EngineCreateMany(server, sizes), RawCreateMany(server, sizes)], sizes.repetitions),
        Group([EngineVerbs(server, sizes), RawVerbs(server, sizes)], sizes.repetitions),
        Group(
            [
                DrainWithStored(server, sizes, 0, "engine.drain_empty"),
                DrainWithStored(server, sizes, sizes.stored, "engine.drain_full"),
            ],
            sizes.repetitions,
        ),
        Group(
            [DrainPinned(server, sizes, False, console), DrainPinned(server, sizes, True, console)],
            sizes.long_repetitions,
        ),
    ]


async def bench(server: Server, options: argparse.Namespace) -> None:
    started = time.monotonic()
    console = Console(width=140)
    sizes = QUICK if options.quick else FULL
    metrics = selected(options.select)
    if not metrics:
        raise SystemExit(f"no metric begins with {options.select!r}")
    wanted = {series for metric in metrics for series in (metric.ours, metric.theirs)}
    settings = ", ".join(f"{name} {value}" for name, value in (await server.settings()).items())
    console.print(settings, highlight=False)
    load_before = load()
    results = Results()
    for group in groups(server, sizes, console):
        await run_group(group.wanting(wanted), results, console)
    wall_seconds = time.monotonic() - started
    caption = (
        f"{'quick' if options.quick else 'full'} sizes: {sizes}; wall time {wall_seconds:.0f} s; {load_before} before"
    )
    console.print(table(results, metrics, caption))
    write_json(results, metrics, wall_seconds, options.out)
    console.print(f"numbers in {options.out}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="flowfabric beside a floor and its peers")
    parser.add_argument("--quick", action="store_true", help="smaller sizes; targets are judged without it")
    parser.add_argument("--select", default="", metavar="PREFIX", help="only metrics whose names begin so")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    parser.add_argument("--dsn", help="a running server, as superuser; databases named bench_* are made and dropped")
    options = parser.parse_args()
    with running_server(options.dsn) as server:
        uvloop.run(bench(server, options))


if __name__ == "__main__":
    main()
