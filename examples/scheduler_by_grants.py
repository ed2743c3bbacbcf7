"""A scheduler that decides which worker runs what: it asks for grants and passes them on."""

import asyncio

import flowfabric as ff
from flowfabric.errors import WorkerAtCapacity
from flowfabric.values.grant import Granted, ReclaimGranted

app = ff.App(name="agents")


@app.task(lane="scheduled")
async def answer(question: str) -> str:
    await asyncio.sleep(0.05)
    return f"{question}: 42"


async def pass_on(grant: Granted | ReclaimGranted, worker: ff.Worker) -> None:
    """Give a grant to a worker; one without a free slot leaves it as it is."""
    while True:
        try:
            await worker.claim_from_grant(grant)
        except WorkerAtCapacity:
            await asyncio.sleep(0.02)  # or another worker of the same pool
        else:
            return


async def main() -> None:
    async with app, ff.Worker(app, lanes=["own work"], concurrency=2) as worker:
        client = await app.client()
        runs = [await answer.submit(f"question {number}") for number in (1, 2, 3)]

        grants = await client.engine.claim_for_worker(
            "scheduled", worker_id=worker.worker_id, worker_instance_id=worker.instance_id, max_grants=3
        )
        print(f"{len(grants)} grants for {worker.concurrency} slots")
        for grant in grants:
            await pass_on(grant, worker)
        for run in runs:
            print(await run.result())


if __name__ == "__main__":
    asyncio.run(main())
