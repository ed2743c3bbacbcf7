"""Registered workers, what happened to them, and what no worker serves."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TypeAlias
from uuid import UUID

from msgspec import Struct

from flowfabric.values.lane import LaneState


class WorkerRecord(Struct, frozen=True, kw_only=True):
    """A worker that is alive, as it registered.

    `namespace` is empty for a worker that serves every namespace. `kinds` are the kinds it has handlers for, each with
    the versions it serves, none meaning any; without `kinds` it serves every kind. `slots` is how many handlers it runs
    at the same time. `leads` are the groups of duties that its process leads.
    """

    worker_id: str
    worker_instance_id: str
    namespace: str
    lanes: tuple[str, ...]
    kinds: dict[str, tuple[str, ...]] | None
    capabilities: tuple[str, ...]
    liveness_ttl: timedelta
    registered_at: datetime
    last_heartbeat_at: datetime
    expires_at: datetime
    slots: int | None = None
    package_version: str | None = None
    host: str | None = None
    pid: int | None = None
    leads: tuple[str, ...] = ()


class OwnWorker(Struct, frozen=True, kw_only=True):
    """A registration of this process: a heartbeat in its name leaves a registration by another process alone."""

    worker_instance_id: str
    process: UUID
    namespace: str = ""


class WorkerEvent(Struct, frozen=True, kw_only=True):
    """What happened to a worker: registered, heartbeat, marked_dead or ttl_swept.

    `reason` is that of a mark; of a registration it is `refreshed` if the worker was registered already.
    """

    seq: int
    occurred_at: datetime
    event: str
    worker_id: str
    reason: str | None


class Registered(Struct, frozen=True):
    """The worker was absent and is registered now, alive until `expires_at` without a heartbeat."""

    expires_at: datetime


class Refreshed(Struct, frozen=True):
    """The worker is alive, until `next_expiry` without another heartbeat."""

    next_expiry: datetime


class NotRegistered(Struct, frozen=True):
    """No such worker is alive: it has to register again."""


class Marked(Struct, frozen=True):
    """The worker was alive and is removed from the registry."""


class Leader(Struct, frozen=True, kw_only=True):
    """The process that leads a group of duties (for operators), its worker if it is one, the seconds its lead lasts."""

    name: str
    process: UUID | None
    worker_instance_id: str | None
    left: float


class Unserved(Struct, frozen=True, kw_only=True):
    """Work that waits for a worker although no live one serves it, or whose lane hands out no work."""

    lane_id: str
    lane_state: LaneState
    kind: str
    capabilities: tuple[str, ...]
    namespace: str
    live_workers: int


Heartbeat: TypeAlias = Refreshed | NotRegistered


def why_unserved(found: Unserved) -> str:
    """Say in one line why nothing happens, and what to do about it."""
    if found.lane_state in (LaneState.PAUSED, LaneState.DISABLED):
        return f"lane {found.lane_id} is {found.lane_state}; start it with `flowfabric lanes resume {found.lane_id}`"
    needs = f" with {', '.join(found.capabilities)}" if found.capabilities else ""
    alive = "no worker is alive" if not found.live_workers else f"{found.live_workers} alive, see `flowfabric workers`"
    return (
        f"no live worker serves {found.kind} in lane {found.lane_id}{needs} ({alive});"
        " start one with `flowfabric worker module:app`"
    )
