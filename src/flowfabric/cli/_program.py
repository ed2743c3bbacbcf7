"""The program around the commands: how it reports errors, and its exit codes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperGroup

from flowfabric._secrets import redact
from flowfabric.cli._options import Dsn, Json, Wide
from flowfabric.cli._output import printable
from flowfabric.errors import (
    Conflict,
    Contention,
    ExecutionNotActive,
    FlowFabricError,
    InvalidInput,
    NotFound,
    StateError,
)

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
_FIRST_SENTENCE = re.compile(r".*?(?:\.(?= |$)|$)")
_OUTCOMES = {"success": "completed"}
_SENTENCES = {
    "execution_not_terminal": "it has not ended yet",
    "max_replays_exhausted": "it was replayed as often as its policy allows",
    "not_runnable": "it does not wait for a worker",
    "execution_not_eligible": "it does not wait for a worker",
    "terminal": "it has ended already",
}
# Refusals by the engine. Other errors mean that the engine was not reached, or not asked.
_REFUSALS = (NotFound, StateError, Contention, Conflict)

_Command = TypeVar("_Command", bound=Callable[..., None])


class Group(TyperGroup):
    """A group whose help lists its commands with their whole first sentence, not with the beginning of it."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None and not command.short_help and command.help:
            command.short_help = _FIRST_SENTENCE.match(" ".join(command.help.split()))[0]  # type: ignore[index]
        return command


class Program(Group):
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


def default_of(group: typer.Typer) -> Callable[[_Command], _Command]:
    """Make a command that takes --wide, --json and --dsn run when its group is called without a command."""

    def add(command: _Command) -> _Command:
        @group.callback()
        def _run(ctx: typer.Context, wide: Wide = False, json: Json = False, dsn: Dsn = None) -> None:
            if ctx.invoked_subcommand is None:
                command(wide=wide, json=json, dsn=dsn)

        return command

    return add


def tell(error: FlowFabricError) -> int:
    """Print an error as one line on standard error; returns the exit code."""
    typer.echo(_line(in_words(error)), err=True)
    return NO if isinstance(error, _REFUSALS) else CANNOT


def in_words(error: FlowFabricError) -> str:
    """An error as a person would say it, without the word by which programs know its kind."""
    who = "" if error.execution_id is None else f"{error.execution_id}: "
    match error:
        case InvalidInput():
            return str(error).removeprefix("invalid_input: ")
        case ExecutionNotActive(terminal_outcome="none"):
            return f"{who}it is not running"
        case ExecutionNotActive():
            return f"{who}it has ended already ({_OUTCOMES.get(error.terminal_outcome, error.terminal_outcome)})"
        case StateError() | Contention() | Conflict() if error.kind in _SENTENCES:
            return f"{who}{_SENTENCES[error.kind]}"
        case StateError() | Contention() | Conflict() if error.detail:
            return error.detail if str(error.execution_id) in error.detail else f"{who}{error.detail}"
        case _:
            return str(error)


def complain(words: str) -> int:
    """Print what is wrong with the command line; returns the exit code."""
    typer.echo(_line(words), err=True)
    return CANNOT


def _line(words: str) -> str:
    return f"flowfabric: {' '.join(printable(redact(words)).split())}"


def exit_with(code: int) -> None:
    """End the command with this exit code; 0 continues."""
    if code:
        raise typer.Exit(code)


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
