"""The columns of a create call: checks items, mints ids, and arranges all of it as `create_executions` takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from asyncpg.pgproto import pgproto

from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.values.checks import MAX_PAYLOAD, check_key, check_lane, check_tags, check_text, instant
from flowfabric.values.execution import NewExecution
from flowfabric.values.ids import (
    any_partition,
    mint_many,
    parse_execution_id,
    parse_flow_id,
    partition_of_id,
    partition_of_key,
)
from flowfabric.values.policies import Derived, FrozenPolicy
from flowfabric.values.policy_json import freeze_policy

_INT32 = range(-(2**31), 2**31)
# How many partitions a new deployment has: a call laid out without knowing the number expects these.
_USUAL_PARTITIONS = 256


@dataclass(slots=True, kw_only=True)
class Columns:
    """The arguments of `flowfabric.create_executions`, in its order; None if every item has the default."""

    lanes: list[str]
    kinds: list[str]
    capabilities: list[str]
    routes: list[int] | None
    partitions: list[int]
    ids: list[UUID]
    ids_given: bool = False
    namespaces: list[str] | None = None
    creators: list[str] | None = None  # or one for all
    payloads: Sequence[bytes]
    encodings: list[str | None] | None = None
    priorities: list[int] | None = None
    flows: list[UUID | None] | None = None
    keys: list[str | None] | None = None
    dedup_ms: list[int | None] | None = None
    tags: list[str | None] | None = None
    policies: list[str | None] | None = None  # or one for all
    budgets: list[str | None] | None = None
    quotas: list[str | None] | None = None
    delays_at: list[datetime | None] | None = None
    delays_ms: list[int | None] | None = None
    deadlines_at: list[datetime | None] | None = None
    deadlines_ms: list[int | None] | None = None

    @property
    def one_plain(self) -> tuple[Any, ...] | None:
        """The arguments of `flowfabric.create_one`, for one execution without any option."""
        if len(self.ids) != 1 or self.ids_given or any(each is not None for each in _options(self)):
            return None
        policy = None if self.policies is None else self.policies[0]
        creator = None if self.creators is None else self.creators[0]
        (lane,), (kind,), (capabilities,) = self.lanes, self.kinds, self.capabilities
        return lane, kind, capabilities, self.partitions[0], self.ids[0], self.payloads[0], policy, creator

    @property
    def args(self) -> list[Any]:
        return list(_in_order(self))


# Columns that are None when no item sets anything beside lane, kind, payload, policy and creator.
_options: Callable[[Columns], tuple[Any, ...]] = attrgetter(
    *(
        field.name
        for field in fields(Columns)
        if field.default is None and field.name not in ("routes", "policies", "creators")
    )
)
_in_order: Callable[[Columns], tuple[Any, ...]] = attrgetter(*(field.name for field in fields(Columns)))


# The fields of an item beside lane, kind, payload, policy and creator. If no item sets any of it, every optional column
# is null, and `create_executions` treats the call as a plain one.
_OPTIONAL = {
    field.name: field.default
    for field in msgspec.structs.fields(NewExecution)
    if field.name not in ("execution_kind", "lane_id", "input_payload", "policy", "creator_identity")
}
_optional: Callable[[NewExecution], tuple[Any, ...]] = attrgetter(*_OPTIONAL)
_NOTHING_GIVEN = tuple(_OPTIONAL.values())


def is_plain(item: NewExecution) -> bool:
    """Whether an item sets only kind, lane, payload, policy and creator: the common case, without checks per item."""
    return (
        type(item) is NewExecution
        and type(item.input_payload) is bytes
        and len(item.input_payload) <= MAX_PAYLOAD
        and _optional(item) == _NOTHING_GIVEN
        and type(item.priority) is int
        and (item.policy is None or (type(item.policy) is FrozenPolicy and item.policy.derived == _NOTHING))
        and type(item.lane_id) is str
        and type(item.execution_kind) is str
        and type(item.creator_identity) is str
        and (not item.creator_identity or _is_name(item.creator_identity))
        and _is_route(item.lane_id, item.execution_kind)
    )


@lru_cache(maxsize=1024)
def _is_route(lane: str, kind: str) -> bool:
    try:
        return bool(check_lane(lane) and isinstance(check_text(kind, "execution_kind"), str))
    except InvalidInput:
        return False


@lru_cache(maxsize=1024)
def _is_name(creator: str) -> bool:
    try:
        return bool(check_text(creator, "creator_identity"))
    except InvalidInput:
        return False


def alike_columns(item: NewExecution, payloads: Sequence[bytes], partitions: int) -> Columns:
    """Return the columns of a call for executions that differ only in their payload, from a plain item."""
    for data in payloads:
        if type(data) is not bytes or len(data) > MAX_PAYLOAD:
            raise InvalidInput("one is too long or no bytes", field="payloads", allowed=f"at most {MAX_PAYLOAD} bytes")
    columns = plain_columns([item], partitions)
    columns.partitions, columns.ids = _mint_together(len(payloads), partitions)
    columns.payloads = payloads
    return columns


def _mint_together(number: int, partitions: int | None, home: int | None = None) -> tuple[list[int], list[UUID]]:
    """Partitions and ids of a call, in one partition: neighbours in the index, which is written and read at one place.

    Where their number is not known, the last bits of each id stand in for its partition.
    """
    count = partitions or _USUAL_PARTITIONS
    if home is None:
        home = any_partition(count)
    minted = mint_many(number, home, count)
    homes = [home] * number if partitions is not None else [int.from_bytes(one[-2:], "big") for one in minted]
    return homes, list(map(pgproto.UUID, minted))  # made in C; UUIDs to all other code


def plain_columns(items: Sequence[NewExecution], partitions: int | None, home: int | None = None) -> Columns:
    routes: dict[tuple[str, str], int] = {}
    numbers = [routes.setdefault((item.lane_id, item.execution_kind), len(routes) + 1) for item in items]
    homes, ids = _mint_together(len(items), partitions, home)
    policy = items[0].policy if items else None
    creators = [item.creator_identity for item in items]
    if creators and creators.count(creators[0]) == len(creators):
        del creators[1:]
    return Columns(
        lanes=[lane for lane, _ in routes],
        kinds=[kind for _, kind in routes],
        capabilities=[""] * len(routes),
        routes=numbers if len(routes) > 1 else None,
        partitions=homes,
        ids=ids,
        creators=creators if any(creators) else None,
        payloads=[item.input_payload for item in items],
        policies=[policy.text] if type(policy) is FrozenPolicy else None,
    )


class BadPolicy(Exception):
    """Carries the arguments of `standing_executions` from the layout to the call, which raises only `error`."""

    def __init__(self, error: FlowFabricError, identity: tuple[Any, ...]) -> None:
        super().__init__(error)
        self.error = error
        self.identity = identity


class _Item(NamedTuple):
    """A checked item."""

    route: int
    partition: int
    uuid: UUID
    namespace: str
    creator: str
    payload: bytes
    encoding: str | None
    priority: int
    flow: UUID | None
    key: str | None
    dedup_ms: int | None
    tags: str | None
    policy: str | None
    budgets: str | None
    quotas: str | None
    delay_at: datetime | None
    delay_ms: int | None
    deadline_at: datetime | None
    deadline_ms: int | None


class Layout:
    """Lays items out as columns. A column that no item uses is sent as null.

    `partitions` is how many there are, or PARTITION_VALUES where that is not known. `home` is the partition for
    stand-alone executions, the one of their parent; without it a key chooses it, and the others are spread.
    """

    def __init__(self, partitions: int, home: int | None = None) -> None:
        self._partitions = partitions
        self._home = home
        self._routes: dict[tuple[str, str, str], int] = {}
        self._id_given = False
        self._items: list[_Item] = []

    def in_lock_order(self, places: list[int]) -> list[int]:
        """Sort all columns by id, so that calls that share given ids cannot deadlock.

        Of equal keys in one call the first wins, so a call with equal keys keeps its order.
        """
        if not self._id_given:
            return places
        keys = [(one.namespace, one.flow, one.key) for one in self._items if one.key is not None]
        if len(set(keys)) < len(keys):
            return places
        order = sorted(range(len(places)), key=lambda n: (self._items[n].partition, self._items[n].uuid))
        self._items = [self._items[n] for n in order]
        return [places[n] for n in order]

    def add(self, item: NewExecution) -> None:
        if not isinstance(item, NewExecution):
            raise InvalidInput(f"got {type(item).__name__}", field="items", allowed="NewExecution")
        namespace = check_text(item.namespace, "namespace") if item.namespace not in _NO_TEXT else ""
        kind = check_text(item.execution_kind, "execution_kind")
        lane = check_lane(item.lane_id)
        creator = check_text(item.creator_identity, "creator_identity") if item.creator_identity not in _NO_TEXT else ""
        payload = item.input_payload
        if type(payload) is not bytes:
            payload = _bytes(payload, "input_payload")
        if len(payload) > MAX_PAYLOAD:
            raise InvalidInput(f"{len(payload)} bytes", field="input_payload", allowed=f"at most {MAX_PAYLOAD} bytes")
        encoding = None if item.payload_encoding is None else check_text(item.payload_encoding, "payload_encoding")
        priority = item.priority
        if type(priority) is not int or priority not in _INT32:
            raise InvalidInput(f"got {priority!r}", field="priority", allowed="a 32-bit integer; clamped to 0..9000")
        key = None if item.idempotency_key is None else check_key(item.idempotency_key)
        tags = None
        if item.tags is not None and (checked := check_tags(item.tags)):
            tags = msgspec.json.encode(checked).decode()
        bad_policy: FlowFabricError | None = None
        policy, derived = None, _NOTHING
        if item.policy is not None:
            try:
                policy, derived = freeze_policy(item.policy)
            except FlowFabricError as error:
                bad_policy = error
        delay_at, delay_ms = (None, None) if item.delay_until is None else instant(item.delay_until, "delay_until")
        if item.delay_until is None and derived.delay_until_ms is not None:
            delay_at = datetime.fromtimestamp(derived.delay_until_ms / 1000, UTC)
        deadline_at, deadline_ms = instant(item.execution_deadline_at, "execution_deadline_at")
        if item.execution_deadline_at is None:
            deadline_ms = derived.execution_deadline_ms
        flow = None if item.flow_id is None else parse_flow_id(item.flow_id)
        partition, uuid = self._identity(item, namespace, key, flow)
        if bad_policy is not None:
            raise BadPolicy(bad_policy, (partition, uuid, namespace, key, flow, lane))
        capabilities = ",".join(derived.required_capabilities)
        route = self._routes.setdefault((lane, kind, capabilities), len(self._routes) + 1)
        self._id_given = self._id_given or item.execution_id is not None
        self._items.append(
            _Item(
                route, partition, uuid, namespace, creator, payload, encoding, priority, flow, key,
                derived.dedup_window_ms if key is not None else None, tags, policy,
                ",".join(map(str, derived.budget_ids)) or None,
                ",".join(map(str, derived.quota_policy_ids)) or None,
                delay_at, delay_ms, deadline_at, deadline_ms,
            )
        )  # fmt: skip

    def _identity(self, item: NewExecution, namespace: str, key: str | None, flow: UUID | None) -> tuple[int, UUID]:
        count = self._partitions
        home = self._home
        if flow is not None:
            home = partition_of_id(flow, count)
        elif key is not None and home is None:
            home = partition_of_key(namespace, key, count)
        if item.execution_id is None:
            uuid = UUID(bytes=mint_many(1, home, count)[0])
            return partition_of_id(uuid, count) if home is None else home, uuid
        given = parse_execution_id(item.execution_id)
        place = partition_of_id(given, count)
        if flow is not None and place != home:
            raise InvalidInput(
                f"{given} is not of the partition of flow {flow}",
                field="execution_id",
                allowed="an id from mint_id(flow_id=...)",
            )
        if flow is None and self._home is not None and place != self._home:
            raise InvalidInput(
                f"{given} is not of the partition of its parent",
                field="execution_id",
                allowed="an id from mint_id(parent_id=...)",
            )
        return place, given

    @property
    def ids(self) -> list[UUID]:
        return [one.uuid for one in self._items]

    def columns(self) -> Columns:
        # The names of an item, each with the values of all items.
        of: Any = _Item._make(zip(*self._items, strict=True) if self._items else [()] * len(_Item._fields))
        return Columns(
            lanes=[lane for lane, _, _ in self._routes],
            kinds=[kind for _, kind, _ in self._routes],
            capabilities=[capabilities for _, _, capabilities in self._routes],
            routes=list(of.route),
            partitions=list(of.partition),
            ids=list(of.uuid),
            ids_given=self._id_given,
            namespaces=_filled(of.namespace),
            creators=_filled(of.creator),
            payloads=list(of.payload),
            encodings=_used(of.encoding),
            priorities=_filled(of.priority),
            flows=_used(of.flow),
            keys=_used(of.key),
            dedup_ms=_used(of.dedup_ms),
            tags=_used(of.tags),
            policies=_used(of.policy),
            budgets=_used(of.budgets),
            quotas=_used(of.quotas),
            delays_at=_used(of.delay_at),
            delays_ms=_used(of.delay_ms),
            deadlines_at=_used(of.deadline_at),
            deadlines_ms=_used(of.deadline_ms),
        )


_NOTHING = Derived()
_NO_TEXT = (None, "")


def _used(column: tuple[Any, ...]) -> list[Any] | None:
    """Return the column, or None if no item uses it."""
    return None if column.count(None) == len(column) else list(column)


def _filled(column: tuple[Any, ...]) -> list[Any] | None:
    """Return the column, or None if every item has the default: an empty string, zero."""
    return list(column) if any(column) else None


def _bytes(value: object, field: str) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="bytes")
