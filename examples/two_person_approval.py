"""A deployment waits for two people. It occupies no worker while they think, and one person does not count twice."""

import asyncio

import flowfabric as ff
from flowfabric.values.signal import Accepted

app = ff.App()


async def build(version: str) -> str:
    return f"image of {version}"


async def roll_out(image: str) -> str:
    return f"{image} is live"


@app.task
async def deploy(ctx: ff.Context, version: str) -> str:
    image = await ctx.step("build", build, version)
    two_people = ff.from_sources(2, "approval", name="approved")
    answers = await ctx.wait_for(two_people, timeout="1 hour", on_timeout="fail", reason="approval")
    live = await ctx.step("roll out", roll_out, image)
    return f"{live}, approved by {' and '.join(answer.source_identity for answer in answers)}"


async def main() -> None:
    async with ff.Worker(app):
        run = await deploy.submit("v7")
        while await run.state() is not ff.State.SUSPENDED:
            await asyncio.sleep(0.05)

        for waitpoint in await run.waits():
            print("waits at:", waitpoint.waitpoint_key, "for", *waitpoint.required_signal_names)

        for person in ("alice", "alice", "bob"):  # alice is impatient and clicks twice
            answer = await run.approve(by=person)
            print(f"{person}:", answer.effect if isinstance(answer, Accepted) else "known already")

        print(await run.result())


if __name__ == "__main__":
    asyncio.run(main())
