"""Nothing is undocumented, the generated pages say what the code says, and links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric import settings
from flowfabric._duties import ALL
from tests.docs.pages import PAGES, ROOT, anchors, load, name

REFERENCE = ROOT / "docs" / "reference"
GENERATOR = load(ROOT / "scripts" / "reference.py", "reference")


@pytest.mark.parametrize("page", GENERATOR.PAGES)
def test_a_generated_page_is_what_the_code_says(page: str) -> None:
    written = (REFERENCE / page).read_text(encoding="utf-8")
    assert written == GENERATOR.PAGES[page](), "run scripts/reference.py"


@pytest.mark.parametrize("public", ff.__all__)
def test_every_public_name_is_in_the_reference(public: str) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    assert re.search(rf"^###? {public}$|`flowfabric\.{public}`", text, flags=re.MULTILINE)


def test_every_operation_says_what_its_signature_cannot() -> None:
    members = {n: member for group in ff.Engine.__bases__ for n, member in vars(group).items() if n[0] != "_"}
    assert len(members) > 50
    assert [n for n, member in members.items() if not getattr(member, "__doc__", None)] == []


def test_every_setting_has_a_line_with_its_default() -> None:
    text = (REFERENCE / "settings.md").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^\| `(FLOWFABRIC_\w+)` \| (.+?) \|", text, flags=re.MULTILINE))
    fields = dataclasses.fields(settings.Settings)
    assert set(settings.ENVIRONMENT) == {field.name for field in fields}
    assert set(lines) == {*settings.ENVIRONMENT.values(), *settings.SERVER_ENVIRONMENT.values()}
    for field in fields:
        default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        shown = "unset" if default is None else f"`{default}`"
        assert lines[settings.ENVIRONMENT[field.name]] == shown
    for option, default in settings.SERVER.items():
        assert lines[settings.SERVER_ENVIRONMENT[option]] == ("unset" if default is None else f"`{default}`")


async def test_every_setting_of_a_deployment_has_a_line(sql: asyncpg.Connection[Any]) -> None:
    columns = await sql.fetch(
        "select attname from pg_attribute where attrelid = 'flowfabric.deployment'::regclass and attnum > 0"
        " and not attisdropped and attname <> 'one'"
    )
    text = (REFERENCE / "settings.md").read_text(encoding="utf-8").split("## Of a deployment")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)) == {row["attname"] for row in columns}


def test_every_environment_name_in_the_docs_exists() -> None:
    known = {*settings.ENVIRONMENT.values(), *settings.SERVER_ENVIRONMENT.values()}
    known |= {f"FLOWFABRIC_{duty.name.upper()}_INTERVAL" for duty in ALL}
    for page in PAGES:
        assert set(re.findall(r"FLOWFABRIC_[A-Z_]*[A-Z]", page.read_text(encoding="utf-8"))) <= known, name(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_example_is_in_the_index() -> None:
    index = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in (ROOT / "examples").glob("*.py") if f"({path.name})" not in index] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page != "README.md" and f"({page})" not in index] == []
