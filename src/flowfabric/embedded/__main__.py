"""The watcher as a script: this folder is run by its path, without the package around it and its imports."""

import os
import sys

# The folder becomes a separate package, last in the path, so that nothing beside it hides the standard library.
del sys.path[0]
sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from embedded.watcher import watch  # type: ignore[import-not-found]  # noqa: E402

watch(sys.argv[1:])
