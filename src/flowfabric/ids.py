"""Identifiers as distinct types: minting, parsing, and the rules for every name a caller may give.

Identifiers minted here are time-ordered (UUID version 7), not random: neighbours in time become neighbours in
every index, so inserts touch the few hot pages at its right end instead of one cold page each. Within one
process they also sort in mint order. Callers may supply a UUID of any version. No identifier is a secret.

A check returns the value in its normal form or raises `InvalidInput` naming the field. What the values mean,
and whether they exist, belongs to others.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from binascii import crc_hqx
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Literal, NewType, NoReturn, Self, cast
from unicodedata import category
from uuid import UUID

from flowfabric.errors import InvalidInput, ValidationFailed

FlowId = NewType("FlowId", UUID)
BudgetId = NewType("BudgetId", UUID)
QuotaPolicyId = NewType("QuotaPolicyId", UUID)
LeaseId = NewType("LeaseId", UUID)
AttemptId = NewType("AttemptId", UUID)
SignalId = NewType("SignalId", UUID)
WaitpointId = NewType("WaitpointId", UUID)
SuspensionId = NewType("SuspensionId", UUID)
EdgeId = NewType("EdgeId", UUID)

TEXT_MAX_BYTES: Final = 256
KEY_MAX_BYTES: Final = 512
LANE_MAX_BYTES: Final = 64
MAX_CAPABILITIES: Final = 256
MAX_CAPABILITY_BYTES: Final = 4096
MAX_PARTITION: Final = 65_535

_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,4}")
_TAG_KEY: Final = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_][a-z0-9_.]*")


def _shown(value: object) -> str:
    """The offending value as an error may quote it: escaped, and not arbitrarily long."""
    text = ascii(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


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
        f"not a UUID: {_shown(value)}",
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
            raise InvalidInput(f"{why}: {_shown(text)}", field=field, allowed="{fp:N}, {b:N} or {q:N}, N in 0..65535")

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
            raise InvalidInput(f"{why}: {_shown(text)}", field=field, allowed="{fp:N}:<uuid> with N in 0..65535")

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


def check_text(value: object, field: str, max_bytes: int | None = TEXT_MAX_BYTES) -> str:
    """Text the database can hold: no NUL, no lone surrogate, at most `max_bytes` of UTF-8. May be empty."""
    if not isinstance(value, str):
        raise InvalidInput(f"not text: {_shown(value)}", field=field, allowed="a string")
    if "\0" in value:
        raise InvalidInput(f"contains NUL: {_shown(value)}", field=field, allowed="text without NUL")
    if value.isascii():
        size = len(value)
    else:
        try:
            size = len(value.encode())
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"contains a lone surrogate: {_shown(value)}", field=field, allowed="valid Unicode text"
            ) from error
    if max_bytes is not None and size > max_bytes:
        raise InvalidInput(f"is {size} bytes long", field=field, allowed=f"at most {max_bytes} bytes")
    return value


def escape_text(value: object, max_bytes: int | None = None) -> str:
    """Any value as text the database can hold; for failure text, which must never be refused.

    NUL and lone surrogates become visible escapes; what is over `max_bytes` is cut at a character.
    """
    try:
        text = str(value)
    except Exception:  # the user's own __str__ may do anything, and the failure must still be recorded
        text = object.__repr__(value)
    data = text.replace("\0", "\\x00").encode(errors="backslashreplace")
    return data[:max_bytes].decode(errors="ignore")


def check_key(value: object, field: str = "idempotency_key") -> str | None:
    """An idempotency key of at most 512 bytes; empty text is the same as none."""
    if value is None:
        return None
    return check_text(value, field, KEY_MAX_BYTES) or None


def check_lane(value: object, field: str = "lane_id") -> str:
    """A lane name: 1 to 64 printable ASCII bytes."""
    allowed = f"1 to {LANE_MAX_BYTES} bytes of printable ASCII"
    text = check_text(value, field, None)
    if not text:
        raise InvalidInput("Empty", field=field, allowed=allowed)
    data = text.encode()
    if len(data) > LANE_MAX_BYTES:
        raise InvalidInput(f"TooLong({len(data)})", field=field, allowed=allowed)
    if not (text.isascii() and text.isprintable()):
        index = next(i for i, byte in enumerate(data) if not 0x20 <= byte <= 0x7E)
        raise InvalidInput(f"NonPrintable({index}): {_shown(text)}", field=field, allowed=allowed)
    return text


def _has_space_or_control(text: str) -> bool:
    if text.isascii() and text.isprintable() and " " not in text:
        return False
    # Cs: a lone surrogate has no bytes at all, so it can never be part of a stored name.
    return any(char.isspace() or category(char) in ("Cc", "Cs") for char in text)


def check_worker(value: object, field: str = "worker_id") -> str:
    """A worker id or worker instance id: 1 to 256 bytes, no whitespace, control character or vertical bar."""
    text = check_text(value, field)
    if not text:
        raise InvalidInput("is empty", field=field, allowed=f"1 to {TEXT_MAX_BYTES} bytes")
    if "|" in text or _has_space_or_control(text):
        raise InvalidInput(
            f"contains a forbidden character: {_shown(text)}",
            field=field,
            allowed="no whitespace, control character or vertical bar",
        )
    return text


def check_tag_key(value: object, field: str = "key") -> str:
    """A tag key for the point operations: `namespace.field` in lower case."""
    if isinstance(value, str) and _TAG_KEY.fullmatch(value):
        return check_text(value, field)
    raise InvalidInput(
        f"not a tag key: {_shown(value)}",
        field=field,
        allowed="a lower-case namespace, a dot and a lower-case field, such as team.owner",
    )


def check_tags(value: Mapping[str, str] | None, field: str = "tags") -> dict[str, str]:
    """The tags of a new execution, as given: any text to any text. The key rule does not apply here."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidInput(f"not a mapping: {_shown(value)}", field=field, allowed="text keys and text values")
    return {
        check_text(key, f"{field} key", None): check_text(item, f"{field}[{_shown(key)}]", None)
        for key, item in value.items()
    }


def required_capabilities(value: object) -> tuple[str, ...]:
    """What an execution requires, sorted and without duplicates; absent means nothing is required."""
    return _capabilities(value, "required")


def worker_capabilities(value: object) -> tuple[str, ...]:
    """What a worker offers, sorted and without duplicates."""
    return _capabilities(value, "worker")


def _capabilities(value: object, side: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple | AbstractSet):
        raise ValidationFailed("invalid_capabilities", f"{side}:not_array")
    for token in value:
        if not isinstance(token, str):
            problem = "non_string_token"
        elif not token:
            problem = "empty_token"
        elif "," in token:
            problem = "comma_in_token"
        elif _has_space_or_control(token):
            problem = "control_or_whitespace"
        else:
            continue
        raise ValidationFailed("invalid_capabilities", f"{side}:{problem}")
    tokens = tuple(sorted(set(value)))
    if len(tokens) > MAX_CAPABILITIES:
        raise ValidationFailed("invalid_capabilities", f"{side}:too_many_tokens")
    if len(",".join(tokens).encode()) > MAX_CAPABILITY_BYTES:
        raise ValidationFailed("invalid_capabilities", f"{side}:too_many_bytes")
    return tokens


def capability_hash(tokens: Iterable[str]) -> str:
    """A short fingerprint of a capability set, for logs and audit; not for matching.

    FNV-1a over the sorted comma-joined tokens, the halves folded together.
    """
    value = 0xCBF29CE484222325
    for byte in ",".join(sorted(set(tokens))).encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFF_FFFF_FFFF_FFFF
    return f"{value >> 32 ^ value & 0xFFFF_FFFF:08x}"
