"""A pool of child processes for handlers that keep a CPU busy."""

from flowfabric.worker.runners.process_pool.errors import ChildDied, ChildTraceback, PoolClosed, RemoteError
from flowfabric.worker.runners.process_pool.main_module import is_loading_main
from flowfabric.worker.runners.process_pool.pool import ProcessPool

__all__ = [
    "ChildDied",
    "ChildTraceback",
    "PoolClosed",
    "ProcessPool",
    "RemoteError",
    "is_loading_main",
]
