"""Draws the pictures of the documentation: flows, with the code of `flowfabric flow export`, and lives of things.

    python scripts/pictures.py           write docs/concepts/*.svg
    python scripts/pictures.py --check   change nothing; exit 1 and name the pictures that differ

A sample lists members, their upstreams and their states. A life lists what a thing can be, and what leads from one to
the next. tests/docs/test_pictures.py checks on a database that flows reach these states.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from uuid import UUID, uuid5

from flowfabric.drawing.fold import FOLD, LINE, LOOKS
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
_COLUMN, _LINE, _WIDTH, _HEIGHT = 270, 70, 110, 34


def life(name: str) -> str:
    """Return the SVG of a life."""
    places, changes = LIVES[name]
    centres = {one: (70 + column * _COLUMN, 34 + row * _LINE) for one, (column, row) in places.items()}
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


class Close(NamedTuple):
    """What happens to an attempt, the reason with which that closes its stream, and the colour of that state."""

    when: str
    reason: str
    state: State


LIFE = (
    Close("it completes", "attempt_success", State.COMPLETED),
    Close("it fails, retried or not", "attempt_failure", State.FAILED),
    Close("it is cancelled", "attempt_cancelled", State.CANCELLED),
    Close("a time limit ends it", "expired", State.EXPIRED),
    Close("it waits too long", "suspension_timeout", State.EXPIRED),
    Close("it is skipped", "dependency_impossible", State.SKIPPED),
    Close("its worker is not heard from", "lease_expired", State.DELAYED),
    Close("an operator takes its lease", "lease_revoked", State.DELAYED),
)
RECLAIMED = Close("another worker takes over", "reclaimed", State.WAITING)  # after the last two
_ROW, _WIDE, _HIGH = 40, 172, 28
_LEFT, _MIDDLE, _RIGHT = 16, 470, 730


def life_of_a_stream() -> str:
    """Return the SVG of what opens and closes a stream: an attempt on the left, the reasons of closing beside it."""
    height = 16 + _ROW * len(LIFE)
    middle = 16 + (_ROW * len(LIFE) - (_ROW - _HIGH)) / 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 918 {height}" width="918" height="{height}" '
        "font-family=\"ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace\" font-size=\"11\">",
        "<title>The life of a stream</title>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.5L8 4L0 7.5z" fill="{LINE}"/></marker></defs>',
        *_box(_LEFT, middle - _HIGH / 2, "open", State.ACTIVE),
        _note(_LEFT + _WIDE / 2, middle - 22, "an attempt starts"),
        _note(_LEFT + _WIDE / 2, middle + 30, "waits leave it open"),
    ]
    last = 16 + _ROW * (len(LIFE) - 1.5) + _HIGH / 2
    for number, close in enumerate(LIFE):
        y = 16 + _ROW * number + _HIGH / 2
        lines += [
            _arrow(_LEFT + _WIDE, middle, _MIDDLE, y),
            _note(_MIDDLE - 12, y - 6, close.when, anchor="end"),
            *_box(_MIDDLE, y - _HIGH / 2, close.reason, close.state),
        ]
        if close.reason.startswith("lease_"):
            lines.append(_arrow(_MIDDLE + _WIDE, y, _RIGHT, last))
    lines += _box(_RIGHT, last - _HIGH / 2, RECLAIMED.reason, RECLAIMED.state)
    lines.append(_note(_RIGHT + _WIDE / 2, last + 30, RECLAIMED.when))
    return "\n".join([*lines, "</svg>"]) + "\n"


class Reading(NamedTuple):
    """What a subscription finds after its cursor, what it does then, and the colour of that."""

    finds: str
    does: str
    state: State


CURSOR = (
    Reading("stored events", "reads pages", State.ACTIVE),
    Reading("the end of the log", "joins the loop", State.WAITING),
    Reading("events were removed", "cursor_expired", State.FAILED),
    Reading("the log does not reach it", "cursor_ahead", State.FAILED),
)
AFTERWARDS = (
    Reading("an event", "yields it, with its cursor", State.COMPLETED),
    Reading("30 s without a database", "StreamDisconnected", State.EXPIRED),
)


def life_of_a_cursor() -> str:
    """Return the SVG of what happens to a cursor: given on the left, what the log says to it, and what comes of it."""
    height = 16 + _ROW * len(CURSOR)
    middle = 16 + (_ROW * len(CURSOR) - (_ROW - _HIGH)) / 2
    right = 760
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 948 {height}" width="948" height="{height}" '
        "font-family=\"ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace\" font-size=\"11\">",
        "<title>The life of a cursor</title>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.5L8 4L0 7.5z" fill="{LINE}"/></marker></defs>',
        *_box(_LEFT, middle - _HIGH / 2, "subscribe(after=cursor)", State.DELAYED),
        _note(_LEFT + _WIDE / 2, middle - 22, "a stored cursor"),
        _note(_LEFT + _WIDE / 2, middle + 30, "stored again after acting"),
    ]
    for number, reading in enumerate(CURSOR):
        y = 16 + _ROW * number + _HIGH / 2
        lines += [
            _arrow(_LEFT + _WIDE, middle, _MIDDLE, y),
            _note(_MIDDLE - 12, y - 6, reading.finds, anchor="end"),
            *_box(_MIDDLE, y - _HIGH / 2, reading.does, reading.state),
        ]
    for number, reading in enumerate(AFTERWARDS):
        y = 16 + _ROW * number + _HIGH / 2
        lines += [
            _arrow(_MIDDLE + _WIDE, 16 + _HIGH / 2, right, y),
            _arrow(_MIDDLE + _WIDE, 16 + _ROW + _HIGH / 2, right, y),
            *_box(right, y - _HIGH / 2, reading.does, reading.state),
        ]
    lines.append(_note(right + _WIDE / 2, 16 + _ROW * 2 + 14, "with the cursor to continue with"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _box(x: float, y: float, text: str, state: State) -> list[str]:
    look = LOOKS[state]
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{_WIDE}" height="{_HIGH}" rx="7" fill="{look.fill}" stroke="{look.line}"/>',
        f'<text x="{x + _WIDE / 2:g}" y="{y + _HIGH / 2 + 4:g}" text-anchor="middle" font-weight="600" '
        f'fill="{look.ink}">{text}</text>',
    ]


def _note(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{LINE}">{text}</text>'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A curve that leaves a box to the right and arrives level."""
    bend = min((to_x - x) / 2, 60)
    path = f"M{x:g} {y:g}C{x + bend:g} {y:g} {x:g} {to_y:g} {x + bend:g} {to_y:g}L{to_x:g} {to_y:g}"
    return f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.4" marker-end="url(#arrow)"/>'


def drawn() -> dict[str, str]:
    """Return every picture by the name of its file."""
    lives = {f"{name}.svg": life(name) for name in LIVES}
    fixed = {"stream.svg": life_of_a_stream(), "cursor.svg": life_of_a_cursor()}
    return {f"{name}.svg": picture(name) for name in SAMPLES} | fixed | lives


def main() -> int:
    drifted = []
    for name, text in drawn().items():
        file = TARGET / name
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
