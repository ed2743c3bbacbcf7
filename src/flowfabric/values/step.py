"""Steps as a handler records them and as they are stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

from msgspec import Struct

from flowfabric.errors import InvalidInput
from flowfabric.values.ids import ExecutionId, FlowId

StepKind: TypeAlias = Literal["step", "now", "sleep", "submit", "result", "wait", "patch", "usage"]

# The name of the `patch` that a handler records once if it may take other steps when it is run again, without a change
# of its code.
BRANCHED = "flowfabric: took another branch"


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_CURSOR: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,16})\.([0-9]{1,9})")


class NewStep(Struct, frozen=True, kw_only=True, gc=False):
    """A step to record; `n` counts how often the handler used the name before in this run.

    `place` as in `Step`; a `sleep` with a place instead of a pause has ended.
    """

    name: str
    n: int = 0
    kind: StepKind = "step"
    result: bytes | None = None
    encoding: str | None = None
    error: str | None = None
    seconds: float | None = None
    pause: timedelta | None = None
    place: int | None = None


class Step(Struct, frozen=True, kw_only=True):
    """A stored step. `at` is the time of a `now`, the end of a `sleep`, the deadline of a `wait`.

    `error` is set when it failed; `result` then holds the other data of its exception. `outcome` is how a `wait` ended
    (None while it is open), and `known` for a `submit` whose execution already existed. `child_id` or `flow_id` is what
    a `submit` created or found. `is_stray`: recorded by a run that ended because its code had changed, or after
    something that a replay made start again; code that does not ask for it is not changed code. `is_unread`:
    the handler has not read the signals of this `wait`, or has recorded nothing since. `place`: the number of a `step`,
    `result`, `sleep` or `wait` in the order in which the handler got their ends; None while it has not.
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
    flow_id: FlowId | None = None
    is_stray: bool = False
    is_unread: bool = False
    place: int | None = None


class StepCursor(Struct, frozen=True):
    """Where a page of the steps of an execution ended: after `n` of those recorded at this time, and all before."""

    generation: int
    recorded_at: datetime
    n: int

    def encode(self) -> str:
        """Return the cursor as text, for a URL."""
        return f"{self.generation}.{(self.recorded_at - _EPOCH) // timedelta(microseconds=1)}.{self.n}"

    @classmethod
    def decode(cls, text: str) -> StepCursor:
        found = _CURSOR.fullmatch(text)
        if found is None:
            raise InvalidInput("cannot be read", field="cursor", allowed="a next_cursor of this list")
        generation, since, n = map(int, found.groups())
        return cls(generation, _EPOCH + timedelta(microseconds=since), n)

    @classmethod
    def of(cls, page: Sequence[Step], before: StepCursor | None) -> StepCursor:
        """The cursor after a page of steps that followed `before`."""
        last = page[-1]
        n = sum((one.generation, one.recorded_at) == (last.generation, last.recorded_at) for one in page)
        if before is not None and (before.generation, before.recorded_at) == (last.generation, last.recorded_at):
            n += before.n
        return cls(last.generation, last.recorded_at, n)


class Parked(Struct, frozen=True):
    """`parked` is False when there is nothing to wait for, `because` of `ended`, `due` or `signal`; the lease stays."""

    execution_id: ExecutionId
    parked: bool
    because: str | None = None
