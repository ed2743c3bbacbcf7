"""Frames, streams and summary documents."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from flowfabric._postgres.rows.values import Row
from flowfabric.values.stream import Appended, Frame, StreamPage, Summary, frame_time


def appended(row: Row) -> Appended | None:
    """A stored frame; None if it was known."""
    if row["code"] == "known":
        return None
    return Appended(
        stream_id=f"{row['ms']}-{row['n']}",
        frame_count=row["frame_count"],
        summary_version=row["summary_version"],
        maxlen_applied=row["maxlen_applied"],
    )


def frame(row: Row, attempt_index: int, number: int | None = None) -> Frame:
    return Frame(
        id=f"{row['ms']}-{row['n']}",
        at=frame_time(row["ms"]),
        type=row["frame_type"] or row["kind"],
        kind=row["kind"],
        mode=row["mode"],
        payload=row["payload"],
        encoding=row["encoding"],
        correlation_id=row["correlation_id"],
        seq=row["seq"],
        summary_version=row["summary_version"],
        ttl=None if row["ttl_ms"] is None else timedelta(milliseconds=row["ttl_ms"]),
        attempt_index=attempt_index,
        number=number,
    )


def stream_pages(found: Sequence[Row], count: int) -> list[StreamPage]:
    """The streams of a call: of each a row without an id, then its frames."""
    heads: list[Row | None] = [None] * count
    frames: list[list[Frame]] = [[] for _ in range(count)]
    for row in found:
        place = row["ordinal"] - 1
        head = heads[place]
        if head is None:
            heads[place] = row
        else:
            frames[place].append(frame(row, head["attempt_index"], row["number"]))
    return [_page(head, tuple(some)) for head, some in zip(heads, frames, strict=True) if head is not None]


def _page(head: Row, frames: tuple[Frame, ...]) -> StreamPage:
    return StreamPage(
        frames=frames,
        closed_at=head["closed_at"],
        closed_reason=head["closed_reason"],
        frame_count=head["frame_count"],
        dropped=head["number"],
        maxlen_applied_last=head["maxlen_applied"],
        attempt_index=head["attempt_index"],
        attempts=head["attempts"] or 0,
        has_ended=bool(head["ended"]),
        is_known=head["is_known"],
    )


def stream_summary(row: Row) -> Summary:
    return Summary(
        document_json=row["document"].encode(),
        version=row["version"],
        first_applied_at=frame_time(row["first_ms"]),
        last_updated_at=frame_time(row["last_ms"]),
        attempt_index=row["attempt_index"],
    )
