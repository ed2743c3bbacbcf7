"""Waits: list them, read the token of one, signal, approve and reject.

The sender of a signal is the API key, by its name: never a member of the body. A condition that counts different
people therefore counts different keys.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from msgspec import Struct

from flowfabric.errors import InvalidInput, NotFound
from flowfabric.server.answering import send
from flowfabric.server.call import Call, Page
from flowfabric.server.members import Limit, Payload, span
from flowfabric.server.operation import MEDIUM, Operation, Repeats, Scope, Within
from flowfabric.values.callback import callback_text
from flowfabric.values.ids import ExecutionId, parse_uuid
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.wait import PendingWaitpoint, Wait

_PATH: Final = "/v1/executions/{execution_id}"


class ListWaits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lane: str | None = None
    namespace: str | None = None
    key: str | None = None
    limit: Limit = 50
    cursor: str | None = None


class ListPendingWaitpoints(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Limit = 100
    cursor: str | None = None


class SignalExecution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A signal to the waitpoint with the key `key`, or to `waitpoint_id` with its token.

    `input` replaces the payload by bytes. A task of this package reads JSON, in the encodings of its codecs; it sets
    other bytes aside. Use them for waits that a program in another language evaluates.
    """

    name: str = "signal"
    payload: Any = None
    input: Payload | None = None
    key: str | None = None  # needed if the execution waits at several waitpoints
    waitpoint_id: UUID | None = None
    waitpoint_token: str | None = None
    signal_id: UUID | None = None  # a signal with the same id is accepted once
    category: str = "external"
    correlation_id: str | None = None
    resume_delay_seconds: float | None = None
    dedup_ttl_seconds: float | None = None  # how long the Idempotency-Key is remembered; a day by default


class ApproveExecution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decision.

    `input` replaces the payload by bytes. A task of this package reads JSON, in the encodings of its codecs; it sets
    other bytes aside. Use them for waits that a program in another language evaluates.
    """

    key: str | None = None
    payload: Any = None
    input: Payload | None = None


class RejectExecution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decision.

    `input` replaces the payload by bytes. A task of this package reads JSON, in the encodings of its codecs; it sets
    other bytes aside. Use them for waits that a program in another language evaluates.
    """

    key: str | None = None
    payload: Any = None
    input: Payload | None = None
    reason: str | None = None  # the member `reason` of the payload


class ShownToken(Struct, frozen=True, kw_only=True):
    """The right to signal one waitpoint. `link` is None unless the server knows its public address.

    The path of the link is `/w/` and the `callback`, even then.
    """

    execution_id: ExecutionId
    waitpoint_id: UUID
    waitpoint_key: str
    token: str
    callback: str
    link: str | None


async def list_waits(call: Call) -> Page:
    """List the waitpoints that can be signalled, of all executions, longest waiting first."""
    query = call.query
    page = await call.engine.list_waits(
        lane_id=query.lane, namespace=call.namespace, waitpoint_key=query.key, cursor=query.cursor, limit=query.limit
    )
    return Page(items=page.items, next_cursor=page.next_cursor)


async def list_pending_waitpoints(call: Call) -> Page:
    """List the waitpoints of an execution that can be signalled now, by id. Tokens are not shown."""
    after = None if call.query.cursor is None else parse_uuid(call.query.cursor, "cursor")
    page = await call.engine.list_pending_waitpoints(call.path["execution_id"], after=after, limit=call.query.limit)
    return Page(items=page.items, next_cursor=None if page.next_cursor is None else str(page.next_cursor))


async def read_waitpoint_token(call: Call) -> ShownToken:
    """Read the token of a waitpoint, its callback text and its link.

    Anybody who has one of them can signal: give it only to the sender it is for. A waitpoint that is closed or expired,
    or belongs to another execution, is not found.
    """
    execution_id, waitpoint_id = call.path["execution_id"], call.path["waitpoint_id"]
    before = UUID(int=waitpoint_id.int - 1) if waitpoint_id.int else None
    found = (await call.engine.list_pending_waitpoints(execution_id, after=before, limit=1)).items
    token = None
    if found and found[0].waitpoint_id == waitpoint_id:
        token = await call.engine.read_waitpoint_token(execution_id, waitpoint_id)
    if token is None:
        raise NotFound("waitpoint", waitpoint_id)
    text = callback_text(execution_id, waitpoint_id, token)
    return ShownToken(
        execution_id=execution_id,
        waitpoint_id=waitpoint_id,
        waitpoint_key=found[0].waitpoint_key,
        token=token.reveal(),
        callback=text,
        link=call.service.link(text),
    )


async def signal_execution(call: Call) -> Accepted | DuplicateSignal:
    """Send a signal to an execution that waits.

    Without `waitpoint_id` it reaches the open waitpoint with the key `key`; an execution that waits at a single one
    needs no `key`. With `waitpoint_id` it needs the token too. The sender is the API key, by its name. The payload must
    fit what the task waits for, otherwise the signal is refused (422) and nothing is recorded. 404: no such waitpoint
    is open, because it was answered, or the execution does not wait yet or has ended. `Idempotency-Key`: the same key
    at the same waitpoint is the same signal.
    """
    body = call.body
    if (body.waitpoint_id is None) != (body.waitpoint_token is None):
        name = "waitpoint_token" if body.waitpoint_token is None else "waitpoint_id"
        raise InvalidInput("missing", field=name, allowed="both waitpoint_id and waitpoint_token, or neither")
    token = None
    if body.waitpoint_id is not None:
        token = (body.waitpoint_id, body.waitpoint_token)
        if body.key is not None:
            raise InvalidInput("given with a waitpoint_id", field="key", allowed="one of key and waitpoint_id")
    more: dict[str, Any] = {}
    if body.dedup_ttl_seconds is not None:
        more["dedup_ttl"] = span(body.dedup_ttl_seconds, "dedup_ttl_seconds")
    if body.resume_delay_seconds is not None:
        more["resume_delay"] = span(body.resume_delay_seconds, "resume_delay_seconds")
    return await send(
        call,
        call.path["execution_id"],
        body.key,
        body.payload,
        body.input,
        token=token,
        signal_name=body.name,
        signal_category=body.category,
        signal_id=body.signal_id,
        correlation_id=body.correlation_id,
        idempotency_key=call.idempotency_key,
        **more,
    )


async def approve_execution(call: Call) -> Accepted | DuplicateSignal:
    """Send the signal `approved` to an execution that waits.

    The approver is the API key, by its name. A second approval by the same key is a duplicate and does not count as
    another person. 404: no waitpoint is open.
    """
    return await _decide(call, "approved", call.body.payload)


async def reject_execution(call: Call) -> Accepted | DuplicateSignal:
    """Send the signal `rejected` to an execution that waits; its task decides what that means."""
    payload, reason = call.body.payload, call.body.reason
    if reason is not None:
        if call.body.input is not None:
            raise InvalidInput("given with input", field="reason", allowed="one of them")
        if not isinstance(payload, dict | None) or "reason" in (payload or {}):
            raise InvalidInput("given with a payload that has one, or has no members", field="reason")
        payload = {**(payload or {}), "reason": reason}
    return await _decide(call, "rejected", payload)


async def _decide(call: Call, name: str, payload: Any) -> Accepted | DuplicateSignal:
    return await send(
        call,
        call.path["execution_id"],
        call.body.key,
        payload,
        call.body.input,
        signal_name=name,
        signal_category="approval",
        idempotency_key=f"approval:{name}:{call.caller.name}",
        target_scope="execution",
    )


_DECISION: Final = {200: Accepted | DuplicateSignal}
OPERATIONS = (
    Operation(
        method="GET", path="/v1/waits", handler=list_waits, engine=("list_waits",), scope=Scope.READ,
        within=Within.GIVEN, query=ListWaits, answers={200: list[Wait]}, etag=True,
    ),
    Operation(
        method="GET", path=f"{_PATH}/pending-waitpoints", handler=list_pending_waitpoints,
        engine=("list_pending_waitpoints",), scope=Scope.READ, within=Within.EXECUTION, query=ListPendingWaitpoints,
        answers={200: list[PendingWaitpoint]}, etag=True,
    ),
    Operation(
        method="GET", path=f"{_PATH}/waitpoints/{{waitpoint_id}}/token", handler=read_waitpoint_token,
        engine=("read_waitpoint_token",), scope=Scope.OPERATE, within=Within.EXECUTION, answers={200: ShownToken},
        no_store=True,
    ),
    Operation(
        method="POST", path=f"{_PATH}/signal", handler=signal_execution,
        engine=("signal_execution", "try_signal", "deliver_signal", "try_deliver"), scope=Scope.OPERATE,
        within=Within.EXECUTION, body=SignalExecution, answers=_DECISION, limit=MEDIUM, repeats=Repeats.OWN,
    ),
    Operation(
        method="POST", path=f"{_PATH}/approve", handler=approve_execution, engine=("deliver_approval_signal",),
        scope=Scope.OPERATE, within=Within.EXECUTION, body=ApproveExecution, answers=_DECISION, limit=MEDIUM,
        repeats=Repeats.KEPT,
    ),
    Operation(
        method="POST", path=f"{_PATH}/reject", handler=reject_execution, scope=Scope.OPERATE, within=Within.EXECUTION,
        body=RejectExecution, answers=_DECISION, limit=MEDIUM, repeats=Repeats.KEPT,
    ),
)  # fmt: skip
