"""Many executions at once: cancel or replay everything that matches a filter."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from msgspec import Struct

from flowfabric.server import problems
from flowfabric.server.call import Answer, Call
from flowfabric.server.namespace import given_namespace
from flowfabric.server.operation import Operation, Repeats, Scope, Within
from flowfabric.values.bulk import BulkJob, BulkOperation, BulkPreview, ExecutionFilter
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.state import State


class BulkFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which executions: those that match every member; at least one is needed. `tag` is a key and its value.

    Without `states`: for cancel all that have not ended, for replay those that failed or expired.
    """

    namespace: str | None = None
    lane_ids: list[str] | None = None
    kinds: list[str] | None = None
    states: list[State] | None = None
    tag: tuple[str, str] | None = None
    flow_id: FlowId | None = None
    parent_id: ExecutionId | None = None
    created_from: datetime | None = None
    created_before: datetime | None = None


class ChangeMany(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change and why. `dry_run`: only count, and show a sample."""

    filter: BulkFilter
    reason: str | None = None
    dry_run: bool = False


async def cancel_many(call: Call) -> Answer:
    """Cancel everything that matches.

    202 with a job that the servers and workers run in chunks, even if this server stops; executions submitted
    later are left out. With `dry_run` 200, how many match (exactly up to 10,000), and a sample.
    """
    return await _begin(call, BulkOperation.CANCEL)


async def replay_many(call: Call) -> Answer:
    """Replay everything that matches.

    202 with a job, as for cancelling. With `dry_run` 200, how many match (exactly up to 10,000), and a sample.
    """
    return await _begin(call, BulkOperation.REPLAY)


async def _begin(call: Call, operation: BulkOperation) -> Answer:
    body: ChangeMany = call.body
    given: dict[str, Any] = {name: getattr(body.filter, name) for name in BulkFilter.__struct_fields__}
    if body.filter != BulkFilter():  # the namespace of the key alone is no filter
        given["namespace"] = given_namespace(call.caller, body.filter.namespace, pointer="/filter/namespace")
    wanted = ExecutionFilter(**given)
    if body.dry_run:
        return Answer(body=await call.engine.preview_bulk(operation, wanted), target="dry run")
    bulk_id = await call.engine.create_bulk(
        operation, wanted, actor=call.caller.name, reason=body.reason, key_id=call.caller.key_id
    )
    job = await call.engine.read_bulk(bulk_id)
    return Answer(body=job, status=202, target=str(bulk_id))


async def get_bulk(call: Call) -> BulkJob:
    """Read a bulk job: its state, how many executions it changed, and which it could not."""
    found = await call.engine.read_bulk(call.path["bulk_id"], namespaces=call.caller.namespaces)
    if found is None:
        raise problems.not_found("bulk job", call.path["bulk_id"])
    return found


async def stop_bulk(call: Call) -> BulkJob:
    """Stop a bulk job.

    The chunk that runs is finished first; what was changed stays changed. A job that has ended stays as it is.
    """
    await call.engine.stop_bulk(call.path["bulk_id"], namespaces=call.caller.namespaces)
    return await get_bulk(call)


OPERATIONS = (
    Operation(
        method="POST", path="/v1/bulk/cancel", handler=cancel_many, engine=("create_bulk", "preview_bulk"),
        scope=Scope.OPERATE, within=Within.ITEMS, body=ChangeMany, answers={202: BulkJob, 200: BulkPreview},
        repeats=Repeats.KEPT, made="/v1/bulk/{bulk_id}",
    ),
    Operation(
        method="POST", path="/v1/bulk/replay", handler=replay_many, engine=("create_bulk", "preview_bulk"),
        scope=Scope.OPERATE, within=Within.ITEMS, body=ChangeMany, answers={202: BulkJob, 200: BulkPreview},
        repeats=Repeats.KEPT, made="/v1/bulk/{bulk_id}",
    ),
    Operation(
        method="GET", path="/v1/bulk/{bulk_id}", handler=get_bulk, engine=("read_bulk",), scope=Scope.OPERATE,
        within=Within.ITEMS, answers={200: BulkJob}, etag=True,
    ),
    Operation(
        method="DELETE", path="/v1/bulk/{bulk_id}", handler=stop_bulk, engine=("stop_bulk",), scope=Scope.OPERATE,
        within=Within.ITEMS, answers={200: BulkJob},
    ),
)  # fmt: skip
