"""A deployment keeps a summary of where it is, and logs what it does; another program watches both."""

import asyncio

import flowfabric as ff

app = ff.App()


@app.task
async def deploy(ctx: ff.Context, version: str) -> str:
    await ctx.summarize({"version": version, "steps": dict.fromkeys(("build", "migrate", "ship"), "waits")})
    for step in ("build", "migrate", "ship"):
        await ctx.summarize({"steps": {step: "runs"}})
        await ctx.print(f"{step} {version}")
        await asyncio.sleep(0.05)
        await ctx.summarize({"steps": {step: "done"}})
    await ctx.summarize({"link": f"https://shop.example/{version}"})
    return version


async def main() -> None:
    async with ff.Worker(app):
        run = await deploy.submit("v7")
        async for item in run.stream():
            if isinstance(item, ff.Frame) and item.mode == "durable":
                print(item.text, end="")
        summary = await run.summary()
        assert summary is not None
        print(f"after {summary.version} changes: {summary.document}")


if __name__ == "__main__":
    asyncio.run(main())
