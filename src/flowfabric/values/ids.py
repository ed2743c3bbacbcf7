"""Identifiers as distinct types: minting and parsing.

Identifiers minted here are time-ordered (UUID version 7), not random: neighbours in time become neighbours in
every index, so inserts touch the few hot pages at its right end instead of one cold page each. Within one
process they also sort in mint order. Callers may supply a UUID of any version. No identifier is a secret.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from binascii import crc_hqx
from dataclasses import dataclass
from typing import Final, Literal, NewType, NoReturn, Self, cast
from uuid import UUID

from flowfabric.errors import InvalidInput
from flowfabric.values.checks import quoted

FlowId = NewType("FlowId", UUID)
BudgetId = NewType("BudgetId", UUID)
QuotaPolicyId = NewType("QuotaPolicyId", UUID)
LeaseId = NewType("LeaseId", UUID)
AttemptId = NewType("AttemptId", UUID)
SignalId = NewType("SignalId", UUID)
WaitpointId = NewType("WaitpointId", UUID)
SuspensionId = NewType("SuspensionId", UUID)
EdgeId = NewType("EdgeId", UUID)
MAX_PARTITION: Final = 65_535

_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,4}")


class _Minter:
    """Time-ordered UUIDs that grow strictly within one process, even when the clock steps back."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        # After a fork the child must neither continue the parent's sequence nor inherit a held lock.
        self._lock = threading.Lock()
        self._random = random.Random(os.urandom(16))  # noqa: S311 - identifiers are no secrets
        self._millisecond = 0
        self._tail = 0

    def many(self, count: int) -> list[bytes]:
        """That many ids at once, as bytes: the lock and the clock are asked once."""
        now = time.time_ns() // 1_000_000
        made = []
        with self._lock:
            draw = self._random.getrandbits
            millisecond, tail = self._millisecond, self._tail
            for _ in range(count):
                if now > millisecond:
                    millisecond = now
                    # 73 of 74 bits: the clear top bit is room to count up within one millisecond.
                    tail = draw(73)
                else:
                    tail += draw(32) + 1
                    if tail >> 74:
                        millisecond += 1
                        tail = draw(73)
                made.append(
                    (
                        (millisecond & 0xFFFF_FFFF_FFFF) << 80
                        | 0x7 << 76
                        | (tail >> 62) << 64
                        | 0b10 << 62
                        | (tail & 0x3FFF_FFFF_FFFF_FFFF)
                    ).to_bytes(16, "big")
                )
            self._millisecond, self._tail = millisecond, tail
        return made

    def next(self) -> UUID:
        return UUID(bytes=self.many(1)[0])


_minter: Final = _Minter()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_minter.reset)

mint_uuid: Final = _minter.next
mint_many: Final = _minter.many


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


def crc16(data: bytes) -> int:
    """CRC-16/XMODEM: polynomial 0x1021, initial value 0, nothing reflected, no final xor."""
    return crc_hqx(data, 0)


def partition_of(data: bytes, count: int) -> int:
    """The partition of an entity with these hash bytes, out of `count`."""
    return crc_hqx(data, 0) % count


Family = Literal["fp", "b", "q"]


@dataclass(frozen=True, slots=True, order=True)
class PartitionKey:
    """A partition as it is written on the wire: `{fp:7}`, `{b:0}`, `{q:31}`.

    Executions and flows share the family `fp`.
    """

    family: Family
    index: int

    def __str__(self) -> str:
        return f"{{{self.family}:{self.index}}}"

    @classmethod
    def parse(cls, text: object, field: str = "partition_key") -> PartitionKey:
        def refuse(why: str) -> NoReturn:
            raise InvalidInput(f"{why}: {quoted(text)}", field=field, allowed="{fp:N}, {b:N} or {q:N}, N in 0..65535")

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


class ExecutionId(str):
    """`{fp:N}:<uuid>`. The text is the identity; N routes, and is never recomputed from the uuid.

    Calling the class trusts the text (a value read back from storage); `parse` does not.
    """

    __slots__ = ()

    @classmethod
    def of(cls, partition: int, uuid: UUID) -> Self:
        """From parts known to be good; not checked."""
        return cls(f"{{fp:{partition}}}:{uuid}")

    @classmethod
    def parse(cls, text: object, field: str = "execution_id") -> Self:
        """From untrusted text. The partition count of the deployment is for the caller to check."""

        def refuse(why: str) -> NoReturn:
            raise InvalidInput(f"{why}: {quoted(text)}", field=field, allowed="{fp:N}:<uuid> with N in 0..65535")

        if not isinstance(text, str) or not text.startswith("{fp:"):
            refuse("MissingTag")
        index, separator, suffix = text[4:].partition("}:")
        if not separator:
            refuse("MissingTag")
        if not _INDEX.fullmatch(index) or int(index) > MAX_PARTITION:
            refuse("InvalidPartitionIndex")
        if not _UUID.fullmatch(suffix):
            refuse("InvalidUuid")
        return cls(f"{{fp:{index}}}:{suffix.lower()}")

    @property
    def partition(self) -> int:  # type: ignore[override]  # an id is never split like text; the noun wins
        return int(self[4 : self.index("}")])

    @property
    def uuid(self) -> UUID:
        return UUID(self[-36:])

    def __repr__(self) -> str:
        return f"ExecutionId({str.__repr__(self)})"


def mint_execution_id(
    *,
    namespace: str,
    idempotency_key: str | None,
    flow_id: UUID | None,
    count: int,
    uuid: UUID | None = None,
) -> ExecutionId:
    """A new id in the partition where it must live.

    A flow's members live with their flow; an execution with an idempotency key lives where everybody else
    who uses that key looks for it; the rest is spread by their own uuid. With `uuid` given the answer depends
    on the arguments alone.
    """
    if uuid is None:
        uuid = mint_uuid()
    if flow_id is not None:
        data = flow_id.bytes
    elif idempotency_key:
        data = namespace.encode() + b"\0" + idempotency_key.encode()
    else:
        data = uuid.bytes
    return ExecutionId.of(crc_hqx(data, 0) % count, uuid)
