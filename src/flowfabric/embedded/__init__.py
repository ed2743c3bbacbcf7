"""The Postgres that starts by itself. `server` is what others call.

The modules import each other relatively: the watcher runs this folder without the package around it.
"""
