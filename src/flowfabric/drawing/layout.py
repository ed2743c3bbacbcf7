"""The positions of the boxes and arrows of a picture."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from flowfabric.drawing.fold import Drawing, layers_of, neighbours_of

BOX_HEIGHT: Final = 46.0
BOX_PADDING: Final = 14.0
MARGIN: Final = 16.0
_BESIDE: Final = 22.0
_BELOW: Final = 40.0
_ROW_WIDTH: Final = 960.0
_SWEEPS: Final = 6


# Layout: layers by the longest path, order by barycenters, then positions as near to their neighbours as boxes allow.
# A long link passes through its own point in each layer between, unless there are too many.


def arrange(drawing: Drawing, widths: list[float]) -> tuple[list[tuple[float, float]], list[str], float, float]:
    """Return the middle of the top of each box, the path of each link, and the width and height."""
    count = len(drawing.boxes)
    is_alone = [not drawing.above[place] and not drawing.below[place] for place in range(count)]
    layer = layers_of(drawing)
    sizes = list(widths)
    hops = _hops(drawing, layer, sizes)
    rows: list[list[int]] = []
    for place in [*(one for one in drawing.order if not is_alone[one]), *range(count, len(sizes))]:
        while len(rows) <= layer[place]:
            rows.append([])
        rows[layer[place]].append(place)
    steps = dict.fromkeys(step for hop in hops for step in pairwise(hop))
    near = [(one, other) for one, other in steps if layer[other] == layer[one] + 1]
    above, below = neighbours_of(len(sizes), near)
    _sort_rows(rows, above, below)
    x = _places(rows, sizes, above, below)

    left = min((x[place] - sizes[place] / 2 for row in rows for place in row), default=0.0)
    x = [one - left + MARGIN for one in x]
    right = max((x[place] + sizes[place] / 2 for row in rows for place in row), default=MARGIN)

    leaves: list[list[int]] = [[] for _ in range(count)]
    enters: list[list[int]] = [[] for _ in range(count)]
    for number, hop in enumerate(hops):
        leaves[hop[0]].append(number)
        enters[hop[-1]].append(number)
    start, end = [0.0] * len(hops), [0.0] * len(hops)
    for place in range(count):
        for number, at in _ports(leaves[place], [x[hops[one][1]] for one in leaves[place]], x[place], sizes[place]):
            start[number] = at
        for number, at in _ports(enters[place], [x[hops[one][-2]] for one in enters[place]], x[place], sizes[place]):
            end[number] = at

    # Links that go far to the side need more height.
    side = [0.0] * len(rows)
    for one, other in near:
        side[layer[one]] = max(side[layer[one]], abs(x[one] - x[other]))
    tops = []
    y = MARGIN
    for number in range(len(rows)):
        tops.append(y)
        y += BOX_HEIGHT + _BELOW + min(side[number] / 12, 2 * _BELOW)
    bottom = tops[-1] + BOX_HEIGHT if tops else 0.0

    paths = []
    for number, hop in enumerate(hops):
        at, height = start[number], tops[layer[hop[0]]] + BOX_HEIGHT
        parts = [f"M{number_text(at)} {number_text(height)}"]
        for stop in hop[1:]:
            to, top = end[number] if stop == hop[-1] else x[stop], tops[layer[stop]]
            middle = number_text((height + top) / 2)
            parts.append(f"C{number_text(at)} {middle} {number_text(to)} {middle} {number_text(to)} {number_text(top)}")
            at, height = to, top
            if stop != hop[-1]:
                height += BOX_HEIGHT
                parts.append(f"V{number_text(height)}")
        paths.append("".join(parts))

    y_of = [tops[one] if tops else 0.0 for one in layer[:count]]
    at, y, limit = MARGIN, bottom + (_BELOW if tops else MARGIN), max(right, _ROW_WIDTH)
    for place in range(count):
        if is_alone[place]:
            if at > MARGIN and at + widths[place] > limit:
                at, y = MARGIN, y + BOX_HEIGHT + _BESIDE
            x[place], y_of[place] = at + widths[place] / 2, y
            right, bottom = max(right, at + widths[place]), y + BOX_HEIGHT
            at += widths[place] + _BESIDE
    return [(x[place], y_of[place]) for place in range(count)], paths, right, bottom


def _hops(drawing: Drawing, layer: list[int], sizes: list[float]) -> list[list[int]]:
    """Return the points that each link passes. New points are added to `layer` and `sizes`."""
    hops: list[list[int]] = [[link.above, link.below] for link in drawing.links]
    left = 4 * (len(drawing.boxes) + len(hops))
    for number in sorted(range(len(hops)), key=lambda one: layer[hops[one][1]] - layer[hops[one][0]]):
        one, other = hops[number]
        between = range(layer[one] + 1, layer[other])
        left -= len(between)
        if left < 0:
            break
        hops[number] = [one, *range(len(layer), len(layer) + len(between)), other]
        layer.extend(between)
        sizes.extend(6.0 for _ in between)
    return hops


def _sort_rows(rows: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    """Order each row by the positions of its neighbours, so that few links cross."""
    at = [0.0] * len(above)

    def settle(row: list[int]) -> None:
        for number, place in enumerate(row):
            at[place] = (number + 0.5) / len(row)

    for row in rows:
        settle(row)
    for _ in range(_SWEEPS):
        for neighbours, way in ((above, rows), (below, rows[::-1])):
            for row in way:
                mean = {
                    one: sum(at[other] for other in near) / len(near) if (near := neighbours[one]) else at[one]
                    for one in row
                }
                row.sort(key=mean.__getitem__)
                settle(row)


def _places(rows: list[list[int]], sizes: list[float], above: list[list[int]], below: list[list[int]]) -> list[float]:
    """Return the middles from left to right: near the mean of the neighbours, in order, without overlaps."""
    x = [0.0] * len(sizes)
    offsets = []
    for row in rows:
        offset = [0.0]
        for one, other in pairwise(row):
            offset.append(offset[-1] + (sizes[one] + sizes[other]) / 2 + _BESIDE)
        offsets.append(offset)
        for place, by in zip(row, offset, strict=True):
            x[place] = by - offset[-1] / 2

    both = [up + down for up, down in zip(above, below, strict=True)]
    turns = [(above, 1), (below, -1)] * _SWEEPS + [(both, 1)]
    for neighbours, way in turns:
        for row, offset in list(zip(rows, offsets, strict=True))[::way]:
            wanted = [
                (sum(x[other] for other in near) / len(near) if (near := neighbours[place]) else x[place]) - by
                for place, by in zip(row, offset, strict=True)
            ]
            for place, at, by in zip(row, _not_falling(wanted), offset, strict=True):
                x[place] = at + by
    return x


def _not_falling(wanted: list[float]) -> list[float]:
    """Return the non-decreasing numbers nearest to those wanted."""
    pools: list[tuple[float, int]] = []
    for value in wanted:
        total, count = value, 1
        while pools and pools[-1][0] * count >= total * pools[-1][1]:
            more, members = pools.pop()
            total, count = total + more, count + members
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def _ports(links: list[int], towards: list[float], x: float, width: float) -> list[tuple[int, float]]:
    """Return where links touch a side of a box: side by side, in the order of their other ends."""
    if not links:
        return []
    step = min(12.0, (width - 2 * BOX_PADDING) / max(len(links) - 1, 1))
    ordered = sorted(range(len(links)), key=lambda number: towards[number])
    return [(links[number], x + (place - (len(links) - 1) / 2) * step) for place, number in enumerate(ordered)]


def number_text(value: float) -> str:
    text = f"{value:.1f}"
    return text.removesuffix(".0") if text != "-0.0" else "0"
