"""Loads the app that `pkg.mod:app` names, with an error that says what is wrong if it cannot."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli._database import near
from flowfabric.cli._output import printable
from flowfabric.errors import FlowFabricError, InvalidInput

if TYPE_CHECKING:
    from flowfabric.app.app import App

AppName = Annotated[
    str,
    typer.Argument(metavar="PKG.MOD:APP", help="The app: a module and the name of an App in it.", show_default=False),
]
AppOption = Annotated[
    str | None,
    typer.Option(
        "--app",
        metavar="PKG.MOD:APP",
        help="Decode payloads with the codecs of this app.",
        show_default=False,
    ),
]
_ALLOWED = "pkg.mod:app, a module and the name of an App in it"


def load_app(name: str) -> App:
    """Import the app's module, from the current directory first, as `python -m` does, and return the app."""
    from flowfabric.app.app import App  # noqa: PLC0415

    module_name, colon, attribute = name.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        meant = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise InvalidInput(f"{name} is a path; did you mean {meant}:{attribute or 'app'}?", field="APP")
    if not module_name or not all(part.isidentifier() for part in module_name.split(".")):
        raise InvalidInput(f"got {name!r}", field="APP", allowed=_ALLOWED)
    module = _imported(module_name)
    apps = {key: value for key, value in vars(module).items() if isinstance(value, App)}
    if not colon and len(apps) == 1:
        return next(iter(apps.values()))
    if not attribute:
        raise _refused(f"{name} does not say which app", module_name, apps)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise _refused(f"{module_name} has no {printable(attribute)}", module_name, apps, attribute)
        found = getattr(found, part)
    if not isinstance(found, App):
        raise _refused(f"{name} is a {type(found).__name__}, not an App", module_name, apps, attribute)
    return found


def _refused(problem: str, module: str, apps: dict[str, App], attribute: str = "") -> InvalidInput:
    names = [f"{module}:{name}" for name in apps]
    if not names:
        return InvalidInput(f"{problem}, and there is no App in {module}", field="APP", allowed=_ALLOWED)
    hint = near(f"{module}:{attribute}", names) or f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
    return InvalidInput(f"{problem}; {hint}", field="APP")


def _imported(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            hint = near(name, _modules(Path(here), name.count(".") + 1)) or f"searched {here} and the environment"
            raise InvalidInput(f"there is no module {missing}; {hint}", field="APP") from None
        raise InvalidInput(
            f"importing {name} failed{_place(error)}: there is no module {missing}", field="APP"
        ) from None
    except FlowFabricError as error:
        raise InvalidInput(f"importing {name} failed{_place(error)}: {error}", field="APP") from None
    except (Exception, SystemExit) as error:
        words = printable(f"{type(error).__name__}: {error}")
        raise InvalidInput(f"importing {name} failed{_place(error)}: {words}", field="APP") from error


def _place(error: BaseException) -> str:
    """The line of the user's code that raised it: ` (tasks.py:12)`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({_short(error.filename)}:{error.lineno})"
    ours = str(Path(__file__).resolve().parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((ours, "<frozen importlib")) and "importlib" not in frame.filename:
            return f" ({_short(frame.filename)}:{frame.lineno})"
    return ""


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def _modules(root: Path, depth: int) -> Iterator[str]:
    """Modules below a directory, to suggest a similar one."""
    for path in root.iterdir():
        if path.name.startswith((".", "_")) or not path.stem.isidentifier():
            continue
        if path.suffix == ".py":
            yield path.stem
        elif path.is_dir() and (depth > 1 or (path / "__init__.py").exists()):
            yield path.name
            if depth > 1:
                for name in _modules(path, depth - 1):
                    yield f"{path.name}.{name}"
