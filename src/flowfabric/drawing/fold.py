"""The boxes and links to draw for a graph, similar members as one box, and the looks of states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from flowfabric.drawing.labels import clean_text, join_words, labels_of, one_line, short_ids
from flowfabric.values.flow import FlowGraph, FlowNode
from flowfabric.values.state import State

_TITLE_CHARACTERS: Final = 1000
FOLD: Final = 8
"""More similar members than this become one line of `to_text`."""


class Look(NamedTuple):
    """How a state is drawn. Ink is readable on fill; the line is visible on white and on black."""

    sign: str
    ascii_sign: str
    fill: str
    line: str
    ink: str
    is_dashed: bool = False


LINE: Final = "#7d8590"  # visible on white and on black
# The most important first: folded members are drawn in the first of their states.
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


class Box(NamedTuple):
    """One box: a member, or similar members folded into one."""

    label: str
    nodes: tuple[FlowNode, ...]
    states: tuple[tuple[State, int], ...]
    join: str

    @property
    def look(self) -> Look:
        return LOOKS[self.states[0][0]]

    @property
    def words(self) -> str:
        """The state in words, or how many members are in which state."""
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


class Drawing(NamedTuple):
    """Boxes and links, by index, and an order in which every link points forward, branch by branch."""

    boxes: list[Box]
    links: list[_Link]
    above: list[list[int]]
    below: list[list[int]]
    order: list[int]


def folded(graph: FlowGraph, fold: int | None) -> Drawing:
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
        Box(
            label,
            tuple(group),
            tuple(sorted(Counter(node.state for node in group).items(), key=lambda pair: _RANK[pair[0]])),
            join_words(group[0].policy, into[group[0].execution_id]),
        )
        for label, group in zip(labels_of(groups, short_ids(nodes)), groups, strict=True)
    ]

    often = Counter((place_of[part[one]], place_of[part[other]]) for one, other in pairs)
    links = []
    drawn = set()
    for one, other, edge in edges:
        ends = place_of[part[one]], place_of[part[other]]
        above, below = (boxes[end] for end in ends)
        if len(above.nodes) == len(below.nodes) == 1:
            reference = f"\n{clean_text(edge.data_passing_ref, chr(10))}" if edge.data_passing_ref else ""
            links.append(_Link(*ends, "", str(edge.edge_id), f"{above.label} → {below.label}{reference}"))
        elif ends not in drawn:
            drawn.add(ends)
            each = often[ends] // len(below.nodes)
            note = "" if each == len(above.nodes) else f"{'one' if each == 1 else f'{each:,}'} each"
            title = f"{above.label} → {below.label}" + (f"\n{note}" if note else "")
            links.append(_Link(*ends, note, "", title))
    ups, downs = neighbours_of(len(boxes), often)
    return Drawing(boxes, links, ups, downs, _order(ups, downs))


def neighbours_of(count: int, pairs: Iterable[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]]]:
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for one, other in pairs:
        above[other].append(one)
        below[one].append(other)
    return above, below


def _order(above: list[list[int]], below: list[list[int]]) -> list[int]:
    """Return every box after all those above it, as soon after the last of them as possible."""
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
    """Return for each member the number of its group: the same for those drawn as one.

    Groups start by kind and policy and are split further by the groups of their neighbours. A group that is too small
    to fold is split into single members, which splits the groups of their neighbours in turn.
    """
    above, below = neighbours_of(len(nodes), pairs)
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


def layers_of(drawing: Drawing) -> list[int]:
    """Return the layer of each box: one below the lowest of those above it."""
    layer = [0] * len(drawing.boxes)
    for place in drawing.order:
        layer[place] = max((layer[other] + 1 for other in drawing.above[place]), default=0)
    return layer


def two_lines(box: Box) -> tuple[str, str]:
    """Return the two lines of text in a box."""
    return f"{box.look.sign} {box.label}", f"{box.words} · {box.join}" if box.join else box.words


def states_of(drawing: Drawing) -> Counter[State]:
    """Return the states that occur, in the order of `LOOKS`, and how often."""
    found: Counter[State] = Counter()
    for box in drawing.boxes:
        found.update(dict(box.states))
    return Counter({state: found[state] for state in LOOKS if found[state]})


def title_of(box: Box) -> str:
    """Return all facts about a box, for its tooltip."""
    if len(box.nodes) > 1:
        lines = [box.label, f"{one_line(box.nodes[0].execution_kind)}, {len(box.nodes):,} members", box.words]
    else:
        node = box.nodes[0]
        reason = node.failure_reason or node.cancellation_reason or ""
        lines = [node.name or box.label, f"{node.execution_kind} {node.execution_id}", box.words, reason]
    lines.insert(3, box.join)
    kept = (clean_text(line, "\n\t").strip() for line in lines)
    return "\n".join(f"{line[:_TITLE_CHARACTERS]}…" if len(line) > _TITLE_CHARACTERS else line for line in kept if line)
