"""The agent of agent.py with pydantic-ai: its model and its tools are wrapped, and each call is a step.

The test model of pydantic-ai needs no network: it calls each tool once and reports the results. Replace it with the
name of a real one, such as "openai:gpt-5".
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from pydantic_ai import Agent, ModelMessagesTypeAdapter, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.models.test import TestModel
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.toolsets import FunctionToolset, ToolsetTool, WrapperToolset

import flowfabric as ff

MOST_TOKENS = 1_000  # of one model call
DANGEROUS = {"refund"}

# The adapter -----------------------------------------------------------------------------------------------------


class DurableModel(WrapperModel):
    """Each request is a step: held and settled against the budget, and streamed to readers."""

    def __init__(self, wrapped: Model, ctx: ff.Context) -> None:
        super().__init__(wrapped)
        self.ctx = ctx

    async def request(
        self, messages: list[ModelMessage], settings: ModelSettings | None, parameters: ModelRequestParameters
    ) -> ModelResponse:
        async with self.ctx.spend(tokens=MOST_TOKENS) as spend:
            stored = await self.ctx.step("model", self._ask, messages, settings, parameters)
            [response] = ModelMessagesTypeAdapter.validate_json(stored)
            assert isinstance(response, ModelResponse)
            spend.settle(tokens=response.usage.total_tokens)
        return response

    async def _ask(
        self, messages: list[ModelMessage], settings: ModelSettings | None, parameters: ModelRequestParameters
    ) -> str:
        print("asks the model")
        await self.ctx.emit({"turn": len(messages) // 2}, type="begin")
        async with self.wrapped.request_stream(messages, settings, parameters) as stream:
            async for event in stream:
                match event:
                    case (
                        PartStartEvent(part=TextPart(content=text))
                        | PartDeltaEvent(delta=TextPartDelta(content_delta=text))
                    ):
                        await self.ctx.emit(text, type="delta")
        return ModelMessagesTypeAdapter.dump_json([stream.get()]).decode()


@dataclass
class DurableToolset(WrapperToolset[ff.Context]):
    """Each tool call is a step; a dangerous one waits for a person."""

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[ff.Context], tool: ToolsetTool[ff.Context]
    ) -> Any:
        if name in DANGEROUS:
            decision = await ctx.deps.wait_for(f"approve {ctx.tool_call_id}", timeout="1 day", default=None)
            if decision is None or decision.name != "approved":
                return f"a person did not allow {name}"
        # The model may call tools side by side: the name says which call it is.
        return await ctx.deps.step(f"{name} {ctx.tool_call_id}", super().call_tool, name, tool_args, ctx, tool)


# The agent -------------------------------------------------------------------------------------------------------


def look_up(order: int) -> str:
    """Look up an order."""
    print("looks up the order")
    return "a lamp, arrived broken"


def refund(order: int) -> str:
    """Refund an order."""
    print("refunds")
    return "refunded"


assistant = Agent(TestModel(), deps_type=ff.Context, toolsets=[DurableToolset(FunctionToolset([look_up, refund]))])
app = ff.App(name="agent")


@app.task
async def agent(ctx: ff.Context, question: str, prompt: str = "Refund what arrives broken.") -> str:
    assert isinstance(assistant.model, Model)
    result = await assistant.run(question, instructions=prompt, model=DurableModel(assistant.model, ctx), deps=ctx)
    return result.output


async def main() -> None:
    async with ff.Worker(app):
        run = await agent.options(budget=ff.Budget(tokens=10_000)).submit("My lamp of order 17 is broken!")
        while not await run.waits():
            await asyncio.sleep(0.02)
        await run.approve(by="Ada")  # agent runs again from the top, and repeats no call
        print(await run.result())
        print("steps:", ", ".join(step.name.split()[0] for step in await run.steps() if step.kind == "step"))
        print(
            "streamed:",
            "".join([item.text async for item in run.stream() if isinstance(item, ff.Frame) and item.type == "delta"]),
        )
        print("tokens:", (await run.usage()).total["tokens"])


if __name__ == "__main__":
    asyncio.run(main())
