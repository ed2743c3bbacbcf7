"""The worker: runs the tasks of an app."""

from flowfabric.worker.worker import Worker

__all__ = ["Worker"]
