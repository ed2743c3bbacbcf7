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


def groups(server: Server, sizes: Sizes) -> list[Group]:
    """Who takes turns with whom.

    The engine's own trials (`engine.py`) belong first in each group: a `Drain` named "engine" here, trials that
    measure `engine.create_many` and the three single calls below. Full against empty and pinned against plain
    compare the engine with itself: two groups more, of `sizes.long_repetitions`.
    """
    return [
        Group(
            [
                Drain(server, "floor", lambda dsn: Floor(dsn, sizes), sizes.jobs),
                Drain(server, "pgqueuer", lambda dsn: Pgqueuer(dsn, sizes), sizes.jobs),
                Drain(server, "procrastinate", lambda dsn: Procrastinate(dsn, sizes), sizes.slow_jobs),
            ],
            sizes.repetitions,
        ),
        Group([RawCreateMany(server, sizes)], sizes.repetitions),
        Group([RawVerbs(server, sizes)], sizes.repetitions),
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
    results = Results()
    for group in groups(server, sizes):
        await run_group(group.wanting(wanted), results, console)
    wall_seconds = time.monotonic() - started
    caption = f"{'quick' if options.quick else 'full'} sizes: {sizes}; wall time {wall_seconds:.0f} s"
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
