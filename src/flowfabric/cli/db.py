"""`flowfabric db`: the database's address, psql, dump and load; run, stop and reset the embedded server."""

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
from flowfabric.cli._program import CANNOT, NO, Group, confirm, exit_with, show_help
from flowfabric.errors import ConnectionFailed, InvalidInput

app = typer.Typer(cls=Group, invoke_without_command=True)


@app.callback()
def _default(ctx: typer.Context) -> None:
    """The database: url, psql, dump, load; the embedded server: run, stop, reset."""
    if ctx.invoked_subcommand is None:
        show_help(ctx)


@app.command()
def url(
    show_password: Annotated[
        bool, typer.Option("--show-password", help="Include the password, if there is one.")
    ] = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Print the address of the database. Starts the embedded server if commands use it."""
    with address(dsn) as chosen:
        bare, password = split_password(chosen)
        shown = chosen if show_password else bare
        if json:
            _output.document({"url": shown, "has_password": password is not None, "is_embedded": is_embedded(dsn)})
        else:
            _output.say(shown)
    if is_embedded(dsn):
        _output.note("the embedded server stops when no process uses it; `flowfabric db run` keeps it running")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def psql(ctx: typer.Context, dsn: Dsn = None) -> None:
    """Open psql on the database. Further arguments go to psql: `flowfabric db psql -- -c 'select 1'`."""
    with address(dsn) as chosen:
        bare, environment = _libpq(chosen)
        command = [_program("psql"), bare, *ctx.args]
        if not is_embedded(dsn):
            sys.stdout.flush()
            os.execve(command[0], command, environment)  # noqa: S606 - the command is the user's own
        # The embedded server runs only as long as this process, so wait here. Ctrl-C is for psql, which handles it;
        # psql would inherit an ignored signal, but not a handler.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            code = subprocess.run(command, env=environment, check=False).returncode
        finally:
            signal.signal(signal.SIGINT, before)
    exit_with(code)


@app.command()
def dump(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write to this file. Default: standard output.", show_default=False
        ),
    ] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Write the whole database as SQL, for `flowfabric db load`. Any later version of Postgres can read it."""
    if output is not None and not output.parent.is_dir():
        raise InvalidInput(
            f"no directory {output.parent}", field="--output", allowed="a file in a directory that exists"
        )
    with address(dsn) as chosen:
        arguments = ["--no-owner", "--no-privileges"]
        # Under another name until it is complete, so that half a dump is never taken for a whole one.
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
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A file that `flowfabric db dump` wrote.", show_default=False)
    ],
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Load a dump into a database without the flowfabric schema, in one transaction, then migrate the schema."""
    from flowfabric.engine.service import migrate_database, schema_version  # noqa: PLC0415

    if not file.is_file():
        raise InvalidInput(f"no file {file}", field="FILE", allowed="a file that `flowfabric db dump` wrote")
    with address(dsn) as chosen:
        if asyncio.run(schema_version(chosen)):
            reset = " (`flowfabric db reset` empties it)" if is_embedded(dsn) else ""
            raise InvalidInput(
                "the database already has the flowfabric schema", field="FILE", allowed=f"an empty database{reset}"
            )
        arguments = ["--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1", "--output=/dev/null"]
        with _output.busy("loading"):
            _run("psql", [*arguments, f"--file={file}"], chosen)
            done = asyncio.run(migrate_database(chosen))
    if json:
        _output.document({"schema_version": done.version})
    else:
        _output.say(f"loaded; the schema is at version {done.version}")


@app.command()
def run(json: Json = False, dsn: Dsn = None) -> None:
    """Print the embedded server's address and keep it running until interrupted."""
    _only_embedded(dsn, "run")
    with address(None) as chosen:
        if json:
            _output.line({"url": chosen})
        else:
            _output.say(chosen)
        sys.stdout.flush()
        _output.note("press Ctrl-C to end this; the server stops once no other process uses it")
        asyncio.run(_until_interrupted())


async def _until_interrupted() -> None:
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, interrupted.set)
    await interrupted.wait()


@app.command()
def stop(json: Json = False, dsn: Dsn = None) -> None:
    """Stop the embedded server now, even if processes use it. Committed data is safe."""
    _only_embedded(dsn, "stop")
    place = settings.load().data_dir
    was_running = embedded().is_running(place)
    embedded().stop(place)
    if json:
        _output.document({"data_dir": place.resolve(), "was_running": was_running})
    else:
        _output.say("stopped" if was_running else "the embedded server is not running")


@app.command()
def reset(
    keep: Annotated[bool, typer.Option("--keep", help="Move the data aside instead of deleting it.")] = False,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Stop the embedded server and delete its data. The next command starts with an empty database."""
    _only_embedded(dsn, "reset")
    place = settings.load().data_dir.expanduser().resolve()
    if not (place / "pgdata").exists():
        if json:
            _output.document({"data_dir": place, "was_there": False, "moved_to": None})
        else:
            _output.say(f"there is no data in {place}")
        return
    what = "move aside" if keep else "permanently delete"
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
            f"names another server; `db {verb}` works only on the embedded one", field=source, allowed="none"
        )


def _libpq(dsn: str) -> tuple[str, dict[str, str]]:
    """The address and environment for a Postgres program. The password must not appear in the process list."""
    bare, password = split_password(dsn)
    if "sslpassword" in dict(parse_qsl(urlsplit(dsn).query)):
        raise InvalidInput(
            "Postgres programs accept it only on the command line, where every user can read it",
            field="sslpassword",
            allowed="a service file",
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
    raise ConnectionFailed("unreachable", f"{name} is not installed; it is one of PostgreSQL's client programs")


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
