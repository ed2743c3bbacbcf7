"""How children find the parent's script: `__main__` has two names, one in each process."""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Final

# The script's name in a child, the usual one in Python: its `if __name__ == "__main__"` must not run again.
MAIN_IN_CHILD: Final = "__mp_main__"
_main_in_child: dict[str, str] | None = None  # the script, until it is loaded
_loading_main = False


def main_setup() -> dict[str, str] | None:
    """Return where a child finds the script of this process; None for a session without a file."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if not isinstance(path, str) or not os.path.isfile(path):
        return None
    return {"path": os.path.abspath(path), "package": getattr(main, "__package__", None) or ""}


def expect_main(main: dict[str, str] | None) -> None:
    """In a child: remember the script that `load_main` will load, from the parent's `main_setup`."""
    global _main_in_child  # noqa: PLW0603 - one child, one script
    _main_in_child = main


def load_main() -> None:
    """Load the parent's script in a child, when one of its names is needed."""
    global _main_in_child, _loading_main  # noqa: PLW0603 - one child, one script
    main, _main_in_child = _main_in_child, None
    if main is None:
        return
    loader = SourceFileLoader(MAIN_IN_CHILD, main["path"])
    spec = spec_from_file_location(MAIN_IN_CHILD, main["path"], loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    module.__package__ = main["package"]
    before = sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules[MAIN_IN_CHILD] = module
    _loading_main = True
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules["__main__"] = before
        del sys.modules[MAIN_IN_CHILD]
        _main_in_child = main
        raise
    finally:
        _loading_main = False


def is_loading_main() -> bool:
    """Whether this is a child that is loading the parent's script, where no work may be started."""
    return _loading_main
