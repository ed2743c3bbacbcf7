"""The tutorial, followed word by word: files saved, commands typed into one shell, output compared with the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.following import save, shell
from tests.docs.pages import ROOT, fences

PAGE = ROOT / "docs" / "tutorial.md"


@pytest.mark.timeout(600)
def test_the_tutorial_can_be_followed(surroundings: dict[str, str], tmp_path: Path) -> None:
    del surroundings["FLOWFABRIC_DATA_DIR"]  # a reader has set nothing
    place = tmp_path / "shop"
    place.mkdir()
    # And has no plugin of pytest but ours, and no pytest that runs another one.
    surroundings.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_PLUGINS="_flowfabric_pytest", PYTEST_ADDOPTS="")
    surroundings["PYTEST_DEBUG_TEMPROOT"] = str(tmp_path)
    found = fences(PAGE)
    followed = 0
    with shell(place, surroundings) as typing:
        for block, following in zip(found, [*found[1:], None], strict=True):
            where = f"{PAGE.name}:{block.line}"
            if block.language == "python":
                assert block.file is not None, where
                save(place, block, block.file)
            elif block.language == "sh" and block.remark is None:
                typing.follow(block.code, following, where)
                followed += 1
    assert followed > 15
