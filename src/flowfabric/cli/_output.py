"""Output of the commands: tables and text for people, JSON for programs.

A terminal gets colours and borders. A pipe gets plain columns of any width, so that nothing is cut and every line can
be searched. Text that came from elsewhere (failures, names, messages) cannot move the cursor or change colours.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from flowfabric.contracts.json_form import payload_or_problem, to_json
from flowfabric.values.durations import counted, duration_words

if TYPE_CHECKING:
    from rich.console import Console

    from flowfabric.cli._layout import Layout
    from flowfabric.contracts.codecs import Codecs

# Control characters that steer a terminal, and lone surrogates, which cannot be encoded.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_STYLES = {
    "completed": "green",
    "failed": "red",
    "expired": "red",
    "cancelled": "yellow",
    "skipped": "yellow",
    "active": "cyan",
    "running": "cyan",
    "resumable": "cyan",
    "suspended": "magenta",
    "blocked": "magenta",
    "waiting": "blue",
    "open": "blue",
    "delayed": "blue",
    "rate_limited": "blue",
    "waiting_children": "bright_black",
    "paused": "yellow",
    "draining": "yellow",
    "disabled": "red",
    "ok": "green",
    "warning": "yellow",
    "problem": "red",
}


class Column(NamedTuple):
    """A column of a table, and what may happen to it where a terminal has no room.

    `cut` is the width to which its text may be shortened, `drop` its rank among the columns that may be left out (the
    highest goes first). `folds` continues long text on further lines, `ends` shortens a text to its end.
    """

    name: str
    cut: int = 0
    drop: int = 0
    folds: bool = False
    ends: bool = False


def column_of(given: str | Column) -> Column:
    """The column that a plain name means: never shortened, never left out."""
    return given if isinstance(given, Column) else Column(given)


def say(text: str = "") -> None:
    """A line on standard output."""
    print(text)


def note(text: str) -> None:
    """A line on standard error: a hint for people, not part of the result."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()  # in this order also where both outputs are one file
    print(text, file=sys.stderr)


def document(value: Any) -> None:
    """One JSON document: laid out on a terminal, on one line for a program."""
    indent = 2 if sys.stdout.isatty() else None
    print(_json_text(value, indent))


def line(value: Any) -> None:
    """One item of a stream as one line of JSON, flushed immediately."""
    print(_json_text(value), flush=True)


def _json_text(value: Any, indent: int | None = None) -> str:
    """JSON without control characters, escaped where the output's encoding needs it."""
    plain = to_json(value)
    text = json.dumps(plain, ensure_ascii=False, indent=indent)
    text = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text if can_show(text) else json.dumps(plain, indent=indent)


def payload_text(data: bytes | None, encoding: str | None, codecs: Codecs | None, execution_id: UUID) -> str:
    """A payload for people: JSON, or in angle brackets how long it is and why it cannot be shown."""
    value = payload_or_problem(data, encoding, codecs, execution_id)
    if data is None or value is None:
        return "" if data is None or encoding == "redacted" else "null"
    if isinstance(value, dict) and list(value) == ["base64", "problem"]:
        return f"<{counted(len(data), 'byte')}, sealed: {value['problem']}>"
    if isinstance(value, dict) and list(value) in (["base64"], ["base64", "encoding"]):
        kind = ", sealed" if "+" in (encoding or "") else f" of {encoding}" if encoding else ""
        return f"<{counted(len(data), 'byte')}{kind}>"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def printable(text: object) -> str:
    """The text with its control characters escaped; line ends and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def first_line(text: str | None) -> str:
    """The first line that is not blank."""
    return next((found.strip() for found in (text or "").splitlines() if found.strip()), "")


def opened(text: str | None, codecs: Codecs | None, execution_id: UUID) -> str:
    """A text as its handler reported it; without the codecs of the app only that there is one."""
    from flowfabric.contracts.codecs import shown  # noqa: PLC0415

    return shown(text or "") if codecs is None else codecs.open_text(text or "", execution_id)


def failure_line(text: str | None) -> str:
    """A failure in one line: the line of a traceback that names the exception, else the first line."""
    from flowfabric.contracts.codecs import shown  # noqa: PLC0415

    lines = [found for found in shown(text or "").splitlines() if found.strip()]
    if lines and lines[0].startswith("Traceback "):
        frames = [place for place, found in enumerate(lines) if found[0].isspace()]
        lines = lines[frames[-1] + 1 :] or lines if frames else lines
    return lines[0].strip() if lines else ""


def without_module(failure: str) -> str:
    """A failure in one line without the module of its exception, for narrow tables."""
    return re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", failure)


def when(moment: datetime | None) -> str:
    """A time for people: in this machine's time zone, to the second."""
    return "" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def duration(span: timedelta | None) -> str:
    """A duration for people: two units at most."""
    return "" if span is None else duration_words(span)


def seconds(number: float) -> str:
    """A number of seconds for people."""
    return duration(timedelta(seconds=number))


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Show a spinner on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with console(stderr=True).status(what):
        yield


def console(*, stderr: bool = False) -> Console:
    """A rich console; a pipe gets unlimited width and no colours."""
    from rich.console import Console  # noqa: PLC0415 - slow to import, not needed for JSON

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 10_000
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=width)


def table(
    columns: Sequence[str | Column], rows: Iterable[Sequence[object]], *, wide: bool | None = None, short: bool = False
) -> None:
    """Columns for people. A pipe gets all of them whole; on a terminal they fit its width.

    A list with an option `--wide` gives its value: then all is shown, and a note says when something is not. `short`:
    on a terminal ids are short even if there is room.
    """
    found = [list(row) for row in rows]
    width = None if wide else terminal_width()
    if width is None:
        print_plain([column_of(one).name for one in columns], [[cell(value) for value in row] for row in found])
        return
    from flowfabric.cli._layout import lay_out  # noqa: PLC0415

    laid = lay_out(columns, found, width, short=short)
    if laid.fits:
        console().print(rich_table(laid))
    else:
        print_plain(laid.headers, laid.cells)
    if wide is not None and laid.is_less:
        missing = f"without {', '.join(laid.left_out)}; " if laid.left_out else ""
        note(f"({missing}--wide shows all)")


def rich_table(laid: Layout) -> Any:
    """The same for a terminal, as a part of something larger."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for place, (name, width) in enumerate(zip(laid.headers, laid.widths, strict=True)):
        column = [row[place] for row in laid.cells]
        is_number = any(column) and all(re.fullmatch(r"-?[\d.,]*", cell) for cell in column)
        is_folded = laid.folds[place]
        made.add_column(
            name,
            justify="right" if is_number else "left",
            width=width,
            no_wrap=not is_folded,
            overflow="fold" if is_folded else "crop",
        )
    for row in laid.cells:
        made.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return made


def fitted(columns: Sequence[str | Column], rows: Iterable[Sequence[object]], *, short: bool = False) -> Any:
    """A table that fits the terminal, as a part of something larger; `short`: with short ids even if there is room."""
    from flowfabric.cli._layout import lay_out  # noqa: PLC0415

    return rich_table(lay_out(columns, [list(row) for row in rows], terminal_width() or 80, short=short))


def terminal_width() -> int | None:
    """The width of the terminal; None if the output is not one."""
    return console().width if sys.stdout.isatty() else None


def print_plain(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Columns without any decoration."""
    widths = [max(len(row[place]) for row in (headers, *cells)) for place in range(len(headers))]
    for row in (headers, *cells):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def pairs(items: Iterable[tuple[str, object]]) -> None:
    """Names and values, one per line; those without a value are left out."""
    shown = [(name, cell(value)) for name, value in items if value not in (None, "", {}, [], ())]
    width = max((len(name) for name, _ in shown), default=0)
    room = terminal_width()
    for name, value in shown:
        lines = [value] if room is None else textwrap.wrap(value, max(room - width - 2, 20)) or [""]
        styled(f"{name.ljust(width)}  ", lines[0])
        for line in lines[1:]:
            print(" " * (width + 2) + line)


def styled(before: str, word: str) -> None:
    """A line that ends in a word with a colour of its own, where there are colours."""
    style = _STYLES.get(word)
    if style is None or not sys.stdout.isatty():
        print(before + word)
        return
    from rich.text import Text  # noqa: PLC0415

    console().print(Text(before).append(word, style=style))


def coloured(pieces: Iterable[tuple[str, str | None]]) -> None:
    """A line of pieces, each with the word that gives it its colour, if any. It is neither folded nor cut."""
    if sys.stdout.isatty():
        console().print(rich_line(pieces), soft_wrap=True)
    else:
        print("".join(text for text, _ in pieces))


def rich_line(pieces: Iterable[tuple[str, str | None]]) -> Any:
    """The same for a terminal, as a part of something larger."""
    from rich.text import Text  # noqa: PLC0415

    made = Text()
    for text, word in pieces:
        made.append(text, style=_STYLES.get(word or "", ""))
    return made


def can_show(text: str) -> bool:
    """Whether the output's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def heading(text: str) -> None:
    """The title of a part of the output."""
    if sys.stdout.isatty():
        from rich.text import Text  # noqa: PLC0415

        console().print(Text(f"\n{text}", style="bold"))
    else:
        print(f"\n{text}")


def block(text: str) -> None:
    """Several lines, indented, as they are."""
    for one in printable(text).rstrip("\n").splitlines():
        print(f"  {one}".rstrip())


def cell(value: object) -> str:
    """A value as text in a table."""
    match value:
        case None:
            return ""
        case Enum():
            return str(value.value)
        case datetime():
            return when(value)
        case timedelta():
            return duration(value)
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:,.1f}"
        case int():
            return str(value)
        case _:
            return " ".join(printable(value).split("\n"))
