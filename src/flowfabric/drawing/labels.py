"""The words in a picture: names of nodes, made short and safe to print."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final
from unicodedata import combining, east_asian_width

from flowfabric.values.flow import FlowNode
from flowfabric.values.ids import SHORT_ID, ExecutionId
from flowfabric.values.joins import AllSettled, AnyOf, EdgeGroupPolicy, Quorum

_LABEL_COLUMNS: Final = 32
_LABEL_END: Final = 8  # characters kept at the end of a long name, so that its number stays
TIMES: Final = "\u00d7"
_JOINERS: Final = "\u200c\u200d"  # between the parts of one letter or emoji
_NUMBER_AT_END: Final = re.compile(r"[\s\[({#._:/-]*\d+[\])}]?$")


def clean_text(text: str, kept: str = "") -> str:
    """Return text without control and formatting characters, safe to print anywhere."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign in _JOINERS or sign in kept else sign.encode("unicode_escape").decode()
        for sign in text
    )


def one_line(text: str) -> str:
    return clean_text(" ".join(text.split()))


def columns_of(text: str) -> int:
    """Return how many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if combining(sign) or sign in _JOINERS or sign == "\ufe0f" else 1 + (east_asian_width(sign) in "WF")
        for sign in text
    )


def cut_to(text: str, columns: int) -> str:
    """Return the beginning of the text that fits."""
    if columns_of(text) <= columns:
        return text
    room = columns
    for place, sign in enumerate(text):
        room -= columns_of(sign)
        if room < 0:
            return text[:place]
    return text


def shorten(text: str, columns: int = _LABEL_COLUMNS) -> str:
    if columns_of(text) <= columns:
        return text
    end = cut_to(text[::-1], _LABEL_END)[::-1]
    return f"{cut_to(text, columns - _LABEL_END - 1)}…{end}"


def short_ids(nodes: Sequence[FlowNode]) -> dict[ExecutionId, str]:
    """The ends of the ids: the short form, or more where it does not tell the members apart."""
    ids = [node.execution_id for node in nodes]
    for digits in (SHORT_ID, 12):
        short = {one: str(one)[-digits:] for one in ids}
        if len(set(short.values())) == len(short):
            return short
    return {one: str(one) for one in ids}


def labels_of(groups: Sequence[Sequence[FlowNode]], ids: dict[ExecutionId, str]) -> list[str]:
    """Return the labels of the boxes, each unique."""
    labels = [_label(group, ids) for group in groups]
    often = Counter(labels)
    return [
        f"{label} ({ids[group[0].execution_id]})" if often[label] > 1 else label
        for label, group in zip(labels, groups, strict=True)
    ]


def _label(group: Sequence[FlowNode], ids: dict[ExecutionId, str]) -> str:
    first = group[0]
    if len(group) > 1:
        stems = {_NUMBER_AT_END.sub("", one_line(node.name)) for node in group}
        stem = stems.pop() if len(stems) == 1 else ""
        return f"{shorten(stem or one_line(first.execution_kind))} {TIMES} {len(group):,}"
    name = one_line(first.name)
    return shorten(name) if name else f"{shorten(one_line(first.execution_kind))} {ids[first.execution_id]}"


def join_words(policy: EdgeGroupPolicy | None, edges: int) -> str:
    """Return how many of the edges a join requires, unless all of them have to succeed."""
    if not edges:
        return ""
    match policy:
        case AnyOf():
            return f"any of {edges:,}"
        case Quorum(k):
            return f"{k:,} of {edges:,}"
        case AllSettled():
            return f"all {edges:,} settled" if edges > 1 else "settled"
        case _:
            return ""
