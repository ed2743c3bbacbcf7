"""What the kit raises when a test has found something: all of them are assertions."""

from __future__ import annotations


class NotFinished(AssertionError):
    """There is nothing left to do, and the execution has not ended. The message says what it waits for."""


class NotReached(AssertionError):
    """A crash that was asked for did not happen: no such step was done."""


class Nondeterministic(AssertionError):
    """A handler that was run again with what is remembered did something else than before."""


class CrashChangedResult(AssertionError):
    """A run with a crash in it did not end as the run without."""
