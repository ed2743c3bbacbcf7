"""`flowfabric tail`, `summary`: follow what an execution emits, and read its summary document."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask, missing, resolve
from flowfabric.cli._loading import AppOption, load_app
from flowfabric.cli._options import Dsn, Id, Json
from flowfabric.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from uuid import UUID

    from flowfabric.contracts.codecs import Codecs
    from flowfabric.engine import Engine
    from flowfabric.values.ids import ExecutionId
    from flowfabric.values.stream import Frame, StreamItem

Attempt = Annotated[
    int | None,
    typer.Option("--attempt", metavar="N", help="Only this attempt; 1 is the first.", show_default=False),
]
# The state whose colour a kind of frame has.
_COLOURS = {"stderr": "failed", "event": "active", "blob": "delayed"}


def tail(
    execution: Id,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="CURSOR", help="Continue after this item of --json.", show_default=False),
    ] = None,
    attempt: Attempt = None,
    live: Annotated[bool, typer.Option("--live/--no-live", help="Include best-effort output.")] = True,
    raw: Annotated[bool, typer.Option("--raw", help="Write the payloads as they are, and nothing else.")] = False,
    app: AppOption = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Follow the output of an execution until it ends; output from before is shown first."""
    if raw and json:
        raise InvalidInput("both are given", field="--raw", allowed="--raw or --json")
    codecs = None if app is None else load_app(app).codecs

    async def work(engine: Engine) -> None:
        from flowfabric.client.following import Follower  # noqa: PLC0415

        target = await resolve(engine, execution)
        follower = Follower(target, after=after, attempt=_index(attempt), live=live)
        page = _Raw() if raw else _Lines(target, codecs) if json else _Page()
        try:
            async for item in follower.items(engine, codecs):
                page.show(item)
        except NotFound:
            raise await missing(engine, target) from None
        finally:
            page.end()

    ask(dsn, work)


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

        async for item in Follower(target, attempt=index, live=False).items(engine, None):
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


class _Raw:
    """The bytes of the payloads."""

    def show(self, item: StreamItem) -> None:
        from flowfabric.values.stream import Frame  # noqa: PLC0415

        if isinstance(item, Frame):
            sys.stdout.buffer.write(item.payload)
            sys.stdout.buffer.flush()

    def end(self) -> None:
        """Nothing is left to write."""


class _Lines:
    """One line of JSON per item."""

    def __init__(self, execution_id: UUID, codecs: Codecs | None) -> None:
        self._execution_id = execution_id
        self._codecs = codecs

    def show(self, item: StreamItem) -> None:
        from flowfabric.values.stream import Frame  # noqa: PLC0415

        facts: dict[str, Any] = {"status": "new_attempt", "cursor": item.cursor}
        if isinstance(item, Frame):
            facts = {
                "status": "frame",
                "cursor": item.cursor,
                "attempt": item.attempt_index + 1,
                "at": item.at,
                "type": item.type,
                "kind": item.kind,
                "mode": item.mode,
                "payload": _output.to_json(item.payload) if item.encoding is None else {"encoding": item.encoding},
            }
            for name in ("correlation_id", "seq", "summary_version"):
                if getattr(item, name) is not None:
                    facts[name] = getattr(item, name)
        _output.line(facts)

    def end(self) -> None:
        """Nothing is left to write."""


class _Page:
    """Text as it was emitted, everything else a line each."""

    def __init__(self) -> None:
        self._is_inside_line = False

    def show(self, item: StreamItem) -> None:
        from flowfabric.values.stream import Frame  # noqa: PLC0415

        if not isinstance(item, Frame):
            self._line([(f"attempt {int(item.cursor.partition('/')[0]) + 1}", "expired")])
        elif item.encoding is not None:
            self._line([(f"{item.type}: ", None), ("[sealed]", "skipped")])
        elif item.kind in ("stdout", "stderr") and item.mode != "summary":
            self._write(item)
        else:
            text = _output.printable(" ".join(item.text.split("\n")))
            self._line([(f"{_output.printable(item.type)}: ", _COLOURS.get(item.kind)), (text, None)])

    def _write(self, frame: Frame) -> None:
        text = _output.printable(frame.text)
        colour = _COLOURS.get(frame.kind)
        if colour is not None and sys.stdout.isatty():
            _output.console().print(_output.rich_line([(text, colour)]), end="", soft_wrap=True)
        else:
            print(text, end="")
        sys.stdout.flush()
        if text:
            self._is_inside_line = not text.endswith("\n")

    def _line(self, pieces: list[tuple[str, str | None]]) -> None:
        self.end()
        _output.coloured(pieces)
        sys.stdout.flush()

    def end(self) -> None:
        """End the line that is being written."""
        if self._is_inside_line:
            print(flush=True)
        self._is_inside_line = False
