"""Store an order and submit its task in one transaction: both exist, or neither does."""

import asyncio

import asyncpg

import flowfabric as ff

app = ff.App()


@app.task(retry=ff.RetryPolicy(max_retries=5), tags={"team": "warehouse"})
async def ship(order: str, item: str) -> str:
    return f"{item} of order {order} is on its way"


async def place_order(connection: asyncpg.Connection, item: str, in_stock: int) -> ff.Run[str]:
    async with connection.transaction():
        order = await connection.fetchval("insert into shop_order (item) values ($1) returning id::text", item)
        run = await ship.submit_in(connection, order, item)
        if in_stock < 1:
            raise LookupError(f"{item} is sold out")  # rolls back the order and the submission
    return run


async def main() -> None:
    async with app:
        client = await app.client()
        connection = await asyncpg.connect(client.engine.dsn)
        await connection.execute("drop table if exists shop_order")
        await connection.execute(
            "create table shop_order (id uuid primary key default gen_random_uuid(), item text not null)"
        )

        run = await place_order(connection, "lamp", in_stock=3)
        print("lamp:", (await run.state()).value)

        try:
            await place_order(connection, "chair", in_stock=0)
        except LookupError as error:
            print("chair:", error)

        orders = await connection.fetchval("select count(*) from shop_order")
        waiting = await client.find(kind="ship", states=["waiting"])
        print(f"{orders} order, {len(waiting.items)} execution waiting")

        await run.cancel("the end of the example")
        await connection.close()


asyncio.run(main())
