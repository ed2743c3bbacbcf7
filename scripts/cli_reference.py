"""Writes the reference page of the command line from the program itself.

    python scripts/cli_reference.py           write docs/reference/cli.md
    python scripts/cli_reference.py --check   change nothing; exit 1 if the page differs

The text comes from the docstrings of the commands and the help of their options.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from flowfabric import cli
from flowfabric.cli._program import EXIT_CODES

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"
_INTRODUCTION = """\
# Command line

<!-- Written by scripts/cli_reference.py from the program. Edit its help. -->

`flowfabric COMMAND --help` prints the same. Commands that need a database take `--dsn`; without it they use
`FLOWFABRIC_DSN`, and without that the embedded server, which the command starts.

Output is for people: a terminal gets colours, a pipe plain columns in which nothing is cut. `--json` is for programs:
one JSON document, or one line per item for a stream (`ls --all`, `top`, `flow show --watch`). Times are ISO 8601,
durations are seconds. Hints, questions and progress go to standard error.

An execution or a flow is named by its id, a UUID, or by at least 6 hex digits of its end or its beginning that no other
one has. The short form is the end, its last 8 digits: the beginning is the time.

`flowfabric --install-completion` lets your shell complete commands, options, states and, if `FLOWFABRIC_DSN` is set,
the names of lanes, schedules and flows, the ids of flows, and the executions and keys that can be signalled.
"""


def page() -> str:
    """Return the whole page."""
    program: Any = typer.main.get_command(cli.app)
    lines = [_INTRODUCTION, "## Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES]
    lines += ["", "An error is one line on standard error. Ctrl-C exits with 130.", "", "## flowfabric", ""]
    lines += _table(program)
    for name, command in _commands(program, "flowfabric"):
        lines += [f"## {name}", "", f"`{name}{_usage(command)}`", "", _words(command.help), "", *_table(command)]
    text = "\n".join(lines).strip() + "\n"
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in sorted(group.commands.items()):
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")


def _usage(command: Any) -> str:
    parts = [_metavar(each) for each in command.params if _is_argument(each)]
    if hasattr(command, "commands"):
        parts.append("COMMAND")
    return "".join(f" {part}" for part in parts)


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _table(command: Any) -> list[str]:
    lines = []
    for each in command.params:
        if getattr(each, "hidden", False) or each.name == "help":
            continue
        if _is_argument(each):
            name = f"`{_metavar(each).strip('[].')}`"
        else:
            name = ", ".join(f"`{option}`" for option in (*each.opts, *each.secondary_opts))
            if not each.is_flag:
                name += f" {each.metavar or 'TEXT'}"
        lines.append(f"| {name} | {_cell(_meaning(each))} |")
    return ["| option | meaning |", "|---|---|", *lines, ""] if lines else []


def _meaning(parameter: Any) -> str:
    words = _words(parameter.help)
    if not _is_argument(parameter) and parameter.multiple:
        words += " May be given several times."
    default = parameter.default
    if (
        not _is_argument(parameter)
        and not parameter.is_flag
        and default not in (None, (), [])
        and not callable(default)
    ):
        words += f" Default: {default}."
    return words


def _words(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    written = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
    text = page()
    if written == text:
        return 0
    if "--check" in sys.argv[1:]:
        print("docs/reference/cli.md is out of date: run scripts/cli_reference.py")
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
