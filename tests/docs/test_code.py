"""Every Python block of every page runs, or repeats an example word for word."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import flowfabric as ff
from tests.docs.pages import PAGES, ROOT, blocks, name

WITH_CODE = [page for page in PAGES if any(block.is_run_alone for block in blocks(page))]
WHOLE_PROGRAMS = {"docs/guides/build-an-agent.md"}  # nothing is there before their first block
QUOTING = [(page, block) for page in PAGES for block in blocks(page) if block.source is not None]


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
async def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: Path, plain_engine: ff.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWFABRIC_DSN", plain_engine.dsn)
    names: dict[str, object] = {"__name__": page.stem.replace("-", "_")}
    if name(page) not in WHOLE_PROGRAMS:
        names |= {"ff": ff, "engine": plain_engine}
    for block in blocks(page):
        if block.is_run_alone:
            # Blank lines in front, so that a traceback names the line of the page.
            code = compile(
                "\n" * block.line + block.code,
                name(page),
                "exec",
                flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
                dont_inherit=True,
            )
            running = eval(code, names)
            if inspect.isawaitable(running):
                await running
    for app in (value for value in names.values() if isinstance(value, ff.App)):
        await app.close()


@pytest.mark.parametrize(
    ("page", "block"), QUOTING, ids=lambda value: name(value) if isinstance(value, Path) else "quote"
)
def test_quoted_code_is_that_of_the_example(page: Path, block: object) -> None:
    assert block.source is not None  # type: ignore[attr-defined]
    source = (ROOT / block.source).read_text(encoding="utf-8")  # type: ignore[attr-defined]
    part = block.part  # type: ignore[attr-defined]
    if part is not None:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = {n.name: n for n in ast.parse(source).body if isinstance(n, kinds)}[part]
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        source = "".join(source.splitlines(keepends=True)[first - 1 : node.end_lineno])
    assert block.code == source  # type: ignore[attr-defined]


def test_the_readme_begins_with_the_first_example_in_full() -> None:
    quoted = [block.source for block in blocks(ROOT / "README.md")]
    assert quoted[0] == "examples/first_task.py"
    assert blocks(ROOT / "README.md")[0].part is None
    lines = (ROOT / "examples" / "first_task.py").read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 15


def test_the_pages_with_code_are_found() -> None:
    assert {name(page) for page in WITH_CODE} >= {
        "docs/concepts/events.md",
        "docs/concepts/executions.md",
        "docs/concepts/flows.md",
        "docs/concepts/tasks.md",
        "docs/concepts/waits.md",
        "docs/guides/build-an-agent.md",
        "docs/guides/flows.md",
        "docs/guides/operate.md",
        "docs/guides/parents-and-children.md",
        "docs/guides/retries.md",
        "docs/guides/schedules.md",
        "docs/guides/steps.md",
        "docs/guides/waiting.md",
    }
