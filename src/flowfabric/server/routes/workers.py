"""Workers: which are alive, whose leases expired, and grants for workers that claim over HTTP."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from flowfabric.errors import InvalidInput
from flowfabric.server.call import Answer, Call, Page
from flowfabric.server.members import Limit, named, span
from flowfabric.server.operation import Operation, Repeats, Scope, Within
from flowfabric.server.visible import sees_leases
from flowfabric.values.grant import Granted, ReclaimGranted, ResumeGrant
from flowfabric.values.ids import ExecutionId
from flowfabric.values.lease import ExpiredLease
from flowfabric.values.worker import WorkerRecord


class ListWorkers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`namespace`: workers of this namespace only, without those that serve every namespace."""

    namespace: str | None = None
    cursor: str | None = None
    limit: Limit = 100


class ListExpiredLeases(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`as_of`: expired at that time; now by default."""

    namespace: str | None = None
    as_of: datetime | None = None
    cursor: str | None = None
    limit: Limit = 100


class ClaimForWorker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tasks that a worker can run. Without `kinds` all of them; `namespace` limits it to one."""

    worker_instance_id: str
    lane_id: str = "default"
    capabilities: list[str] = []
    kinds: list[str] | None = None
    namespace: str | None = None
    grant_ttl_seconds: float = 5


class ClaimGranted(Struct, frozen=True, kw_only=True):
    """An execution is reserved for a worker until `expires_at`.

    `kind` says how it begins: `claim` a new attempt, `resume` one that was interrupted, `reclaim` one whose lease was
    lost.
    """

    kind: str
    execution_id: ExecutionId
    grant_key: str
    expires_at: datetime
    lane_id: str


async def list_workers(call: Call) -> Page:
    """List the workers that are alive: what each serves, and until when it counts as alive."""
    asked: ListWorkers = call.query
    if call.namespace is not None:
        after = None if asked.cursor is None else _place(asked.cursor, str)
        found = await call.engine.list_workers(call.namespace, after=after, limit=asked.limit)
        return Page(items=found.items, next_cursor=_cursor(found.next_cursor))
    place = None if asked.cursor is None else _place(asked.cursor, tuple[str, str])
    every = await call.engine.list_all_workers(after=place, limit=asked.limit)
    return Page(items=every.items, next_cursor=_cursor(every.next_cursor))


async def list_expired_leases(call: Call) -> Page:
    """List active executions whose lease expired, the longest first: a worker died, or hangs.

    `lease_id` is shown to keys with the scope `operate` only.
    """
    asked: ListExpiredLeases = call.query
    page = await call.engine.list_expired_leases(
        as_of=asked.as_of,
        after=None if asked.cursor is None else _place(asked.cursor, tuple[datetime, ExecutionId]),
        limit=asked.limit,
        namespace=call.namespace,
    )
    items = page.items if sees_leases(call.caller) else [replace(one, lease_id=None) for one in page.items]
    return Page(items=items, next_cursor=_cursor(page.next_cursor))


async def claim_for_worker(call: Call) -> Answer:
    """Reserve the best execution that a worker can run, under all budgets and quotas. 204: there is none now.

    The worker consumes the grant before it expires. A key that is limited to namespaces is never given an execution of
    another one.
    """
    asked: ClaimForWorker = call.body
    with named(grant_ttl="grant_ttl_seconds"):
        found = await call.engine.claim_for_worker(
            asked.lane_id,
            worker_id=call.path["worker_id"],
            worker_instance_id=asked.worker_instance_id,
            capabilities=asked.capabilities,
            kinds=asked.kinds,
            namespace=call.namespace,
            grant_ttl=span(asked.grant_ttl_seconds, "grant_ttl_seconds"),
        )
    if not isinstance(found, Granted | ReclaimGranted):
        return Answer(status=204)
    grant = found.grant
    kind = "reclaim" if isinstance(found, ReclaimGranted) else "resume" if isinstance(grant, ResumeGrant) else "claim"
    return Answer(
        body=ClaimGranted(
            kind=kind,
            execution_id=grant.execution_id,
            grant_key=grant.grant_key,
            expires_at=grant.expires_at,
            lane_id=asked.lane_id,
        )
    )


def _cursor(place: Any) -> str | None:
    return None if place is None else msgspec.json.encode(place).decode()


def _place(cursor: str, form: Any) -> Any:
    try:
        return msgspec.json.decode(cursor, type=form)
    except (msgspec.MsgspecError, UnicodeError):
        raise InvalidInput("cannot be read", field="cursor", allowed="a next_cursor of this list") from None


OPERATIONS = (
    Operation(
        method="GET", path="/v1/workers", handler=list_workers, engine=("list_workers", "list_all_workers"),
        scope=Scope.READ, within=Within.GIVEN, query=ListWorkers, answers={200: list[WorkerRecord]}, etag=True,
    ),
    Operation(
        method="GET", path="/v1/leases/expired", handler=list_expired_leases, engine=("list_expired_leases",),
        scope=Scope.READ, within=Within.GIVEN, query=ListExpiredLeases, answers={200: list[ExpiredLease]}, etag=True,
    ),
    Operation(
        method="POST", path="/v1/workers/{worker_id}/claim", handler=claim_for_worker, engine=("claim_for_worker",),
        scope=Scope.WORKER, within=Within.GIVEN, body=ClaimForWorker, answers={200: ClaimGranted, 204: None},
        repeats=Repeats.FENCED, no_store=True,
    ),
)  # fmt: skip
