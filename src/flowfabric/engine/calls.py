"""What every group of operations shares: the database, and how arguments are checked on the way in."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast
from uuid import UUID

import asyncpg

from flowfabric._postgres import rows
from flowfabric._postgres.create_call import MAX_BATCH, MAX_PAYLOAD, instant, moment
from flowfabric._postgres.listen import Listener
from flowfabric._postgres.pool import Database
from flowfabric.errors import FlowFabricError, InvalidInput, LeaseLost
from flowfabric.values.checks import check_text
from flowfabric.values.ids import ExecutionId, PartitionKey, mint_uuid, parse_uuid
from flowfabric.values.lease import Authority, Fence, Handle, HandleKind, Operator
from flowfabric.values.page import ScannerFilter

MAX_GRANT_TTL = timedelta(seconds=60)
# In JSON that the database shall hold; an escaped backslash before the u is text.
ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
__all__ = ["MAX_BATCH", "MAX_PAYLOAD", "Calls", "instant", "moment"]


class Calls:
    """The base of the operation groups. Not for users."""

    def __init__(self, database: Database, listener: Listener | None) -> None:
        self._database = database
        self._listener = listener
        self._instance = mint_uuid()
        self._background: list[Any] = []

    async def _fetch(self, sql: str, *args: Any, repeatable: bool = False) -> list[asyncpg.Record]:
        return await self._database.fetch(sql, args, repeatable=repeatable)

    async def _row(self, sql: str, *args: Any, repeatable: bool = False) -> asyncpg.Record:
        return (await self._database.fetch(sql, args, repeatable=repeatable))[0]


class Fences:
    """The fence columns of a holder's call, for one authority or many."""

    def __init__(self, authorities: Sequence[Handle | Fence | Operator]) -> None:
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
            return
        for authority in authorities:
            if type(authority) is Handle:
                if authority.kind is HandleKind.SUSPENDED:
                    raise LeaseLost(
                        "stale_lease",
                        "a suspended handle holds no lease",
                        execution_id=authority.execution_id,
                    )
                self._add(
                    authority.partition, authority.uuid, authority.lease_id, authority.lease_epoch,
                    authority.attempt_id, authority.attempt_index,
                )  # fmt: skip
            elif type(authority) is Fence:
                execution_id = parse_execution(authority.execution_id)
                self._add(
                    execution_id.partition,
                    execution_id.uuid,
                    parse_uuid(authority.lease_id, "lease_id"),
                    check_int(authority.lease_epoch, "lease_epoch", 0, 2**63 - 1),
                    parse_uuid(authority.attempt_id, "attempt_id"),
                    None
                    if authority.attempt_index is None
                    else check_int(authority.attempt_index, "attempt_index", 0, 2**31 - 1),
                )
            elif type(authority) is Operator:
                execution_id = parse_execution(authority.execution_id)
                self._add(execution_id.partition, execution_id.uuid, None, None, None, None)
            else:
                raise InvalidInput(
                    f"got {type(authority).__name__}",
                    field="authority",
                    allowed="a Handle, a Fence or an Operator",
                )

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
        """The columns of a call for one."""
        return tuple(column[0] for column in self.columns)

    def execution_id(self, place: int) -> ExecutionId:
        return ExecutionId.of(self.partitions[place], self.ids[place])


_Given = TypeVar("_Given")
_Ready = TypeVar("_Ready")
_Answer = TypeVar("_Answer")


class Batch(Generic[_Given, _Ready]):
    """The items of a batch call, checked: `ready` is what can be sent; a bad item is its own verdict and stays here."""

    def __init__(self, items: Sequence[_Given], prepare: Callable[[Sequence[_Given]], _Ready]) -> None:
        self._count = len(items)
        self._refused: dict[int, FlowFabricError] = {}
        self._places: Sequence[int] = range(self._count)
        try:
            self.ready = prepare(items)
        except FlowFabricError:
            for place, item in enumerate(items):
                try:
                    prepare([item])
                except FlowFabricError as error:
                    self._refused[place] = error
            self._places = [place for place in range(self._count) if place not in self._refused]
            self.ready = prepare([items[place] for place in self._places])

    @property
    def is_empty(self) -> bool:
        return not self._places

    def verdicts(self, answers: list[_Answer]) -> list[_Answer]:
        """One verdict per item given, from the answers to those sent."""
        if not self._refused:
            return answers
        spread: dict[int, Any] = {**self._refused}
        spread.update(zip(self._places, answers, strict=True))
        return [spread[place] for place in range(self._count)]


def is_override(authority: Authority) -> bool:
    """Whether the call needs no fence: an operator's own. Other sources may cancel so, and nothing else."""
    return type(authority) is Operator and authority.source == "operator_override"


def by_place(found: Sequence[asyncpg.Record], count: int) -> list[asyncpg.Record]:
    """Verdict rows in the order of the items they answer."""
    ordered: list[asyncpg.Record | None] = [None] * count
    for row in found:
        ordered[row["ordinal"] - 1] = row
    return cast("list[asyncpg.Record]", ordered)


def raised(row: asyncpg.Record, execution_id: ExecutionId) -> FlowFabricError:
    return rows.refused(row, execution_id)


def parse_execution(value: object, field: str = "execution_id", count: int | None = None) -> ExecutionId:
    """An execution id; with `count`, of a partition that exists."""
    found = ExecutionId.parse(value, field)
    if count is not None and found.partition >= count:
        raise InvalidInput(f"partition {found.partition} does not exist", field=field, allowed=f"0..{count - 1}")
    return found


def parse_partition(value: object, count: int) -> int:
    key = value if isinstance(value, PartitionKey) else PartitionKey.parse(value)
    if key.family != "fp" or key.index >= count:
        raise InvalidInput(f"got {key}", field="partition_key", allowed=f"{{fp:0}} to {{fp:{count - 1}}}")
    return key.index


def check_int(value: object, field: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InvalidInput(f"got {value!r}", field=field, allowed=f"an integer from {low} to {high}")
    return value


def check_limit(value: object, high: int, field: str = "limit") -> int:
    return min(check_int(value, field, 0, 2**31 - 1), high)


def check_batch(items: Sequence[Any], field: str = "items") -> None:
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        raise InvalidInput(f"got {type(items).__name__}", field=field, allowed="a list")
    if len(items) > MAX_BATCH:
        raise InvalidInput(f"{len(items)} items", field=field, allowed=f"at most {MAX_BATCH}")


def check_list(value: object, field: str) -> Collection[Any]:
    """A list, tuple or set; a single text is not one, though Python would take it apart."""
    if isinstance(value, list | tuple | AbstractSet):
        return value
    raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="a list")


def check_filter(value: object, field: str = "filter") -> tuple[str | None, str | None, str | None]:
    """A filter as namespace, tag key and tag value."""
    if value is None:
        return None, None, None
    if not isinstance(value, ScannerFilter):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="a ScannerFilter")
    namespace = None if value.namespace is None else check_text(value.namespace, f"{field}.namespace")
    return (namespace, *check_tag(value.instance_tag, f"{field}.instance_tag"))


def check_tag(value: object, field: str) -> tuple[str | None, str | None]:
    """A tag and the value it must have, or neither."""
    if value is None:
        return None, None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="a (key, value) pair")
    return check_text(value[0], field, None), check_text(value[1], field, None)


def check_duration(value: object, field: str, *, least_ms: int = 1, most: timedelta | None = None) -> int:
    """A duration in milliseconds."""
    allowed = f"a timedelta of at least {least_ms} ms" + (f" and at most {most}" if most is not None else "")
    if not isinstance(value, timedelta):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed=allowed)
    ms = value // timedelta(milliseconds=1)
    if ms < least_ms or ms > 10**13 or (most is not None and value > most):
        raise InvalidInput(f"got {value}", field=field, allowed=allowed)
    return ms


def optional_bytes(value: object, field: str) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="bytes or None")
    if len(value) > MAX_PAYLOAD:
        raise InvalidInput(f"{len(value)} bytes", field=field, allowed=f"at most {MAX_PAYLOAD} bytes")
    return value if type(value) is bytes else bytes(value)
