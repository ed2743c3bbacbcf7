"""Views that are drawn again and again until Ctrl-C, also while the database is away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from flowfabric.cli import _output
from flowfabric.cli._options import parse_duration
from flowfabric.errors import InvalidInput, TransportError

if TYPE_CHECKING:
    from flowfabric.engine import Engine

Interval = Annotated[str, typer.Option("--interval", "-i", metavar="DURATION", help="Refresh interval.")]
_PATIENCE = 1.0  # seconds until a picture that does not come is called late


def parse_interval(text: str) -> float:
    """The seconds of `--interval`."""
    pause = parse_duration(text, "--interval").total_seconds()
    if not 0.1 <= pause <= 3600:
        raise InvalidInput(f"got {text!r}", field="--interval", allowed="100ms to 1h")
    return pause


async def live(engine: Engine, draw: Callable[[], Awaitable[Any]], pause: float) -> NoReturn:
    """Fill the terminal with a picture, drawn again after each pause, until Ctrl-C.

    If the database does not answer, the last picture stays, and the first line says so.
    """
    from rich.console import Group  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    # Lines of the log would scroll the picture away; the first line says the same.
    logger = logging.getLogger("flowfabric")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    picture = await draw()
    with Live(picture, console=_output.console(), screen=True, auto_refresh=False) as screen:
        screen.refresh()
        asked = time.monotonic()
        while True:
            await asyncio.sleep(pause)
            asked = time.monotonic()
            drawing = asyncio.ensure_future(draw())
            trouble = ""
            try:
                while not (await asyncio.wait([drawing], timeout=_PATIENCE))[0]:
                    silent = _output.seconds(round(time.monotonic() - asked))
                    trouble = away(engine) or f"{engine.target} has not answered for {silent}"
                    screen.update(Group(Text(trouble, style="bold red"), picture), refresh=True)
            except asyncio.CancelledError:
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)
                raise
            try:
                picture = drawing.result()
            except TransportError as error:
                line = Text(away(engine) or str(error), style="bold red")
                screen.update(Group(line, picture), refresh=True)
            else:
                screen.update(picture, refresh=True)


def away(engine: Engine) -> str:
    """Say that the database is away, and since when; empty if it is not."""
    return f"{engine.target} {engine.outage.words}" if engine.outage.is_on else ""
