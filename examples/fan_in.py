"""A release continues when three subsystems have reported. Each has a token for its own waitpoint and for no other."""

import asyncio

import flowfabric as ff

app = ff.App()


@app.task
async def release(ctx: ff.Context, version: str) -> str:
    reports = await ctx.wait_for(ff.all_of("db", "cache", "flags"), payload=str, timeout="10 minutes")
    return f"{version}: " + ", ".join(f"{report.key} {report.payload}" for report in reports)


async def main() -> None:
    async with ff.Worker(app):
        client = await app.client()
        run = await release.submit("v7")
        while await run.state() is not ff.State.SUSPENDED:
            await asyncio.sleep(0.05)

        waitpoints = {one.waitpoint_key: one.waitpoint_id for one in await run.waits()}
        tokens = {
            key: await client.engine.read_waitpoint_token(run.execution_id, one) for key, one in waitpoints.items()
        }

        wrong = ff.callback_text(run.execution_id, waitpoints["cache"], tokens["db"])
        print("the token of db at cache:", (await client.receive(wrong, b'"migrated"')).outcome)

        for key, report in {"db": b'"migrated"', "cache": b'"warm"', "flags": b'"set"'}.items():
            right = ff.callback_text(run.execution_id, waitpoints[key], tokens[key])
            print(f"{key}:", (await client.receive(right, report)).outcome)

        print(await run.result())


if __name__ == "__main__":
    asyncio.run(main())
