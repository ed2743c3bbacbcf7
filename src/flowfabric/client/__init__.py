"""Clients: submit executions, read them, wait for them, change them."""

from flowfabric.client.client import AsyncClient
from flowfabric.client.flow_run import FlowRun
from flowfabric.client.run import Run
from flowfabric.client.submission import Submission
from flowfabric.client.sync import Client, SyncFlowRun, SyncRun

__all__ = ["AsyncClient", "Client", "FlowRun", "Run", "Submission", "SyncFlowRun", "SyncRun"]
