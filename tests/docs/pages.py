"""The pages of the documentation and the code on them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / page for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(
    r"^(?:<!-- (?:from (?P<source>\S+?)(?:: (?P<part>\w+))?|file (?P<file>[^>\n]+?)|(?P<remark>[^>\n]+)) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """One fenced block, and what the comment above it says.

    `source` is the example it must repeat, `part` the function or class of it. `file` is where the reader of a tutorial
    puts it. `remark` is for the test that follows the page.
    """

    line: int
    language: str
    code: str
    source: str | None = None
    part: str | None = None
    file: str | None = None
    remark: str | None = None

    @property
    def is_run_alone(self) -> bool:
        """Whether it is run as it is, after the blocks before it."""
        return self.language == "python" and self.source is None and self.file is None


def load(path: Path, name: str) -> ModuleType:
    """Run a file of the repository as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fences(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [Block(text.count("\n", 0, found.start("code")), **found.groupdict()) for found in _FENCE.finditer(text)]


def blocks(page: Path) -> list[Block]:
    """The Python blocks of a page, in order."""
    return [block for block in fences(page) if block.language == "python"]


def anchors(page: Path) -> set[str]:
    """The names of the headings of a page, as links spell them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
