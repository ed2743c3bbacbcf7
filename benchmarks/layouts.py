"""Which tables hold an execution? The candidates of docs/decisions/0002-storage-layout.md, measured.

Each candidate is a file in `layouts/` with the same functions: create_many, claim, complete, store_finished.
Run it with `python -m benchmarks.layouts`; it starts its own Postgres unless `--dsn` names one.

Three situations:

    plain    an empty database
    pinned   another session has been idle in a REPEATABLE READ transaction since before the jobs were
             created, so nothing that dies can be cleaned away
    full     finished executions are already stored
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import asyncpg
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.jobs import payload, uuid7
from benchmarks.server import Server, running_server
from benchmarks.stolen import Stolen, load

_FILES = Path(__file__).with_name("layouts")
_CREATE_BATCH = 500
_CLAIM_BATCH = 100
_PAYLOAD = payload(200)
T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    name: str
    title: str

    @property
    def database(self) -> str:
        return f"layout_{self.name}"

    def sql(self) -> str:
        return (_FILES / "common.sql").read_text() + (_FILES / f"{self.name}.sql").read_text()

    def scan(self) -> str:
        """The scan of the claim function, as a statement of its own."""
        return self.sql().split("/* scan */")[1].split("/* end */")[0].replace("p_limit", str(_CLAIM_BATCH))


CANDIDATES = (
    Candidate("update_in_place", "1 wide row updated in place, partial index"),
    Candidate("three_rows", "2 input, state row and ready row apart"),
    Candidate("moving_tokens", "3 token moves: ready, lease, ended"),
    Candidate("ready_row", "4 one row and a ready row"),
    Candidate("ready_row_floor", "5 one row, a ready row and a floor"),
)


@dataclass(frozen=True)
class Figures:
    """One measurement, or the medians of several."""

    create_per_second: float
    drain_per_second: float
    wal_bytes_per_job: float
    dead_per_job: float
    hot_share: float
    claim_p50_ms: float
    claim_p99_ms: float
    stolen: float

    @classmethod
    def median(cls, measured: Sequence[Figures]) -> Figures:
        return cls(**{name: statistics.median(getattr(one, name) for one in measured) for name in asdict(measured[0])})


@dataclass(frozen=True)
class Counters:
    """What Postgres counts about the user tables of a database."""

    updated: int
    updated_hot: int
    dead: int


class Run:
    """One candidate in its own database, with the connections that work on it."""

    def __init__(self, server: Server, candidate: Candidate, connections: int) -> None:
        self.server = server
        self.candidate = candidate
        self.connections = connections
        self.pool: list[asyncpg.Connection] = []
        self.plan = ""

    async def open(self) -> None:
        dsn = await self.server.create_database(self.candidate.database)
        self.pool = [await asyncpg.connect(dsn) for _ in range(self.connections)]
        await self.pool[0].execute(self.candidate.sql())

    async def close(self) -> None:
        for connection in self.pool:
            await connection.close()
        await self.server.drop_database(self.candidate.database)

    async def pin(self) -> asyncpg.Connection:
        """A session that has a transaction id and a snapshot, and then does nothing."""
        connection = await asyncpg.connect(self.server.database_dsn(self.candidate.database))
        await connection.execute("begin isolation level repeatable read")
        await connection.execute("select pg_current_xact_id()")
        await connection.execute("select count(*) from event")
        return connection

    async def store_finished(self, count: int) -> None:
        await self.pool[0].execute("select store_finished($1)", count, timeout=600)
        await self.pool[0].execute(
            """
            insert into event (at, kind, partition, id, lease_id, epoch, attempt_id, attempt, worker)
            select now(), kind, n % 256, gen_random_uuid(), gen_random_uuid(), 1, gen_random_uuid(), 1, 'w'
            from generate_series(1, $1::int) as n, unnest(array['acquired', 'completed']) as kind
            """,
            count,
            timeout=600,
        )
        await self.pool[0].execute("vacuum analyze", timeout=600)

    async def measure(self, jobs: int, *, explain: bool = False) -> Figures:
        """Create `jobs` executions, claim and complete all. With `explain`, keep the plan at half-time."""
        await self.server.settle()
        await self._flush_statistics()
        before = await self._counters()
        wal_before = await self._wal()
        with Stolen() as stolen:
            create_seconds = await self._create(jobs)
            claims: list[float] = []
            if explain:
                drain_seconds = await self._drain(jobs // 2, claims)
                self.plan = await self._explain()
                drain_seconds += await self._drain(jobs - jobs // 2, claims)
            else:
                drain_seconds = await self._drain(jobs, claims)
        await self._flush_statistics()
        after = await self._counters()
        wal = await self._wal() - wal_before
        updated = after.updated - before.updated
        claims.sort()
        return Figures(
            create_per_second=jobs / create_seconds,
            drain_per_second=jobs / drain_seconds,
            wal_bytes_per_job=wal / jobs,
            dead_per_job=(after.dead - before.dead) / jobs,
            hot_share=(after.updated_hot - before.updated_hot) / updated if updated else 0.0,
            claim_p50_ms=claims[len(claims) // 2] * 1000,
            claim_p99_ms=claims[int(len(claims) * 0.99)] * 1000,
            stolen=stolen.share,
        )

    async def _create(self, jobs: int) -> float:
        ids = [uuid7() for _ in range(jobs)]
        batches = [ids[start : start + _CREATE_BATCH] for start in range(0, jobs, _CREATE_BATCH)]
        started = time.perf_counter()
        for batch in batches:
            await self.pool[0].execute(
                "select create_many($1::smallint[], $2::uuid[], $3::bytea[])",
                [one.bytes[-1] for one in batch],
                batch,
                [_PAYLOAD] * len(batch),
            )
        return time.perf_counter() - started

    async def _drain(self, jobs: int, claims: list[float]) -> float:
        left = jobs

        async def work(connection: asyncpg.Connection, worker: str) -> None:
            nonlocal left
            while left > 0:
                # Taken before the answer is known, so that two connections never ask for the same last batch.
                wanted = min(_CLAIM_BATCH, left)
                left -= wanted
                started = time.perf_counter()
                rows = await connection.fetch("select * from claim($1, $2)", wanted, worker)
                claims.append(time.perf_counter() - started)
                done = await connection.fetchval(
                    "select complete($1, $2, $3)",
                    [row["partition"] for row in rows],
                    [row["id"] for row in rows],
                    [row["lease_id"] for row in rows],
                )
                if not len(rows) == done == wanted:
                    raise RuntimeError(f"asked for {wanted} jobs, claimed {len(rows)}, completed {done}")

        started = time.perf_counter()
        await asyncio.gather(*(work(one, f"worker-{number}") for number, one in enumerate(self.pool)))
        return time.perf_counter() - started

    async def _explain(self) -> str:
        async with self.pool[0].transaction():
            for what in ("seqscan", "bitmapscan", "sort", "hashjoin", "mergejoin"):
                await self.pool[0].execute(f"set local enable_{what} = off")
            scan = self.candidate.scan()
            if "v_floor" in scan:
                floor = await self.pool[0].fetchrow(
                    "select urgency, created_at, id from ready_floor order by urgency, created_at, id limit 1"
                )
                assert floor is not None
                for column, value in floor.items():
                    scan = scan.replace(f"v_floor.{column}", f"'{value}'")
            lines = await self.pool[0].fetch(f"explain (analyze, buffers, costs off) {scan}")
        return "\n".join(line[0] for line in lines)

    async def _wal(self) -> int:
        """What our sessions wrote; before PostgreSQL 18 what the whole server wrote, vacuum included."""
        if self.pool[0].get_server_version().major < 18:
            return int(await self.pool[0].fetchval("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))
        written = 0
        for connection in self.pool:
            written += int(await connection.fetchval("select wal_bytes from pg_stat_get_backend_wal(pg_backend_pid())"))
        return written

    async def _flush_statistics(self) -> None:
        for connection in self.pool:
            await connection.execute("select pg_stat_force_next_flush()")

    async def _counters(self) -> Counters:
        row = await self.pool[0].fetchrow(
            "select coalesce(sum(n_tup_upd), 0), coalesce(sum(n_tup_hot_upd), 0),"
            " coalesce(sum(n_dead_tup), 0) from pg_stat_user_tables"
        )
        assert row is not None
        return Counters(updated=int(row[0]), updated_hot=int(row[1]), dead=int(row[2]))


class Report:
    """Prints as it goes, and keeps everything for the file."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.numbers: dict[str, dict[str, float]] = {}

    def progress(self, situation: str, candidate: Candidate, figures: Figures) -> None:
        self.console.print(
            f"{situation:<12} {candidate.name:<16} create {figures.create_per_second:>7,.0f}/s"
            f"  drain {figures.drain_per_second:>7,.0f}/s  p99 {figures.claim_p99_ms:6.1f} ms"
            f"  stolen {figures.stolen:.1%}",
            highlight=False,
        )

    def table(self, situation: str, title: str, measured: Iterable[tuple[Candidate, Figures]]) -> None:
        table = Table(title=title, title_justify="left")
        table.add_column("candidate")
        for heading in (
            "create/s",
            "jobs/s",
            "WAL B/job",
            "dead/job",
            "HOT",
            "claim p50 ms",
            "p99 ms",
            "stolen",
        ):
            table.add_column(heading, justify="right")
        for candidate, figures in measured:
            self.numbers[f"{situation}.{candidate.name}"] = asdict(figures)
            table.add_row(
                candidate.title,
                f"{figures.create_per_second:,.0f}",
                f"{figures.drain_per_second:,.0f}",
                f"{figures.wal_bytes_per_job:,.0f}",
                f"{figures.dead_per_job:.2f}",
                f"{figures.hot_share:.0%}",
                f"{figures.claim_p50_ms:.2f}",
                f"{figures.claim_p99_ms:.2f}",
                f"{figures.stolen:.1%}",
            )
        self.console.print(table)


async def plain(server: Server, options: argparse.Namespace, report: Report) -> None:
    measured: dict[Candidate, list[Figures]] = {candidate: [] for candidate in options.candidates}
    for repetition in range(options.repetitions):
        for candidate in _rotated(options.candidates, repetition):
            run = Run(server, candidate, options.connections)
            await run.open()
            measured[candidate].append(await run.measure(options.jobs))
            await run.close()
            report.progress("plain", candidate, measured[candidate][-1])
    title = f"plain: {options.jobs:,} jobs, medians of {options.repetitions}"
    report.table("plain", title, ((one, Figures.median(all_)) for one, all_ in measured.items()))


async def pinned(server: Server, options: argparse.Namespace, report: Report) -> None:
    """Each database has its own idle transaction: a snapshot in one database does not hold back another."""
    measured: dict[Candidate, list[Figures]] = {candidate: [] for candidate in options.candidates}
    late: dict[Candidate, list[Figures]] = {candidate: [] for candidate in options.candidates}
    plans: dict[Candidate, str] = {}
    for repetition in range(options.long_repetitions):
        # By half of the candidates, so that who came first in one repetition comes late in the next.
        turns = _rotated(options.candidates, repetition * (len(options.candidates) // 2))
        runs = [Run(server, candidate, options.connections) for candidate in turns]
        pins = []
        opened = time.monotonic()
        for run in runs:
            await run.open()
            pins.append(await run.pin())
        for run in runs:
            measured[run.candidate].append(await run.measure(options.pinned_jobs, explain=True))
            plans[run.candidate] = run.plan
            report.progress("pinned", run.candidate, measured[run.candidate][-1])
        await asyncio.sleep(max(0.0, opened + options.hold - time.monotonic()))
        for run in runs:
            late[run.candidate].append(await run.measure(options.jobs))
            report.progress("pinned late", run.candidate, late[run.candidate][-1])
        held = time.monotonic() - opened
        for run, pin in zip(runs, pins, strict=True):
            await pin.close()
            await run.close()
        report.console.print(f"transactions held for {held:.0f} s", highlight=False)
    title = f"pinned: {options.pinned_jobs:,} jobs, medians of {options.long_repetitions}"
    report.table("pinned", title, ((one, Figures.median(all_)) for one, all_ in measured.items()))
    title = f"pinned late: {options.jobs:,} more jobs, the transaction held for {options.hold} s or longer"
    report.table("pinned_late", title, ((one, Figures.median(all_)) for one, all_ in late.items()))
    for candidate, plan in plans.items():
        report.console.print(f"\n{candidate.title}: the scan of a claim, half of the jobs done", highlight=False)
        report.console.print(plan, highlight=False, markup=False, soft_wrap=True)


async def full(server: Server, options: argparse.Namespace, report: Report) -> None:
    measured: dict[Candidate, list[Figures]] = {candidate: [] for candidate in options.candidates}
    runs = [Run(server, candidate, options.connections) for candidate in options.candidates]
    for run in runs:
        await run.open()
        await run.store_finished(options.stored)
    for repetition in range(options.repetitions):
        for run in _rotated(runs, repetition):
            measured[run.candidate].append(await run.measure(options.jobs))
            report.progress("full", run.candidate, measured[run.candidate][-1])
    for run in runs:
        await run.close()
    title = f"full: {options.jobs:,} jobs, {options.stored:,} stored, medians of {options.repetitions}"
    report.table("full", title, ((one, Figures.median(all_)) for one, all_ in measured.items()))


def _rotated(items: Sequence[T], by: int) -> list[T]:
    start = by % len(items)
    return [*items[start:], *items[:start]]


_SITUATIONS = {"plain": plain, "pinned": pinned, "full": full}


def _arguments() -> argparse.Namespace:
    names = {candidate.name: candidate for candidate in CANDIDATES}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layouts", description=__doc__.split("\n")[0])
    parser.add_argument("--dsn", help="a running server, as superuser; databases named layout_* are made and dropped")
    parser.add_argument("--situations", nargs="+", choices=_SITUATIONS, default=list(_SITUATIONS))
    parser.add_argument("--candidates", nargs="+", choices=names, default=list(names))
    parser.add_argument("--jobs", type=int, default=50_000, help="per repetition, plain and full")
    parser.add_argument("--pinned-jobs", type=int, default=200_000)
    parser.add_argument("--stored", type=int, default=1_000_000, help="finished executions in the full situation")
    parser.add_argument("--hold", type=int, default=120, help="least seconds of the idle transaction")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--long-repetitions", type=int, default=2, help="of the pinned situation")
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/layouts.json"))
    options = parser.parse_args()
    options.candidates = [names[name] for name in options.candidates]
    return options


async def _main(server: Server, options: argparse.Namespace) -> None:
    started = time.monotonic()
    report = Report(Console(width=130))
    settings = await server.settings()
    report.console.print(", ".join(f"{name} {value}" for name, value in settings.items()), highlight=False)
    for situation in options.situations:
        report.console.print(f"{situation}: {load()} before", highlight=False)
        await _SITUATIONS[situation](server, options, report)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report.numbers, indent=2) + "\n")
    report.console.print(f"wall time {time.monotonic() - started:.0f} s, figures in {options.out}", highlight=False)


if __name__ == "__main__":
    chosen = _arguments()
    with running_server(chosen.dsn) as running:
        uvloop.run(_main(running, chosen))
