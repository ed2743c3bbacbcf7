"""Other queues, each at its best documented settings.

A peer's worker is a process of its own (`benchmarks/processes.py` says how it is started and stopped), so that
its event loop, logging and signal handlers are as its authors meant them.
"""
