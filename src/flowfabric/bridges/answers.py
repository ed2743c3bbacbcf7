"""Answers are checked where they arrive: against the schema of the wait, before they are delivered.

The database returns the schema with the first delivery, which records nothing; the second delivery says which schema
was checked. This process remembers the schema last seen under each key and checks with it ahead, so that one round trip
is enough for every answer after the first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias
from uuid import UUID

import msgspec

from flowfabric.contracts.payload_check import Misfit, PayloadCheck, check_of
from flowfabric.errors import PayloadRefused, RetriesExhausted
from flowfabric.values.signal import Accepted, DuplicateSignal, Unchecked

Deliver: TypeAlias = Callable[[bytes], Awaitable[Accepted | DuplicateSignal | Unchecked]]
_MOST: Final = 256  # keys whose schema is remembered
_TRIES: Final = 3  # a deployment may change the schema between two deliveries
_lock = threading.Lock()
_last: OrderedDict[str, PayloadCheck] = OrderedDict()


async def deliver_checked(
    deliver: Deliver, payload: bytes | None, *, key: str, execution_id: UUID
) -> Accepted | DuplicateSignal:
    """Deliver an answer if its payload fits; `PayloadRefused` if not, and then nothing is recorded.

    `deliver` makes the call, with the digest of the schema that was checked. `payload` is plain JSON; none is `null`.
    `key` names what is answered, to find the schema that was last seen there.
    """
    check = _remembered(key)
    # A payload that does not fit the remembered schema may fit the one that is stored.
    checked = b"" if check is None or _misfit(check, payload) is not None else check.digest
    for _ in range(_TRIES):
        answer = await deliver(checked)
        if not isinstance(answer, Unchecked):
            return answer
        check = check_of(answer.schema)
        _remember(key, check)
        misfit = _misfit(check, payload)
        if misfit is not None:
            raise PayloadRefused(*misfit, execution_id=execution_id)
        checked = check.digest
    raise RetriesExhausted("the type of the wait keeps changing", execution_id=execution_id)


def _misfit(check: PayloadCheck, payload: bytes | None) -> Misfit | None:
    try:
        value = msgspec.json.decode(payload or b"null")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Misfit("payload", "not JSON", "JSON")
    return check.misfit(value)


def _remembered(key: str) -> PayloadCheck | None:
    with _lock:
        found = _last.get(key)
        if found is not None:
            _last.move_to_end(key)
        return found


def _remember(key: str, check: PayloadCheck) -> None:
    with _lock:
        _last[key] = check
        _last.move_to_end(key)
        if len(_last) > _MOST:
            _last.popitem(last=False)
