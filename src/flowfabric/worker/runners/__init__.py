"""Threads and processes for functions that would block the event loop."""
