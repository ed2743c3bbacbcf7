"""The program around the commands: how errors are told, and which exit code they end with."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from flowfabric._secrets import redact
from flowfabric.cli._output import printable
from flowfabric.errors import Conflict, Contention, FlowFabricError, NotFound, StateError

DONE = 0
NO = 1
CANNOT = 2
TIMEOUT = 3
EXIT_CODES = (
    (DONE, "done"),
    (NO, "the answer is no: not found, refused, or what was waited for did not succeed"),
    (CANNOT, "it could not be done: wrong arguments, no connection"),
    (TIMEOUT, "the time to wait is over"),
)
# What the engine answered, as opposed to what kept it from answering.
_ANSWERS = (NotFound, StateError, Contention, Conflict)


class Program(TyperGroup):
    """A group whose commands may raise our errors: each becomes one line and an exit code, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlowFabricError as error:
            raise typer.Exit(tell(error)) from None
        except BrokenPipeError:
            # Whoever read has seen enough. What is still buffered must not be tried again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(DONE) from None
        except OSError as error:
            words = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
            typer.echo(_line(words), err=True)
            raise typer.Exit(CANNOT) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def tell(error: FlowFabricError) -> int:
    """One line about an error on standard error; answers the exit code."""
    typer.echo(_line(str(error)), err=True)
    return NO if isinstance(error, _ANSWERS) else CANNOT


def _line(words: str) -> str:
    return f"flowfabric: {' '.join(printable(redact(words)).split())}"


def confirm(question: str, *, yes: bool) -> None:
    """Go on only if a person says so, or `--yes` did. Without anybody to answer it cannot be done."""
    if yes:
        return
    typer.echo(f"{question} [y/N] ", err=True, nl=False)
    answer = sys.stdin.readline()
    if not answer:
        typer.echo("\nflowfabric: nobody is here to answer: give --yes", err=True)
        raise typer.Exit(CANNOT)
    if answer.strip().lower() not in ("y", "yes"):
        typer.echo("flowfabric: nothing was changed", err=True)
        raise typer.Exit(NO)


def show_help(ctx: typer.Context) -> None:
    """The help of a group that was called without a command."""
    # With decorations it is printed by the call itself.
    if words := ctx.get_help():
        typer.echo(words)
