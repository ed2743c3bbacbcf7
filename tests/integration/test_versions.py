"""Versions of tasks and changed code with real workers, and what the commands say about them."""

from __future__ import annotations

import functools
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.app.code import code_digest
from flowfabric.values.attempt import Claimed
from flowfabric.values.worker import Serves
from tests.integration.test_cli import call
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import WORKER
from tests.until import PATIENCE, until


def make_app(dsn: str, **options: Any) -> ff.App:
    app = ff.App(dsn=dsn)

    @app.task(name="greet", **options)
    async def greet(ctx: ff.Context, waits: bool = False) -> str:
        if waits:
            await ctx.wait_for("go")
        return f"{options.get('version')}"

    return app


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"version": 0}, "version", "an integer from 1"),
        ({"version": True}, "version", "an integer from 1"),
        ({"version": "2"}, "version", "an integer from 1"),
        ({"version": 2**31}, "version", "an integer from 1"),
        ({"version": 2, "compatible_with": [True]}, "compatible_with", "an integer from 1"),
        ({"version": 2, "compatible_with": 1}, "compatible_with", "a list of earlier versions"),
        ({"version": 2, "compatible_with": "1"}, "compatible_with", "a list of earlier versions"),
        ({"version": 2, "compatible_with": [2]}, "compatible_with", "each once"),
        ({"version": 3, "compatible_with": [1, 1]}, "compatible_with", "each once"),
        ({"compatible_with": [1]}, "compatible_with", "version=... beside it"),
    ],
)
def test_a_wrong_version_is_refused_where_it_is_written(options: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ff.InvalidInput, match=said) as refused:
        make_app("postgresql://nowhere", **options)
    assert refused.value.field == field


def test_an_unknown_option_is_reported_beside_the_versions() -> None:
    with pytest.raises(ff.InvalidInput, match="did you mean 'version'"):
        make_app("postgresql://nowhere", versoin=2)


async def test_old_and_new_workers_share_a_lane_and_each_finishes_what_it_began(
    database: str, plain_engine: ff.Engine
) -> None:
    old, new, plain = (make_app(database, **each) for each in ({"version": 1}, {"version": 2}, {}))
    async with old, new, plain:
        async with ff.Worker(old, poll=0.1):
            first = await old.tasks["greet"].submit(True)
            await until(lambda: first.waits())
        async with ff.Worker(new, poll=0.1), ff.Worker(plain, poll=0.1):
            second = await new.tasks["greet"].submit()
            assert await second.result(timeout=PATIENCE) in ("2", "None")
            await first.signal("go")
            found = await until(lambda: plain_engine.find_unserved([first.execution_id]))
            assert (found[0].version, found[0].live_workers) == (1, 2)
        both = make_app(database, version=3, compatible_with=[2, 1])
        async with both, ff.Worker(both, poll=0.1):
            assert await first.result(timeout=PATIENCE) == "3"
        record = await plain_engine.read_execution(first.execution_id)
        assert record is not None and record.version == 1


async def test_a_worker_registers_its_versions_and_the_digest_of_its_code(database: str, sql: Any) -> None:
    app = make_app(database, version=2, compatible_with=[1])
    async with app, ff.Worker(app):
        client = await app.client()
        (worker,) = await client.workers()
        assert worker.kinds == {"greet": (2, 1)}
        row = await sql.fetchrow(
            "select s.* from flowfabric.service s join flowfabric.registration r on r.service = s.id"
        )
        digest = app.tasks["greet"].code_digest
        assert (row["versions"], row["digests"]) == ([2, 1], [digest, digest])


# The digest of a handler


def _loaded(place: Path, source: str) -> types.ModuleType:
    place.write_text(source)
    module = types.ModuleType("loaded")
    exec(compile(source, str(place), "exec"), module.__dict__)
    return module


SOURCE = """
def helper():
    return 1

def handler(x, y={"a", "b"}):
    if x in {"p", "q", "r"}:
        return [lambda: helper()]
"""


def test_the_digest_is_that_of_the_same_source_anywhere(tmp_path: Path) -> None:
    digests = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        digests.add(code_digest(_loaded(tmp_path / name / f"{name}.py", SOURCE).handler))
    assert len(digests) == 1


@pytest.mark.parametrize(
    "change", [("return 1", "return 2"), ('{"p", "q"', '{"p", "Q"'), ("[lambda", "(lambda"), ("x in", "x not in")]
)
def test_the_digest_changes_with_the_handler_and_with_what_is_beside_it(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    changed = SOURCE.replace(*change).replace("]\n", ")\n") if change[0] == "[lambda" else SOURCE.replace(*change)
    assert changed != SOURCE
    assert code_digest(_loaded(tmp_path / "a.py", SOURCE).handler) != code_digest(
        _loaded(tmp_path / "b.py", changed).handler
    )


def test_functions_of_one_file_and_of_one_maker_have_digests_of_their_own() -> None:
    def make(name: str) -> Any:
        def handler() -> str:
            return name

        return handler

    def other() -> int:
        return 1

    assert code_digest(make("a")) == code_digest(make("a"))
    assert len({code_digest(make("a")), code_digest(make("b")), code_digest(other)}) == 3


def test_callables_of_every_sort_have_a_digest() -> None:
    class Callable_:
        def __call__(self) -> int:
            return 1

    for one in (Callable_(), functools.partial(lambda x: x, 1), len, print):
        assert len(code_digest(one)) == 32


# What the commands say


async def test_the_commands_count_executions_without_a_version_beside_a_version(
    plain_engine: ff.Engine, database: str
) -> None:
    await plain_engine.create_execution(execution_kind="greet")
    assert await plain_engine.claim(**WORKER, kinds=["greet"]) is not None
    assert "Versions" not in (await call("workers", dsn=database)).out
    await plain_engine.register_worker(
        "w", "w-1", lanes=["default"], liveness_ttl=timedelta(hours=1), kinds={"greet": [2]}
    )
    said = await call("workers", dsn=database)
    assert said.out.splitlines()[-1].split() == ["greet", "none", "1", "1", "default"]
    assert said.err == "1 execution of greet began without a version: workers of every version run them\n"
    found = (await call("doctor", "--json", dsn=database, code=1)).json["findings"]
    (one,) = [each for each in found if each["check"] == "changed code"]
    assert one["verdict"] == "ok"
    assert one["detail"].endswith("began without a version, so that workers of every version run them: greet (1)")


DETAIL = "recorded and not asked for: step 'mail', wait 'ok'; asked for instead: step 'send mail'"
HINT = (
    "if step 'mail' is now 'send mail', write ctx.step('send mail', ..., was='mail'); for other changes use ctx.patched"
)


async def _stopped(engine: ff.Engine) -> Claimed:
    await engine.create_execution(execution_kind="greet", input_payload=b"{}")
    claimed = await engine.claim(**WORKER, kinds={"greet": Serves(versions=(1,), digest="new")})
    assert claimed is not None
    await engine.stop_changed(claimed.handle, detail=DETAIL, digest="new")
    return claimed


async def test_the_commands_find_what_changed_code_stopped(plain_engine: ff.Engine, database: str) -> None:
    assert "no execution waits for other code" in (await call("doctor", dsn=database, code=1)).out
    claimed = await _stopped(plain_engine)
    ident = str(claimed.execution_id)
    assert ident in (await call("ls", "--stopped", "-q", dsn=database)).out
    said = await call("failures", dsn=database)
    assert "changed code stopped 1 execution: see `flowfabric failures --stopped`" in said.err
    listed = await call("failures", "--stopped", dsn=database)
    assert listed.out.splitlines()[0].split() == ["ID", "KIND", "LANE", "WHY"]
    assert listed.out.splitlines()[1].split(maxsplit=3) == [ident, "greet", "default", DETAIL]
    assert listed.err.startswith(HINT)
    grouped = (await call("failures", "--stopped", "--summary", dsn=database)).out
    assert grouped.splitlines()[1].startswith(f"1      greet  {DETAIL}")
    assert "changed code stopped 1 of these: `flowfabric failures --stopped`" in (await call("ls", dsn=database)).err
    shown = (await call("show", ident, dsn=database)).out
    assert "by changed code, once; other code may claim it, any worker from" in shown
    assert f"\nChanged code\n  {DETAIL}\n  {HINT}" in shown
    assert "but" in shown and "no live worker has other code: start one with code that fits" in shown
    assert "flowfabric show" not in shown
    assert "version  1" in " ".join(shown.split("\n")).replace("version:", "version ") or "version" in shown
    events = (await call("show", ident, "--timeline", dsn=database)).out
    assert "its code has changed: waits for code that fits" in events
    found = (await call("doctor", "--json", dsn=database, code=1)).json["findings"]
    (one,) = [each for each in found if each["check"] == "changed code"]
    assert one["verdict"] == "warning"
    assert "1 stopped, of greet" in one["detail"] and "greet 1 (1)" in one["detail"]
    (tasks,) = [each for each in found if each["check"] == "tasks"]
    assert tasks["detail"] == "only changed code or a version keeps tasks waiting: see changed code"
    assert (await call("cancel", "--stopped", "--yes", dsn=database)).out
    assert not (await plain_engine.find_executions(stopped=True)).items


async def test_workers_lists_versions_that_have_executions_and_no_worker(
    plain_engine: ff.Engine, database: str
) -> None:
    await plain_engine.create_execution(execution_kind="greet")
    claimed = await plain_engine.claim(**WORKER, kinds={"greet": [1]})
    assert claimed is not None
    said = await call("workers", dsn=database)
    assert "no live worker serves version 1 of greet in lane default (1 execution)" in said.err
    await plain_engine.release(claimed.handle)
    found = (await call("doctor", "--json", dsn=database, code=1)).json["findings"]
    (tasks,) = [each for each in found if each["check"] == "tasks"]
    assert tasks["detail"] == "only changed code or a version keeps tasks waiting: see changed code"
    await plain_engine.register_worker(
        "w", "w-1", lanes=["default"], liveness_ttl=timedelta(hours=1), kinds={"greet": [2, 1]}
    )
    said = await call("workers", dsn=database)
    assert "Versions with executions" in said.out and "compatible_with" not in said.err
    shown = (await call("workers", "show", "w-1", dsn=database)).out
    assert "greet (2, 1)" in shown
    (version,) = (await call("workers", "--json", dsn=database)).json["versions"]
    assert (version["version"], version["live_workers"], version["executions"]) == (1, 1, 1)
