"""A flow as lines for a terminal."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple, TypeAlias

from flowfabric.drawing.fold import FOLD, Box, Drawing, folded, layers_of
from flowfabric.drawing.labels import TIMES, columns_of, cut_to, one_line, shorten
from flowfabric.values.flow import FlowGraph
from flowfabric.values.state import State


class Segment(NamedTuple):
    """A piece of a line, and the state that colours it."""

    text: str
    state: State | None = None


Line: TypeAlias = tuple[Segment, ...]

_MOST_LANES: Final = 12
_FAILED_NAMES: Final = 3
# By the sides the corner connects: above, below, left, right.
_CORNERS: Final = {
    (True, True, False, False): "│",
    (False, False, True, True): "─",
    (True, True, False, True): "├",
    (True, True, True, False): "┤",
    (True, True, True, True): "┼",
    (False, True, True, True): "┬",
    (True, False, True, True): "┴",
    (True, False, False, True): "╰",
    (True, False, True, False): "╯",
    (False, True, False, True): "╭",
    (False, True, True, False): "╮",
}
_PLAIN: Final = str.maketrans(
    {"│": "|", "─": "-", TIMES: "x", "…": "..."} | {sign: "+" for sign in _CORNERS.values() if sign not in "│─"}
)


def to_text(graph: FlowGraph, *, width: int | None = None, unicode: bool = True, fold: int | None = FOLD) -> list[Line]:
    """A drawing for the terminal, from top to bottom: a line for each box, with lines between where it branches.

    The state and the upstreams follow the name. If there are too many branches to draw, the layers follow each other
    without lines between boxes. With a `width`, lines are cut to that many columns; without, nothing is left out.
    """
    drawing = folded(graph, fold)
    if not drawing.boxes:
        return [(Segment("no members"),)]
    most = _MOST_LANES if width is None else max(1, min(_MOST_LANES, width // 8))
    rows = _in_lanes(drawing, most) or _in_layers(drawing)
    room = max(
        columns_of(before) + 1 + columns_of(after.rstrip()) for place, before, after in rows if place is not None
    )
    names = max(columns_of(box.label) for box in drawing.boxes)
    words = max((len(box.words) for box in drawing.boxes if len(box.nodes) == 1), default=0)
    notes = {(link.above, link.below): link.note for link in drawing.links if link.note}
    often = Counter((link.above, link.below) for link in drawing.links)

    lines = []
    for place, before, after in rows:
        if place is None:
            lines.append(_fit([Segment(before)], width, unicode))
            continue
        box = drawing.boxes[place]
        state = box.states[0][0]
        sign = box.look.sign if unicode else box.look.ascii_sign
        line = [
            Segment(before),
            Segment(sign, state),
            Segment(_pad(after.rstrip(), room - columns_of(before) - 1) + "  "),
        ]
        line += [Segment(_pad(box.label, names) + "  "), *_state(box)]
        upstreams = drawing.above[place]
        if upstreams:
            behind = [
                f"{drawing.boxes[other].label}"
                + (f" {TIMES}{often[other, place]}" if often[other, place] > 1 else "")
                + (f" ({notes[other, place]})" if (other, place) in notes else "")
                for other in upstreams
            ]
            line.append(Segment(" " * (words - len(box.words)) + f"  after {box.join + ': ' if box.join else ''}"))
            left = None if width is None else width - sum(columns_of(piece.text) for piece in line)
            line.append(Segment(_listed(behind, left)))
        lines.append(_fit(line, width, unicode))
    return lines


def plain(line: Line) -> str:
    """Return a line without its colours."""
    return "".join(piece.text for piece in line)


def _pad(text: str, columns: int) -> str:
    return text + " " * (columns - columns_of(text))


def _state(box: Box) -> list[Segment]:
    """Return the state in its colour; for folded members the counts, and which failed."""
    if len(box.nodes) == 1:
        return [Segment(box.words, box.states[0][0])]
    pieces = []
    for place, (state, count) in enumerate(box.states):
        pieces.append(Segment(f"{', ' if place else ''}{count:,} {state.value}", state))
        if state in (State.FAILED, State.EXPIRED) and count < len(box.nodes):
            names = (one_line(node.name) for node in box.nodes if node.state is state)
            shown = [shorten(name) for name, _ in zip(filter(None, names), range(_FAILED_NAMES), strict=False)]
            if shown:
                pieces.append(Segment(f" ({', '.join(shown)}{', …' if count > len(shown) else ''})"))
    return pieces


def _listed(names: list[str], room: int | None) -> str:
    """Return as many names as there is room for."""
    whole = ", ".join(names)
    if room is None or columns_of(whole) <= room:
        return whole
    kept = 0
    room -= len(f" and {len(names):,} more")
    while kept < len(names) - 1 and (room := room - columns_of(names[kept]) - 2 * bool(kept)) >= 0:
        kept += 1
    if not kept:
        return whole if len(names) == 1 else f"{len(names):,} members"
    return f"{', '.join(names[:kept])} and {len(names) - kept:,} more"


def _fit(line: list[Segment], width: int | None, unicode: bool) -> Line:
    """Return the line for output: in ASCII if required, not wider than asked, without trailing spaces."""
    if not unicode:
        line = [Segment(_ascii(piece.text), piece.state) for piece in line]
    if width is not None and sum(columns_of(piece.text) for piece in line) > width:
        room, kept = width - 1, []
        for piece in line:
            kept.append(Segment(cut_to(piece.text, room), piece.state))
            room -= columns_of(piece.text)
            if room < 0:
                break
        line = [*kept, Segment("…" if unicode else ">")]
    while line and not (end := line[-1].text.rstrip()):
        line.pop()
    if line:
        line[-1] = Segment(end, line[-1].state)
    return tuple(piece for piece in line if piece.text)


def _ascii(text: str) -> str:
    return text if text.isascii() else text.translate(_PLAIN).encode("ascii", "backslashreplace").decode()


_Row: TypeAlias = tuple[int | None, str, str]  # a box and what is left and right of its sign, or only lines


def _in_lanes(drawing: Drawing, most: int) -> list[_Row] | None:
    """Return the boxes one below the other with the links between them, or None if that takes too many lanes.

    A lane leads to one box further down. All links to that box run in it.
    """
    rows: list[_Row] = []
    taken: list[bool] = []
    lane_of: dict[int, int] = {}
    turn = {place: number for number, place in enumerate(drawing.order)}
    is_alone = [not up and not down for up, down in zip(drawing.above, drawing.below, strict=True)]
    ended = None  # the lane of the box in the previous line, if nothing follows in it
    for place in sorted(drawing.order, key=is_alone.__getitem__):
        at = lane_of.pop(place, None)
        if at is None:
            at = _free_lane(taken, 0)
            if at == ended and not (is_alone[place] and is_alone[rows[-1][0] or 0]):
                rows.append((None, "".join("│ " if one else "  " for one in taken), ""))
        taken[at] = False
        drawn = ["│ " if one else "  " for one in taken]
        rows.append((place, "".join(drawn[:at]), " " + "".join(drawn[at + 1 :])))

        old = {lane_of[other] for other in drawing.below[place] if other in lane_of}
        new = set()
        for other in sorted((other for other in drawing.below[place] if other not in lane_of), key=turn.__getitem__):
            lane = lane_of[other] = _free_lane(taken, at)
            taken[lane] = True
            new.add(lane)
            if len(taken) > most:
                return None
        ended = at if not old and not new else None
        if old or new - {at}:
            rows.append((None, _fork(taken, at, old, new), ""))
        while taken and not taken[-1]:
            taken.pop()
    return rows


def _free_lane(taken: list[bool], start: int) -> int:
    """Return the first free lane from `start` on; a new one if there is none."""
    for lane in range(start, len(taken)):
        if not taken[lane]:
            return lane
    taken.append(False)
    return len(taken) - 1


def _fork(taken: list[bool], at: int, old: set[int], new: set[int]) -> str:
    """Return the line below a box: from its lane to lanes that continue and lanes that start, behind the others."""
    ends = old | new | {at}
    first, last = min(ends), max(ends)
    drawn = []
    for lane, is_taken in enumerate(taken):
        left, right = first < lane <= last, first <= lane < last
        if lane in ends:
            drawn.append(_CORNERS[lane == at or lane in old, lane in old or lane in new, left, right])
        elif is_taken:
            drawn.append("│")
        else:
            drawn.append("─" if left else " ")
        drawn.append("─" if right else " ")
    return "".join(drawn)


def _in_layers(drawing: Drawing) -> list[_Row]:
    """Return the boxes layer by layer, without links."""
    layer = layers_of(drawing)
    rows: list[_Row] = []
    for place in sorted(drawing.order, key=layer.__getitem__):
        if rows and (above := rows[-1][0]) is not None and layer[above] != layer[place]:
            rows.append((None, "", ""))
        rows.append((place, "", ""))
    return rows
