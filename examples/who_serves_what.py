"""The registry: which workers are alive, what they serve, and what no worker serves."""

import asyncio

import flowfabric as ff

app = ff.App(name="photos")


@app.task(lane="images", capabilities=["gpu"])
async def thumbnail(file: str) -> str:
    return f"small {file}"


async def main() -> None:
    async with app:
        async with ff.Worker(app, capabilities=["gpu"], concurrency=8):
            client = await app.client()
            for worker in await client.workers():
                print(f"{worker.worker_id.split('@')[0]} serves {', '.join(worker.kinds or ())}")
                print(f"in {', '.join(worker.lanes)} with {', '.join(worker.capabilities)}, {worker.slots} slots")

            lost = await thumbnail.options(lane="imgaes").submit("cat.png")  # a typing error
            for one in await client.engine.find_unserved([lost.execution_id]):
                print(f"no live worker serves {one.kind} in lane {one.lane_id}; {one.live_workers} alive")
            await lost.cancel()

            run = await thumbnail.submit("cat.png")
            print(await run.result())

        client = await app.client()
        print(f"alive afterwards: {len(await client.workers())}")


if __name__ == "__main__":
    asyncio.run(main())
