"""`flowfabric worker`: run the tasks of an app."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric import settings
from flowfabric.cli._loading import AppName, load_app
from flowfabric.cli._options import Dsn, OfEnvironment, Parent, parse_duration
from flowfabric.errors import InvalidInput

if TYPE_CHECKING:
    from flowfabric.worker import Worker

LaneWeights = Annotated[
    list[str] | None,
    typer.Option(
        "--lane",
        "-l",
        metavar="LANE[=WEIGHT]",
        help="Serve this lane, with this weight among the others. Default: those that the app's tasks and schedules"
        " name.",
        show_default=False,
    ),
]
Concurrency = Annotated[
    int, typer.Option("--concurrency", "-c", metavar="N", min=1, help="Run at most this many handlers at once.")
]
Capabilities = Annotated[
    list[str] | None,
    typer.Option("--capability", metavar="NAME", help="A capability this worker offers.", show_default=False),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", metavar="NAME", help="Run only this task of the app.", show_default=False),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", metavar="NAME", help="Run only executions of this namespace.", show_default=False
    ),
]
LogLevel = Annotated[
    str, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error. Logs go to standard error.")
]
LogJson = Annotated[bool, typer.Option("--json", help="Log as JSON, one object per line.")]
_LEVELS = ("debug", "info", "warning", "error")


def worker(
    app: AppName,
    lane: LaneWeights = None,
    concurrency: Concurrency = 100,
    capability: Capabilities = None,
    task: Tasks = None,
    namespace: Namespace = None,
    grace: Annotated[
        str,
        typer.Option(
            "--grace",
            metavar="DURATION",
            help="How long running handlers may take to finish after the first stop signal.",
        ),
    ] = "30s",
    lease: Annotated[
        str,
        typer.Option(
            "--lease",
            metavar="DURATION",
            help="How long this worker keeps its executions if it stops responding; then others take over.",
        ),
    ] = "30s",
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            metavar="N",
            min=1,
            help="Number of processes for tasks that run in processes. Default: one per core.",
            show_default=False,
        ),
    ] = None,
    each: Annotated[
        bool, typer.Option("--ack-each", help="Report every execution in its own call, not in batches.")
    ] = False,
    duties: Annotated[
        bool, typer.Option("--duties/--no-duties", help="Also run timers and schedules; at least one worker must.")
    ] = True,
    until_idle: Annotated[bool, typer.Option("--until-idle", help="Exit when there is nothing left to do.")] = False,
    worker_id: Annotated[
        str | None,
        typer.Option(
            "--worker-id", metavar="NAME", help="Name shown in the history. Default: app@host.", show_default=False
        ),
    ] = None,
    health_port: Annotated[
        int | None,
        typer.Option(
            "--health-port",
            metavar="PORT",
            min=0,
            max=65_535,
            help="Serve /livez, /readyz and /metrics (Prometheus) on this port; 0 is any free one.",
            show_default=False,
        ),
    ] = None,
    health_host: Annotated[
        str, typer.Option("--health-host", metavar="HOST", help="The address to serve them on.")
    ] = "127.0.0.1",
    log_level: LogLevel = "info",
    json: LogJson = False,
    parent: Parent = None,
    of_environment: OfEnvironment = False,
    dsn: Dsn = None,
) -> None:
    """Run the tasks of an app until SIGTERM or Ctrl-C. Running handlers may finish within --grace.

    Executions that do not finish in time are handed to other workers. A second signal stops immediately.
    """
    from flowfabric.worker import Worker  # noqa: PLC0415
    from flowfabric.worker.health import HealthServer, measured  # noqa: PLC0415

    set_up_logging(log_level, as_json=json)
    loaded = load_app(app)
    if of_environment:
        dsn = settings.load().dsn
    if dsn is not None:
        loaded.dsn, loaded.data_dir = dsn, None
    sink = None if health_port is None else measured(loaded)
    made = Worker(
        loaded,
        lanes=weights(lane) if lane else None,
        concurrency=concurrency,
        capabilities=capability or (),
        tasks=task or None,
        namespace=namespace,
        worker_id=worker_id,
        lease_ttl=parse_duration(lease, "--lease"),
        grace=parse_duration(grace, "--grace"),
        ack="each" if each else "batch",
        processes=processes,
        duties=duties,
    )
    if parent is not None:
        threading.Thread(target=follow, args=(parent,), name="flowfabric parent", daemon=True).start()
    health = contextlib.nullcontext() if sink is None else HealthServer(made, sink, health_host, health_port or 0)
    with health:
        if until_idle:
            asyncio.run(_until_idle(made))
        else:
            made.main()


async def _until_idle(made: Worker) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, made.stop)
    await made.run(until_idle=True)


def follow(parent: int) -> None:
    """Stop this process when the process that started it has exited."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def weights(given: list[str]) -> dict[str, int]:
    """The lanes of `--lane` with their weights."""
    found: dict[str, int] = {}
    for text in given:
        name, equals, number = text.rpartition("=")
        if equals and not (name and number.isdecimal() and len(number) < 4):
            raise InvalidInput(f"got {text!r}", field="--lane", allowed="LANE, or LANE=WEIGHT with a number up to 100")
        lane, weight = (name, int(number)) if equals else (text, 1)
        if lane in found:
            raise InvalidInput(f"{lane} is given twice", field="--lane", allowed="once")
        found[lane] = weight
    return found


def check_level(level: str) -> None:
    """Refuse an unknown log level."""
    if level.lower() not in _LEVELS:
        raise InvalidInput(f"got {level!r}", field="--log-level", allowed=", ".join(_LEVELS))


def set_up_logging(level: str, *, as_json: bool) -> None:
    """Logs to standard error, for people or as JSON lines."""
    check_level(level)
    handler: Any = logging.StreamHandler(sys.stderr)
    if as_json:
        from flowfabric.middleware.logs import JsonFormatter  # noqa: PLC0415

        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
