"""How a function in a child process can fail, and how its exception gets to the parent."""

from __future__ import annotations

import contextlib
from typing import Any

from msgspec import Struct

from flowfabric.worker.runners.process_pool.channel import loads


class ChildDied(RuntimeError):
    """The process ended before the function did: killed, crashed, or left by `os._exit`.

    `signal` is the name of the signal that ended it, `exit_code` its exit code; one of the two is None.
    """

    def __init__(self, what: str, exit_code: int | None, signal: str | None) -> None:
        self.what = what
        self.exit_code = exit_code
        self.signal = signal
        how = f"ended with exit code {exit_code}" if signal is None else f"was killed by {signal}"
        hint = " (out of memory, perhaps)" if signal == "SIGKILL" else ""
        super().__init__(f"the process running {what} {how}{hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.exit_code, self.signal)


class PoolClosed(RuntimeError):
    """The pool was closed before the function ended, or before it began."""


class RemoteError(RuntimeError):
    """The function raised an exception that cannot be raised here; `type_name` and `message` describe it."""

    def __init__(self, type_name: str, message: str) -> None:
        self.type_name = type_name
        self.message = message
        super().__init__(f"{type_name}: {message}" if message else type_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.type_name, self.message)


class ChildTraceback(Exception):
    """The cause of an error that a child process raised. Its text is the traceback there."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n{self.text}"


class ChildFailure(Struct, frozen=True):
    """The exception of a function: as text, and pickled if possible."""

    type_name: str
    message: str
    traceback: str
    pickled: bytes | None


def raised(failure: ChildFailure) -> Exception:
    error: Exception = RemoteError(failure.type_name, failure.message)
    if failure.pickled is not None:
        with contextlib.suppress(Exception):  # its class may not exist here, or its constructor may fail
            unpickled = loads(failure.pickled)
            if isinstance(unpickled, Exception):
                error = unpickled
    error.__cause__ = ChildTraceback(failure.traceback)
    return error
