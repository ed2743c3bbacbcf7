"""`flowfabric budgets`: show budgets and their ledgers; create, raise, set, bind, reset them; enter what was spent."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from flowfabric.cli import _binding, _completion, _output
from flowfabric.cli._database import ask, no_such, resolve, resolve_owner
from flowfabric.cli._grouped import grouped
from flowfabric.cli._live import Interval, live, parse_interval
from flowfabric.cli._options import Dsn, Json, Wide, parse_duration, parse_pair
from flowfabric.cli._output import Column
from flowfabric.cli._program import NO, Group, exit_with
from flowfabric.cli._waiting import client_of
from flowfabric.errors import InvalidInput
from flowfabric.values.page import everything

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta
    from uuid import UUID

    from flowfabric.engine import Engine
    from flowfabric.values.budget import BudgetStatus
    from flowfabric.values.spending import Mode

app = typer.Typer(
    cls=Group,
    help="Show budgets; create, raise, set, bind or reset them; enter what was spent.",
    invoke_without_command=True,
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The budget.", autocompletion=_completion.budgets, show_default=False)
]
Amounts = Annotated[
    list[str],
    typer.Argument(metavar="DIMENSION=AMOUNT...", help="Such as tokens=50000.", show_default=False),
]
Hard = Annotated[
    list[str] | None,
    typer.Option("--hard", metavar="DIMENSION=AMOUNT", help="A hard limit; 0 for none.", show_default=False),
]
Soft = Annotated[
    list[str] | None,
    typer.Option("--soft", metavar="DIMENSION=AMOUNT", help="A soft limit; 0 for none.", show_default=False),
]
Every = Annotated[
    str | None,
    typer.Option(
        "--every", metavar="DURATION", help="Begin again at 0 after each such period; 0 for never.", show_default=False
    ),
]
ModeOption = Annotated[
    str | None,
    typer.Option("--mode", metavar="MODE", help="strict, or warn: limits stop nothing.", show_default=False),
]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh the list until interrupted.")]
Exhausted = Annotated[bool, typer.Option("--exhausted", help="Only those whose limit is reached.")]
Runs = Annotated[bool, typer.Option("--runs", help="Also the budgets of single runs and flows.")]
_BAR = 16
_LEDGER = 50
_HELD = 10


@dataclass(frozen=True)
class _Wanted:
    """The limits, period and mode that the options name."""

    hard: Mapping[str, int]
    soft: Mapping[str, int]
    every: timedelta | None
    mode: Mode | None

    def __bool__(self) -> bool:
        return bool(self.hard or self.soft or self.mode or self.every is not None)

    @classmethod
    def of(cls, *, hard: list[str] | None, soft: list[str] | None, every: str | None, mode: str | None) -> _Wanted:
        if mode is not None and mode not in ("strict", "warn"):
            raise InvalidInput(f"got {mode!r}", field="--mode", allowed="strict, warn")
        return cls(
            hard=parse_amounts(hard or [], "--hard"),
            soft=parse_amounts(soft or [], "--soft"),
            every=None if every is None else parse_duration(every, "--every"),
            mode=cast("Mode | None", mode),
        )


_with_limits = grouped("wanted", {"hard": Hard, "soft": Soft, "every": Every, "mode": ModeOption}, _Wanted.of)


@app.callback()
def _default(
    ctx: typer.Context,
    exhausted: Exhausted = False,
    runs: Runs = False,
    watch: Watch = False,
    interval: Interval = "1s",
    wide: Wide = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Show budgets; create, raise, set, bind or reset them. Without a command: list."""
    if ctx.invoked_subcommand is None:
        list_(exhausted=exhausted, runs=runs, watch=watch, interval=interval, wide=wide, json=json, dsn=dsn)


@app.command("list")
def list_(
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Only names that begin with this.", show_default=False)
    ] = "",
    exhausted: Exhausted = False,
    runs: Runs = False,
    watch: Watch = False,
    interval: Interval = "1s",
    wide: Wide = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List budgets: what is used (#), held (+) and left (.) of each limit, and how many executions wait for it."""
    pause = parse_interval(interval)

    async def work(engine: Engine) -> None:
        async def read() -> list[BudgetStatus]:
            found = await everything(
                lambda after, size: engine.list_budgets(
                    prefix=prefix or None, exhausted=exhausted or None, cursor=after, limit=size
                )
            )
            return [one for one in found if runs or one.owner_id is None]

        async def draw() -> Any:
            return _output.fitted(*table(await read(), await waiting(engine)))

        if watch and not json and _output.terminal_width() is not None:
            await live(engine, draw, pause)
        while True:
            found = await read()
            if json and watch:
                _output.line({"budgets": found})
            elif json:
                _output.document({"budgets": found})
            elif found:
                _output.table(*table(found, await waiting(engine)), wide=wide)
            else:
                _output.note("no budget matches" if prefix or exhausted else "there are no budgets")
            if not watch:
                return
            sys.stdout.flush()
            await asyncio.sleep(pause)

    ask(dsn, work)


async def waiting(engine: Engine) -> dict[Any, int]:
    """How many executions each limit holds."""
    counts: dict[Any, int] = {}
    for one in await engine.count_held():
        counts[one.limit_id] = counts.get(one.limit_id, 0) + one.count
    return counts


def table(found: Sequence[BudgetStatus], held_back: dict[Any, int]) -> tuple[list[Column], list[tuple[object, ...]]]:
    """Budgets as a table, one row per dimension."""
    columns = [
        Column("BUDGET", cut=12), Column("DIMENSION", cut=8), Column("USED"), Column("HELD", drop=2), Column("LIMIT"),
        Column("", drop=1), Column("SOFT", drop=5), Column("WAITING"), Column("RESET", drop=3), Column("MODE", drop=4),
    ]  # fmt: skip
    rows: list[tuple[object, ...]] = []
    for one in found:
        facts: tuple[object, ...] = (held_back.get(one.budget_id), one.next_reset_at, one.enforcement_mode)
        for place, dimension in enumerate(_dimensions(one) or [""]):
            hard, soft = one.hard_limits.get(dimension, 0), one.soft_limits.get(dimension, 0)
            used, held = one.usage.get(dimension, 0), one.held.get(dimension, 0)
            rows.append(
                (
                    "" if place else one.name, dimension, _amount(used) if dimension else "",
                    _amount(held) if held else "", _limit(hard) if dimension else "", bar(used, held, hard),
                    _amount(soft) if soft else "", *(("", "", "") if place else facts),
                )
            )  # fmt: skip
    return columns, rows


def _dimensions(one: BudgetStatus) -> list[str]:
    return sorted({*one.hard_limits, *one.soft_limits, *one.usage, *one.held})


def _amount(number: int) -> str:
    return f"{number:,}"


def _limit(number: int) -> str:
    return f"{number:,}" if number else "none"


def bar(used: int, held: int, limit: int) -> str:
    """What is used and held of a limit, as a line of marks."""
    if not limit:
        return ""
    full = min(_BAR, -(-used * _BAR // limit))
    both = min(_BAR, -(-(used + held) * _BAR // limit))
    percent = min(999, (used + held) * 100 // limit)
    return f"[{'#' * full}{'+' * (both - full)}{'.' * (_BAR - both)}] {percent:>3} %"


@app.command()
def show(name: Name, wide: Wide = False, json: Json = False, dsn: Dsn = None) -> None:
    """Show a budget: its limits, what is used and held, what waits for it, and its ledger by execution."""

    async def work(engine: Engine) -> None:
        one = await find(engine, name)
        ledger = (await engine.list_spend(one.budget_id, limit=_LEDGER)).items
        held = (await engine.list_held(one.budget_id, limit=_HELD)).items
        bound = await _binding.bindings(engine, one.budget_id)
        if json:
            _output.document({"budget": one, "ledger": list(ledger), "waiting": list(held), "bindings": bound})
            return
        _output.pairs(
            [
                ("name", one.name),
                ("id", one.budget_id),
                ("of run", one.owner_id),
                ("scope", " ".join(part for part in (one.scope_type, one.scope_id) if part)),
                ("mode", one.enforcement_mode),
                ("exhausted by", one.exhausted_by),
                ("reset every", one.reset_interval),
                ("next reset", one.next_reset_at),
                ("last reset", one.last_reset_at),
                ("refused calls", one.breach_count or None),
                ("last refused", one.last_breach_at and f"{_output.when(one.last_breach_at)}, {one.last_breach_dim}"),
                ("above soft limit", one.soft_breach_count or None),
                ("created", one.created_at),
                ("changed", one.last_updated_at),
            ]
        )
        _output.heading("Dimensions")
        _output.table(
            ["DIMENSION", "USED", "HELD", "LIMIT", "", "SOFT", Column("OVERRUN", drop=1)],
            [
                (
                    each, _amount(one.usage.get(each, 0)), _amount(one.held.get(each, 0)),
                    _limit(one.hard_limits.get(each, 0)),
                    bar(one.usage.get(each, 0), one.held.get(each, 0), one.hard_limits.get(each, 0)),
                    _limit(one.soft_limits.get(each, 0)), _amount(one.overrun.get(each, 0)),
                )
                for each in _dimensions(one)
            ],
        )  # fmt: skip
        _binding.show(bound)
        if held:
            _output.heading("Waiting for it, first in line first")
            _output.table(
                ["ID", Column("KIND", cut=12), Column("LANE", cut=8, drop=1), "SINCE", "NEEDS"],
                [
                    (each.execution_id, each.execution_kind, each.lane_id, each.blocked_at, needs(each.needs))
                    for each in held
                ],
                wide=wide,
            )
        if ledger:
            _output.heading(f"Ledger{f', the first {_LEDGER} entries' if len(ledger) == _LEDGER else ''}")
            _output.table(
                ["EXECUTION", "DIMENSION", "AMOUNT", "PERIOD", Column("RECORDED", drop=1)],
                [
                    (
                        each.execution_id, each.dimension, _amount(each.amount),
                        "this" if each.generation == one.generation else "earlier", each.recorded_at,
                    )
                    for each in ledger
                ],
                wide=wide,
            )  # fmt: skip

    ask(dsn, work)


def needs(amounts: dict[str, int]) -> str:
    """The amounts that an execution waits for."""
    return ", ".join(f"{name}={amount:,}" for name, amount in sorted(amounts.items()))


@app.command()
@_with_limits
def create(name: Name, *, wanted: _Wanted, json: Json = False, dsn: Dsn = None) -> None:
    """Create a budget. One that exists is left as it is, and the command fails."""

    async def work(engine: Engine) -> int:
        client = client_of(engine)
        is_new = name not in await engine.find_budgets([name])
        made = await client.create_budget(
            name,
            hard={key: value for key, value in wanted.hard.items() if value},
            soft={key: value for key, value in wanted.soft.items() if value},
            every=wanted.every,
            mode=wanted.mode or "strict",
        )
        _say(made, f"{_output.printable(name)} created" if is_new else "", as_json=json)
        if not is_new and not json:
            _output.note(f"there is a budget {_output.printable(name)} already; `flowfabric budgets set` changes it")
        return 0 if is_new else NO

    exit_with(ask(dsn, work))


@app.command("raise")
def raise_(name: Name, amounts: Amounts, json: Json = False, dsn: Dsn = None) -> None:
    """Add to hard limits, or take away (tokens=-500). Executions that there is room for continue."""
    changes = parse_amounts(amounts, "DIMENSION=AMOUNT", signed=True)

    async def work(engine: Engine) -> None:
        one = await engine.update_budget((await find(engine, name)).budget_id, raise_by=changes)
        _say(one, _limits(one, changes), as_json=json)

    ask(dsn, work)


@app.command("set")
@_with_limits
def set_(name: Name, *, wanted: _Wanted, json: Json = False, dsn: Dsn = None) -> None:
    """Set limits, period or mode; what is not given stays. A limit below what is used exhausts the budget."""
    if not wanted:
        raise InvalidInput("nothing to set", field="set", allowed="--hard, --soft, --every or --mode")

    async def work(engine: Engine) -> None:
        one = await engine.update_budget(
            (await find(engine, name)).budget_id,
            hard=wanted.hard or None,
            soft=wanted.soft or None,
            reset_interval=wanted.every,
            enforcement_mode=wanted.mode,
        )
        _say(one, _limits(one, {**wanted.hard, **wanted.soft}), as_json=json)

    ask(dsn, work)


@app.command()
def reset(name: Name, json: Json = False, dsn: Dsn = None) -> None:
    """Begin a new period: usage is 0, what is held stays held. Executions that wait for it continue."""

    async def work(engine: Engine) -> None:
        done = await engine.reset_budget((await find(engine, name)).budget_id)
        if json:
            _output.document({"name": name, "next_reset_at": done.next_reset_at})
        else:
            after = f"; next reset at {_output.when(done.next_reset_at)}" if done.next_reset_at else ""
            _output.say(f"{_output.printable(name)} is reset{after}")

    ask(dsn, work)


@app.command()
def spend(
    name: Name,
    execution: Annotated[str, typer.Argument(metavar="ID", help="The execution that spent it.", show_default=False)],
    amounts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIMENSION=AMOUNT]...", help="Such as cost_micros=125000.", show_default=False),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="Count it once for this key within a day.", show_default=False),
    ] = None,
    release: Annotated[
        bool, typer.Option("--release", help="Take back what the ledger has for the execution in this period.")
    ] = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Enter what an execution spent in the ledger, or take it back. Exits with 1 if it does not fit."""
    if release == bool(amounts):
        raise InvalidInput("give amounts, or --release", field="spend", allowed="one of them")
    deltas = parse_amounts(amounts or [], "DIMENSION=AMOUNT")

    async def work(engine: Engine) -> int:
        from flowfabric.values.budget import AlreadyApplied, HardBreach  # noqa: PLC0415

        one = await find(engine, name)
        target = await resolve(engine, execution)
        if release:
            await engine.release_budget(one.budget_id, target)
            words, code = f"released what {target} spent of {_output.printable(name)}", 0
        else:
            answer = await engine.record_spend(one.budget_id, target, deltas, idempotency_key=key)
            words, code = "counted", 0
            if isinstance(answer, AlreadyApplied):
                words = "this key was counted before; nothing changed"
            elif isinstance(answer, HardBreach):
                words, code = (
                    f"does not fit: {answer.dimension} {answer.current_usage:,} of {answer.hard_limit:,} used", NO
                )  # fmt: skip
        _say(await engine.get_budget_status(one.budget_id), words, as_json=json)
        return code

    exit_with(ask(dsn, work))


async def find(engine: Engine, name: str) -> BudgetStatus:
    """The budget of this name, or of the run or flow with this id or part of one; `NotFound` suggests similar names."""
    found = await engine.find_budgets([name])
    if name not in found and (owner := await resolve_owner(engine, name)) is not None:
        found = await engine.find_budgets([str(owner)])
    for budget_id in found.values():
        return await engine.get_budget_status(budget_id)
    known = [one.name for one in (await engine.list_budgets(limit=1000)).items if one.owner_id is None]
    raise no_such("budget", name, known, none="there are none yet")


def parse_amounts(texts: Sequence[str], field: str, *, signed: bool = False) -> dict[str, int]:
    """Amounts by dimension from texts like tokens=50000; underscores may group digits."""
    found: dict[str, int] = {}
    for text in texts:
        name, amount = parse_pair(text, field, "DIMENSION=AMOUNT, such as tokens=50000")
        digits = amount.removeprefix("+").removeprefix("-").replace("_", "")
        if not digits.isdecimal() or not digits.isascii() or (amount.startswith("-") and not signed):
            allowed = "an integer" if signed else "an integer from 0"
            raise InvalidInput(f"got {text!r}", field=field, allowed=f"DIMENSION=AMOUNT, the amount {allowed}")
        if name in found:
            raise InvalidInput(f"{name!r} is given twice", field=field, allowed="once")
        found[name] = -int(digits) if amount.startswith("-") else int(digits)
    return found


def _limits(one: BudgetStatus, dimensions: dict[str, int]) -> str:
    words = [f"{each} {one.usage.get(each, 0):,} of {_limit(one.hard_limits.get(each, 0))}" for each in dimensions]
    return f"{_output.printable(one.name)}: {', '.join(words) or 'changed'}"


def _say(one: BudgetStatus, words: str, *, as_json: bool) -> None:
    if as_json:
        _output.document({"budget": one})
    elif words:
        _output.say(words)


async def _id(engine: Engine, name: str) -> UUID:
    return (await find(engine, name)).budget_id


_binding.add_commands(app, "budget", _id)
