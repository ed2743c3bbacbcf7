"""The table of README.md: every contestant one row, all figures of one run, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import flowfabric as ff
from benchmarks.contestants import version
from benchmarks.harness import Results

_PER = 20_000
_NOTHING = "\N{EN DASH}"


@dataclass(frozen=True)
class _Column:
    heading: str
    series: Sequence[str]  # without the row's prefix; several are shown with a slash between them
    decimals: int = 0
    times: int = 1


_COLUMNS = (
    _Column("one by one /s", ("submit_one",)),
    _Column("batched /s", ("submit_many",)),
    _Column("drain, 1 / 2 processes /s", ("drain1", "drain2")),
    _Column("idle latency, p50 / p99 ms", ("latency", "latency.p99"), decimals=1),
    _Column("5 steps, runs/s", ("steps",)),
    _Column("WAL B per job", ("drain1.wal",)),
    _Column(f"dead rows per {_PER:,}", ("drain1.dead",), times=_PER),
    _Column("bytes stored per job", ("drain1.stored",)),
)
# The prefix of a row's series, and how it is called. `steps` of the raw loop share their commits.
_ROWS = {
    "raw": "raw loop",
    "task": f"**flowfabric {ff.__version__}**, default worker",
    "pgqueuer": f"pgqueuer {version('pgqueuer')}",
    "awa": f"awa-pg {version('awa-pg')}",
    "procrastinate": f"procrastinate {version('procrastinate')}",
    "absurd": f"absurd {version('absurd-sdk')}",
    "dbos": f"DBOS {version('dbos')}",
}
_SERIES = {"raw.steps": "raw.steps_shared"}


def cells() -> dict[str, str]:
    """Every series of the table by the name of its cell: `table.pgqueuer.drain1`."""
    return {
        f"table.{row}.{name}": _SERIES.get(f"{row}.{name}", f"{row}.{name}")
        for row in _ROWS
        for column in _COLUMNS
        for name in column.series
    }


def markdown(results: Results, about: Sequence[str]) -> str:
    lines = [
        "| | " + " | ".join(column.heading for column in _COLUMNS) + " |",
        "|---|" + "---:|" * len(_COLUMNS),
        *(
            f"| {name} | " + " | ".join(_cell(results, row, column) for column in _COLUMNS) + " |"
            for row, name in _ROWS.items()
        ),
        "",
        *about,
    ]
    return "\n".join(lines) + "\n"


def _cell(results: Results, row: str, column: _Column) -> str:
    names = [_SERIES.get(f"{row}.{name}", f"{row}.{name}") for name in column.series]
    if not any(map(results.has, names)):
        return _NOTHING
    return " / ".join(_figure(results, name, column) for name in names)


def _figure(results: Results, series: str, column: _Column) -> str:
    if not results.has(series):
        return _NOTHING
    value = results.median(series) * column.times
    if column.decimals:
        return f"{value:.{column.decimals}f}"
    # Three digits are what such a run can tell.
    digits = max(0, len(str(int(abs(value)))) - 3)
    return f"{round(value, -digits):,.0f}"


def write_markdown(results: Results, about: Sequence[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(results, about))
