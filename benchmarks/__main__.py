"""`python -m benchmarks`: every selected metric in one table and one file.

--quick            smaller sizes, which the table states; targets are judged without it
--select PREFIX    metrics whose names begin with it, and the trials they need; `table` is the table of README.md
--out FILE         where the numbers go, as they come; the single samples go beside it (`.samples.jsonl`)
--resume           keep the samples of an interrupted run of the same commit with the same sizes
--dsn DSN          a running server (superuser) instead of one of our own
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path

import uvloop
from rich.console import Console

from benchmarks import events, flows, http, limits, scale, streams, tasks
from benchmarks.contestants import settings_of
from benchmarks.crash import Crash
from benchmarks.engine import DrainWithStored, EngineCreateMany, EngineQueue, EngineVerbs, FlowPinned
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
from benchmarks.metrics import NOTES, Metric
from benchmarks.peers.absurd import AbsurdSteps
from benchmarks.peers.awa import Awa
from benchmarks.peers.dbos import DbosSteps, DbosStreams
from benchmarks.peers.pgqueuer import Pgqueuer
from benchmarks.peers.procrastinate import Procrastinate
from benchmarks.raw_tasks import RawTasks, Way
from benchmarks.server import Server, running_server
from benchmarks.stolen import load
from benchmarks.sustained import Sustained
from benchmarks.table import cells, write_markdown
from benchmarks.waits import DrainBesideSuspended, RawCommit, RawCommits, Resume, Signals
from benchmarks.workers import IdleLatency, SubmitMany, SubmitOne, SubmittingContestant, WorkersDrain

Made = Callable[[str], SubmittingContestant]


def groups(server: Server, sizes: Sizes, console: Console) -> list[Group]:
    """Which trials take turns with each other."""
    return [
        *engine_groups(server, sizes, console),
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
        *stream_groups(server, sizes),
        *event_groups(server, sizes),
        *http_groups(server, sizes),
        *limit_groups(server, sizes),
        *flow_groups(server, sizes),
        *scale_groups(server, sizes),
        *long_groups(server, sizes),
    ]


def engine_groups(server: Server, sizes: Sizes, console: Console) -> list[Group]:
    """The engine's calls beside bare SQL."""
    return [
        Group(
            [
                Drain(server, "engine", lambda dsn: EngineQueue(dsn, sizes), sizes.jobs),
                Drain(server, "floor", lambda dsn: Floor(dsn, sizes), sizes.jobs),
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
            [FlowPinned(server, sizes, False, console), FlowPinned(server, sizes, True, console)],
            sizes.long_repetitions,
        ),
    ]


def scale_groups(server: Server, sizes: Sizes) -> list[Group]:
    """Figures that must not grow."""
    few = sizes.long_repetitions
    return [
        *(
            Group([kind(server, sizes, False), kind(server, sizes, True)], few)
            for kind in (
                scale.ClaimFromEmpty,
                scale.ClaimBesideSubmitters,
                scale.SubmitBesideSleepers,
                scale.TimersRound,
            )
        ),
        *(
            Group([scale.ManyKinds(server, sizes, what, 1), scale.ManyKinds(server, sizes, what, 1000)], few)
            for what in ("kinds", "lanes")
        ),
        Group([scale.IdleWorkers(server, sizes)], few),
        Group(
            [
                WorkersDrain(
                    server, f"task.drain_beside{n}", tasks.noops(sizes), sizes.jobs, beside=scale.idle_workers(n)
                )
                for n in (0, 200)
            ],
            few,
        ),
        Group(
            [
                WorkersDrain(
                    server, f"registry.drain{n}", tasks.noops(sizes), sizes.jobs, beside=scale.registered_workers(n)
                )
                for n in (0, 1000)
            ],
            sizes.repetitions,
        ),
        Group([scale.Wake(server, sizes, 1), scale.Wake(server, sizes, 200), scale.Wake(server, sizes, 1, True)], few),
        Group(
            [
                scale.DutiesBesideStored(server, sizes, 1_000, "thousand"),
                scale.DutiesBesideStored(server, sizes, sizes.stored, "million"),
            ],
            few,
        ),
    ]


def contestants(sizes: Sizes) -> dict[str, Made]:
    """Those with whole workers, by the prefix of their series."""
    return {
        "task": tasks.noops(sizes),
        "raw": raw(sizes, "drain"),
        "pgqueuer": lambda dsn: Pgqueuer(dsn, sizes),
        "awa": lambda dsn: Awa(dsn, sizes),
        "procrastinate": lambda dsn: Procrastinate(dsn, sizes),
    }


def raw(sizes: Sizes, way: Way) -> Callable[[str], RawTasks]:
    return lambda dsn: RawTasks(dsn, sizes, way)


def task_groups(server: Server, sizes: Sizes) -> list[Group]:
    """Whole workers: every contestant's is a process, or two, of its own."""
    made = contestants(sizes)

    def jobs(name: str) -> int:
        return sizes.slow_jobs if name == "procrastinate" else sizes.jobs

    return [
        *(
            Group(
                [WorkersDrain(server, f"{name}.drain{n}", one, jobs(name), n) for name, one in made.items()],
                sizes.repetitions,
            )
            for n in (1, 2)
        ),
        Group(
            [
                WorkersDrain(server, "task.steps", tasks.five_steps(sizes), sizes.step_runs),
                WorkersDrain(server, "task.steps2", tasks.five_steps(sizes), sizes.step_runs, 2),
                WorkersDrain(server, "absurd.steps", AbsurdSteps, sizes.slow_step_runs),
                WorkersDrain(server, "absurd.steps_threads", lambda dsn: AbsurdSteps(dsn, 4), sizes.slow_step_runs),
                WorkersDrain(server, "dbos.steps", DbosSteps, sizes.slow_step_runs),
                WorkersDrain(server, "raw.steps_shared", raw(sizes, "shared"), sizes.step_runs),
                WorkersDrain(server, "raw.steps_alone", raw(sizes, "alone"), sizes.slow_step_runs),
            ],
            sizes.repetitions,
        ),
        Group(
            [
                IdleLatency(server, f"{name}.latency", one, sizes.waits)
                for name, one in (made | {"raw": raw(sizes, "wake")}).items()
            ],
            sizes.repetitions,
        ),
        Group(
            [
                SubmitMany(server, f"{name}.submit_many", one, jobs(name), sizes.connections)
                for name, one in made.items()
            ],
            sizes.repetitions,
        ),
        Group(
            [SubmitOne(server, f"{name}.submit_one", one, sizes.single_calls) for name, one in made.items()],
            sizes.repetitions,
        ),
        Group([Crash(server, sizes)], sizes.long_repetitions),
    ]


def stream_groups(server: Server, sizes: Sizes) -> list[Group]:
    """Appends beside bare inserts, and how soon a reader has what was appended."""
    many = streams.AppendMany
    return [
        Group([many(server, sizes, "stream.append_many"), streams.RawMany(server, sizes)], sizes.repetitions),
        Group([streams.AppendOne(server, sizes), streams.RawOne(server, sizes)], sizes.repetitions),
        Group(
            [
                many(server, sizes, "stream.append_empty"),
                many(server, sizes, "stream.append_full", stored=10_000),
                many(server, sizes, "stream.append_pinned", pinned=True),
            ],
            sizes.repetitions,
        ),
        Group([streams.Wal(server, sizes)], sizes.repetitions),
        Group(
            [
                WorkersDrain(server, "stream.task", tasks.hundred_tokens(sizes), 200),
                WorkersDrain(server, "dbos.stream", DbosStreams, 20),  # a tenth: figures are per second
            ],
            sizes.repetitions,
        ),
        Group(
            [
                WorkersDrain(
                    server, f"stream.drain_tails{n}", tasks.noops(sizes), sizes.jobs, beside=streams.waiting_tails(n)
                )
                for n in (0, 500)
            ],
            sizes.repetitions,
        ),
        Group([streams.Tail(server, sizes)], sizes.repetitions),
    ]


def event_groups(server: Server, sizes: Sizes) -> list[Group]:
    """Drains beside processes that follow the log, and followers beside bare pages."""
    beside = {"alone": None, "followed": events.follower("filtered"), "firehose": events.follower("all")}
    return [
        Group(
            [
                WorkersDrain(
                    server, f"events.drain_{name}", tasks.noops(sizes), sizes.jobs, **({"beside": one} if one else {})
                )
                for name, one in beside.items()
            ],
            sizes.repetitions,
        ),
        Group([events.Follow(server, sizes)], sizes.repetitions),
        Group([events.Latency(server, sizes)], sizes.repetitions),
    ]


def http_groups(server: Server, sizes: Sizes) -> list[Group]:
    """The HTTP server beside bare routes, in turns."""
    often = sizes.repetitions
    return [
        *(
            Group([http.Submit(server, sizes, clients, True), http.Submit(server, sizes, clients, False)], often)
            for clients in (16, 64)
        ),
        Group([http.SubmitOne(server, sizes, True), http.SubmitOne(server, sizes, False)], often),
        Group([http.SubmitMany(server, sizes)], often),
        Group([http.Get(server, sizes, True), http.Get(server, sizes, False)], often),
        Group([http.Events(server, sizes)], sizes.long_repetitions),
    ]


def limit_groups(server: Server, sizes: Sizes) -> list[Group]:
    """Work under budgets and quotas beside the same work without."""
    often = sizes.repetitions
    held = sizes.stored // 10
    unders: tuple[limits.Under, ...] = ("plain", "budget", "quota", "spread")
    return [
        Group([limits.Drain(server, sizes, under) for under in unders], often),
        Group(
            [
                limits.ClaimOne(server, sizes, "limits.claim_plain"),
                limits.ClaimOne(server, sizes, "limits.claim_hot", 10_000),
                limits.ClaimOne(server, sizes, "limits.claim_near", 500),
            ],
            often,
        ),
        Group(
            [
                limits.DrainBeside(server, sizes, 0, "limits.drain_none"),
                limits.DrainBeside(server, sizes, held, "limits.drain_held"),
            ],
            often,
        ),
        Group(
            [limits.MixedPinned(server, sizes, False), limits.MixedPinned(server, sizes, True)], sizes.long_repetitions
        ),
        Group([limits.Aside(server, sizes)], often),
        Group([limits.Overshoot(server, sizes)], often),
        Group(
            [limits.Handoff(server, sizes), IdleLatency(server, "quota.latency", tasks.noops(sizes), sizes.waits)],
            often,
        ),
        Group([limits.Rate(server, sizes)], sizes.long_repetitions),
        Group(
            [
                limits.Reports(server, sizes, "budget.report"),
                limits.Reports(server, sizes, "budget.report_many", size=100),
                limits.Reports(server, sizes, "budget.report_pinned", pinned=True),
                limits.HotRow(server, sizes),
            ],
            often,
        ),
        Group(
            [
                WorkersDrain(server, "budget.task", limits.three_usages(sizes), sizes.step_runs),
                WorkersDrain(server, "budget.steps", limits.three_steps(sizes), sizes.step_runs),
            ],
            often,
        ),
        Group([limits.ResumePaused(server, sizes), RawCommit(server, sizes)], often),
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


def long_groups(server: Server, sizes: Sizes) -> list[Group]:
    """Minutes of load at a steady pace, plain and beside a held transaction."""
    ours, *peers = [(name, one) for name, one in contestants(sizes).items() if name in ("task", "pgqueuer", "awa")]
    seconds = sizes.held_seconds
    return [
        Group(
            [
                Sustained(server, f"{name}.sustained", one, sizes, sizes.sustained_seconds)
                for name, one in (ours, *peers)
            ],
            sizes.long_repetitions,
        ),
        Group(
            [
                Sustained(server, f"{ours[0]}.unheld", ours[1], sizes, seconds),
                *(Sustained(server, f"{name}.held", one, sizes, seconds, held=True) for name, one in (ours, *peers)),
            ],
            sizes.long_repetitions,
        ),
    ]


async def bench(server: Server, options: argparse.Namespace) -> None:
    started = time.monotonic()
    console = Console(width=140)
    sizes = QUICK if options.quick else FULL
    is_table = "table".startswith(options.select)
    metrics = [] if options.select == "table" else selected(options.select)
    shown = cells() if is_table else {}
    if not metrics and not shown:
        raise SystemExit(f"no metric begins with {options.select!r}")
    wanted = {series for metric in metrics for series in (metric.ours, metric.theirs) if series} | set(shown.values())
    server_settings = await server.settings()
    settings = ", ".join(f"{name} {value}" for name, value in server_settings.items())
    for line in (f"server: {settings}", *(f"{name}: {said}" for name, said in settings_of().items()), load()):
        console.print(line, highlight=False)
    results = Results(
        options.out.with_suffix(".samples.jsonl"),
        {"commit": _commit(), "sizes": asdict(sizes), "server": server_settings["server_version"]},
    )
    if options.resume:
        results.resume()
    else:
        results.begin()

    def keep() -> None:
        about = {
            "bench.quick": float(options.quick),
            f"bench.wall_seconds.{options.select or 'all'}": time.monotonic() - started,
            "bench.wall_seconds": time.monotonic() - started,
        }
        write_json(results, metrics, shown, about, options.out)
        if is_table:
            write_markdown(results, _about(server_settings, sizes, results, options), options.table)

    for group in groups(server, sizes, console):
        await run_group(group.wanting(wanted), results, console, keep)
    keep()
    wall = time.monotonic() - started
    caption = f"{'quick' if options.quick else 'full'} sizes: {sizes}; wall time {wall:.0f} s; {load()} after"
    if metrics:
        console.print(table(results, metrics, caption))
    for note in _notes(metrics):
        console.print(note, highlight=False)
    if is_table:
        console.print(options.table.read_text(), highlight=False, markup=False, soft_wrap=True)
        console.print(f"table in {options.table}", highlight=False)
    console.print(f"numbers in {options.out}; wall time {wall:.0f} s", highlight=False)


def _notes(metrics: list[Metric]) -> list[str]:
    return [note for prefix, note in NOTES.items() if any(metric.name.startswith(prefix) for metric in metrics)]


def _about(server: dict[str, str], sizes: Sizes, results: Results, options: argparse.Namespace) -> list[str]:
    """The lines below the table."""
    stolen = results.most_stolen(*cells().values())
    quick = " **Quick sizes: not for publication.**" if options.quick else ""
    return [
        f"{date.today().isoformat()}, PostgreSQL {server['server_version']}, fsync {server['fsync']},"
        f" synchronous_commit {server['synchronous_commit']}, shared_buffers {server['shared_buffers']}, Unix socket;"
        f" {load()}; {sizes.jobs:,} no-op jobs of {sizes.payload_bytes} bytes ({sizes.slow_jobs:,} for procrastinate),"
        f" {sizes.step_runs:,} runs of 5 steps ({sizes.slow_step_runs:,} for absurd and DBOS), medians of"
        f" {sizes.repetitions} in turns, at most {stolen:.1%} of the time stolen by the host.{quick}",
        "",
        "WAL is that of fill and drain. Dead rows are those left at the end for a vacuum. Bytes stored is the growth of"
        " all tables and indexes, after a vacuum. awa deletes finished jobs within seconds, the others keep them or a"
        " log of them. The raw loop's steps share the commits of a hundred jobs.",
        "",
        *(f"- {name}: {said}" for name, said in settings_of().items()),
    ]


def _commit() -> str:
    """Of the working tree; an uncommitted change is another one."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run(["git", "diff", "HEAD"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{head}+{len(changes)}" if changes else head


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="flowfabric beside a floor and its peers")
    parser.add_argument("--quick", action="store_true", help="smaller sizes; targets are judged without it")
    parser.add_argument("--select", default="", metavar="PREFIX", help="metrics whose names begin with it; or `table`")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    parser.add_argument("--table", type=Path, default=Path("build/bench-table.md"))
    parser.add_argument("--resume", action="store_true", help="keep the samples of an interrupted run")
    parser.add_argument("--dsn", help="a running server, as superuser; databases named bench_* are made and dropped")
    options = parser.parse_args()
    with running_server(options.dsn) as server:
        uvloop.run(bench(server, options))


if __name__ == "__main__":
    main()
