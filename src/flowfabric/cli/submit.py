"""`flowfabric submit`: submit a task from the shell."""

from __future__ import annotations

import asyncio
import json as _json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import UNSET

from flowfabric.cli import _completion, _output
from flowfabric.cli._database import embedded_running, near, no_such
from flowfabric.cli._loading import AppName, load_app
from flowfabric.cli._options import Dsn, Json, parse_duration, parse_pair, parse_time
from flowfabric.cli._program import exit_with
from flowfabric.cli.budgets import parse_amounts
from flowfabric.cli.wait import Timeout, until_ended
from flowfabric.errors import InvalidInput

if TYPE_CHECKING:
    from flowfabric.app.app import App
    from flowfabric.app.task import Task
    from flowfabric.contracts.signature import Parameter
    from flowfabric.values.spending import Budget

_QUOTED = 40  # characters of an argument in an error


def submit(
    app: AppName,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task's name.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGUMENT]...",
            help="VALUE or NAME=VALUE, as JSON; anything else is taken as a string.",
            show_default=False,
        ),
    ] = None,
    lane: Annotated[
        str | None, typer.Option("--lane", "-l", metavar="LANE", help="Submit to this lane.", show_default=False)
    ] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", "-p", metavar="N", help="From 0 to 9000.", show_default=False)
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option("--delay", metavar="DURATION", help="Start after this delay.", show_default=False),
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="Start at this time (ISO 8601).", show_default=False)
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline", metavar="DURATION", help="Expire if it has not ended after this time.", show_default=False
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="KEY",
            help="Idempotency key: submitting with the same key again returns the same execution.",
            show_default=False,
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", metavar="NAME", help="Submit to this namespace.", show_default=False),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", "-t", metavar="KEY=VALUE", help="Add this tag.", show_default=False)
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget",
            metavar="DIMENSION=AMOUNT|NAME",
            help="tokens=50000: a budget of this run alone. The name of a budget: count the run in it too.",
            autocompletion=_completion.budgets,
            show_default=False,
        ),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            "--quota",
            metavar="NAME",
            help="Start it when this quota has room.",
            autocompletion=_completion.quotas,
            show_default=False,
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until it ends, as `flowfabric wait` does.")] = False,
    timeout: Timeout = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Submit a task and print the execution's id. Wrong arguments are refused and nothing is stored."""
    options: dict[str, Any] = {
        "lane": lane,
        "priority": priority,
        "delay": None if delay is None else parse_duration(delay, "--delay"),
        "at": None if at is None else parse_time(at, "--at"),
        "deadline": None if deadline is None else parse_duration(deadline, "--deadline"),
        "idempotency_key": key,
        "namespace": namespace,
        "tags": dict(parse_pair(one, "--tag") for one in tag) if tag else None,
        "budgets": [one for one in budget or () if "=" not in one] or None,
        "budget": _own_budget([one for one in budget or () if "=" in one]),
        "quotas": quota or None,
    }
    if timeout is not None and not wait:
        raise InvalidInput("given without --wait", field="--timeout", allowed="together with --wait")
    seconds = None if timeout is None else parse_duration(timeout, "--timeout").total_seconds()
    loaded = load_app(app)
    if dsn is not None:
        loaded.dsn, loaded.data_dir = dsn, None
    known = _task(loaded, task)
    for field in ("budgets", "quotas"):  # beside those of the task
        if options[field] is not None and (own := getattr(known.defaults, field)) is not UNSET:
            options[field] = [*own, *options[field]]
    chosen = known.options(**{name: value for name, value in options.items() if value is not None})
    values = read_arguments(chosen, arguments or [])

    async def work() -> int:
        async with loaded:
            run = await chosen.submit(**values)
            if not wait:
                if json:
                    _output.document({"execution_id": run.execution_id, "is_new": run.is_new})
                else:
                    _output.say(run.id)
                    if not run.is_new:
                        _output.note("this key was used before; showing the existing execution")
                return 0
            if not json:
                _output.note(run.id)
            client = await loaded.client()
            return await until_ended(client.engine, run.execution_id, seconds, loaded.codecs, as_json=json)

    with embedded_running(loaded.dsn, loaded.data_dir):
        code = asyncio.run(work())
    exit_with(code)


def _own_budget(texts: list[str]) -> Budget | None:
    """The budget of the run itself."""
    from flowfabric.values.spending import Budget  # noqa: PLC0415

    return Budget(parse_amounts(texts, "--budget")) if texts else None


def _task(app: App, name: str) -> Task[Any, Any]:
    found = app.find_task(name)
    if found is None:
        raise no_such("task", name, sorted(app.tasks), none="the app has none")
    return found


def read_arguments(task: Task[Any, Any], texts: list[str]) -> dict[str, Any]:
    """The arguments by name, as values of the types that the task declares."""
    parameters = task.signature.parameters
    by_name = {one.name: one for one in parameters}
    open_places = [one for one in parameters if not one.is_keyword_only]
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals and name in by_name:
            parameter = by_name[name]
        elif open_places:
            parameter, value = open_places.pop(0), text
        else:
            hint = near(name, by_name) if equals else ""
            signature = ", ".join(f"{one.name}: {one.annotation}" for one in parameters) or "no arguments"
            raise InvalidInput(f"{text!r} fits no parameter", field=task.name, allowed=hint or signature)
        if parameter.name in given:
            raise InvalidInput("is given twice", field=parameter.name, allowed="once")
        open_places = [one for one in open_places if one is not parameter]
        given[parameter.name] = _value(parameter, value)
    return given


def _value(parameter: Parameter, text: str) -> Any:
    """The value of an argument: JSON if that fits the parameter's type, else the text itself."""
    from flowfabric.contracts.codecs import CannotDecode  # noqa: PLC0415

    what = f"argument {parameter.name!r}"
    problem: CannotDecode | None = None
    for attempt in (text, _json.dumps(text)):
        try:
            return parameter.type.decode(attempt.encode(), what=what)
        except CannotDecode as error:
            problem = problem or error
    assert problem is not None
    if why := _not_json(text):
        given = text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."
        raise InvalidInput(f"{given!r} is not JSON ({why})", field=parameter.name, allowed=parameter.annotation)
    raise InvalidInput(problem.problem, field=parameter.name, allowed=parameter.annotation)


def _not_json(text: str) -> str:
    """Why a text is not JSON; empty if it is."""
    try:
        _json.loads(text)
    except (ValueError, RecursionError) as error:
        return str(error)
    return ""
