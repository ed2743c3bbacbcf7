"""A rate limiter and a circuit breaker, to protect the database and the services that handlers call.

Both see only this process; for limits across processes use quotas (`app.quota`). Neither keeps the engine from closing.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from datetime import timedelta
from typing import Any, Final, Literal, overload
from weakref import WeakKeyDictionary

from flowfabric.errors import Contention, InvalidInput, TransportError
from flowfabric.middleware.base import LOCAL, Middleware, Run, Submission

SOURCE: Final = "flowfabric.middleware"
_PRUNE_FROM: Final = 1024
# A worker's reports about executions it holds. If they were refused, the work would be lost.
_RENEWALS: Final = frozenset({"renew", "renew_many", "renew_and_heartbeat", "heartbeat_own", "heartbeat_worker"})
_HOLDING: Final = frozenset(
    {
        *("complete", "complete_many", "fail", "fail_many", "release", "stop_changed", "delay", "wait_children"),
        *("progress", "record_steps", "read_steps", "park", "submit_child", "submit_child_flow"),
        *("suspend", "suspend_by_triple", "suspend_on", "create_waitpoint", "close_waitpoint", "open_wait"),
        *("settle_wait", "refuse_signals", "observe_signals", "append_frame", "append_frames", "count_emitted"),
        *("report_usage", "report_usage_many", "reserve_usage", "settle_usage", "cancel_reservation", "use_budgets"),
        "pause_for_budget",
    }
)
# Tokens: after waiting exactly `retry_after` there must be one. The bucket owes the rest, so it never adds up.
_ROUNDING: Final = 1e-6


class RateLimited(Contention):
    """The limit of this process is reached; try again after `retry_after`. Nothing was sent."""

    def __init__(self, what: str, per_second: float, retry_after: float, key: Hashable = None) -> None:
        self.per_second = per_second
        self.retry_after = timedelta(seconds=retry_after)
        self.key = key
        # The key stays out of the message: it may identify a user.
        super().__init__("rate_limit_exceeded", f"{what} is over the limit of {per_second:g} per second")


class CircuitOpen(TransportError):
    """The call was not sent, because earlier calls failed. The next one is tried after `retry_after`."""

    source: Final = SOURCE

    def __init__(self, method: str, retry_after: float) -> None:
        self.method = method
        self.retry_after = timedelta(seconds=retry_after)
        super().__init__("transport", f"circuit open, {method} was not sent ({SOURCE})")


class Bucket:
    """A token bucket that holds the tokens of one second. Full at the start; thread-safe."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self.per_second = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = per_second
        self._counted_at = clock()
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    def take(self) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        with self._lock:
            self._count()
            if self._tokens < 1 - _ROUNDING:
                return (1 - self._tokens) / self.per_second
            self._tokens -= 1
            return 0.0

    def _count(self) -> None:
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._counted_at) * self.per_second, self.per_second)
        self._counted_at = now

    async def wait(self, sleep: Callable[[float], Awaitable[Any]]) -> None:
        """Take a token as soon as there is one, in the order of arrival. A cancelled wait takes none."""
        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        if queue is None:
            queue = self._queues.setdefault(loop, asyncio.Lock())
        async with queue:
            while missing := self.take():
                await sleep(missing)

    @property
    def is_idle(self) -> bool:
        """Whether it is full and unused, as a new bucket would be."""
        with self._lock:
            self._count()
            return self._tokens >= self.per_second and not any(queue.locked() for queue in self._queues.values())


class RateLimit(Middleware):
    """Limits engine calls or submissions of this process to a number per second.

    `per_second` is a number, for one bucket or with `key` for one bucket per key; or a mapping of keys to rates. With a
    mapping, other keys share the bucket `default`, and are not limited without a default. Without `key`, the key of a
    call is its method, the key of a submission its kind. A bucket holds the tokens of one second; a rate below 1 counts
    as 1. Above the limit `RateLimited` is raised, or with `wait` the caller waits its turn.

    Reports about executions that a worker holds (results, failures, steps) are never refused: they wait their turn.
    Renewals of leases always pass immediately.
    """

    @overload
    def __init__(
        self,
        per_second: float | Mapping[str, float],
        *,
        on: Literal["call"] = "call",
        key: Callable[[str], Hashable] | None = None,
        default: float | None = None,
        wait: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None: ...

    @overload
    def __init__(
        self,
        per_second: float | Mapping[str, float],
        *,
        on: Literal["submit"],
        key: Callable[[Submission], Hashable] | None = None,
        default: float | None = None,
        wait: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None: ...

    def __init__(
        self,
        per_second: float | Mapping[str, float],
        *,
        on: Literal["call", "submit"] = "call",
        key: Callable[[Any], Hashable] | None = None,
        default: float | None = None,
        wait: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._key = key
        self._wait = wait
        self._clock = clock
        self._sleep = sleep
        self._making = threading.Lock()
        self._each: float | None = None  # the rate of keys that have no bucket yet; None: they get none
        self._default: Bucket | None = None
        self._buckets: dict[Hashable, Bucket] = {}
        self._prune_at = _PRUNE_FROM
        if isinstance(per_second, Mapping):
            self._buckets = {name: self._bucket(rate, f"per_second[{name!r}]") for name, rate in per_second.items()}
            self._default = None if default is None else self._bucket(default, "default")
        elif default is not None:
            raise InvalidInput("given beside a single rate", field="default", allowed="with a mapping of rates")
        elif key is None:
            self._default = self._bucket(per_second, "per_second")
        else:
            self._each = _rate(per_second, "per_second")
        # Decline the other hook, see `overriding`.
        match on:
            case "call":
                self.submit = super().submit  # type: ignore[method-assign]
            case "submit":
                self.call = super().call  # type: ignore[method-assign]
            case _:
                raise InvalidInput(f"got {on!r}", field="on", allowed="call, submit")

    async def submit(self, submission: Submission, proceed: Callable[[Submission], Awaitable[Run]]) -> Run:
        await self._pass(submission.kind, submission)
        return await proceed(submission)

    async def call(self, method: str, proceed: Callable[[], Awaitable[Any]]) -> Any:
        if method not in LOCAL and method not in _RENEWALS:
            await self._pass(method, method, wait=method in _HOLDING)
        return await proceed()

    async def _pass(self, what: str, subject: Any, *, wait: bool = False) -> None:
        key = what if self._key is None else self._key(subject)
        bucket = self._of(key)
        if bucket is None:
            return
        if wait or self._wait:
            await bucket.wait(self._sleep)
        elif missing := bucket.take():
            raise RateLimited(what, bucket.per_second, missing, key)

    def _of(self, key: Hashable) -> Bucket | None:
        bucket = self._buckets.get(key, self._default)
        if bucket is not None or self._each is None or key is None:
            return bucket
        with self._making:
            if len(self._buckets) >= self._prune_at:
                # There may be many keys, one per tenant or user: drop the idle ones.
                self._buckets = {name: each for name, each in self._buckets.items() if not each.is_idle}
                self._prune_at = max(_PRUNE_FROM, 2 * len(self._buckets))
            return self._buckets.setdefault(key, Bucket(self._each, self._clock))

    def _bucket(self, rate: object, field: str) -> Bucket:
        return Bucket(_rate(rate, field), self._clock)


def _rate(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(f"got {value!r}", field=field, allowed="a number of tokens per second")
    return max(float(value), 1.0)


class CircuitBreaker(Middleware):
    """Stops sending calls to a database that does not respond.

    After `failures` transport errors in a row engine calls are refused for `open_for`, as `CircuitOpen`. Then one call
    is tried while the others are still refused: a transport error opens the circuit again, anything else closes it. A
    call that was running when the circuit changed does not count.
    """

    def __init__(
        self,
        *,
        failures: int = 5,
        open_for: timedelta = timedelta(seconds=30),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if type(failures) is not int or failures < 1:
            raise InvalidInput(f"got {failures!r}", field="failures", allowed="an integer of at least 1")
        if not isinstance(open_for, timedelta) or open_for <= timedelta(0):
            raise InvalidInput(f"got {open_for!r}", field="open_for", allowed="a timedelta above zero")
        self._limit = failures
        self._open_for = open_for.total_seconds()
        self._clock = clock
        self._lock = threading.Lock()
        self._failed = 0
        self._opened_at: float | None = None
        self._trying = False
        self._era = 0  # grows with every change of state; a result counts only in the era of its call

    @property
    def state(self) -> Literal["closed", "open", "trial"]:
        """The state of the circuit; `trial` while one call is tried."""
        if self._opened_at is None:
            return "closed"
        return "trial" if self._trying else "open"

    async def call(self, method: str, proceed: Callable[[], Awaitable[Any]]) -> Any:
        if method in LOCAL:
            return await proceed()
        era = self._admit(method)
        try:
            answer = await proceed()
        except TransportError:
            self._failure(era)
            raise
        except Exception:
            self._responded(era)
            raise
        except BaseException:
            self._abandoned(era)
            raise
        self._responded(era)
        return answer

    def _admit(self, method: str) -> int:
        with self._lock:
            if self._opened_at is None:
                return self._era
            left = self._opened_at + self._open_for - self._clock()
            if self._trying or left > 0:
                raise CircuitOpen(method, max(left, 0.0))
            self._trying = True
            self._era += 1
            return self._era

    def _failure(self, era: int) -> None:
        with self._lock:
            if era != self._era:
                return
            self._failed += 1
            if self._trying or self._failed >= self._limit:
                self._change(self._clock())

    def _responded(self, era: int) -> None:
        with self._lock:
            if era != self._era:
                return
            self._failed = 0
            if self._trying:
                self._change(None)

    def _abandoned(self, era: int) -> None:
        """A cancelled call does not count; after a cancelled trial the next call is tried."""
        with self._lock:
            if era == self._era and self._trying:
                self._change(self._opened_at)

    def _change(self, opened_at: float | None) -> None:
        self._opened_at = opened_at
        self._trying = False
        self._failed = 0
        self._era += 1
