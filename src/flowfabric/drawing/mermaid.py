"""A flow as Mermaid text."""

from __future__ import annotations

import re
from typing import Final

from flowfabric.drawing.fold import LOOKS, folded, states_of, two_lines
from flowfabric.values.flow import FlowGraph

# Written as numbers, Markdown, entities, directives and quotes are plain text to Mermaid. An underscore within a word
# already is.
_MERMAID: Final = re.compile(r"[^\w ,()-]|(?<![^\W_])_|_(?![^\W_])", re.ASCII)


def to_mermaid(graph: FlowGraph, *, fold: int | None = None) -> str:
    """A Mermaid flowchart. Its renderers refuse more than 500 links by default: use `fold` then."""
    drawing = folded(graph, fold)
    lines = ["flowchart TD"]
    for place, box in enumerate(drawing.boxes):
        head, foot = (_mermaid(text) for text in two_lines(box))
        lines.append(f'    n{place}["{head}<br/>{foot}"]:::{box.states[0][0].value}')
    lines += [f"    n{link.above} -->{f'|{link.note}|' if link.note else ''} n{link.below}" for link in drawing.links]
    for state in states_of(drawing):
        look = LOOKS[state]
        dashes = ",stroke-dasharray:5 3" if look.is_dashed else ""
        lines.append(f"    classDef {state.value} fill:{look.fill},stroke:{look.line},color:{look.ink}{dashes}")
    if not drawing.boxes:
        lines.append('    empty["no members"]')
    return "\n".join(lines) + "\n"


def _mermaid(text: str) -> str:
    text = text.replace("\\n", "\\\u200cn")  # Mermaid reads a backslash and an n as a line break, even as numbers
    return _MERMAID.sub(lambda found: found[0] if ord(found[0]) > 126 else f"#{ord(found[0])};", text)
