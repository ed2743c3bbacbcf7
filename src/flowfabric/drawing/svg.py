"""A flow as an SVG picture."""

from __future__ import annotations

from html import escape
from typing import Final

from flowfabric.drawing.fold import LINE, LOOKS, Box, Drawing, folded, states_of, title_of, two_lines
from flowfabric.drawing.labels import columns_of, one_line
from flowfabric.drawing.layout import BOX_HEIGHT, BOX_PADDING, MARGIN, arrange, number_text
from flowfabric.values.flow import FlowGraph
from flowfabric.values.state import State

_FONT: Final = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_EM: Final = 0.61  # the width of a column of a monospaced font
_HEAD_SIZE: Final = 13
_FOOT_SIZE: Final = 11
_STACK: Final = 4.0


def to_svg(graph: FlowGraph, *, fold: int | None = None) -> str:
    """A self-contained SVG picture. Pointing at a box shows all facts about it."""
    drawing = folded(graph, fold)
    widths = [_box_width(box) for box in drawing.boxes]
    places, paths, right, bottom = arrange(drawing, widths)
    legend, right, bottom = _legend(drawing, right, bottom)
    arrow = f"arrow-{graph.flow.flow_id}"
    name = one_line(f"{graph.flow.flow_kind} {graph.flow.flow_id}")

    width, height = number_text(right + MARGIN), number_text(bottom + MARGIN)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="{_FONT}" font-size="{_FOOT_SIZE}">',
        f"<title>{escape(name)}</title>",
        f'<defs><marker id="{arrow}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.5L8 4L0 7.5z" fill="{LINE}"/></marker></defs>',
        f'<g fill="none" stroke="{LINE}" stroke-width="1.4">',
    ]
    for link, path in zip(drawing.links, paths, strict=True):
        edge = f'data-edge-id="{link.edge_id}" ' if link.edge_id else ""
        lines.append(f'<path {edge}d="{path}" marker-end="url(#{arrow})"><title>{escape(link.title)}</title></path>')
    lines.append("</g>")
    for box, (x, y), wide in zip(drawing.boxes, places, widths, strict=True):
        lines.append(_svg_box(box, x - wide / 2, y, wide))
    return "\n".join([*lines, *legend, "</svg>"]) + "\n"


def _box_width(box: Box) -> float:
    head, foot = two_lines(box)
    return max(columns_of(head) * _HEAD_SIZE * _EM, columns_of(foot) * _FOOT_SIZE * _EM, 60) + 2 * BOX_PADDING


def _svg_box(box: Box, x: float, y: float, width: float) -> str:
    look = box.look
    head, foot = two_lines(box)
    dashes = ' stroke-dasharray="5 3"' if look.is_dashed else ""
    size = f'width="{number_text(width)}" height="{number_text(BOX_HEIGHT)}" rx="7"'
    shifts = (2 * _STACK, _STACK, 0) if len(box.nodes) > 1 else (0,)
    boxes = "".join(f'<rect x="{number_text(x + by)}" y="{number_text(y + by)}" {size}/>' for by in shifts)
    identity = "" if len(box.nodes) > 1 else f' data-execution-id="{escape(str(box.nodes[0].execution_id))}"'
    middle = number_text(x + width / 2)
    return (
        f'<g{identity} fill="{look.fill}" stroke="{look.line}" stroke-width="1.4"{dashes}>'
        f"<title>{escape(title_of(box))}</title>{boxes}"
        f'<g fill="{look.ink}" stroke="none" text-anchor="middle">'
        f'<text x="{middle}" y="{number_text(y + 20)}" font-size="{_HEAD_SIZE}" font-weight="600">{escape(head)}</text>'
        f'<text x="{middle}" y="{number_text(y + 36)}">{escape(foot)}</text></g></g>'
    )


def _legend(drawing: Drawing, right: float, bottom: float) -> tuple[list[str], float, float]:
    """Return the legend of states in rows below the picture, and the new width and height."""
    chips = [
        (LOOKS[state], f"{LOOKS[state].sign} {state.value} {count:,}") for state, count in states_of(drawing).items()
    ] or [(LOOKS[State.WAITING], "no members")]
    limit = max(right, 480.0)
    x, y = MARGIN, bottom + (28 if drawing.boxes else MARGIN)
    lines = ['<g stroke-width="1">']
    for look, text in chips:
        width = columns_of(text) * _FOOT_SIZE * _EM + 20
        if x > MARGIN and x + width > limit:
            x, y = MARGIN, y + 30
        dashes = ' stroke-dasharray="5 3"' if look.is_dashed else ""
        lines.append(
            f'<rect x="{number_text(x)}" y="{number_text(y)}" width="{number_text(width)}" height="22" rx="11" '
            f'fill="{look.fill}" stroke="{look.line}"{dashes}/>'
            f'<text x="{number_text(x + 10)}" y="{number_text(y + 15)}" fill="{look.ink}">{escape(text)}</text>'
        )
        x += width + 8
        right = max(right, x - 8)
    return [*lines, "</g>"], right, y + 22
