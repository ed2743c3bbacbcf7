"""Schedules submit tasks again and again: by a cron expression in a time zone, and every second."""

import asyncio

import flowfabric as ff

app = ff.App()
beats: asyncio.Queue[str] = asyncio.Queue()


@app.task
async def report(region: str) -> str:
    return f"the report of {region}"


@app.task
async def beat(ctx: ff.Context) -> None:
    await beats.put(ctx.tags["schedule.time"])


app.schedule(report, "north", name="morning report", cron="30 7 * * 1-5", timezone="Europe/Berlin", catch_up="one")
app.schedule(beat, every="1 second")


async def main() -> None:
    async with ff.Worker(app):  # stores the app's schedules when it starts
        client = await app.client()
        for schedule in await client.schedules():
            print(schedule.name, schedule.timing, "next at", schedule.next_at)

        for _ in range(2):
            print("beat of", await beats.get())

        for schedule in await client.schedules():  # they are stored: the next worker would fire them too
            await client.delete_schedule(schedule.name)


if __name__ == "__main__":
    asyncio.run(main())
