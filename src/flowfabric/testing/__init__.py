"""Test your own tasks: a database per test, a worker in the test's process, a clock you can move, crashes.

The package installs a pytest plugin with the fixtures `flowfabric_dsn` and `flowfabric_kit`.
"""

from flowfabric.testing.clock import Clock
from flowfabric.testing.errors import CrashChangedResult, Nondeterministic, NotFinished, NotReached
from flowfabric.testing.faults import Crash, Crashed, CrashReport, Point
from flowfabric.testing.kit import Kit
from flowfabric.testing.server import Server

__all__ = [
    "Clock",
    "Crash",
    "CrashChangedResult",
    "CrashReport",
    "Crashed",
    "Kit",
    "Nondeterministic",
    "NotFinished",
    "NotReached",
    "Point",
    "Server",
]
