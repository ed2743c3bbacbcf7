"""An engine inside middlewares.

The layered engine is a copy of the engine, on the same connections, whose public coroutines are replaced by functions
that pass the `call` hooks and then call the original. They are found by inspecting the class, so operations that are
added later pass the hooks too.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flowfabric.engine import Engine
from flowfabric.errors import InvalidInput
from flowfabric.middleware.base import Middleware, chain_call, check_middlewares, overriding

__all__ = ["layer"]


def layer(engine: Engine, middlewares: Iterable[Middleware]) -> Engine:
    """The same engine with the `call` hooks around every public operation; `engine` itself if there are none.

    An operation is reported once, under the name it was called by, whatever it calls inside. Both engines share one
    connection: closing either closes both.
    """
    if not isinstance(engine, Engine):
        raise InvalidInput(f"got {type(engine).__name__}", field="engine", allowed="an Engine")
    hooks = overriding(check_middlewares(middlewares), "call")
    if not hooks:
        return engine
    layered = copy.copy(engine)
    for name, member in inspect.getmembers_static(type(engine)):
        if not name.startswith("_") and inspect.iscoroutinefunction(member):
            # Bound to the engine below: the operations it calls inside are not reported again.
            setattr(layered, name, _operation(name, getattr(engine, name), hooks))
    return layered


def _operation(name: str, inner: Callable[..., Any], hooks: Sequence[Middleware]) -> Callable[..., Any]:
    @functools.wraps(inner)
    async def operation(*args: Any, **kwargs: Any) -> Any:
        return await chain_call(hooks, name, lambda: inner(*args, **kwargs))()

    return operation
