"""Changes the SQL one line at a time and shows which tests notice.

python scripts/mutants.py                    30 mutants of lease checks, 30 of transitions, 20 of limits, 20 of rules
python scripts/mutants.py --list             print them, run nothing
python scripts/mutants.py --again            run those that survived once more
python scripts/mutants.py --only lock_holders --count 100 --seed 2

A mutant is a function with one changed line, replaced in the template that all test databases are copied from. The
tests of its chapter run as `make test` runs them. Those of the mutants that no test noticed run once more, as `make
test-all` runs them. Results go to build/mutants.jsonl; a later run continues after the last of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import asyncpg

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.conftest import running_server  # noqa: E402
from tests.support import in_database, system_programs  # noqa: E402

SQL = ROOT / "src/flowfabric/_postgres/sql"
RESULTS = ROOT / "build/mutants.jsonl"
KILLED, KILLED_BY_FULL, SURVIVED = "killed", "killed by the full suite only", "survived"
OPEN, BROKEN = "survived the short suite", "does not load"
COUNTS = {"leases": 30, "transitions": 30, "limits": 20, "audit": 20}

GROUPS = {
    "leases": (
        "leases/lock_holders leases/refuse_holders leases/renew leases/claim leases/start_attempts leases/revoke_lease"
        " leases/mark_expired leases/offer_lost leases/end_capped leases/hold_one leases/holds_lease leases/progress"
        " leases/give_back leases/stop_changed queue/take_ready queue/cover_ready queue/raise_floors grants/reclaim"
        " grants/claim_one"
    ),
    "transitions": (
        "executions/create_executions executions/complete executions/fail executions/cancel_executions"
        " executions/replay executions/schedule_retries executions/end_executions executions/block executions/unblock"
        " waits/park waits/suspend waits/write_suspension waits/deliver_signal waits/record_signal waits/settle_wait"
        " waits/close_suspension waits/resume waits/resume_execution waits/expire_suspension flows/resolve_edges"
        " flows/decide flows/cascade flows/skip_members flows/apply_edges flows/cancel_children duties/run_timers"
        " duties/due_executions"
    ),
    "limits": (
        "limits/take_admitted limits/quota_rooms limits/lock_heads limits/move_aside limits/promote_limited"
        " limits/unblock_limited limits/hold_slots limits/record_slots limits/give_slots quotas/check_admission"
        " quotas/release_admission quotas/reconcile_quotas budgets/use_budgets budgets/apply_usage"
        " budgets/collect_reservations budgets/settle_in budgets/end_reservations budgets/exhausted_budgets"
        " budgets/pause_for_budget"
    ),
    "audit": " ".join(f"audit/{path.stem}" for path in sorted(SQL.glob("functions/audit/*.sql"))),
}

# Per chapter: the tests, those first that notice most in the shortest time.
TESTS = {
    "leases": "refusals retry defects transitions grants events lanes suspend park steps versions log_epochs"
    " stop_changed workers old_snapshots concurrency bounds growth interleavings model",
    "executions": "transitions refusals retry create defects flows events timeline lanes suspend stop_changed children"
    " answers erase bindings owned_budgets flow_defects flow_scenarios bounds concurrency interleavings model",
    "waits": "suspend signals tokens suspension_ends suspension_defects suspension_races park park_states conditions"
    " answers transitions steps children suspension_interleavings model",
    "flows": "flows flow_defects flow_scenarios flow_passing flow_queues children flow_model children_model"
    " flow_interleavings flow_stress",
    "duties": "retry suspension_ends defects park transitions erase schedules children streams answers bounds"
    " old_snapshots concurrency model",
    "limits": "quotas bindings budget_admission budget_pauses limit_duties limit_sets limit_races scheduler"
    " owned_budgets limit_audit budgets reservations scheduling_defects quota_interleavings budget_interleavings"
    " quota_model budget_model quota_stress",
    "budgets": "budgets reservations budget_pauses budget_defects budget_admission owned_budgets limit_duties"
    " limit_races limit_audit bindings budget_interleavings budget_model",
    "audit": "execution_audit flow_audit suspension_audit limit_audit budgets quotas bindings streams workers tokens"
    " children steps grants park_states stop_changed transitions model",
}
TESTS["grants"] = f"grants scheduler bindings limit_races {TESTS['leases']}"
TESTS["quotas"] = TESTS["limits"]
TESTS["queue"] = f"ready_floor {TESTS['leases']}"

STATES = "'waiting' 'delayed' 'active' 'suspended' 'resumable' 'completed' 'failed' 'cancelled' 'expired' 'skipped'"
FLIPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "=": "<>", "<>": "="}
# A comparison of keys joins rows; with any other nothing works at all, and every test would notice.
_KEY = re.compile(
    r"\w+\.(partition|id|ctid|tid|flow_id|\w+_id|upstream|downstream|number|generation|created_at|rank|route) = "
)
_CONDITION = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))+?(?= and | or |\)|$|;| then| loop)"


@dataclass(frozen=True)
class Mutant:
    """A file of SQL with one line changed."""

    group: str
    file: str
    line: int
    rule: str
    before: str
    after: str

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.file}\0{self.line}\0{self.before}\0{self.after}".encode()).hexdigest()[:10]

    def sql(self) -> str:
        lines = (SQL / "functions" / f"{self.file}.sql").read_text().splitlines()
        lines[self.line - 1] = self.after
        return "\n".join(lines)


def changes(code: str, in_set: bool) -> Iterator[tuple[str, str]]:
    """Yield the name of a rule and the line it makes, for every place where a rule applies."""

    def each(rule: str, pattern: str, put: str | dict[str, str]) -> Iterator[tuple[str, str]]:
        for match in re.finditer(pattern, code):
            new = put if isinstance(put, str) else put[match[0].strip()]
            yield rule, f"{code[: match.start()]}{new}{code[match.end() :]}"

    for match in re.finditer(r"(?<= )(<>|<=|>=|[<>=])(?= )", code):
        operand = code[: match.end() + 1].rpartition(" and ")[2].split()[-2:]
        is_key = _KEY.match(" ".join(operand) + " ")
        is_assigned = in_set and match[1] == "=" and not re.search(r"\b(when|where|and|or)\b", code[: match.start()])
        if not is_key and not is_assigned:
            yield "compare", f"{code[: match.start()]}{FLIPPED[match[1]]}{code[match.end() :]}"
    for match in re.finditer(r"\b(and|or) (?=(" + _CONDITION + "))", code):
        if re.search(r"between \S+ $", code[: match.start()]) or _KEY.match(match[2]):
            continue
        other = "or" if match[1] == "and" else "and"
        yield "and/or", f"{code[: match.start()]}{other}{code[match.end(1) :]}"
        yield "drop condition", f"{code[: match.start()].rstrip(' ')}{code[match.start() + len(match[0] + match[2]) :]}"
    yield from each("null", r"\bis null\b", "is not null")
    yield from each("null", r"\bis not null\b", "is null")
    yield from each("distinct", r"\bis distinct from\b", "is not distinct from")
    yield from each("exists", r"\bnot exists\b", "exists")
    yield from each("exists", r"(?<!not )\bexists\b", "not exists")
    yield from each("not", r"(?<!is )\bnot (?=coalesce|flowfabric|[a-z]+\.|[pv]_|\()", "")
    yield from each("one", r" [+-] 1\b(?!\d)", "")
    states = STATES.split()
    for state, other in zip(states, states[1:] + states[:1], strict=True):
        yield from each("state", state, other)
    yield from each("perform", r"(?<=    )perform flowfabric\.[^;]*\);$", "null;")
    yield from each("lock", r" ?\bfor (no key )?update( of \w+)?( skip locked)?", "")
    if in_set:
        parts = re.split(r",(?![^()]*\))", code)
        for place, part in enumerate(parts):
            if re.match(r"\s*(set )?\w+ = ", part) and part.count("(") == part.count(")") and "case" not in part:
                rest = [*parts[:place], *parts[place + 1 :]]
                if part.lstrip().startswith("set "):
                    rest[place : place + 1] = [" set" + one for one in rest[place : place + 1]]
                yield "assignment", ",".join(rest)


def mutants_of(group: str, file: str) -> Iterator[Mutant]:
    """Yield every mutant of a file that differs from it in the body of a function."""
    in_body = in_set = False
    for number, line in enumerate((SQL / "functions" / f"{file}.sql").read_text().splitlines(), 1):
        if line.count("$$") % 2:
            in_body = not in_body
        code, comment = re.match(r"(.*?)(\s*--.*)?$", line).groups()  # type: ignore[union-attr]
        if not in_body and line.count("$$") != 2:
            continue
        if re.match(r"\s*(update .* )?set ", code):
            in_set = True
        elif re.match(r"\s*(from|where|returning|\)|select|insert|end)\b", code):
            in_set = False
        for rule, after in changes(code, in_set):
            yield Mutant(group, file, number, rule, line, after + (comment or ""))
        in_set = in_set and not code.endswith(";")


def shuffled(group: str, seed: int, only: str | None) -> list[Mutant]:
    """Return the mutants of a group in the order they are tried: of each file in turn, however long the files are."""
    draw = random.Random(f"{group} {seed}")  # noqa: S311 - the same mutants in every run
    files = [file for file in GROUPS[group].split() if only is None or re.search(only, file)]
    queues = []
    for file in draw.sample(files, len(files)):
        found = list(dict.fromkeys(mutants_of(group, file)))
        queues.append(draw.sample(found, len(found)))
    return [queue[turn] for turn in range(max(map(len, queues), default=0)) for queue in queues if turn < len(queue)]


async def replace(servers: list[str], sql: str) -> None:
    """Replace functions in the template of every server. They lose their settings, which are applied again."""
    for dsn in servers:
        connection = await asyncpg.connect(in_database(dsn, "ff_template"))
        try:
            async with connection.transaction():
                await connection.execute(sql)
                await connection.execute((SQL / "settings.sql").read_text())
        finally:
            await connection.close()


def killer(folder: Path, chapter: str, *options: str) -> str | None:
    """Run the tests of a chapter; return the test that fails and why, or None."""
    files = [f"tests/sql/test_{name}.py" for name in TESTS[chapter].split()]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", f"--basetemp={folder / 'run'}", *options, *files],
        cwd=ROOT,
        # As one process of several, it shares the servers of this one.
        env=os.environ | {"PYTEST_XDIST_WORKER": "mutants", "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode == 0:
        return None
    if failed := re.search(r"^(FAILED|ERROR) tests/sql/(.*)", run.stdout, re.MULTILINE):
        return failed[2]
    raise SystemExit(f"pytest ended with {run.returncode}:\n{run.stdout[-3000:]}{run.stderr[-3000:]}")


def result_of(mutant: Mutant, folder: Path, servers: list[str], is_full: bool) -> dict[str, str | int | None]:
    """Run the tests against a mutant."""
    began = time.monotonic()
    original = (SQL / "functions" / f"{mutant.file}.sql").read_text()
    try:
        asyncio.run(replace(servers, mutant.sql()))
    except asyncpg.PostgresError as error:
        return {"result": BROKEN, "killer": str(error)}
    try:
        found = killer(folder, mutant.file.partition("/")[0], *(("--full", "--servers=all") if is_full else ()))
    finally:
        asyncio.run(replace(servers, original))
    result = (SURVIVED if is_full else OPEN) if found is None else (KILLED_BY_FULL if is_full else KILLED)
    return {"result": result, "killer": found, "seconds": round(time.monotonic() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Change the SQL one line at a time and show which tests notice.")
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--count", type=int, help="mutants of each group")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="a pattern for the files")
    parser.add_argument("--minutes", type=float, default=50, help="start no mutant after this time")
    parser.add_argument("--short", action="store_true", help="leave the full suite out")
    parser.add_argument("--again", action="store_true", help="forget that mutants survived")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    options = parser.parse_args()
    stop = time.monotonic() + options.minutes * 60
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.touch()
    known = {row["key"]: row for row in map(json.loads, RESULTS.read_text().splitlines())}
    if options.again:
        known = {key: row for key, row in known.items() if row["result"] in (KILLED, BROKEN)}
    mutants = {group: shuffled(group, options.seed, options.only) for group in options.groups}
    counts = {group: options.count or COUNTS[group] for group in options.groups}
    if options.list:
        for mutant in (one for group in options.groups for one in mutants[group][: counts[group]]):
            print(f"{mutant.key} {mutant.file}:{mutant.line} {mutant.rule}\n- {mutant.before}\n+ {mutant.after}")
        return

    tried: list[Mutant] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack, RESULTS.open("a") as out:
        folder = Path(name)
        which = ["wheel", "system"] if system_programs() else ["wheel"]
        servers = [stack.enter_context(running_server(folder, one)) for one in which]

        def run(mutant: Mutant, is_full: bool) -> None:
            row = asdict(mutant) | {"key": mutant.key} | result_of(mutant, folder, servers, is_full)
            known[mutant.key] = row
            print(json.dumps(row), file=out, flush=True)
            print(f"{row['result']}: {mutant.file}:{mutant.line} {mutant.rule}  {row['killer'] or ''}", flush=True)

        for group in options.groups:
            left = counts[group]
            for mutant in mutants[group]:
                if mutant.key not in known and left and time.monotonic() < stop:
                    run(mutant, is_full=False)
                if left and mutant.key in known and known[mutant.key]["result"] != BROKEN:
                    left -= 1
                    tried.append(mutant)
        for mutant in tried:
            if known[mutant.key]["result"] == OPEN and not options.short and time.monotonic() < stop:
                run(mutant, is_full=True)

    for group in options.groups:
        results = [known[mutant.key]["result"] for mutant in tried if mutant.group == group]
        print(group, {result: results.count(result) for result in sorted(set(results))})
    for mutant in tried:
        if known[mutant.key]["result"] != KILLED:
            print(
                f"\n{known[mutant.key]['result']}: {mutant.file}.sql:{mutant.line}\n- {mutant.before}\n+ {mutant.after}"
            )


if __name__ == "__main__":
    main()
