"""Capabilities: an execution waits for a worker that can run it, and runs as soon as one starts."""

import asyncio

import flowfabric as ff

app = ff.App(name="studio")


@app.task(capabilities=["gpu"])
async def render(scene: str) -> str:
    return f"{scene}, rendered"


@app.task
async def notify(text: str) -> str:
    return f"told: {text}"


async def main() -> None:
    async with app, ff.Worker(app):  # a worker without a GPU
        client = await app.client()
        scene = await render.submit("sunrise")
        print(await (await notify.submit("a scene was submitted")).result())  # it does not wait behind the other

        found = None
        while found is None or found.blocking_reason != "waiting_for_capable_worker":
            await asyncio.sleep(0.05)  # the next claim that finds nothing notices that no worker covers it
            found = await client.engine.read_execution(scene.execution_id)
        print(found.public_state, "because", found.blocking_detail)

        async with ff.Worker(app, capabilities=["gpu"]):  # the late worker
            print(await scene.result())
            print(f"not covered now: {len(await client.engine.list_uncovered())}")


if __name__ == "__main__":
    asyncio.run(main())
