"""Identifiers: distinct types, minting, parsing, and the partition an id says.

An id is a UUID everywhere a person or a program sees one. The partition an execution or flow lives in is derived from
the last 16 bits of its id, so the engine mints ids with the right bits there.

Ids minted here are time-ordered (UUID version 7), not random: neighbours in time become neighbours in every index, so
inserts touch the few hot pages at its right end instead of one cold page each. Within one process they also sort in
mint order. Callers may supply a UUID of any version. No id is a secret.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from binascii import crc_hqx
from dataclasses import dataclass
from typing import Final, Literal, NewType, NoReturn, cast
from uuid import UUID

from flowfabric.errors import InvalidInput
from flowfabric.values.checks import quoted

ExecutionId = NewType("ExecutionId", UUID)
FlowId = NewType("FlowId", UUID)
BudgetId = NewType("BudgetId", UUID)
QuotaPolicyId = NewType("QuotaPolicyId", UUID)
LeaseId = NewType("LeaseId", UUID)
AttemptId = NewType("AttemptId", UUID)
ReservationId = NewType("ReservationId", UUID)
MAX_PARTITION: Final = 65_535
PARTITION_BITS: Final = 16  # at the end of an id; their value modulo the number of partitions is the partition
PARTITION_VALUES: Final = 1 << PARTITION_BITS
SHORT_ID: Final = 8  # hex digits from the end of an id, where people are shown a short form

_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_DIGITS: Final = re.compile(r"[0-9a-f]{6,32}")
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,4}")
# The form in which FlowFabric in Rust writes an id: with its partition in front.
_TAGGED: Final = re.compile(r"\{fp:(0|[1-9][0-9]{0,4})\}:(.*)", re.DOTALL)


class _Minter:
    """Time-ordered UUIDs that grow strictly within one process, even when the clock steps back."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        # After a fork the child must neither continue the parent's sequence nor inherit a held lock.
        self._lock = threading.Lock()
        self._random = random.Random(os.urandom(16))  # noqa: S311 - identifiers are no secrets
        self._millisecond = 0
        self._order = 0  # 58 bits between the time and the bits of the partition

    def many(self, number: int, partition: int | None = None, count: int = PARTITION_VALUES) -> list[bytes]:
        """That many ids as bytes, of one partition out of `count` or of any: the lock and the clock are asked once."""
        first, step = (0, 1) if partition is None else (partition, count)
        choices = (PARTITION_VALUES - 1 - first) // step + 1  # of the last 16 bits
        now = time.time_ns() // 1_000_000
        made = []
        with self._lock:
            draw = self._random.getrandbits
            millisecond, order = self._millisecond, self._order
            for _ in range(number):
                drawn = draw(48)
                if now > millisecond:
                    millisecond = now
                    # 57 of 58 bits: the clear top bit is room to count up within one millisecond.
                    order = draw(57)
                else:
                    order += (drawn >> 16) + 1
                    if order >> 58:
                        millisecond += 1
                        order = draw(57)
                made.append(
                    (
                        (millisecond & 0xFFFF_FFFF_FFFF) << 80
                        | 0x7 << 76
                        | (order >> 46) << 64
                        | 0b10 << 62
                        | (order & 0x3FFF_FFFF_FFFF) << 16
                        | first + step * ((drawn & 0xFFFF) * choices >> 16)
                    ).to_bytes(16, "big")
                )
            self._millisecond, self._order = millisecond, order
        return made

    def next(self) -> UUID:
        return UUID(bytes=self.many(1)[0])

    def any_partition(self, count: int) -> int:
        """A partition, drawn as the last bits of an id would draw it."""
        return self._random.getrandbits(PARTITION_BITS) % count


_minter: Final = _Minter()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_minter.reset)

mint_uuid: Final = _minter.next
mint_many: Final = _minter.many
any_partition: Final = _minter.any_partition


def parse_uuid(value: object, field: str = "id") -> UUID:
    """A UUID from its hyphenated text, in either case, or from a UUID; nothing else is accepted."""
    if isinstance(value, UUID):
        return value
    if isinstance(value, str) and _UUID.fullmatch(value):
        return UUID(value)
    raise InvalidInput(
        f"not a UUID: {quoted(value)}",
        field=field,
        allowed="a hyphenated UUID such as 550e8400-e29b-41d4-...",
    )


def parse_execution_id(value: object, field: str = "execution_id") -> ExecutionId:
    """An execution id from a UUID or its text. FlowFabric in Rust writes `{fp:12}:<uuid>`: read as the UUID."""
    return ExecutionId(_parse_id(value, field))


def parse_flow_id(value: object, field: str = "flow_id") -> FlowId:
    """A flow id, read like an execution id."""
    return FlowId(_parse_id(value, field))


def _parse_id(value: object, field: str) -> UUID:
    if isinstance(value, str) and (tagged := _TAGGED.fullmatch(value)) and int(tagged[1]) <= MAX_PARTITION:
        value = tagged[2]
    return parse_uuid(value, field)


def id_digits(text: object, field: str = "id") -> str:
    """The hex digits of an id, or of its end or beginning: at least 6. Hyphens are optional."""
    if isinstance(text, UUID):
        return text.hex
    given = text.strip() if isinstance(text, str) else ""
    if (tagged := _TAGGED.fullmatch(given)) and _UUID.fullmatch(tagged[2]):
        given = tagged[2]
    digits = given.replace("-", "").lower()
    if not _DIGITS.fullmatch(digits):
        raise InvalidInput(
            f"got {quoted(text)}", field=field, allowed="a UUID, or at least 6 hex digits of its end or its beginning"
        )
    return digits


def partition_of_id(uuid: UUID, count: int) -> int:
    """The partition, out of `count`, in which the execution or flow with this id lives."""
    return (uuid.int & 0xFFFF) % count


def partition_of_key(namespace: str, idempotency_key: str, count: int) -> int:
    """The partition, out of `count`, for which the id of a stand-alone execution with this key is minted.

    A CRC-16/XMODEM, as SQL computes it: polynomial 0x1021, initial value 0, nothing reflected, no final xor.
    """
    return crc_hqx(namespace.encode() + b"\0" + idempotency_key.encode(), 0) % count


def fit_partition(uuid: UUID, partition: int, count: int) -> UUID:
    """The id with its last 16 bits changed so that it lives in the partition; one that does is returned as it is."""
    bits = uuid.int & 0xFFFF
    fitting = bits - bits % count + partition
    if fitting >= PARTITION_VALUES:
        fitting -= count
    return UUID(int=uuid.int - bits + fitting)


Family = Literal["fp", "b", "q"]


@dataclass(frozen=True, slots=True, order=True)
class PartitionKey:
    """A partition in the form that other implementations write: `{fp:7}`, `{b:0}`, `{q:31}`. It is only read.

    Executions and flows share the family `fp`. A plain number is read wherever this form is.
    """

    family: Family
    index: int

    def __str__(self) -> str:
        return f"{{{self.family}:{self.index}}}"

    @classmethod
    def parse(cls, text: object, field: str = "partition_key") -> PartitionKey:
        def refuse(why: str) -> NoReturn:
            raise InvalidInput(
                f"{why}: {quoted(text)}", field=field, allowed="a number from 0 to 65535, or {fp:N}, {b:N} or {q:N}"
            )

        if not isinstance(text, str) or len(text) < 2 or text[0] != "{" or text[-1] != "}":
            refuse("MissingBraces")
        family, colon, index = text[1:-1].partition(":")
        if not colon:
            refuse("MalformedBody")
        if family not in ("fp", "b", "q"):
            refuse("UnknownFamilyPrefix")
        if not _INDEX.fullmatch(index) or int(index) > MAX_PARTITION:
            refuse("InvalidIndex")
        return cls(cast(Family, family), int(index))


def mint_execution_id(
    *,
    namespace: str = "",
    idempotency_key: str | None = None,
    flow_id: UUID | None = None,
    parent_id: UUID | None = None,
    count: int,
) -> ExecutionId:
    """A new id in the partition where it must live.

    Members live with their flow, children with their parent; a stand-alone execution with an idempotency key lives in
    the partition of its key; the rest are spread.
    """
    partition = None
    if flow_id is not None or parent_id is not None:
        partition = partition_of_id(flow_id or parent_id, count)  # type: ignore[arg-type]  # one is given
    elif idempotency_key:
        partition = partition_of_key(namespace, idempotency_key, count)
    return ExecutionId(UUID(bytes=mint_many(1, partition, count)[0]))
