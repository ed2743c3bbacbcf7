"""Flows as pictures: lines for a terminal, Mermaid, Graphviz and SVG. They make text from a graph and use no database.

All four show the same boxes and links and take their signs and colours from `LOOKS`. Every box has a sign and the
name of the state, so that nothing depends on colours. The same graph gives the same text, byte for byte.

`fold` draws similar members as one box: more than that many of one kind and one policy, with similar neighbours above
and below. Similar means the same neighbours, or neighbours that are folded too, as in a `map` over a `map`.
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
