"""The command line. One module per command or group; this one puts them together.

Modules load what they need when their command runs, so that help and completion are quick.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

import flowfabric
from flowfabric.cli import (
    api_keys,
    budgets,
    check,
    consumers,
    control,
    db,
    dev,
    doctor,
    erase,
    events,
    failures,
    flow,
    keys,
    lanes,
    ls,
    migrate,
    quotas,
    schedules,
    server,
    show,
    signals,
    submit,
    tail,
    top,
    wait,
    waits,
    worker,
    workers,
)
from flowfabric.cli._program import EXIT_CODES, Program, show_help

__all__ = ["app", "main"]

# Boxes and colours for a terminal, plain text for everything else.
_MARKUP = "rich" if sys.stdout is not None and sys.stdout.isatty() else None
_EPILOG = "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES) + "."

app = typer.Typer(
    name="flowfabric",
    cls=Program,
    help="Durable execution on plain Postgres.",
    epilog=_EPILOG,
    invoke_without_command=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=_MARKUP,  # type: ignore[arg-type]  # a literal, seen as text
    context_settings={"help_option_names": ["--help", "-h"]},
)

_WORK = "Work"
_INSPECT = "Inspect"
_CHANGE = "Change"
_SERVE = "Set up and serve"

app.command("worker", rich_help_panel=_WORK)(worker.worker)
app.command("dev", rich_help_panel=_WORK)(dev.dev)
app.command("submit", rich_help_panel=_WORK)(submit.submit)
app.command("wait", rich_help_panel=_WORK)(wait.wait)
app.command("ls", rich_help_panel=_INSPECT)(ls.ls)
app.command("show", rich_help_panel=_INSPECT)(show.show)
app.command("tail", rich_help_panel=_INSPECT)(tail.tail)
app.command("summary", rich_help_panel=_INSPECT)(tail.summary)
app.command("waits", rich_help_panel=_INSPECT)(waits.waits)
app.command("failures", rich_help_panel=_INSPECT)(failures.failures)
app.command("top", rich_help_panel=_INSPECT)(top.top)
app.command("events", rich_help_panel=_INSPECT)(events.events)
app.command("check", rich_help_panel=_INSPECT)(check.check)
app.command("export", rich_help_panel=_INSPECT)(check.export)
app.add_typer(workers.app, name="workers", rich_help_panel=_INSPECT)
app.add_typer(consumers.app, name="consumers", rich_help_panel=_INSPECT)
app.add_typer(flow.app, name="flow", rich_help_panel=_INSPECT)
app.command("cancel", rich_help_panel=_CHANGE)(control.cancel)
app.command("fail", rich_help_panel=_CHANGE)(control.fail)
app.command("unblock", rich_help_panel=_CHANGE)(control.unblock)
app.command("replay", rich_help_panel=_CHANGE)(control.replay)
app.command("fork", rich_help_panel=_CHANGE)(control.fork)
app.command("priority", rich_help_panel=_CHANGE)(control.priority)
app.command("approve", rich_help_panel=_CHANGE)(signals.approve)
app.command("reject", rich_help_panel=_CHANGE)(signals.reject)
app.command("signal", rich_help_panel=_CHANGE)(signals.signal)
app.command("resume", rich_help_panel=_CHANGE)(signals.resume)
app.command("delete", rich_help_panel=_CHANGE)(erase.delete)
app.command("redact", rich_help_panel=_CHANGE)(erase.redact)
app.add_typer(lanes.app, name="lanes", rich_help_panel=_CHANGE)
app.add_typer(budgets.app, name="budgets", rich_help_panel=_CHANGE)
app.add_typer(quotas.app, name="quotas", rich_help_panel=_CHANGE)
app.add_typer(schedules.app, name="schedules", rich_help_panel=_CHANGE)
app.command("server", rich_help_panel=_SERVE)(server.server)
app.command("migrate", rich_help_panel=_SERVE)(migrate.migrate)
app.add_typer(api_keys.app, name="api-keys", rich_help_panel=_SERVE)
app.add_typer(keys.app, name="keys", rich_help_panel=_SERVE)
app.add_typer(db.app, name="db", rich_help_panel=_SERVE)
app.command("doctor", rich_help_panel=_SERVE)(doctor.doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flowfabric {flowfabric.__version__}")
        raise typer.Exit


@app.callback()
def _program(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Durable execution on plain Postgres."""
    if ctx.invoked_subcommand is None:
        show_help(ctx)


def main() -> None:
    """Run the program with the arguments of this process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that the terminal's encoding lacks are shown by their numbers.
            stream.reconfigure(errors="backslashreplace")
    app()
