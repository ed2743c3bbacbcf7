"""Whether a database can be reached, in the log: a line when it goes away, one each minute, and one when it is back.

All engines of a process that use the same address share one `Outage`, so that a worker with many loops says it once.
A loop asks `covers` before it logs an error of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from weakref import WeakValueDictionary

from flowfabric._secrets import redact
from flowfabric.errors import TransportError
from flowfabric.values.durations import duration_words

_log = logging.getLogger("flowfabric.database")
_REMIND_AFTER = 60.0  # seconds
_known: WeakValueDictionary[str, Outage] = WeakValueDictionary()
_knowing = threading.Lock()


class Outage:
    """The outages of one address. Any thread may call it."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._since: float | None = None
        self._said_at = 0.0
        self._slow_at: float | None = None
        self.cause = ""

    @property
    def is_on(self) -> bool:
        """Whether the last attempt to connect failed."""
        return self._since is not None

    @property
    def words(self) -> str:
        """The problem, in one line; empty if there is none."""
        since = self._since
        return "" if since is None else f"has been away for {_span(time.monotonic() - since)}: {self.cause}"

    def lost(self, error: BaseException) -> None:
        """A connection could not be opened."""
        now = time.monotonic()
        with self._lock:
            self.cause = _cause(error)
            if self._since is None:
                self._since = self._said_at = now
                words = "the database %s is away: %s; trying again until it is back"
                arguments: tuple[str, ...] = (self._target, self.cause)
            elif now - self._said_at >= _REMIND_AFTER:
                self._said_at = now
                words = "the database %s has been away for %s: %s"
                arguments = (self._target, _span(now - self._since), self.cause)
            else:
                return
            _log.warning(words, *arguments)

    def found(self) -> None:
        """A connection was opened."""
        with self._lock:
            since, self._since = self._since, None
            if since is not None:
                # As a warning, like the line before: the two belong together.
                _log.warning("the database %s is back after %s", self._target, _span(time.monotonic() - since))

    def covers(self, error: BaseException) -> bool:
        """Whether the lines about this database say enough about an error, so that its loop logs nothing."""
        if isinstance(error, TimeoutError) or (isinstance(error, TransportError) and error.kind == "timeout"):
            self._slow()
            return True
        return isinstance(error, TransportError) and (error.kind == "transport" or self.is_on)

    def _slow(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._since is None and (self._slow_at is None or now - self._slow_at >= _REMIND_AFTER):
                self._slow_at = now
                _log.warning("the database %s does not respond in time; trying again", self._target)


def outage_of(dsn: str, target: str) -> Outage:
    """The outages of this address."""
    with _knowing:
        found = _known.get(dsn)
        if found is None:
            found = _known[dsn] = Outage(target)
        return found


def _span(seconds: float) -> str:
    return f"{round(seconds)} s" if 1 <= seconds < 59.5 else duration_words(timedelta(seconds=seconds))


def _cause(error: BaseException) -> str:
    match error:
        case TimeoutError():
            return "no response in time"
        case ConnectionRefusedError():
            return "connection refused"
        case FileNotFoundError():
            return "its socket does not exist"
        case OSError(strerror=str(words)) if words:
            return redact(words)
        case _:
            lines = str(error).split("\n")
            return redact(lines[0]) or type(error).__name__
