"""The embedded Postgres. Callers use `server`.

The modules import each other relatively: the watcher runs this folder without the package around it.
"""
