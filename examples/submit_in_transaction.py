"""Store an order and submit its execution in one transaction: both exist, or neither does."""

import asyncio

import asyncpg

import flowfabric as ff
from flowfabric.values.lease import Operator


async def place_order(engine: ff.Engine, connection: asyncpg.Connection, item: str, in_stock: int) -> ff.ExecutionId:
    async with connection.transaction():
        order = await connection.fetchval("insert into shop_order (item) values ($1) returning id", item)
        submitted = await engine.create_execution(
            execution_kind="ship",
            idempotency_key=f"order-{order}",
            input_payload=item.encode(),
            connection=connection,  # this transaction, not one of the engine's
        )
        if in_stock < 1:
            raise LookupError(f"{item} is sold out")  # rolls back the order and the execution
    return submitted.execution_id


async def main() -> None:
    async with await ff.Engine.connect() as engine:
        connection = await asyncpg.connect(engine.dsn)
        await connection.execute("drop table if exists shop_order")
        await connection.execute(
            "create table shop_order (id uuid primary key default gen_random_uuid(), item text not null)"
        )

        shipped = await place_order(engine, connection, "lamp", in_stock=3)
        print("lamp:", await engine.read_execution_state(shipped))

        try:
            await place_order(engine, connection, "chair", in_stock=0)
        except LookupError as error:
            print("chair:", error)

        orders = await connection.fetchval("select count(*) from shop_order")
        waiting = await engine.find_executions(kinds=["ship"], states=[ff.State.WAITING])
        print(f"{orders} order, {len(waiting.items)} execution waiting")

        await engine.cancel(Operator(shipped), "the end of the example")
        await connection.close()


asyncio.run(main())
