"""The log lines about executions: one for each start, success, retry, failure, take-over and stop, in words.

Attempts are counted from 1, as everywhere outside of the engine. Nothing here contains arguments or results.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flowfabric.contracts.codecs import SEALED, shown
from flowfabric.errors import ExecutionNotActive, FlowFabricError, LeaseLost, NotFound
from flowfabric.values.attempt import Failure, RetryScheduled
from flowfabric.values.durations import duration_words
from flowfabric.values.history import how_to_fit
from flowfabric.values.lease import HandleKind

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

log = logging.getLogger("flowfabric.worker")
_LOST = {
    "stale_lease": "another worker has taken it over",
    "lease_expired": "its lease expired, so another worker may take it over",
    "lease_revoked": "an operator took it away from this worker",
}
_ENDED = {
    "cancelled": "it was cancelled",
    "failed": "an operator failed it",
    "success": "it was completed elsewhere",
    "skipped": "it was skipped",
}


def facts(running: Running) -> dict[str, Any]:
    """The fields that every log line about an execution has."""
    return {
        "execution_id": str(running.claimed.execution_id),
        "attempt": running.handle.attempt_index + 1,
        "kind": running.claimed.execution_kind,
        "lane": running.handle.lane_id,
    }


def say(level: int, running: Running, words: str, *arguments: object) -> None:
    """Log a line about an execution."""
    if log.isEnabledFor(level):
        about = facts(running)
        log.log(level, f"%s %s: {words}", about["kind"], about["execution_id"], *arguments, extra=about)


def started(running: Running) -> None:
    """Its handler starts here."""
    handle, number = running.handle, running.handle.attempt_index + 1
    if handle.kind is HandleKind.RECLAIMED:
        say(logging.INFO, running, "taken over from a worker that stopped responding, attempt %d", number)
    elif handle.kind is HandleKind.RESUMED:
        say(logging.DEBUG, running, "continued, attempt %d", number)
    else:
        say(logging.DEBUG, running, "started, attempt %d", number)


def succeeded(running: Running) -> None:
    """Its result is stored."""
    number = running.handle.attempt_index + 1
    say(logging.DEBUG, running, "succeeded after %s, attempt %d", _since_claim(running), number)


def failed(running: Running, failure: Failure, verdict: object) -> None:
    """Its failure is stored: it will be retried, or it failed for good."""
    words = shown(failure.reason).partition("\n")[0]
    why = f"{failure.category} {words}" if words == SEALED else words
    number = running.handle.attempt_index + 1
    if isinstance(verdict, RetryScheduled):
        pause = duration_words(max(verdict.delay_until - running.database_now(), timedelta()))
        if verdict.retry_number is None:  # the report was sent twice
            say(logging.WARNING, running, "failed, attempt %d, next attempt in %s: %s", number, pause, why)
        else:
            count = (verdict.retry_number, verdict.max_retries)
            say(logging.WARNING, running, "failed, retry %d of %d in %s: %s", *count, pause, why)
    else:
        after = "" if number == 1 else f" after {number} attempts"
        say(logging.ERROR, running, f"failed for good{after}: %s", why)


def changed(running: Running, problem: str) -> None:
    """Its recorded steps do not fit the code of this worker."""
    say(logging.WARNING, running, "waits for code that fits: %s. How: %s", problem, how_to_fit(problem))


def stopped(running: Running, error: FlowFabricError, effect: str) -> None:
    """It is not this worker's any more: `effect` says what becomes of the handler or of its result."""
    level = logging.INFO if isinstance(error, ExecutionNotActive) else logging.WARNING
    say(level, running, "%s; %s", why_stopped(running, error), effect)


def why_stopped(running: Running, error: FlowFabricError) -> str:
    """Why an execution is not this worker's any more, in words."""
    match error:
        case LeaseLost():
            return f"{_LOST[error.kind]}: {error.detail}" if error.detail else _LOST[error.kind]
        case NotFound():
            return "it was deleted"
        case ExecutionNotActive():
            timeout, deadline = running.claimed.attempt_timeout_at, running.claimed.deadline_at
            now = running.database_now()
            # The error that ended a later attempt did not end this one.
            if error.terminal_outcome in _ENDED and error.attempt_id in ("", str(running.handle.attempt_id)):
                return _ENDED[error.terminal_outcome]
            if timeout is not None and now >= timeout:
                return "its attempt timed out"
            if deadline is not None and now >= deadline:
                return "its deadline has passed"
            return "it expired" if error.terminal_outcome == "expired" else "it was moved on by another process"
        case _:
            return str(error)


def _since_claim(running: Running) -> str:
    return duration_words(timedelta(seconds=time.monotonic() - running.claimed_at))
