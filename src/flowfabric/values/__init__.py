"""Frozen values and pure functions, one noun per file. They use no database and no event loop."""
