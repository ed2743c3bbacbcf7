"""Registered workers, what happened to them, and what no worker serves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import TypeAlias
from uuid import UUID

from msgspec import Struct

from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_text
from flowfabric.values.lane import LaneState


class Serves(Struct, frozen=True, kw_only=True):
    """The versions and the code that a worker has for a kind.

    `versions` are those it serves, first the one in which its executions begin; none: executions without a version.
    `digest` names its code: executions that this code stopped are left to workers with another one.
    """

    versions: tuple[int, ...] = ()
    digest: str | None = None


class Serving:
    """The kinds that a worker serves, with versions and digests. Checked once, then given to every claim."""

    __slots__ = ("_hash", "_key", "digests", "is_versioned", "names", "versions")

    def __init__(self, kinds: Mapping[str, Serves | Collection[int]]) -> None:
        rows: list[tuple[str, int | None, str | None]] = []
        for kind in sorted(_kind(kind) for kind in kinds):
            given = kinds[kind]
            one = given if isinstance(given, Serves) else Serves(versions=_versions(given))
            digest = None if one.digest is None else check_text(one.digest, "kinds")
            rows += [(kind, version, digest) for version in _versions(one.versions) or (None,)]
        self.names = tuple(kind for kind, _, _ in rows)
        self.is_versioned = any(version is not None for _, version, _ in rows)
        self.versions = [version for _, version, _ in rows] if self.is_versioned else None
        self.digests = [digest for _, _, digest in rows] if any(digest for _, _, digest in rows) else None
        self._key = tuple(rows)
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Serving) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


Kinds: TypeAlias = Serving | Mapping[str, Serves | Collection[int]] | Collection[str]


def _kind(value: object) -> str:
    if not check_text(value, "kinds"):
        raise InvalidInput("empty", field="kinds", allowed="names that are not empty")
    return str(value)


def _versions(value: object) -> tuple[int, ...]:
    allowed = "different integers from 1"
    if isinstance(value, str) or not isinstance(value, Collection):
        raise InvalidInput(f"got {value!r}", field="kinds", allowed=f"Serves(...), or versions: {allowed}")
    found = tuple(value)
    if len(set(found)) < len(found) or not all(type(one) is int and 1 <= one < 2**31 for one in found):
        raise InvalidInput(f"got the versions {found!r}", field="kinds", allowed=allowed)
    return found


class WorkerRecord(Struct, frozen=True, kw_only=True):
    """A worker that is alive, as it registered.

    `namespace` is empty for a worker that serves every namespace. `kinds` are the kinds it has handlers for, each with
    the versions it serves, first the one in which executions begin, none if it has no versions; without `kinds` it
    serves every kind. `slots` is how many handlers it runs at the same time. `leads` are the groups of duties that its
    process leads.
    """

    worker_id: str
    worker_instance_id: str
    namespace: str
    lanes: tuple[str, ...]
    kinds: dict[str, tuple[int, ...]] | None
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
    left: timedelta


class Unserved(Struct, frozen=True, kw_only=True):
    """Work that waits for a worker although no live one serves it, or whose lane hands out no work.

    `version` is the one it began with. `is_stopped`: changed code stopped it, and no live worker has other code.
    """

    lane_id: str
    lane_state: LaneState
    kind: str
    capabilities: tuple[str, ...]
    namespace: str
    live_workers: int
    version: int | None = None
    is_stopped: bool = False


class UncoveredRoute(Struct, frozen=True, kw_only=True):
    """A route with waiting executions that no live worker covers: one that serves the lane, the task and all of this.

    Workers of the namespaces in `served` cover those of their own. `waiting` counts the others, up to 10,000.
    """

    lane_id: str
    kind: str
    capabilities: tuple[str, ...]
    version: int | None
    served: tuple[str, ...]
    since: datetime
    waiting: int


class LiveVersion(Struct, frozen=True, kw_only=True):
    """A version in which executions began that have not ended: how many, and how many live workers serve it.

    Version None: they began without one although their task has versions by now. Every worker of the task runs them.
    """

    lane_id: str
    kind: str
    capabilities: tuple[str, ...]
    version: int | None
    executions: int
    live_workers: int


Heartbeat: TypeAlias = Refreshed | NotRegistered


def needing(capabilities: Collection[str]) -> str:
    """Return the capabilities that a worker needs, as the end of a sentence; empty if nothing is required."""
    return f" with {', '.join(capabilities)}" if capabilities else ""


def why_unserved(found: Unserved, *, in_show: bool = False) -> str:
    """Say in one line why nothing happens, and what to do about it. `in_show`: beside what changed."""
    if found.lane_state in (LaneState.PAUSED, LaneState.DISABLED):
        return f"lane {found.lane_id} is {found.lane_state}; start it with `flowfabric lanes resume {found.lane_id}`"
    kind = found.kind if found.version is None else f"version {found.version} of {found.kind}"
    if found.is_stopped and in_show:
        return "no live worker has other code: start one with code that fits"
    if found.is_stopped:
        return (
            f"changed code stopped {kind} in lane {found.lane_id}, and no live worker has other code;"
            " `flowfabric show ID` says what changed, and how to write code that fits"
        )
    needs = needing(found.capabilities)
    alive = "no worker is alive" if not found.live_workers else f"{found.live_workers} alive, see `flowfabric workers`"
    return (
        f"no live worker serves {kind} in lane {found.lane_id}{needs} ({alive});"
        " start one with `flowfabric worker module:app`"
    )
