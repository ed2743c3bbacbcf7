"""Errors that the kit raises when a test has found a problem; all are assertion errors."""

from __future__ import annotations


class NotFinished(AssertionError):
    """Nothing is left to do, but the execution has not ended. The message says what it waits for."""


class NotReached(AssertionError):
    """A requested crash did not happen, because the step was never reached."""


class Nondeterministic(AssertionError):
    """A handler that was re-run with its recorded steps behaved differently."""


class CrashChangedResult(AssertionError):
    """A run with a crash had another result than the run without."""
