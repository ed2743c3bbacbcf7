"""A film is probed, encoded several times at once and packaged. Subtitles fail, the package does not wait for them."""

import asyncio

import flowfabric as ff
from flowfabric import drawing

app = ff.App()
listening = iter(["nothing understood", "hello"])


@app.task
async def probe(file: str) -> dict[str, int]:
    return {"height": 1080, "seconds": 90}


@app.task
async def encode(file: str, height: int, source: dict[str, int]) -> str:
    return f"{file}.{min(height, source['height'])}p"


@app.task
async def subtitles(file: str, source: dict[str, int]) -> str:
    text = next(listening)
    if text == "nothing understood":
        raise ValueError(text)
    return text


@app.task
async def index(file: str, text: str) -> str:
    return f"{file} is found by {text!r}"


@app.task
async def package(renditions: list[str]) -> str:
    return " + ".join(renditions)


def pipeline(file: str) -> ff.Flow:
    flow = app.flow("media pipeline")
    source = flow.add(probe, file)
    renditions = [flow.add(encode, file, height, source, name=f"encode {height}p") for height in (480, 720, 1080)]
    flow.add(package, renditions)
    flow.add(index, file, flow.add(subtitles, file, source))  # a separate branch: it may fail alone
    return flow


async def main() -> None:
    async with ff.Worker(app):
        run = await pipeline("film").submit()
        try:
            await run.result(timeout=30)
        except ff.FlowFailed as failure:
            print("failed:", *failure.failures, "- skipped:", *failure.skipped)
            print("package:", failure.results["package"])
        for line in drawing.to_text(await run.graph()):
            print(drawing.plain(line))

        print("again:", *await run.replay())  # the failed node and the one skipped because of it, nothing else
        print((await run.result(timeout=30))["index"])


if __name__ == "__main__":
    asyncio.run(main())
