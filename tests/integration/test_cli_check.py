"""`flowfabric check` and `export`, and the same in the testing kit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flowfabric as ff
from flowfabric.cli import check
from flowfabric.cli._filters import Filter
from flowfabric.errors import InvalidInput, StepsChanged
from flowfabric.testing import Kit
from flowfabric.values.step import NewStep
from flowfabric.values.worker import Serves
from tests.integration.test_cli import call
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import WORKER, started, submit

CODE = """
import flowfabric as ff

app = ff.App()


@app.task
async def pay(ctx: ff.Context) -> None:
    await ctx.step({name!r}, print, "called")
    await ctx.wait_for("ok")


@app.task
async def broken(ctx: ff.Context) -> None:
    raise RuntimeError("a bug before the first step")


@app.task
async def convert(ctx: ff.Context, currency: str) -> None:
    await ctx.step("mail", print, "called")
"""
VERSIONED = """
import flowfabric as ff

app = ff.App()


@app.task({options})
async def pay(ctx: ff.Context) -> None:
    await ctx.step("send mail", print, "called")
"""
STOPS = "recorded and not asked for: step 'mail'; asked for instead: step 'send mail'"


@pytest.fixture
def deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Modules `ff_old` and `ff_new`, as two deploys would have them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for module, step in (("ff_old", "mail"), ("ff_new", "send mail")):
        (tmp_path / f"{module}.py").write_text(CODE.format(name=step))
    yield tmp_path
    for module in ("ff_old", "ff_new", "ff_two", "ff_both", "ff_none"):
        sys.modules.pop(module, None)


async def waiting(engine: ff.Engine, *kinds: str) -> list[ff.ExecutionId]:
    """Executions that did one step and wait for a worker."""
    claimed = [await started(engine, execution_kind=kind, input_payload=b"{}") for kind in kinds]
    await engine.record_steps([(one.handle, NewStep(name="mail", result=b"null")) for one in claimed])
    for one in claimed:
        await engine.release(one.handle)
    return [one.execution_id for one in claimed]


async def test_check_lists_what_the_code_does_not_fit(engine: ff.Engine, database: str, deployed: Path) -> None:
    first, bug = await waiting(engine, "pay", "broken")
    await submit(engine, execution_kind="pay")  # has not started: any code fits
    said = await call("check", "ff_new:app", dsn=database, code=1)
    assert said.out.splitlines()[1].split(maxsplit=4)[:2] == [str(bug), "broken"]
    assert said.out.splitlines()[1].endswith("would fail  RuntimeError: a bug before the first step")
    assert said.out.splitlines()[2].endswith(STOPS)
    assert str(first) in said.out
    assert said.err.splitlines()[0] == "checked 2 of 3 that match: 1 would stop, 1 would fail"
    assert said.err.splitlines()[1].startswith(
        "if step 'mail' is now 'send mail', write ctx.step('send mail', ..., was='mail'); for other changes use"
    )
    assert "called" not in said.out
    same = await call("check", "ff_old:app", "--kind", "pay", dsn=database)
    assert (same.code, same.out, same.err) == (0, "", "checked 1 of 2 that match: 1 would continue\n")
    listed = await call("check", "ff_old:app", "--kind", "pay", "--all", dsn=database)
    assert str(first) in listed.out and "would continue" in listed.out


async def test_check_as_json_and_without_anything_to_check(engine: ff.Engine, database: str, deployed: Path) -> None:
    said = await call("check", "ff_new:app", dsn=database)
    assert (said.code, said.out, said.err) == (0, "", "no waiting execution has started: nothing to check\n")
    (target,) = await waiting(engine, "pay")
    found = json.loads((await call("check", "ff_new:app", "--json", dsn=database, code=1)).out)
    assert found == {
        "items": [{"execution_id": str(target), "kind": "pay", "verdict": "stops", "why": STOPS}],
        "checked": 1,
        "matching": 1,
        "verdicts": {"continues": 0, "left": 0, "stops": 1, "fails": 0, "unknown": 0},
        "left": [],
        "not_in_app": {},
    }


async def test_check_finds_executions_of_a_task_that_was_renamed(
    engine: ff.Engine, database: str, deployed: Path
) -> None:
    await waiting(engine, "invoice")
    await submit(engine, execution_kind="invoice")  # has not started: no worker will
    said = await call("check", "ff_new:app", dsn=database, code=1)
    assert (said.out, said.err.splitlines()) == (
        "",
        [
            "2 waiting executions of invoice, which this app does not have",
            'a renamed task keeps its executions with name="invoice"; --own leaves out tasks of other apps',
        ],
    )
    assert (await call("check", "ff_new:app", "--kind", "invoice", dsn=database, code=1)).err == said.err
    found = json.loads((await call("check", "ff_new:app", "--json", dsn=database, code=1)).out)
    assert (found["not_in_app"], found["matching"], found["items"]) == ({"invoice": 2}, 0, [])
    for option in (["--own"], ["--kind", "pay"]):  # this app serves a part of the deployment
        said = await call("check", "ff_new:app", *option, dsn=database)
        assert said.err == "no waiting execution has started: nothing to check\n"


async def test_check_leaves_executions_to_workers_of_their_version(
    engine: ff.Engine, database: str, deployed: Path, kit: Kit
) -> None:
    await submit(engine, execution_kind="pay", input_payload=b"{}")
    claimed = await engine.claim(**WORKER, kinds={"pay": Serves(versions=(1,), digest="old")})
    assert claimed is not None
    await engine.record_steps([(claimed.handle, NewStep(name="mail", result=b"null"))])
    await engine.release(claimed.handle)
    for module, options in (("ff_two", "version=2"), ("ff_both", "version=2, compatible_with=[1]"), ("ff_none", "")):
        (deployed / f"{module}.py").write_text(VERSIONED.format(options=options))
    said = await call("check", "ff_two:app", dsn=database)
    assert (said.out, said.err) == ("", "1 waiting execution of pay left to workers of version 1\n")
    assert (await call("check", "ff_none:app", dsn=database)).err == said.err
    assert "1 would stop" in (await call("check", "ff_both:app", dsn=database, code=1)).err
    found = json.loads((await call("check", "ff_two:app", "--json", dsn=database)).out)
    assert found["left"] == [{"kind": "pay", "version": 1, "count": 1}]
    assert (found["verdicts"]["left"], found["matching"]) == (1, 0)
    exported = (await call("export", str(claimed.execution_id), dsn=database)).out
    (fit,) = await kit.check_recorded(__import__("ff_two").app, exported)
    assert (fit.verdict, fit.why) == ("left", "left to workers of version 1")
    with pytest.raises(StepsChanged):
        await kit.check_recorded(__import__("ff_both").app, exported)


async def test_check_says_which_argument_is_missing(engine: ff.Engine, database: str, deployed: Path) -> None:
    await waiting(engine, "convert")
    said = await call("check", "ff_old:app", dsn=database, code=1)
    assert said.out.splitlines()[1].endswith(
        "would fail  argument 'currency': missing, and convert has no default for it"
    )


async def test_many_executions_are_sampled(engine: ff.Engine) -> None:
    app = ff.App()

    @app.task
    async def pay() -> None: ...

    made = set(await waiting(engine, *["pay"] * 12))
    seen = set()
    for _ in range(20):
        chosen = await check._choose(engine, app, Filter({"kinds": ["pay"]}), 4)
        assert chosen.count == 12
        assert len(set(chosen.ids)) == 4
        seen.update(chosen.ids)
    assert seen == made


async def test_an_exported_execution_is_checked_by_the_kit(
    engine: ff.Engine, database: str, deployed: Path, kit: Kit
) -> None:
    (target,) = await waiting(engine, "pay")
    said = await call("export", str(target), dsn=database)
    file = deployed / "pay.json"
    file.write_text(said.out)
    old, new = (__import__(name).app for name in ("ff_old", "ff_new"))
    for history in (file, said.out, said.out.encode()):
        (fit,) = await kit.check_recorded(old, history)
        assert (fit.execution_id, fit.verdict) == (target, "continues")
    with pytest.raises(StepsChanged, match=f"pay {target} stops: {STOPS}"):
        await kit.check_recorded(new, file)
    with pytest.raises(InvalidInput, match="history"):
        await kit.check_recorded(new, "{}")


async def test_export_refuses_what_has_no_record(engine: ff.Engine, database: str) -> None:
    fresh = await submit(engine, execution_kind="pay")
    said = await call("export", str(fresh), dsn=database, code=1)
    assert (said.code, said.out) == (1, "")
    assert "no worker has started it" in said.err
    claimed = await started(engine, execution_kind="pay")
    await engine.complete(claimed.handle)
    said = await call("export", str(claimed.execution_id), dsn=database, code=1)
    assert (said.code, said.out) == (1, "")
    assert "it has ended" in said.err
