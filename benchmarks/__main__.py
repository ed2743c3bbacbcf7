"""`python -m benchmarks`: every selected metric in one table and one file.

--quick            smaller sizes, which the table states; targets are judged without it
--select PREFIX    only the metrics whose names begin so, and the trials they need
--out FILE         where the numbers go
--dsn DSN          a running server (superuser) instead of one of our own
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import uvloop
from rich.console import Console

from benchmarks import flows, tasks
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
from benchmarks.peers.absurd import AbsurdSteps
from benchmarks.peers.dbos import DbosSteps
from benchmarks.peers.pgqueuer import Pgqueuer
from benchmarks.peers.pgqueuer import batch_submitters as pgqueuer_submitters
from benchmarks.peers.procrastinate import Procrastinate
from benchmarks.raw_tasks import RawTasks, Way
from benchmarks.server import Server, running_server
from benchmarks.stolen import load
from benchmarks.waits import DrainBesideSuspended, RawCommit, RawCommits, Resume, Signals
from benchmarks.workers import IdleLatency, SubmitMany, WorkersDrain


def groups(server: Server, sizes: Sizes, console: Console) -> list[Group]:
    """Who takes turns with whom."""
    return [
        Group(
            [
                Drain(server, "engine", lambda dsn: EngineQueue(dsn, sizes), sizes.jobs),
                Drain(server, "floor", lambda dsn: Floor(dsn, sizes), sizes.jobs),
                WorkersDrain(server, "pgqueuer.drain", lambda dsn: Pgqueuer(dsn, sizes), sizes.jobs),
                WorkersDrain(server, "procrastinate.drain", lambda dsn: Procrastinate(dsn, sizes), sizes.slow_jobs),
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
        *task_groups(server, sizes),
        Group([Resume(server, sizes), RawCommit(server, sizes)], sizes.repetitions),
        Group([Signals(server, sizes), RawCommits(server, sizes)], sizes.repetitions),
        Group(
            [
                DrainBesideSuspended(server, sizes, 0, "wait.drain_empty"),
                DrainBesideSuspended(server, sizes, sizes.stored, "wait.drain_suspended"),
            ],
            sizes.repetitions,
        ),
        *flow_groups(server, sizes),
    ]


def flow_groups(server: Server, sizes: Sizes) -> list[Group]:
    """Flows beside the same tasks without edges, and beside the bare rows."""

    def plain(name: str, jobs: int) -> WorkersDrain:
        return WorkersDrain(server, name, tasks.noops(sizes), jobs)

    linear = flows.drain(server, "flow.linear10", sizes, 10, flows.chain, sizes.flows)
    fan = flows.drain(server, "flow.fan1000", sizes, 1_002, flows.fan, sizes.fans)
    large = flows.drain(server, "flow.nodes10k", sizes, sizes.graph_nodes, flows.layers(sizes.graph_nodes // 10), 1)
    small = flows.drain(server, "flow.nodes100", sizes, 100, flows.layers(10), sizes.graph_nodes // 100)
    return [
        Group([flows.FlowsPerSecond(linear), plain("flow.plain10", sizes.flows * 10)], sizes.repetitions),
        Group(
            [flows.PerNode(fan), flows.PerNode(plain("flow.plain1000", sizes.fans * 1_002))],
            sizes.repetitions,
        ),
        Group([flows.SubmitGraph(server, sizes), flows.RawGraph(server, sizes)], sizes.repetitions),
        Group([flows.CancelFlow(server, sizes)], sizes.repetitions),
        Group([flows.PerNode(large), flows.PerNode(small)], sizes.repetitions),
    ]


def task_groups(server: Server, sizes: Sizes) -> list[Group]:
    """The same for whole workers: every contestant's is a process, or two, of its own."""

    def pgqueuer(dsn: str) -> Pgqueuer:
        return Pgqueuer(dsn, sizes)

    def raw(way: Way) -> Callable[[str], RawTasks]:
        return lambda dsn: RawTasks(dsn, sizes, way)

    return [
        *(
            Group(
                [
                    WorkersDrain(server, f"task.drain{n}", tasks.noops(sizes), sizes.jobs, n),
                    WorkersDrain(server, f"pgqueuer.drain{n}", pgqueuer, sizes.jobs, n),
                ],
                sizes.repetitions,
            )
            for n in (1, 2)
        ),
        Group(
            [
                WorkersDrain(server, "task.steps", tasks.five_steps(sizes), sizes.step_runs),
                WorkersDrain(server, "absurd.steps", AbsurdSteps, sizes.slow_step_runs),
                WorkersDrain(server, "absurd.steps_threads", lambda dsn: AbsurdSteps(dsn, 4), sizes.slow_step_runs),
                WorkersDrain(server, "dbos.steps", DbosSteps, sizes.slow_step_runs),
                WorkersDrain(server, "raw.steps_shared", raw("shared"), sizes.step_runs),
                WorkersDrain(server, "raw.steps_alone", raw("alone"), sizes.slow_step_runs),
            ],
            sizes.repetitions,
        ),
        Group(
            [
                IdleLatency(server, "task.latency", tasks.noops(sizes), sizes.waits),
                IdleLatency(server, "raw.latency", raw("wake"), sizes.waits),
                IdleLatency(server, "pgqueuer.latency", pgqueuer, sizes.waits),
            ],
            sizes.repetitions,
        ),
        Group(
            [
                SubmitMany(server, "task.submit_many", lambda dsn: tasks.batch_submitters(dsn, sizes), sizes.jobs),
                SubmitMany(server, "pgqueuer.submit_many", lambda dsn: pgqueuer_submitters(dsn, sizes), sizes.jobs),
            ],
            sizes.repetitions,
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
