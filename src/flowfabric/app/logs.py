"""A logging handler that writes what a task logs to its output stream."""

from __future__ import annotations

import logging

from flowfabric.client import current

_OWN = "flowfabric."
_OF_TASKS = "flowfabric.task"


class EmitHandler(logging.Handler):
    """Emits the records that a running task logs, in its steps too, as frames of the type `log`; others are ignored.

    They stay in order with other frames. It never waits: while the buffer of the execution is full, lines are
    dropped, and a line says how many. Long ones are cut. A handler that runs again after a wait logs again.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Emit one record, if a task logs it."""
        scope = current.handled.get()
        # Log lines of the worker about sending frames must not become frames.
        if scope is None or (record.name.startswith(_OWN) and record.name != _OF_TASKS):
            return
        try:
            scope.emit_soon(self.format(record), "log", "stderr")
        except Exception:
            self.handleError(record)
