"""Ids for tests: in a partition of choice, and the partition an id says."""

from __future__ import annotations

from uuid import UUID

from flowfabric.values.ids import ExecutionId, fit_partition, mint_uuid, partition_of_id

COUNT = 256


def home(uuid: UUID, count: int = COUNT) -> int:
    """The partition in which the execution or flow with this id lives."""
    return partition_of_id(uuid, count)


def id_in(partition: int, uuid: UUID | None = None, count: int = COUNT) -> ExecutionId:
    """An execution id of that partition: a new one, or one made of `uuid`."""
    return ExecutionId(fit_partition(mint_uuid() if uuid is None else uuid, partition, count))
