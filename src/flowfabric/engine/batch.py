"""Batch calls: the fences of lease holders as columns, and one verdict per item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeGuard, TypeVar, cast
from uuid import UUID

import asyncpg

from flowfabric._postgres import rows
from flowfabric.engine.checks import check_int
from flowfabric.errors import FlowFabricError, InvalidInput, LeaseLost
from flowfabric.values.attempt import Completion, Failure
from flowfabric.values.ids import ExecutionId, parse_execution_id, parse_uuid, partition_of_id
from flowfabric.values.lease import Authority, Fence, Handle, HandleKind, Operator

_Value = TypeVar("_Value")
_INT: Final = frozenset({int})
_UUIDS: Final = frozenset({UUID, asyncpg.pgproto.pgproto.UUID})


class Fences:
    """The fence columns of a holder's call, for one authority or many."""

    def __init__(self, authorities: Sequence[Authority], count: int) -> None:
        """`count`: how many partitions there are."""
        self.partitions: list[int] = []
        self.ids: list[UUID] = []
        self.leases: list[UUID | None] = []
        self.epochs: list[int | None] = []
        self.attempts: list[UUID | None] = []
        self.indexes: list[int | None] = []
        if all(type(authority) is Handle and authority.kind is not HandleKind.SUSPENDED for authority in authorities):
            held = cast("Sequence[Handle]", authorities)
            self.partitions = [handle.partition for handle in held]
            self.ids = [handle.uuid for handle in held]
            self.leases = [handle.lease_id for handle in held]
            self.epochs = [handle.lease_epoch for handle in held]
            self.attempts = [handle.attempt_id for handle in held]
            self.indexes = [handle.attempt_index for handle in held]
            if self._fit():
                return
            self.partitions, self.ids, self.leases, self.epochs, self.attempts, self.indexes = [], [], [], [], [], []
        for authority in authorities:
            if type(authority) is Handle:
                if authority.kind is HandleKind.SUSPENDED:
                    raise LeaseLost(
                        "stale_lease",
                        "a suspended handle holds no lease",
                        execution_id=authority.execution_id,
                    )
                self._add(
                    check_int(authority.partition, "partition", 0, count - 1),
                    parse_uuid(authority.uuid, "execution_id"),
                    parse_uuid(authority.lease_id, "lease_id"),
                    check_int(authority.lease_epoch, "lease_epoch", 0, 2**63 - 1),
                    parse_uuid(authority.attempt_id, "attempt_id"),
                    check_int(authority.attempt_index, "attempt_index", 0, 2**31 - 1),
                )
            elif type(authority) is Fence:
                execution_id = parse_execution_id(authority.execution_id)
                self._add(
                    partition_of_id(execution_id, count),
                    execution_id,
                    parse_uuid(authority.lease_id, "lease_id"),
                    check_int(authority.lease_epoch, "lease_epoch", 0, 2**63 - 1),
                    parse_uuid(authority.attempt_id, "attempt_id"),
                    None
                    if authority.attempt_index is None
                    else check_int(authority.attempt_index, "attempt_index", 0, 2**31 - 1),
                )
            elif type(authority) is Operator:
                execution_id = parse_execution_id(authority.execution_id)
                self._add(partition_of_id(execution_id, count), execution_id, None, None, None, None)
            else:
                raise InvalidInput(
                    f"got {type(authority).__name__}",
                    field="authority",
                    allowed="a Handle, a Fence or an Operator",
                )

    def _fit(self) -> bool:
        """Whether the database can take the columns of handles: a caller may have built one by hand."""
        numbers: tuple[list[Any], ...] = (self.partitions, self.epochs, self.indexes)
        uuids: tuple[list[Any], ...] = (self.ids, self.leases, self.attempts)
        return (
            {kind for column in numbers for kind in map(type, column)} <= _INT
            and {kind for column in uuids for kind in map(type, column)} <= _UUIDS
            and all(
                min(column, default=0) >= 0 and max(column, default=0) < bound
                for column, bound in zip(numbers, (2**16, 2**63, 2**31), strict=True)
            )
        )

    @classmethod
    def of(cls, items: Sequence[Completion | Failure], count: int) -> Fences:
        """The fences of items that name their authority."""
        return cls([item.authority for item in items], count)

    def _add(
        self,
        partition: int,
        uuid: UUID,
        lease: UUID | None,
        epoch: int | None,
        attempt: UUID | None,
        index: int | None,
    ) -> None:
        self.partitions.append(partition)
        self.ids.append(uuid)
        self.leases.append(lease)
        self.epochs.append(epoch)
        self.attempts.append(attempt)
        self.indexes.append(index)

    @property
    def columns(self) -> tuple[list[Any], ...]:
        return (self.partitions, self.ids, self.leases, self.epochs, self.attempts, self.indexes)

    @property
    def first(self) -> tuple[Any, ...]:
        """Return the columns of a call for one item."""
        return tuple(column[0] for column in self.columns)

    def execution_id(self, place: int) -> ExecutionId:
        return ExecutionId(self.ids[place])


def used(values: list[_Value]) -> list[_Value] | None:
    """Return the column, or None if no item has a value."""
    return values if any(value is not None for value in values) else None


_Given = TypeVar("_Given")
_Ready = TypeVar("_Ready")
_Answer = TypeVar("_Answer")


class Batch(Generic[_Given, _Ready]):
    """The checked items of a batch call: `ready` can be sent; for a bad item the verdict is its error."""

    def __init__(self, items: Sequence[_Given], prepare: Callable[[Sequence[_Given], int], _Ready], count: int) -> None:
        self._count = len(items)
        self._refused: dict[int, FlowFabricError] = {}
        self._places: Sequence[int] = range(self._count)
        try:
            self.ready = prepare(items, count)
        except FlowFabricError:
            for place, item in enumerate(items):
                try:
                    prepare([item], count)
                except FlowFabricError as error:
                    self._refused[place] = error
            self._places = [place for place in range(self._count) if place not in self._refused]
            self.ready = prepare([items[place] for place in self._places], count)

    @property
    def is_empty(self) -> bool:
        return not self._places

    def verdicts(self, answers: list[_Answer]) -> list[_Answer]:
        """Return one verdict per item given, from the verdicts of those sent."""
        if not self._refused:
            return answers
        spread: dict[int, Any] = {**self._refused}
        spread.update(zip(self._places, answers, strict=True))
        return [spread[place] for place in range(self._count)]


def is_override(authority: Authority) -> TypeGuard[Operator]:
    """Whether the call needs no fence: an operator's. Other sources may cancel without one, but nothing else."""
    return type(authority) is Operator and authority.source == "operator_override"


def raised(row: asyncpg.Record, execution_id: ExecutionId) -> FlowFabricError:
    return rows.refused(row, execution_id)
