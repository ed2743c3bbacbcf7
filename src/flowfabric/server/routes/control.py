"""Control: what operators do to single executions."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta, Struct

from flowfabric._taxonomy import BY_KIND
from flowfabric.client.node_arguments import by_name
from flowfabric.contracts import json_form
from flowfabric.errors import Contention, ExecutionNotActive, InvalidInput, Unavailable
from flowfabric.server import problems, visible
from flowfabric.server.answers import etag
from flowfabric.server.call import Answer, Call
from flowfabric.server.new_execution import check_arguments, refuse_arguments
from flowfabric.server.operation import MEDIUM, Operation, Repeats, Scope, Within
from flowfabric.server.versions import check_match, unchanged
from flowfabric.values.attempt import Cancelled
from flowfabric.values.execution import Blocked, Changed, Execution, Rejected, Replayed
from flowfabric.values.grant import NotReclaimable, ReclaimCapExceeded, ReclaimGrant
from flowfabric.values.ids import ExecutionId
from flowfabric.values.lease import Operator, Revoked
from flowfabric.values.wait import Resumed

BlockingReason = Literal[
    "waiting_for_budget", "waiting_for_quota", "waiting_for_capable_worker", "paused_by_operator", "paused_by_policy"
]


class CancelExecution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why. `keep_children`: leave alone what it submitted."""

    reason: str = "cancelled over HTTP"
    keep_children: bool = False


class ReplayExecution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: str | None = None


class ForkExecution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`before_step` is the name of a recorded step, `n` how often the handler used it before; None keeps every step.

    `arguments` are replaced by name; the others stay. A server that does not know the task takes only arguments that
    the execution was submitted with.
    """

    before_step: str | None = None
    n: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    arguments: dict[str, Any] | None = None


class RevokeLease(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why, and which lease: without `expected_lease_id` the current one, whichever it is."""

    reason: str = "operator_revoke"
    expected_lease_id: UUID | None = None
    worker_instance_id: str | None = None


class ReclaimExecution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The worker that is to take over, and for how long the execution is reserved for it."""

    worker_id: str
    worker_instance_id: str
    lane_id: str | None = None
    worker_capabilities: list[str] = []
    grant_ttl_seconds: Annotated[float, Meta(gt=0, le=60)] = 5.0
    capability_hash: str | None = None
    route_snapshot_json: str | None = None
    admission_summary: str | None = None
    max_reclaim_count: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None


class ResumeExecution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """After how many seconds workers may take it."""

    resume_delay_seconds: Annotated[float, Meta(ge=0, le=10**10)] = 0.0


class BlockExecution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: BlockingReason = "paused_by_operator"
    reason_detail: str | None = None


class UnblockExecution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """With a reason: only if it is still held back for that one."""

    expected_blocking_reason: BlockingReason | None = None


class ChangePriority(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From 0 to 9000; workers claim higher ones first. Values outside are clamped."""

    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class SetTag(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    value: str


class AlreadySatisfied(Struct, frozen=True, kw_only=True):
    """There was no such lease to take away, and why."""

    reason: str


class Forked(Struct, frozen=True, kw_only=True):
    """The new execution, and the one whose steps it begins with."""

    execution_id: ExecutionId
    forked_from: ExecutionId
    forked_before: str | None


class Prioritised(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    priority: int


class Tagged(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    key: str
    value: str


async def cancel_execution(call: Call) -> Cancelled:
    """Cancel an execution, and with it what it submitted.

    `has_children`: what it submitted is still to be cancelled, which duties do. Cancelling again changes nothing and
    returns `was_cancelled`.
    """
    body: CancelExecution = call.body
    operator = Operator(call.path["execution_id"])
    return await call.engine.cancel(operator, body.reason, keep_children=body.keep_children)


async def replay_execution(call: Call) -> Replayed:
    """Run an ended execution again as a new attempt; every earlier attempt stays as it is."""
    return await call.engine.replay_execution(
        call.path["execution_id"], reason=call.body.reason, requested_by=call.caller.name
    )


async def fork_execution(call: Call) -> Forked:
    """Start a new execution that has the steps recorded before one, and runs the rest.

    The other one is not changed. Results of children are kept; waits are asked again.
    """
    body: ForkExecution = call.body
    target: ExecutionId = call.path["execution_id"]
    if call.service.codecs is not None and call.service.codecs.binds:
        raise Unavailable("fork", "the app's codecs bind recorded steps to their execution")
    payload, encoding = (None, None) if body.arguments is None else await _replaced(call, target, body.arguments)
    made = await call.engine.fork_execution(
        target,
        before_step=None if body.before_step is None else (body.before_step, body.n),
        payload=payload,
        payload_encoding=encoding,
        creator_identity=call.caller.name,
    )
    return Forked(execution_id=made, forked_from=target, forked_before=body.before_step)


async def _replaced(call: Call, target: ExecutionId, given: dict[str, Any]) -> tuple[bytes, str | None]:
    """The arguments of an execution with some replaced. Those that cannot be read here have to be given.

    Without its task nothing says which other arguments there are: only those that it was submitted with are taken.
    """
    try:
        context = await call.engine.read_execution_context(target)
    except InvalidInput:
        raise problems.not_found("execution", target) from None
    codecs, app = call.service.codecs, call.service.app
    stored, encoding = context.input_payload, context.payload_encoding
    if codecs is not None:
        named = encoding
        sealed = stored
        stored, encoding = await call.service.opening.run(len(sealed), lambda: codecs.open(sealed, named, target)), None
    found = by_name(stored, encoding)
    is_known, known = found is not None, found or {}
    payload = msgspec.json.encode({**known, **given})
    task = None if app is None else app.find_task(context.execution_kind)
    if task is not None:
        check_arguments(task.signature, payload)
    elif is_known and given.keys() - known.keys():
        refuse_arguments(sorted(given.keys() - known.keys()), known)
    return (payload, None) if codecs is None else codecs.seal(payload, None)


async def revoke_lease(call: Call) -> Revoked | AlreadySatisfied:
    """Take the lease of an execution away from its worker. A worker takes it over then, or it is cancelled."""
    body: RevokeLease = call.body
    done = await call.engine.revoke_lease(
        call.path["execution_id"],
        reason=body.reason,
        expected_lease_id=body.expected_lease_id,
        worker_instance_id=body.worker_instance_id,
    )
    return done if isinstance(done, Revoked) else AlreadySatisfied(reason=done.reason)


async def reclaim_execution(call: Call) -> ReclaimGrant | NotReclaimable | ReclaimCapExceeded:
    """Reserve an execution whose lease was lost for one worker, which takes it over with the grant.

    At the cap the execution fails instead: `reclaim_cap_exceeded`.
    """
    body: ReclaimExecution = call.body
    return await call.engine.issue_reclaim_grant(
        call.path["execution_id"],
        worker_id=body.worker_id,
        worker_instance_id=body.worker_instance_id,
        lane_id=body.lane_id,
        worker_capabilities=body.worker_capabilities,
        grant_ttl=timedelta(seconds=body.grant_ttl_seconds),
        capability_hash=body.capability_hash,
        route_snapshot_json=body.route_snapshot_json,
        admission_summary=body.admission_summary,
        max_reclaim_count=body.max_reclaim_count,
    )


async def resume_execution(call: Call) -> Resumed:
    """Resume a suspended execution whatever it waits for."""
    delay = timedelta(seconds=call.body.resume_delay_seconds)
    return await call.engine.resume_execution(call.path["execution_id"], "operator", delay)


async def block_execution(call: Call) -> Blocked:
    """Hold an execution back that waits for a worker."""
    target: ExecutionId = call.path["execution_id"]
    body: BlockExecution = call.body
    done = await call.engine.block_execution_for_admission(target, body.reason, reason_detail=body.reason_detail)
    if not isinstance(done, Rejected):
        return done
    if done.message == "execution_not_found":
        raise problems.not_found("execution", target)
    if done.message == "execution_not_active":
        raise ExecutionNotActive(execution_id=target)
    kind = done.message if ("contention", done.message) in BY_KIND else "execution_not_eligible"
    raise Contention(kind, "only an execution that waits for a worker can be held back", execution_id=target)


async def unblock_execution(call: Call) -> Changed:
    """Let workers claim at once an execution that is held back."""
    return await call.engine.unblock_execution(
        call.path["execution_id"], expected_blocking_reason=call.body.expected_blocking_reason
    )


async def change_priority(call: Call) -> Answer:
    """Change the priority of an execution that waits for a worker.

    `If-Match` takes the `ETag` of the execution, as its GET or this operation returns it.
    """
    target: ExecutionId = call.path["execution_id"]
    read_at = None
    if call.if_match is not None:
        found = await call.engine.read_execution(target)
        if found is None:
            raise problems.not_found("execution", target)
        if check_match(call, await _tag(call, found)):
            read_at = found.last_mutation_at
    with unchanged():
        await call.engine.change_priority(target, call.body.priority, last_mutation_at=read_at)
    changed = await call.engine.read_execution(target)
    return Answer(
        body=Prioritised(execution_id=target, priority=min(max(call.body.priority, 0), 9000)),
        etag=None if changed is None else await _tag(call, changed),
    )


async def _tag(call: Call, found: Execution) -> str:
    """The tag of an execution, as its GET has it."""
    return etag(json_form.encode(await visible.open_execution(call, found)))


async def set_tag(call: Call) -> Tagged:
    """Set one tag of an execution. The key has a namespace and a dot, such as `billing.invoice`."""
    target: ExecutionId = call.path["execution_id"]
    await call.engine.set_execution_tag(target, call.path["key"], call.body.value)
    return Tagged(execution_id=target, key=call.path["key"], value=call.body.value)


async def delete_execution(call: Call) -> Answer:
    """Delete an ended execution and everything it owns. Its events stay until their own retention ends."""
    await call.engine.delete_execution(call.path["execution_id"])
    return Answer(status=204)


async def redact_execution(call: Call) -> Changed:
    """Remove the user's data from an ended execution (payload, result, texts, tags, key); its history stays."""
    await call.engine.redact_execution(call.path["execution_id"])
    return Changed(call.path["execution_id"])


_ID = "/v1/executions/{execution_id}"

OPERATIONS = (
    Operation(
        method="POST", path=f"{_ID}/cancel", handler=cancel_execution, engine=("cancel",), scope=Scope.OPERATE,
        within=Within.EXECUTION, body=CancelExecution, answers={200: Cancelled}, repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST", path=f"{_ID}/replay", handler=replay_execution, engine=("replay_execution",),
        scope=Scope.OPERATE, within=Within.EXECUTION, body=ReplayExecution, answers={200: Replayed},
        repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST", path=f"{_ID}/fork", handler=fork_execution, engine=("fork_execution",), scope=Scope.OPERATE,
        within=Within.EXECUTION, body=ForkExecution, answers={201: Forked}, limit=MEDIUM, repeats=Repeats.KEPT,
        made=_ID,
    ),
    Operation(
        method="POST", path=f"{_ID}/revoke-lease", handler=revoke_lease, engine=("revoke_lease",),
        scope=Scope.OPERATE, within=Within.EXECUTION, body=RevokeLease, answers={200: Revoked | AlreadySatisfied},
        repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST", path=f"{_ID}/reclaim", handler=reclaim_execution, engine=("issue_reclaim_grant",),
        scope=Scope.OPERATE, within=Within.EXECUTION, body=ReclaimExecution,
        answers={200: ReclaimGrant | NotReclaimable | ReclaimCapExceeded}, repeats=Repeats.SECRET, no_store=True,
    ),
    Operation(
        method="POST", path=f"{_ID}/resume", handler=resume_execution, engine=("resume_execution",),
        scope=Scope.OPERATE, within=Within.EXECUTION, body=ResumeExecution, answers={200: Resumed},
        repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST", path=f"{_ID}/block", handler=block_execution,
        engine=("block_execution_for_admission", "block_route"), scope=Scope.OPERATE, within=Within.EXECUTION,
        body=BlockExecution, answers={200: Blocked}, repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST", path=f"{_ID}/unblock", handler=unblock_execution, engine=("unblock_execution",),
        scope=Scope.OPERATE, within=Within.EXECUTION, body=UnblockExecution, answers={200: Changed},
        repeats=Repeats.KEPT,
    ),
    Operation(
        method="PUT", path=f"{_ID}/priority", handler=change_priority, engine=("change_priority",),
        scope=Scope.OPERATE, within=Within.EXECUTION, body=ChangePriority, answers={200: Prioritised}, etag=True,
    ),
    Operation(
        method="PUT", path=f"{_ID}/tags/{{key}}", handler=set_tag, engine=("set_execution_tag",), scope=Scope.OPERATE,
        within=Within.EXECUTION, body=SetTag, answers={200: Tagged},
    ),
    Operation(
        method="DELETE", path=_ID, handler=delete_execution, engine=("delete_execution",), scope=Scope.ADMIN,
        within=Within.EXECUTION, answers={204: None},
    ),
    Operation(
        method="POST", path=f"{_ID}/redact", handler=redact_execution, engine=("redact_execution",), scope=Scope.ADMIN,
        within=Within.EXECUTION, answers={200: Changed}, repeats=Repeats.KEPT,
    ),
)  # fmt: skip
