"""Every exception flowfabric raises, as one tree.

    FlowFabricError
    +-- NotFound                 the named thing does not exist
    +-- ValidationFailed         the request can never succeed unchanged
    |   +-- InvalidInput         one argument is wrong: field, problem, allowed values
    |   +-- PayloadRefused       a signal's payload does not fit the wait: field, problem, allowed values
    |   +-- Corruption           stored data or handle bytes cannot be decoded
    +-- Contention               another call was faster, or it is too early or too late
    |   +-- ExecutionNotActive   the execution left the active phase: stop
    |   +-- RetriesExhausted     the database refused three times in a row
    +-- Conflict                 it already exists and is different
    +-- StateError               the state does not allow it
    |   +-- LeaseLost            another owner, or none: stop and discard this attempt's work
    +-- TransportError           the database did not answer
    |   +-- ConnectionFailed     no usable connection: address, password, version, schema
    +-- Unavailable              this deployment does not offer the operation
    +-- ResourceExhausted        too many calls of a kind run at the same time
    +-- WorkerAtCapacity         a worker has no free slot for a grant
    +-- NotAllowed               the database user lacks the role for this call
    +-- CursorRefused            events after the cursor are missing
    +-- StreamDisconnected       a subscription ended: subscribe again with its cursor
    +-- TimedOut                 an operation of this library took too long
    +-- TaskFailed               the awaited execution ended without a result
    |   +-- Purged               it is no longer stored
    |   +-- FlowFailed           nodes of the flow failed, or it was cancelled
    +-- StepFailed               a durable step failed in an earlier run of the handler
    +-- StepsChanged             the recorded steps no longer match the code
    +-- NoSignal                 a wait ended without its signals
    +-- BudgetExceeded           a handler would use more than a budget allows

Beside the tree: `RetryLater` and `Reject`, which handlers raise to choose what happens next, and `Interrupted`,
which is not an `Exception`, so that a handler's `except Exception` does not catch it.

A family is one class; `kind` says which case of it. A subclass exists only where a caller does something
different. The other properties of a kind (whether a retry helps, HTTP status, wire code) are in `_taxonomy`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeVar
from uuid import UUID

from flowfabric._secrets import redact
from flowfabric._taxonomy import BY_KIND, CONNECTION_KINDS, LEASE_LOST_KINDS, SPECIAL, ErrorClass

_SHOWN_NODES: Final = 5
_E = TypeVar("_E", bound="FlowFabricError")


def _revive(cls: type[_E], args: tuple[Any, ...], state: dict[str, Any]) -> _E:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class FlowFabricError(Exception):
    """Root of everything flowfabric raises. Raise a family, catch this."""

    family: ClassVar[str] = ""

    kind: str
    detail: str
    code: str
    error_class: ErrorClass
    http_status: int
    retryable: bool
    wire_retryable: bool
    execution_id: UUID | None

    def __init__(self, kind: str, detail: str = "", *, execution_id: UUID | None = None) -> None:
        row = BY_KIND.get((self.family, kind))
        if row is None:
            raise ValueError(f"{type(self).__name__} has no kind {kind!r}")
        special = SPECIAL.get((self.family, kind))
        if special is not None and special not in {cls.__name__ for cls in type(self).__mro__}:
            raise ValueError(f"kind {kind!r} is raised as {special}, not as {type(self).__name__}")
        self.kind = kind
        self.detail = detail
        self.code = row.code
        self.error_class = row.error_class
        self.http_status = row.http_status
        self.retryable = row.error_class == "retryable"
        self.wire_retryable = row.wire_retryable
        self.execution_id = execution_id
        super().__init__(self._message())

    def _message(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the constructor with only the message.
        return _revive, (type(self), self.args, dict(self.__dict__))


class NotFound(FlowFabricError):
    """The named thing does not exist."""

    family = "not_found"

    def __init__(
        self,
        entity: str,
        id: object = None,  # noqa: A002 - the attribute has the same name
        *,
        detail: str = "",
    ) -> None:
        self.entity = entity
        self.id = None if id is None else str(id)
        execution_id = id if entity == "execution" and isinstance(id, UUID) else None
        super().__init__("not_found", detail, execution_id=execution_id)

    def _message(self) -> str:
        what = self.entity if self.id is None else f"{self.entity} {self.id}"
        return f"not found: {what} ({self.detail})" if self.detail else f"not found: {what}"


class ValidationFailed(FlowFabricError):
    """The request can never succeed unchanged."""

    family = "validation"


class InvalidInput(ValidationFailed):
    """One argument is malformed or out of range."""

    def __init__(
        self,
        problem: str,
        *,
        field: str | None = None,
        allowed: str | None = None,
        execution_id: UUID | None = None,
    ) -> None:
        self.field = field
        self.problem = problem
        self.allowed = allowed
        detail = problem if field is None else f"{field}: {problem}"
        if allowed is not None:
            detail = f"{detail}; allowed: {allowed}"
        super().__init__("invalid_input", detail, execution_id=execution_id)


class PayloadRefused(ValidationFailed):
    """A signal's payload does not fit the type that the task waits for. Nothing changed; the wait stays open.

    `field` is the path of what is wrong, such as `payload.comment`, `problem` says what, `allowed` what would fit.
    """

    def __init__(self, field: str, problem: str, allowed: str, *, execution_id: UUID | None = None) -> None:
        self.field = field
        self.problem = problem
        self.allowed = allowed
        super().__init__("payload_refused", f"{field}: {problem}; allowed: {allowed}", execution_id=execution_id)


class Corruption(ValidationFailed):
    """Stored data or the bytes of a handle cannot be decoded."""

    def __init__(self, detail: str, *, execution_id: UUID | None = None) -> None:
        super().__init__("corruption", detail, execution_id=execution_id)


class Contention(FlowFabricError):
    """Another call was faster, or it is too early or too late. `error_class` says whether a retry helps."""

    family = "contention"


class ExecutionNotActive(Contention):
    """The execution left the active phase. Stop; the four attributes describe its state.

    All four are text and always set: `terminal_outcome` is 'none' while not terminal, and `attempt_id` is
    empty when no attempt is current.
    """

    def __init__(
        self,
        detail: str = "",
        *,
        terminal_outcome: str | None = None,
        lease_epoch: str | int | None = None,
        lifecycle_phase: str | None = None,
        attempt_id: object = None,
        execution_id: UUID | None = None,
    ) -> None:
        self.terminal_outcome = terminal_outcome or "none"
        self.lease_epoch = "" if lease_epoch is None else str(lease_epoch)
        self.lifecycle_phase = lifecycle_phase or ""
        self.attempt_id = "" if attempt_id is None else str(attempt_id)
        super().__init__("execution_not_active", detail, execution_id=execution_id)

    def _message(self) -> str:
        facts = (
            f"terminal_outcome={self.terminal_outcome} lifecycle_phase={self.lifecycle_phase}"
            f" lease_epoch={self.lease_epoch} attempt_id={self.attempt_id}"
        )
        return f"{super()._message()} ({facts})"


class RetriesExhausted(Contention):
    """The database reported a serialization conflict three times in a row. Nothing was written."""

    def __init__(self, detail: str = "", *, execution_id: UUID | None = None) -> None:
        super().__init__("retry_exhausted", detail, execution_id=execution_id)


class Conflict(FlowFabricError):
    """It already exists and is different. `existing` names the existing one, if known.

    `edge` is the stored edge, if the conflict is about an edge.
    """

    family = "conflict"
    edge: Any = None

    def __init__(
        self, kind: str, detail: str = "", *, existing: object = None, execution_id: UUID | None = None
    ) -> None:
        self.existing = None if existing is None else str(existing)
        super().__init__(kind, detail, execution_id=execution_id)


class StateError(FlowFabricError):
    """The state does not allow it."""

    family = "state"


class LeaseLost(StateError):
    """The lease is stale, expired or revoked. Stop, and discard this attempt's work."""

    def __init__(self, kind: str = "stale_lease", detail: str = "", *, execution_id: UUID | None = None) -> None:
        if kind not in LEASE_LOST_KINDS:
            raise ValueError(f"LeaseLost has no kind {kind!r}")
        super().__init__(kind, detail, execution_id=execution_id)

    def _message(self) -> str:
        message = super()._message()
        return message if self.execution_id is None else f"{message} (execution {self.execution_id})"


class TransportError(FlowFabricError):
    """The database could not be reached, or did not answer. Passwords in the detail are masked."""

    family = "transport"

    def __init__(self, kind: str = "transport", detail: str = "", *, execution_id: UUID | None = None) -> None:
        super().__init__(kind, redact(detail), execution_id=execution_id)


class ConnectionFailed(TransportError):
    """No usable connection. The message says which part is wrong and what to do about it."""

    WORDING: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "unreachable": "the database server cannot be reached; check host, port and that it is running",
            "wrong_password": "the database server refused the user name or password",
            "missing_privileges": "the database user lacks privileges; see `flowfabric doctor`",
            "database_missing": "the database does not exist on this server",
            "server_too_old": "the database server is too old; PostgreSQL 15 or newer is needed",
            "server_unfit": "the database server lacks a part of PostgreSQL that flowfabric needs",
            "bad_address": "the address of the database is wrong",
            "schema_missing": "the flowfabric schema is not installed; run `flowfabric migrate`",
            "schema_older": "the flowfabric schema is older than this package; run `flowfabric migrate`",
            "schema_newer": "the flowfabric schema is newer than this package; upgrade the package",
            "schema_locked": "the schema cannot be changed while open transactions use its tables; try again later",
            "schema_foreign": "the flowfabric schema was made by another, unreleased version and cannot be migrated; "
            "save what you need with that version (`flowfabric db dump`), then empty the database "
            "(`flowfabric db reset`, or drop the schema flowfabric)",
        }
    )

    def __init__(self, kind: str = "unreachable", detail: str = "", *, target: str | None = None) -> None:
        if kind not in CONNECTION_KINDS:
            raise ValueError(f"ConnectionFailed has no kind {kind!r}")
        self.target = None if target is None else redact(target)
        super().__init__(kind, detail)

    def _message(self) -> str:
        message = self.WORDING[self.kind]
        if self.target is not None:
            message = f"{message} ({self.target})"
        return f"{message}: {self.detail}" if self.detail else message


class Unavailable(FlowFabricError):
    """This deployment does not offer the operation."""

    family = "unavailable"

    def __init__(self, op: str, detail: str = "") -> None:
        self.op = op
        super().__init__("unavailable", detail)

    def _message(self) -> str:
        return f"unavailable: {self.op} ({self.detail})" if self.detail else f"unavailable: {self.op}"


class ResourceExhausted(FlowFabricError):
    """Too many calls of a kind run in this process at the same time. Try again after `retry_after_ms`."""

    family = "resource"

    def __init__(self, pool: str, most: int, retry_after_ms: int) -> None:
        self.pool = pool
        self.max = most
        self.retry_after_ms = retry_after_ms
        super().__init__("resource_exhausted", f"{pool}: {most} run already; try again after {retry_after_ms} ms")


class WorkerAtCapacity(FlowFabricError):
    """A worker has no free slot for a grant. The grant is not touched: it is valid until it expires.

    `slots` is how many the worker has.
    """

    family = "capacity"

    def __init__(self, slots: int, *, execution_id: UUID | None = None) -> None:
        self.slots = slots
        super().__init__(
            "worker_at_capacity", f"all {slots} slots of this worker are in use", execution_id=execution_id
        )


class NotAllowed(FlowFabricError):
    """The database user lacks the role for this call. `function` is the call, `roles` are those that may make it."""

    family = "permission"

    def __init__(self, function: str, roles: Sequence[str] = (), *, option: str | None = None) -> None:
        """`option`: what `flowfabric migrate` takes to grant the least of the roles; without one only the owner may."""
        self.function = function
        self.roles = tuple(roles)
        self.option = option
        super().__init__("missing_role")

    def _message(self) -> str:
        if self.option is None:
            return f"`{self.function}` is for the owner of the schema only"
        *others, last = self.roles
        names = f"{', '.join(others)} or {last}" if others else last
        return (
            f"`{self.function}` needs the role {names}; run `flowfabric migrate {self.option} NAME` as the owner of the"
            " schema"
        )


class CursorRefused(FlowFabricError):
    """A cursor of the event log cannot be continued: events after it were removed, or the log does not reach it.

    `EventCursor(error.position, error.epoch)` can be continued: the oldest position (`cursor_expired`), the end of the
    log, or after a restore or failover that lost events the last position that both logs have (`cursor_ahead`).
    """

    family = "cursor"

    def __init__(self, kind: str, detail: str = "", *, position: int, epoch: int = 0) -> None:
        self.position = position
        self.epoch = epoch
        super().__init__(kind, detail)


class StreamDisconnected(FlowFabricError):
    """A subscription of events ended: the database was away for too long, or the engine was closed.

    `cursor` is where to continue: everything that matches up to it has been delivered.
    """

    family = "subscription"

    def __init__(self, detail: str = "", *, cursor: Any) -> None:
        self.cursor = cursor
        super().__init__("stream_disconnected", detail)


class TimedOut(FlowFabricError):
    """An operation of this library took too long. `elapsed_ms` is its time limit."""

    family = "timed_out"

    def __init__(self, op: str, elapsed_ms: int, *, detail: str = "") -> None:
        self.op = op
        self.elapsed_ms = elapsed_ms
        super().__init__("timed_out", detail or f"{op} did not finish within {elapsed_ms} ms")


class TaskFailed(FlowFabricError):
    """The awaited execution ended without a result. `kind` is its final state.

    `error_type`, `message` and `traceback` describe the exception that ended it, as text, if there was one.
    """

    family = "task"

    def __init__(
        self,
        kind: str,
        detail: str = "",
        *,
        execution_id: UUID | None = None,
        category: str | None = None,
        error_type: str | None = None,
        traceback: str | None = None,
    ) -> None:
        self.category = category
        self.error_type = error_type
        self.message = detail
        self.traceback = traceback
        super().__init__(kind, detail, execution_id=execution_id)

    def _message(self) -> str:
        what = f"{self.error_type}: {self.detail}" if self.error_type else self.detail
        message = f"execution {self.execution_id} {self.kind}" if self.execution_id else self.kind
        return f"{message}: {what}" if what else message


class Purged(TaskFailed):
    """The execution is not stored: its retention ended, it was deleted, or it was never in this database."""

    def __init__(self, execution_id: UUID) -> None:
        super().__init__("purged", "no longer stored; its retention has expired", execution_id=execution_id)

    def _message(self) -> str:
        return f"execution {self.execution_id} was purged: {self.detail}"


class FlowFailed(TaskFailed):
    """The awaited flow ended without results: nodes failed, or it was cancelled.

    `failures` are the exceptions of the nodes that failed, by name; `skipped` the names of those that could not run
    because of them; `results` the results of the others.
    """

    def __init__(
        self,
        kind: str,
        flow_id: object,
        *,
        failures: Mapping[str, TaskFailed],
        skipped: Sequence[str] = (),
        results: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> None:
        self.flow_id = str(flow_id)
        self.failures = dict(failures)
        self.skipped = tuple(skipped)
        self.results = dict(results or {})
        self.reason = reason
        named = [f"{name} {error.kind}: {_first_line(error)}".rstrip(": ") for name, error in self.failures.items()]
        shown = "; ".join(named[:_SHOWN_NODES])
        if len(named) > _SHOWN_NODES:
            shown += f"; and {len(named) - _SHOWN_NODES} more"
        if self.skipped:
            shown += f"{'; ' if shown else ''}{len(self.skipped)} skipped"
        super().__init__(kind, ": ".join(part for part in (reason if kind == "cancelled" else "", shown) if part))

    def _message(self) -> str:
        return f"flow {self.flow_id} {self.kind}: {self.detail}" if self.detail else f"flow {self.flow_id} {self.kind}"


def _first_line(error: TaskFailed) -> str:
    text = f"{error.error_type}: {error.message}" if error.error_type else error.message
    return text.splitlines()[0][:200] if text else ""


class StepFailed(FlowFabricError):
    """A durable step failed in an earlier run of the handler, and its exception cannot be recreated."""

    family = "step"

    def __init__(self, step: str, error_type: str, message: str) -> None:
        self.step = step
        self.error_type = error_type
        self.message = message
        super().__init__("step_failed", f"step {step!r}: {error_type}: {message}")


class StepsChanged(FlowFabricError):
    """The recorded steps of an execution no longer match the handler's code."""

    family = "step"

    def __init__(self, detail: str, *, execution_id: UUID | None = None) -> None:
        super().__init__("steps_changed", detail, execution_id=execution_id)


class NoSignal(FlowFabricError):
    """A wait ended without its signals: it timed out, or an operator resumed the execution.

    A handler that does not catch it fails, and is not retried.
    """

    family = "wait"

    def __init__(self, kind: str, name: str, *, execution_id: UUID | None = None) -> None:
        self.name = name
        because = "it timed out" if kind == "wait_timed_out" else "an operator resumed the execution"
        super().__init__(kind, f"no signal for {name!r}: {because}", execution_id=execution_id)


class BudgetExceeded(FlowFabricError):
    """The amounts a handler asked for do not fit under a hard limit; nothing was counted or held.

    `budget` is the budget's name, `used` and `held` are what executions have used and hold of the dimension, `limit` is
    the hard limit and `asked` what did not fit.
    """

    family = "budget"

    def __init__(
        self,
        budget: str,
        dimension: str,
        *,
        used: int,
        held: int,
        limit: int,
        asked: int,
        budget_id: UUID | None = None,
        execution_id: UUID | None = None,
    ) -> None:
        self.budget = budget
        self.dimension = dimension
        self.used = used
        self.held = held
        self.limit = limit
        self.asked = asked
        self.budget_id = None if budget_id is None else str(budget_id)
        also = f" and {held:,} held" if held else ""
        words = f"{dimension} of budget {budget!r}: {asked:,} asked for, {used:,} used{also} of {limit:,}"
        super().__init__("budget_hard_breach", words, execution_id=execution_id)


class RetryLater(Exception):
    """Raised by a handler: not now, try again. `after` is how long to wait; without it the retry policy decides."""

    def __init__(self, reason: str = "", *, after: timedelta | float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = after


class Reject(Exception):
    """Raised by a handler: this will never work. The execution fails and is not retried."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Interrupted(BaseException):
    """Unwinds a handler in a thread that has to stop: it lost its lease, was cancelled, or waits without a worker."""
