"""Other queues, each at its best documented settings.

A peer's worker is a process of its own (`python -m benchmarks.peers.<name> DSN JOBS`), so that its event
loop, logging and signal handlers are as its authors meant them. It prints the seconds its drain took, without
its start.
"""

from __future__ import annotations

import asyncio
import sys


async def drain_in_a_process(module: str, dsn: str, jobs: int) -> float:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        dsn,
        str(jobs),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{module} ended with {process.returncode}:\n{errors.decode(errors='replace')[-2000:]}")
    return float(output.decode().strip().splitlines()[-1])
