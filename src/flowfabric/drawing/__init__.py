"""Flows as pictures: lines for a terminal, Mermaid, Graphviz and SVG. Text from a graph, no database.

All four show the same boxes and links and take their signs and colours from `LOOKS`. A sign and the word of the state
stand in every box, so that nothing depends on colours. The same graph gives the same text, byte for byte.

`fold` draws alike members as one box: more than so many of one kind and one policy, with alike neighbours above and
below. Alike means the same neighbours, or neighbours that are folded themselves, as in a `map` over a `map`.
"""

from flowfabric.drawing.dot import to_dot
from flowfabric.drawing.fold import FOLD, LOOKS, Look
from flowfabric.drawing.labels import join_words
from flowfabric.drawing.mermaid import to_mermaid
from flowfabric.drawing.svg import to_svg
from flowfabric.drawing.text import Line, Segment, plain, to_text

__all__ = [
    "FOLD",
    "LOOKS",
    "Line",
    "Look",
    "Segment",
    "join_words",
    "plain",
    "to_dot",
    "to_mermaid",
    "to_svg",
    "to_text",
]
