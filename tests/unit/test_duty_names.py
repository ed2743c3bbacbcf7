"""A duty has one name: its class, its file, what logs and metrics say, and the glossary."""

from __future__ import annotations

from pathlib import Path

from flowfabric import _duties

ROOT = Path(__file__).resolve().parents[2]


def test_every_duty_is_named_as_its_file_and_is_in_the_glossary() -> None:
    glossary = (ROOT / "docs" / "concepts" / "glossary.md").read_text()
    for duty in _duties.ALL:
        assert duty.__module__ == f"flowfabric._duties.{duty.name}"
        assert duty.name.replace("_", "") == duty.__name__.lower()
        assert f"`{duty.name}`" in glossary
