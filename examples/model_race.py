"""Four models are asked at once. Two answers are enough: the other models are stopped, and a judge takes the two.

A reader follows the models token by token while they race.
"""

import asyncio

import flowfabric as ff

app = ff.App()
SECONDS = {"small": 0.05, "medium": 0.1, "large": 60.0, "huge": 90.0}  # thinking time of each model


@app.task
async def ask(ctx: ff.Context, model: str, question: str) -> str:
    answer = f"{model} says {len(question)}"
    try:
        for token in answer.split():
            await asyncio.sleep(SECONDS[model] / 3)  # a request, in real life
            await ctx.emit(token)
    except asyncio.CancelledError:
        print(f"{model} is stopped")
        raise
    return answer


@app.task
async def judge(answers: list[str]) -> str:
    return f"{len(answers)} answers, the first: {answers[0]}"


def race(question: str) -> ff.Flow:
    flow = app.flow("model race")
    answers = [flow.add(ask, model, question, name=model) for model in SECONDS]
    flow.add(judge, ff.quorum(2, answers, cancel_rest=True))
    return flow


async def main() -> None:
    async with ff.Worker(app):
        run = await race("how long is this?").submit()
        said: dict[str | None, list[str]] = {}
        async for item in run.stream(timeout=30):  # of all nodes, until the flow has ended
            if isinstance(item, ff.Frame):
                said.setdefault(item.node, []).append(item.text)
        results = await run.result(timeout=30)
        print("followed:", *said["small"])
        print("judge:", results["judge"])
        print("results:", *results)
        for name, state in (await run.states()).items():
            print(f"{name}: {state}")


if __name__ == "__main__":
    asyncio.run(main())
