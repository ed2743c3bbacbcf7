"""A durable consumer: what it writes and the move of its cursor are one transaction, so each event counts once."""

import asyncio
from collections.abc import Sequence

import asyncpg

import flowfabric as ff
from flowfabric.values.event import CompletionEvent, EventFilter

app = ff.App()
invoices = ff.Consumer("invoices", family="completion", filter=EventFilter(kind="ship"))
crashes = [True]


@app.task
async def ship(item: str) -> str:
    return f"{item} is on its way"


async def write_invoices(connection: asyncpg.Connection, events: Sequence[CompletionEvent]) -> None:
    for event in events:
        await connection.execute("insert into invoice (execution_id) values ($1)", event.execution_id)
    if crashes:
        crashes.clear()
        raise ConnectionError("the program dies after the inserts")


async def main() -> None:
    async with app, ff.Worker(app):
        client = await app.client()
        connection = await asyncpg.connect(client.engine.dsn)
        await connection.execute("drop table if exists invoice; create table invoice (execution_id uuid)")
        await invoices.register(app)  # a new consumer begins here
        for item in ("lamp", "chair", "desk"):
            await (await ship.submit(item)).result()

        try:
            await invoices.run_once(app, write_invoices)
        except ConnectionError as error:
            print(f"{error}: {await connection.fetchval('select count(*) from invoice')} invoices")
        print(f"again: {await invoices.run_once(app, write_invoices)} events")
        print(f"once more: {await invoices.run_once(app, write_invoices)} events")
        print(f"{await connection.fetchval('select count(distinct execution_id) from invoice')} invoices")

        await connection.execute("drop table invoice")
        await client.engine.delete_consumer(invoices.name)
        await connection.close()


asyncio.run(main())
