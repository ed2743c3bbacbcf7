"""The pages of the documentation and the code on them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"^(?:<!-- from (?P<source>\S+?)(?:: (?P<part>\w+))? -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """One fenced block. `source` is the example it must repeat, `part` the function of it."""

    line: int
    language: str
    code: str
    source: str | None
    part: str | None


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The Python blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(text.count("\n", 0, m.start("code")), m["language"], m["code"], m["source"], m["part"])
        for m in _FENCE.finditer(text)
    ]
    return [block for block in found if block.language == "python"]


def anchors(page: Path) -> set[str]:
    """The names of the headings of a page, as links spell them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
