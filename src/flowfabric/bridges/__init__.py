"""Submit inside your own transaction, through the driver you already use.

One module per library: `asyncpg`, `psycopg`, `sqlalchemy`, `django`. Each offers `create_execution` and `create_many`
with the fields of `Engine`, and the connection as first argument; async twins end in `_async` if a library is both.
When the transaction commits, the execution exists and workers are notified; after a rollback it never existed.

`flowfabric._postgres.create_call` builds the call and reads its result for every driver. A bad argument is refused
before the database is called, so that the transaction stays usable; errors of the driver are passed on unchanged.
"""
