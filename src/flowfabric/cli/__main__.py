"""`python -m flowfabric.cli`: the program without its script."""

from __future__ import annotations

from flowfabric.cli import main

main()
