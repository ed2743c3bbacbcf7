"""Signals as handlers see them, what a handler asks for when it waits, and links that carry the right to signal."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar
from uuid import UUID

import msgspec
from msgspec import Struct

from flowfabric._json_types import ENCODER
from flowfabric._misfits import non_finite, type_name, why_not_written
from flowfabric.conditions import Condition, Single, check_condition, named_keys, on
from flowfabric.contracts import CannotDecode, Codecs, ValueType
from flowfabric.errors import InvalidInput
from flowfabric.ids import TEXT_MAX_BYTES, ExecutionId, check_text
from flowfabric.models import ReasonCode, TimeoutBehavior, WaitpointToken
from flowfabric.policies import Duration, duration

P = TypeVar("P")
OnTimeout: TypeAlias = Literal["raise", "fail", "cancel", "expire", "escalate"]
Reason: TypeAlias = Literal["signal", "approval", "callback", "tool_result", "operator_review"]
_BEHAVIORS: Final[dict[str, TimeoutBehavior]] = {
    "raise": "auto_resume_with_timeout_signal",
    "fail": "fail",
    "cancel": "cancel",
    "expire": "expire",
    "escalate": "escalate",
}
_REASONS: Final[dict[str, ReasonCode]] = {
    "signal": "waiting_for_signal",
    "approval": "waiting_for_approval",
    "callback": "waiting_for_callback",
    "tool_result": "waiting_for_tool_result",
    "operator_review": "waiting_for_operator_review",
}


class Raise:
    """The default of `default`: there is none."""

    def __repr__(self) -> str:
        return "raise"


RAISE: Final = Raise()


class Signal(Struct, Generic[P], frozen=True, kw_only=True):
    """A signal that a handler waited for."""

    name: str
    payload: P
    key: str
    signal_id: UUID
    category: str
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at: datetime


class _Stored(Struct):
    signal_id: UUID
    name: str
    key: str
    category: str
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at: datetime
    payload: str | None
    payload_encoding: str


_STORED: Final = msgspec.json.Decoder(list[_Stored])


class WaitRequest:
    """What a handler waits for, checked."""

    __slots__ = ("behavior", "condition", "default", "is_single", "keys", "name", "payload", "reason", "timeout")

    def __init__(
        self,
        what: Condition | str,
        *,
        name: str | None = None,
        payload: Any = Any,
        timeout: Duration | None = None,
        default: Any = RAISE,
        on_timeout: str = "raise",
        reason: str = "signal",
    ) -> None:
        self.timeout: timedelta | None = None if timeout is None else duration(timeout, "timeout")
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise InvalidInput(f"got {timeout!r}", field="timeout", allowed="more than no time")
        chosen = on(what) if isinstance(what, str) else what
        self.condition = check_condition(chosen, has_deadline=self.timeout is not None, field="what")
        self.is_single = isinstance(self.condition, Single)
        self.keys = named_keys(self.condition) or ["operator"]
        self.name = _default_name(self.keys) if name is None else check_text(name, "name")
        self.payload = ValueType.of(payload)
        if on_timeout not in _BEHAVIORS:
            raise InvalidInput(f"got {on_timeout!r}", field="on_timeout", allowed=", ".join(_BEHAVIORS))
        if reason not in _REASONS:
            raise InvalidInput(f"got {reason!r}", field="reason", allowed=", ".join(_REASONS))
        if not isinstance(default, Raise) and on_timeout != "raise":
            raise InvalidInput(f"with on_timeout={on_timeout!r}", field="default", allowed="either one or the other")
        self.default = default
        self.behavior: TimeoutBehavior = _BEHAVIORS[on_timeout]
        self.reason: ReasonCode = _REASONS[reason]

    def signals(self, stored: bytes | None, codecs: Codecs) -> list[Signal[Any]]:
        """The signals that ended the wait, with their payloads in the type asked for."""
        found = _STORED.decode(stored or b"[]")
        return [
            Signal(
                name=one.name,
                payload=self._payload(one, codecs),
                key=one.key,
                signal_id=one.signal_id,
                category=one.category,
                source_type=one.source_type,
                source_identity=one.source_identity,
                correlation_id=one.correlation_id,
                accepted_at=one.accepted_at,
            )
            for one in found
        ]

    def _payload(self, one: _Stored, codecs: Codecs) -> Any:
        what = f"payload of signal {one.name!r}"
        try:
            data = None
            if one.payload is not None:
                data = codecs.open(base64.b64decode(one.payload), one.payload_encoding)
            return self.payload.decode(data)
        except CannotDecode as error:
            raise CannotDecode(error.problem, what=what) from error


def _default_name(keys: Sequence[str]) -> str:
    return " ".join(keys).encode()[:TEXT_MAX_BYTES].decode(errors="ignore")


# Links

_DIGEST: Final = re.compile("[0-9a-f]{64}")


class Callback(Struct, frozen=True):
    """Where a callback goes, and the right to signal there."""

    execution_id: ExecutionId
    waitpoint_id: UUID
    token: WaitpointToken


def callback_text(execution_id: ExecutionId, waitpoint_id: UUID, token: WaitpointToken | str) -> str:
    """Execution, waitpoint and token as one text that is safe in a link. It is the right to signal: treat it as one."""
    raw = token.reveal() if isinstance(token, WaitpointToken) else token
    kid, _, digest = raw.partition(":")
    data = struct.pack(">H", execution_id.partition) + execution_id.uuid.bytes + waitpoint_id.bytes
    if not kid.isascii() or not _DIGEST.fullmatch(digest) or not kid:
        raise InvalidInput("not a token", field="token", allowed="the token of a waitpoint")
    data += bytes.fromhex(digest) + kid.encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def parse_callback(text: object) -> Callback:
    """A callback from its text; `InvalidInput` when it is none. The token is verified when a signal is delivered."""
    wrong = InvalidInput("not a callback", field="callback", allowed="what callback_text gives")
    if not isinstance(text, str) or not 90 <= len(text) <= 200 or not text.isascii():
        raise wrong
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        (partition,) = struct.unpack(">H", data[:2])
        kid, digest = data[66:].decode("ascii"), data[34:66].hex()
        if (
            len(data) < 67
            or callback_text(
                execution_id := ExecutionId.of(partition, UUID(bytes=data[2:18])),
                waitpoint_id := UUID(bytes=data[18:34]),
                token := WaitpointToken(f"{kid}:{digest}"),
            )
            != text
        ):
            raise wrong
    except (ValueError, binascii.Error, struct.error):
        raise wrong from None
    return Callback(execution_id, waitpoint_id, token)


def encode_payload(payload: Any, codecs: Codecs) -> tuple[bytes | None, str]:
    """A signal's payload as it is sent: JSON, sealed as the app's other data. Its type is for the receiver to say."""
    if payload is None:
        return None, "json"
    try:
        encoded, problem = ENCODER.encode(payload), non_finite(payload)
    except Exception as error:
        problem = f"{type_name(payload)} cannot be written as JSON ({why_not_written(error)})"
    if problem is not None:
        raise InvalidInput(problem, field="payload", allowed="what has a JSON form")
    sealed, encoding = codecs.seal(encoded)
    return sealed, encoding or "json"


def common_key(keys: Sequence[str], given: str | None) -> str:
    """The one key that is meant; `InvalidInput` lists them when that is not clear."""
    if given is not None:
        return given
    if len(keys) != 1:
        raise InvalidInput(
            f"it waits at {len(keys)} waitpoints", field="key", allowed=", ".join(sorted(keys)) or "none"
        )
    return keys[0]
