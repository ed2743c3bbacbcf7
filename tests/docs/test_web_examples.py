"""The examples of web frameworks, called by the test client of each: only valid callbacks are accepted."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import django
import django.conf
import httpx
import pytest
from django.test import Client as DjangoClient
from django.test import override_settings

import flowfabric as ff
from tests.docs.pages import ROOT

Post = Callable[[str, bytes, dict[str, str]], Awaitable[tuple[int, Any]]]


@pytest.fixture
def load(database: str) -> Iterator[Callable[[str], ModuleType]]:
    """Examples as modules of their own, on the test's database."""
    loaded: list[str] = []

    def one(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        loaded.append(name)
        spec.loader.exec_module(module)
        module.app.dsn = database
        return module

    yield one
    for name in loaded:
        del sys.modules[name]


def _browser(example: ModuleType) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(example.web), base_url="https://shop.example")


@asynccontextmanager
async def _starlette(example: ModuleType) -> AsyncIterator[Post]:
    async with _browser(example) as browser:

        async def post(link: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
            answer = await browser.post(link, params={"answer": "approved"}, content=body, headers=headers)
            return answer.status_code, answer.json()

        yield post


@asynccontextmanager
async def _flask(example: ModuleType) -> AsyncIterator[Post]:
    client = await asyncio.to_thread(ff.Client, example.app)
    service = example.make_web(client).test_client()

    async def post(link: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
        answer = await asyncio.to_thread(service.post, link, data=body, headers=headers)
        return answer.status_code, answer.get_json()

    yield post
    await asyncio.to_thread(client.close)


@asynccontextmanager
async def _django(example: ModuleType) -> AsyncIterator[Post]:
    if not django.conf.settings.configured:
        django.conf.settings.configure(DATABASES={})
        django.setup()
    service = DjangoClient(enforce_csrf_checks=True)

    async def post(link: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
        answer = await asyncio.to_thread(service.post, link, body, "application/json", headers=headers)
        return answer.status_code, answer.json()

    with override_settings(ROOT_URLCONF=example.__name__, ALLOWED_HOSTS=["testserver"]):
        yield post
    await asyncio.to_thread(example.flowfabric_client().close)


FRAMEWORKS = {"starlette": (_starlette, "mailbox"), "flask": (_flask, "handed_out"), "django": (_django, "handed_out")}


async def _suspended(example: ModuleType, letters: str) -> tuple[ff.Run[Any], str]:
    """An execution that waits, and its link."""
    task = next(iter(example.app.tasks.values()))
    run = await task.submit(7)
    link = await getattr(example, letters).get()
    while await run.state() is not ff.State.SUSPENDED:
        await asyncio.sleep(0.02)
    return run, link


def _forged(link: str) -> str:
    """The link with another token, well formed."""
    path, _, text = link.rpartition("/")
    callback = ff.parse_callback(text)
    kid, _, digest = callback.token.reveal().partition(":")
    other = f"{kid}:{'1' if digest[0] == '0' else '0'}{digest[1:]}"
    return f"{path}/{ff.callback_text(callback.execution_id, callback.waitpoint_id, other)}"


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_a_web_example_takes_a_good_callback_once_and_answers_every_other(
    framework: str, load: Callable[[str], ModuleType], plain_engine: ff.Engine
) -> None:
    opened, letters = FRAMEWORKS[framework]
    example = load(f"callbacks_{framework}")
    good = b'{"reference": "p-17"}'
    async with ff.Worker(example.app):
        run, link = await _suspended(example, letters)
        async with opened(example) as post:

            async def send(to: str, body: bytes = good, **headers: str) -> tuple[int, str, str | None]:
                status, answer = await post(to, body, headers)
                return status, answer["outcome"], answer.get("signal_id")

            assert await send(_forged(link)) == (401, "unauthorized", None)
            assert await send(link[:-3]) == (404, "unknown", None)
            assert await send(link, b"not json") == (400, "not_json", None)
            assert await send(link, b'"' + b"x" * 70_000 + b'"') == (413, "payload_too_large", None)
            assert await send(link, b" " * (256 * 1024 + 1)) == (413, "too_large", None)
            assert await run.state() is ff.State.SUSPENDED

            # The Starlette example answers people, who send no key: a second click finds nothing to decide.
            key = {} if framework == "starlette" else {"Idempotency-Key": "p-17"}
            status, outcome, signal_id = await send(link, **key)
            assert (status, outcome) == (200, "resumed")
            assert "7" in await run.result()
            again = (404, "unknown", None) if framework == "starlette" else (200, "duplicate", signal_id)
            assert await send(link, **key) == again
            assert await send(link) == (404, "unknown", None)


async def test_opening_a_link_decides_nothing_and_a_decision_needs_a_name(
    load: Callable[[str], ModuleType], plain_engine: ff.Engine
) -> None:
    example = load("callbacks_starlette")
    async with ff.Worker(example.app):
        run, link = await _suspended(example, "mailbox")
        async with _browser(example) as browser:
            shown = await browser.get(link)
            assert (shown.status_code, "manager" in shown.text) == (200, True)
            assert (await browser.get(_forged(link))).status_code == 404
            nameless = await browser.post(link)
            assert (nameless.status_code, nameless.json()) == (
                400,
                {"outcome": "invalid_input", "field": "name", "problem": "empty", "allowed": "a non-empty text"},
            )
            assert await run.state() is ff.State.SUSPENDED
            assert (await browser.post(f"{link}?answer=rejected")).status_code == 200
            assert await run.result() == "order 7 is not refunded"
            assert (await browser.get(link)).status_code == 404
