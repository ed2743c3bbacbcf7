"""Waits of handlers: open and settle them under a name, park, and list them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.batch import raised
from flowfabric.engine.checks import (
    check_batch,
    check_filled,
    check_int,
    check_limit,
    check_list,
    check_word,
    parse_time_cursor,
    time_cursor,
    to_json,
)
from flowfabric.engine.suspensions import BEHAVIORS, REASONS
from flowfabric.engine.waitpoints import waitpoint_refused
from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_lane, check_text, moment
from flowfabric.values.conditions import Condition, check_condition, condition_to_json
from flowfabric.values.ids import ExecutionId, mint_uuid, parse_execution_id, parse_uuid
from flowfabric.values.lease import Fence, Handle
from flowfabric.values.page import Page
from flowfabric.values.policies import TimeoutBehavior
from flowfabric.values.step import Parked
from flowfabric.values.wait import OpenWait, ReasonCode, Wait, WaitResult

_MAX_SCHEMA = 65_536  # bytes


class Waits(Operations):
    """open_wait, settle_wait, park, list_waits."""

    async def open_wait(
        self,
        authority: Handle | Fence,
        name: str,
        n: int,
        keys: Sequence[str],
        within: timedelta | None,
        payload_schema: str | None = None,
    ) -> OpenWait:
        """Make the waitpoints of a task's wait and record them under a name, or return those recorded before.

        `payload_schema` is the JSON schema that senders check payloads with.
        """
        fences = self._fences([authority])
        bound = [check_filled(key, "keys") for key in check_list(keys, "keys")]
        if not bound:
            raise InvalidInput("empty", field="keys", allowed="at least one key")
        if not isinstance(within, timedelta | None):
            raise InvalidInput(f"got {type(within).__name__}", field="within", allowed="a timedelta or None")
        row = await self._row(
            statements.OPEN_WAIT,
            *fences.first,
            check_filled(name, "name", 512),
            check_int(n, "n", 0, 2**31 - 1),
            [mint_uuid() for _ in bound],
            bound,
            None if within is None else max(within / timedelta(milliseconds=1), 0.0),
            _schema(payload_schema),
            repeatable=True,
        )
        if row["code"] != "ok":
            raise waitpoint_refused(row, fences.execution_id(0), None)
        return rows.open_wait(row, n)

    async def settle_wait(
        self,
        authority: Handle | Fence,
        name: str,
        n: int,
        condition: Condition,
        *,
        reason_code: ReasonCode = "waiting_for_signal",
        deadline: datetime | None = None,
        give_up: bool = False,
        payload_schema: str | None = None,
    ) -> WaitResult:
        """Return the outcome of a task's wait so far, and record it once it is final. `give_up` ends an open wait.

        A wait that stays open gets this `payload_schema`.
        """
        fences = self._fences([authority])
        row = await self._row(
            statements.SETTLE_WAIT,
            *fences.first,
            check_filled(name, "name", 512),
            check_int(n, "n", 0, 2**31 - 1),
            mint_uuid(),
            to_json(condition_to_json(check_condition(condition, has_deadline=True))),
            check_word(reason_code, REASONS, "reason_code"),
            None if deadline is None else moment(deadline, "deadline"),
            bool(give_up),
            _schema(payload_schema),
            repeatable=True,
        )
        if row["code"] != "ok":
            raise waitpoint_refused(row, fences.execution_id(0), None)
        return rows.wait_result(row)

    async def park(
        self,
        authority: Handle | Fence,
        *,
        until: datetime | None = None,
        ends_of: Sequence[ExecutionId] = (),
        signals_on: Mapping[UUID, int] | None = None,
        conditions: Mapping[UUID, Condition] | None = None,
        timeout_at: datetime | None = None,
        timeout_behavior: TimeoutBehavior = "auto_resume_with_timeout_signal",
        reason_code: ReasonCode = "waiting_for_signal",
        suspension_id: UUID | None = None,
    ) -> Parked:
        """Give the lease back until the first of several things happens; then a worker continues the same attempt.

        With `ends_of`, other executions, the execution becomes `waiting_children`; else with `until`, a time, it
        becomes `delayed`; else `suspended`, with the timeout, its behaviour and the reason given here. `signals_on` has
        pending waitpoints of the execution, each with the number of signals the caller knows; in every state the next
        signal on one of them wakes it. `conditions` fills `required_signal_names` of the waitpoints.

        The lease is kept if one of these things has happened already: the time is due, one of the executions has ended
        or a signal has arrived.
        """
        check_batch(ends_of, "ends_of")
        waitpoints = dict(signals_on or {})
        check_batch(list(waitpoints), "signals_on")
        if until is None and not ends_of and not waitpoints:
            raise InvalidInput("nothing to wait for", field="until", allowed="a time, or executions in `ends_of`")
        fences = self._fences([authority])
        targets = [parse_execution_id(one, "ends_of") for one in ends_of]
        if fences.execution_id(0) in targets:
            raise InvalidInput("an execution cannot wait for its own end", field="ends_of")
        row = await self._row(
            statements.PARK,
            *fences.first,
            None if until is None else moment(until, "until"),
            *self._all_at(targets),
            [parse_uuid(waitpoint, "signals_on") for waitpoint in waitpoints],
            [check_int(seen, "signals_on", 0, 2**31 - 1) for seen in waitpoints.values()],
            [_condition((conditions or {}).get(waitpoint)) for waitpoint in waitpoints],
            None if timeout_at is None else moment(timeout_at, "timeout_at"),
            check_word(timeout_behavior, BEHAVIORS, "timeout_behavior"),
            check_word(reason_code, REASONS, "reason_code"),
            mint_uuid() if suspension_id is None else parse_uuid(suspension_id, "suspension_id"),
        )
        if row["code"] != "ok":
            raise raised(row, fences.execution_id(0))
        return Parked(fences.execution_id(0), row["detail"] is None, row["detail"])

    async def list_waits(
        self,
        *,
        lane_id: str | None = None,
        namespace: str | None = None,
        waitpoint_key: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[Wait, str]:
        """Return the waitpoints that accept signals, of all partitions, the longest waiting first."""
        at, uuid = parse_time_cursor(cursor)
        size = check_limit(limit, 1000)
        if size == 0:
            return Page(())
        found = await self._fetch(
            statements.LIST_WAITS,
            at,
            uuid,
            size,
            None if lane_id is None else check_lane(lane_id),
            None if namespace is None else check_text(namespace, "namespace"),
            None if waitpoint_key is None else check_text(waitpoint_key, "waitpoint_key"),
            repeatable=True,
        )
        waits = [rows.wait(row) for row in found]
        return first_page(waits, size, lambda last: time_cursor(last.since, last.waitpoint_id))


def _schema(value: str | None) -> str | None:
    return None if value is None else check_text(value, "payload_schema", _MAX_SCHEMA)


def _condition(value: Condition | None) -> str | None:
    return None if value is None else to_json(condition_to_json(check_condition(value, has_deadline=True)))
