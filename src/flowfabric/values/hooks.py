"""The facts of a failure or an escalation, which the task of a hook receives."""

from __future__ import annotations

from datetime import datetime
from typing import Final
from uuid import UUID

from msgspec import Struct

from flowfabric.values.ids import ExecutionId
from flowfabric.values.state import State

FACTS: Final = "facts"  # the encoding of the payload: the engine wrote it, not an app


class _Facts(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    kind: str
    lane: str
    namespace: str = ""
    flow_id: UUID | None = None
    tags: dict[str, str] = {}
    attempt: int
    at: datetime


class Failure(_Facts, frozen=True, kw_only=True, tag="failure"):
    """An execution failed for good, or expired: what the task of `on_failure` receives.

    `message`, `error_type` and `category` say why, `attempt` how many attempts it had.
    """

    state: State
    message: str
    error_type: str | None = None
    traceback: str | None = None
    category: str | None = None


class Escalation(_Facts, frozen=True, kw_only=True, tag="escalation"):
    """A wait with `on_timeout="escalate"` timed out: what the task of `on_escalate` receives.

    The execution still waits at `waitpoints`, now for an operator.
    """

    reason: str
    waitpoints: tuple[str, ...]
    waiting_since: datetime
    timeout_at: datetime
