"""Options that several commands share as one parameter, made into one value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def grouped(
    parameter: str, options: Mapping[str, Any], make: Callable[..., Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter by these options; the command receives the value that `make` returns for them.

    Each option is an `Annotated` type; without it on the command line it is None, a flag False.
    """

    def replaced(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        shared = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if annotation.__origin__ is bool else None,
                annotation=annotation,
            )
            for name, annotation in options.items()
        ]
        before: list[inspect.Parameter] = []
        after: list[inspect.Parameter] = []
        for one in own.parameters.values():
            if one.name != parameter:
                (after if one.kind is inspect.Parameter.KEYWORD_ONLY else before).append(one)

        def run(*args: Any, **given: Any) -> None:
            chosen = {name: given.pop(name, None) for name in options}
            command(*args, **{parameter: make(**chosen)}, **given)

        functools.update_wrapper(run, command)
        shown = own.replace(parameters=[*before, *shared, *after])
        run.__signature__ = shown  # type: ignore[attr-defined]  # typer reads it instead of the parameters of `run`
        run.__annotations__ = {one.name: one.annotation for one in shown.parameters.values()}
        return run

    return replaced
