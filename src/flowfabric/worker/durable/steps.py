"""Steps of a handler: run once, remembered, and answered from memory in later runs.

Inside the function of a step nothing else is remembered: the step is. What a handler could do durably is done plainly
there.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any

from flowfabric.client import current
from flowfabric.contracts import CannotDecode, ValueType
from flowfabric.engine.calls import MAX_PAYLOAD
from flowfabric.errors import (
    InvalidInput,
    Reject,
    RetryLater,
    StepsChanged,
)
from flowfabric.models import NewStep, Step
from flowfabric.policies import Duration, Exponential, RetryPolicy, duration
from flowfabric.worker.durable.memory import check_name, encode_error, remembered_error

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

in_step: ContextVar[bool] = ContextVar("flowfabric_in_step", default=False)


async def step(
    running: Running,
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    retry: RetryPolicy | None,
    timeout: Duration | None,
) -> Any:
    await running.check()
    check_name(name)
    returned = _returned(name, fn)
    seconds = None if timeout is None else duration(timeout, "timeout").total_seconds()
    if in_step.get():
        return await _try(running, fn, args, kwargs, retry, seconds)
    n, known = (running._memory or await running.memory()).next(name, "step")
    if known is not None:
        return _recall(running, known, returned)
    begun = time.perf_counter()
    try:
        with _inside_step():
            value = await _try(running, fn, args, kwargs, retry, seconds)
        encoded, done = _done(running, name, n, value, returned, begun)
    except (RetryLater, Reject):
        raise  # about the task, not about the step
    except Exception as error:
        await running.record(_failed(running, name, n, error, begun))
        raise
    await running.record(done)
    if running.worker.step_hook is not None:
        await running.worker.step_hook(running, name, n)
    return returned.decode(encoded)


async def _try(
    running: Running,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    retry: RetryPolicy | None,
    seconds: float | None,
) -> Any:
    tries = 0
    while True:
        try:
            if seconds is None:
                return await _call(running, fn, args, kwargs)
            async with asyncio.timeout(seconds):
                return await _call(running, fn, args, kwargs)
        except (RetryLater, Reject):
            raise
        except Exception as error:
            tries += 1
            if retry is None or running.is_cancelled or not _may_retry(retry, tries, error):
                raise
        await asyncio.sleep(_backoff(retry, tries - 1))


async def _call(running: Running, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(fn):
        return await fn(*args, **kwargs)
    target = getattr(fn, "__call__", None)  # noqa: B004 - an object whose call is a coroutine
    if inspect.iscoroutinefunction(target):
        return await fn(*args, **kwargs)
    value = await running.worker.threads.run(fn, *args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def _done(
    running: Running, name: str, n: int, value: Any, returned: ValueType, begun: float
) -> tuple[bytes | None, NewStep]:
    """The result of a step, as it is read back and as it is stored."""
    what = f"result of step {name!r}"
    encoded = returned.encode(value, field=what)
    sealed, encoding = (None, None) if encoded is None else running.worker.codecs.seal(encoded)
    if sealed is not None and len(sealed) > MAX_PAYLOAD:
        raise InvalidInput(f"{len(sealed)} bytes", field=what, allowed=f"at most {MAX_PAYLOAD} bytes")
    took = time.perf_counter() - begun
    return encoded, NewStep(name=name, n=n, result=sealed, encoding=encoding, seconds=took)


def _failed(running: Running, name: str, n: int, error: Exception, begun: float) -> NewStep:
    text, details = encode_error(error, sealed=not running.worker.codecs.is_plain)
    sealed, encoding = (None, None) if details is None else running.worker.codecs.seal(details)
    took = time.perf_counter() - begun
    return NewStep(name=name, n=n, error=text, result=sealed, encoding=encoding, seconds=took)


def _recall(running: Running, known: Step, returned: ValueType) -> Any:
    if known.error is not None:
        try:
            details = None if known.result is None else running.worker.codecs.open(known.result, known.encoding)
        except CannotDecode:
            details = None
        raise remembered_error(known, details)
    try:
        return returned.decode(
            None if known.result is None else running.worker.codecs.open(known.result, known.encoding)
        )
    except CannotDecode as error:
        raise StepsChanged(
            f"the result of step {known.name!r} (use {known.n}) no longer fits its function: {error.problem}",
            execution_id=running.claimed.execution_id,
        ) from error


async def now(running: Running) -> datetime:
    await running.check()
    if in_step.get():
        return running.database_now()
    n, known = (await running.memory()).next("now", "now")
    at = known.at if known is not None else await running.record(NewStep(name="now", n=n, kind="now"))
    assert at is not None
    return at


def step_in_thread(
    running: Running,
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    retry: RetryPolicy | None,
) -> Any:
    running.check_thread()
    check_name(name)
    returned = _returned(name, fn)
    if inspect.iscoroutinefunction(fn):
        raise InvalidInput(f"{name!r} is async", field="fn", allowed="a plain function, in a plain handler")
    if in_step.get():
        return _try_here(fn, args, kwargs, retry)

    async def begin() -> tuple[int, Step | None]:
        return (await running.memory()).next(name, "step")

    n, known = running.in_thread(begin())
    if known is not None:
        return _recall(running, known, returned)
    begun = time.perf_counter()
    try:
        with _inside_step():
            value = _try_here(fn, args, kwargs, retry)
        encoded, done = _done(running, name, n, value, returned, begun)
    except (RetryLater, Reject):
        raise
    except Exception as error:
        running.in_thread(running.record(_failed(running, name, n, error, begun)))
        raise
    running.in_thread(running.record(done))
    if running.worker.step_hook is not None:
        running.in_thread(running.worker.step_hook(running, name, n))
    return returned.decode(encoded)


@contextlib.contextmanager
def _inside_step() -> Iterator[None]:
    """What is called here is part of the step: nothing of it is remembered by itself."""
    inside, scope = in_step.set(True), current.running.set(None)
    try:
        yield
    finally:
        in_step.reset(inside)
        current.running.reset(scope)


def _returned(name: str, fn: Callable[..., Any]) -> ValueType:
    if not callable(fn):
        if inspect.iscoroutine(fn):
            fn.close()
        raise InvalidInput(
            f"step {name!r} was given a {type(fn).__name__}",
            field="fn",
            allowed="a function, and its arguments after it",
        )
    return ValueType.returned_by(fn)


def _try_here(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], retry: RetryPolicy | None
) -> Any:
    """Call a plain function, again where its policy says so."""
    tries = 0
    while True:
        try:
            return fn(*args, **kwargs)
        except (RetryLater, Reject):
            raise
        except Exception as error:
            tries += 1
            if retry is None or not _may_retry(retry, tries, error):
                raise
        time.sleep(_backoff(retry, tries - 1))


def _may_retry(policy: RetryPolicy, tries: int, error: Exception) -> bool:
    categories = policy.retryable_categories
    return tries <= policy.max_retries and (not categories or type(error).__name__ in categories)


def _backoff(policy: RetryPolicy, retries: int) -> float:
    """Seconds before the next try of a step."""
    backoff = policy.backoff
    if isinstance(backoff, Exponential):
        most = duration(backoff.maximum, "maximum").total_seconds()
        try:
            pause = min(duration(backoff.initial, "initial").total_seconds() * backoff.multiplier**retries, most)
        except OverflowError:
            pause = most
        return pause * random.uniform(0.5, 1) if backoff.jitter else pause  # noqa: S311 - no secret
    return duration(backoff.delay, "delay").total_seconds()
