"""The page of the command line matches the program, and every command and option has a help text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from flowfabric import cli
from flowfabric.cli._program import EXIT_CODES
from tests.docs.pages import ROOT, load


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")


COMMANDS = dict(_commands(typer.main.get_command(cli.app), "flowfabric"))
PAGE = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")


def test_the_page_is_what_the_program_says() -> None:
    assert load(ROOT / "scripts" / "cli_reference.py", "cli_reference").page() == PAGE, "run scripts/cli_reference.py"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_words(name: str) -> None:
    command = COMMANDS[name]
    assert f"\n## {name}\n" in PAGE
    assert command.help
    section = PAGE.split(f"\n## {name}\n", 1)[1].split("\n## ", 1)[0]
    for option in command.params:
        if option.name != "help" and not getattr(option, "hidden", False):
            assert option.help, option.name
            assert all(f"`{one}`" in section for one in option.opts if one.startswith("-")), option.name


def test_every_exit_code_is_on_the_page_and_in_the_help() -> None:
    for code, meaning in EXIT_CODES:
        assert f"| {code} | {meaning} |" in PAGE
        assert f"{code} {meaning}" in (cli.app.info.epilog or "")
