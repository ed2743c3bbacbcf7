"""Quotas: rates and caps that executions wait for, and admission for programs that do not claim."""

from __future__ import annotations

from uuid import UUID

from msgspec import Struct

from flowfabric.errors import InvalidInput, NotFound
from flowfabric.server.call import Answer, Call, Page
from flowfabric.server.members import Limit, named, span
from flowfabric.server.operation import Operation, Repeats, Scope, Within
from flowfabric.server.versions import check_match, tag_of, unchanged
from flowfabric.values.ids import QuotaPolicyId
from flowfabric.values.quota import (
    DEFAULT_KEY,
    AdmissionAnswer,
    QuotaPolicy,
    QuotaPolicyCreated,
    QuotaPolicyExists,
    Released,
)


class ListQuotas(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prefix: str | None = None
    cursor: str | None = None
    limit: Limit = 100


class CreateQuota(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number of 0 is no limit. With a `key`, the name of a tag, the numbers hold for each value of the tag."""

    name: str | None = None
    quota_policy_id: UUID | None = None
    key: str | None = None
    window_seconds: float = 60
    max_requests_per_window: int = 0
    max_concurrent: int = 0
    jitter_seconds: float = 0


class UpdateQuota(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    window_seconds: float | None = None
    max_requests_per_window: int | None = None
    max_concurrent: int | None = None
    jitter_seconds: float | None = None


class Admit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`dimension`: the value of the policy's key."""

    dimension: str = DEFAULT_KEY


async def list_quotas(call: Call) -> Page:
    """List quotas, with how full each is and how many executions wait for it."""
    asked: ListQuotas = call.query
    page = await call.engine.list_quota_policies(
        name_prefix=asked.prefix,
        cursor=None if asked.cursor is None else _place(asked.cursor),
        limit=asked.limit,
    )
    return Page(items=page.items, next_cursor=None if page.next_cursor is None else str(page.next_cursor))


async def create_quota(call: Call) -> Answer:
    """Create a quota: a rate, a cap of running executions, or both. One that exists is left as it is.

    Without a `quota_policy_id` the name decides it.
    """
    asked: CreateQuota = call.body
    with named(window="window_seconds", jitter="jitter_seconds"):
        found = await call.engine.create_quota_policy(
            None if asked.quota_policy_id is None else QuotaPolicyId(asked.quota_policy_id),
            name=asked.name,
            key=asked.key,
            window=span(asked.window_seconds, "window_seconds"),
            max_requests_per_window=asked.max_requests_per_window,
            max_concurrent=asked.max_concurrent,
            jitter=span(asked.jitter_seconds, "jitter_seconds"),
        )
    status = 201 if isinstance(found, QuotaPolicyCreated) else 200
    return Answer(body=found, status=status, target=str(found.quota_policy_id))


async def get_quota(call: Call) -> Answer:
    """Read a quota, and how full it is over all values of its key."""
    found = await _policy(call)
    return Answer(body=found, etag=_tag(found))


async def update_quota(call: Call) -> Answer:
    """Change the numbers of a quota. Executions that there is room for now become claimable; running ones stay.

    With `If-Match`, the `ETag` of the quota as it was read, nothing changes if its numbers have changed since.
    """
    asked: UpdateQuota = call.body
    found = await _policy(call)
    is_fixed = check_match(call, _tag(found))
    with unchanged(), named(window="window_seconds", jitter="jitter_seconds"):
        await call.engine.update_quota_policy(
            found.quota_policy_id,
            window=span(asked.window_seconds, "window_seconds"),
            max_requests_per_window=asked.max_requests_per_window,
            max_concurrent=asked.max_concurrent,
            jitter=span(asked.jitter_seconds, "jitter_seconds"),
            updated_at=found.updated_at if is_fixed else None,
        )
    changed = await _policy(call)
    return Answer(body=changed, etag=_tag(changed))


async def admit_execution(call: Call) -> AdmissionAnswer:
    """Take a slot of a quota for an execution, under the numbers of the quota: for programs that do not claim.

    `already_admitted`: it had one. `rate_exceeded` and `concurrency_exceeded`: there is none, and nothing changed.
    The slot ends with the window, or when it is given back; while the execution is active it stays. Claims take slots
    themselves.
    """
    policy = await _policy(call)
    limits = policy.limits
    return await call.engine.check_admission(
        policy.quota_policy_id,
        call.path["execution_id"],
        dimension=call.body.dimension,
        window=span(limits.requests_per_window_seconds, "window_seconds"),
        rate_limit=limits.max_requests_per_window,
        concurrency_cap=limits.active_concurrency_cap,
        jitter=span(limits.jitter_ms / 1000, "jitter_seconds"),
    )


async def release_admission(call: Call) -> Released:
    """Give the slot of an execution back, if it has one. Its admission stays in the window."""
    policy = await _policy(call)
    return await call.engine.release_admission(policy.quota_policy_id, call.path["execution_id"])


async def _policy(call: Call) -> QuotaPolicy:
    target = call.path["quota_policy_id"]
    found = await call.engine.get_quota_policy(target)
    if found is None:
        raise NotFound("quota_policy", str(target))
    return found


def _tag(found: QuotaPolicy) -> str:
    return tag_of(found.updated_at, found)


def _place(cursor: str) -> QuotaPolicyId:
    try:
        return QuotaPolicyId(UUID(cursor))
    except ValueError:
        raise InvalidInput("cannot be read", field="cursor", allowed="a next_cursor of this list") from None


OPERATIONS = (
    Operation(
        method="GET", path="/v1/quotas", handler=list_quotas, engine=("list_quota_policies",), scope=Scope.READ,
        within=Within.EVERY, query=ListQuotas, answers={200: list[QuotaPolicy]}, etag=True,
    ),
    Operation(
        method="POST", path="/v1/quotas", handler=create_quota, engine=("create_quota_policy",), scope=Scope.OPERATE,
        within=Within.EVERY, body=CreateQuota, answers={201: QuotaPolicyCreated, 200: QuotaPolicyExists},
        repeats=Repeats.KEPT, made="/v1/quotas/{quota_policy_id}",
    ),
    Operation(
        method="GET", path="/v1/quotas/{quota_policy_id}", handler=get_quota,
        engine=("get_quota_policy", "read_quota_policy_limits"), scope=Scope.READ, within=Within.EVERY,
        answers={200: QuotaPolicy}, etag=True,
    ),
    Operation(
        method="PATCH", path="/v1/quotas/{quota_policy_id}", handler=update_quota, engine=("update_quota_policy",),
        scope=Scope.OPERATE, within=Within.EVERY, body=UpdateQuota, answers={200: QuotaPolicy}, etag=True,
    ),
    Operation(
        method="POST", path="/v1/quotas/{quota_policy_id}/admissions/{execution_id}", handler=admit_execution,
        engine=("check_admission",), scope=Scope.OPERATE, within=Within.EVERY, body=Admit,
        answers={200: AdmissionAnswer}, repeats=Repeats.OWN,
    ),
    Operation(
        method="DELETE", path="/v1/quotas/{quota_policy_id}/admissions/{execution_id}", handler=release_admission,
        engine=("release_admission",), scope=Scope.OPERATE, within=Within.EVERY, answers={200: Released},
    ),
)  # fmt: skip
