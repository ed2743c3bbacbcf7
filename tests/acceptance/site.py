"""Worker processes that are killed, or kill themselves, and what they did."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import flowfabric as ff
from flowfabric.errors import StateError

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0

S = TypeVar("S", bound="Site")


class Site:
    """An app, its database, and the worker processes on it."""

    def __init__(self, dsn: str, folder: Path, app: ff.App, *program: str, **options: float) -> None:
        self.dsn = dsn
        self.folder = folder
        self.ledger_file = folder / "ledger.jsonl"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.app = app
        self.app.dsn = dsn
        self._command = [sys.executable, *program, json.dumps({"grace": 5, "lease_ttl": 1, "poll": 0.2, **options})]

    def hire(self, die: str | None = None) -> subprocess.Popen[bytes]:
        """Start a worker, which kills itself at the call that `die` names."""
        env = {**os.environ, "DSN": self.dsn, "LEDGER": str(self.ledger_file)}
        if die is not None:
            env["DIE"] = die
        with (self.folder / f"worker-{len(self.processes)}.err").open("wb") as errors:
            process = subprocess.Popen(self._command, stderr=errors, env=env, cwd=ROOT)
        self.processes.append(process)
        return process

    async def killed(self, process: subprocess.Popen[bytes]) -> None:
        assert await asyncio.to_thread(process.wait, PATIENCE) == -signal.SIGKILL, self.words()

    async def stop(self, process: subprocess.Popen[bytes]) -> None:
        said = self.folder / f"worker-{self.processes.index(process)}.err"
        await self.until(lambda: ", lanes " in said.read_text())
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE) == 0, self.words()

    def ledger(self, what: str) -> list[dict[str, Any]]:
        if not self.ledger_file.exists():
            return []
        lines = [json.loads(line) for line in self.ledger_file.read_text().split("\n")[:-1]]
        return [line for line in lines if line["what"] == what]

    async def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.words()
            await asyncio.sleep(0.02)

    def words(self) -> str:
        return "\n".join(one.read_text()[-3000:] for one in sorted(self.folder.glob("*.err")))

    async def tell(self, run: ff.Run[Any], key: str, payload: Any) -> None:
        """Signal a key as soon as it can be."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                await run.signal(key, payload=payload)
            except (ff.NotFound, StateError):
                assert time.monotonic() < deadline, self.words()
                await asyncio.sleep(0.02)
            else:
                return

    async def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        await self.app.close()


@contextlib.asynccontextmanager
async def opened(site: S) -> AsyncIterator[S]:
    """Audit its database at the end, and end its processes."""
    yield site
    try:
        assert await (await site.app.client()).engine.audit(events=True) == []
    finally:
        await site.close()
