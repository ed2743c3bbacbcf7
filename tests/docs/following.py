"""Following a page: its files are saved, its commands typed into one shell, their output compared with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.docs.pages import Block

PATIENCE = 60.0
# What differs from one reading to the next, and what replaces it in the comparison.
_VARYING = (
    (r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "ID"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d+)?", "TIME"),
    (r"\b[\d.]+ ?(ms|s|m|h)\b", "DURATION"),
    (r"\bapp@\S+", "WORKER"),
    (r" +", " "),
)


class Shell:
    """A shell into which a test types like a reader of the page."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def type(self, commands: str) -> tuple[str, int]:
        """What the commands print, and the exit code of the last. A command that asks gets no answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Without this a command that reads its input takes what is typed next.
        self._process.stdin.write(f"{{\n{commands}\n}} </dev/null\necho; echo the end of it: $?\n")
        self._process.stdin.flush()
        printed = ""
        for line in self._process.stdout:
            if line.startswith("the end of it: "):
                return printed.removesuffix("\n"), int(line.rpartition(" ")[2])
            printed += line
        raise AssertionError(f"the shell ended: {printed}")

    def follow(self, commands: str, following: Block | None, where: str) -> None:
        """Type commands. The block that follows has their output; without one they must succeed."""
        printed, code = self.type(commands)
        if following is not None and following.language == "text":
            expected = _expression(_plain(following.code))
            assert re.fullmatch(expected, _plain(printed)), f"{where}\n{printed}\n--- the page:\n{following.code}"
        else:
            assert code == 0, f"{where}\n{printed}"


@contextmanager
def shell(place: Path, env: dict[str, str]) -> Iterator[Shell]:
    here = str(Path(sys.executable).parent)
    with subprocess.Popen(
        ["bash", "--norc"],
        cwd=place,
        env={**env, "PATH": f"{here}:{env['PATH']}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Shell(process)
        finally:
            assert process.stdin is not None
            # Pages leave workers in the background. They use the database until they have ended.
            process.stdin.write("kill $(jobs -p); wait\n")
            process.stdin.close()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise


def save(place: Path, block: Block, name: str) -> None:
    file, _, plus = name.partition(" ")
    with (place / file).open("a" if plus else "w", encoding="utf-8") as saved:
        saved.write(f"\n\n{block.code}" if plus else block.code)


def _expression(expected: str) -> str:
    """What the page says, as an expression: `...` on a line of its own is any number of lines."""
    lines = ["(?:.*\n)*?" if line == "..." else f"{re.escape(line)} ?\n" for line in expected.splitlines()]
    return "".join(lines)


def _plain(text: str) -> str:
    for pattern, word in _VARYING:
        text = re.sub(pattern, word, text)
    # The shell itself reports a worker that was killed.
    # And a command says what it waits for where a machine is slow.
    said = ("Killed", "Terminated", "waiting for the embedded server")
    kept = [line.rstrip() for line in text.splitlines() if not any(word in line for word in said)]
    return "".join(f"{line}\n" for line in kept)
