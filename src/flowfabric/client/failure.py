"""Failures as stored text: the exception's type, its message and the traceback."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from flowfabric.contracts.codecs import CannotDecode, Codecs
from flowfabric.contracts.value_types import ValueType
from flowfabric.errors import Purged, TaskFailed
from flowfabric.values.execution import Outcome
from flowfabric.values.ids import ExecutionId
from flowfabric.values.state import State

_MARK = "\n\nTraceback (most recent call last):\n"
_MAX_TRACEBACK = 16 * 1024
REDACTED = "redacted"  # the encoding of redacted payloads


def type_name(error: BaseException) -> str:
    """The name of the exception's class, with its module unless it is a builtin."""
    cls = type(error)
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"


def describe_failure(error: BaseException, skip: Callable[[str], bool] | None = None) -> str:
    """The stored text: `type: message`, then the traceback. The middle of a long traceback is cut.

    `skip` tells which files' frames to leave out: those of the runtime.
    """
    report = traceback.TracebackException.from_exception(error, capture_locals=False)
    if skip is not None:
        chain: list[traceback.TracebackException] = [report]
        for one in chain:  # it grows by what each follows from
            chain += [other for other in (one.__cause__, one.__context__) if other is not None]
            if kept := [frame for frame in one.stack if not skip(frame.filename)]:
                one.stack = traceback.StackSummary.from_list(kept)
    text = "".join(report.format())
    head = f"{type_name(error)}: {error}".rstrip(": ")
    if len(text) > _MAX_TRACEBACK:
        half = _MAX_TRACEBACK // 2
        text = f"{text[:half]}\n  ... cut ...\n{text[-half:]}"
    marked = text.partition("Traceback (most recent call last):\n")
    return head + _MARK + marked[2] if marked[1] else head


def parse_failure(reason: str | None) -> tuple[str | None, str, str | None]:
    """Type, message and traceback from the stored text; type and traceback are None if it was not an exception."""
    if not reason:
        return None, "", None
    head, mark, trace = reason.partition(_MARK)
    kind, colon, message = head.partition(": ")
    is_type = bool(mark) and all(part.isidentifier() or part == "<locals>" for part in kind.split("."))
    if not is_type:
        return None, head, None
    return kind, message if colon else "", (mark.lstrip("\n") + trace) if mark else None


def task_failed(execution_id: ExecutionId, outcome: Outcome, codecs: Codecs) -> TaskFailed:
    """The exception for an execution that ended without a result."""
    if outcome.state is None:
        return Purged(execution_id)
    if outcome.state is State.CANCELLED:
        return TaskFailed("cancelled", outcome.cancellation_reason or "", execution_id=execution_id)
    kind, message, trace = parse_failure(codecs.open_text(outcome.failure_reason or "", execution_id))
    return TaskFailed(
        outcome.state.value,
        message,
        execution_id=execution_id,
        category=outcome.failure_category,
        error_type=kind,
        traceback=trace,
    )


def result_of(execution_id: ExecutionId, outcome: Outcome, result: ValueType, codecs: Codecs) -> object:
    """The value of a completed execution; `TaskFailed` for any other end."""
    if outcome.state is not State.COMPLETED:
        raise task_failed(execution_id, outcome, codecs)
    if outcome.result is None:
        return None
    if outcome.result_encoding == REDACTED:
        raise CannotDecode("was redacted", what="result", execution_id=execution_id)
    return result.decode(codecs.open(outcome.result, outcome.result_encoding, execution_id))
