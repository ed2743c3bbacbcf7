"""A flow as Graphviz text."""

from __future__ import annotations

from flowfabric.drawing.fold import LINE, folded, title_of, two_lines
from flowfabric.values.flow import FlowGraph


def to_dot(graph: FlowGraph, *, fold: int | None = None) -> str:
    """A Graphviz graph."""
    drawing = folded(graph, fold)
    lines = [
        "digraph flow {",
        '    node [shape=box, style="rounded,filled", fontname="monospace", fontsize=11];',
        f'    edge [color="{LINE}", fontcolor="{LINE}", fontname="monospace", fontsize=10];',
    ]
    for place, box in enumerate(drawing.boxes):
        head, foot = (_dot(text) for text in two_lines(box))
        look = box.look
        style = ', style="rounded,filled,dashed"' if look.is_dashed else ""
        lines.append(
            f'    n{place} [label="{head}\\n{foot}", tooltip="{_dot(title_of(box))}", '
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
    # Graphviz also reads entities in quoted text.
    return text.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", " ")
