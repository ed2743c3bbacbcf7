"""An engine inside middlewares.

What passes the hooks is found by looking at the engine, so an operation that is added later passes them too; everything
else is the engine's own, on the same state.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flowfabric.engine import Engine
from flowfabric.errors import InvalidInput
from flowfabric.middleware.base import Middleware, chain_call, check_middlewares, overriding

__all__ = ["layer"]


def layer(engine: Engine, middlewares: Iterable[Middleware]) -> Engine:
    """The same engine with the `call` hooks around every public operation; `engine` itself where there are none.

    An operation is reported once, under the name it was called by, whatever it calls inside. Both engines share one
    connection: closing either closes both.
    """
    if not isinstance(engine, Engine):
        raise InvalidInput(f"got {type(engine).__name__}", field="engine", allowed="an Engine")
    hooks = overriding(check_middlewares(middlewares), "call")
    if not hooks:
        return engine
    base = type(engine)
    members: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}
    for name, member in inspect.getmembers_static(base):
        if name.startswith("_"):
            continue
        if inspect.iscoroutinefunction(member):
            members[name] = _operation(engine, name, member, hooks)
        elif isinstance(member, classmethod):
            # What makes another engine makes a plain one: these layers belong to this engine.
            members[name] = staticmethod(getattr(base, name))
    made: type[Engine] = type(f"Layered{base.__name__}", (base,), members)
    layered = made.__new__(made)
    layered.__dict__ = engine.__dict__
    return layered


def _operation(
    engine: Engine, name: str, method: Callable[..., Any], hooks: Sequence[Middleware]
) -> Callable[..., Any]:
    # Asked of the engine below, not of the layered one: what an operation calls inside is not reported again.
    inner = getattr(engine, name)

    @functools.wraps(method)
    async def operation(self: Engine, *args: Any, **kwargs: Any) -> Any:
        return await chain_call(hooks, name, lambda: inner(*args, **kwargs))()

    return operation
