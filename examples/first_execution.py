import asyncio

import flowfabric as ff


async def main() -> None:
    async with await ff.Engine.connect() as engine:  # FLOWFABRIC_DSN, or a Postgres that starts by itself
        await engine.create_execution(execution_kind="greet", input_payload=b"world")

        claimed = await engine.claim(kinds=["greet"], worker_id="greeter", worker_instance_id="greeter-1")
        assert claimed is not None
        await engine.complete(claimed.handle, b"hello " + claimed.input_payload)

        print(await engine.get_execution_result(claimed.execution_id))


asyncio.run(main())
