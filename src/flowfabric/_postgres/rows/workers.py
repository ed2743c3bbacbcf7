"""Workers, their events, and work that none of them serves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from flowfabric._postgres.rows.values import Row, one_of, readable
from flowfabric.values.lane import LaneState
from flowfabric.values.worker import Leader, LiveVersion, UncoveredRoute, Unserved, WorkerEvent, WorkerRecord


@readable
def worker(row: Row) -> WorkerRecord:
    return WorkerRecord(
        worker_id=row["worker_id"],
        worker_instance_id=row["worker_instance_id"],
        namespace=row["namespace"],
        lanes=tuple(row["lanes"]),
        kinds=None if row["kinds"] is None else _with_versions(row["kinds"], row["versions"]),
        capabilities=tuple(row["capabilities"]),
        liveness_ttl=row["liveness_ttl"],
        registered_at=row["registered_at"],
        last_heartbeat_at=row["heartbeat_at"],
        expires_at=row["expires_at"],
        slots=row["slots"],
        package_version=row["package_version"],
        host=row["host"],
        pid=row["pid"],
        leads=tuple(row["leads"]),
    )


def _with_versions(kinds: Sequence[str], versions: Sequence[int | None] | None) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = dict.fromkeys(kinds, ())
    for kind, version in zip(kinds, versions or (), strict=False):
        if version is not None:
            found[kind] += (version,)
    return found


@readable
def worker_event(row: Row) -> WorkerEvent:
    return WorkerEvent(
        seq=row["seq"],
        occurred_at=row["occurred_at"],
        event=row["event"],
        worker_id=row["worker_id"],
        reason=row["reason"],
    )


@readable
def leader(row: Row) -> Leader:
    return Leader(
        name=row["name"],
        process=row["process"],
        worker_instance_id=row["worker_instance_id"],
        left=timedelta(milliseconds=row["left_ms"]),
    )


@readable
def unserved(row: Row) -> Unserved:
    return Unserved(
        lane_id=row["lane"],
        lane_state=one_of(LaneState, row, "lane_state"),
        kind=row["kind"],
        capabilities=tuple(row["capabilities"]),
        namespace=row["namespace"],
        live_workers=row["workers"],
        version=row["version"],
        is_stopped=row["is_stopped"],
    )


@readable
def uncovered(row: Row) -> UncoveredRoute:
    return UncoveredRoute(
        lane_id=row["lane"],
        kind=row["kind"],
        capabilities=tuple(row["capabilities"]),
        version=row["version"],
        served=tuple(row["served"]),
        since=row["since"],
        waiting=row["waiting"],
    )


def live_version(row: Row) -> LiveVersion:
    return LiveVersion(
        lane_id=row["lane"],
        kind=row["kind"],
        capabilities=tuple(row["capabilities"]),
        version=row["version"],
        executions=row["executions"],
        live_workers=row["workers"],
    )
