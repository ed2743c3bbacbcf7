"""A task fails in its last step and is retried: finished steps do not run again."""

import asyncio

import flowfabric as ff

app = ff.App()
lines = iter(["down", "up"])


async def write(topic: str) -> str:
    print("writing about", topic)
    return f"all about {topic}"


def draw(topic: str) -> bytes:  # a synchronous function runs in a thread
    print("drawing", topic)
    return b"<svg/>"


async def upload(text: str, picture: bytes) -> str:
    print("uploading")
    if next(lines) == "down":
        raise ConnectionError("the line is down")
    return f"https://example.com/{text.replace(' ', '-')}"


@app.task(retry=ff.RetryPolicy(max_retries=3, backoff=ff.Fixed(delay=0.2)))
async def publish(ctx: ff.Context, topic: str) -> str:
    # Remembered by name, so their order does not matter.
    text, picture = await asyncio.gather(ctx.step("write", write, topic), ctx.step("draw", draw, topic))
    return await ctx.step("upload", upload, text, picture)


async def main() -> None:
    async with ff.Worker(app):
        run = await publish.submit("fjords")
        print(await run.result())
        for step in await run.steps():
            print(f"{step.name}: done in attempt {step.attempt_index + 1}")


if __name__ == "__main__":
    asyncio.run(main())
