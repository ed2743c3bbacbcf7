"""How figures are taken: contestants alternate, medians count, repetitions the host disturbed are run again.

A contestant is a queue that can be filled and drained. A trial is anything that gives figures when it is run;
`Drain` makes one of a contestant. What the figures mean and which are wanted is in `metrics.py`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.table import Table

from benchmarks.metrics import METRICS, Metric
from benchmarks.server import Server
from benchmarks.stolen import Stolen

# A repetition that lost more than this to the host says little about us.
STOLEN_LIMIT = 0.05


@dataclass(frozen=True)
class Sizes:
    """How much of everything. Targets are judged on `FULL`."""

    jobs: int = 20_000
    slow_jobs: int = 2_000
    single_calls: int = 3_000
    step_runs: int = 2_000
    slow_step_runs: int = 300
    waits: int = 300
    flows: int = 2_000
    fans: int = 20
    graph_nodes: int = 10_000
    cancels: int = 30
    payload_bytes: int = 200
    connections: int = 2
    stored: int = 1_000_000
    pinned_jobs: int = 200_000
    held_seconds: int = 120
    repetitions: int = 5
    long_repetitions: int = 5

    def __str__(self) -> str:
        return (
            f"{self.jobs:,} jobs of {self.payload_bytes} bytes ({self.slow_jobs:,} for slow peers), "
            f"{self.connections} connections, {self.single_calls:,} single calls, {self.stored:,} stored, "
            f"{self.step_runs:,} runs of 5 steps ({self.slow_step_runs:,} for slow peers), {self.waits:,} waits, "
            f"{self.flows:,} flows of 10 nodes, {self.fans} of 1,002, {self.graph_nodes:,} nodes in a call, "
            f"{self.cancels} cancelled flows of 1,000, "
            f"{self.pinned_jobs:,} jobs in {self.held_seconds} s of held transaction, "
            f"medians of {self.repetitions} ({self.long_repetitions} where it takes long)"
        )


FULL = Sizes()
QUICK = Sizes(
    slow_jobs=300,
    single_calls=1_000,
    step_runs=1_000,
    slow_step_runs=100,
    waits=100,
    flows=500,
    fans=5,
    cancels=10,
    stored=50_000,
    pinned_jobs=20_000,
    held_seconds=10,
    repetitions=3,
    long_repetitions=1,
)


class Contestant(Protocol):
    """A queue in an empty database of its own."""

    async def prepare(self) -> None:
        """Make the schema and connect."""

    async def fill(self, jobs: int) -> None:
        """Submit that many no-op jobs."""

    async def drain(self) -> float:
        """Run every job to its end with one process. Seconds from the first claim to the last completion."""

    async def close(self) -> None: ...


def check_all_done(done: int, jobs: int) -> None:
    """For the end of a drain: a figure counts only if the database says that every job was done."""
    if done != jobs:
        raise RuntimeError(f"{done:,} of {jobs:,} jobs were done")


@dataclass(frozen=True)
class Sample:
    """The figures of one repetition, by series, and the part of the processor time the host took."""

    figures: Mapping[str, float]
    stolen: float


class Trial(Protocol):
    @property
    def series(self) -> Sequence[str]:
        """What a run measures."""

    async def run(self) -> Sample: ...


@dataclass(frozen=True)
class Drain:
    """Fills a contestant and drains it: jobs per second."""

    server: Server
    name: str
    contestant: Callable[[str], Contestant]
    jobs: int

    @property
    def series(self) -> Sequence[str]:
        return (f"{self.name}.drain",)

    async def run(self) -> Sample:
        database = f"bench_{self.name}"
        contestant = self.contestant(await self.server.create_database(database))
        try:
            await contestant.prepare()
            # Before the fill: a queue's rows are written and drained between two checkpoints, not across one.
            await self.server.settle()
            await contestant.fill(self.jobs)
            with Stolen() as stolen:
                seconds = await contestant.drain()
        finally:
            await contestant.close()
            await self.server.drop_database(database)
        return Sample({f"{self.name}.drain": self.jobs / seconds}, stolen.share)


@dataclass(frozen=True)
class Group:
    """Trials that take turns, because their figures are compared."""

    trials: Sequence[Trial]
    repetitions: int

    def wanting(self, series: set[str]) -> Group:
        """Only the trials that measure one of `series`."""
        return Group([trial for trial in self.trials if series & set(trial.series)], self.repetitions)


@dataclass
class Results:
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        for name in sample.figures:
            self.samples.setdefault(name, []).append(sample)

    def has(self, series: str) -> bool:
        return series in self.samples

    def median(self, series: str) -> float:
        return statistics.median(sample.figures[series] for sample in self.samples[series])

    def most_stolen(self, *series: str) -> float:
        return max((sample.stolen for name in series for sample in self.samples.get(name, ())), default=0.0)


async def run_group(group: Group, results: Results, console: Console) -> None:
    """Every trial `repetitions` times, in turns. A disturbed run is repeated, at most twice in a row."""
    for repetition in range(1, group.repetitions + 1):
        for trial in group.trials:
            tries = [await trial.run()]
            while tries[-1].stolen > STOLEN_LIMIT and len(tries) < 3:
                _tell(console, f"{repetition}, again", tries[-1])
                tries.append(await trial.run())
            best = min(tries, key=lambda sample: sample.stolen)
            results.add(best)
            _tell(console, f"{repetition}", best)


def _tell(console: Console, repetition: str, sample: Sample) -> None:
    figures = "  ".join(f"{name} {_number(value)}" for name, value in sample.figures.items())
    console.print(f"repetition {repetition}: {figures}  stolen {sample.stolen:.1%}", highlight=False)


def table(results: Results, metrics: Sequence[Metric], caption: str) -> Table:
    shown = Table(caption=caption, caption_justify="left")
    shown.add_column("metric")
    for heading in ("ours", "theirs", "unit", "ratio", "target", "", "stolen at most"):
        shown.add_column(heading, justify="left" if heading in ("unit", "") else "right")
    for metric in metrics:
        ratio = _ratio(results, metric)
        target = metric.target
        verdict = ""
        if ratio is None:
            verdict = "not measured"
        elif target is not None:
            verdict = "met" if target.is_met(ratio) else "[bold red]missed"
        shown.add_row(
            metric.name,
            _shown(results, metric.ours),
            _shown(results, metric.theirs),
            metric.unit,
            "" if ratio is None else f"{ratio:.2f}",
            "" if target is None else f"{target.bound} {target.value:g}",
            verdict,
            f"{results.most_stolen(metric.ours, metric.theirs):.1%}",
        )
    return shown


def write_json(results: Results, metrics: Sequence[Metric], wall_seconds: float, path: Path) -> None:
    """A flat object: each metric's ratio under its name, its two figures under `.ours` and `.theirs`."""
    numbers: dict[str, float] = {}
    for metric in metrics:
        ratio = _ratio(results, metric)
        if ratio is not None:
            numbers[metric.name] = ratio
        if results.has(metric.ours):
            numbers[f"{metric.name}.ours"] = results.median(metric.ours)
        if results.has(metric.theirs):
            numbers[f"{metric.name}.theirs"] = results.median(metric.theirs)
    numbers["bench.wall_seconds"] = wall_seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: round(value, 4) for name, value in numbers.items()}, indent=2) + "\n")


def selected(prefix: str) -> list[Metric]:
    return [metric for metric in METRICS if metric.name.startswith(prefix)]


def _ratio(results: Results, metric: Metric) -> float | None:
    if not (results.has(metric.ours) and results.has(metric.theirs)):
        return None
    return results.median(metric.ours) / results.median(metric.theirs)


def _shown(results: Results, series: str) -> str:
    return _number(results.median(series)) if results.has(series) else "-"


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"
