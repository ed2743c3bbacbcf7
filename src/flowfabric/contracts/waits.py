"""The checked request of a handler that waits, and the payloads of signals in the requested types."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeAlias, TypeVar
from uuid import UUID

import msgspec
from msgspec import Struct

from flowfabric.contracts.codecs import CannotDecode, Codecs
from flowfabric.contracts.json_types import ENCODER
from flowfabric.contracts.misfits import non_finite, type_name, why_not_written
from flowfabric.contracts.payload_schema import schema_of
from flowfabric.contracts.value_types import ValueType
from flowfabric.errors import InvalidInput
from flowfabric.values.checks import TEXT_MAX_BYTES, check_text
from flowfabric.values.conditions import Condition, Single, check_condition, named_keys, on
from flowfabric.values.durations import Duration, duration
from flowfabric.values.policies import TimeoutBehavior
from flowfabric.values.signal import Signal
from flowfabric.values.wait import ReasonCode

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
    """The default of `default`: raise."""

    def __repr__(self) -> str:
        return "raise"


RAISE: Final = Raise()


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
    """A checked request to wait."""

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
            raise InvalidInput(f"got {timeout!r}", field="timeout", allowed="a positive duration")
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
            raise InvalidInput(f"with on_timeout={on_timeout!r}", field="default", allowed="only one of them")
        self.default = default
        self.behavior: TimeoutBehavior = _BEHAVIORS[on_timeout]
        self.reason: ReasonCode = _REASONS[reason]

    @property
    def payload_schema(self) -> str | None:
        """The JSON schema that senders check payloads with."""
        return schema_of(self.payload)

    def signals(
        self, stored: bytes | None, codecs: Codecs, execution_id: UUID
    ) -> tuple[list[Signal[Any]], dict[UUID, str]]:
        """Return the signals that ended the wait, with their payloads in the requested type; and why others do not fit.

        No payload is the same as `null`.
        """
        fitting: list[Signal[Any]] = []
        misfits: dict[UUID, str] = {}
        for one in _STORED.decode(stored or b"[]"):
            try:
                data = b"null"
                if one.payload is not None:
                    data = codecs.open(base64.b64decode(one.payload), one.payload_encoding, execution_id)
                payload = self.payload.decode(data)
            except CannotDecode as error:
                misfits[one.signal_id] = error.problem
                continue
            fitting.append(
                Signal(
                    name=one.name,
                    payload=payload,
                    key=one.key,
                    signal_id=one.signal_id,
                    category=one.category,
                    source_type=one.source_type,
                    source_identity=one.source_identity,
                    correlation_id=one.correlation_id,
                    accepted_at=one.accepted_at,
                )
            )
        return fitting, misfits


def _default_name(keys: Sequence[str]) -> str:
    return " ".join(keys).encode()[:TEXT_MAX_BYTES].decode(errors="ignore")


def encode_payload(payload: Any, codecs: Codecs, execution_id: UUID) -> tuple[bytes | None, bytes | None, str]:
    """Return a signal's payload as JSON, and as it is sent: sealed like the app's other data, with its encoding."""
    if payload is None:
        return None, None, "json"
    try:
        encoded, problem = ENCODER.encode(payload), non_finite(payload)
    except Exception as error:
        problem = f"{type_name(payload)} cannot be written as JSON ({why_not_written(error)})"
    if problem is not None:
        raise InvalidInput(problem, field="payload", allowed="a value with a JSON form")
    sealed, encoding = codecs.seal(encoded, execution_id)
    return encoded, sealed, encoding or "json"
