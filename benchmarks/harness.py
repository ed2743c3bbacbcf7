"""How figures are taken: contestants alternate, medians count, repetitions the host disturbed are run again.

A contestant is a queue that can be filled and drained. A trial is anything that gives figures when it is run;
`Drain` makes one of a contestant. What the figures mean and which are wanted is in `metrics.py`.
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

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
    waits: int = 500
    flows: int = 2_000
    fans: int = 20
    graph_nodes: int = 10_000
    cancels: int = 30
    kills: int = 5
    payload_bytes: int = 200
    connections: int = 2
    stored: int = 1_000_000
    kept_empty: int = 50_000
    fired_timers: int = 6_000
    held_seconds: int = 120
    sustained_seconds: int = 180
    sustained_per_second: int = 2_000
    sustained_batch: int = 20
    repetitions: int = 5
    long_repetitions: int = 3  # of what takes more than half a minute

    def __str__(self) -> str:
        return (
            f"{self.jobs:,} jobs of {self.payload_bytes} bytes ({self.slow_jobs:,} for slow peers), "
            f"{self.connections} connections, {self.single_calls:,} single calls, {self.stored:,} stored, "
            f"{self.step_runs:,} runs of 5 steps ({self.slow_step_runs:,} for slow peers), {self.waits:,} waits, "
            f"{self.flows:,} flows of 10 nodes, {self.fans} of 1,002, {self.graph_nodes:,} nodes in a call, "
            f"{self.cancels} cancelled flows of 1,000, {self.kills} kills, "
            f"{self.sustained_per_second:,} submissions/s in calls of {self.sustained_batch} "
            f"for {self.sustained_seconds} s, {self.held_seconds} s of held transaction under load, "
            f"medians of {self.repetitions} ({self.long_repetitions} where a repetition takes more than 30 s)"
        )


FULL = Sizes()
QUICK = Sizes(
    jobs=10_000,
    slow_jobs=300,
    single_calls=500,
    step_runs=1_000,
    slow_step_runs=100,
    waits=100,
    flows=500,
    fans=5,
    cancels=10,
    kills=2,
    stored=50_000,
    kept_empty=5_000,
    fired_timers=1_000,
    held_seconds=10,
    sustained_seconds=10,
    repetitions=1,
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


@runtime_checkable
class Closing(Protocol):
    async def close(self) -> None:
        """Drop what a trial keeps over its repetitions."""


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
    """The samples by series. Every sample is also a line of `log`, so that a run that was cut can be resumed."""

    log: Path
    run: Mapping[str, object]  # what must be the same for a sample of an earlier run to count
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        self._keep(sample)
        line = {**self.run, "stolen": sample.stolen, "figures": dict(sample.figures)}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            log.write(json.dumps(line) + "\n")

    def begin(self) -> None:
        """Forget earlier runs."""
        self.log.unlink(missing_ok=True)

    def resume(self) -> None:
        """Take the samples of the run that was cut, if it measured the same commit with the same sizes."""
        if not self.log.exists():
            return
        for line in self.log.read_text().splitlines():
            found = json.loads(line)
            if all(found.get(name) == value for name, value in self.run.items()):
                self._keep(Sample(found["figures"], found["stolen"]))

    def _keep(self, sample: Sample) -> None:
        for name in sample.figures:
            self.samples.setdefault(name, []).append(sample)

    def count(self, series: Sequence[str]) -> int:
        """How many samples there are of a trial."""
        return min((len(self.samples.get(name, ())) for name in series), default=0)

    def has(self, series: str) -> bool:
        return series in self.samples

    def median(self, series: str) -> float:
        return statistics.median(sample.figures[series] for sample in self.samples[series])

    def most_stolen(self, *series: str | None) -> float:
        return max((sample.stolen for name in series if name for sample in self.samples.get(name, ())), default=0.0)


async def run_group(group: Group, results: Results, console: Console, sampled: Callable[[], None]) -> None:
    """Run every trial `repetitions` times, in turns, and call `sampled` after each.

    A run that the host disturbed is repeated, at most twice in a row. A trial that fails is reported and left out, so
    that the others still have their figures.
    """
    began = time.monotonic()
    failed: set[int] = set()
    for repetition in range(1, group.repetitions + 1):
        for number, trial in enumerate(group.trials):
            if number in failed or results.count(trial.series) >= repetition:
                continue
            try:
                await _run_trial(trial, f"{repetition}", results, console)
            except Exception:
                failed.add(number)
                console.print(f"[bold red]failed: {', '.join(trial.series)}")
                console.print(traceback.format_exc(), highlight=False, markup=False)
            sampled()
    for trial in group.trials:
        if isinstance(trial, Closing):
            await trial.close()
    if group.trials:
        names = " and ".join(trial.series[0] for trial in group.trials)
        console.print(f"{time.monotonic() - began:.0f} s for {names}", highlight=False)


async def _run_trial(trial: Trial, repetition: str, results: Results, console: Console) -> None:
    tries = [await trial.run()]
    while tries[-1].stolen > STOLEN_LIMIT and len(tries) < 3:
        _tell(console, f"{repetition}, again", tries[-1])
        tries.append(await trial.run())
    best = min(tries, key=lambda sample: sample.stolen)
    results.add(best)
    _tell(console, repetition, best)


def _tell(console: Console, repetition: str, sample: Sample) -> None:
    figures = "  ".join(f"{name} {number(value)}" for name, value in sample.figures.items())
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
            "" if metric.theirs is None else _shown(results, metric.theirs),
            metric.unit,
            "" if ratio is None or metric.theirs is None else f"{ratio:.2f}",
            "" if target is None else f"{target.bound} {target.value:g}",
            verdict,
            f"{results.most_stolen(metric.ours, metric.theirs):.1%}",
        )
    return shown


def write_json(
    results: Results, metrics: Sequence[Metric], cells: Mapping[str, str], about: Mapping[str, float], path: Path
) -> None:
    """Write a flat object: each metric's ratio under its name, its two figures under `.ours` and `.theirs`.

    `cells` are further series by the names they get. Lines of earlier runs with other prefixes stay, unless the sizes
    were others (`about` says which).
    """
    numbers = _earlier(path, about)
    numbers = {name: value for name, value in numbers.items() if not _is_ours(name, metrics, cells)}
    for metric in metrics:
        ratio = _ratio(results, metric)
        if ratio is not None:
            numbers[metric.name] = ratio
        for suffix, series in (("ours", metric.ours), ("theirs", metric.theirs)):
            if series is not None and results.has(series):
                numbers[f"{metric.name}.{suffix}"] = results.median(series)
    for name, series in cells.items():
        if results.has(series):
            numbers[name] = results.median(series)
    numbers.update(about)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_text(json.dumps({name: round(value, 4) for name, value in numbers.items()}, indent=2) + "\n")
    written.replace(path)


def _earlier(path: Path, about: Mapping[str, float]) -> dict[str, float]:
    try:
        found: dict[str, float] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if found.get("bench.quick") == about["bench.quick"] else {}


def _is_ours(name: str, metrics: Sequence[Metric], cells: Mapping[str, str]) -> bool:
    known = {metric.name for metric in metrics}
    return name in cells or name in known or name.removesuffix(".ours").removesuffix(".theirs") in known


def selected(prefix: str) -> list[Metric]:
    return [metric for metric in METRICS if metric.name.startswith(prefix)]


def _ratio(results: Results, metric: Metric) -> float | None:
    """Our figure over theirs; our figure itself where there is no other."""
    if not results.has(metric.ours):
        return None
    if metric.theirs is None:
        return results.median(metric.ours)
    if not results.has(metric.theirs):
        return None
    theirs = results.median(metric.theirs)
    return results.median(metric.ours) / theirs if theirs else None


def _shown(results: Results, series: str) -> str:
    return number(results.median(series)) if results.has(series) else "-"


def number(value: float) -> str:
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"
