"""The guide "Change code", followed word by word: versions saved, commands typed into one shell, output compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.following import save, shell
from tests.docs.pages import ROOT, fences

PAGE = ROOT / "docs" / "guides" / "change-code.md"


@pytest.mark.xdist_group("programs")
@pytest.mark.timeout(300)
def test_the_guide_can_be_followed(on_one_server: dict[str, str], tmp_path: Path) -> None:
    found = fences(PAGE)
    followed = 0
    # The guide "Test your tasks" has pytest-asyncio installed, and nothing configured.
    plugins = "_flowfabric_pytest,pytest_asyncio.plugin"
    on_one_server.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_PLUGINS=plugins, PYTEST_ADDOPTS="")
    on_one_server["PYTEST_DEBUG_TEMPROOT"] = str(tmp_path)
    with shell(tmp_path, on_one_server) as typing:
        for block, following in zip(found, [*found[1:], None], strict=True):
            where = f"{PAGE.name}:{block.line}"
            if block.language == "python" and block.file is not None:
                save(tmp_path, block, block.file)
            elif block.language == "sh":
                typing.follow(block.code, following, where)
                followed += 1
    assert followed == 6
