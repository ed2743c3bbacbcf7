"""Refusals: `application/problem+json` (RFC 9457) for every error, the engine's and the server's own.

Status, code and flag of the engine's errors come from `_taxonomy.TAXONOMY`; `OWN` has the codes that only the server
has. A problem never contains a key, a token or a payload.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from flowfabric.errors import (
    FlowFabricError,
    InvalidInput,
    NotAllowed,
    NotFound,
    PayloadRefused,
    ResourceExhausted,
    TransportError,
    ValidationFailed,
)

if TYPE_CHECKING:
    from flowfabric.server.call import Answer

log = logging.getLogger("flowfabric.server")
MEDIA: Final = "application/problem+json"
_RETRY_AFTER: Final = 1  # seconds, where nothing better is known


class FieldError(Struct, frozen=True, omit_defaults=True):
    """One wrong member: of the body by its JSON pointer, of the path or the query by its name."""

    detail: str
    pointer: str | None = None
    parameter: str | None = None
    allowed: str | None = None


class ProblemDocument(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A refusal as its body shows it (RFC 9457). `instance` is the id of the request."""

    type: str
    title: str
    status: int
    detail: str
    instance: str = ""
    code: str
    kind: str
    family: str
    retryable: bool
    errors: tuple[FieldError, ...] | UnsetType = UNSET
    execution_id: str | UnsetType = UNSET
    limit_bytes: int | UnsetType = UNSET
    route: str | UnsetType = UNSET


class OwnCode(NamedTuple):
    """A code that only the server has."""

    status: int
    retryable: bool
    text: str


OWN: Final[Mapping[str, OwnCode]] = {
    "invalid_json": OwnCode(400, False, "The body is not JSON. Nothing was changed."),
    "bad_request": OwnCode(400, False, "The request cannot be read as HTTP for this route."),
    "unauthenticated": OwnCode(
        401, False, "The request shows no API key, or one that is unknown, expired or revoked. Send"
        " `Authorization: Bearer ffk_...`."
    ),
    "forbidden": OwnCode(
        403, False, "The API key lacks the scope that the operation needs, hides payloads, or has namespaces while the"
        " operation concerns all; the detail says which."
    ),
    "method_not_allowed": OwnCode(405, False, "The path exists, but not with this method; `Allow` lists those it has."),
    "precondition_failed": OwnCode(
        412, False, "`If-Match` names another version than the stored one: read it again, and decide again."
    ),
    "body_too_large": OwnCode(
        413, False, "The body is longer than the operation takes; `limit_bytes` says how long it may be."
    ),
    "unsupported_media_type": OwnCode(
        415, False, "The body is not sent as `Content-Type: application/json`, or it is compressed."
    ),
    "invalid_request": OwnCode(
        422, False, "Members of the body, the query or the path are wrong, missing or unknown; `errors` names each."
    ),
    "idempotency_key_reused": OwnCode(
        422, False, "The `Idempotency-Key` was used for another request. Use a new key for a new request."
    ),
    "request_in_progress": OwnCode(409, True, "A request with this `Idempotency-Key` is still under way."),
    "repeated_secret": OwnCode(
        409, False, "A request with this `Idempotency-Key` was answered with a secret, which is shown only once. Make a"
        " new one."
    ),
    "too_many_requests": OwnCode(429, True, "Too many requests of this key or address; `Retry-After` says when to come"
        " back."),
    "request_timeout": OwnCode(503, True, "The request took longer than the server allows."),
    "slow_body": OwnCode(408, True, "The body of the request did not arrive within the time that a request may take."),
    "slow_head": OwnCode(408, True, "The head of the request did not arrive in time."),
    "head_too_large": OwnCode(431, False, "The head of the request is longer than the server reads."),
    "too_many_connections": OwnCode(503, True, "The server has as many connections as it takes."),
    "draining": OwnCode(503, True, "The server is shutting down; another one, or the next one, answers."),
    "internal_error": OwnCode(500, False, "The server failed. Its log has the request id with the reason."),
}  # fmt: skip

# What callers are shown of errors whose own text is about the server's connection to its database.
_TRANSPORT: Final = "the database did not answer; the server's log has the reason"


class Problem(Exception):
    """A refusal of the server's own. `code` is a key of `OWN` or of the taxonomy."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
        kind: str | None = None,
        family: str = "http",
        retryable: bool | None = None,
        **members: Any,
    ) -> None:
        own = OWN.get(code)
        self.code = code
        self.detail = detail
        self.status = status
        self.retryable = retryable if retryable is not None else bool(own and own.retryable)
        self.kind = kind or code
        self.family = family
        self.errors = tuple(errors)
        self.headers = dict(headers or {})
        self.members = members
        self.answer: Answer | None = None  # how it is shown, if not as a document: its body is bytes
        if self.status in (429, 503):
            self.headers.setdefault("Retry-After", str(_RETRY_AFTER))
        super().__init__(detail)

    def within(self, pointer: str) -> Problem:
        """The same for a part of a body: its wrong members are below this pointer."""
        self.errors = tuple(replace(one, pointer=pointer + one.pointer) if one.pointer else one for one in self.errors)
        return self

    def document(self, instance: str, base: str = "") -> ProblemDocument:
        """The body. `base` is the path under which the server is mounted."""
        return ProblemDocument(
            type=f"{base}/problems/{self.code}",
            title=title(self.code),
            status=self.status,
            detail=self.detail,
            instance=instance,
            code=self.code,
            kind=self.kind,
            family=self.family,
            retryable=self.retryable,
            errors=self.errors or UNSET,
            **self.members,
        )


def title(code: str) -> str:
    """A code in words."""
    return code.replace("_", " ").capitalize().replace("json", "JSON")


# Where the capabilities of each side of a claim are in a request.
_CAPABILITIES: Final = {"required": "/policy/routing_requirements/required_capabilities", "worker": "/capabilities"}


def not_found(what: str, of: object) -> Problem:
    """The one answer for what is unknown and for what belongs to another namespace."""
    return problem_of(NotFound(what, of))


def problem_of(error: FlowFabricError) -> Problem:
    """The refusal that one of the engine's errors is."""
    members: dict[str, Any] = {}
    headers: dict[str, str] = {}
    errors: tuple[FieldError, ...] = ()
    status, code, detail = error.http_status, error.code, error.detail or str(error)
    match error:
        case InvalidInput(field=str() as name):
            errors = (FieldError(error.problem, pointer=pointer_of(name), allowed=error.allowed),)
        case ValidationFailed(kind="invalid_policy_json"):
            path, colon, problem = detail.partition(":")
            errors = (FieldError(problem.strip() or path, pointer=pointer_of(f"policy.{path}" if colon else "policy")),)
        case ValidationFailed(kind="invalid_capabilities") if (side := detail.partition(":")[0]) in _CAPABILITIES:
            problem = detail.partition(":")[2]
            errors = (FieldError(problem.replace("_", " "), pointer=_CAPABILITIES[side]),)
        case PayloadRefused():
            errors = (FieldError(error.problem, pointer=pointer_of(error.field), allowed=error.allowed),)
        case NotFound():
            detail = str(error)
        case TransportError():
            log.error("a request failed: %s", error)
            detail = _TRANSPORT
        case NotAllowed():
            # Not the caller's rights, but those of the user with which the server is connected.
            status, code, detail = 503, "unavailable", str(error)
        case ResourceExhausted():
            headers["Retry-After"] = str(max(-(-error.retry_after_ms // 1000), 1))
    if error.execution_id is not None:
        members["execution_id"] = str(error.execution_id)
    return Problem(
        status,
        code,
        detail,
        errors=errors,
        headers=headers,
        kind=error.kind,
        family=error.family,
        retryable=error.wire_retryable,
        **members,
    )


def pointer_of(name: str) -> str:
    """A field as an error names it (`payload.comment`, `tags['a']`) as a JSON pointer of the body."""
    head = name.split("[", 1)[0].split(" ", 1)[0]
    return "/" + "/".join(part.replace("~", "~0").replace("/", "~1") for part in head.split("."))


def internal() -> Problem:
    """The refusal for an error of the server itself, which its log has."""
    return Problem(500, "internal_error", "the server failed; its log has the reason under this request id")


def codes() -> dict[str, str]:
    """Every code, with what a page says about it."""
    return {**TEXTS, **{code: own.text for code, own in OWN.items()}}


TEXTS: Final[Mapping[str, str]] = {
    "not_found": "Nothing of this name exists, or it belongs to a namespace that the API key does not have.",
    "invalid_input": "A value is malformed or out of range; `errors` names the member and what is allowed.",
    "capability_mismatch": "The worker lacks a capability that the execution requires.",
    "invalid_capabilities": "A list of capabilities is malformed, or too long.",
    "invalid_policy_json": "The policy of an execution is malformed; the detail names the member.",
    "invalid_blocking_reason": "An execution cannot be held back for this reason; the detail lists those that exist.",
    "payload_too_large": "A payload is longer than the engine stores.",
    "signal_limit_exceeded": "The execution has received as many signals as its policy allows.",
    "invalid_token": "The token of the waitpoint is wrong, or its signing key has been retired.",
    "invalid_waitpoint_for_execution": "The waitpoint belongs to another execution.",
    "invalid_dependency": "An edge names an execution that cannot be at this end of it.",
    "invalid_kid": "The id of the signing key is malformed.",
    "invalid_secret_hex": "The secret of the signing key is not hexadecimal, or too short.",
    "invalid_grace_ms": "The time for which the old signing key stays valid is out of range.",
    "retention_limit_exceeded": "More would be kept than the retention allows.",
    "invalid_budget_scope": "The scope of the budget is malformed.",
    "payload_refused": "The payload of a signal does not fit what the task waits for; the wait stays open.",
    "validation_error": "Stored data cannot be read; nothing can be done with this request until it is repaired.",
    "contention": "Another call was faster, or it is too early or too late. Read the state again; `retryable` says"
    " whether repeating the request can succeed.",
    "rate_limit_exceeded": "A quota has no room now; `Retry-After` says when to come back.",
    "retry_exhausted": "The database refused three times in a row because of concurrent changes. Nothing was written.",
    "dependency_already_exists": "The flow has this edge already, and it is different.",
    "cycle_detected": "The edge would close a cycle in the graph of the flow.",
    "self_referencing_edge": "An execution cannot depend on itself.",
    "execution_already_in_flow": "The execution is a member of another flow.",
    "waitpoint_already_exists": "The execution has an open waitpoint of this key.",
    "rotation_conflict": "Another signing key of this id exists, with another secret.",
    "duplicate_submission": "The id, or the idempotency key, belongs to another submission.",
    "instance_in_use": "Another worker has registered under this instance id.",
    "api_key_exists": "Another API key that is not revoked has this name. Revoke or rotate it, or choose another name.",
    "state_conflict": "The state of the execution, the waitpoint or the flow does not allow it; `kind` says what is in"
    " the way.",
    "already_satisfied": "It has been done, or is no longer needed.",
    "execution_not_terminal": "Only an execution that has ended can be replayed, deleted or redacted.",
    "execution_redacted": "The data of the execution was removed: it cannot run again.",
    "max_replays_exhausted": "The execution has been replayed as often as its policy allows.",
    "not_runnable": "Only an execution that waits for a worker can be changed like this.",
    "terminal": "The execution has ended.",
    "flow_already_terminal": "The flow has ended, or is being cancelled: its graph cannot change any more.",
    "api_key_revoked": "The API key has been revoked, which cannot be undone. Make a new one.",
    "lane_closed": "The lane accepts no new executions.",
    "transport": "The server could not reach its database, or lost it. Try again.",
    "timeout": "The database, or an operation of the server, did not answer in time.",
    "protocol": "The database answered in a way that the server does not understand.",
    "other": "The server's connection to its database is not usable; its log has the reason.",
    "auth": "The server's user lacks a right in its database; its log has the reason.",
    "unavailable": "This deployment does not offer the operation; the detail says why.",
    "resource_exhausted": "Too many calls of this kind run in the server at the same time.",
    "worker_at_capacity": "The worker has no free slot for the grant, which stays valid until it expires.",
    "task_failed": "The execution ended without a result; `kind` is its final state.",
    "purged": "The execution, or its data, is no longer stored: its retention ended, or it was deleted or redacted.",
    "step_failed": "A durable step of the execution failed.",
    "steps_changed": "The recorded steps no longer match the code of the task.",
    "no_signal": "A wait ended without its signals.",
    "budget_hard_breach": "The amount does not fit under a hard limit of the budget; nothing was counted.",
    "cursor_ahead": "The event log does not reach this cursor: it was restored from a backup. Start where the"
    " detail says.",
    "cursor_expired": "Events after this cursor were removed; start at the oldest one.",
    "stream_disconnected": "A subscription ended; subscribe again with its cursor.",
}

encode = msgspec.json.Encoder().encode
