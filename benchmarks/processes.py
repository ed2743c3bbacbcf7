"""Worker processes under a stop-watch, the same for us and for every peer.

The benchmark starts `python -m PROGRAM DSN BOARD SLOT ...` and waits for the line `ready`: the program is then
connected and has done everything that needs no job. `go` lets it take jobs, `stop` ends it; its last line is the
processor time it used in between. What it did meanwhile it writes on the board, a few numbers in memory that
both sides see, so that the database is not asked while it is measured.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

_START_SECONDS = 60
_STOP_SECONDS = 60


class Board:
    """Numbers of eight bytes in a file that several processes map. Each is written by one process only."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    @classmethod
    def create(cls, directory: Path, slots: int) -> Path:
        path = directory / "board"
        path.write_bytes(bytes(8 * slots))
        return path

    def __getitem__(self, slot: int) -> int:
        return self._numbers[slot]

    def __setitem__(self, slot: int, number: int) -> None:
        self._numbers[slot] = number

    def total(self) -> int:
        return sum(self._numbers)

    def numbers(self) -> list[int]:
        return self._numbers.tolist()


class WorkerProcess:
    """A worker as the benchmark sees it."""

    def __init__(self, program: str, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._program = program
        self._process = process
        self._errors = errors

    @classmethod
    async def start(cls, program: str, *arguments: str) -> Self:
        """Returns once the program says that it is ready."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            program,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
        worker = cls(program, process, errors)
        try:
            async with asyncio.timeout(_START_SECONDS):
                while await worker._line() != "ready":
                    pass
        except BaseException:
            await worker.kill()
            raise
        return worker

    def go(self) -> None:
        self.check()
        self._tell("go")

    async def stop(self) -> float:
        """Ends the process. Returns the seconds of processor time it used since `go`."""
        self._tell("stop")
        last = ""
        async with asyncio.timeout(_STOP_SECONDS):
            while line := await self._line(at_end=""):
                last = line
            code = await self._process.wait()
        if code != 0:
            raise self._failure()
        self._errors.close()
        return float(last)

    async def kill(self) -> None:
        """For the way out; a process that was stopped is left as it is."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._errors.close()

    def check(self) -> None:
        """Raises when the process has ended by itself."""
        if self._process.returncode is not None:
            raise self._failure()

    async def _line(self, at_end: str | None = None) -> str:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            if at_end is not None:
                return at_end
            await self._process.wait()
            raise self._failure()
        return line.decode().strip() or " "

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())

    def _failure(self) -> RuntimeError:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace")[-3000:]
        return RuntimeError(f"{self._program} ended with {self._process.returncode}:\n{said}")


async def stop_all(workers: Sequence[WorkerProcess]) -> float:
    """Processor seconds of all of them."""
    return sum(await asyncio.gather(*(worker.stop() for worker in workers)))


class Starter:
    """The benchmark as a worker process sees it: `go` and `stopped` from a loop, the other two from a thread."""

    def __init__(self) -> None:
        # Whatever else the program prints must not get between the lines of the protocol.
        self._output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._used = 0.0

    async def go(self) -> None:
        """Say that the worker is ready, return when it may take jobs."""
        await asyncio.to_thread(self.wait_go)

    def stopped(self) -> asyncio.Future[None]:
        """Done when the worker must end. Call it after `go`."""
        loop = asyncio.get_running_loop()
        stopped: asyncio.Future[None] = loop.create_future()

        def wait() -> None:
            self.wait_stop()
            loop.call_soon_threadsafe(stopped.set_result, None)

        threading.Thread(target=wait, daemon=True).start()
        return stopped

    def wait_go(self) -> None:
        self._say("ready")
        self._expect("go")
        self._used = -_processor_seconds()

    def wait_stop(self) -> None:
        self._expect("stop")
        self._used += _processor_seconds()

    def finish(self) -> None:
        """The last line. Everything is closed before it."""
        self._say(f"{self._used}")

    def _say(self, line: str) -> None:
        print(line, file=self._output, flush=True)

    def _expect(self, word: str) -> None:
        if sys.stdin.readline().strip() != word:
            os._exit(1)  # the benchmark is gone


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
