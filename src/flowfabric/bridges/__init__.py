"""Submit inside a transaction of your own, through the driver you already use.

One module per library: `asyncpg`, `psycopg`, `sqlalchemy`, `django`. Each offers `create_execution` and `create_many`
with the fields of `Engine`, taking the connection first; where the library is both, the twins to await end in `_async`.
The execution exists when the caller's transaction commits, and workers are woken then; rolled back, it never was.

Nothing is decided here: `flowfabric._postgres.create_call` renders the call and reads the answer for every driver. A
bad argument is refused before the database is asked, so the caller's transaction stays usable; what the driver itself
raises is passed on as it is.
"""
