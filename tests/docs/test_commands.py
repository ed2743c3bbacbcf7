"""The commands and the metrics that the pages name are those of the program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from flowfabric import cli
from flowfabric.middleware import METRICS
from flowfabric.server.metrics import SERVER_METRICS, STORED_METRICS
from flowfabric.worker.health import WORKER_METRICS
from tests.docs.pages import PAGES, ROOT, fences, name

# Up to what belongs to the shell: a comment, a redirection, an end.
_COMMAND = re.compile(r"\bflowfabric ((?:'[^']*'|\"[^\"]*\"|[^#\n)&|>;'\"])+?)(?= +#| *2?>|[\n)&|;])")
# What another program prints: one word, whatever it is.
_PRINTED = re.compile(r"\$\((?!flowfabric )[^()\n]*\)")
_PROGRAM = typer.main.get_command(cli.app)
_PLACES = [page for page in PAGES if page.parent.name != "reference"]


def _commands(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    shell = "".join(block.code for block in fences(page) if block.language == "sh")
    shell += "".join(re.findall(r"^ +```sh\n(.*?)^ +```$", text, flags=re.MULTILINE | re.DOTALL))
    return [found.strip() for found in _COMMAND.findall(_PRINTED.sub("PRINTED", shell))]


ALL = [(page, command) for page in _PLACES for command in _commands(page)]


@pytest.mark.parametrize(("page", "command"), ALL, ids=lambda value: name(value) if isinstance(value, Path) else value)
def test_a_command_on_a_page_can_be_given_like_that(page: Path, command: str) -> None:
    words = shlex.split(command)
    group: Any = _PROGRAM
    while words and words[0] in getattr(group, "commands", {}):
        group = group.commands[words.pop(0)]
    with group.make_context("flowfabric", words):  # reads the words as the program would, and runs nothing
        pass


def test_the_commands_of_the_pages_are_found() -> None:
    found = {command.split()[0] for _, command in ALL}
    assert found >= {"worker", "dev", "submit", "ls", "show", "wait", "failures", "replay", "schedules", "migrate"}
    assert found >= {"waits", "approve", "reject", "signal", "resume", "keys", "flow"}


def test_every_metric_of_the_server_has_a_line_with_its_labels() -> None:
    text = (ROOT / "docs" / "guides" / "run-a-server.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(flowfabric_\w+)` \|(.*?)\|", text, flags=re.MULTILINE)
    assert {metric: labels.strip() for metric, labels in found} == {
        name: ", ".join(one.labels) for name, one in {**SERVER_METRICS, **STORED_METRICS}.items()
    }


def test_the_table_of_the_other_implementations_metrics_names_metrics_that_exist() -> None:
    text = (ROOT / "docs" / "reference" / "parity.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `ff_\w+`.*$", text, flags=re.MULTILINE)
    assert len(rows) > 10
    named = {name for row in rows for name in re.findall(r"`(flowfabric_\w+)`", row)}
    assert named - {**METRICS, **WORKER_METRICS, **SERVER_METRICS, **STORED_METRICS}.keys() == set()


def test_every_metric_has_a_line_with_its_labels() -> None:
    text = (ROOT / "docs" / "guides" / "deploy.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(flowfabric_\w+)` \|(.*?)\|", text, flags=re.MULTILINE)
    lines = {metric: labels.strip() for metric, labels in found}
    assert lines.keys() == {**METRICS, **WORKER_METRICS}.keys()
    assert {name: lines[name] for name in METRICS} == {name: ", ".join(one.labels) for name, one in METRICS.items()}
