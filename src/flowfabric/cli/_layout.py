"""The layout of a table on a terminal: whole if it fits, else shorter ids and times, fewer columns, shorter texts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from rich.cells import cell_len, set_cell_size

from flowfabric.cli._output import Column, can_show, cell, column_of

_BETWEEN = 2  # spaces
_ID_DIGITS = (8, 12, 20)  # of the end of an id: the fewest that tell the rows apart
_LEAST_FOLDED = 16  # width below which a column that folds is not shrunk


class Layout(NamedTuple):
    """A table that fits: `left_out` names the columns it lacks, `is_less` says that it lacks anything."""

    headers: list[str]
    cells: list[list[str]]
    widths: list[int]
    folds: list[bool]
    left_out: list[str]
    is_less: bool
    fits: bool


def lay_out(
    columns: Sequence[str | Column], rows: Sequence[Sequence[object]], width: int, *, short: bool = False
) -> Layout:
    """Fit a table into a width, as far as its columns allow; `short`: ids and times are short even if there is room."""
    chosen = [column_of(one) for one in columns]
    whole = [[cell(value) for value in row] for row in rows]
    if not short and _total(_widths(chosen, whole)) <= width:
        return _laid(chosen, whole, _widths(chosen, whole), [], is_less=False)
    cells = _shortened(rows)
    left_out: list[str] = []
    while _total(_least(chosen, _widths(chosen, cells))) > width and any(one.drop for one in chosen):
        place = max(range(len(chosen)), key=lambda at: chosen[at].drop)
        left_out.append(chosen.pop(place).name)
        for row in cells:
            del row[place]
    widths = _shrunk(chosen, cells, width)
    is_cut = any(cell_len(row[at]) > widths[at] for row in cells for at in range(len(chosen)) if not chosen[at].folds)
    cells = [
        [text if one.folds else _cut(text, size, one) for text, size, one in zip(row, widths, chosen, strict=True)]
        for row in cells
    ]
    fits = _total(widths) <= width
    return _laid(chosen, cells, widths, left_out, is_less=is_cut or bool(left_out), fits=fits)


def _laid(
    columns: list[Column],
    cells: list[list[str]],
    widths: list[int],
    left_out: list[str],
    *,
    is_less: bool,
    fits: bool = True,
) -> Layout:
    names = [_cut(one.name, size, one._replace(ends=False)) for one, size in zip(columns, widths, strict=True)]
    return Layout(names, cells, widths, [one.folds for one in columns], left_out, is_less, fits)


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max([cell_len(one.name), *(cell_len(row[place]) for row in cells)]) for place, one in enumerate(columns)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _BETWEEN * (len(widths) - 1)


def _least(columns: Sequence[Column], widths: Sequence[int]) -> list[int]:
    least = [one.cut or (_LEAST_FOLDED if one.folds else size) for one, size in zip(columns, widths, strict=True)]
    return [min(wanted, size) for wanted, size in zip(least, widths, strict=True)]


def _shrunk(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """The widths, with the widest of those that may shrink shrunk until all fit."""
    widths = _widths(columns, cells)
    least = _least(columns, widths)
    while _total(widths) > width:
        able = [place for place in range(len(widths)) if widths[place] > least[place]]
        if not able:
            break
        widths[max(able, key=widths.__getitem__)] -= 1
    return widths


def _cut(text: str, width: int, column: Column) -> str:
    if cell_len(text) <= width:
        return text
    mark = "…" if can_show("…") else "~"
    if column.ends:
        while cell_len(text) >= width:
            text = text[1:]
        return mark + text
    return set_cell_size(text, width - 1).rstrip() + mark


def _shortened(rows: Sequence[Sequence[object]]) -> list[list[str]]:
    """The cells with ids by their end and times without what all of their column share."""
    shown = [list(row) for row in rows]
    for place in range(len(shown[0]) if shown else 0):
        column = [row[place] for row in shown]
        if any(isinstance(value, UUID) for value in column):
            short = _ids([value for value in column if isinstance(value, UUID)])
            for row in shown:
                if isinstance(value := row[place], UUID):
                    row[place] = short[value]
        elif any(isinstance(value, datetime) for value in column):
            form = _time_format([value for value in column if isinstance(value, datetime)])
            for row in shown:
                if isinstance(value := row[place], datetime):
                    row[place] = value.astimezone().strftime(form)
    return [[cell(value) for value in row] for row in shown]


def _ids(ids: Sequence[UUID]) -> dict[UUID, str]:
    different = set(ids)
    for digits in _ID_DIGITS:
        if len({one.hex[-digits:] for one in different}) == len(different):
            return {one: one.hex[-digits:] for one in different}
    return {one: str(one) for one in different}


def _time_format(times: Sequence[datetime]) -> str:
    now = datetime.now().astimezone()
    local = [one.astimezone() for one in times]
    if all(one.date() == now.date() for one in local):
        return "%H:%M:%S"
    if all(abs((one - now).days) < 300 for one in local):
        return "%m-%d %H:%M"
    return "%Y-%m-%d"
