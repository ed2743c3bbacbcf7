"""Commands for budgets and quotas, and what `ls`, `show`, `lanes`, `top` and `doctor` say about limits."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import flowfabric as ff
from flowfabric.values.budget import budget_id_of
from flowfabric.values.policies import ExecutionPolicy, OwnBudget
from flowfabric.values.quota import quota_policy_id_of
from tests.integration.test_cli import COMMAND_TREE, PATIENCE, PROGRAM, call, on_a_terminal
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import WORKER, claim_one, started, submit

pytestmark = pytest.mark.asyncio(loop_scope="session")
APP = """
import flowfabric as ff

app = ff.App()
app.budget("declared", hard={"tokens": 1000})


@app.task(budgets=["declared"])
async def agent(n: int) -> int:
    return n
"""


async def claim(engine: ff.Engine) -> object:
    worker: Any = WORKER
    return await engine.claim(**worker)


async def hold(engine: ff.Engine, *, count: int = 2) -> list[ff.ExecutionId]:
    """Executions that an exhausted budget holds back."""
    await engine.create_budget(name="team", dimensions=["tokens"], hard_limits=[100], soft_limits=[80])
    await engine.report_usage_admin(budget_id_of("team"), dimensions=["tokens"], deltas=[100])
    policy = ExecutionPolicy(budget_ids=(budget_id_of("team"),))
    made = [await submit(engine, policy=policy) for _ in range(count)]
    assert await claim(engine) is None
    return made


# ---- budgets


async def test_a_budget_is_created_raised_set_spent_and_reset(engine: ff.Engine, database: str) -> None:
    made = await call(
        "budgets", "create", "team", "--hard", "tokens=2_000", "--soft", "tokens=1000", "--every", "1d", dsn=database
    )
    assert made.out == "team created\n"
    again = await call("budgets", "create", "team", "--hard", "tokens=5", dsn=database, code=1)
    assert "there is a budget team already" in again.err
    raised = await call("budgets", "raise", "team", "tokens=+500", dsn=database)
    assert raised.out == "team: tokens 0 of 2,500\n"
    await call("budgets", "raise", "team", "tokens=-100", dsn=database)
    done = await call(
        "budgets", "set", "team", "--hard", "cost=7", "--soft", "tokens=0", "--mode", "warn", dsn=database
    )
    assert "cost 0 of 7" in done.out
    found = (await call("budgets", "show", "team", "--json", dsn=database)).json["budget"]
    assert (found["hard_limits"], found["enforcement_mode"]) == ({"cost": 7, "tokens": 2400}, "warn")
    await call("budgets", "set", "team", "--mode", "strict", dsn=database)

    execution = await submit(engine)
    for _ in range(2):
        await call("budgets", "spend", "team", execution, "tokens=40", "--key", "once", dsn=database)
    refused = await call("budgets", "spend", "team", execution, "tokens=2400", dsn=database, code=1)
    assert "does not fit: tokens 40 of 2,400 used" in refused.out
    shown = await call("budgets", "show", "team", dsn=database)
    assert re.search(rf"{execution} +tokens +40 +this", shown.out)
    await call("budgets", "spend", "team", execution, "--release", dsn=database)
    assert (await engine.get_budget_status(budget_id_of("team"))).usage["tokens"] == 0
    assert "team is reset; next reset at" in (await call("budgets", "reset", "team", dsn=database)).out


async def test_the_list_shows_bars_of_what_is_used_and_held(engine: ff.Engine, database: str) -> None:
    await hold(engine)
    await engine.create_budget(name="free")
    await engine.create_budget(name="half", dimensions=["tokens"], hard_limits=[1000], soft_limits=[0])
    handle = (await started(engine, policy=ExecutionPolicy(budget_ids=(budget_id_of("half"),)))).handle
    await engine.report_usage(handle, {"tokens": 250})
    await engine.reserve_usage(handle, {"tokens": 250})

    plain = (await call("budgets", dsn=database)).out
    assert "[################] 100 %" in plain
    assert "[####++++........]  50 %" in plain
    assert re.search(r"team +tokens +100 +100 +\[#+\] 100 % +80 +2 ", plain)
    only = (await call("budgets", "list", "--exhausted", "--json", dsn=database)).json
    assert [one["name"] for one in only["budgets"]] == ["team"]
    assert [one["name"] for one in (await call("budgets", "list", "ha", "--json", dsn=database)).json["budgets"]] == [
        "half"
    ]
    code, screen = await asyncio.to_thread(on_a_terminal, "budgets", "--dsn", database, columns=80)
    assert code == 0
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;]*m", "", screen).splitlines()) <= 80


async def test_the_watched_list_follows_what_is_used_until_it_is_interrupted(engine: ff.Engine, database: str) -> None:
    await engine.create_budget(name="team", dimensions=["tokens"], hard_limits=[100], soft_limits=[0])
    arguments = ("budgets", "--watch", "--json", "--interval", "100ms", "--dsn", database)
    watching = await asyncio.create_subprocess_exec(
        PROGRAM, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert watching.stdout is not None

    async def used() -> dict[str, int]:
        line = await asyncio.wait_for(watching.stdout.readline(), PATIENCE)  # type: ignore[union-attr]
        return dict(json.loads(line)["budgets"][0]["usage"])

    assert await used() == {}
    await engine.report_usage_admin(budget_id_of("team"), dimensions=["tokens"], deltas=[40])
    while (found := await used()) != {"tokens": 40}:
        assert found == {}
    watching.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(watching.communicate(), PATIENCE)
    assert (watching.returncode, err) == (130, b"")


async def test_names_of_limits_are_completed(engine: ff.Engine, database: str) -> None:
    for name in ("team", "tests", "other"):
        await engine.create_budget(name=name)
        await engine.create_quota_policy(name=f"q-{name}", max_concurrent=1)

    async def complete(line: str) -> set[str]:
        asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1), "FLOWFABRIC_DSN": database}
        env = {"_FLOWFABRIC_COMPLETE": "complete_bash", **asked}
        done = await asyncio.to_thread(CliRunner().invoke, COMMAND_TREE, prog_name="flowfabric", env=env)
        return set(done.stdout.split())

    for line in ("budgets show te", "budgets raise te"):
        assert await complete(f"flowfabric {line}") == {"team", "tests"}, line
    for line in ("quotas show q-te", "quotas set q-te", "submit --quota q-te"):
        assert await complete(f"flowfabric {line}") == {"q-team", "q-tests"}, line
    assert await complete("flowfabric ls --held-by te") >= {"team", "tests"}


async def test_wrong_arguments_of_budgets_are_refused_and_nothing_changes(engine: ff.Engine, database: str) -> None:
    await engine.create_budget(name="team", dimensions=["tokens"], hard_limits=[5], soft_limits=[0])
    for given, code, words in (
        (["raise", "taem", "tokens=1"], 1, "not found: budget taem (did you mean team?)"),
        (["raise", "team", "tokens"], 2, "allowed: DIMENSION=AMOUNT"),
        (["raise", "team", "tokens=1.5"], 2, "the amount an integer"),
        (["raise", "team", "tokens=1", "tokens=2"], 2, "'tokens' is given twice"),
        (["raise", "team", f"tokens={2**63}"], 2, "got 9223372036854775808"),
        (["set", "team"], 2, "nothing to set"),
        (["set", "team", "--hard", "tokens=-1"], 2, "an integer from 0"),
        (["set", "team", "--mode", "soft"], 2, "allowed: strict, warn"),
        (["create", "", "--hard", "tokens=1"], 2, "empty"),
        (["spend", "team", "abcdef", "tokens=1"], 1, "not found: execution abcdef"),
        (["spend", "team", "abcdef"], 2, "give amounts, or --release"),
    ):
        said = await call("budgets", *given, dsn=database, code=code)
        assert words in said.err, (given, said)
    assert (await engine.get_budget_status(budget_id_of("team"))).hard_limits == {"tokens": 5}


# ---- quotas


async def test_a_wrong_amount_is_refused_with_what_is_allowed(engine: ff.Engine, database: str) -> None:
    await engine.create_budget(name="team", dimensions=["tokens"], hard_limits=[100], soft_limits=[0])
    bare = await call("budgets", "raise", "team", "5000", dsn=database, code=2)
    assert "allowed: DIMENSION=AMOUNT, such as tokens=50000" in bare.err
    misspelt = await call("budgets", "raise", "team", "token=5", dsn=database, code=2)
    assert "raise_by['token']: the budget has no hard limit of this dimension" in misspelt.err


async def test_budgets_without_a_command_takes_the_filters_of_its_list(engine: ff.Engine, database: str) -> None:
    await hold(engine)
    await engine.create_budget(name="other", dimensions=["tokens"], hard_limits=[100], soft_limits=[0])
    assert "other" not in (await call("budgets", "--exhausted", dsn=database)).out
    assert "team" in (await call("budgets", "--exhausted", "--runs", dsn=database)).out


async def test_a_quota_is_created_shown_and_changed(engine: ff.Engine, database: str) -> None:
    await call("quotas", "create", "api", "--concurrent", "1", "--rate", "600/60s", "--key", "tenant", dsn=database)
    await call("quotas", "create", "api", "--concurrent", "5", dsn=database, code=1)
    policy = ExecutionPolicy(quota_policy_ids=(quota_policy_id_of("api"),))
    for _ in range(3):
        await submit(engine, policy=policy, tags={"tenant": "acme"})
    for _ in range(2):
        await claim(engine)
    listed = (await call("quotas", dsn=database)).out
    assert re.search(r"api +tenant +1 +1 +1 +600 in 1 min +2", listed)
    shown = (await call("quotas", "show", "api", dsn=database)).out
    assert re.search(r"acme +1 +1 +2", shown)
    assert "Waiting for it" in shown
    await call("quotas", "set", "api", "--concurrent", "2", "--rate", "0", dsn=database)
    found = (await call("quotas", "show", "api", "--json", dsn=database)).json
    assert found["quota"]["limits"]["active_concurrency_cap"] == 2
    assert found["quota"]["limits"]["max_requests_per_window"] == 0
    assert len(found["waiting"]) == 1
    for given, code, words in (
        (["create", "b"], 2, "no limit"),
        (["create", "b", "--rate", "5"], 2, "such as 600/60s"),
        (["create", "b", "--rate", "5/500ms"], 2, "whole seconds"),
        (["set", "api"], 2, "nothing to set"),
        (["set", "apl", "--concurrent", "1"], 1, "did you mean api?"),
    ):
        assert words in (await call("quotas", *given, dsn=database, code=code)).err, given


# ---- what limits hold back


async def test_limits_are_bound_to_scopes_and_unbound(engine: ff.Engine, database: str) -> None:
    await call("budgets", "create", "team", "--hard", "tokens=5", dsn=database)
    await call("quotas", "create", "slots", "--concurrent", "2", dsn=database)
    every = ("--lane", "gpu", "--kind", "chat", "--namespace", "eu", "--tag", "plan=free", "--flow", "nightly")
    words = "lane gpu, kind chat, namespace eu, tag plan=free, flow nightly"
    scope = {"lane": "gpu", "kind": "chat", "namespace": "eu", "tag": ["plan", "free"], "flow": "nightly"}
    for command, name in (("budgets", "team"), ("quotas", "slots")):
        assert (await call(command, "bind", name, *every, dsn=database)).out == f"{name} is bound to {words}\n"
        assert (await call(command, "bind", name, *every, dsn=database)).out == f"{name} was already bound to {words}\n"
        made = (await call(command, "bind", name, "--lane", "default", "--json", dsn=database)).json
        assert made["is_new"] is True
        shown = (await call(command, "show", name, "--json", dsn=database)).json["bindings"]
        assert len(shown) == 2
        assert scope in [one["bind"] for one in shown]
        assert words in (await call(command, "show", name, dsn=database)).out
        assert (
            await call(command, "unbind", name, *every, dsn=database)
        ).out == f"{name} is no longer bound to {words}\n"
        again = await call(command, "unbind", name, *every, dsn=database, code=1)
        assert f"{name} is not bound to {words}" in again.err
        gone = await call(command, "unbind", name, "--kind", "x", "--json", dsn=database, code=1)
        assert gone.json["existed"] is False
        for wrong, said in (((), "bind"), (("--tag", "plan"), "--tag"), (("--lane", ""), "lane")):
            assert said in (await call(command, "bind", name, *wrong, dsn=database, code=2)).err
        await call(command, "bind", "unknown", "--lane", "a", dsn=database, code=1)
    found = await engine.read_execution(await submit(engine))
    assert found is not None
    assert found.budget_ids == (budget_id_of("team"),)
    assert found.quota_policy_ids == (quota_policy_id_of("slots"),)


async def test_what_a_budget_holds_back_is_listed_counted_and_explained(engine: ff.Engine, database: str) -> None:
    first, second = await hold(engine)
    listed = await call("ls", "--held-by", "team", "--quiet", dsn=database)
    assert listed.out.split() == [str(first), str(second)]
    page = (await call("ls", "--held-by", "team", "--json", "--limit", "1", dsn=database)).json
    assert [one["execution_id"] for one in page["items"]] == [str(first)]
    rest = (await call("ls", "--held-by", "team", "--json", "--cursor", page["next_cursor"], dsn=database)).json
    assert [one["execution_id"] for one in rest["items"]] == [str(second)]
    assert "not found: budget or quota taem" in (await call("ls", "--held-by", "taem", dsn=database, code=1)).err

    shown = (await call("show", first, dsn=database)).out
    assert re.search(r"held by +budget team", shown)
    assert re.search(r"until +`flowfabric budgets raise team tokens=1`, or a reset", shown)
    assert re.search(r"held since +2", shown)
    assert "others" not in shown
    later = (await call("show", second, "--json", dsn=database)).json["held_by"]["until"]
    assert later.endswith(", after 1 other that it lets continue first")
    document = (await call("show", first, "--json", dsn=database)).json
    assert document["held_by"]["name"] == "team"
    assert document["limits"]["budgets"] == ["team"]
    assert re.search(r"default .* 2 +team 2", (await call("lanes", dsn=database)).out)
    held = (await call("lanes", "--json", dsn=database)).json["held"]
    assert [(one["lane_id"], one["what"], one["name"], one["count"]) for one in held] == [
        ("default", "budget", "team", 2)
    ]
    top = await call("top", "--once", "--interval", "100ms", "--json", dsn=database)
    assert top.json["held"][0]["count"] == 2


async def test_what_a_limit_holds_back_is_filtered_like_other_lists(engine: ff.Engine, database: str) -> None:
    first, second = await hold(engine)
    policy = ExecutionPolicy(budget_ids=(budget_id_of("team"),))
    other = await submit(engine, policy=policy, lane_id="gpu", execution_kind="other", namespace="n", tags={"a": "b"})
    assert await engine.claim("gpu", **WORKER) is None
    await submit(engine, execution_kind="other", tags={"a": "b"})  # not held
    every, nothing = [first, second, other], list[ff.ExecutionId]()
    for given, expected in (
        (("--lane", "gpu"), [other]),
        (("--lane", "gpu", "--lane", "default"), every),
        (("--kind", "other"), [other]),
        (("--namespace", "n"), [other]),
        (("--tag", "a=b"), [other]),
        (("--tag", "a=c"), nothing),
        (("--since", "1h", "--lane", "default"), [first, second]),
        (("--until", "1h"), nothing),
        (("--parent", str(first)), nothing),
    ):
        listed = await call("ls", "--held-by", "team", "--quiet", *given, dsn=database)
        assert sorted(listed.out.split()) == sorted(map(str, expected)), given
    none = await call("ls", "--held-by", "team", "--tag", "a=c", dsn=database)
    assert "team holds none of these executions back" in none.err
    page = (await call("ls", "--held-by", "team", "--lane", "default", "--json", "--limit", "1", dsn=database)).json
    again = ("--cursor", page["next_cursor"], "--lane", "default")
    rest = (await call("ls", "--held-by", "team", "--json", *again, dsn=database)).json
    assert [one["execution_id"] for one in page["items"] + rest["items"]] == [str(first), str(second)]
    for wrong in (("--tree",), ("--watch",), ("--all",), ("--state", "waiting"), ("--stopped",)):
        refused = await call("ls", "--held-by", "team", *wrong, dsn=database, code=2)
        assert f"given with {wrong[0]}" in refused.err
        assert "--lane, --kind" in refused.err


async def test_the_limit_that_holds_a_rate_limited_execution_says_when_it_is_tried_again(
    engine: ff.Engine, database: str
) -> None:
    await engine.create_quota_policy(name="slow", max_requests_per_window=1)
    policy = ExecutionPolicy(quota_policy_ids=(quota_policy_id_of("slow"),))
    ids = [await submit(engine, policy=policy) for _ in range(2)]
    for _ in range(2):
        await claim(engine)
    shown = (await call("show", ids[1], dsn=database)).out
    assert re.search(r"held by +quota slow", shown)
    assert re.search(r"next try +2", shown)
    assert "room in the window of its rate, or `flowfabric quotas set slow`" in shown
    _, row = (await call("ls", "--held-by", "slow", dsn=database)).out.splitlines()
    assert row.count("default") == 1, "the lane; a quota without a key has no value to show"
    assert "default" not in (await call("quotas", "show", "slow", dsn=database)).out


async def test_the_command_that_lets_a_paused_execution_continue_is_shown_whole(
    engine: ff.Engine, database: str
) -> None:
    await engine.create_budget(name="free plan", dimensions=["tokens"], hard_limits=[10], soft_limits=[0])
    named = await started(engine, policy=ExecutionPolicy(budget_ids=(budget_id_of("free plan"),)))
    await engine.report_usage(named.handle, {"tokens": 4})
    await engine.pause_for_budget(named.handle, {"tokens": 7})
    shown = (await call("show", named.execution_id, "--json", dsn=database)).json["held_by"]["until"]
    assert shown == "`flowfabric budgets raise 'free plan' tokens=1`, or a reset"
    own = await started(engine, policy=ExecutionPolicy(budget=OwnBudget(hard={"tokens": 50})))
    await engine.pause_for_budget(own.handle, {"tokens": 80})
    shown = (await call("show", own.execution_id, "--json", dsn=database)).json["held_by"]["until"]
    assert shown == f"`flowfabric budgets raise {own.execution_id} tokens=30`", "a reset does not help"
    assert re.search(r" 2 +own budgets 1, free plan 1", (await call("lanes", "--wide", dsn=database)).out)
    history = (await call("show", own.execution_id, dsn=database)).out
    assert re.search(r"paused +gave its worker back until its budgets have room", history)
    assert "lease revoked" not in history
    short = await call("budgets", "show", str(own.execution_id)[-8:], "--json", dsn=database)
    assert short.json["budget"]["owner_id"] == str(own.execution_id)
    held = await call("ls", "--held-by", str(own.execution_id)[-8:], "--quiet", dsn=database)
    assert held.out.split() == [str(own.execution_id)]
    words = shlex.split(shown.strip("`"))
    await call(*words[1:], dsn=database)
    assert (await claim_one(engine)).execution_id == own.execution_id


async def test_the_doctor_warns_of_limits_that_hold_in_vain_and_budgets_without_reports(
    engine: ff.Engine, database: str
) -> None:
    await hold(engine)
    await engine.create_budget(name="unused", dimensions=["tokens"], hard_limits=[10], soft_limits=[0])
    ended = await started(engine, policy=ExecutionPolicy(budget_ids=(budget_id_of("unused"),)))
    await engine.complete(ended.handle, b"1")
    await engine.create_budget(name="small", dimensions=["tokens"], hard_limits=[10], soft_limits=[0])
    needy = await started(engine, policy=ExecutionPolicy(budget_ids=(budget_id_of("small"),)))
    await engine.pause_for_budget(needy.handle, {"tokens": 50})
    own = await started(engine, policy=ExecutionPolicy(budget=OwnBudget(hard={"tokens": 5})))
    await engine.pause_for_budget(own.handle, {"tokens": 60})

    found = (await call("doctor", "--json", dsn=database, code=1)).json["findings"]
    words = [one["detail"] for one in found if one["check"] in ("limits", "budgets") and one["verdict"] == "warning"]
    assert any("budget team is exhausted, is never reset, and holds executions back" in one for one in words)
    assert any("none ever reported usage: unused" in one for one in words)
    assert any(f"{needy.execution_id} needs 50 tokens" in one for one in words)
    assert any(f"{own.execution_id} needs 60 tokens" in one for one in words)


async def test_a_submission_names_limits(
    engine: ff.Engine, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "limited_app.py").write_text(APP)
    monkeypatch.syspath_prepend(str(tmp_path))
    await engine.create_budget(name="other")
    await engine.create_quota_policy(name="api", max_concurrent=1)
    made = await call(
        "submit", "limited_app:app", "agent", "1", "--budget", "other", "--quota", "api", "--json", dsn=database
    )
    found = await engine.read_execution(made.json["execution_id"])
    assert found is not None
    assert set(found.budget_ids) == {budget_id_of("other"), budget_id_of("declared")}
    assert found.quota_policy_ids == (quota_policy_id_of("api"),)
    for given, words in (
        (["--budget", "othr"], "there is no budget 'othr'"),
        (["--quota", "apl"], "there is no quota 'apl'"),
        (["--budget", "tokens=1.5"], "the amount an integer from 0"),
        (["--budget", "tokens=0"], "an integer from 1"),
    ):
        assert words in (await call("submit", "limited_app:app", "agent", "1", *given, dsn=database, code=2)).err
