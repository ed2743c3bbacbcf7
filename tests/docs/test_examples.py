"""Every example runs as a program of its own, on an empty database, and leaves no process behind."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import sampling
from tests.docs.pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DEMO = ROOT / "examples" / "crash_and_continue.py"
SAYS = {
    "agent.py": [
        r"\Aworker 1 is killed; the page shows: The lamp arrived \.\.\.\n"
        r"a forged link: 401, the real one: 200 resumed\n",
        r"the page shows: Let me look at the order first\. / The lamp .* is due\. / Done: 4990 cents are refunded\.\n"
        r"model 0 was begun by worker 1\nmodel 1 was begun by worker 1 and worker 2\nmodel 2 was begun by worker 2\n"
        r"tools that ran: look_up, refund\nthe provider charged 87 \+ 169 \+ 245 = 501 tokens\n"
        r"the budget of the run counts 501 of 5,000, held: {}\n",
        r"the fork: Done: a voucher .*\ntools that ran: voucher\nthe provider charged 169 \+ 248 = 417 tokens\n\Z",
    ],
    "agent_pydantic_ai.py": [
        r"\Aasks the model\nlooks up the order\nrefunds\nasks the model\n{\"look_up\":.*refunded\"}\n"
        r"steps: model, look_up, refund, model\nstreamed: {\"look_up\":.*}\ntokens: \d+\n\Z"
    ],
    "budget_of_five_children.py": [
        r"\Aused: 2700 of 3000\nsource 1 is studied, .*, source 5 is studied\ntokens: 4500 by 5 children\n\Z"
    ],
    "budgets_per_tenant.py": [
        r"\Aacme's third question waits for: waiting_for_budget\neverybody: 2\.00 of 5\.00\n",
        r"tenant acme: 0\.80 of 1\.00\ntenant initech: 1\.20 of 3\.00\nquestion 2\? Yes\.\n\Z",
    ],
    "callback_wins_the_race.py": [
        r"\Acalled back: 202 accepted\ncontinues without a wait\n990 cents, reference p-17\n\Z"
    ],
    "callbacks_django.py": [r"\APOST: 200 resumed\nPOST: 200 duplicate\n990 cents, reference p-17\n\Z"],
    "callbacks_flask.py": [r"\APOST: 200 resumed\nPOST: 200 duplicate\n990 cents, reference p-17\n\Z"],
    "callbacks_form.py": [r"\AGET: 200\nPOST: Thank you\.\norder 42: refunded \(came broken\)\n\Z"],
    "callbacks_starlette.py": [
        r"\AGET: 200\nPOST: (accepted|resumed)\norder 42 is refunded\nGET afterwards: 404\n\Z",
    ],
    "child_tasks.py": ["words: 10", "children: 3"],
    "crash_and_continue.py": [
        r"a reader gets 'payment 42007 is made'\n.*worker 1 is killed with SIGKILL",
        r"another attempt begins\n(.*\n)*.*a reader gets 'payment 42007 is made'\n(.*\n)*.*'the parcel is packed'",
        r"reserve stock +│ worker 1 +│ [\d.]+ s +│ 1 ",
        r"print label +│ worker 1, worker 2 +│ [\d.]+ s +│ 2 ",
        r"submitted over HTTP, to http://127\.0\.0\.1:\d+\n",
        r"waits for an approval, and no worker holds it\n.*Ada approves it with the link that she got\n",
        r"approval +│ +│ [\d.]+ s +│ 2 ",
        r"stops at its budget: 1,200 cents are more than 1,000\n.*is raised to 1,500 cents",
        r"notify +│ worker 2 +│ [\d.]+ s +│ 2 ",
        "approved by link",
        "nothing wrong",
    ],
    "deploy_approval.py": [
        r"\Acreated build unit browser load gate deploy\n(alice|bob): Thank you\n(alice|bob): Thank you\n"
        r"image of v7 is live, approved by alice and bob\nthe same link again: 404\nflowchart",
    ],
    "deployment_log.py": [r"\Abuild v7\nmigrate v7\nship v7\nafter 8 changes: .*'ship': 'done'"],
    "durable_steps.py": [
        r"\A(writing about fjords\ndrawing fjords|drawing fjords\nwriting about fjords)\nuploading\nuploading\nhttps",
        "write: done in attempt 1",
        "upload: done in attempt 2",
    ],
    "encrypted_payloads.py": ["see a doctor", r"json\+aes-gcm-\w+@, unreadable"],
    "exactly_once_consumer.py": [
        r"\Athe program dies after the inserts: 0 invoices\nagain: 3 events\nonce more: 0 events\n3 invoices\n\Z"
    ],
    "follow_tenant.py": [r"\Abill 0: success\nbill 1: success\nstored 13 bytes, and begins again\nbill 2: failed\n\Z"],
    "fork_from_a_step.py": [
        r"\Asearching for fjords \(this is expensive\)\nsober: a fact about fjords and another fact about fjords\n"
        r"cheerful: a fact about fjords and another fact about fjords\nforked from the first: True\n"
        r"the first is unchanged: sober: .*\n\Z"
    ],
    "fan_in.py": [
        "the token of db at cache: unauthorized",
        r"db: accepted\ncache: accepted\nflags: resumed\nv7: db migrated, cache warm, flags set\n\Z",
    ],
    "first_execution.py": ["b'hello world'"],
    "first_task.py": ["hello world"],
    "http_only.py": [
        r"\Acreated and duplicate the same\nwaits for approved\n"
        r"first: appended_to_waitpoint - second: resumed\ncompleted: image of v7 is live, approved by anonymous and \n",
        r"- success\n\Z",
    ],
    "late_worker.py": [
        r"\Atold: a scene was submitted\nwaiting because no live worker serves render in lane default with gpu\n"
        r"sunrise, rendered\nnot covered now: 0\n\Z"
    ],
    "map_reduce.py": [r"\Aparts: 3\nnodes: 5\nmost common: {'it': 3, 'was': 2, 'and': 2}\n\Z"],
    "media_pipeline.py": [
        r"\Afailed: subtitles - skipped: index\npackage: film\.480p \+ film\.720p \+ film\.1080p\n",
        r"✗  subtitles +failed +after probe\n +↷  index +skipped +after subtitles\n",
        r"again: subtitles index\nfilm is found by 'hello'\n\Z",
    ],
    "middleware_metrics.py": [r'submitted_total{kind="halve"} 5', r'outcome="error"} 3', "5 handlers took"],
    "model_race.py": [
        r"followed: small says 17\n",
        r"judge: 2 answers, the first: small says 17\n",
        r"results: small medium judge\n",
        r"large is stopped\n",
        r"small: completed\nmedium: completed\nlarge: cancelled\nhuge: cancelled\njudge: completed\n",
    ],
    "mounted_server.py": [r"\Aa shop\nwithout a key: 401\nwrong argument: 422 /arguments/nam\nhello Ada\n\Z"],
    "operator_over_http.py": [
        r"\Ainvoice 17: usage_ok\ninvoice 17: already_applied\ninvoice 18: hard_breach\nraised from 1000 to 1500\n",
        r"based on the budget as it was: 412 precondition_failed\na slot of the quota: admitted\npriority: 900\n",
        r"cancelled and replayed: waiting\nada: create_budget ok\n",
        r"ada: update_budget ok\nada: update_budget precondition_failed\nada: create_quota ok\n",
        r"ada: change_priority ok\nada: cancel_execution ok\nada: replay_execution ok\n\Z",
    ],
    "rate_limited_api.py": [
        r"\Aat the same time: {'acme': 2, 'initech': 2}\nstarted in the window: 7 - waiting: 1\n.*window: True\n\Z"
    ],
    "scheduler_by_grants.py": [r"\A3 grants for 2 slots\n(question \d: 42\n){3}\Z"],
    "schedules.py": ["beat .*every_ms.* next at", "morning report .*Europe/Berlin", r"(beat of \S+\n){2}"],
    "sse_consumer.py": [
        r"\Aorder 1: success\norder 2: success\nthe connection is cut\norder 3: success\norder 4: success\n"
        r"the server ends with 0\n\Z"
    ],
    "spend_ledger.py": [
        r"\Aused: 5500000\nrain cost_micros 4200000\nsnow cost_micros 1300000\nafter the refund: 1300000\n\Z"
    ],
    "submit_in_transaction.py": ["lamp: waiting", "chair: chair is sold out", "1 order, 1 execution waiting"],
    "sync_client.py": [
        "result: 3.5",
        r"results: \[0.25, 0.5, 0.75\]",
        "failed: ZeroDivisionError - division by zero",
        "refused: .*dividend",
    ],
    "testing_a_task.py": ["6 passed"],
    "tokens_to_a_browser.py": [r"\A5 tokens, a lost connection, 9 more\nWhy\? Once upon .* lost a job\.\n\Z"],
    "two_namespaces.py": [
        r"\Athe same key, two executions: True\nacme: an invoice over 100 - sees 1\n"
        r"initech: an invoice over 100 - sees 1\nforeign: 404 - unknown: 404\ncancel it: 404 - submit there: 404\n\Z"
    ],
    "two_person_approval.py": [
        "waits at: approval for approved",
        r"alice: appended_to_waitpoint\nalice: known already\nbob: resume_condition_satisfied\n",
        "live, approved by alice and bob",
    ],
    "who_serves_what.py": [
        r"\Aphotos serves thumbnail\nin images with gpu, 8 slots\n"
        r"no live worker serves thumbnail in lane imgaes; 1 alive\nsmall cat\.png\nalive afterwards: 0\n\Z"
    ],
}
AGAIN = {"schedules.py", "submit_in_transaction.py"}  # what they declare or create is there already; the others: --full
NEED_A_WORKER = {"first_task.py", "sync_client.py"}  # as their page or their docstring says


@contextlib.contextmanager
def worker(example: Path, env: dict[str, str]) -> Iterator[None]:
    """`flowfabric worker example:app`, started and ended as a person does it."""
    command = [sys.executable, "-m", "flowfabric.cli", "worker", f"{example.stem}:app"]
    with subprocess.Popen(command, env=env, cwd=example.parent, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            said = process.stderr.read()
        assert process.wait() == 0, said
        assert "has stopped" in said


@pytest.mark.xdist_group("programs")  # their server starts once
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_runs_again(example: Path, on_one_server: dict[str, str]) -> None:
    command = [sys.executable, "-W", "error", str(example)]
    # The interrupted demo below runs again too.
    runs = 2 if example.name in AGAIN or (sampling.is_full() and example.name != DEMO.name) else 1
    with worker(example, on_one_server) if example.name in NEED_A_WORKER else contextlib.nullcontext():
        for _ in range(runs):
            done = subprocess.run(command, env=on_one_server, capture_output=True, text=True, timeout=170, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            for words in SAYS[example.name]:
                assert re.search(words, done.stdout), done.stdout


def test_an_interrupted_demo_leaves_no_process_and_can_run_again(surroundings: dict[str, str]) -> None:
    for _ in range(2):
        with subprocess.Popen([sys.executable, str(DEMO)], env=surroundings, stdout=subprocess.PIPE, text=True) as demo:
            assert demo.stdout is not None
            for line in demo.stdout:
                if "worker 1 begins" in line:
                    break
            demo.send_signal(signal.SIGINT)
            demo.stdout.read()
        assert demo.returncode == 130


def test_make_demo_runs_the_demo() -> None:
    assert f"$(BIN)/python examples/{DEMO.name}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
