"""An engine inside middlewares.

The layered engine is of a class of its own, whose public coroutines pass the hooks `call` and `claim` and then call
those of the engine's class. They are found by inspecting the class, so operations that are added later pass the hooks
too; and a copy of a layered engine, one that is bound to a transaction for example, is layered as well.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

from flowfabric.engine import Engine
from flowfabric.errors import InvalidInput
from flowfabric.middleware.base import Middleware, chain_call, chain_claim, check_middlewares, overriding

__all__ = ["layer"]

# The operations that claim, and the first argument of each, which has its lanes.
_CLAIMS: Final = {"claim": "lane_id", "claim_many": "lane_id", "claim_lanes": "shares", "claim_for_worker": "lane_id"}


def layer(engine: Engine, middlewares: Iterable[Middleware]) -> Engine:
    """The same engine with the hooks around every public operation (`claim`: those that claim); itself without any.

    An operation is reported once, under the name it was called by, whatever it calls inside. Both engines share all
    they have: closing either closes both.
    """
    if not isinstance(engine, Engine):
        raise InvalidInput(f"got {type(engine).__name__}", field="engine", allowed="an Engine")
    given = check_middlewares(middlewares)
    hooks, claim_hooks = overriding(given, "call"), overriding(given, "claim")
    if not hooks and not claim_hooks:
        return engine
    below = type(engine)
    is_inside: ContextVar[bool] = ContextVar("flowfabric_inside", default=False)  # an operation of this layer runs
    members: dict[str, Any] = {"__doc__": below.__doc__, "connect": staticmethod(below.connect)}
    for name, member in inspect.getmembers_static(below):
        if not name.startswith("_") and inspect.iscoroutinefunction(member):
            members[name] = _operation(name, member, hooks, claim_hooks if name in _CLAIMS else (), is_inside)
    layered: Engine = object.__new__(type(below.__name__, (below,), members))
    layered.__dict__ = engine.__dict__
    return layered


def _operation(
    name: str,
    inner: Callable[..., Any],
    hooks: Sequence[Middleware],
    claim_hooks: Sequence[Middleware],
    is_inside: ContextVar[bool],
) -> Callable[..., Any]:
    @functools.wraps(inner)
    async def operation(self: Engine, *args: Any, **kwargs: Any) -> Any:
        if is_inside.get():
            return await inner(self, *args, **kwargs)

        async def proceed() -> Any:
            token = is_inside.set(True)
            try:
                return await inner(self, *args, **kwargs)
            finally:
                is_inside.reset(token)

        last: Callable[[], Awaitable[Any]] = proceed
        if claim_hooks:
            asked = args[0] if args else kwargs.get(_CLAIMS[name], "default")
            lanes = tuple(asked) if isinstance(asked, Mapping) else (asked,)
            last = chain_claim(claim_hooks, lanes, proceed)
        return await chain_call(hooks, name, last)()

    return operation
