"""The chapters of the engine: its docstring lists every module, and a module calls the functions of its chapter."""

from __future__ import annotations

import re
from importlib import resources

from flowfabric import engine
from flowfabric._postgres import build

_TABLE = re.compile(r"(?m)^    (\w+) {2,}(.+)$")
_CREATE = re.compile(r"(?m)^create or replace function flowfabric\.(\w+)\(")
_STATEMENT = re.compile(r"(?m)^([A-Z_]+) = _\w+\(\s*\"(\w+)\"")
_USE = re.compile(r"\bstatements\.([A-Z_]+)\b")
SHARED = {"amounts", "base", "batch", "checks"}  # no operations of their own
# Functions of another chapter that a module calls beside its own.
BESIDE = {
    ("admission", "scan_eligible"),
    ("base", "read_edges"),
    ("children", "progress"),
    ("claims", "register_service"),
    ("claims", "heartbeat_worker"),
    ("claims", "sleep_for_work"),
    ("lanes", "read_gauges"),
    ("quotas", "unblock_limited"),
    ("service", "register_lanes"),
    ("steps", "progress"),
    ("watches", "read_outcomes"),
}


def chapters() -> dict[str, str]:
    """The chapter of each module, from the docstring."""
    return {
        module: chapter for chapter, modules in _TABLE.findall(engine.__doc__ or "") for module in modules.split(", ")
    }


def sources() -> dict[str, str]:
    files = resources.files(engine).iterdir()
    return {file.name.removesuffix(".py"): file.read_text() for file in files if file.name.endswith(".py")}


def test_the_docstring_lists_every_module_of_operations() -> None:
    assert set(chapters()) == set(sources()) - SHARED - {"__init__"}


def test_a_module_calls_the_functions_of_its_chapter() -> None:
    home = {
        function: path.split("/")[1] for path, sql in build.sql_files("functions") for function in _CREATE.findall(sql)
    }
    statements = resources.files("flowfabric._postgres").joinpath("statements.py").read_text()
    calls = dict(_STATEMENT.findall(statements))
    assert len(calls) > 100
    found = {
        (module, calls[name])
        for module, text in sources().items()
        for name in _USE.findall(text)
        if name in calls and home[calls[name]] != chapters().get(module)
    }
    assert found == BESIDE
