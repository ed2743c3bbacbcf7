"""Test a task: days pass in no time, a worker dies after every step, and the handler must do the same again.

Run it with pytest, or as a program.
"""

import sys
from datetime import timedelta

import pytest

import flowfabric as ff
from flowfabric.testing import Kit

app = ff.App()
mails: list[str] = []


def send(text: str) -> None:
    mails.append(text)


@app.task
async def welcome(ctx: ff.Context, name: str) -> str:
    await ctx.step("greet", send, f"hello {name}")
    await ctx.sleep(timedelta(days=2))
    await ctx.step("remind", send, f"still there, {name}?")
    return f"{name} was reminded"


@pytest.fixture(autouse=True)
def empty_mailbox() -> None:
    mails.clear()


@pytest.mark.asyncio
async def test_two_mails_are_sent(flowfabric_kit: Kit) -> None:
    assert await flowfabric_kit.run_inline(welcome, "Ada") == "Ada was reminded"
    assert mails == ["hello Ada", "still there, Ada?"]


@pytest.mark.asyncio
async def test_the_second_mail_is_sent_after_two_days(flowfabric_kit: Kit) -> None:
    flowfabric_kit.use(app)
    run = await welcome.submit("Ada")
    await flowfabric_kit.run_all()
    assert (await run.state(), mails) == (ff.State.DELAYED, ["hello Ada"])

    await flowfabric_kit.clock.advance(days=2)
    await flowfabric_kit.run_all()
    assert await run.result() == "Ada was reminded"


@pytest.mark.asyncio
async def test_no_mail_is_sent_twice_when_the_worker_dies(flowfabric_kit: Kit) -> None:
    with flowfabric_kit.crash_after("greet"):
        await flowfabric_kit.run_inline(welcome, "Ada")
    assert mails == ["hello Ada", "still there, Ada?"]


@pytest.mark.asyncio
async def test_a_crash_anywhere_changes_nothing(flowfabric_kit: Kit) -> None:
    report = await flowfabric_kit.crash_everywhere(welcome, "Ada")
    assert len(mails) == 2 * report.runs


@pytest.mark.asyncio
async def test_nothing_is_left_to_chance(flowfabric_kit: Kit) -> None:
    with flowfabric_kit.replay_always():
        await flowfabric_kit.run_inline(welcome, "Ada")


def test_a_synchronous_test_works_too(flowfabric_kit: Kit) -> None:
    assert flowfabric_kit.wait(flowfabric_kit.run_inline(welcome, "Ada")) == "Ada was reminded"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider"]))
