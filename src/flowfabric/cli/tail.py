"""`flowfabric tail`, `summary`: follow what an execution emits, and read its summary document."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _output, _waiting
from flowfabric.cli._database import ask, missing, resolve
from flowfabric.cli._loading import AppOption, load_app
from flowfabric.cli._options import Dsn, Id, Json
from flowfabric.cli._program import NO, exit_with
from flowfabric.contracts import json_form
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.values.state import State

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from flowfabric.engine import Engine
    from flowfabric.values.ids import ExecutionId
    from flowfabric.values.stream import Frame, Gap, KeepAlive, NewAttempt, StreamItem

Attempt = Annotated[
    int | None,
    typer.Option("--attempt", metavar="N", help="Only this attempt; 1 is the first.", show_default=False),
]
# The state whose colour a kind of frame has.
_COLOURS = {"stderr": "failed", "event": "active", "blob": "delayed"}


After = Annotated[
    str | None,
    typer.Option("--after", metavar="CURSOR", help="Continue after this item of --json.", show_default=False),
]
Live = Annotated[bool, typer.Option("--live/--no-live", help="Include best-effort output.")]
Types = Annotated[
    list[str] | None,
    typer.Option("--type", metavar="TYPE", help="Only frames of this type.", show_default=False),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Write the payloads as they are, and nothing else; no changes of summaries.")
]
_SILENCE = 2.0  # seconds of silence before the command says why


def tail(
    execution: Id,
    after: After = None,
    attempt: Attempt = None,
    live: Live = True,
    types: Types = None,
    raw: Raw = False,
    app: AppOption = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Follow the output of an execution until it ends; output from before is shown first.

    Exits with 1 if the execution ends without completing.
    """
    codecs = None if app is None else load_app(app).codecs
    shown = printer_of(types, raw=raw, as_json=json)

    async def work(engine: Engine) -> int:
        from flowfabric.cli.wait import tell_unsuccessful  # noqa: PLC0415
        from flowfabric.client.following import Follower  # noqa: PLC0415

        target = await resolve(engine, execution)
        silences = _Silences(engine, target)
        follower = Follower(target, after=after, attempt=_index(attempt), live=live, keep_alive=_SILENCE)
        try:
            await follower.on(engine, codecs).open()
            await show_all(follower.items(), shown, silences.explain)
        except NotFound:
            raise await missing(engine, target) from None
        outcome = (await engine.read_outcomes([target])).get(target)
        if outcome is None or outcome.state in (None, State.COMPLETED):
            return 0
        tell_unsuccessful(target, outcome, codecs)
        return NO

    exit_with(ask(dsn, work, notifications=True))


def printer_of(types: Sequence[str] | None, *, raw: bool, as_json: bool) -> Printer:
    """What shows the items, as the options say."""
    if raw and as_json:
        raise InvalidInput("both are given", field="--raw", allowed="--raw or --json")
    return (_Raw if raw else _Lines if as_json else _Text)(types or ())


async def show_all(
    items: AsyncIterator[StreamItem], printer: Printer, explain: Callable[[], Awaitable[str | None]]
) -> None:
    """Show items until they end; in a silence, what `explain` returns."""
    from flowfabric.values.stream import KeepAlive  # noqa: PLC0415

    try:
        async for item in items:
            if not isinstance(item, KeepAlive):
                printer.show(item)
            elif (why := await explain()) is not None:
                printer.end()
                _output.note(f"flowfabric: {_output.printable(why)}")
    finally:
        printer.end()
        if printer.has_sealed:
            _output.note("(some output is encoded; give --app PKG.MOD:APP to read it)")


class _Silences:
    """Says once why nothing comes."""

    def __init__(self, engine: Engine, target: ExecutionId) -> None:
        self._engine = engine
        self._target = target
        self._said: str | None = None

    async def explain(self) -> str | None:
        """Return what the execution waits for, unless it was said before; None while it runs."""
        found = await self._engine.read_execution(self._target)
        if found is None or found.public_state is State.ACTIVE or found.public_state.is_terminal:
            return None
        why = _waiting.because(found.blocking_detail, found.blocking_reason)
        line = f"{self._target} is {found.public_state.value.replace('_', ' ')}" + (f": {why}" if why else "")
        if line == self._said:
            return None
        self._said = line
        return line


def summary(
    execution: Id,
    attempt: Attempt = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Print it again whenever it changes, until it ends.")
    ] = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Print the summary document of an execution, of its latest attempt."""

    async def work(engine: Engine) -> None:
        target = await resolve(engine, execution)
        index = _index(attempt)
        if await engine.read_execution_state(target) is None:
            raise await missing(engine, target)
        shown = await _print_summary(engine, target, index, None, as_json=json)
        if not watch:
            if shown is None and not json:
                _output.note("no summary")
            return
        from flowfabric.client.following import Follower  # noqa: PLC0415
        from flowfabric.values.stream import Frame  # noqa: PLC0415

        follower = Follower(target, attempt=index, live=False).on(engine, None)
        await follower.open()
        async for item in follower.items():
            if not isinstance(item, Frame) or item.mode == "summary":
                shown = await _print_summary(engine, target, index, shown, as_json=json)
        await _print_summary(engine, target, index, shown, as_json=json)

    ask(dsn, work)


async def _print_summary(
    engine: Engine, target: ExecutionId, index: int | None, shown: tuple[int, int] | None, *, as_json: bool
) -> tuple[int, int] | None:
    """Print the document unless it is the one shown; returns its attempt and version."""
    found = await engine.read_summary(target, index)
    key = None if found is None else (found.attempt_index, found.version)
    if key is None or found is None or key == shown:
        return shown
    facts = {
        "execution_id": target,
        "attempt": found.attempt_index + 1,
        "version": found.version,
        "first_applied_at": found.first_applied_at,
        "last_updated_at": found.last_updated_at,
        "document": found.document,
    }
    if as_json:
        _output.line(facts)
    else:
        _output.document(found.document)
        sys.stdout.flush()
    return key


def _index(attempt: int | None) -> int | None:
    if attempt is not None and not 1 <= attempt < 2**31:
        raise InvalidInput(f"got {attempt}", field="--attempt", allowed="1 or more")
    return None if attempt is None else attempt - 1


class Printer:
    """Shows items. Frames of other types than `types` are left out, if there are any."""

    def __init__(self, types: Sequence[str]) -> None:
        self._types = frozenset(types)
        self.has_sealed = False

    def show(self, item: StreamItem) -> None:
        """Show an item."""
        from flowfabric.values.stream import Frame  # noqa: PLC0415

        if isinstance(item, Frame):
            if self._types and _type(item) not in self._types:
                return
            self.has_sealed |= item.encoding is not None
            self.frame(item)
        else:
            self.other(item)

    def frame(self, frame: Frame) -> None:
        """Show a frame."""
        raise NotImplementedError

    def other(self, item: NewAttempt | Gap | KeepAlive) -> None:
        """Show an item that is not a frame."""

    def end(self) -> None:
        """End the line that is being written."""


def _type(frame: Frame) -> str:
    return "summary" if frame.mode == "summary" else frame.type


class _Raw(Printer):
    """The bytes of the payloads."""

    def frame(self, frame: Frame) -> None:
        if frame.mode != "summary":
            sys.stdout.buffer.write(frame.payload)
            sys.stdout.buffer.flush()


class _Lines(Printer):
    """One line of JSON per item."""

    def frame(self, frame: Frame) -> None:
        facts: dict[str, Any] = {
            "status": "frame",
            "cursor": frame.cursor,
            "attempt": frame.attempt_index + 1,
            "at": frame.at,
            "type": _type(frame),
            "kind": frame.kind,
            "mode": frame.mode,
            "payload": json_form.to_json(frame.payload) if frame.encoding is None else {"encoding": frame.encoding},
        }
        for name in ("correlation_id", "seq", "summary_version", "node"):
            if getattr(frame, name) is not None:
                facts[name] = getattr(frame, name)
        _output.line(facts)

    def other(self, item: NewAttempt | Gap | KeepAlive) -> None:
        from flowfabric.values.stream import Gap, NewAttempt  # noqa: PLC0415

        facts: dict[str, Any] = {"cursor": item.cursor}
        if isinstance(item, NewAttempt):
            facts |= {"status": "new_attempt", "attempt": item.attempt_index + 1, "reason": item.reason}
        elif isinstance(item, Gap):
            facts |= {"status": "gap", "missing": item.missing}
        if getattr(item, "node", None) is not None:
            facts["node"] = item.node  # type: ignore[union-attr]
        _output.line(facts)


class _Text(Printer):
    """Text as it was emitted, everything else a line each. Output of a flow has the node before each line."""

    def __init__(self, types: Sequence[str]) -> None:
        super().__init__(types)
        self._is_inside_line = False
        self._node: str | None = None

    def frame(self, frame: Frame) -> None:
        if frame.node != self._node:
            self.end()
            self._node = frame.node
        if frame.encoding is not None:
            self._line([(f"{_output.printable(_type(frame))}: ", None), ("[sealed]", "skipped")])
        elif frame.kind in ("stdout", "stderr") and frame.mode != "summary":
            self._write(frame)
        else:
            text = _output.printable(" ".join(frame.text.split("\n")))
            self._line([(f"{_output.printable(_type(frame))}: ", _COLOURS.get(frame.kind)), (text, None)])

    def other(self, item: NewAttempt | Gap | KeepAlive) -> None:
        from flowfabric.values.stream import Gap, NewAttempt  # noqa: PLC0415

        if isinstance(item, NewAttempt):
            self.end()
            self._node = item.node
            why = "" if item.reason is None else f" ({item.reason.replace('_', ' ')})"
            self._line([(f"attempt {item.attempt_index + 1}{why}", "expired")])
        elif isinstance(item, Gap):
            self.end()
            self._node = item.node
            many = "some" if item.missing is None else f"{item.missing:,}"
            self._line([(f"{many} frames are no longer kept", "expired")])

    @property
    def _prefix(self) -> str:
        return "" if self._node is None else f"{_output.printable(self._node)}: "

    def _write(self, frame: Frame) -> None:
        text = _output.printable(frame.text)
        if not text:
            return
        if self._prefix:
            begun, ended = not self._is_inside_line, text.endswith("\n")
            lines = text.removesuffix("\n").split("\n")
            text = ("" if not begun else self._prefix) + f"\n{self._prefix}".join(lines) + ("\n" if ended else "")
        colour = _COLOURS.get(frame.kind)
        if colour is not None and sys.stdout.isatty():
            _output.console().print(_output.rich_line([(text, colour)]), end="", soft_wrap=True)
        else:
            print(text, end="")
        sys.stdout.flush()
        self._is_inside_line = not text.endswith("\n")

    def _line(self, pieces: list[tuple[str, str | None]]) -> None:
        self.end()
        _output.coloured([(self._prefix, None), *pieces] if self._prefix else pieces)
        sys.stdout.flush()

    def end(self) -> None:
        """End the line that is being written."""
        if self._is_inside_line:
            print(flush=True)
        self._is_inside_line = False
