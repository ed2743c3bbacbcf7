"""Steps as a handler records them and as they are stored."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias
from uuid import UUID

from msgspec import Struct

from flowfabric.values.ids import ExecutionId

StepKind: TypeAlias = Literal["step", "now", "sleep", "submit", "result", "wait"]


class NewStep(Struct, frozen=True, kw_only=True, gc=False):
    """A step to record; `n` counts how often the handler used the name before in this run."""

    name: str
    n: int = 0
    kind: StepKind = "step"
    result: bytes | None = None
    encoding: str | None = None
    error: str | None = None
    seconds: float | None = None
    pause: timedelta | None = None


class Step(Struct, frozen=True, kw_only=True):
    """A stored step. `at` is the time of a `now`, the end of a `sleep`, the deadline of a `wait`.

    `error` is set when it failed; `result` then holds the other data of its exception. `outcome` is how a `wait` ended
    (None while it is open), and `known` for a `submit` whose execution already existed.
    """

    execution_id: ExecutionId
    generation: int
    name: str
    n: int
    kind: StepKind
    run: int
    attempt_index: int
    result: bytes | None
    encoding: str | None
    error: dict[str, Any] | None
    at: datetime | None
    child_id: ExecutionId | None
    seconds: float | None
    recorded_at: datetime
    waitpoint_ids: tuple[UUID, ...] = ()
    outcome: str | None = None


class Parked(Struct, frozen=True):
    """`parked` is False when there is nothing to wait for, `because` of `ended`, `due` or `signal`; the lease stays."""

    execution_id: ExecutionId
    parked: bool
    because: str | None = None
