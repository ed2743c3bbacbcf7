"""Frozen values and pure functions, one noun per file. They know nobody: no database, no event loop."""
