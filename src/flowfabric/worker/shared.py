"""Shared data: objects that an app provides for a class, made once per worker and injected into handlers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from flowfabric.app.task import Task
from flowfabric.errors import InvalidInput


def check_provided(tasks: Iterable[Task[Any, Any]], provided: Mapping[type, Any]) -> dict[type, Any]:
    """Return the classes that these tasks ask for; `InvalidInput` names a parameter for which nothing is provided."""
    wanted: dict[type, Any] = {}
    for task in tasks:
        for parameter, cls in task.signature.data.items():
            if cls not in provided:
                raise InvalidInput(
                    f"task {task.name} asks for {cls.__qualname__} in {parameter!r} and nothing provides it",
                    field="provide",
                    allowed=f"app.provide({cls.__qualname__}, ...)",
                )
            wanted[cls] = provided[cls]
    return wanted


async def make(stack: contextlib.AsyncExitStack, cls: type, maker: Any) -> Any:
    """Return the object for a class: the object itself, or a function's result; a context manager is entered."""
    if isinstance(maker, cls):
        return maker
    value = maker()
    if inspect.isawaitable(value):
        value = await value
    if inspect.isasyncgen(value) or inspect.isgenerator(value):
        raise InvalidInput(
            f"the maker of {cls.__qualname__} is a generator", field="provide", allowed="contextlib.asynccontextmanager"
        )
    if isinstance(value, contextlib.AbstractAsyncContextManager):
        value = await stack.enter_async_context(value)
    elif isinstance(value, contextlib.AbstractContextManager):
        value = stack.enter_context(value)
    if not isinstance(value, cls):
        raise InvalidInput(
            f"the object made for {cls.__qualname__} is a {type(value).__name__}",
            field="provide",
            allowed=f"a {cls.__qualname__}, or a function that returns one",
        )
    return value
