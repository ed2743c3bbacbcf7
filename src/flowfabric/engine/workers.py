"""The registry of workers: who is alive, what each serves, and what happened to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from unicodedata import category
from uuid import UUID

import asyncpg

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.checks import check_batch, check_duration, check_filled, check_int, check_limit, check_list
from flowfabric.errors import Conflict, InvalidInput, Unavailable
from flowfabric.values.checks import check_lane, check_text, check_worker, quoted, worker_capabilities
from flowfabric.values.ids import ExecutionId, parse_execution_id, parse_uuid
from flowfabric.values.page import Page
from flowfabric.values.worker import (
    Heartbeat,
    Kinds,
    LiveVersion,
    Marked,
    NotRegistered,
    OwnWorker,
    Refreshed,
    Registered,
    Serving,
    UncoveredRoute,
    Unserved,
    WorkerEvent,
    WorkerRecord,
)

_REASON_BYTES = 256
_MOST_WORKERS = 10_000


class Workers(Operations):
    """register_worker, heartbeat_worker, leave_registry, mark_worker_dead, list_workers, list_worker_events,
    find_unserved, list_uncovered, list_versions, judge_routes.

    The registry says who is there. It is no gate: a worker that is not registered may claim, and a worker that is
    marked dead keeps its leases.
    """

    async def register_worker(
        self,
        worker_id: str,
        worker_instance_id: str,
        *,
        lanes: Collection[str],
        liveness_ttl: timedelta,
        capabilities: Collection[str] = (),
        kinds: Kinds | None = None,
        namespace: str = "",
        slots: int | None = None,
        package_version: str | None = None,
        host: str | None = None,
        pid: int | None = None,
        exclusive: bool = False,
    ) -> Registered | Refreshed:
        """Say that a worker is there, and what it serves; it counts as alive for `liveness_ttl` from now.

        `Refreshed` if the instance was alive: everything is overwritten but `registered_at`. `InvalidInput` if it was
        alive with another `worker_id`. `kinds` are names, or names with what it has for each (`Serves`); None: every
        kind. An empty namespace means all of them. `exclusive` raises `Conflict` if another process registered this
        instance and is alive.
        """
        names, versions, digests = serving_columns(kinds)
        served = sorted({check_lane(lane, "lanes") for lane in check_list(lanes, "lanes")})
        if not served:
            raise InvalidInput("no lane given", field="lanes", allowed="at least one lane")
        row = await self._row(
            statements.REGISTER_WORKER,
            check_text(namespace, "namespace"),
            check_worker(worker_instance_id, "worker_instance_id"),
            check_worker(worker_id),
            served,
            names,
            versions,
            digests,
            list(worker_capabilities(capabilities)),
            check_duration(liveness_ttl, "liveness_ttl"),
            None if slots is None else check_int(slots, "slots", 0, 1_000_000),
            None if package_version is None else check_text(package_version, "package_version"),
            None if host is None else check_text(host, "host"),
            None if pid is None else check_int(pid, "pid", 0, 2**31 - 1),
            self._instance,
            bool(exclusive),
            repeatable=True,
        )
        match row["code"]:
            case "registered":
                return Registered(row["expires_at"])
            case "refreshed":
                return Refreshed(row["expires_at"])
            case "reassigned":
                raise InvalidInput(
                    "instance_id reassigned",
                    field="worker_instance_id",
                    allowed="the worker_id it is registered with, or another instance id",
                )
            case code:
                where = f"process {row['pid']} on {row['host']}" if row["host"] else "another process"
                raise Conflict(
                    code,
                    f"{where} is registered as {worker_instance_id} and counts as alive until {row['expires_at']};"
                    f" if it is gone, run `flowfabric workers dead {worker_instance_id}`",
                )

    async def heartbeat_worker(self, worker_instance_id: str, *, namespace: str = "") -> Heartbeat:
        """Say that a worker is still there. `NotRegistered` if it has to register again: a heartbeat never revives."""
        row = await self._row(
            statements.HEARTBEAT_WORKER,
            check_text(namespace, "namespace"),
            check_worker(worker_instance_id, "worker_instance_id"),
            None,
            repeatable=True,
        )
        return heartbeat_of(row) or NotRegistered()

    async def mark_worker_dead(
        self, worker_instance_id: str, *, reason: str, namespace: str = ""
    ) -> Marked | NotRegistered:
        """Remove a worker from the registry. Its leases are not touched: they expire, or are revoked one by one.

        For operators. A worker that still lives registers again.
        """
        row = await self._row(
            statements.MARK_WORKER_DEAD,
            check_text(namespace, "namespace"),
            check_worker(worker_instance_id, "worker_instance_id"),
            _reason(reason),
        )
        return Marked() if row["code"] == "marked" else NotRegistered()

    async def leave_registry(
        self, worker_instance_id: str, *, reason: str, namespace: str = ""
    ) -> Marked | NotRegistered:
        """Remove a worker that this process registered: it stops."""
        row = await self._row(
            statements.LEAVE_REGISTRY,
            check_text(namespace, "namespace"),
            check_worker(worker_instance_id, "worker_instance_id"),
            self._instance,
            _reason(reason),
        )
        return Marked() if row["code"] == "marked" else NotRegistered()

    async def list_workers(
        self, namespace: str | None = None, *, after: str | None = None, limit: int = 1000
    ) -> Page[WorkerRecord, str]:
        """Return the live workers of a namespace by instance id; an empty namespace: those that serve all of them.

        Instance ids repeat across namespaces: without one the call is `Unavailable`. Use `list_all_workers`.
        """
        if namespace is None:
            raise Unavailable("list_workers", "name a namespace; list_all_workers lists all of them")
        wanted = check_text(namespace, "namespace")
        place = None if after is None else check_worker(after, "after")
        found = await self._workers(limit, wanted, None, place)
        return first_page(found, check_limit(limit, _MOST_WORKERS), lambda last: last.worker_instance_id)

    async def list_all_workers(
        self, *, after: tuple[str, str] | None = None, limit: int = 1000
    ) -> Page[WorkerRecord, tuple[str, str]]:
        """Return the live workers of all namespaces, by namespace and instance id, which are also the cursor."""
        place: tuple[str | None, str | None] = (None, None)
        if after is not None:
            if not isinstance(after, tuple | list) or len(after) != 2:
                raise InvalidInput(
                    f"got {type(after).__name__}", field="after", allowed="a (namespace, worker_instance_id) pair"
                )
            place = (check_text(after[0], "after"), check_worker(after[1], "after"))
        found = await self._workers(limit, None, *place)
        size = check_limit(limit, _MOST_WORKERS)
        return first_page(found, size, lambda last: (last.namespace, last.worker_instance_id))

    async def _workers(self, limit: int, *place: str | None) -> list[WorkerRecord]:
        size = check_limit(limit, _MOST_WORKERS)
        if size == 0:
            return []
        found = await self._fetch(statements.LIST_WORKERS, *place, size + 1, repeatable=True)
        return [rows.worker(row) for row in found]

    async def list_worker_events(
        self, worker_instance_id: str, *, namespace: str = "", before: int | None = None, limit: int = 100
    ) -> Page[WorkerEvent, int]:
        """Return what happened to a worker, newest first, as far back as such events are kept (24 hours)."""
        instance = check_worker(worker_instance_id, "worker_instance_id")
        space = check_text(namespace, "namespace")
        place = None if before is None else check_int(before, "before", 0, 2**63 - 1)
        size = check_limit(limit, 1000)
        if size == 0:
            return Page(())
        found = await self._fetch(statements.LIST_WORKER_EVENTS, space, instance, place, size + 1, repeatable=True)
        return first_page([rows.worker_event(row) for row in found], size, lambda last: last.seq)

    async def find_unserved(self, execution_ids: Sequence[ExecutionId]) -> list[Unserved]:
        """Of up to 1,000 executions, return what waits for a worker although no live one serves it."""
        check_batch(execution_ids, "execution_ids")
        targets = [parse_execution_id(one) for one in execution_ids]
        found = await self._fetch(statements.FIND_UNSERVED, *self._all_at(targets), repeatable=True)
        return [rows.unserved(row) for row in found]

    async def list_versions(self) -> list[LiveVersion]:
        """Return the versions in which executions began that have not ended, with the live workers that serve each.

        Executions without a version are counted beside the versions of their task. For people: it reads everything that
        has not ended, if there is a version at all.
        """
        found = await self._fetch(statements.LIST_VERSIONS, repeatable=True)
        return [rows.live_version(row) for row in found]

    async def list_uncovered(self, *, limit: int = 1000) -> list[UncoveredRoute]:
        """Return the routes with waiting executions that no live worker covers, by lane and kind.

        Their executions are shown as blocked by their route, and are claimable by any worker that can run them.
        """
        size = check_limit(limit, 10_000)
        if size == 0:
            return []
        return [rows.uncovered(row) for row in await self._fetch(statements.LIST_UNCOVERED, size, repeatable=True)]

    async def judge_routes(self) -> int:
        """Store a verdict on each route with waiting executions that no live worker covers; returns how many changed.

        The duty `unblock` calls it, beside the claims that find nothing and the workers that come and go.
        """
        row = await self._row(statements.JUDGE_ALL)
        return int(row["changed"])

    async def sweep_workers(self, *, limit: int = 1000) -> int:
        """Remove workers whose time to live has passed; returns how many."""
        row = await self._row(statements.SWEEP_WORKERS, check_int(limit, "limit", 1, 10_000))
        return int(row["n"])

    async def trim_worker_events(self, *, limit: int = 500) -> int:
        """Remove events of workers that are older than their retention; returns how many."""
        row = await self._row(statements.TRIM_WORKER_EVENTS, check_int(limit, "limit", 1, 10_000))
        return int(row["n"])

    async def heartbeat_own(self, worker: OwnWorker) -> Heartbeat | None:
        """Say that a worker of this process is still there; None if its row is locked, for which it does not wait.

        `NotRegistered` also if another process has registered this instance. A crash of the server may undo it.
        """
        return heartbeat_of(await self._row(statements.HEARTBEAT_LAZILY, *own(worker), repeatable=True))


def own(worker: object) -> tuple[str, str, UUID]:
    """The arguments of a heartbeat in the name of a worker of this process."""
    if not isinstance(worker, OwnWorker):
        raise InvalidInput(f"got {type(worker).__name__}", field="worker", allowed="an OwnWorker")
    return (
        check_text(worker.namespace, "worker.namespace"),
        check_worker(worker.worker_instance_id, "worker.worker_instance_id"),
        parse_uuid(worker.process, "worker.process"),
    )


def heartbeat_of(row: asyncpg.Record, expiry: str = "expires_at") -> Heartbeat | None:
    """Return the outcome of a heartbeat; None if it did not wait for a lock. `expiry` names the column of the time."""
    match row["code"]:
        case "refreshed":
            return Refreshed(row[expiry])
        case "busy":
            return None
        case _:
            return NotRegistered()


def serving_of(kinds: Kinds | None) -> Serving | None:
    """What a worker serves, if more than names is given."""
    if isinstance(kinds, Serving):
        return kinds
    return Serving(kinds) if isinstance(kinds, Mapping) else None


def serving_columns(kinds: Kinds | None) -> tuple[list[str] | None, list[int | None] | None, list[str | None] | None]:
    """Kinds and, for each of them, a version and a digest, as the database stores them."""
    if kinds is None:
        return None, None, None
    if (serving := serving_of(kinds)) is not None:
        return list(serving.names), serving.versions, serving.digests
    return sorted({check_filled(kind, "kinds") for kind in check_list(kinds, "kinds")}), None, None


def _reason(value: object) -> str:
    text = check_text(value, "reason", _REASON_BYTES)
    if any(category(char) == "Cc" for char in text):
        raise InvalidInput(
            f"contains a control character: {quoted(text)}", field="reason", allowed="text without control characters"
        )
    return text
