"""`flowfabric lanes`: show lanes; pause, drain, disable or resume them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from flowfabric.cli import _completion, _output
from flowfabric.cli._database import ask, lane_names, near
from flowfabric.cli._options import Dsn, Json, Wide
from flowfabric.cli._output import Column
from flowfabric.cli._program import Group, default_of
from flowfabric.errors import NotFound
from flowfabric.values.lane import LaneState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowfabric.engine import Engine
    from flowfabric.values.held import HeldCount
    from flowfabric.values.lane import LaneStats

app = typer.Typer(cls=Group, help="Show lanes; pause, drain, disable or resume them.", invoke_without_command=True)

Names = Annotated[
    list[str],
    typer.Argument(metavar="LANE...", help="The lanes.", autocompletion=_completion.lanes, show_default=False),
]
New = Annotated[bool, typer.Option("--new", help="Also for a lane to which nothing was submitted yet.")]
Chosen = Annotated[
    list[str] | None,
    typer.Argument(metavar="[LANE]...", help="Only these.", autocompletion=_completion.lanes, show_default=False),
]
_NAMED = 5  # limits that a row names
HEADERS = (
    Column("LANE", cut=16), Column("STATE"), Column("READY"), Column("OLDEST"), Column("DELAYED"),
    Column("WAITING_CHILDREN", cut=9), Column("RUNNING"),
)  # fmt: skip


@app.command()
@default_of(app)
def stats(lanes: Chosen = None, wide: Wide = False, json: Json = False, dsn: Dsn = None) -> None:
    """Show how many executions wait and run in each lane, and how long the oldest has waited."""

    async def work(engine: Engine) -> None:
        found = await engine.lane_stats(lanes or None)
        known = {one.lane_id for one in found}
        for lane in lanes or ():
            if lane not in known:
                raise await _unknown(engine, lane)
        held = [one for one in await engine.count_held() if one.lane_id in known]
        if json:
            _output.document({"lanes": found, "held": held})
        else:
            _output.table(*table(found, held), wide=wide)

    ask(dsn, work)


def table(found: Sequence[LaneStats], held: Sequence[HeldCount]) -> tuple[list[Column], list[list[Any]]]:
    """Lanes as a table, with what limits hold back if they do."""
    rows: list[list[Any]] = []
    for one in found:
        own = [each for each in held if each.lane_id == one.lane_id]
        named = ", ".join(f"{name} {count:,}" for name, count in _by_name(own)[:_NAMED])
        rows.append(
            [
                one.lane_id, one.state, one.depth, one.oldest_age, one.delayed, one.waiting_children, one.running,
                *([sum(each.count for each in own) or None, named] if held else []),
            ]
        )  # fmt: skip
    return [*HEADERS, *([Column("HELD"), Column("BY", cut=14, drop=1)] if held else [])], rows


def _by_name(held: Sequence[HeldCount]) -> list[tuple[str, int]]:
    """How many executions each limit holds, most first. Budgets of single runs, which are named by an id, are one."""
    counts: Counter[str] = Counter()
    for one in held:
        counts["own budgets" if one.what == "budget" and _is_id(one.name) else one.name] += one.count
    return counts.most_common()


def _is_id(name: str) -> bool:
    try:
        return str(UUID(name)) == name
    except ValueError:
        return False


@app.command()
def pause(lanes: Names, new: New = False, json: Json = False, dsn: Dsn = None) -> None:
    """Pause lanes: they accept submissions, but workers claim nothing."""
    _set(lanes, LaneState.PAUSED, new=new, json=json, dsn=dsn)


@app.command()
def resume(lanes: Names, new: New = False, json: Json = False, dsn: Dsn = None) -> None:
    """Resume lanes: they accept submissions, and workers claim them."""
    _set(lanes, LaneState.ACTIVE, new=new, json=json, dsn=dsn)


@app.command()
def drain(lanes: Names, new: New = False, json: Json = False, dsn: Dsn = None) -> None:
    """Drain lanes: they refuse submissions, and workers claim the rest."""
    _set(lanes, LaneState.DRAINING, new=new, json=json, dsn=dsn)


@app.command()
def disable(lanes: Names, new: New = False, json: Json = False, dsn: Dsn = None) -> None:
    """Disable lanes: they refuse submissions, and workers claim nothing."""
    _set(lanes, LaneState.DISABLED, new=new, json=json, dsn=dsn)


def _set(lanes: list[str], state: LaneState, *, new: bool = False, json: bool, dsn: str | None) -> None:
    async def work(engine: Engine) -> None:
        known = await lane_names(engine)
        for lane in lanes:
            # The engine would create a lane for a misspelt name.
            if lane not in known and not new:
                raise await _unknown(engine, lane, may_be_new=True)
        changed = []
        for lane in lanes:
            before = await engine.set_lane_state(lane, state)
            changed.append({"lane_id": lane, "before": before, "state": state})
            if not json:
                _output.say(f"{lane} is {state}" + ("" if before is not state else " already"))
        if json:
            _output.document({"lanes": changed})

    ask(dsn, work)


async def _unknown(engine: Engine, lane: str, *, may_be_new: bool = False) -> NotFound:
    known = await lane_names(engine)
    hint = near(lane, known)
    if not hint:
        hint = f"there are {', '.join(known[:10])}" if known else "there are none yet"
        hint += "; --new if nothing was submitted to it yet" if may_be_new else ""
    return NotFound("lane", _output.printable(lane), detail=hint)
