"""Logs the start and end of handlers, and a formatter that writes log lines as JSON.

Lines contain ids, kinds, outcomes and the class of an error, never arguments, results or error messages.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

from flowfabric.middleware.base import Middleware, Run, Running, Submission, outcome_of, type_name
from flowfabric.values.checks import escape_text

_running: ContextVar[Mapping[str, Any] | None] = ContextVar("flowfabric_running", default=None)
_NOT_EXTRA: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_WHO: Final = "%(kind)r, execution %(execution_id)s, attempt %(attempt)d"


class Logging(Middleware):
    """Logs the start and end of every handler at `level`, failures at error level, submissions at debug level."""

    def __init__(
        self,
        logger: logging.Logger | None = None,
        *,
        level: int = logging.INFO,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._log = logging.getLogger("flowfabric.tasks") if logger is None else logger
        self._level = level
        self._clock = clock

    async def submit(self, submission: Submission, proceed: Callable[[Submission], Awaitable[Run]]) -> Run:
        kind = submission.kind
        try:
            run = await proceed(submission)
        except Exception as error:
            name = type_name(error)
            self._log.error("submitting %r failed: %s", kind, name, extra={"kind": kind, "error": name})
            raise
        text = "submitted %r as %s" if run.is_new else "%r was submitted before as %s"
        self._log.debug(text, kind, run.execution_id, extra={"kind": kind, "execution_id": str(run.execution_id)})
        return run

    async def execute(self, task: Running, proceed: Callable[[], Awaitable[Any]]) -> Any:
        about = {
            "execution_id": str(task.execution_id),
            "attempt": task.attempt_index + 1,
            "kind": task.kind,
            "lane": task.lane_id,
        }
        self._log.log(self._level, f"started {_WHO}", about, extra=about)
        failure: BaseException | None = None
        token = _running.set(about)
        begun = self._clock()
        try:
            return await proceed()
        except BaseException as error:
            failure = error
            raise
        finally:
            seconds = round(self._clock() - begun, 6)
            with contextlib.suppress(ValueError):  # a coroutine that is garbage-collected ends in another context
                _running.reset(token)
            self._ended({**about, "seconds": seconds, "outcome": outcome_of(failure, task)}, failure)
            failure = None  # a kept error would keep its frames, and they this one

    def _ended(self, about: dict[str, Any], failure: BaseException | None) -> None:
        if failure is not None and about["outcome"] in ("error", "timeout"):
            about["error"] = type_name(failure)
            self._log.error(f"failed {_WHO}, after %(seconds).6f s: %(error)s", about, extra=about)
        else:
            self._log.log(self._level, f"ended {_WHO}, after %(seconds).6f s: %(outcome)s", about, extra=about)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, then the fields of the record.

    A line that is logged inside a handler, by any logger, also has execution_id, attempt, kind and lane if
    `Logging` is among the middlewares. Fields that are not strings, numbers or booleans are written as strings.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = {**(_running.get() or {}), **{k: v for k, v in vars(record).items() if k not in _NOT_EXTRA}}
        for name, value in fields.items():
            line.setdefault(name, _plain(value))
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line)


def _plain(value: object) -> object:
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return escape_text(value)
