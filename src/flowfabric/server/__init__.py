"""The HTTP server: the whole engine behind `/v1`, for programs in any language.

`operations.py` is the table of operations; `routes/` has them, one module per noun. Everything else is made from the
table: the routes of the app, the checks of every request, the OpenAPI document and the reference page.
"""

from __future__ import annotations

from flowfabric.server.app import create_app

__all__ = ["create_app"]
