"""The program around the commands: how it reports errors, and its exit codes."""

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
    (NO, "not found, refused, or the execution or flow did not succeed"),
    (CANNOT, "the command could not run: wrong arguments, no connection"),
    (TIMEOUT, "timed out"),
)
# Refusals by the engine. Other errors mean that the engine was not reached, or not asked.
_REFUSALS = (NotFound, StateError, Contention, Conflict)


class Program(TyperGroup):
    """A group whose commands may raise our errors: each becomes one line and an exit code, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlowFabricError as error:
            raise typer.Exit(tell(error)) from None
        except BrokenPipeError:
            # The reader closed the pipe. Discard the rest, otherwise Python tries to write it again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(DONE) from None
        except OSError as error:
            words = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
            typer.echo(_line(words), err=True)
            raise typer.Exit(CANNOT) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def tell(error: FlowFabricError) -> int:
    """Print an error as one line on standard error; returns the exit code."""
    typer.echo(_line(str(error)), err=True)
    return NO if isinstance(error, _REFUSALS) else CANNOT


def complain(words: str) -> int:
    """Print what is wrong with the command line; returns the exit code."""
    typer.echo(_line(words), err=True)
    return CANNOT


def _line(words: str) -> str:
    return f"flowfabric: {' '.join(printable(redact(words)).split())}"


def confirm(question: str, *, yes: bool) -> None:
    """Ask the user, unless `--yes` was given. Exits if the answer is not yes, or if there is no terminal."""
    if yes:
        return
    typer.echo(f"{question} [y/N] ", err=True, nl=False)
    answer = sys.stdin.readline()
    if not answer:
        typer.echo(err=True)
        raise typer.Exit(complain("cannot ask without a terminal; confirm with --yes"))
    if answer.strip().lower() not in ("y", "yes"):
        typer.echo("flowfabric: nothing was changed", err=True)
        raise typer.Exit(NO)


def show_help(ctx: typer.Context) -> None:
    """Print the help of a group that was called without a command."""
    # With rich markup the call prints it itself and returns nothing.
    if words := ctx.get_help():
        typer.echo(words)
