"""Waits and conditions in words, for the commands that list, show and signal them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from flowfabric.errors import InvalidInput, NotFound
from flowfabric.values.conditions import (
    AllMet,
    ByName,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    condition_from_json,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowfabric.app.app import App
    from flowfabric.client import AsyncClient
    from flowfabric.engine import Engine
    from flowfabric.values.ids import ExecutionId
    from flowfabric.values.signal import ReceivedSignal
    from flowfabric.values.vector import BlockingReason
    from flowfabric.values.wait import PendingWaitpoint

# The behaviour at the deadline, as `wait_for` calls it. A wait that times out raises NoSignal or returns its default.
_THEN = {"auto_resume_with_timeout_signal": "time out"}
_REASONS = {"paused_by_operator": "waiting for an operator", "waiting_for_worker": "waiting for a worker"}
_DETAILS = {"lease expired, awaiting reclaim": "its worker stopped responding; another one will take it over"}
_EFFECTS = {
    "resume_condition_satisfied": "resumed it",
    "buffered_for_pending_waitpoint": "kept until it waits",
    "appended_to_waitpoint": "kept",
    "deduped": "repeated",
}
_NO_NAME = {"__operator_only__": "none: an operator resumes it", "__timeout_only__": "none: it ends at its deadline"}


def client_of(engine: Engine, app: App | None = None) -> AsyncClient:
    """A client on the connections of a command; with an app, payloads are encoded with its codecs."""
    from flowfabric.app.app import App  # noqa: PLC0415
    from flowfabric.client import AsyncClient  # noqa: PLC0415

    return AsyncClient(engine, app or App())


async def waitpoint_of(engine: Engine, target: ExecutionId, key: str | None) -> PendingWaitpoint:
    """The open waitpoint that is meant: of that key, the one the execution waits at, else the newest."""
    from flowfabric.values.wait import common_key  # noqa: PLC0415

    found = await client_of(engine).waitpoints_of(target)
    wanted = common_key(sorted({one.waitpoint_key for one in found}), key) if found else key
    chosen = [one for one in found if one.waitpoint_key == wanted]
    if not chosen:
        raise NotFound("waitpoint", wanted)
    return max(chosen, key=lambda one: (one.state == "active", one.created_at))


def reason(code: str | None, state: str) -> str:
    """Why it waits; only `pending` before the handler has reached the wait."""
    return state if code is None else code.removeprefix("waiting_for_").replace("_", " ")


def because(detail: str | None, code: BlockingReason | None) -> str | None:
    """Why an execution does not run, in words."""
    if not detail:
        return None if code is None else _REASONS.get(code.value, code.value.replace("_", " "))
    detail = detail.partition(": Traceback ")[0]  # the beginning of one; the failure is shown elsewhere
    detail = re.sub(
        r"\((?:waiting_for_)?([a-z]+(?:_[a-z]+)*)\)", lambda found: f"({found[1].replace('_', ' ')})", detail
    )
    if at := re.fullmatch(r"waitpoint [0-9a-f-]{36}: (?:waiting_for_)?(\w+)", detail):
        return f"waits for {at[1].replace('_', ' ')}"
    detail = re.sub(r"(\d+) dep\(s\) unsatisfied.*", lambda found: f"waits for {_nodes(int(found[1]))}", detail)
    return _DETAILS.get(detail, detail)


def _nodes(count: int) -> str:
    return f"{count} other node{'' if count == 1 else 's'} of its flow"


def effect(word: str) -> str:
    """What a signal did, or how a wait ended, in words."""
    return _EFFECTS.get(word, word.replace("_", " "))


def then(behavior: str | None, has_deadline: bool, state: str = "active") -> str:
    """What happens at the deadline."""
    if not has_deadline:
        return ""
    return "close" if state == "pending" else _THEN.get(behavior or "fail", behavior or "fail")


def at_deadline(behavior: str | None) -> str:
    """The same as a part of a sentence."""
    word = then(behavior, True)
    return "the wait times out (NoSignal, or its default)" if word == "time out" else word


_CANCELLED_BY = {
    "operator_override": "an operator",
    "lease_holder": "its worker",
    "flow_cascade": "its flow",
    "system_timeout": "its deadline",
    "parent": "its parent",
}


def cancelled_by(source: str | None) -> str | None:
    """Who cancelled an execution, in words."""
    return _CANCELLED_BY.get(source or "", source)


def names(required: Sequence[str], state: str) -> str:
    """The names of the signals it waits for, unknown while it is pending."""
    return ", ".join(_NO_NAME.get(name, name) for name in required) or ("any" if state == "active" else "")


def counted(signals: int, refused: int) -> str:
    """How many signals a waitpoint has, and how many of them were set aside."""
    return f"{signals} ({refused} refused)" if refused else str(signals)


def source(signal: ReceivedSignal) -> str:
    """The sender of a signal, as stored with it."""
    return f"{signal.source_type} {signal.source_identity}".rstrip()


def condition(value: Any) -> str:
    """A stored condition in a line."""
    try:
        return _words(condition_from_json(value))
    except InvalidInput:
        return json.dumps(value)


def _words(node: Condition) -> str:
    match node:
        case OperatorOnly():
            return "an operator who resumes it"
        case TimeoutOnly():
            return "its deadline"
        case Single(key, ByName(name)):
            return f"signal {name} at {key}"
        case Single(key):
            return f"a signal at {key}"
        case AllMet(members):
            return ", and ".join(map(_words, members))
        case Count(n, kind, keys, matcher):
            what = f"signals {matcher.name}" if isinstance(matcher, ByName) else "signals"
            places = ", ".join(keys)
            match kind:
                case CountKind.DISTINCT_WAITPOINTS:
                    return f"{what} at {n} of {places}"
                case CountKind.DISTINCT_SIGNALS if n == 1 and not isinstance(matcher, ByName):
                    return f"a signal at {' or '.join(keys)}"
                case CountKind.DISTINCT_SIGNALS:
                    return f"{n} {what} at {places}"
                case CountKind.DISTINCT_SOURCES:
                    return f"{what} from {n} different senders at {places}"
