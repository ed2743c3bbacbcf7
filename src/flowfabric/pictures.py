"""Flows as pictures: lines for a terminal, Mermaid, Graphviz and SVG. Text from a graph, no database.

All four show the same boxes and links and take their signs and colours from `LOOKS`. A sign and the word of the state
stand in every box, so that nothing depends on colours. The same graph gives the same text, byte for byte.

`fold` draws alike members as one box: more than so many of one kind and one policy, with alike neighbours above and
below. Alike means the same neighbours, or neighbours that are folded themselves, as in a `map` over a `map`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias
from unicodedata import combining, east_asian_width

from flowfabric.graph import AnyOf, EdgeGroupPolicy, FlowGraph, FlowNode, Quorum
from flowfabric.ids import ExecutionId
from flowfabric.state import State

FOLD: Final = 8
"""From one more than this on, alike members are one line of `to_text`."""


class Look(NamedTuple):
    """How a state is drawn. Ink on fill is read as text; the line is seen on white and on black."""

    sign: str
    ascii_sign: str
    fill: str
    line: str
    ink: str
    is_dashed: bool = False


# The most telling first: folded members are drawn in the first of their states.
LOOKS: Final[dict[State, Look]] = {
    State.FAILED: Look("✗", "x", "#ffe3e1", "#d1242f", "#82061e"),
    State.EXPIRED: Look("⊗", "!", "#ffe8d9", "#bc4c00", "#762c00"),
    State.SUSPENDED: Look("‖", "=", "#f8e6fd", "#a44bc4", "#5b1274"),
    State.ACTIVE: Look("►", ">", "#d9f2fa", "#0e7c99", "#06465a"),
    State.RESUMABLE: Look("▷", ")", "#dfeeff", "#2f7bd0", "#0a3069"),
    State.RATE_LIMITED: Look("◔", "%", "#ebe8ff", "#7a63d6", "#38288a"),
    State.DELAYED: Look("◷", "~", "#e5e9fb", "#5a6fc0", "#26357a"),
    State.WAITING: Look("○", "o", "#eef1f4", "#6e7781", "#2f363d"),
    State.WAITING_CHILDREN: Look("◇", ".", "#f6f8fa", "#818b98", "#424a53", True),
    State.CANCELLED: Look("⊘", "/", "#fff2c2", "#9a6700", "#5c4000"),
    State.SKIPPED: Look("↷", "^", "#fbf6e0", "#94802f", "#5f5118", True),
    State.COMPLETED: Look("✓", "v", "#dbf5e0", "#1a7f37", "#0d4a20"),
}
_RANK: Final = {state: place for place, state in enumerate(LOOKS)}


class Segment(NamedTuple):
    """A piece of a line, and the state it is to be coloured by."""

    text: str
    state: State | None = None


Line: TypeAlias = tuple[Segment, ...]


class _Box(NamedTuple):
    """What is drawn once: a member, or alike members folded into one."""

    label: str
    nodes: tuple[FlowNode, ...]
    states: tuple[tuple[State, int], ...]
    join: str

    @property
    def look(self) -> Look:
        return LOOKS[self.states[0][0]]

    @property
    def words(self) -> str:
        """The state in words, or how many are in which."""
        if len(self.nodes) == 1:
            return self.states[0][0].value
        return ", ".join(f"{count:,} {state.value}" for state, count in self.states)


class _Link(NamedTuple):
    """An arrow from one box to another. The note says how folded members are paired."""

    above: int
    below: int
    note: str = ""
    edge_id: str = ""
    title: str = ""


class _Drawing(NamedTuple):
    """Boxes and links, by index, and an order in which every link points forward, branch by branch."""

    boxes: list[_Box]
    links: list[_Link]
    above: list[list[int]]
    below: list[list[int]]
    order: list[int]


# Names


_LABEL_COLUMNS: Final = 32
_LABEL_END: Final = 8  # of a long name, so that a number at its end stays
_TITLE_CHARACTERS: Final = 1000
_TIMES: Final = "\u00d7"
_JOINERS: Final = "\u200c\u200d"  # between the parts of one letter or emoji
_NUMBER_AT_END: Final = re.compile(r"[\s\[({#._:/-]*\d+[\])}]?$")


def _clean(text: str, kept: str = "") -> str:
    """Text that does nothing but appear, wherever it is put."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign in _JOINERS or sign in kept else sign.encode("unicode_escape").decode()
        for sign in text
    )


def _one_line(text: str) -> str:
    return _clean(" ".join(text.split()))


def _columns(text: str) -> int:
    """How many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if combining(sign) or sign in _JOINERS or sign == "\ufe0f" else 1 + (east_asian_width(sign) in "WF")
        for sign in text
    )


def _cut(text: str, columns: int) -> str:
    """The start of the text that fits."""
    if _columns(text) <= columns:
        return text
    room = columns
    for place, sign in enumerate(text):
        room -= _columns(sign)
        if room < 0:
            return text[:place]
    return text


def _shorten(text: str, columns: int = _LABEL_COLUMNS) -> str:
    if _columns(text) <= columns:
        return text
    end = _cut(text[::-1], _LABEL_END)[::-1]
    return f"{_cut(text, columns - _LABEL_END - 1)}…{end}"


def _short_ids(nodes: Sequence[FlowNode]) -> dict[ExecutionId, str]:
    """As few characters of the ids as tell the members apart. Ids minted together begin alike, so it may be the end."""
    ids = [node.execution_id for node in nodes]
    for part in (slice(-36, -28), slice(-12, None)):
        short = {one: one[part] for one in ids}
        if len(set(short.values())) == len(short):
            return short
    return {one: str(one) for one in ids}


def _labels(groups: Sequence[Sequence[FlowNode]], ids: dict[ExecutionId, str]) -> list[str]:
    """What is written on the boxes: different on each."""
    labels = [_label(group, ids) for group in groups]
    often = Counter(labels)
    return [
        f"{label} ({ids[group[0].execution_id]})" if often[label] > 1 else label
        for label, group in zip(labels, groups, strict=True)
    ]


def _label(group: Sequence[FlowNode], ids: dict[ExecutionId, str]) -> str:
    first = group[0]
    if len(group) > 1:
        stems = {_NUMBER_AT_END.sub("", _one_line(node.name)) for node in group}
        stem = stems.pop() if len(stems) == 1 else ""
        return f"{_shorten(stem or _one_line(first.execution_kind))} {_TIMES} {len(group):,}"
    name = _one_line(first.name)
    return _shorten(name) if name else f"{_shorten(_one_line(first.execution_kind))} {ids[first.execution_id]}"


def join_words(policy: EdgeGroupPolicy | None, edges: int) -> str:
    """What a join asks of so many edges, where it is not all of them."""
    if not edges:
        return ""
    match policy:
        case AnyOf():
            return f"any of {edges:,}"
        case Quorum(k):
            return f"{k:,} of {edges:,}"
        case _:
            return ""


def _title(box: _Box) -> str:
    """Everything about a box, for whoever points at it."""
    if len(box.nodes) > 1:
        lines = [box.label, f"{_one_line(box.nodes[0].execution_kind)}, {len(box.nodes):,} members", box.words]
    else:
        node = box.nodes[0]
        reason = node.failure_reason or node.cancellation_reason or ""
        lines = [node.name or box.label, f"{node.execution_kind} {node.execution_id}", box.words, reason]
    lines.insert(3, box.join)
    kept = (_clean(line, "\n\t").strip() for line in lines)
    return "\n".join(f"{line[:_TITLE_CHARACTERS]}…" if len(line) > _TITLE_CHARACTERS else line for line in kept if line)


# What is drawn


def _draw(graph: FlowGraph, fold: int | None) -> _Drawing:
    nodes = graph.nodes
    index = {node.execution_id: place for place, node in enumerate(nodes)}
    edges = [
        (index[edge.upstream_execution_id], index[edge.downstream_execution_id], edge)
        for edge in graph.edges
        if edge.upstream_execution_id in index and edge.downstream_execution_id in index
    ]
    into = Counter(edge.downstream_execution_id for edge in graph.edges)
    pairs = list(dict.fromkeys((one, other) for one, other, _ in edges))
    part = list(range(len(nodes))) if fold is None else _alike(nodes, pairs, fold)

    members: dict[int, list[FlowNode]] = {}
    for node, key in zip(nodes, part, strict=True):
        members.setdefault(key, []).append(node)
    place_of = {key: place for place, key in enumerate(members)}
    groups = list(members.values())
    boxes = [
        _Box(
            label,
            tuple(group),
            tuple(sorted(Counter(node.state for node in group).items(), key=lambda pair: _RANK[pair[0]])),
            join_words(group[0].policy, into[group[0].execution_id]),
        )
        for label, group in zip(_labels(groups, _short_ids(nodes)), groups, strict=True)
    ]

    often = Counter((place_of[part[one]], place_of[part[other]]) for one, other in pairs)
    links = []
    drawn = set()
    for one, other, edge in edges:
        ends = place_of[part[one]], place_of[part[other]]
        above, below = (boxes[end] for end in ends)
        if len(above.nodes) == len(below.nodes) == 1:
            reference = f"\n{_clean(edge.data_passing_ref, chr(10))}" if edge.data_passing_ref else ""
            links.append(_Link(*ends, "", str(edge.edge_id), f"{above.label} → {below.label}{reference}"))
        elif ends not in drawn:
            drawn.add(ends)
            each = often[ends] // len(below.nodes)
            note = "" if each == len(above.nodes) else f"{'one' if each == 1 else f'{each:,}'} each"
            title = f"{above.label} → {below.label}" + (f"\n{note}" if note else "")
            links.append(_Link(*ends, note, "", title))
    ups, downs = _neighbours(len(boxes), often)
    return _Drawing(boxes, links, ups, downs, _order(ups, downs))


def _neighbours(count: int, pairs: Iterable[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]]]:
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for one, other in pairs:
        above[other].append(one)
        below[one].append(other)
    return above, below


def _order(above: list[list[int]], below: list[list[int]]) -> list[int]:
    """Every box after all those above it, and as soon after the last of them as can be."""
    missing = [len(found) for found in above]
    ready = [place for place in reversed(range(len(above))) if not missing[place]]
    order = []
    while ready:
        place = ready.pop()
        order.append(place)
        freed = []
        for other in below[place]:
            missing[other] -= 1
            if not missing[other]:
                freed.append(other)
        ready += reversed(freed)
    return order


def _alike(nodes: Sequence[FlowNode], pairs: list[tuple[int, int]], fold: int) -> list[int]:
    """For each member the number of its group: the same for those drawn as one.

    Members start apart by kind and policy, and are told apart further by the groups of their neighbours. A group that
    is too small to fold falls into single members, which tells their neighbours apart in turn.
    """
    above, below = _neighbours(len(nodes), pairs)
    order = _order(above, below)
    apart: dict[object, int] = {}
    group = [apart.setdefault((node.execution_kind, node.policy), len(apart)) for node in nodes]
    found = 0
    for _ in range(16):
        for neighbours, way in ((above, order), (below, reversed(order))):
            names: dict[object, int] = {}
            for place in way:
                around = tuple(sorted(Counter(group[other] for other in neighbours[place]).items()))
                group[place] = names.setdefault((group[place], around), len(names))
        sizes = Counter(group)
        group = [one if sizes[one] > fold else len(nodes) + place for place, one in enumerate(group)]
        before, found = found, len(set(group))
        if before == found:
            return group
    return list(range(len(nodes)))


def _layers(drawing: _Drawing) -> list[int]:
    """The layer of each box: one below the lowest of those above it."""
    layer = [0] * len(drawing.boxes)
    for place in drawing.order:
        layer[place] = max((layer[other] + 1 for other in drawing.above[place]), default=0)
    return layer


# For the terminal


_MOST_LANES: Final = 12
_FAILED_NAMES: Final = 3
# By what the corner touches: above, below, left, right.
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
    {"│": "|", "─": "-", _TIMES: "x", "…": "..."} | {sign: "+" for sign in _CORNERS.values() if sign not in "│─"}
)


def to_text(graph: FlowGraph, *, width: int | None = None, unicode: bool = True, fold: int | None = FOLD) -> list[Line]:
    """A drawing for the terminal, from top to bottom: a line for each box, with lines between where it branches.

    Behind the name stand the state and what the member comes after. Where the branches are too many to draw, the layers
    follow each other without lines between boxes. With a `width`, lines are cut to so many columns; without, nothing
    is left out.
    """
    drawing = _draw(graph, fold)
    if not drawing.boxes:
        return [(Segment("no members"),)]
    most = _MOST_LANES if width is None else max(1, min(_MOST_LANES, width // 8))
    rows = _in_lanes(drawing, most) or _in_layers(drawing)
    room = max(_columns(before) + 1 + _columns(after.rstrip()) for place, before, after in rows if place is not None)
    names = max(_columns(box.label) for box in drawing.boxes)
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
            Segment(_pad(after.rstrip(), room - _columns(before) - 1) + "  "),
        ]
        line += [Segment(_pad(box.label, names) + "  "), *_state(box)]
        upstreams = drawing.above[place]
        if upstreams:
            behind = [
                f"{drawing.boxes[other].label}"
                + (f" {_TIMES}{often[other, place]}" if often[other, place] > 1 else "")
                + (f" ({notes[other, place]})" if (other, place) in notes else "")
                for other in upstreams
            ]
            line.append(Segment(" " * (words - len(box.words)) + f"  after {box.join + ': ' if box.join else ''}"))
            left = None if width is None else width - sum(_columns(piece.text) for piece in line)
            line.append(Segment(_listed(behind, left)))
        lines.append(_fit(line, width, unicode))
    return lines


def plain(line: Line) -> str:
    """A line without its colours."""
    return "".join(piece.text for piece in line)


def _pad(text: str, columns: int) -> str:
    return text + " " * (columns - _columns(text))


def _state(box: _Box) -> list[Segment]:
    """The state in its colour; of folded members the counts, and who failed."""
    if len(box.nodes) == 1:
        return [Segment(box.words, box.states[0][0])]
    pieces = []
    for place, (state, count) in enumerate(box.states):
        pieces.append(Segment(f"{', ' if place else ''}{count:,} {state.value}", state))
        if state in (State.FAILED, State.EXPIRED) and count < len(box.nodes):
            names = (_one_line(node.name) for node in box.nodes if node.state is state)
            shown = [_shorten(name) for name, _ in zip(filter(None, names), range(_FAILED_NAMES), strict=False)]
            if shown:
                pieces.append(Segment(f" ({', '.join(shown)}{', …' if count > len(shown) else ''})"))
    return pieces


def _listed(names: list[str], room: int | None) -> str:
    """The names, as many as there is room for."""
    whole = ", ".join(names)
    if room is None or _columns(whole) <= room:
        return whole
    kept = 0
    room -= len(f" and {len(names):,} more")
    while kept < len(names) - 1 and (room := room - _columns(names[kept]) - 2 * bool(kept)) >= 0:
        kept += 1
    if not kept:
        return whole if len(names) == 1 else f"{len(names):,} members"
    return f"{', '.join(names[:kept])} and {len(names) - kept:,} more"


def _fit(line: list[Segment], width: int | None, unicode: bool) -> Line:
    """The line as it can be shown: in ASCII where it must be, not wider than asked, nothing but text at its end."""
    if not unicode:
        line = [Segment(_ascii(piece.text), piece.state) for piece in line]
    if width is not None and sum(_columns(piece.text) for piece in line) > width:
        room, kept = width - 1, []
        for piece in line:
            kept.append(Segment(_cut(piece.text, room), piece.state))
            room -= _columns(piece.text)
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


def _in_lanes(drawing: _Drawing, most: int) -> list[_Row] | None:
    """The boxes one below the other with the links between them, or None where that takes too many lanes.

    A lane leads to one box that is still to come. All links to that box run in it.
    """
    rows: list[_Row] = []
    taken: list[bool] = []
    lane_of: dict[int, int] = {}
    turn = {place: number for number, place in enumerate(drawing.order)}
    is_alone = [not up and not down for up, down in zip(drawing.above, drawing.below, strict=True)]
    ended = None  # the lane of the box in the line before, if nothing follows in it
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
    """The first free lane from `start` on; a new one if there is none."""
    for lane in range(start, len(taken)):
        if not taken[lane]:
            return lane
    taken.append(False)
    return len(taken) - 1


def _fork(taken: list[bool], at: int, old: set[int], new: set[int]) -> str:
    """The line below a box: from its lane to lanes that go on and lanes that start. It passes behind the others."""
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


def _in_layers(drawing: _Drawing) -> list[_Row]:
    """The boxes layer by layer, without links."""
    layer = _layers(drawing)
    rows: list[_Row] = []
    for place in sorted(drawing.order, key=layer.__getitem__):
        if rows and (above := rows[-1][0]) is not None and layer[above] != layer[place]:
            rows.append((None, "", ""))
        rows.append((place, "", ""))
    return rows


# For other programs


# Markdown, entities, directives and quotes mean nothing to Mermaid as numbers. An underscore within a word is one.
_MERMAID: Final = re.compile(r"[^\w ,()-]|(?<![^\W_])_|_(?![^\W_])", re.ASCII)


def to_mermaid(graph: FlowGraph, *, fold: int | None = None) -> str:
    """A Mermaid flowchart. Its renderers refuse more than 500 links unless they are told otherwise: then `fold`."""
    drawing = _draw(graph, fold)
    lines = ["flowchart TD"]
    for place, box in enumerate(drawing.boxes):
        head, foot = (_mermaid(text) for text in _two_lines(box))
        lines.append(f'    n{place}["{head}<br/>{foot}"]:::{box.states[0][0].value}')
    lines += [f"    n{link.above} -->{f'|{link.note}|' if link.note else ''} n{link.below}" for link in drawing.links]
    for state in _states(drawing):
        look = LOOKS[state]
        dashes = ",stroke-dasharray:5 3" if look.is_dashed else ""
        lines.append(f"    classDef {state.value} fill:{look.fill},stroke:{look.line},color:{look.ink}{dashes}")
    if not drawing.boxes:
        lines.append('    empty["no members"]')
    return "\n".join(lines) + "\n"


def _mermaid(text: str) -> str:
    text = text.replace("\\n", "\\\u200cn")  # a backslash and an n are a line break there, even as numbers
    return _MERMAID.sub(lambda found: found[0] if ord(found[0]) > 126 else f"#{ord(found[0])};", text)


def to_dot(graph: FlowGraph, *, fold: int | None = None) -> str:
    """A Graphviz graph."""
    drawing = _draw(graph, fold)
    lines = [
        "digraph flow {",
        '    node [shape=box, style="rounded,filled", fontname="monospace", fontsize=11];',
        f'    edge [color="{_LINE}", fontcolor="{_LINE}", fontname="monospace", fontsize=10];',
    ]
    for place, box in enumerate(drawing.boxes):
        head, foot = (_dot(text) for text in _two_lines(box))
        look = box.look
        style = ', style="rounded,filled,dashed"' if look.is_dashed else ""
        lines.append(
            f'    n{place} [label="{head}\\n{foot}", tooltip="{_dot(_title(box))}", '
            f'fillcolor="{look.fill}", color="{look.line}", fontcolor="{look.ink}"{style}];'
        )
    lines += [
        f"    n{link.above} -> n{link.below}{f' [label={chr(34)}{_dot(link.note)}{chr(34)}]' if link.note else ''};"
        for link in drawing.links
    ]
    if not drawing.boxes:
        lines.append('    empty [label="no members"];')
    return "\n".join([*lines, "}"]) + "\n"


def _dot(text: str) -> str:
    # Graphviz reads entities in quoted text, too.
    return text.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", " ")


def _two_lines(box: _Box) -> tuple[str, str]:
    """What is written in a box."""
    return f"{box.look.sign} {box.label}", f"{box.words} · {box.join}" if box.join else box.words


def _states(drawing: _Drawing) -> Counter[State]:
    """The states that occur, in the order of `LOOKS`, and how often."""
    found: Counter[State] = Counter()
    for box in drawing.boxes:
        found.update(dict(box.states))
    return Counter({state: found[state] for state in LOOKS if found[state]})


# SVG


_LINE: Final = "#7d8590"  # seen on white and on black
_FONT: Final = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_EM: Final = 0.61  # the width of a column of a monospaced font
_HEAD_SIZE: Final = 13
_FOOT_SIZE: Final = 11
_BOX_HEIGHT: Final = 46.0
_BOX_PADDING: Final = 14.0
_BESIDE: Final = 22.0
_BELOW: Final = 40.0
_MARGIN: Final = 16.0
_STACK: Final = 4.0
_ROW_WIDTH: Final = 960.0
_SWEEPS: Final = 6


def to_svg(graph: FlowGraph, *, fold: int | None = None) -> str:
    """An SVG picture that needs nothing else. Pointing at a box tells everything about it."""
    drawing = _draw(graph, fold)
    widths = [_box_width(box) for box in drawing.boxes]
    places, paths, right, bottom = _arrange(drawing, widths)
    legend, right, bottom = _legend(drawing, right, bottom)
    arrow = f"arrow-{graph.flow.flow_id}"
    name = _one_line(f"{graph.flow.flow_kind} {graph.flow.flow_id}")

    width, height = _number(right + _MARGIN), _number(bottom + _MARGIN)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="{_FONT}" font-size="{_FOOT_SIZE}">',
        f"<title>{escape(name)}</title>",
        f'<defs><marker id="{arrow}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.5L8 4L0 7.5z" fill="{_LINE}"/></marker></defs>',
        f'<g fill="none" stroke="{_LINE}" stroke-width="1.4">',
    ]
    for link, path in zip(drawing.links, paths, strict=True):
        edge = f'data-edge-id="{link.edge_id}" ' if link.edge_id else ""
        lines.append(f'<path {edge}d="{path}" marker-end="url(#{arrow})"><title>{escape(link.title)}</title></path>')
    lines.append("</g>")
    for box, (x, y), wide in zip(drawing.boxes, places, widths, strict=True):
        lines.append(_svg_box(box, x - wide / 2, y, wide))
    return "\n".join([*lines, *legend, "</svg>"]) + "\n"


def _number(value: float) -> str:
    text = f"{value:.1f}"
    return text.removesuffix(".0") if text != "-0.0" else "0"


def _box_width(box: _Box) -> float:
    head, foot = _two_lines(box)
    return max(_columns(head) * _HEAD_SIZE * _EM, _columns(foot) * _FOOT_SIZE * _EM, 60) + 2 * _BOX_PADDING


def _svg_box(box: _Box, x: float, y: float, width: float) -> str:
    look = box.look
    head, foot = _two_lines(box)
    dashes = ' stroke-dasharray="5 3"' if look.is_dashed else ""
    size = f'width="{_number(width)}" height="{_number(_BOX_HEIGHT)}" rx="7"'
    shifts = (2 * _STACK, _STACK, 0) if len(box.nodes) > 1 else (0,)
    boxes = "".join(f'<rect x="{_number(x + by)}" y="{_number(y + by)}" {size}/>' for by in shifts)
    identity = "" if len(box.nodes) > 1 else f' data-execution-id="{escape(box.nodes[0].execution_id)}"'
    middle = _number(x + width / 2)
    return (
        f'<g{identity} fill="{look.fill}" stroke="{look.line}" stroke-width="1.4"{dashes}>'
        f"<title>{escape(_title(box))}</title>{boxes}"
        f'<g fill="{look.ink}" stroke="none" text-anchor="middle">'
        f'<text x="{middle}" y="{_number(y + 20)}" font-size="{_HEAD_SIZE}" font-weight="600">{escape(head)}</text>'
        f'<text x="{middle}" y="{_number(y + 36)}">{escape(foot)}</text></g></g>'
    )


def _legend(drawing: _Drawing, right: float, bottom: float) -> tuple[list[str], float, float]:
    """The states that occur, in rows below the picture; how far right and down it now goes."""
    chips = [
        (LOOKS[state], f"{LOOKS[state].sign} {state.value} {count:,}") for state, count in _states(drawing).items()
    ] or [(LOOKS[State.WAITING], "no members")]
    limit = max(right, 480.0)
    x, y = _MARGIN, bottom + (28 if drawing.boxes else _MARGIN)
    lines = ['<g stroke-width="1">']
    for look, text in chips:
        width = _columns(text) * _FOOT_SIZE * _EM + 20
        if x > _MARGIN and x + width > limit:
            x, y = _MARGIN, y + 30
        dashes = ' stroke-dasharray="5 3"' if look.is_dashed else ""
        lines.append(
            f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="22" rx="11" '
            f'fill="{look.fill}" stroke="{look.line}"{dashes}/>'
            f'<text x="{_number(x + 10)}" y="{_number(y + 15)}" fill="{look.ink}">{escape(text)}</text>'
        )
        x += width + 8
        right = max(right, x - 8)
    return [*lines, "</g>"], right, y + 22


# Layout: layers by the longest path, order by barycenters, then places as near to their neighbours as boxes allow.
# A long link passes through a place of its own in each layer between, as far as these stay few.


def _arrange(drawing: _Drawing, widths: list[float]) -> tuple[list[tuple[float, float]], list[str], float, float]:
    """The middle of the upper side of each box, the path of each link, and how far right and down they go."""
    count = len(drawing.boxes)
    is_alone = [not drawing.above[place] and not drawing.below[place] for place in range(count)]
    layer = _layers(drawing)
    sizes = list(widths)
    hops = _hops(drawing, layer, sizes)
    rows: list[list[int]] = []
    for place in [*(one for one in drawing.order if not is_alone[one]), *range(count, len(sizes))]:
        while len(rows) <= layer[place]:
            rows.append([])
        rows[layer[place]].append(place)
    steps = dict.fromkeys(step for hop in hops for step in pairwise(hop))
    near = [(one, other) for one, other in steps if layer[other] == layer[one] + 1]
    above, below = _neighbours(len(sizes), near)
    _sort_rows(rows, above, below)
    x = _places(rows, sizes, above, below)

    left = min((x[place] - sizes[place] / 2 for row in rows for place in row), default=0.0)
    x = [one - left + _MARGIN for one in x]
    right = max((x[place] + sizes[place] / 2 for row in rows for place in row), default=_MARGIN)

    leaves: list[list[int]] = [[] for _ in range(count)]
    enters: list[list[int]] = [[] for _ in range(count)]
    for number, hop in enumerate(hops):
        leaves[hop[0]].append(number)
        enters[hop[-1]].append(number)
    start, end = [0.0] * len(hops), [0.0] * len(hops)
    for place in range(count):
        for number, at in _ports(leaves[place], [x[hops[one][1]] for one in leaves[place]], x[place], sizes[place]):
            start[number] = at
        for number, at in _ports(enters[place], [x[hops[one][-2]] for one in enters[place]], x[place], sizes[place]):
            end[number] = at

    # Links that go far to the side need height not to be flat.
    side = [0.0] * len(rows)
    for one, other in near:
        side[layer[one]] = max(side[layer[one]], abs(x[one] - x[other]))
    tops = []
    y = _MARGIN
    for number in range(len(rows)):
        tops.append(y)
        y += _BOX_HEIGHT + _BELOW + min(side[number] / 12, 2 * _BELOW)
    bottom = tops[-1] + _BOX_HEIGHT if tops else 0.0

    paths = []
    for number, hop in enumerate(hops):
        at, height = start[number], tops[layer[hop[0]]] + _BOX_HEIGHT
        parts = [f"M{_number(at)} {_number(height)}"]
        for stop in hop[1:]:
            to, top = end[number] if stop == hop[-1] else x[stop], tops[layer[stop]]
            middle = _number((height + top) / 2)
            parts.append(f"C{_number(at)} {middle} {_number(to)} {middle} {_number(to)} {_number(top)}")
            at, height = to, top
            if stop != hop[-1]:
                height += _BOX_HEIGHT
                parts.append(f"V{_number(height)}")
        paths.append("".join(parts))

    y_of = [tops[one] if tops else 0.0 for one in layer[:count]]
    at, y, limit = _MARGIN, bottom + (_BELOW if tops else _MARGIN), max(right, _ROW_WIDTH)
    for place in range(count):
        if is_alone[place]:
            if at > _MARGIN and at + widths[place] > limit:
                at, y = _MARGIN, y + _BOX_HEIGHT + _BESIDE
            x[place], y_of[place] = at + widths[place] / 2, y
            right, bottom = max(right, at + widths[place]), y + _BOX_HEIGHT
            at += widths[place] + _BESIDE
    return [(x[place], y_of[place]) for place in range(count)], paths, right, bottom


def _hops(drawing: _Drawing, layer: list[int], sizes: list[float]) -> list[list[int]]:
    """For each link the places it passes. New places are added to `layer` and `sizes`."""
    hops: list[list[int]] = [[link.above, link.below] for link in drawing.links]
    left = 4 * (len(drawing.boxes) + len(hops))
    for number in sorted(range(len(hops)), key=lambda one: layer[hops[one][1]] - layer[hops[one][0]]):
        one, other = hops[number]
        between = range(layer[one] + 1, layer[other])
        left -= len(between)
        if left < 0:
            break
        hops[number] = [one, *range(len(layer), len(layer) + len(between)), other]
        layer.extend(between)
        sizes.extend(6.0 for _ in between)
    return hops


def _sort_rows(rows: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    """Order each row by where its neighbours stand, so that few links cross."""
    at = [0.0] * len(above)

    def settle(row: list[int]) -> None:
        for number, place in enumerate(row):
            at[place] = (number + 0.5) / len(row)

    for row in rows:
        settle(row)
    for _ in range(_SWEEPS):
        for neighbours, way in ((above, rows), (below, rows[::-1])):
            for row in way:
                mean = {
                    one: sum(at[other] for other in near) / len(near) if (near := neighbours[one]) else at[one]
                    for one in row
                }
                row.sort(key=mean.__getitem__)
                settle(row)


def _places(rows: list[list[int]], sizes: list[float], above: list[list[int]], below: list[list[int]]) -> list[float]:
    """Where the middles are, from left to right: near the mean of the neighbours, in order, without overlaps."""
    x = [0.0] * len(sizes)
    offsets = []
    for row in rows:
        offset = [0.0]
        for one, other in pairwise(row):
            offset.append(offset[-1] + (sizes[one] + sizes[other]) / 2 + _BESIDE)
        offsets.append(offset)
        for place, by in zip(row, offset, strict=True):
            x[place] = by - offset[-1] / 2

    both = [up + down for up, down in zip(above, below, strict=True)]
    turns = [(above, 1), (below, -1)] * _SWEEPS + [(both, 1)]
    for neighbours, way in turns:
        for row, offset in list(zip(rows, offsets, strict=True))[::way]:
            wanted = [
                (sum(x[other] for other in near) / len(near) if (near := neighbours[place]) else x[place]) - by
                for place, by in zip(row, offset, strict=True)
            ]
            for place, at, by in zip(row, _not_falling(wanted), offset, strict=True):
                x[place] = at + by
    return x


def _not_falling(wanted: list[float]) -> list[float]:
    """The numbers nearest to those wanted of which none is less than the one before it."""
    pools: list[tuple[float, int]] = []
    for value in wanted:
        total, count = value, 1
        while pools and pools[-1][0] * count >= total * pools[-1][1]:
            more, members = pools.pop()
            total, count = total + more, count + members
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def _ports(links: list[int], towards: list[float], x: float, width: float) -> list[tuple[int, float]]:
    """Where links touch a side of a box: side by side, in the order of where they go."""
    if not links:
        return []
    step = min(12.0, (width - 2 * _BOX_PADDING) / max(len(links) - 1, 1))
    ordered = sorted(range(len(links)), key=lambda number: towards[number])
    return [(links[number], x + (place - (len(links) - 1) / 2) * step) for place, number in enumerate(ordered)]
