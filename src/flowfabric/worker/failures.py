"""The failure to report for an exception of a handler: its class, category and message."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowfabric.client.failure import describe_failure
from flowfabric.contracts.codecs import CannotDecode
from flowfabric.engine import Engine
from flowfabric.errors import BudgetExceeded, InvalidInput, NoSignal, Reject, RetryLater, StepsChanged, TransportError
from flowfabric.values.attempt import Failure
from flowfabric.values.durations import MAX_DURATION_MS, duration
from flowfabric.values.policies import Exponential, Fixed, RetryPolicy
from flowfabric.worker.durable.running import NotAwaited
from flowfabric.worker.runners.process_pool import ChildDied, PoolClosed, RemoteError

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

log = logging.getLogger("flowfabric.worker")
_OWN_FILES = str(Path(__file__).parent.parent)


class BadResult(Exception):
    """The handler's result does not fit its annotation, or has no JSON form."""


_LONGEST = timedelta(milliseconds=MAX_DURATION_MS)
_RETRY_LATER_AT_MOST = 100  # for a task without a retry policy


async def failure_of(engine: Engine, running: Running, error: BaseException) -> Failure:
    """The failure to report."""
    handle = running.handle
    match error:
        case Reject():
            reason = error.reason or "rejected"
            return Failure(authority=handle, reason=reason, failure_class="permanent", category="rejected")
        case RetryLater():
            return Failure(
                authority=handle,
                reason=error.reason or "asked to be retried later",
                failure_class="transient",
                category="retry_later",
                retry_policy=await _later(engine, running, error),
            )
        case CannotDecode():
            category, failure_class = "bad_arguments", "permanent"
        case BadResult():
            return Failure(authority=handle, reason=str(error), failure_class="permanent", category="bad_result")
        case NotAwaited():
            category, failure_class = "not_awaited", "permanent"
        case PoolClosed():
            category, failure_class = "worker_stops", "infra_crash"
        case RemoteError():
            category, failure_class = error.type_name.rpartition(".")[2], "transient"
        case TransportError() if error.retryable:
            # Not the handler's fault: it is retried even without a retry policy.
            return Failure(
                authority=handle,
                reason=describe_failure(error, skip=_is_ours),
                failure_class="infra_crash",
                category="database_unreachable",
                retry_policy=await _later(engine, running, RetryLater()),
            )
        case BudgetExceeded():
            never = running.task.on_budget == "fail"
            category, failure_class = error.kind, "permanent" if never else "transient"
        case NoSignal():
            category, failure_class = error.kind, "permanent"
        case StepsChanged():
            category, failure_class = "steps_changed", "permanent"
        case ChildDied():
            category, failure_class = "child_died", "infra_crash"
        case _ if isinstance(error, running.task.permanent):
            category, failure_class = type(error).__name__, "permanent"
        case _:
            category, failure_class = type(error).__name__, "transient"
    reason = describe_failure(error, skip=_is_ours)
    return Failure(authority=handle, reason=reason, failure_class=failure_class, category=category)


def _is_ours(filename: str) -> bool:
    return filename.startswith(_OWN_FILES)


async def _later(engine: Engine, running: Running, error: RetryLater) -> RetryPolicy | dict[str, Any]:
    """Return the retry that a handler asked for: at its time, as often as the execution's policy allows.

    This costs one round trip, only on failure: the claim does not carry the policy, which few handlers need.
    """
    found = await engine.read_execution(running.claimed.execution_id)
    frozen = ((found.policy or {}) if found is not None else {}).get("retry_policy")
    after = _wanted_pause(error)
    if after is not None:
        most = frozen.get("max_retries", 3) if frozen else _RETRY_LATER_AT_MOST
        return RetryPolicy(max_retries=most, backoff=Fixed(delay=after))
    if frozen:
        policy: dict[str, Any] = {**frozen, "retryable_categories": []}
        return policy
    return RetryPolicy(max_retries=_RETRY_LATER_AT_MOST, backoff=Exponential())


def _wanted_pause(error: RetryLater) -> timedelta | None:
    """Return how long the handler wants to wait; an invalid duration is left to the policy: reporting must not fail."""
    if error.after is None:
        return None
    try:
        return min(max(duration(error.after, "after"), timedelta(0)), _LONGEST)
    except InvalidInput as wrong:
        log.warning("RetryLater: %s", wrong)
        return None
