import asyncio

import flowfabric as ff

app = ff.App()


@app.task
async def greet(name: str) -> str:
    return f"hello {name}"


async def main() -> None:
    run = await greet.submit("world")
    print(await run.result())


if __name__ == "__main__":
    asyncio.run(main())
