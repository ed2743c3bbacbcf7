"""The operations, one module per noun. Each has its records, its handlers and a tuple `OPERATIONS`."""

from __future__ import annotations
