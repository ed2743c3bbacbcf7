"""Pictures of flows: the same members and edges in all four, with any names."""

# ruff: noqa: RUF001 - the pictures have a multiplication sign

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import unescape
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from uuid import UUID
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfabric.drawing import fold
from flowfabric.drawing.dot import to_dot
from flowfabric.drawing.fold import LOOKS
from flowfabric.drawing.mermaid import to_mermaid
from flowfabric.drawing.svg import to_svg
from flowfabric.drawing.text import plain, to_text
from flowfabric.values.flow import EdgeSnapshot, FlowGraph, FlowNode, FlowSnapshot
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.joins import AllOf, AllSettled, AnyOf, EdgeGroupPolicy, Quorum
from flowfabric.values.state import State
from tests import sampling

AT = datetime(2030, 1, 1, tzinfo=UTC)
FLOW = FlowId(UUID(int=7))
SVG = "{http://www.w3.org/2000/svg}"
ALL: dict[str, Callable[[FlowGraph], str]] = {
    "text": lambda graph: "\n".join(map(plain, to_text(graph, fold=None))),
    "mermaid": to_mermaid,
    "dot": to_dot,
    "svg": to_svg,
}
HOSTILE = [
    'say "hi"',
    "back\\slash\\",
    "\\name",
    "two\nlines\tand\r\nmore",
    "<script>alert(1)</script>",
    "&amp; &lt; #35; #quot;",
    "]]> --> end; %% {{}} |x|",
    "`1. *bold* _it_ [a](http://b)`",
    "\x00\x1b[31m\x7f\x85\u202eevil\u2066\ufffe\ud800",
    "🚀 日本語 👩‍👩‍👧 é",
    "x" * 300,
    "x" * 150 + "y" + "x" * 149,
    "  ",
]


def member(
    number: int,
    name: str | None = None,
    *,
    kind: str = "work",
    state: State = State.WAITING,
    policy: EdgeGroupPolicy | None = None,
    failure: str | None = None,
) -> FlowNode:
    return FlowNode(
        execution_id=ExecutionId(UUID(int=number + 1)),
        name=f"n{number}" if name is None else name,
        execution_kind=kind,
        state=state,
        created_at=AT,
        policy=policy,
        failure_reason=failure,
    )


def flow(nodes: Sequence[FlowNode], edges: Sequence[tuple[int, int]] = ()) -> FlowGraph:
    return FlowGraph(
        flow=FlowSnapshot(
            flow_id=FLOW,
            flow_kind="sample",
            namespace="default",
            public_flow_state="open",
            graph_revision=len(nodes) + len(edges),
            node_count=len(nodes),
            edge_count=len(edges),
            created_at=AT,
            last_mutation_at=AT,
        ),
        nodes=tuple(nodes),
        edges=tuple(
            EdgeSnapshot(
                edge_id=UUID(int=number + 1),
                flow_id=FLOW,
                upstream_execution_id=ExecutionId(UUID(int=above + 1)),
                downstream_execution_id=ExecutionId(UUID(int=below + 1)),
                created_at=AT,
            )
            for number, (above, below) in enumerate(edges)
        ),
    )


@st.composite
def flows(draw: st.DrawFn, kinds: int = 3, most: int = 14) -> tuple[FlowGraph, list[tuple[int, int]]]:
    """A graph whose members are called n0, n1, ... in any order of the edges, and its edges; some of them twice."""
    count = draw(st.integers(1, most))
    policies = st.sampled_from([None, AllOf(), AnyOf(), Quorum(2), AllSettled()])
    nodes = [
        member(
            number,
            kind=f"kind{draw(st.integers(1, kinds))}",
            state=draw(st.sampled_from(list(State))),
            policy=draw(policies),
        )
        for number in range(count)
    ]
    rank = draw(st.permutations(range(count)))
    ends = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda pair: pair[0] != pair[1])
    pairs = draw(st.lists(ends, max_size=2 * count)) if count > 1 else []
    edges = [pair if rank[pair[0]] < rank[pair[1]] else pair[::-1] for pair in pairs]
    return flow(nodes, edges), edges


def unquoted(text: str) -> str:
    """What Graphviz shows for the inside of a quoted text."""
    return unescape(re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text))


def read_mermaid(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Labels and links; refuses every line it does not know."""
    head, *lines = text.removesuffix("\n").split("\n")
    assert head == "flowchart TD"
    labels: list[str] = []
    links = []
    styled, styles = set(), set()
    for line in lines:
        if node := re.fullmatch(r' {4}n(\d+)\["((?:[\w ,()-]|[^\x00-\x7f]|#\d+;|<br/>)*)"\]:::(\w+)', line):
            assert int(node[1]) == len(labels)
            labels.append(re.sub(r"#(\d+);", lambda found: chr(int(found[1])), node[2].replace("<br/>", "\n")))
            assert "\\n" not in labels[-1]  # Mermaid breaks the line there
            styled.add(node[3])
        elif link := re.fullmatch(r" {4}n(\d+) -->(?:\|[\w, ]+\|)? n(\d+)", line):
            links.append((int(link[1]), int(link[2])))
        else:
            style = re.fullmatch(r" {4}classDef (\w+) (\w+:#\w{6},?){3}(stroke-dasharray:5 3)?", line)
            assert style, line
            styles.add(style[1])
    assert styled <= styles
    return labels, links


def read_dot(text: str) -> tuple[list[dict[str, str]], list[tuple[int, int]]]:
    """Attributes of the boxes and links; refuses every line it does not know."""
    first, *lines, last = text.removesuffix("\n").split("\n")
    assert (first, last) == ("digraph flow {", "}")
    attribute = r'(\w+)=("(?:[^"\\]|\\.)*"|\w+)'
    boxes: list[dict[str, str]] = []
    links = []
    for line in lines:
        if node := re.fullmatch(rf" {{4}}(n\d+|node|edge) \[({attribute}(?:, {attribute})*)\];", line):
            values = {
                name: unquoted(value.removeprefix('"').removesuffix('"'))
                for name, value in re.findall(attribute, node[2])
            }
            if node[1] not in ("node", "edge"):
                assert node[1] == f"n{len(boxes)}"
                boxes.append(values)
        else:
            link = re.fullmatch(rf" {{4}}n(\d+) -> n(\d+)(?: \[{attribute}\])?;", line)
            assert link, line
            links.append((int(link[1]), int(link[2])))
    return boxes, links


class Drawn(NamedTuple):
    """A box of an SVG picture."""

    title: str
    text: list[str]
    x: float
    y: float
    width: float
    height: float


class Picture(NamedTuple):
    boxes: dict[str, Drawn]
    folded: list[Drawn]
    paths: dict[str, str]
    legend: list[str]
    width: float
    height: float


def read_svg(text: str) -> Picture:
    root = ElementTree.fromstring(text)  # of our own making
    width, height = (float(part) for part in root.attrib["viewBox"].split()[2:])
    boxes: dict[str, Drawn] = {}
    folded = []
    for group in root.iter(f"{SVG}g"):
        title, rects = group.find(f"{SVG}title"), group.findall(f"{SVG}rect")
        if title is None:
            continue
        place = {name: float(rects[-1].attrib[name]) for name in ("x", "y", "width", "height")}
        box = Drawn(title.text or "", [one.text or "" for one in group.iter(f"{SVG}text")], **place)
        if identity := group.get("data-execution-id"):
            assert identity not in boxes
            boxes[identity] = box
        else:
            folded.append(box)
    paths: dict[str, str] = {}
    for path in root.iter(f"{SVG}path"):
        if identity := path.get("data-edge-id"):
            assert identity not in paths
            paths[identity] = path.attrib["d"]
            assert path.attrib["marker-end"] == f"url(#arrow-{FLOW})"
    legend = [one.text or "" for one in root.findall(f"{SVG}g")[-1].iter(f"{SVG}text")]
    return Picture(boxes, folded, paths, legend, width, height)


def traced(lines: list[str], names: dict[str, int]) -> set[tuple[int, int]]:
    """The links as the lines of a drawing lead from sign to sign."""
    signs = {look.sign for look in LOOKS.values()}
    down = set("│├┤┼┬╭╮")
    found = [next((word for word in line.split() if word in names), None) for line in lines]
    grid = [line[: line.index(f"  {name} ")] if name else line for line, name in zip(lines, found, strict=True)]

    def at(row: int, column: int) -> str:
        return grid[row][column] if row < len(grid) and column < len(grid[row]) else " "

    def arrives(row: int, column: int) -> int | None:
        while (sign := at(row, column)) in down:
            row += 1
        return names[str(found[row])] if sign in signs else None

    links = set()
    for row, name in enumerate(found):
        if not name:
            continue
        column = next(place for place, sign in enumerate(grid[row]) if sign in signs)
        first = last = column
        if row + 1 < len(grid) and not found[row + 1]:
            while first and at(row + 1, first - 1) == "─":
                first -= 2
            while at(row + 1, last + 1) == "─":
                last += 2
        # A lane that is only passed stands as it is.
        ends = [place for place in range(first, last + 1, 2) if place == column or at(row + 1, place) != "│"]
        links |= {(names[name], to) for end in ends if (to := arrives(row + 1, end)) is not None}
    return links


@settings(deadline=None)
@given(flows())
def test_every_member_and_edge_is_drawn_exactly_once(drawn: tuple[FlowGraph, list[tuple[int, int]]]) -> None:
    graph, edges = drawn

    labels, links = read_mermaid(to_mermaid(graph))
    assert [label.split()[1] for label in labels] == [node.name for node in graph.nodes]
    assert sorted(links) == sorted(edges)

    boxes, links = read_dot(to_dot(graph))
    assert [box["label"].split()[1] for box in boxes] == [node.name for node in graph.nodes]
    assert sorted(links) == sorted(edges)

    picture = read_svg(to_svg(graph))
    assert picture.boxes.keys() == {str(node.execution_id) for node in graph.nodes}
    assert picture.paths.keys() == {str(edge.edge_id) for edge in graph.edges}
    assert not picture.folded

    after = {node.name: {f"n{above}" for above, below in edges if f"n{below}" == node.name} for node in graph.nodes}
    told = {}
    for line in ALL["text"](graph).split("\n"):
        if found := re.search(r" (n\d+) +(\w+)(?: +after (?:(?:any|2) of \d+: |(?:all \d+ )?settled: )?(.*))?$", line):
            assert found[1] not in told
            told[found[1]] = {name.split()[0] for name in (found[3] or "").split(", ") if name}
    assert told == after


@settings(deadline=None)
@given(flows())
def test_every_box_tells_state_and_policy_without_colours(drawn: tuple[FlowGraph, list[tuple[int, int]]]) -> None:
    graph, edges = drawn
    into = Counter(below for _, below in edges)
    mermaid, dot, svg = read_mermaid(to_mermaid(graph))[0], read_dot(to_dot(graph))[0], read_svg(to_svg(graph))
    text = ALL["text"](graph).split("\n")
    for number, node in enumerate(graph.nodes):
        settled = f"all {into[number]} settled" if into[number] > 1 else "settled"
        joins = {AnyOf: f"any of {into[number]}", Quorum: f"2 of {into[number]}", AllSettled: settled}
        join = joins.get(type(node.policy), "")
        join = join if into[number] else ""
        wanted = f"{LOOKS[node.state].sign} {node.name}\n{node.state}" + (f" · {join}" if join else "")
        assert mermaid[number] == wanted
        assert dot[number]["label"] == wanted
        assert "\n".join(svg.boxes[str(node.execution_id)].text) == wanted
        line = next(line for line in text if f" {node.name} " in line)
        assert LOOKS[node.state].sign in line
        assert re.search(rf" {node.name} +{node.state}\b", line)
        assert (f"after {join}: " in line) == bool(join)


@settings(deadline=None)
@given(flows(most=9))
def test_the_lines_of_the_drawing_lead_to_what_comes_after(drawn: tuple[FlowGraph, list[tuple[int, int]]]) -> None:
    graph, edges = drawn
    linked = {number for pair in edges for number in pair}
    names = {node.name: number for number, node in enumerate(graph.nodes)}
    lines = [plain(line) for line in to_text(graph, fold=None)]
    assert {pair for pair in traced(lines, names) if linked.issuperset(pair)} == set(edges)


@given(flows(most=30))
@settings(max_examples=50, deadline=None)
def test_no_boxes_overlap_and_links_end_at_boxes_and_pass_none(
    drawn: tuple[FlowGraph, list[tuple[int, int]]],
) -> None:
    graph, _ = drawn
    picture = read_svg(to_svg(graph))
    boxes = picture.boxes.values()
    for one, other in combinations(boxes, 2):
        assert (
            one.x + one.width + 8 <= other.x
            or other.x + other.width + 8 <= one.x
            or one.y + one.height + 8 <= other.y
            or other.y + other.height + 8 <= one.y
        )
    for box in boxes:
        assert 0 <= box.x <= box.x + box.width <= picture.width
        assert 0 <= box.y <= box.y + box.height <= picture.height
    for edge in graph.edges:
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", picture.paths[str(edge.edge_id)])]
        start, end = picture.boxes[str(edge.upstream_execution_id)], picture.boxes[str(edge.downstream_execution_id)]
        assert start.x < numbers[0] < start.x + start.width
        assert numbers[1] == pytest.approx(start.y + start.height, abs=0.11)
        assert end.x < numbers[-2] < end.x + end.width
        assert numbers[-1] == pytest.approx(end.y, abs=0.11)
        for x, top, bottom in re.findall(r" ([\d.]+) ([\d.]+)V([\d.]+)", picture.paths[str(edge.edge_id)]):
            assert not any(
                box.x < float(x) < box.x + box.width and box.y < float(bottom) and float(top) < box.y + box.height
                for box in boxes
            )


def test_a_long_link_goes_around_the_boxes_between() -> None:
    graph = flow([member(number) for number in range(4)], [(0, 1), (1, 2), (2, 3), (0, 3)])
    picture = read_svg(to_svg(graph))
    heights = [(box.y, box.y + box.height) for box in picture.boxes.values()]
    path = picture.paths[str(graph.edges[-1].edge_id)]
    passed = re.findall(r" ([\d.]+) ([\d.]+)V([\d.]+)", path)
    assert [(float(top), float(bottom)) for _, top, bottom in passed] == heights[1:3]
    for (x, _, _), box in zip(passed, list(picture.boxes.values())[1:3], strict=True):
        assert not box.x < float(x) < box.x + box.width


@given(flows(kinds=1, most=40), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_folding_keeps_members_and_never_joins_what_differs(
    drawn: tuple[FlowGraph, list[tuple[int, int]]], fold: int
) -> None:
    graph, edges = drawn
    boxes, links = read_dot(to_dot(graph, fold=fold))
    sizes = [
        int(found[1].replace(",", "")) if (found := re.search(r" × ([\d,]+)", box["label"])) else 1 for box in boxes
    ]
    assert sum(sizes) == len(graph.nodes)
    assert all(size == 1 or size > fold for size in sizes)
    assert len({box["label"] for box in boxes}) == len(boxes)
    singles = {box["label"].split()[1]: number for number, box in enumerate(boxes) if sizes[number] == 1}
    kept = [(singles[f"n{a}"], singles[f"n{b}"]) for a, b in edges if f"n{a}" in singles and f"n{b}" in singles]
    assert sorted(kept) == sorted(pair for pair in links if all(sizes[end] == 1 for end in pair))
    # A member drawn alone is above all members of a folded box, or above none.
    for above, below in set(links):
        for end, way in ((above, 0), (below, 1)):
            if sizes[end] == 1 and sizes[above + below - end] > 1:
                number = int(boxes[end]["label"].split()[1][1:])
                assert len({pair for pair in edges if pair[way] == number}) >= sizes[above + below - end]


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_is_safe_everywhere(name: str) -> None:
    graph = flow(
        [member(0, name, kind=name, state=State.FAILED, failure=name), member(1, name, policy=AnyOf()), member(2)],
        [(0, 1), (0, 2)],
    )
    labels, links = read_mermaid(to_mermaid(graph))
    boxes, again = read_dot(to_dot(graph))
    picture = read_svg(to_svg(graph))
    assert links == again == [(0, 1), (0, 2)]
    assert len(labels) == len(set(labels)) == 3
    lines = [label.split("\n") for label in labels]
    assert all(len(parts) == 2 for parts in lines)
    assert [box["label"].split("\n") for box in boxes] == [
        [part.replace("\\\u200cn", "\\n") for part in parts] for parts in lines
    ]
    assert [box.text for box in picture.boxes.values()] == [box["label"].split("\n") for box in boxes]
    for box in picture.boxes.values():
        assert all(part.isprintable() or "\u200d" in part for part in box.text)
        assert 0.61 * 13 * len(box.text[0].replace("\u200d", "")) < box.width
        assert len(box.text[0]) < 60
    if name.isprintable() and name.strip():
        for title in (next(iter(picture.boxes.values())).title, boxes[0]["tooltip"]):
            assert title.split("\n")[0] == name
            assert title.split("\n")[-1] == name
    for unicode in (True, False):
        for line in to_text(graph, unicode=unicode):
            assert all(sign.isprintable() or sign == "\u200d" for sign in plain(line))
            assert unicode or plain(line).isascii()


def test_long_names_keep_both_ends_and_stay_apart() -> None:
    text = ALL["text"](flow([member(0, "a" * 300 + "[17]"), member(1, "a" * 299 + "b[17]"), member(2, "a" * 20)]))
    assert "a" * 23 + "…aaaa[17]" in text
    assert "a" * 23 + "…aaab[17]" in text
    assert " " + "a" * 20 + " " in text


def test_same_names_get_the_end_of_the_id_that_differs() -> None:
    short = [ExecutionId(UUID(f"aaaaaaaa-0000-7000-8000-0000{end}")) for end in ("9f3c01a2", "9f3c01a3")]
    longer = [ExecutionId(UUID(f"aaaaaaaa-0000-7000-8000-{end}")) for end in ("00009f3c01a2", "00019f3c01a2")]
    for name, lead in (("same", "same ("), ("", "work ")):
        for ids, parts in ((short, ("9f3c01a2", "9f3c01a3")), (longer, ("00009f3c01a2", "00019f3c01a2"))):
            nodes = [
                FlowNode(execution_id=one, name=name, execution_kind="work", state=State.ACTIVE, created_at=AT)
                for one in ids
            ]
            text = ALL["text"](flow(nodes))
            assert [f"{lead}{part}" in text for part in parts] == [True, True], text


def test_an_empty_flow_says_so() -> None:
    graph = flow([])
    assert [plain(line) for line in to_text(graph)] == ["no members"]
    assert "no members" in to_mermaid(graph)
    assert "no members" in to_dot(graph)
    assert read_svg(to_svg(graph)).legend == ["no members"]


@pytest.mark.parametrize("kind", ALL)
def test_edges_to_members_that_are_missing_are_left_out(kind: str) -> None:
    nodes = [member(0), member(1)]
    assert ALL[kind](flow(nodes, [(0, 1), (5, 1), (0, 6)])) == ALL[kind](flow(nodes, [(0, 1)]))


def test_a_join_counts_the_edges_it_has_even_from_members_that_are_missing() -> None:
    text = ALL["text"](flow([member(0), member(1, policy=AnyOf())], [(0, 1), (0, 1), (7, 1)]))
    assert text.split("\n")[1].endswith("after any of 3: n0 ×2")


def test_the_drawing_for_the_terminal() -> None:
    graph = flow(
        [
            member(0, "ask", state=State.COMPLETED),
            member(1, "claude", state=State.COMPLETED),
            member(2, "gpt", state=State.FAILED),
            member(3, "llama", state=State.ACTIVE),
            member(4, "vote", state=State.WAITING_CHILDREN, policy=Quorum(2)),
            member(5, "tell", state=State.WAITING_CHILDREN),
            member(6, "log", state=State.SUSPENDED),
            member(7, "", kind="tidy", state=State.DELAYED),
        ],
        [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4), (4, 5), (6, 5)],
    )
    assert [plain(line) for line in to_text(graph)] == [
        "✓      ask            completed",
        "├─┬─╮",
        "✓ │ │  claude         completed         after ask",
        "│ ✗ │  gpt            failed            after ask",
        "├─╯ │",
        "│   ►  llama          active            after ask",
        "├───╯",
        "◇      vote           waiting_children  after 2 of 3: claude, gpt, llama",
        "│ ‖    log            suspended",
        "├─╯",
        "◇      tell           waiting_children  after vote, log",
        "",
        "◷      tidy 00000008  delayed",
    ]
    assert [plain(line) for line in to_text(graph, unicode=False, width=46)] == [
        "v      ask            completed",
        "+-+-+",
        "v | |  claude         completed         after>",
        "| x |  gpt            failed            after>",
        "+-+ |",
        "|   >  llama          active            after>",
        "+---+",
        ".      vote           waiting_children  after>",
        "| =    log            suspended",
        "+-+",
        ".      tell           waiting_children  after>",
        "",
        "~      tidy 00000008  delayed",
    ]
    assert [[(piece.text, piece.state) for piece in line if piece.state] for line in to_text(graph)][3] == [
        ("✗", State.FAILED),
        ("failed", State.FAILED),
    ]


@settings(deadline=None)
@given(flows(), st.integers(8, 90), st.booleans())
def test_lines_are_cut_to_the_width(drawn: tuple[FlowGraph, list[tuple[int, int]]], width: int, unicode: bool) -> None:
    for line in to_text(drawn[0], width=width, unicode=unicode, fold=None):
        assert len(plain(line)) <= width
        assert plain(line) == plain(line).rstrip()


def test_upstreams_that_do_not_fit_are_counted() -> None:
    graph = flow([member(number) for number in range(31)], [(number, 30) for number in range(30)])
    last = plain(to_text(graph, width=60, fold=None)[-1])
    assert last.endswith("after n0, n1, n2, n3, n4, n5 and 24 more")
    assert plain(to_text(graph, width=36, fold=None)[-1]).endswith("after 30 members")
    assert plain(to_text(graph, fold=None)[-1]).endswith(", n28, n29")


def test_siblings_that_are_alike_are_one_line() -> None:
    count = 1000
    nodes = [member(0, "split", kind="split", state=State.COMPLETED)]
    nodes += [
        member(number, f"ask[{number}]", kind="ask", state=State.FAILED if number in (17, 403) else State.COMPLETED)
        for number in range(1, count + 1)
    ]
    nodes.append(member(count + 1, "join", kind="join", policy=Quorum(900), state=State.WAITING_CHILDREN))
    edges = [(0, number) for number in range(1, count + 1)] + [(number, count + 1) for number in range(1, count + 1)]
    graph = flow(nodes, edges)
    assert [plain(line) for line in to_text(graph)] == [
        "✓  split        completed",
        "✗  ask × 1,000  2 failed (ask[17], ask[403]), 998 completed  after split",
        "◇  join         waiting_children  after 900 of 1,000: ask × 1,000",
    ]
    assert plain(to_text(graph, unicode=False)[1]).startswith("x  ask x 1,000  2 failed")
    assert [piece for piece in to_text(graph)[1] if piece.state] == [
        ("✗", State.FAILED),
        ("2 failed", State.FAILED),
        (", 998 completed", State.COMPLETED),
    ]
    picture = read_svg(to_svg(graph, fold=8))
    assert [box.text for box in picture.folded] == [["✗ ask × 1,000", "2 failed, 998 completed"]]
    assert picture.legend == ["✗ failed 2", "◇ waiting_children 1", "✓ completed 999"]
    assert len(read_mermaid(to_mermaid(graph, fold=8))[0]) == 3
    assert len(to_text(graph, fold=count)) == len(to_text(graph, fold=None)) > count


def test_a_map_over_a_map_folds_and_says_that_it_goes_one_by_one() -> None:
    nodes = [member(number, f"{'fetch' if number < 20 else 'parse'}-{number % 20}") for number in range(40)]
    graph = flow(nodes, [(number, number + 20) for number in range(20)])
    assert [plain(line) for line in to_text(graph)] == [
        "○  fetch × 20  20 waiting",
        "○  parse × 20  20 waiting  after fetch × 20 (one each)",
    ]
    meshed = flow(nodes, [(one, other) for one in range(20) for other in range(20, 40)])
    assert plain(to_text(meshed)[1]).endswith("after fetch × 20")


def test_alike_siblings_of_different_members_are_not_joined() -> None:
    nodes = [member(number, kind="root" if number < 2 else "leaf") for number in range(22)]
    lines = [plain(line) for line in to_text(flow(nodes, [(number % 2, number) for number in range(2, 22)]))]
    assert [line.split("10 waiting")[1].split() for line in lines if "10 waiting" in line] == [
        ["after", "n0"],
        ["after", "n1"],
    ]


def test_too_many_branches_are_shown_layer_by_layer() -> None:
    edges = [(one, other) for one in range(13) for other in range(13, 26)]
    lines = [plain(line) for line in to_text(flow([member(number) for number in range(26)], edges), fold=None)]
    assert lines[13] == ""
    assert [line.split()[1] for line in lines if line] == [f"n{number}" for number in range(26)]
    assert all("│" not in line for line in lines)


def test_the_tooltip_has_what_does_not_fit_the_box() -> None:
    node = member(0, "x" * 300, kind="work", state=State.FAILED, failure="ValueError: <no>\n  second line")
    assert read_svg(to_svg(flow([node]))).boxes[str(node.execution_id)].title.split("\n") == [
        "x" * 300,
        f"work {node.execution_id}",
        "failed",
        "ValueError: <no>",
        "  second line",
    ]
    huge = member(0, failure="y" * 100_000)
    assert len(to_svg(flow([huge]))) < 5000


def brightness(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((brightness(one), brightness(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_every_state_has_its_own_readable_look() -> None:
    assert set(LOOKS) == set(State)
    for part in ("sign", "ascii_sign", "fill", "line", "ink"):
        assert len({getattr(look, part) for look in LOOKS.values()}) == len(State), part
    for state, look in LOOKS.items():
        assert contrast(look.ink, look.fill) >= 7, state
        assert len(look.sign) == len(look.ascii_sign) == 1
        assert look.ascii_sign.isascii()
        assert look.ascii_sign not in "+-|"
    for colour in (fold.LINE, *(look.line for look in LOOKS.values())):
        for background in ("#ffffff", "#0d1117"):
            assert contrast(colour, background) >= 3, (colour, background)


def sample(seed: int) -> FlowGraph:
    dice = random.Random(seed)
    nodes = [
        member(number, dice.choice(["load", "clean", "score"]), kind=dice.choice("ab"), state=dice.choice(list(State)))
        for number in range(60)
    ]
    edges = [(one, other) for one in range(60) for other in range(one + 1, min(60, one + 9)) if dice.random() < 0.2]
    return flow(nodes, edges)


def digest() -> str:
    drawn = [draw(sample(seed)) for seed in range(5) for draw in ALL.values()]
    drawn += [to_svg(sample(seed), fold=1) for seed in range(5)]
    return hashlib.sha256("\0".join(drawn).encode()).hexdigest()


def test_the_same_graph_gives_the_same_bytes_in_every_process() -> None:
    for seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", "from tests.unit.test_drawing import digest; print(digest())"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.strip() == digest()


def big(shape: str) -> FlowGraph:
    """Ten thousand nodes with `--full`, a thousand without."""
    size = 10_000 if sampling.is_full() else 1_000
    half, wide = size // 2, size // 10
    match shape:
        case "chain":
            edges = [(number, number + 1) for number in range(size - 1)]
        case "skip chain":
            edges = [(number, number + 1) for number in range(half - 1)] + [(0, number) for number in range(2, half)]
        case "diamond":
            edges = [(0, number) for number in range(1, wide + 1)]
            edges += [(number, wide + 1) for number in range(1, wide + 1)]
        case "layers":
            dice = random.Random(1)
            edges = [
                (100 * layer + dice.randrange(100), 100 * layer + 100 + number)
                for layer in range(size // 100 - 1)
                for number in range(100)
                for _ in range(3)
            ]
        case _:
            edges = []
    count = max((max(pair) for pair in edges), default=size - 1) + 1
    return flow([member(number, kind=f"k{number % 3}") for number in range(count)], edges)


@pytest.mark.parametrize("shape", ["chain", "skip chain", "diamond", "layers", "alone"])
def test_large_graphs_are_drawn_whole_and_in_proportion(shape: str) -> None:
    graph = big(shape)
    count, links = len(graph.nodes), len(graph.edges)
    drawn = {kind: draw(graph) for kind, draw in ALL.items()}
    assert len(read_mermaid(drawn["mermaid"])[1]) == links
    assert len(read_dot(drawn["dot"])[0]) == count
    picture = read_svg(drawn["svg"])
    assert (len(picture.boxes), len(picture.paths)) == (count, links)
    assert sum(bool(re.search(r" n\d+ ", line)) for line in drawn["text"].split("\n")) == count
    for text in drawn.values():
        assert len(text) < 1500 * (count + links)
    assert len(to_text(graph)) <= count + links
