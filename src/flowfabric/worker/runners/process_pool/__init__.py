"""A pool of child processes for handlers that keep a CPU busy."""

from flowfabric.worker.runners.process_pool.pool import (
    ChildDied,
    ChildTraceback,
    PoolClosed,
    ProcessPool,
    RemoteError,
    child_traceback,
    is_loading_main,
)

__all__ = [
    "ChildDied",
    "ChildTraceback",
    "PoolClosed",
    "ProcessPool",
    "RemoteError",
    "child_traceback",
    "is_loading_main",
]
