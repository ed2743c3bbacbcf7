"""Waitpoints and suspensions: where an execution waits, and the token that allows a signal."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias
from uuid import UUID

from msgspec import Struct

from flowfabric.errors import InvalidInput
from flowfabric.values.ids import ExecutionId
from flowfabric.values.lease import Handle
from flowfabric.values.state import State

_TOKEN = re.compile(r"([!-9;-~]{1,64}):([0-9a-fA-F]+)")


class WaitpointToken:
    """The right to signal one waitpoint. It prints redacted; `reveal` returns the text."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the token itself, only for the message to the sender who should signal."""
        return self._text

    @property
    def kid(self) -> str:
        """The id of the key that signed it."""
        return self._text.partition(":")[0]

    def __str__(self) -> str:
        found = _TOKEN.fullmatch(self._text)
        return f"{found[1]}:<REDACTED:len={len(found[2])}>" if found else "<REDACTED:malformed>"

    def __repr__(self) -> str:
        return f"WaitpointToken({self})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WaitpointToken):
            return NotImplemented
        return hmac.compare_digest(*(text.encode(errors="surrogatepass") for text in (self._text, other._text)))

    def __hash__(self) -> int:
        return hash(self._text)


ReasonCode: TypeAlias = Literal[
    "waiting_for_signal",
    "step_boundary",
    "waiting_for_approval",
    "waiting_for_callback",
    "waiting_for_tool_result",
    "waiting_for_operator_review",
    "manual_pause",
    "paused_by_policy",
    "paused_by_budget",
]
RequestedBy: TypeAlias = Literal["worker", "operator", "policy", "system_timeout_policy"]
TriggerType: TypeAlias = Literal["signal", "operator", "auto_resume"]


class NewWaitpoint(Struct, frozen=True):
    """A pending waitpoint, and the token that its signals must carry."""

    waitpoint_id: UUID
    token: WaitpointToken
    expires_at: datetime


class Fresh(Struct, frozen=True):
    """A binding to a new waitpoint, which `suspend` creates."""

    waitpoint_id: UUID
    waitpoint_key: str


class UsePending(Struct, frozen=True):
    """A binding to a waitpoint that `create_waitpoint` made; its key and token stay."""

    waitpoint_id: UUID


class BoundWaitpoint(Struct, frozen=True):
    waitpoint_id: UUID
    waitpoint_key: str
    waitpoint_token: WaitpointToken


class SuspensionDetails(Struct, frozen=True, kw_only=True):
    """The waitpoints a suspension is bound to; the first one is the primary."""

    suspension_id: UUID
    waitpoint_id: UUID
    waitpoint_key: str
    waitpoint_token: WaitpointToken
    additional_waitpoints: tuple[BoundWaitpoint, ...] = ()


class Suspended(Struct, frozen=True):
    """The lease is given up; `handle` is valid only for `observe_signals`."""

    details: SuspensionDetails
    handle: Handle


class AlreadySatisfied(Struct, frozen=True):
    """Nothing had to be done, and why; for a suspend, `details` has the waitpoints and the lease is kept."""

    reason: str
    details: SuspensionDetails | None = None


class ResumePolicy(Struct, frozen=True, kw_only=True):
    """How the execution resumes when signals satisfy the condition. Only the delay has an effect in this version."""

    resume_target: str = "runnable"
    resume_delay: timedelta | None = None
    consume_matched_signals: bool = True
    retain_signal_buffer_until_closed: bool = False
    close_waitpoint_on_resume: bool = True


class Closed(Struct, frozen=True):
    """The waitpoint is closed, by this call or an earlier one."""

    waitpoint_id: UUID


class PendingWaitpoint(Struct, frozen=True, kw_only=True):
    """A waitpoint that accepts signals, without its token."""

    waitpoint_id: UUID
    waitpoint_key: str
    state: str
    required_signal_names: tuple[str, ...]
    created_at: datetime
    activated_at: datetime | None
    expires_at: datetime | None
    execution_id: ExecutionId
    token_kid: str
    token_fingerprint: str


class SuspendedExecution(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    suspended_at: datetime
    reason: str
    timeout_at: datetime | None


class Wait(Struct, frozen=True, kw_only=True):
    """A waitpoint at which an execution waits, as `list_waits` shows it. `reason` is None while it is pending."""

    execution_id: ExecutionId
    execution_kind: str
    lane_id: str
    namespace: str
    waitpoint_id: UUID
    waitpoint_key: str
    state: str
    reason: str | None
    since: datetime
    timeout_at: datetime | None
    timeout_behavior: str | None
    required_signal_names: tuple[str, ...]
    signal_count: int
    refused_signal_count: int = 0


class Suspension(Struct, frozen=True, kw_only=True):
    """One suspension, open while `closed_at` is None."""

    suspension_id: UUID
    execution_id: ExecutionId
    attempt_index: int
    waitpoint_ids: tuple[UUID, ...]
    waitpoint_keys: tuple[str, ...]
    reason_code: str
    requested_by: str
    continuation_metadata_pointer: str | None
    resume_condition: Any
    resume_policy: dict[str, Any]
    suspended_at: datetime
    timeout_at: datetime | None
    timeout_behavior: str | None
    last_signal_at: datetime | None
    satisfied_at: datetime | None
    closed_at: datetime | None
    close_reason: str | None
    trigger_type: str | None
    closer_signal_id: UUID | None
    satisfier_signal_ids: tuple[UUID, ...]


class Resumed(Struct, frozen=True):
    execution_id: ExecutionId
    public_state: State


class ExpiredSuspension(Struct, frozen=True):
    """The suspension timed out; `behavior_applied` says what happened then."""

    execution_id: ExecutionId
    behavior_applied: str


class OpenWait(Struct, frozen=True, kw_only=True):
    """The stored waitpoints of a task's wait; `deadline` is its timeout as a time.

    `use` is how often the handler used the wait's name before in this run.
    """

    use: int
    waitpoints: tuple[BoundWaitpoint, ...]
    deadline: datetime | None


class WaitResult(Struct, frozen=True, kw_only=True):
    """The state of a task's wait: open, resumed, timed_out, operator_resumed or given_up. `seen` counts signals."""

    outcome: str
    result: bytes | None
    seen: tuple[int, ...]


def common_key(keys: Sequence[str], given: str | None) -> str:
    """Return the one key, or raise `InvalidInput` that lists them if there are several."""
    if given is not None:
        return given
    if len(keys) != 1:
        raise InvalidInput(
            f"the execution waits at {len(keys)} waitpoints", field="key", allowed=", ".join(sorted(keys)) or "none"
        )
    return keys[0]
