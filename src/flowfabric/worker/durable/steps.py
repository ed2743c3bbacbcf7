"""Steps of a handler: run once, recorded, and returned from the record in later runs.

Inside the function of a step nothing else is recorded: steps, sleeps and submissions there simply run.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from flowfabric.client import current
from flowfabric.contracts.codecs import CannotDecode
from flowfabric.contracts.value_types import ValueType
from flowfabric.errors import InvalidInput, Reject, RetryLater
from flowfabric.values.checks import MAX_PAYLOAD
from flowfabric.values.durations import Duration, duration
from flowfabric.values.policies import Exponential, RetryPolicy
from flowfabric.values.step import NewStep, Step
from flowfabric.worker.durable.in_thread import calling_thread
from flowfabric.worker.durable.memory import check_name, describe, encode_error, remembered_error
from flowfabric.worker.durable.order import in_order

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

_OLD = b"old"  # recorded for a patch whose run repeats the old branch

in_step = current.in_step


async def step(
    running: Running,
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    retry: RetryPolicy | None,
    timeout: Duration | None,
    was: str | None = None,
) -> Any:
    """Run a function once under this name, and return its result, in this run and in every later one."""
    await running.check()
    check_name(name)
    returned = _returned(name, fn)
    if calling_thread.get() is not None and inspect.iscoroutinefunction(fn):
        raise InvalidInput(f"{name!r} is async", field="fn", allowed="a synchronous function, in a synchronous handler")
    seconds = None if timeout is None else duration(timeout, "timeout").total_seconds()
    if in_step.get():
        return await _try(running, fn, args, kwargs, retry, seconds)
    _, name, use, known = await running.ask(name, "step", None if was is None else check_name(was))
    if known is not None:
        return await _recall(running, known, returned)
    begun, failure = time.perf_counter(), None
    running.steps += 1
    try:
        try:
            with _inside_step():
                value = await _try(running, fn, args, kwargs, retry, seconds)
            encoded, done = _done(running, name, use, value, returned, begun)
        except (RetryLater, Reject):
            raise  # about the task, not about the step
        except Exception as error:
            turn = await running.record_end(_failed(running, name, use, error, begun))
            failure = error
        else:
            turn = await running.record_end(done)
    finally:
        running.steps -= 1
    if turn is not None:
        await turn.come()
        await running.check()
    if failure is not None:
        raise failure
    # Decoded from the stored bytes, not the object that the function returned: a later run gets the same.
    return returned.decode(encoded)


@in_order
async def now(running: Running) -> datetime:
    """Return the database's time of the handler's first call."""
    await running.check()
    if in_step.get():
        return running.database_now()
    _, _, use, known = await running.ask("now", "now")
    at = known.at if known is not None else await running.record(NewStep(name="now", n=use, kind="now"))
    assert at is not None
    return at


@in_order
async def patched(running: Running, name: str) -> bool:
    """Whether the handler takes the new branch: the same in every run; False if this run must repeat the old one."""
    await running.check()
    check_name(name)
    if in_step.get():
        raise InvalidInput("inside a step", field="patched", allowed="in the handler itself")
    _, _, use, known = await running.ask(name, "patch")
    if known is not None:
        return known.result != _OLD
    memory = await running.memory()
    is_new = not memory.missing or await running.changes.hold(None)
    await running.check()
    await running.record(NewStep(name=name, n=use, kind="patch", result=None if is_new else _OLD))
    return is_new


async def _try(
    running: Running,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    retry: RetryPolicy | None,
    seconds: float | None,
) -> Any:
    """Call the function, with retries if its policy says so."""
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
    thread = calling_thread.get()
    if thread is not None:
        return await thread.run(_call_inside_step, fn, args, kwargs)
    if inspect.iscoroutinefunction(fn):
        return await fn(*args, **kwargs)
    target = getattr(fn, "__call__", None)  # noqa: B004 - an object with an async __call__
    if inspect.iscoroutinefunction(target):
        return await fn(*args, **kwargs)
    value = await running.worker.threads.run(fn, *args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def _call_inside_step(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with _inside_step():
        return fn(*args, **kwargs)


@contextlib.contextmanager
def _inside_step() -> Iterator[None]:
    """Mark the calls in this block as part of the step: none of them is recorded separately."""
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


def _done(
    running: Running, name: str, use: int, value: Any, returned: ValueType, begun: float
) -> tuple[bytes | None, NewStep]:
    """Return the result of a step, as read back and as stored."""
    what = f"result of step {name!r}"
    encoded = returned.encode(value, field=what)
    sealed, encoding = (
        (None, None) if encoded is None else running.worker.codecs.seal(encoded, running.claimed.execution_id)
    )
    if sealed is not None and len(sealed) > MAX_PAYLOAD:
        raise InvalidInput(f"{len(sealed)} bytes", field=what, allowed=f"at most {MAX_PAYLOAD} bytes")
    took = time.perf_counter() - begun
    return encoded, NewStep(name=name, n=use, result=sealed, encoding=encoding, seconds=took)


def _failed(running: Running, name: str, use: int, error: Exception, begun: float) -> NewStep:
    text, details = encode_error(error, sealed=not running.worker.codecs.is_plain)
    sealed, encoding = (
        (None, None) if details is None else running.worker.codecs.seal(details, running.claimed.execution_id)
    )
    took = time.perf_counter() - begun
    return NewStep(name=name, n=use, error=text, result=sealed, encoding=encoding, seconds=took)


async def _recall(running: Running, known: Step, returned: ValueType) -> Any:
    """Return the stored result of a step, or raise its stored exception."""
    codecs, execution_id = running.worker.codecs, running.claimed.execution_id
    if known.error is not None:
        try:
            details = None if known.result is None else codecs.open(known.result, known.encoding, execution_id)
        except CannotDecode:
            details = None
        raise remembered_error(known, details)
    try:
        return returned.decode(
            None if known.result is None else codecs.open(known.result, known.encoding, execution_id)
        )
    except CannotDecode as error:
        what = describe("step", known.name, known.n)
        return await running.changed(f"the recorded result of {what} does not fit its function: {error.problem}")


def _may_retry(policy: RetryPolicy, tries: int, error: Exception) -> bool:
    categories = policy.retryable_categories
    return tries <= policy.max_retries and (not categories or type(error).__name__ in categories)


def _backoff(policy: RetryPolicy, retries: int) -> float:
    """Return the seconds before the next try of a step."""
    backoff = policy.backoff
    if isinstance(backoff, Exponential):
        most = duration(backoff.maximum, "maximum").total_seconds()
        try:
            wait = min(duration(backoff.initial, "initial").total_seconds() * backoff.multiplier**retries, most)
        except OverflowError:
            wait = most
        return wait * random.uniform(0.5, 1) if backoff.jitter else wait  # noqa: S311 - no secret
    return duration(backoff.delay, "delay").total_seconds()
