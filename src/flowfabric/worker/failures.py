"""What an exception that left a handler means for its execution: the class, the category and the words to store."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowfabric.client.failure import describe_failure
from flowfabric.contracts.codecs import CannotDecode
from flowfabric.engine import Engine
from flowfabric.errors import InvalidInput, NoSignal, Reject, RetryLater, StepsChanged, TransportError
from flowfabric.values.attempt import Failure
from flowfabric.values.durations import MAX_DURATION_MS, duration
from flowfabric.values.policies import Exponential, Fixed, RetryPolicy
from flowfabric.worker.runners.process_pool import ChildDied, PoolClosed, RemoteError

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

log = logging.getLogger("flowfabric.worker")
_OWN_FILES = str(Path(__file__).parent.parent)


class BadResult(Exception):
    """What the handler returned does not fit its annotation, or has no JSON form."""


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
        case PoolClosed():
            category, failure_class = "worker_stops", "infra_crash"
        case RemoteError():
            category, failure_class = error.type_name.rpartition(".")[2], "transient"
        case TransportError() if error.retryable:
            # Not the handler's doing: it is retried also where nothing says so.
            return Failure(
                authority=handle,
                reason=describe_failure(error, skip=_is_ours),
                failure_class="infra_crash",
                category="database_unreachable",
                retry_policy=await _later(engine, running, RetryLater()),
            )
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
    """The retry that a handler asked for: when it says, as often as the execution's policy allows.

    One more round trip, on the way of a failure only: the claim does not carry the policy, which few handlers need.
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
    """How long the handler wants to wait. What is no duration at all is left to the policy: failing must not fail."""
    if error.after is None:
        return None
    try:
        return min(max(duration(error.after, "after"), timedelta(0)), _LONGEST)
    except InvalidInput as wrong:
        log.warning("RetryLater: %s", wrong)
        return None
