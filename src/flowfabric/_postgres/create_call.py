"""The create call, rendered once for every driver.

Checks the items, mints what is missing and lays them out as the arrays that `flowfabric.create_executions` takes. An
item that fails its checks becomes its own verdict and never reaches the database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any
from uuid import UUID

import msgspec
from asyncpg.pgproto import pgproto

from flowfabric.errors import FlowFabricError, InvalidInput, StateError
from flowfabric.values.checks import check_key, check_lane, check_tags, check_text
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.ids import ExecutionId, crc16, mint_many, mint_uuid, parse_uuid
from flowfabric.values.policies import Derived, FrozenPolicy
from flowfabric.values.policy_json import freeze_policy
from flowfabric.values.state import State

MAX_BATCH = 1000
MAX_PAYLOAD = 1 << 28  # a message of the database's protocol ends below 1 GiB, and a call is one message
_INT32 = range(-(2**31), 2**31)
_CASTS = [
    "text[]",
    "text[]",
    "text[]",
    "integer[]",
    "integer[]",
    "uuid[]",
    "boolean",
    "text[]",
    "text[]",
    "bytea[]",
    "text[]",
    "integer[]",
    "uuid[]",
    "text[]",
    "bigint[]",
    "text[]",
    "text[]",
    "text[]",
    "uuid[]",
    "timestamptz[]",
    "bigint[]",
    "timestamptz[]",
    "bigint[]",
]


_STANDING_CASTS = ["integer[]", "uuid[]", "text[]", "text[]", "uuid[]", "text[]"]
# Whoever does not know the partition count sends hashes, and the statement itself makes partitions of them.
_HOMES = (
    "(select array_agg(mod(u.hash, d.flow_partitions) order by u.place)"
    " from flowfabric.deployment_info() d, unnest({}) with ordinality as u (hash, place))"
)
INFO_SQL = "select flow_partitions from flowfabric.deployment_info()"
_PARTITION_HASHES = 1 << 16
PARTITION_ARG = 4  # its place among the args
ID_ARG = 5
ID_GIVEN_ARG = 6
PAYLOAD_ARG = 9
POLICY_ARG = 16


def create_sql(placeholder: str = "${}", *, hashed: bool = False) -> str:
    """The statement, with `placeholder` formatted by the number of the argument.

    `hashed`: the call was laid out without the partition count.
    """
    marks = _marks(placeholder, _CASTS, partition=5 if hashed else None)
    return f"select ordinal, code, partition, id, state from flowfabric.create_executions({marks})"  # noqa: S608


def standing_sql(placeholder: str = "${}", *, hashed: bool = False) -> str:
    """The question behind `CreateCall.doubts`, rendered like `create_sql`."""
    marks = _marks(placeholder, _STANDING_CASTS, partition=1 if hashed else None)
    return f"select ordinal, code, partition, id from flowfabric.standing_executions({marks})"  # noqa: S608


def _marks(placeholder: str, casts: Sequence[str], *, partition: int | None) -> str:
    marks = [f"{placeholder.format(i)}::{cast}" for i, cast in enumerate(casts, 1)]
    if partition is not None:
        marks[partition - 1] = _HOMES.format(marks[partition - 1])
    return ", ".join(marks)


SQL = create_sql()
STANDING_SQL = standing_sql()


class CreateCall:
    """One call: `args` for the statement, and what to make of its rows.

    Without `partitions` the args hold hashes for a statement rendered as `hashed`, and no item may give its id.
    A policy is judged last: an item with a bad one is not sent, but `doubts` are the args of the statement that finds
    out whether it is a duplicate or its lane is closed.
    """

    def __init__(self, items: Sequence[NewExecution], partitions: int | None) -> None:
        if len(items) > MAX_BATCH:
            raise InvalidInput(f"{len(items)} items", field="items", allowed=f"at most {MAX_BATCH}")
        self._refused: dict[int, FlowFabricError] = {}
        self._places: list[int] = []  # place in `items` of every item sent
        self._sent: list[UUID] = []
        self._count = len(items)
        self._given: set[int] = set()
        self._doubtful: list[int] = []
        self.doubts: list[list[Any]] = []
        if all(map(is_plain, items)) and all(item.policy is items[0].policy for item in items):
            self._places = list(range(len(items)))
            self._sent, self.args = _plain_args(items, partitions or _PARTITION_HASHES)
            return
        lay = Layout(partitions or _PARTITION_HASHES)
        doubts: list[tuple[Any, ...]] = []
        for place, item in enumerate(items):
            try:
                lay.add(item)
            except BadPolicy as bad:
                self._refused[place] = bad.error
                self._doubtful.append(place)
                doubts.append(bad.identity)
            except FlowFabricError as error:
                self._refused[place] = error
            else:
                self._places.append(place)
        self._places = lay.in_lock_order(self._places)
        self._sent = lay.ids
        self._given = {place for place in self._places if items[place].execution_id is not None}
        self.args = lay.args()
        self.doubts = [list(column) for column in zip(*doubts, strict=True)]

    @property
    def is_empty(self) -> bool:
        return not self._places

    @property
    def refused(self) -> list[FlowFabricError]:
        """Why items were not sent, in their order."""
        return [self._refused[place] for place in sorted(self._refused)]

    def _minted(self, number: int) -> UUID | None:
        """The id of an item sent, if it is of our own making: nobody else can have used it."""
        return None if self._places[number] in self._given else self._sent[number]

    def verdicts(
        self,
        rows: Sequence[Sequence[Any] | Mapping[str, Any]],
        standing: Sequence[Sequence[Any] | Mapping[str, Any]] = (),
        *,
        repeated: bool = False,
    ) -> list[Created | Duplicate | FlowFabricError]:
        """One verdict per item, in the order of the items. `repeated`: our own first try may have got through."""
        answers: dict[int, Created | Duplicate | FlowFabricError] = dict(self._refused)
        for row in standing:
            ordinal, code, partition, uuid = row.values() if isinstance(row, Mapping) else row
            if code == "duplicate":
                answers[self._doubtful[ordinal - 1]] = Duplicate(ExecutionId.of(partition, uuid))
            elif code == "lane_closed":
                answers[self._doubtful[ordinal - 1]] = _lane_closed(ExecutionId.of(partition, uuid))
        for row in rows:
            ordinal, code, partition, uuid, state = row.values() if isinstance(row, Mapping) else row
            if ordinal == 0:  # speaks for all: created and waiting; `partition` is the number of partitions
                waiting = State(state)
                for place, home, sent in zip(self._places, self.args[PARTITION_ARG], self._sent, strict=True):
                    answers[place] = Created(ExecutionId.of(home % partition, sent), waiting)
                continue
            place = self._places[ordinal - 1]
            execution_id = ExecutionId.of(partition, uuid)
            if code == "created" or (repeated and code == "duplicate" and uuid == self._minted(ordinal - 1)):
                answers[place] = Created(execution_id, State(state))
            elif code == "duplicate":
                answers[place] = Duplicate(execution_id)
            else:
                answers[place] = _lane_closed(execution_id)
        return [answers[place] for place in range(self._count)]


def _lane_closed(execution_id: ExecutionId) -> StateError:
    return StateError("lane_closed", "the lane takes no new executions", execution_id=execution_id)


def is_plain(item: NewExecution) -> bool:
    """Whether an item gives kind, lane and payload alone: the common case, laid out without a look at each field."""
    return (
        type(item) is NewExecution
        and type(item.input_payload) is bytes
        and len(item.input_payload) <= MAX_PAYLOAD
        and item.idempotency_key is None
        and (item.policy is None or (type(item.policy) is FrozenPolicy and item.policy.derived == _NOTHING))
        and item.tags is None
        and item.delay_until is None
        and item.execution_deadline_at is None
        and item.execution_id is None
        and item.flow_id is None
        and item.payload_encoding is None
        and item.namespace == ""
        and item.creator_identity == ""
        and type(item.priority) is int
        and item.priority == 0
        and type(item.lane_id) is str
        and type(item.execution_kind) is str
        and _is_route(item.lane_id, item.execution_kind)
    )


@lru_cache(maxsize=1024)
def _is_route(lane: str, kind: str) -> bool:
    try:
        return bool(check_lane(lane) and isinstance(check_text(kind, "execution_kind"), str))
    except InvalidInput:
        return False


def alike_args(item: NewExecution, payloads: Sequence[bytes], partitions: int) -> list[Any]:
    """The args of a call for executions that differ in their payload alone, of a plain item."""
    for data in payloads:
        if type(data) is not bytes or len(data) > MAX_PAYLOAD:
            raise InvalidInput("one is too long or no bytes", field="payloads", allowed=f"at most {MAX_PAYLOAD} bytes")
    _, args = _plain_args([item], partitions)
    minted = mint_many(len(payloads))
    args[PARTITION_ARG] = _homes(minted, partitions)
    args[ID_ARG] = list(map(pgproto.UUID, minted))
    args[PAYLOAD_ARG] = payloads
    return args


def _homes(minted: Sequence[bytes], partitions: int) -> list[int]:
    """One partition for all executions of a call: neighbours in the index, which is written and read at one place."""
    return [crc16(minted[0]) % partitions] * len(minted) if minted else []


def _plain_args(items: Sequence[NewExecution], partitions: int) -> tuple[list[UUID], list[Any]]:
    routes: dict[tuple[str, str], int] = {}
    numbers = [routes.setdefault((item.lane_id, item.execution_kind), len(routes) + 1) for item in items]
    minted = mint_many(len(items))
    ids: list[UUID] = list(map(pgproto.UUID, minted))  # made in C; UUIDs to everybody else
    homes = _homes(minted, partitions)
    args = [
        [lane for lane, _ in routes], [kind for _, kind in routes], [""] * len(routes),
        numbers if len(routes) > 1 else None, homes, ids, False,
        None, None, [item.input_payload for item in items],
    ]  # fmt: skip
    args += [None] * (len(_CASTS) - len(args))
    policy = items[0].policy if items else None
    if type(policy) is FrozenPolicy:
        args[POLICY_ARG] = [policy.text]  # one for all
    return ids, args


class BadPolicy(Exception):
    """Carries what `standing_executions` asks for from the layout to the call, which lets out `error` alone."""

    def __init__(self, error: FlowFabricError, identity: tuple[Any, ...]) -> None:
        super().__init__(error)
        self.error = error
        self.identity = identity


class Layout:
    """The columns of a call. A column that no item uses is sent as null."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._routes: dict[tuple[str, str, str], int] = {}
        self.ids: list[UUID] = []
        self._id_given = False
        self._rows: list[tuple[Any, ...]] = []

    def in_lock_order(self, places: list[int]) -> list[int]:
        """Sort by id, together with what belongs to each: calls that share given ids then cannot deadlock.

        Of equal keys in one call the first wins, so a call that has some keeps its order.
        """
        if not self._id_given:
            return places
        keys = [(row[1], row[3], row[8], row[9]) for row in self._rows if row[9] is not None]
        if len(set(keys)) < len(keys):
            return places
        order = sorted(range(len(places)), key=lambda n: (self._rows[n][1], self.ids[n]))
        self._rows = [self._rows[n] for n in order]
        self.ids = [self.ids[n] for n in order]
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
        flow = None if item.flow_id is None else parse_uuid(item.flow_id, "flow_id")
        partition, uuid = self._identity(item, namespace, key, flow)
        if bad_policy is not None:
            raise BadPolicy(bad_policy, (partition, uuid, namespace, key, flow, lane))
        capabilities = ",".join(derived.required_capabilities)
        route = self._routes.setdefault((lane, kind, capabilities), len(self._routes) + 1)
        self.ids.append(uuid)
        self._id_given = self._id_given or item.execution_id is not None
        self._rows.append(
            (
                route, partition, uuid, namespace, creator, payload, encoding, priority, flow, key,
                derived.dedup_window_ms if key is not None else None, tags, policy,
                ",".join(map(str, derived.budget_ids)) or None, derived.quota_policy_id,
                delay_at, delay_ms, deadline_at, deadline_ms,
            )
        )  # fmt: skip

    def _identity(self, item: NewExecution, namespace: str, key: str | None, flow: UUID | None) -> tuple[int, UUID]:
        given = None if item.execution_id is None else ExecutionId.parse(item.execution_id)
        uuid = mint_uuid() if given is None else given.uuid
        if flow is not None:
            home = crc16(flow.bytes) % self._partitions
        elif key is not None:
            home = crc16(namespace.encode() + b"\0" + key.encode()) % self._partitions
        elif given is not None:
            home = given.partition
            if home >= self._partitions:
                raise InvalidInput(
                    f"partition {home} does not exist",
                    field="execution_id",
                    allowed=f"0..{self._partitions - 1}",
                )
        else:
            home = crc16(uuid.bytes) % self._partitions
        if given is not None and given.partition != home:
            because = "its flow" if flow is not None else "its idempotency key"
            raise InvalidInput(
                f"partition {given.partition} is not that of {because}",
                field="execution_id",
                allowed=f"{{fp:{home}}}:...",
            )
        return home, uuid

    def args(self) -> list[Any]:
        columns = list(zip(*self._rows, strict=True)) if self._rows else [()] * 19
        routes = list(self._routes)
        (route, partition, uuid, namespace, creator, payload, encoding, priority, *optional) = columns
        flow, key, dedup, tags, policy, budgets, quota, delay_at, delay_ms, deadline_at, deadline_ms = optional
        return [
            [r[0] for r in routes],
            [r[1] for r in routes],
            [r[2] for r in routes],
            list(route), list(partition), list(uuid), self._id_given,
            _filled(namespace), _filled(creator), list(payload), _used(encoding), _filled(priority),
            _used(flow), _used(key), _used(dedup), _used(tags), _used(policy), _used(budgets), _used(quota),
            _used(delay_at), _used(delay_ms), _used(deadline_at), _used(deadline_ms),
        ]  # fmt: skip


_NOTHING = Derived()
_NO_TEXT = (None, "")


def _used(column: tuple[Any, ...]) -> list[Any] | None:
    """The column, or None when no item uses it."""
    return None if column.count(None) == len(column) else list(column)


def _filled(column: tuple[Any, ...]) -> list[Any] | None:
    """The column, or None when every item has the default: empty text, zero."""
    return list(column) if any(column) else None


def _bytes(value: object, field: str) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="bytes")


def moment(value: object, field: str, allowed: str = "an aware datetime") -> datetime:
    """A point in time that the database can hold and give back."""
    if not isinstance(value, datetime):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed=allowed)
    if value.utcoffset() is None:
        raise InvalidInput("a datetime without time zone", field=field, allowed=allowed)
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InvalidInput(f"got {value}", field=field, allowed=f"{allowed} within the years 1 to 9999") from None


def instant(value: object, field: str) -> tuple[datetime | None, int | None]:
    """A moment as (absolute, None) or a duration from the database's now as (None, milliseconds)."""
    if value is None:
        return None, None
    if isinstance(value, timedelta):
        ms = value // timedelta(milliseconds=1)
        if ms < 0 or ms > 10**13:
            raise InvalidInput(f"got {value}", field=field, allowed="a duration from 0 to about 300 years")
        return None, ms
    if isinstance(value, datetime):
        return moment(value, field, "an aware datetime or a timedelta"), None
    raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="an aware datetime or a timedelta")
