"""A person with a browser opens a link and clicks. Runs where there is a Chromium."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import flowfabric as ff
from tests.server.following import PATIENCE
from tests.server.running import running
from tests.server.waiting import state_of, wait

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# The browser reads its orders from descriptor 3 and writes to 4.
BECOME = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A page of a browser, driven by its debugging protocol over a pair of pipes."""

    def __init__(self, reader: asyncio.StreamReader, sink: int) -> None:
        self._reader = reader
        self._sink = sink
        self._count = 0
        self._session: str | None = None

    async def open(self, url: str) -> None:
        target = (await self.ask("Target.createTarget", url=url))["targetId"]
        self._session = (await self.ask("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]

    async def ask(self, method: str, **params: Any) -> Any:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._sink, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(PATIENCE):
            while True:
                told = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if told.get("id") == self._count:
                    assert "error" not in told, told
                    return told["result"]

    async def value(self, expression: str) -> Any:
        """The value of an expression on the page, once it is true."""
        async with asyncio.timeout(PATIENCE):
            while True:
                found = (await self.ask("Runtime.evaluate", expression=expression, returnByValue=True))["result"]
                if found.get("value"):
                    return found["value"]
                await asyncio.sleep(0.02)

    async def click(self, selector: str) -> None:
        """Press and release the mouse over an element."""
        place = await self.value(
            f"(() => {{ const one = document.readyState == 'complete' && document.querySelector({selector!r});"
            " if (!one) return null; const r = one.getBoundingClientRect();"
            " return {x: r.x + r.width / 2, y: r.y + r.height / 2} })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    given = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (theirs_in, theirs_out)]  # not those that they become
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BECOME, *map(str, given), str(CHROMIUM), "--headless=new", "--no-sandbox",
        "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--no-proxy-server", "--remote-debugging-pipe",
        f"--user-data-dir={folder}", pass_fds=given,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    for one in (theirs_in, theirs_out, *given):
        os.close(one)
    reader = asyncio.StreamReader(limit=1 << 24)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb")
    )
    page = Browser(reader, ours_out)
    try:
        yield page
        page._session = None
        await page.ask("Browser.close")
    finally:
        try:
            async with asyncio.timeout(PATIENCE):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        transport.close()
        os.close(ours_out)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: install one to click on links as people do")
async def test_a_click_on_the_page_of_a_link_decides(plain_engine: ff.Engine, database: str, tmp_path: Path) -> None:
    async with running(database) as url, browser(tmp_path / "profile") as page:
        for name, words in (("approved", "approved"), ("rejected", "rejected")):
            one = await wait(plain_engine, execution_kind="refund")
            await page.open(url + one.link())
            assert "refund" in await page.value("document.body && document.body.innerText")
            assert await state_of(plain_engine, one) == "suspended"  # to open it decides nothing
            await page.click(f"button[value={name}]")
            said = await page.value("document.title == 'Thank you' && document.body.innerText")
            assert words in said
            (signal,) = (await plain_engine.read_signals(one.id)).items
            assert (signal.signal_name, signal.source_type) == (name, "link")
            page._session = None
