"""The same change to many executions: those named, or all that match a filter, in chunks, with a progress bar."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask, missing, resolve
from flowfabric.cli._filters import Filter
from flowfabric.cli._program import NO, complain, confirm, in_words, tell
from flowfabric.errors import FlowFabricError, NotFound

if TYPE_CHECKING:
    from flowfabric.engine import Engine
    from flowfabric.values.ids import ExecutionId

Doubt = Callable[["Engine", Sequence["ExecutionId"]], Awaitable[str]]
Change = Callable[["Engine", Sequence["ExecutionId"]], Awaitable[Sequence[Any]]]
_CHUNK = 500
_ONE = {"children": "child"}
# Beyond this many matches the question says "more than".
_COUNTED = 100_000


@dataclass
class _Tally:
    done: int = 0
    unchanged: int = 0
    refused: list[FlowFabricError] = field(default_factory=list)

    def add(self, verdicts: Sequence[Any]) -> None:
        for verdict in verdicts:
            if isinstance(verdict, FlowFabricError):
                self.refused.append(verdict)
            elif getattr(verdict, "was_cancelled", False):
                self.unchanged += 1
            else:
                self.done += 1


def change(
    ids: list[str] | None, wanted: Filter, what: Change, *, verb: str, participle: str, yes: bool, json: bool,
    dsn: str | None, doubt: Doubt | None = None, also: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """Change the executions named or, once the user has confirmed, all that match.

    `doubt` returns the question to ask before those named are changed, or nothing. `also` counts what the change did to
    other executions.
    """
    if bool(ids) == bool(wanted):
        both = "; not both" if ids else ""
        raise typer.Exit(complain(f"say what to {verb}: ids, or a filter such as --state{both}"))

    async def work(engine: Engine) -> _Tally | None:
        if ids:
            return await _named(engine, ids, what, doubt, yes=yes)
        return await _matching(engine, wanted, what, verb=verb, yes=yes)

    tally = ask(dsn, work)
    if tally is None:
        return
    if json:
        _output.document(
            {
                participle: tally.done,
                **({"unchanged": tally.unchanged} if tally.unchanged else {}),
                **(also or {}),
                "refused": [
                    {"execution_id": e.execution_id, "kind": e.kind, "problem": in_words(e)} for e in tally.refused
                ],
            }
        )
    elif ids and len(ids) == 1 and tally.refused:
        raise typer.Exit(tell(tally.refused[0]))
    else:
        others = [
            f"{number} {_ONE.get(name, name) if number == 1 else name}"
            for name, number in (also or {}).items()
            if number
        ]
        _output.say(f"{tally.done} {participle}" + (f", with {' and '.join(others)}" if others else ""))
        if tally.unchanged:
            _output.note(f"{tally.unchanged} {'was' if tally.unchanged == 1 else 'were'} {participle} before")
        for problem, count in Counter(_without_id(error) for error in tally.refused).most_common(10):
            _output.note(f"{count} refused: {_output.printable(problem)}")
    if tally.refused:
        raise typer.Exit(NO)


def _without_id(error: FlowFabricError) -> str:
    words = in_words(error)
    return words if error.execution_id is None else words.replace(f"{error.execution_id}: ", "")


async def _named(engine: Engine, ids: list[str], what: Change, doubt: Doubt | None, *, yes: bool) -> _Tally:
    tally = _Tally()
    targets = []
    for text in ids:
        try:
            targets.append(await resolve(engine, text))
        except NotFound as error:
            tally.refused.append(error)
    if doubt is not None and (question := await doubt(engine, targets)):
        confirm(question, yes=yes)
    for start in range(0, len(targets), _CHUNK):
        verdicts = list(await what(engine, targets[start : start + _CHUNK]))
        for place, verdict in enumerate(verdicts):
            if isinstance(verdict, NotFound):
                verdicts[place] = await missing(engine, targets[start + place])
        tally.add(verdicts)
    return tally


async def _matching(engine: Engine, wanted: Filter, what: Change, *, verb: str, yes: bool) -> _Tally | None:
    # Leave out executions created after the question: they are not in the number the user confirms.
    now = datetime.fromtimestamp(await engine.server_time_ms() / 1000 + 0.001, UTC)
    wanted = wanted.replace(created_before=min(now, wanted.arguments.get("created_before", now)))
    count = 0
    with _output.busy("counting"):
        async for page in wanted.pages(engine):
            count += len(page.items)
            if count > _COUNTED:
                break
    if count == 0:
        _output.note("no execution matches")
        return _Tally()
    is_more = count > _COUNTED
    shown = f"more than {_COUNTED:,}" if is_more else f"{count:,}"
    confirm(f"{verb} {shown} execution{'' if count == 1 else 's'}?", yes=yes)
    tally = _Tally()
    with _Progress(verb, None if is_more else count) as progress:
        async for page in wanted.pages(engine, size=_CHUNK):
            if page.items:
                tally.add(await what(engine, [one.execution_id for one in page.items]))
                progress.advance(len(page.items))
    return tally


class _Progress:
    """A progress bar on standard error, if that is a terminal."""

    def __init__(self, verb: str, total: int | None) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.progress import (  # noqa: PLC0415 - slow to import
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                console=_output.console(stderr=True),
            )  # fmt: skip
            self._task = self._bar.add_task(verb, total=total)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)
