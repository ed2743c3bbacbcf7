"""Waits and conditions in words, for the commands that list, show and signal them."""

from __future__ import annotations

import json
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
    from flowfabric.values.wait import PendingWaitpoint

# The behaviour at the deadline, as `wait_for` calls it.
_THEN = {"auto_resume_with_timeout_signal": "resume"}
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


def then(behavior: str | None, has_deadline: bool, state: str = "active") -> str:
    """What happens at the deadline."""
    if not has_deadline:
        return ""
    return "close" if state == "pending" else _THEN.get(behavior or "fail", behavior or "fail")


def names(required: Sequence[str], state: str) -> str:
    """The names of the signals it waits for, unknown while it is pending."""
    return ", ".join(_NO_NAME.get(name, name) for name in required) or ("any" if state == "active" else "")


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
