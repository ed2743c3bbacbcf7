"""The files in which several processes of a server keep their metrics, so that each of them reports those of all.

Apart from `metrics.py`, which loads the library: that reads the name of the directory when it is loaded.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

METRICS_DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"


def forget_process(pid: int, directory: str) -> None:
    """Remove the gauges of a process that died; its counts and times stay in the totals."""
    for path in Path(directory).glob(f"gauge_live*_{pid}.db"):
        with contextlib.suppress(OSError):
            path.unlink()
