"""An engine inside middlewares.

The layered engine is a copy of the engine, on the same connections, whose public coroutines are replaced by functions
that pass the hooks `call` and `claim` and then call the original. They are found by inspecting the class, so operations
that are added later pass the hooks too.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from flowfabric.engine import Engine
from flowfabric.errors import InvalidInput
from flowfabric.middleware.base import Middleware, chain_call, chain_claim, check_middlewares, overriding

__all__ = ["layer"]

# The operations that claim, and the first argument of each, which has its lanes.
_CLAIMS: Final = {"claim": "lane_id", "claim_many": "lane_id", "claim_lanes": "shares", "claim_for_worker": "lane_id"}


def layer(engine: Engine, middlewares: Iterable[Middleware]) -> Engine:
    """The same engine with the hooks around every public operation (`claim`: those that claim); itself without any.

    An operation is reported once, under the name it was called by, whatever it calls inside. Both engines share one
    connection: closing either closes both.
    """
    if not isinstance(engine, Engine):
        raise InvalidInput(f"got {type(engine).__name__}", field="engine", allowed="an Engine")
    given = check_middlewares(middlewares)
    hooks, claim_hooks = overriding(given, "call"), overriding(given, "claim")
    if not hooks and not claim_hooks:
        return engine
    layered = copy.copy(engine)
    for name, member in inspect.getmembers_static(type(engine)):
        if not name.startswith("_") and inspect.iscoroutinefunction(member):
            # Bound to the engine below: the operations it calls inside are not reported again.
            inner = getattr(engine, name)
            if name in _CLAIMS and claim_hooks:
                inner = _claim(_CLAIMS[name], inner, claim_hooks)
            setattr(layered, name, _operation(name, inner, hooks))
    return layered


def _claim(argument: str, inner: Callable[..., Any], hooks: Sequence[Middleware]) -> Callable[..., Any]:
    @functools.wraps(inner)
    async def claim(*args: Any, **kwargs: Any) -> Any:
        asked = args[0] if args else kwargs.get(argument, "default")
        lanes = tuple(asked) if isinstance(asked, Mapping) else (asked,)
        return await chain_claim(hooks, lanes, lambda: inner(*args, **kwargs))()

    return claim


def _operation(name: str, inner: Callable[..., Any], hooks: Sequence[Middleware]) -> Callable[..., Any]:
    @functools.wraps(inner)
    async def operation(*args: Any, **kwargs: Any) -> Any:
        return await chain_call(hooks, name, lambda: inner(*args, **kwargs))()

    return operation
