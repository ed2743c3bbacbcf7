"""Draws the pictures in the documentation: flows, with the code of `flowfabric flow export`, and lives of things.

    python scripts/pictures.py           write docs/concepts/*.svg
    python scripts/pictures.py --check   change nothing; exit 1 and name the pictures that differ

A sample lists members, their upstreams and their states. A life lists what a thing can be, and what leads from one to
the next. tests/docs/test_pictures.py checks on a database that flows reach these states, and that things have these states.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from uuid import UUID, uuid5

from flowfabric.drawing.fold import FOLD
from flowfabric.drawing.svg import to_svg
from flowfabric.values.flow import CancellationPolicy, EdgeSnapshot, FlowGraph, FlowNode, FlowSnapshot
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.joins import AllOf, AnyOf, EdgeGroupPolicy, OnSatisfied, Quorum
from flowfabric.values.state import State

TARGET = Path(__file__).resolve().parent.parent / "docs" / "concepts"
AT = datetime(2030, 1, 1, tzinfo=UTC)
SPACE = UUID("6ffbc1c5-5a8f-5d0b-8a56-3e1d21d3e1a9")  # namespace of the ids, which are the same every time


class Member(NamedTuple):
    """A member of a sample, and its state."""

    state: State
    after: tuple[str, ...] = ()
    policy: EdgeGroupPolicy = AllOf()
    kind: str = ""


class Sample(NamedTuple):
    """A flow to draw. `follows`: the sample whose unsuccessful members were all replayed."""

    title: str
    members: dict[str, Member]
    follows: str | None = None
    cancelled: CancellationPolicy | None = None


MODELS = ("small", "medium", "large", "huge")
PAGES = tuple(f"page {number}" for number in range(1, 1001))
FILM = {
    "probe": Member(State.COMPLETED),
    "encode 480p": Member(State.COMPLETED, ("probe",), kind="encode"),
    "encode 1080p": Member(State.ACTIVE, ("probe",), kind="encode"),
    "package": Member(State.WAITING_CHILDREN, ("encode 480p", "encode 1080p")),
    "subtitles": Member(State.FAILED, ("probe",)),
    "index": Member(State.SKIPPED, ("subtitles",)),
    "recommend": Member(State.SKIPPED, ("index",)),
    "tell": Member(State.WAITING_CHILDREN, ("package", "recommend"), AnyOf(OnSatisfied.LET_RUN)),
}
SAMPLES = {
    "flow": Sample(
        "order",
        {
            "order": Member(State.COMPLETED),
            "reserve": Member(State.COMPLETED, ("order",)),
            "charge": Member(State.ACTIVE, ("order",)),
            "pack": Member(State.WAITING_CHILDREN, ("reserve", "charge")),
            "send": Member(State.WAITING_CHILDREN, ("pack",)),
        },
    ),
    "flow-race": Sample(
        "model race",
        {
            "small": Member(State.COMPLETED, kind="ask"),
            "medium": Member(State.COMPLETED, kind="ask"),
            "large": Member(State.CANCELLED, kind="ask"),
            "huge": Member(State.CANCELLED, kind="ask"),
            "judge": Member(State.ACTIVE, MODELS, Quorum(2)),
            "print": Member(State.WAITING_CHILDREN, ("judge",)),
        },
    ),
    "flow-failure": Sample("media pipeline", FILM),
    "flow-replay": Sample(
        "media pipeline",
        FILM
        | {
            "subtitles": Member(State.WAITING, ("probe",)),
            "index": Member(State.WAITING_CHILDREN, ("subtitles",)),
            "recommend": Member(State.WAITING_CHILDREN, ("index",)),
        },
        follows="flow-failure",
    ),
    "flow-cancel": Sample(
        "order",
        {
            "order": Member(State.COMPLETED),
            "reserve": Member(State.COMPLETED, ("order",)),
            "charge": Member(State.ACTIVE, ("order",)),
            "pack": Member(State.CANCELLED, ("reserve", "charge")),
            "send": Member(State.CANCELLED, ("pack",)),
        },
        cancelled=CancellationPolicy.CANCEL_PENDING,
    ),
    "flow-fan": Sample(
        "book",
        {"split": Member(State.COMPLETED)}
        | {
            page: Member(State.COMPLETED if place < 990 else State.ACTIVE, ("split",), kind="count")
            for place, page in enumerate(PAGES)
        }
        | {"total": Member(State.WAITING_CHILDREN, PAGES)},
    ),
}


class Life(NamedTuple):
    """The life of a thing: what it can be, each with its column and row, and what leads from one to another."""

    places: dict[str, tuple[int, int]]
    changes: tuple[tuple[str, str, str], ...]


LIVES = {
    "limit-slot": Life(
        {"free": (0, 1), "of a grant": (1, 0), "of a run": (1, 2)},
        (
            ("free", "of a grant", "scheduler grants"),
            ("free", "of a run", "worker claims"),
            ("of a grant", "of a run", "grant is consumed"),
            ("of a grant", "free", "grant expires"),
            ("of a run", "free", "ends, fails, waits, sleeps"),
        ),
    ),
    "limit-reservation": Life(
        {"held": (0, 1), "charged": (1, 1), "given back": (2, 0), "settled": (2, 2)},
        (
            ("held", "given back", "lease ends"),
            ("held", "settled", "settle"),
            ("held", "charged", "lease is lost"),
            ("charged", "settled", "next run settles"),
            ("charged", "given back", "next run gives back"),
        ),
    ),
}
_COLUMN, _ROW, _WIDTH, _HEIGHT = 270, 70, 110, 34


def life(name: str) -> str:
    """Return the SVG of a life."""
    places, changes = LIVES[name]
    centres = {one: (70 + column * _COLUMN, 34 + row * _ROW) for one, (column, row) in places.items()}
    width = max(x for x, _ in centres.values()) + 70
    height = max(y for _, y in centres.values()) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="13">',
        '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for start, end, words in changes:
        (x1, y1), (x2, y2) = centres[start], centres[end]
        is_upright = x1 == x2
        away = 0 if is_upright else (_WIDTH // 2 if x2 > x1 else -_WIDTH // 2)
        down = (_HEIGHT // 2 if y2 > y1 else -_HEIGHT // 2) if is_upright else 0
        shift = 10 if (end, start) in {(a, b) for a, b, _ in changes} else 0
        bend = shift if x2 > x1 else -shift  # two that lead to and fro do not cover each other
        a, b, c, d = x1 + away, y1 + down - bend, x2 - away, y2 - down - bend
        lines.append(f'<path d="M{a} {b}L{c} {d}" stroke="#667" fill="none" marker-end="url(#end)"/>')
        anchor, x, y = ("start", a + 8, (b + d) // 2 + 4) if is_upright else ("middle", (a + c) // 2, (b + d) // 2 - 6)
        y += 22 if bend < 0 else 0
        halo = 'stroke="#fff" stroke-width="4" paint-order="stroke"'
        lines.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#445" font-size="11" {halo}>{words}</text>')
    for one, (x, y) in centres.items():
        corner = f'x="{x - _WIDTH // 2}" y="{y - _HEIGHT // 2}"'
        lines.append(
            f'<rect {corner} width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#eef3fb" stroke="#3a6ea5"/>'
            f'<text x="{x}" y="{y + 5}" text-anchor="middle" fill="#123">{one}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def graph(name: str) -> FlowGraph:
    """Return a sample as a flow graph."""
    sample = SAMPLES[name]
    flow_id = FlowId(uuid5(SPACE, name))
    ids = {member: ExecutionId(uuid5(SPACE, f"{name}/{member}")) for member in sample.members}
    edges = tuple(
        EdgeSnapshot(
            edge_id=uuid5(SPACE, f"{name}/{upstream}/{member}"),
            flow_id=flow_id,
            upstream_execution_id=ids[upstream],
            downstream_execution_id=ids[member],
            edge_state="applied",
            created_at=AT,
        )
        for member, about in sample.members.items()
        for upstream in about.after
    )
    nodes = tuple(
        FlowNode(
            execution_id=ids[member],
            name=member,
            execution_kind=about.kind or member,
            state=about.state,
            created_at=AT,
            policy=about.policy,
        )
        for member, about in sample.members.items()
    )
    header = FlowSnapshot(
        flow_id=flow_id,
        flow_kind=sample.title,
        namespace="",
        public_flow_state="open" if sample.cancelled is None else "cancelled",
        graph_revision=len(nodes) + len(edges),
        node_count=len(nodes),
        edge_count=len(edges),
        created_at=AT,
        last_mutation_at=AT,
        cancellation_policy=sample.cancelled,
    )
    return FlowGraph(flow=header, nodes=nodes, edges=edges)


def picture(name: str) -> str:
    """Return the SVG of a sample."""
    return to_svg(graph(name), fold=FOLD)


def main() -> int:
    drifted = []
    for name in (*SAMPLES, *LIVES):
        file = TARGET / f"{name}.svg"
        text = picture(name) if name in SAMPLES else life(name)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            drifted.append(file.name)
            if "--check" not in sys.argv[1:]:
                file.write_text(text, encoding="utf-8")
    if "--check" in sys.argv[1:] and drifted:
        print(f"docs/concepts/ is out of date ({', '.join(drifted)}): run scripts/pictures.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
