"""Signals: delivered to a waitpoint with its token, or by a trusted client to the waitpoint with a key."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Required, Self, TypedDict, Unpack
from uuid import UUID

import asyncpg
from msgspec import Struct

from flowfabric._postgres import rows, statements
from flowfabric._postgres.refusals import refusal
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.batch import raised
from flowfabric.engine.checks import (
    check_batch,
    check_duration,
    check_filled,
    check_int,
    check_limit,
    check_token,
    optional_bytes,
)
from flowfabric.errors import InvalidInput, NotFound, ValidationFailed
from flowfabric.values.checks import check_lane, check_text, escape_text, moment
from flowfabric.values.ids import ExecutionId, mint_uuid, parse_execution_id, parse_uuid
from flowfabric.values.lease import Fence, Handle
from flowfabric.values.page import Page
from flowfabric.values.signal import Accepted, DuplicateSignal, ReceivedSignal, RecordedSignal, Unchecked
from flowfabric.values.wait import WaitpointToken

DEDUP_TTL = timedelta(days=1)
_MAXLEN = 1000
_WHY_MAX = 1024
_SCOPES = ("waitpoint", "execution")


class SignalFields(TypedDict, total=False):
    """The keyword arguments of `signal_execution`."""

    signal_name: Required[str]
    source_type: Required[str]
    source_identity: str
    signal_category: str
    signal_id: UUID | None
    payload: bytes | None
    payload_encoding: str
    correlation_id: str | None
    idempotency_key: str | None
    target_scope: str
    dedup_ttl: timedelta
    resume_delay: timedelta | None
    max_signals_per_execution: int | None
    signal_maxlen: int


class Signals(Operations):
    """deliver_signal, deliver_approval_signal, signal_execution, refuse_signals, observe_signals, read_signals.

    A payload is bytes here, and recorded as it is: the caller checks it, or else the worker that decodes it.
    `try_deliver` and `try_signal` return the JSON schema that it has to fit, if there is one the caller did not check.
    """

    async def deliver_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: UUID,
        waitpoint_token: WaitpointToken | str,
        *,
        signal_name: str,
        source_type: str,
        source_identity: str = "",
        signal_category: str = "external",
        signal_id: UUID | None = None,
        payload: bytes | None = None,
        payload_encoding: str = "json",
        correlation_id: str | None = None,
        idempotency_key: str | None = None,
        target_scope: str = "waitpoint",
        created_at: datetime | None = None,
        dedup_ttl: timedelta = DEDUP_TTL,
        resume_delay: timedelta | None = None,
        max_signals_per_execution: int | None = None,
        signal_maxlen: int = _MAXLEN,
    ) -> Accepted | DuplicateSignal:
        """Deliver a signal to a waitpoint. Raises `ValidationFailed` of kind `invalid_token` for a wrong token.

        It can be repeated with the same `signal_id` or `idempotency_key`: the signal is accepted once.
        """
        target, token = parse_execution_id(execution_id), check_token(waitpoint_token)
        signal = _NewSignal(
            signal_id=signal_id,
            signal_name=signal_name,
            signal_category=signal_category,
            source_type=source_type,
            source_identity=source_identity,
            payload=payload,
            payload_encoding=payload_encoding,
            correlation_id=correlation_id,
            idempotency_key=idempotency_key,
            target_scope=target_scope,
            created_at=created_at,
            dedup_ttl=dedup_ttl,
            resume_delay=resume_delay,
            max_signals_per_execution=max_signals_per_execution,
            signal_maxlen=signal_maxlen,
        ).checked()
        return _recorded(await self._deliver(target, waitpoint_id, token, None, signal, None))

    async def try_deliver(
        self,
        execution_id: ExecutionId,
        waitpoint_id: UUID,
        waitpoint_token: WaitpointToken | str,
        *,
        checked: bytes = b"",
        **signal: Unpack[SignalFields],
    ) -> Accepted | DuplicateSignal | Unchecked:
        """`deliver_signal`, or `Unchecked` if the wait has a schema whose SHA-256 is not `checked`."""
        target, token = parse_execution_id(execution_id), check_token(waitpoint_token)
        return await self._deliver(target, waitpoint_id, token, None, _NewSignal(**signal).checked(), checked)

    async def deliver_approval_signal(
        self,
        execution_id: ExecutionId,
        lane_id: str,
        waitpoint_id: UUID,
        *,
        signal_name: str,
        idempotency_suffix: str,
        signal_dedup_ttl: timedelta = DEDUP_TTL,
        source_identity: str = "",
        maxlen: int = _MAXLEN,
        max_signals_per_execution: int | None = None,
    ) -> Accepted | DuplicateSignal:
        """Deliver an operator's decision. The caller has authenticated the operator; no token is needed."""
        suffix = check_text(idempotency_suffix, "idempotency_suffix")
        target, lane = parse_execution_id(execution_id), check_lane(lane_id)
        signal = _NewSignal(
            signal_name=signal_name,
            signal_category="approval",
            source_type="operator",
            source_identity=source_identity,
            idempotency_key=f"approval:{signal_name}:{suffix}",
            target_scope="execution",
            dedup_ttl=signal_dedup_ttl,
            max_signals_per_execution=max_signals_per_execution,
            signal_maxlen=maxlen,
        ).checked()
        return _recorded(await self._deliver(target, waitpoint_id, None, lane, signal, None))

    async def _deliver(
        self,
        target: ExecutionId,
        waitpoint_id: UUID,
        token: str | None,
        lane: str | None,
        signal: _NewSignal,
        checked: bytes | None,
    ) -> Accepted | DuplicateSignal | Unchecked:
        waitpoint = parse_uuid(waitpoint_id, "waitpoint_id")
        row = await self._row(
            statements.DELIVER_SIGNAL if lane is None else statements.DELIVER_SIGNAL_AS_OPERATOR,
            *self._at(target),
            waitpoint,
            token if lane is None else lane,
            *signal.identity(),
            None if signal.created_at is None else moment(signal.created_at, "created_at"),
            *signal.limits(),
            *([optional_bytes(checked, "checked")] if lane is None else []),
            repeatable=True,  # every repetition has the same id
        )
        match row["code"]:
            case "not_found" if lane is None:  # purged since its token was verified
                raise ValidationFailed("invalid_token", "invalid_token", execution_id=target)
            case "waitpoint_not_found":
                raise NotFound("waitpoint", waitpoint)
            case _:
                return _delivered(row, target)

    async def signal_execution(
        self,
        execution_id: ExecutionId,
        waitpoint_key: str | None = None,
        **signal: Unpack[SignalFields],
    ) -> Accepted | DuplicateSignal:
        """Deliver a signal to the open waitpoint with this key, without a token, for trusted callers.

        `signal` takes the keyword arguments of `deliver_signal`, except `created_at`. Without a key the execution must
        have exactly one: otherwise `InvalidInput` lists them. Raises `NotFound` if none with this key is open, unless
        `idempotency_key` shows that the signal was accepted before.
        """
        return _recorded(await self._signal(execution_id, waitpoint_key, None, **signal))

    async def try_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_key: str | None = None,
        *,
        checked: bytes = b"",
        **signal: Unpack[SignalFields],
    ) -> Accepted | DuplicateSignal | Unchecked:
        """`signal_execution`, or `Unchecked` if the wait has a schema whose SHA-256 is not `checked`."""
        return await self._signal(execution_id, waitpoint_key, checked, **signal)

    async def _signal(
        self,
        execution_id: ExecutionId,
        waitpoint_key: str | None,
        checked: bytes | None,
        **signal: Unpack[SignalFields],
    ) -> Accepted | DuplicateSignal | Unchecked:
        target = parse_execution_id(execution_id)
        key = None if waitpoint_key is None else check_text(waitpoint_key, "key")
        new = _NewSignal(**signal).checked()
        row = await self._row(
            statements.SIGNAL_BY_KEY,
            *self._at(target),
            key,
            *new.identity(),
            *new.limits(),
            optional_bytes(checked, "checked"),
            repeatable=True,
        )
        match row["code"]:
            case "several_open":
                raise InvalidInput(
                    f"the execution waits at {len(row['keys'])} waitpoints", field="key", allowed=", ".join(row["keys"])
                )
            case "waitpoint_not_found":
                found = f"open: {', '.join(row['keys'])}" if row["keys"] else "no waitpoint is open"
                if row["detail"] == "closed":
                    found = f"answered already, or not open now: try again later; {found}"
                raise NotFound("waitpoint", key, detail=found)
            case _:
                return _delivered(row, target)

    async def refuse_signals(self, authority: Handle | Fence, name: str, n: int, why: Mapping[UUID, str]) -> None:
        """Set signals aside that do not fit the task's wait they ended; `why` says so for each, without its payload.

        The wait is open again: its waitpoints and tokens stay, and the signals count for nothing any more.
        """
        fences = self._fences([authority])
        if not isinstance(why, Mapping):
            raise InvalidInput(f"got {type(why).__name__}", field="why", allowed="reasons by the ids of signals")
        check_batch(list(why), "why")
        row = await self._row(
            statements.REFUSE_SIGNALS,
            *fences.first,
            check_filled(name, "name", 512),
            check_int(n, "n", 0, 2**31 - 1),
            [parse_uuid(one, "why") for one in why],
            [escape_text(one, _WHY_MAX) for one in why.values()],
            repeatable=True,
        )
        if row["code"] == "waitpoint_not_found":
            raise NotFound("wait", name)
        if row["code"] != "ok":
            raise raised(row, fences.execution_id(0))

    async def observe_signals(self, authority: Handle | Fence) -> list[ReceivedSignal]:
        """Return the signals that ended the newest suspension of the handle's attempt, in order of acceptance."""
        if not isinstance(authority, Handle | Fence):
            raise InvalidInput(f"got {type(authority).__name__}", field="authority", allowed="a Handle or a Fence")
        target = parse_execution_id(authority.execution_id)
        if authority.attempt_index is None:
            raise InvalidInput("missing", field="attempt_index", allowed="an integer")
        found = await self._fetch(
            statements.OBSERVE_SIGNALS,
            *self._at(target),
            check_int(authority.attempt_index, "attempt_index", 0, 2**31 - 1),
            repeatable=True,
        )
        return [rows.received_signal(row) for row in found]

    async def read_signals(
        self, execution_id: ExecutionId, *, after: int = 0, limit: int = 100
    ) -> Page[RecordedSignal, int]:
        """All signals that an execution accepted, with what each did, in order."""
        target = parse_execution_id(execution_id)
        size = check_limit(limit, 1000)
        if size == 0:
            return Page(())
        found = await self._fetch(
            statements.READ_SIGNALS,
            *self._at(target),
            check_int(after, "after", 0, 2**31 - 1),
            size + 1,
            repeatable=True,
        )
        return first_page([rows.recorded_signal(row) for row in found], size, lambda last: last.ordinal)


class _NewSignal(Struct, frozen=True, kw_only=True):
    """A checked signal to send to the database."""

    signal_name: str
    source_type: str
    source_identity: str = ""
    signal_category: str = "external"
    signal_id: UUID | None = None
    payload: bytes | None = None
    payload_encoding: str = "json"
    correlation_id: str | None = None
    idempotency_key: str | None = None
    target_scope: str = "waitpoint"
    created_at: datetime | None = None
    dedup_ttl: timedelta = DEDUP_TTL
    resume_delay: timedelta | None = None
    max_signals_per_execution: int | None = None
    signal_maxlen: int = _MAXLEN

    def checked(self) -> Self:
        """Return this signal if its name, source and scope are not reserved."""
        if check_filled(self.signal_name, "signal_name").startswith("__"):
            raise InvalidInput("reserved_signal_name", field="signal_name", allowed="not beginning with __")
        if check_filled(self.source_type, "source_type") == "system":
            raise InvalidInput("reserved for the engine", field="source_type", allowed="anything but system")
        if self.target_scope not in _SCOPES:
            raise InvalidInput(f"got {self.target_scope!r}", field="target_scope", allowed=", ".join(_SCOPES))
        return self

    def identity(self) -> tuple[Any, ...]:
        """Return its name, source, payload and keys as columns."""
        return (
            mint_uuid() if self.signal_id is None else parse_uuid(self.signal_id, "signal_id"),
            self.signal_name,
            check_text(self.signal_category, "signal_category"),
            self.source_type,
            check_text(self.source_identity, "source_identity"),
            optional_bytes(self.payload, "payload"),
            check_text(self.payload_encoding, "payload_encoding"),
            None if self.correlation_id is None else check_text(self.correlation_id, "correlation_id", 512),
            None if self.idempotency_key is None else check_text(self.idempotency_key, "idempotency_key", 1100),
            self.target_scope,
        )

    def limits(self) -> tuple[Any, ...]:
        """Return its deduplication window, the resume delay and the limit of stored signals as columns."""
        return (
            check_duration(self.dedup_ttl, "dedup_ttl", least_ms=0),
            None if self.resume_delay is None else check_duration(self.resume_delay, "resume_delay", least_ms=0),
            None
            if self.max_signals_per_execution is None
            else check_int(self.max_signals_per_execution, "max_signals_per_execution", 0, 2**32 - 1),
            check_int(self.signal_maxlen, "signal_maxlen", 0, 2**31 - 1),
        )


def _recorded(answer: Accepted | DuplicateSignal | Unchecked) -> Accepted | DuplicateSignal:
    assert not isinstance(answer, Unchecked)  # only callers that say they check get one
    return answer


def _delivered(row: asyncpg.Record, target: ExecutionId) -> Accepted | DuplicateSignal | Unchecked:
    match row["code"]:
        case "unchecked":
            return Unchecked(row["detail"])
        case "accepted":
            return Accepted(row["signal_id"], row["effect"], row["match_detail"])
        case "duplicate":
            return DuplicateSignal(row["signal_id"], row["detail"])
        case "invalid_token" | "payload_too_large" | "signal_limit_exceeded" as kind:
            raise ValidationFailed(kind, row["detail"] or "", execution_id=target)
        case "invalid_input":
            raise InvalidInput(row["detail"], execution_id=target)  # callers rely on its beginning: lane_mismatch
        case "not_found":
            raise NotFound("execution", target)
        case code:
            raise refusal(code, row["detail"] or "", execution_id=target)
