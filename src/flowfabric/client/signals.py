"""Signals: list waitpoints, signal, approve, reject, resume, and receive web callbacks."""

from __future__ import annotations

from typing import Any, Unpack
from uuid import UUID

from flowfabric.bridges.answers import deliver_checked
from flowfabric.bridges.callbacks import Received, receive
from flowfabric.client.base import ClientBase
from flowfabric.contracts.waits import encode_payload
from flowfabric.engine.signals import SignalFields
from flowfabric.errors import InvalidInput
from flowfabric.values.callback import parse_callback
from flowfabric.values.durations import Duration, duration
from flowfabric.values.ids import ExecutionId, mint_uuid, parse_execution_id
from flowfabric.values.page import Page
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.wait import PendingWaitpoint, Wait


class Signalling(ClientBase):
    """Signals executions that wait."""

    async def waits(
        self,
        *,
        lane: str | None = None,
        namespace: str | None = None,
        key: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Wait, str]:
        """One page of the waitpoints that can be signalled, of all executions, longest waiting first."""
        return await self.engine.list_waits(
            lane_id=lane, namespace=namespace, waitpoint_key=key, limit=limit, cursor=cursor
        )

    async def waitpoints_of(self, execution_id: str | ExecutionId) -> list[PendingWaitpoint]:
        """The waitpoints of an execution that can be signalled now."""
        found: list[PendingWaitpoint] = []
        after: UUID | None = None
        while True:
            page = await self.engine.list_pending_waitpoints(parse_execution_id(execution_id), after=after, limit=1000)
            found += page.items
            after = page.next_cursor
            if after is None:
                return found

    async def signal(
        self,
        execution_id: str | ExecutionId,
        key: str | None = None,
        name: str = "signal",
        payload: Any = None,
        *,
        source_type: str = "client",
        source_identity: str = "",
        idempotency_key: str | None = None,
    ) -> Accepted | DuplicateSignal:
        """Send a signal to an execution; `key` names the waitpoint if it has several.

        `PayloadRefused` if the payload does not fit the type that the task waits for.
        """
        return await self._answer(
            parse_execution_id(execution_id),
            key,
            payload,
            signal_name=name,
            source_type=source_type,
            source_identity=source_identity,
            idempotency_key=idempotency_key,
        )

    async def approve(
        self, execution_id: str | ExecutionId, key: str | None = None, *, by: str = "", payload: Any = None
    ) -> Accepted | DuplicateSignal:
        """Send an execution the signal `approved` as an operator; `by` names who decided. See `signal`."""
        return await self._decide(execution_id, key, "approved", by, payload)

    async def reject(
        self,
        execution_id: str | ExecutionId,
        key: str | None = None,
        *,
        by: str = "",
        payload: Any = None,
        reason: str | None = None,
    ) -> Accepted | DuplicateSignal:
        """Send an execution the signal `rejected` as an operator; `by` names who decided. See `signal`.

        `reason` is the field `reason` of the payload.
        """
        if reason is not None:
            if not isinstance(payload, dict | None) or "reason" in (payload or {}):
                raise InvalidInput(
                    "given with a payload that has one, or has no fields", field="reason", allowed="one of them"
                )
            payload = {**(payload or {}), "reason": reason}
        return await self._decide(execution_id, key, "rejected", by, payload)

    async def _decide(
        self, execution_id: str | ExecutionId, key: str | None, name: str, by: str, payload: Any
    ) -> Accepted | DuplicateSignal:
        return await self._answer(
            parse_execution_id(execution_id),
            key,
            payload,
            signal_name=name,
            signal_category="approval",
            source_type="operator",
            source_identity=by,
            idempotency_key=f"approval:{name}:{by}",
            target_scope="execution",
        )

    async def _answer(
        self, target: ExecutionId, key: str | None, value: Any, **signal: Unpack[SignalFields]
    ) -> Accepted | DuplicateSignal:
        plain, signal["payload"], encoding = encode_payload(value, self.codecs, target)
        signal["payload_encoding"] = encoding
        signal["signal_id"] = mint_uuid()  # the same in the second delivery
        return await deliver_checked(
            lambda checked: self.engine.try_signal(target, key, checked=checked, **signal),
            plain,
            key=f"signal {key}",
            execution_id=target,
        )

    async def resume(self, execution_id: str | ExecutionId, delay: Duration = 0) -> None:
        """Resume a suspended execution without a signal, whatever it waits for."""
        await self.engine.resume_execution(parse_execution_id(execution_id), "operator", duration(delay, "delay"))

    async def receive(
        self,
        callback: str,
        body: bytes = b"",
        *,
        name: str = "callback",
        source_type: str = "callback",
        source_identity: str = "",
        idempotency_key: str | None = None,
    ) -> Received:
        """Handle a web callback: `callback` is the text of the link, `body` the request's body (JSON).

        Never raises for errors of the sender: `Received` has the HTTP status and body of the response.
        """
        return await receive(
            self.engine,
            callback,
            body,
            name=name,
            source_type=source_type,
            source_identity=source_identity,
            idempotency_key=idempotency_key,
            codecs=self.codecs,
        )

    async def look(self, callback: str) -> PendingWaitpoint | None:
        """The waitpoint that a callback's link signals, or None if the link is invalid or has expired."""
        try:
            parsed = parse_callback(callback)
        except InvalidInput:
            return None
        if await self.engine.probe_waitpoint(parsed.execution_id, parsed.waitpoint_id, parsed.token) != "ok":
            return None
        kids = await self.engine.list_waitpoint_hmac_kids()
        if parsed.token.kid not in (kids.current_kid, *(one.kid for one in kids.verifying)):
            return None
        found = await self.waitpoints_of(parsed.execution_id)
        return next((one for one in found if one.waitpoint_id == parsed.waitpoint_id), None)
