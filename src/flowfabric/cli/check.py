"""`flowfabric check` and `flowfabric export`: whether code fits the executions that wait for it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask, missing, resolve
from flowfabric.cli._filters import Filter, filtered
from flowfabric.cli._loading import AppName, load_app
from flowfabric.cli._options import Dsn, Id, Json
from flowfabric.cli._output import Column
from flowfabric.cli._program import NO
from flowfabric.contracts import json_form
from flowfabric.errors import NotFound
from flowfabric.values.durations import counted
from flowfabric.values.state import State

if TYPE_CHECKING:
    from flowfabric.app.app import App
    from flowfabric.engine import Engine
    from flowfabric.values.history import Fit, Fits
    from flowfabric.values.ids import ExecutionId

_WAITING = [State.WAITING, State.DELAYED, State.SUSPENDED, State.RESUMABLE, State.WAITING_CHILDREN, State.RATE_LIMITED]
_SAMPLED_ABOVE = 10_000
_CHUNK = 200
_WORDS: dict[Fits, str] = {
    "continues": "would continue",
    "left": "left to another version",
    "stops": "would stop",
    "fails": "would fail",
    "unknown": "unclear",
}


@dataclass
class _Chosen:
    """The executions to check, and those that there is no code to compare with here."""

    ids: list[ExecutionId] = field(default_factory=list)
    count: int = 0  # of those that match and that workers with this app would claim
    left: Counter[tuple[str, int]] = field(default_factory=Counter)  # by kind and version: to workers of that version
    unknown: Counter[str] = field(default_factory=Counter)  # by kind: the app does not have it


@filtered
def check(
    app: AppName,
    *,
    wanted: Filter,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, max=1_000_000, help="Check this many.", show_default=False),
    ] = None,
    own: Annotated[
        bool,
        typer.Option("--own", help="Only the tasks of this app, where other apps of the deployment have others."),
    ] = False,
    every: Annotated[bool, typer.Option("--all", "-a", help="Also list the executions that would continue.")] = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Run the handlers of waiting executions against what they recorded, and list those that this code does not fit.

    Nothing is recorded, leased or submitted, and no step is called; code of the handler between them does run. Above
    10,000 executions a random sample is checked. Executions of other versions are left to workers of these versions.
    Exits with 1 if some would not continue, or if executions of tasks wait that the app does not have.
    """
    loaded = load_app(app)

    async def work(engine: Engine) -> tuple[list[Fit], _Chosen]:
        filters = wanted.or_states(_WAITING)
        if own and "kinds" not in filters.arguments:
            filters = filters.replace(kinds=sorted(loaded.tasks))
        chosen = await _choose(engine, loaded, filters, limit or _SAMPLED_ABOVE)
        return await _checked(engine, loaded, chosen.ids), chosen

    fits, chosen = ask(dsn, work)
    if json:
        _document(fits, chosen, every=every)
    else:
        _tell(fits, chosen, every=every)
    if chosen.unknown or any(not fit.is_good for fit in fits):
        raise typer.Exit(NO)


async def _choose(engine: Engine, app: App, wanted: Filter, most: int) -> _Chosen:
    """Choose at most `most` of the matching executions, each as likely as the others."""
    from flowfabric.worker.dry_run import is_left  # noqa: PLC0415 - loads the worker

    chosen = _Chosen()
    with _output.busy("reading"):
        async for page in wanted.pages(engine, size=500):
            for one in page.items:
                task = app.tasks.get(one.execution_kind)
                if task is None:
                    chosen.unknown[one.execution_kind] += 1
                elif one.version is not None and is_left(task, one.version):
                    chosen.left[one.execution_kind, one.version] += 1
                else:
                    chosen.count += 1
                    if len(chosen.ids) < most:
                        chosen.ids.append(one.execution_id)
                    elif (place := random.randrange(chosen.count)) < most:  # noqa: S311 - a sample, not a secret
                        chosen.ids[place] = one.execution_id
    return chosen


async def _checked(engine: Engine, app: App, ids: list[ExecutionId]) -> list[Fit]:
    from flowfabric.worker.dry_run import DryRuns, read_histories  # noqa: PLC0415 - loads the worker

    fits: list[Fit] = []
    async with DryRuns(app) as runs:
        with _output.busy("checking"):
            for first in range(0, len(ids), _CHUNK):
                fits += [await runs.check(one) for one in await read_histories(engine, ids[first : first + _CHUNK])]
    return fits


def _document(fits: list[Fit], chosen: _Chosen, *, every: bool) -> None:
    tally = Counter(fit.verdict for fit in fits)
    tally["left"] += chosen.left.total()
    _output.document(
        {
            "items": [json_form.to_json(fit) for fit in fits if every or not fit.is_good],
            "checked": len(fits),
            "matching": chosen.count,
            "verdicts": {verdict: tally[verdict] for verdict in _WORDS},
            "left": [
                {"kind": kind, "version": version, "count": count}
                for (kind, version), count in sorted(chosen.left.items())
            ],
            "not_in_app": dict(sorted(chosen.unknown.items())),
        }
    )


def _tell(fits: list[Fit], chosen: _Chosen, *, every: bool) -> None:
    from flowfabric.values.history import how_to_fit  # noqa: PLC0415

    tally = Counter(fit.verdict for fit in fits)
    shown = sorted((fit for fit in fits if every or not fit.is_good), key=lambda fit: (fit.kind, fit.verdict))
    if shown:
        rows = [[fit.execution_id, fit.kind, _WORDS[fit.verdict], _in_line(fit)] for fit in shown]
        _output.table(["ID", "KIND", "VERDICT", Column("WHY", folds=True)], rows)
    if fits:
        words = ", ".join(f"{tally[verdict]} {words}" for verdict, words in _WORDS.items() if tally[verdict])
        sample = f" of {chosen.count:,} that match" if chosen.count > len(fits) else ""
        _output.note(f"checked {len(fits)}{sample}: {words}")
    elif not chosen.left and not chosen.unknown:
        _output.note("no waiting execution has started: nothing to check")
    if stops := [fit.why or "" for fit in fits if fit.verdict == "stops"]:
        _output.note(how_to_fit(*stops))
    for (kind, version), count in sorted(chosen.left.items()):
        _output.note(f"{counted(count, 'waiting execution')} of {kind} left to workers of version {version}")
    for kind, count in sorted(chosen.unknown.items()):
        _output.note(f"{counted(count, 'waiting execution')} of {kind}, which this app does not have")
    if chosen.unknown:
        name = min(chosen.unknown)
        _output.note(f'a renamed task keeps its executions with name="{name}"; --own leaves out tasks of other apps')


def _in_line(fit: Fit) -> str:
    """Why, without the traceback."""
    from flowfabric.client.failure import parse_failure  # noqa: PLC0415

    error, message, _ = parse_failure(fit.why)
    return message if error is None or error.startswith("flowfabric.") else f"{error}: {message}".rstrip(": ")


def export(execution: Id, dsn: Dsn = None) -> None:
    """Print what an unfinished execution recorded, with its arguments, for `check_recorded` of the testing kit."""

    from flowfabric.worker.dry_run import read_histories  # noqa: PLC0415 - loads the worker

    async def work(engine: Engine) -> None:
        target = await resolve(engine, execution)
        found = await read_histories(engine, [target])
        if found:
            _output.say(found[0].encode().decode().rstrip())
            return
        info = await engine.read_execution_info(target)
        if info is None:
            raise await missing(engine, target)
        why = "it has ended" if info.public_state.is_terminal else "no worker has started it"
        raise NotFound("record of execution", str(target), detail=f"{why}: there is nothing that other code must fit")

    ask(dsn, work)
