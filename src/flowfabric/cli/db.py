"""`flowfabric db`: the database itself: its address, a prompt, a copy; and the embedded server's life."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

import typer

from flowfabric import settings
from flowfabric._secrets import redact
from flowfabric.cli import _output
from flowfabric.cli._database import address, embedded, is_embedded, split_password
from flowfabric.cli._options import Dsn, Json, Yes
from flowfabric.cli._program import CANNOT, NO, confirm, show_help
from flowfabric.errors import ConnectionFailed, InvalidInput

app = typer.Typer(invoke_without_command=True)


@app.callback()
def _default(ctx: typer.Context) -> None:
    """The database: url, psql, dump, load; the embedded server: run, stop, reset."""
    if ctx.invoked_subcommand is None:
        show_help(ctx)


@app.command()
def url(
    show_password: Annotated[bool, typer.Option("--show-password", help="With the password, if it has one.")] = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Print the address of the database. Starts the embedded server if that is meant; it runs while it is used."""
    with address(dsn) as chosen:
        bare, password = split_password(chosen)
        shown = chosen if show_password else bare
        if json:
            _output.document({"url": shown, "has_password": password is not None, "is_embedded": is_embedded(dsn)})
        else:
            _output.say(shown)
    if is_embedded(dsn):
        _output.note("the embedded server stops when nobody uses it; `flowfabric db run` keeps it up")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def psql(ctx: typer.Context, dsn: Dsn = None) -> None:
    """Open psql on the database. What follows is handed to it: `flowfabric db psql -- -c 'select 1'`."""
    with address(dsn) as chosen:
        bare, environment = _libpq(chosen)
        command = [_program("psql"), bare, *ctx.args]
        if not is_embedded(dsn):
            sys.stdout.flush()
            os.execve(command[0], command, environment)  # noqa: S606 - the command is the user's own
        # The embedded server runs for as long as this process does, so it waits. Ctrl-C is for psql, which has its own
        # idea of it; a handler, unlike ignoring, is not inherited.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            code = subprocess.run(command, env=environment, check=False).returncode
        finally:
            signal.signal(signal.SIGINT, before)
    if code:
        raise typer.Exit(code)


@app.command()
def dump(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The file; default: standard output.", show_default=False),
    ] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Write the whole database as SQL, for `flowfabric db load`. Readable by any later version of Postgres."""
    if output is not None and not output.parent.is_dir():
        raise InvalidInput(
            f"no directory {output.parent}", field="--output", allowed="a file in a directory that exists"
        )
    with address(dsn) as chosen:
        arguments = ["--no-owner", "--no-privileges"]
        # Under another name until it is complete: half a dump must not look like one.
        unfinished = None if output is None else output.with_name(f"{output.name}.unfinished")
        if unfinished is not None:
            arguments.append(f"--file={unfinished}")
        try:
            with _output.busy("dumping") if output is not None else contextlib.nullcontext():
                _run("pg_dump", arguments, chosen)
            if output is not None and unfinished is not None:
                unfinished.replace(output)
        finally:
            if unfinished is not None:
                unfinished.unlink(missing_ok=True)
    if output is not None and json:
        _output.document({"file": output.resolve(), "bytes": output.stat().st_size})
    elif output is not None:
        _output.note(f"written to {output} ({output.stat().st_size:,} bytes)")


@app.command()
def load(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `flowfabric db dump` wrote.", show_default=False)],
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Load a dump into a database without our schema, all or nothing, then bring the schema up to date."""
    from flowfabric.engine.service import migrate_database, schema_version  # noqa: PLC0415

    if not file.is_file():
        raise InvalidInput(f"no file {file}", field="FILE", allowed="what `flowfabric db dump` wrote")
    with address(dsn) as chosen:
        if asyncio.run(schema_version(chosen)):
            reset = " (`flowfabric db reset` empties it)" if is_embedded(dsn) else ""
            raise InvalidInput("the database has our schema already", field="FILE", allowed=f"an empty database{reset}")
        arguments = ["--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1", "--output=/dev/null"]
        with _output.busy("loading"):
            _run("psql", [*arguments, f"--file={file}"], chosen)
            done = asyncio.run(migrate_database(chosen))
    if json:
        _output.document({"schema_version": done.version})
    else:
        _output.say(f"loaded; the schema is version {done.version}")


@app.command()
def run(json: Json = False, dsn: Dsn = None) -> None:
    """Keep the embedded server running until interrupted, and print its address."""
    _only_embedded(dsn, "run")
    with address(None) as chosen:
        if json:
            _output.line({"url": chosen})
        else:
            _output.say(chosen)
        sys.stdout.flush()
        _output.note("Ctrl-C ends this; the server stops when nobody uses it any more")
        asyncio.run(_until_told())


async def _until_told() -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, told.set)
    await told.wait()


@app.command()
def stop(json: Json = False, dsn: Dsn = None) -> None:
    """Stop the embedded server now, whoever uses it. Nothing that was acknowledged is lost."""
    _only_embedded(dsn, "stop")
    place = settings.load().data_dir
    was_running = embedded().is_running(place)
    embedded().stop(place)
    if json:
        _output.document({"data_dir": place.resolve(), "was_running": was_running})
    else:
        _output.say("stopped" if was_running else "it does not run")


@app.command()
def reset(
    keep: Annotated[bool, typer.Option("--keep", help="Move the data aside instead of deleting them.")] = False,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Stop the embedded server and delete its data; the next use begins with an empty database."""
    _only_embedded(dsn, "reset")
    place = settings.load().data_dir.expanduser().resolve()
    if not (place / "pgdata").exists():
        if json:
            _output.document({"data_dir": place, "was_there": False, "moved_to": None})
        else:
            _output.say(f"there are no data in {place}")
        return
    what = "move aside" if keep else "delete for ever"
    confirm(f"{what} all data of the embedded server in {place}?", yes=yes)
    aside = embedded().discard(place, keep=keep)
    if json:
        _output.document({"data_dir": place, "was_there": True, "moved_to": aside})
    else:
        _output.say(f"moved to {aside}" if aside else "deleted")


def _only_embedded(dsn: str | None, verb: str) -> None:
    if not is_embedded(dsn):
        source = "--dsn" if dsn else "FLOWFABRIC_DSN"
        raise InvalidInput(
            f"names a server of yours, and `db {verb}` is for the embedded one alone", field=source, allowed="none"
        )


def _libpq(dsn: str) -> tuple[str, dict[str, str]]:
    """The address for a program of Postgres, and its environment: a password is nothing for the process list."""
    bare, password = split_password(dsn)
    if "sslpassword" in dict(parse_qsl(urlsplit(dsn).query)):
        raise InvalidInput(
            "programs of Postgres take it only where everybody sees it", field="sslpassword", allowed="a service file"
        )
    environment = dict(os.environ)
    if password is not None:
        environment["PGPASSWORD"] = password
    return bare, environment


def _program(name: str) -> str:
    with contextlib.suppress(ConnectionFailed):
        found = embedded().program(name)
        if os.access(found, os.X_OK):
            return str(found)
    if on_path := shutil.which(name):
        return on_path
    raise ConnectionFailed("unreachable", f"{name} is not installed: it comes with PostgreSQL's client programs")


def _run(name: str, arguments: Sequence[str], dsn: str) -> None:
    bare, environment = _libpq(dsn)
    done = subprocess.run(
        [_program(name), *arguments, f"--dbname={bare}"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        typer.echo(f"flowfabric: {name} failed: {_output.printable(redact(words))}", err=True)
        raise typer.Exit(CANNOT if name == "pg_dump" else NO)
